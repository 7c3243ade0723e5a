"""Masked patch prediction as a task for the training loop.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...configuration_plain_vit import PlainViTConfig
from ...errors import TrainingError
from ...modeling_plain_vit import PlainViTForMaskedImageModeling
from ..arguments import PretrainArguments
from ..data.augmentation import input_size
from .unlabelled import Start, Unlabelled


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

    def count(self, grid_size: tuple[int, int]) -> int:
        """Return the number of patches to predict in a patch grid (rows, columns).

        Raises:
            TrainingError: The grid is not a multiple of the block, or is a single block.
        """
        (h, w), block = grid_size, self.block
        if h % block or w % block:
            raise TrainingError(
                f"Blocks of {block} x {block} patches do not fill the grid of {h} x {w}: change the block."
            )
        if (blocks := h // block * (w // block)) == 1:
            raise TrainingError(f"The grid of {h} x {w} patches is one block: nothing is left to predict it from.")
        return max(1, round(self.ratio * blocks)) * block**2


# By target or method. Dosovitskiy et al. 2021, appendix B.1.2; Xie et al. 2022, section 4.1.2 (with blocks of 32
# pixels); He et al. 2022, section 3.
CORRUPTIONS = {
    "mean_color": Corruption(0.5, hidden=0.8, exchanged=0.1),
    "pixels": Corruption(0.6),
    "mae": Corruption(0.75),
}
# Its options, by field.
OPTIONS = {"ratio": "mask_ratio", "hidden": "hidden_share", "exchanged": "exchanged_share", "block": "mask_block"}


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
    count = corruption.count(grid_size) // block**2
    rows, columns = h // block, w // block
    chosen = torch.zeros(rows * columns, dtype=torch.bool)
    chosen[torch.randperm(rows * columns, generator=generator)[:count]] = True
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


def corrupted_patches(
    corruption: Corruption, patch_size: tuple[int, int], pixels: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return what is predicted of an image, and what the model sees of it; see `UnlabelledImages`."""
    (height, width), (rows, columns) = pixels.shape[-2:], patch_size
    predicted, hidden, seen = draw_corruption((height // rows, width // columns), corruption, generator)
    return {"seen": rearrange_patches(pixels, patch_size, seen), "hidden": hidden, "predicted": predicted}


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


def corruption_of(options: PretrainArguments) -> Corruption:
    """Return the masking: from the options, or as published for the method and the target."""
    given = {field: getattr(options, name) for field, name in OPTIONS.items() if getattr(options, name) is not None}
    return replace(CORRUPTIONS[options.target if options.method == "masked_patches" else options.method], **given)


def masked_patches(options: PretrainArguments, start: Start) -> Unlabelled:
    """Return masked patch prediction as a task."""
    start.require_maskable()
    fields = {"use_mask_token": True, "reconstruction_target": options.target}
    model = PlainViTForMaskedImageModeling(PlainViTConfig.from_dict({**start.config.to_dict(), **fields}))
    start.fill(model.vit)
    corruption = corruption_of(options)
    predicted = corruption.count(model.config.grid_of(*input_size(start.image_processor)))
    return Unlabelled(
        MaskedPrediction(model),
        start.image_processor,
        saved={"model": "."},
        summary="by predicting masked patches",
        settings={name: getattr(corruption, field) for field, name in OPTIONS.items()},
        targets=partial(corrupted_patches, corruption, model.config.patch_shape),
        predictions=predicted if options.target == "mean_color" else 0,
    )
