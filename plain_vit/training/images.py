"""From a data set to batches: what is drawn when, and how an image becomes pixels.

Everything random here is a function of the seed, the epoch and the row of the image. So a batch is the same in
whichever process or worker it is made, and a run that goes on in the middle of an epoch sees what it would have seen.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import PIL.Image
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import Sampler
from torchvision.transforms import InterpolationMode, v2

from plain_vit.errors import DataError, TrainingError
from plain_vit.training.data import as_files, read_row


class ShuffledStream(Sampler[tuple[int, int]]):
    """Draw the rows of a set in one shuffled order after the other, without end between them.

    A batch may hold the end of one epoch and the beginning of the next: no image is left out and none is doubled,
    unless the classes are balanced: then each row is drawn anew, every class as often as the others.

    Args:
        rows: size of the set.
        length: how many rows to draw in all, over all epochs.
        seed: decides the orders.
        start: how many rows were drawn before, in the run that goes on.
        balanced_by: the classes of the rows, to draw each class equally often.
    """

    def __init__(
        self, rows: int, *, length: int, seed: int, start: int = 0, balanced_by: Sequence[int] | None = None
    ) -> None:
        self.rows, self.length, self.seed, self.start = rows, length, seed, start
        self.shares: np.ndarray | None = None
        if balanced_by is not None:
            _, classes, counts = np.unique(np.asarray(balanced_by), return_inverse=True, return_counts=True)
            self.shares = 1 / (len(counts) * counts[classes])

    def __len__(self) -> int:
        return self.length - self.start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order_of = None
        for position in range(self.start, self.length):
            epoch, place = divmod(position, self.rows)
            if epoch != order_of:
                order_of, order = epoch, self._order(np.random.default_rng((self.seed, epoch)))
            yield epoch, int(order[place])

    def _order(self, rng: np.random.Generator) -> np.ndarray:
        if self.shares is None:
            return rng.permutation(self.rows)
        return rng.choice(self.rows, size=self.rows, p=self.shares)


class AugmentedImages(torch.utils.data.Dataset):
    """The training images as `ShuffledStream` asks for them: by epoch and row, which decide the augmentation.

    In place of an image that cannot be read comes the next one that can; `broken` says which it was.

    Args:
        split: rows with an `image` (an RGB image) and a `label`.
        transform: image to pixels (C, H, W).
        seed: decides the augmentation, with the epoch and the row.
    """

    def __init__(self, split: Dataset, transform: v2.Transform, seed: int) -> None:
        self.files, self.transform, self.seed = as_files(split), transform, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        epoch, row = place
        example = read_row(self.files, row)
        broken = example["broken"]
        others = iter(range(row + 1, row + len(self)))
        while example["broken"] and (other := next(others, None)) is not None:
            example = read_row(self.files, other % len(self))
        with cpu_randomness(self.seed, epoch, row):
            return {"pixel_values": self.transform(example["image"]), "labels": example["label"], "broken": broken}


class ReadableImages(torch.utils.data.Dataset):
    """The rows of a split, with `broken` where an image cannot be read.

    Args:
        split: rows with an `image` (an RGB image) and a `label`.
    """

    def __init__(self, split: Dataset) -> None:
        self.files = as_files(split)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return read_row(self.files, row)


class UnreadableImages:
    """Watches over batches for images that could not be read.

    Args:
        stop: end at the first one; else they are counted, and named once.
        say: prints a line.
        count: how many there were before, in the run that goes on.
    """

    def __init__(self, *, stop: bool, say: Callable[[str], object], count: int = 0) -> None:
        self.stop, self.say, self.count = stop, say, count
        self.named: set[str] = set()

    def watch(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Pass batches on.

        Raises:
            DataError: An image cannot be read, and `stop` was asked for.
        """
        for batch in batches:
            for broken in filter(None, batch.pop("broken")):
                if self.stop:
                    raise DataError(f"An image cannot be read: {broken}. Mend it, or train with --corrupted skip.")
                self.count += 1
                if broken not in self.named:
                    self.named.add(broken)
                    self.say(f"skipped an image that cannot be read: {broken}")
            yield batch

    def count_everywhere(self, accelerator: Accelerator) -> int:
        """Return how many there were in all processes, in the training and in what is evaluated."""
        return int(accelerator.reduce(torch.tensor(self.count, device=accelerator.device)))


