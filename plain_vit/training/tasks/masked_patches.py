"""Masked patch prediction as a task for the training loop.

All randomness is a function of the seed, the epoch and the row of the image, as in data sampling.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import DataError, TrainingError
from ...modeling_plain_vit import PlainViTForMaskedImageModeling
from ...system.extras import needs
from ..data.augmentation import TrainingTransform
from ..data.decoding import as_files
from ..data.sampling import randomness
from ..loop import Batch, Means, Task

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from datasets import Dataset


@dataclass(frozen=True)
class Corruption:
    """How the patches to predict are corrupted.

    Args:
        ratio: Fraction of the patches to predict, in (0, 1).
        hidden: Fraction of the predicted patches replaced by the mask token.
        exchanged: Fraction of the predicted patches replaced by another patch of the image; the rest are unchanged.
        block: Side, in patches, of the squares that are masked together.

    Raises:
        TrainingError: A fraction is out of range.
    """

    ratio: float
    hidden: float = 1.0
    exchanged: float = 0.0
    block: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise TrainingError(f"The mask ratio is {self.ratio}: expected a number in (0, 1).")
        if min(self.hidden, self.exchanged) < 0 or self.hidden + self.exchanged > 1:
            raise TrainingError(
                f"{self.hidden} of the predicted patches are hidden and {self.exchanged} exchanged: expected fractions "
                "with a sum of at most 1."
            )
        if self.block < 1:
            raise TrainingError(f"The mask block is {self.block}: expected at least 1 patch along each side.")


# Dosovitskiy et al. 2021, appendix B.1.2; Xie et al. 2022, section 4.1.2 (with blocks of 32 pixels).
CORRUPTIONS = {"mean_color": Corruption(0.5, hidden=0.8, exchanged=0.1), "pixels": Corruption(0.6)}


def draw_corruption(
    grid_size: tuple[int, int], corruption: Corruption, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the patches to predict in one image, and their corruption.

    Every image has the same number of predicted patches, so the mean over a batch is the mean over its images.

    Args:
        grid_size: Patch grid (rows, columns).
        corruption: Fractions and block size.
        generator: Random generator.

    Returns:
        Masks of the predicted and of the hidden patches, each of shape (h, w), and for each of the N positions the
        number of the patch shown there.

    Raises:
        TrainingError: The grid is not a multiple of the block, or is a single block.
    """
    (h, w), block = grid_size, corruption.block
    if h % block or w % block:
        raise TrainingError(f"Blocks of {block} x {block} patches do not fill the grid of {h} x {w}: change the block.")
    rows, columns = h // block, w // block
    if rows * columns == 1:
        raise TrainingError(f"The grid of {h} x {w} patches is one block: nothing is left to predict it from.")
    chosen = torch.zeros(rows * columns, dtype=torch.bool)
    chosen[torch.randperm(rows * columns, generator=generator)[: max(1, round(corruption.ratio * rows * columns))]] = (
        True
    )
    predicted = chosen.view(rows, columns).repeat_interleave(block, 0).repeat_interleave(block, 1)
    places = predicted.flatten().nonzero().flatten()
    places = places[torch.randperm(len(places), generator=generator)]
    hidden_count, exchanged_count = (round(share * len(places)) for share in (corruption.hidden, corruption.exchanged))
    hidden = torch.zeros(h * w, dtype=torch.bool)
    hidden[places[:hidden_count]] = True
    exchanged = places[hidden_count : hidden_count + exchanged_count]
    seen = torch.arange(h * w)
    seen[exchanged] = (exchanged + torch.randint(1, h * w, exchanged.shape, generator=generator)) % (h * w)
    return predicted, hidden.view(h, w), seen


