"""Pre-training on unlabelled images as a task for the training loop, whatever is learnt from them.

All randomness is a function of the seed, the epoch and the row of the image, as in data sampling.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...configuration_plain_vit import PlainViTConfig
from ...errors import DataError, TrainingError
from ...modeling_plain_vit import PlainViTModel
from ...system.extras import needs
from ..data.augmentation import TrainingTransform, training_transform
from ..data.decoding import as_files
from ..data.sampling import randomness
from ..loop import Batch, Means, Task

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from datasets import Dataset

Targets = Callable[[torch.Tensor, torch.Generator], dict[str, torch.Tensor]]


class UnlabelledImages(torch.utils.data.Dataset):
    """Images indexed by epoch and row, the keys of `ShuffledStream`.

    Args:
        split: Rows with an RGB `image`.
        transforms: By the name of a model's input, what maps a stored image to its pixels (C, H, W); all crop alike.
        targets: Draws what to predict from the first of these pixels, by name, with a generator.
        seed: Seed of augmentation and targets, combined with epoch and row.
        epoch: Fixed epoch for an evaluated split, which is indexed only by row.

    Raises:
        DataError: An image cannot be read.
    """

    def __init__(
        self,
        split: Dataset,
        transforms: Mapping[str, TrainingTransform],
        targets: Targets | None,
        seed: int,
        *,
        epoch: int | None = None,
    ) -> None:
        self.files, self.transforms, self.targets, self.seed = as_files(split), transforms, targets, seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: Any) -> dict[str, torch.Tensor]:
        epoch, row = place if self.epoch is None else (self.epoch, place)
        stored, example = self.files[row]["image"], {}
        for name, transform in self.transforms.items():
            levels, broken = transform.read(stored, f"row {row}", (self.seed, epoch, row))
            if levels is None:
                raise DataError(f"An image cannot be read: {broken}. Repair it, or remove it.")
            example[name] = transform.normalize(levels)
        if self.targets is None:
            return example
        generator = torch.Generator().manual_seed(randomness(self.seed, epoch, row, 1))
        return {**example, **self.targets(next(iter(example.values())), generator)}


@dataclass(eq=False)
class Unlabelled(Task[Means]):
    """What is learnt from unlabelled images.

    Args:
        module: maps a batch and `each` to the loss and a number of correct predictions: the mean and the sum over the
            images or, with `each`, both per image, (B,).
        image_processor: the image processor of the saved model.
        saved: by its name in the module, the folder in the run folder of each model that is saved.
        summary: what the model learns by, for the output and the model card: "by predicting masked patches".
        settings: options of the method, for the model card.
        targets: see `UnlabelledImages`.
        predictions: number of predictions of each image, for the accuracy; 0 if nothing is classified.
    """

    module: nn.Module
    image_processor: Any
    saved: Mapping[str, str]
    summary: str
    settings: Mapping[str, object]
    targets: Targets | None = None
    predictions: int = 0

    def __post_init__(self) -> None:
        self.measures = {"accuracy": self.predictions} if self.predictions else {}

    def transforms(self, **options: Any) -> dict[str, TrainingTransform]:
        """Return the transform of each input of the model; see `training_transform` for the options."""
        return {"pixel_values": training_transform(self.image_processor, **options)}

    def complete(self, batch: Batch) -> Batch:
        """Return the arguments of the module for a batch of images."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch and, for classes, the number of correct predictions."""
        loss, right = model(**self.complete(batch))
        return loss, dict.fromkeys(self.measures, right)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch], accelerator: Accelerator, *, size: int) -> Means:
        """Return the mean loss over the images and, for classes, the accuracy."""
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)  # on the CPU, since MPS has no float64
        for batch in batches:
            losses, right = model(**self.complete(batch), each=True)
            values = torch.stack([losses.float(), right.float(), torch.ones_like(losses.float())], dim=1)
            sums += accelerator.gather_for_metrics(values).cpu().double().sum(dim=0)
        loss, all_right, count = sums.tolist()
        if count != size:
            raise TrainingError(f"{int(count)} images were evaluated, but the set has {size}.")
        accuracy = {name: all_right / count / predicted for name, predicted in self.measures.items()}
        return Means({"loss": loss / count, **accuracy}, int(count))

    def save(self, folder: Path, model: nn.Module, accelerator: Accelerator) -> None:
        """Save the models, of which the first is the one to start fine-tuning from."""
        state, bare = accelerator.get_state_dict(model), accelerator.unwrap_model(model)
        for name, place in self.saved.items():
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            part: Any = getattr(bare, name)
            part.save_pretrained(folder / place, state_dict=own, is_main_process=accelerator.is_main_process)
        if accelerator.is_main_process:
            self.image_processor.save_pretrained(folder)


@dataclass(frozen=True)
class Start:
    """The encoder that a run starts from.

    Args:
        config: its config, without patch dropout and mask token.
        weights: its weights by name; None for new ones.
        image_processor: its image processor.
        source: the checkpoint.
    """

    config: PlainViTConfig
    weights: Mapping[str, torch.Tensor] | None
    image_processor: Any
    source: str

    def fill(self, vit: PlainViTModel) -> PlainViTModel:
        """Load the weights that the encoder has a place for, and return it."""
        own = vit.state_dict()
        vit.load_state_dict({**own, **{name: value for name, value in (self.weights or {}).items() if name in own}})
        return vit

    def require_maskable(self) -> None:
        """Refuse a model whose patches cannot be masked, or whose pooling would not be trained.

        Raises:
            TrainingError: It is one.
        """
        if self.config.resnet_stem is not None:
            raise TrainingError("The patches of a hybrid overlap, so none can be masked: give another model.")
        with torch.device("meta"):
            names = PlainViTModel(self.config).state_dict()
        if any(name.startswith("pooler.") for name in names):
            raise TrainingError(
                f"The pooling {self.config.pooling!r} has weights that would not be trained: give another model."
            )