def randomness(*key: int) -> int:
    """Return a seed of 64 bits that depends on every part of the key, so that neighbours are unrelated."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


@contextmanager
def cpu_randomness(*key: int) -> Iterator[None]:
    """Set torch's generator for the CPU, which the transforms draw from, and put it back."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(randomness(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class ProcessedImages:
    """Make a batch of a model's own image processor, exactly as users of the saved model will.

    Args:
        image_processor: the model's, of transformers.
    """

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return `pixel_values` [B, C, H, W] and `labels` [B]; and which are `broken`, where that is known."""
        pixels = self.image_processor([example["image"] for example in examples], return_tensors="pt")["pixel_values"]
        batch = {"pixel_values": pixels, "labels": torch.tensor([example["label"] for example in examples])}
        if "broken" in examples[0]:
            batch["broken"] = [example["broken"] for example in examples]
        return batch


def input_size(image_processor: Any) -> tuple[int, int]:
    """Return the height and the width, in pixels, of what the processor makes.

    Raises:
        TrainingError: The processor fixes none.
    """
    size = dict(
        image_processor.crop_size if getattr(image_processor, "do_center_crop", False) else image_processor.size
    )
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    if size.get("shortest_edge") and not size.get("longest_edge"):
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    raise TrainingError(f"The image processor's size is {size}: expected height and width, or shortest_edge.")


def pixel_levels(image_processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean that the processor takes off levels of 0 to 255, and what it divides them by, per channel."""
    level = image_processor.rescale_factor if image_processor.do_rescale else 1
    if not image_processor.do_normalize:
        return torch.zeros(3, dtype=torch.float64), torch.full((3,), 1 / level, dtype=torch.float64)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (image_processor.image_mean, image_processor.image_std))
    return mean / level, std / level


def training_transform(
    image_processor: Any,
    *,
    crop_scale: float = 1.0,
    resize_to: int | None = None,
    horizontal_flip: float = 0.0,
    augmentation: str = "none",
    magnitude: int = 9,
    augmentation_layers: int = 2,
    random_erasing: float = 0.0,
) -> v2.Transform:
    """Build what a training image goes through, in the size, scale and normalisation of the image processor.

    Args:
        image_processor: the model's, of transformers.
        crop_scale: smallest part of the image's area that a random crop may keep, above 0; 1 means no crop.
        resize_to: resize to a square of so many pixels, and cut a random part of the processor's size out of it.
        horizontal_flip: probability, 0 to 1.
        augmentation: `affine` (10 degrees, a tenth of shift, scale and slant: for characters), `randaugment`,
            `trivialaugment`, `threeaugment` (grey, solarised or blurred, then colour jitter: Touvron et al. 2022) or
            `none`.
        magnitude: of `randaugment`, 0 to 30.
        augmentation_layers: of `randaugment`: how many operations on one image.
        random_erasing: probability, 0 to 1.

    Returns:
        A transform of one RGB image to (C, H, W).

    Raises:
        TrainingError: Two ways of cropping are asked for, or the crop is larger than what it is cut out of.
    """
    size = input_size(image_processor)
    resample = PIL.Image.Resampling(image_processor.resample)
    interpolation = InterpolationMode[resample.name]
    steps: list[v2.Transform] = []
    if resize_to is not None and crop_scale < 1:
        raise TrainingError(f"Both resize_to ({resize_to}) and crop_scale ({crop_scale}) ask for a crop: give one.")
    if resize_to is not None and resize_to < max(size):
        raise TrainingError(f"resize_to is {resize_to}: expected at least the {max(size)} pixels that are cut out.")
    if resize_to is not None:
        steps += [v2.Resize((resize_to, resize_to), interpolation=interpolation), v2.RandomCrop(size)]
    elif crop_scale < 1:
        steps.append(v2.RandomResizedCrop(size, scale=(crop_scale, 1), interpolation=interpolation))
    else:
        steps.append(v2.Resize(size, interpolation=interpolation))
    if horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(horizontal_flip))
    if augmentation == "affine":
        bilinear = InterpolationMode.BILINEAR
        steps.append(v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1), shear=10, interpolation=bilinear))
    elif augmentation == "randaugment":
        steps.append(v2.RandAugment(num_ops=augmentation_layers, magnitude=magnitude))
    elif augmentation == "trivialaugment":
        steps.append(v2.TrivialAugmentWide())
    elif augmentation == "threeaugment":
        three = [v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(5, sigma=(0.1, 2.0))]
        steps += [v2.RandomChoice(three), v2.ColorJitter(0.3, 0.3, 0.3)]
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float32)]  # levels 0 to 255
    mean, std = (levels.tolist() for levels in pixel_levels(image_processor))
    steps.append(v2.Normalize(mean, std))
    if random_erasing:
        steps.append(v2.RandomErasing(random_erasing))
    return v2.Compose(steps)


def batch_mixing(
    *, mixup: float, cutmix: float, num_classes: int
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Build what blends the images of a batch, one way or the other by chance.

    Args:
        mixup: alpha of mixup (Zhang et al. 2018); 0 leaves it out.
        cutmix: alpha of CutMix (Yun et al. 2019); 0 leaves it out.
        num_classes: width of the blended labels.

    Returns:
        A function of pixels [B, C, H, W] and labels [B] to pixels and labels, [B, num_classes] where they are blended.
    """
    kinds: list[v2.Transform] = []
    if mixup:
        kinds.append(v2.MixUp(alpha=mixup, num_classes=num_classes))
    if cutmix:
        kinds.append(v2.CutMix(alpha=cutmix, num_classes=num_classes))
    return v2.RandomChoice(kinds) if kinds else lambda pixels, labels: (pixels, labels)