def rearrange_patches(pixels: torch.Tensor, patch_size: tuple[int, int], seen: torch.Tensor) -> torch.Tensor:
    """Rearrange the patches of an image.

    Args:
        pixels: Image of shape (C, H, W).
        patch_size: Patch (height, width) in pixels.
        seen: For each of the N positions, the number of the patch to put there.
    """
    channels, height, width = pixels.shape
    (rows, columns), (h, w) = patch_size, (height // patch_size[0], width // patch_size[1])
    patches = pixels.view(channels, h, rows, w, columns).permute(1, 3, 0, 2, 4).flatten(0, 1)[seen]  # N C rows columns
    return patches.view(h, w, channels, rows, columns).permute(2, 0, 3, 1, 4).reshape(channels, height, width)


class CorruptedImages(torch.utils.data.Dataset):
    """Images with masks, indexed by epoch and row, the keys of `ShuffledStream`.

    Args:
        split: Rows with an RGB `image`.
        transform: Maps a stored image to pixels (C, H, W) of a size divisible by the patch size.
        patch_size: Patch (height, width) in pixels.
        corruption: The corruption.
        seed: Seed of augmentation and masks, combined with epoch and row.
        epoch: Fixed epoch for an evaluated split, which is indexed only by row.

    Raises:
        DataError: An image cannot be read.
    """

    def __init__(
        self,
        split: Dataset,
        transform: TrainingTransform,
        patch_size: tuple[int, int],
        corruption: Corruption,
        seed: int,
        *,
        epoch: int | None = None,
    ) -> None:
        self.files, self.transform, self.patch_size = as_files(split), transform, patch_size
        self.corruption, self.seed, self.epoch = corruption, seed, epoch

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: Any) -> dict[str, torch.Tensor]:
        epoch, row = place if self.epoch is None else (self.epoch, place)
        levels, broken = self.transform.read(self.files[row]["image"], f"row {row}", (self.seed, epoch, row))
        if levels is None:
            raise DataError(f"An image cannot be read: {broken}. Repair it, or remove it.")
        pixels = self.transform.normalize(levels)
        (height, width), (rows, columns) = pixels.shape[-2:], self.patch_size
        generator = torch.Generator().manual_seed(randomness(self.seed, epoch, row, 1))
        grid_size = (height // rows, width // columns)
        predicted, hidden, seen = draw_corruption(grid_size, self.corruption, generator)
        return {
            "pixel_values": pixels,
            "seen": rearrange_patches(pixels, self.patch_size, seen),
            "hidden": hidden,
            "predicted": predicted,
        }


class MaskedPrediction(nn.Module):
    """A masked image model with its loss over all predicted patches, including visible ones.

    Args:
        model: The model.
    """

    def __init__(self, model: PlainViTForMaskedImageModeling) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        pixel_values: torch.Tensor,
        seen: torch.Tensor,
        hidden: torch.Tensor,
        predicted: torch.Tensor,
        each: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss and the number of correct predictions, which is 0 for pixel targets.

        Args:
            pixel_values: The original images, of shape (B, C, H, W).
            seen: The corrupted images, of shape (B, C, H, W).
            hidden: Mask of the hidden patches, of shape (B, h, w).
            predicted: Mask of the predicted patches, of shape (B, h, w).
            each: Return both results per image, of shape (B,).
        """
        output: Any = self.model.vit(seen, bool_masked_pos=hidden, return_dict=True)
        features = self.model.tokens_to_map(output.last_hidden_state, *seen.shape[-2:])
        if not each:
            return self._judge(features, pixel_values, predicted)
        one_by_one = zip(features.split(1), pixel_values.split(1), predicted.split(1), strict=True)
        losses, right = zip(*(self._judge(*parts) for parts in one_by_one), strict=True)
        return torch.stack(losses), torch.stack(right)

    def _judge(
        self, features: torch.Tensor, pixel_values: torch.Tensor, predicted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decoder: Any = self.model.decoder
        _, logits, loss = decoder(features, pixel_values, predicted)
        if logits is None:
            return loss, loss.new_zeros(())
        right = logits.argmax(dim=-1) == decoder.colors(pixel_values).flatten(1)
        return loss, (right & predicted.flatten(1)).sum()


class MaskedPatches(Task[Means]):
    """Masked patch prediction.

    Args:
        model: the masked image model.
        image_processor: the model's image processor.
        predicted: number of predicted patches per image.
    """

    def __init__(self, model: PlainViTForMaskedImageModeling, image_processor: Any, predicted: int) -> None:
        self.image_processor = image_processor
        self.measures = {"accuracy": predicted} if model.config.reconstruction_target == "mean_color" else {}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch and, for colours, the number of correct predictions."""
        loss, right = model(**batch)
        return loss, dict.fromkeys(self.measures, right)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch], accelerator: Accelerator, *, size: int) -> Means:
        """Return the mean loss over the images and, for colours, the accuracy."""
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)  # on the CPU, since MPS has no float64
        for batch in batches:
            losses, right = model(**batch, each=True)
            values = torch.stack([losses.float(), right.float(), torch.ones_like(losses.float())], dim=1)
            sums += accelerator.gather_for_metrics(values).cpu().double().sum(dim=0)
        loss, all_right, count = sums.tolist()
        if count != size:
            raise TrainingError(f"{int(count)} images were evaluated, but the set has {size}.")
        accuracy = {name: all_right / count / predicted for name, predicted in self.measures.items()}
        return Means({"loss": loss / count, **accuracy}, int(count))

    def save(self, folder: Path, model: nn.Module, accelerator: Accelerator) -> None:
        """Save a `PlainViTForMaskedImageModeling` to start fine-tuning from."""
        state = {name.removeprefix("model."): tensor for name, tensor in accelerator.get_state_dict(model).items()}
        bare = accelerator.unwrap_model(model).model
        bare.save_pretrained(folder, state_dict=state, is_main_process=accelerator.is_main_process)
        if accelerator.is_main_process:
            self.image_processor.save_pretrained(folder)
