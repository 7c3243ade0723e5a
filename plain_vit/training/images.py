"""From a data set to batches: what is drawn when, and how an image becomes pixels.

Everything random here is a function of the seed, the epoch, the row of the image and which of its copies it is. So a
batch is the same in whichever process or worker it is made, and a run resumed in the middle of an epoch sees what
it would have seen.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.utils.data import Sampler
from torchvision.transforms import InterpolationMode, v2

from plain_vit.errors import DataError, TrainingError
from plain_vit.extras import needs
from plain_vit.training.data import as_files, in_rgb, orientation, read_rows, stored_rows, try_image, upright

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from datasets import Dataset


class ShuffledStream(Sampler[tuple[int, ...]]):
    """Draw the rows of a set in one shuffled order after the other, without end between them.

    A batch may hold the end of one epoch and the beginning of the next: no image is left out and none is doubled,
    unless the classes are balanced: then each row is drawn anew, every class as often as the others.

    Repeated augmentation (Berman et al. 2019, Hoffer et al. 2020; order of drawing as in DeiT's `RASampler`) takes the
    first rows of an epoch's order only, several copies of each, until the epoch has as many images as the set. The
    copies that fall into a batch are spread over it: first one of each image, then another of each. So processes get
    different ones, and what mixes neighbours does not blend an image with itself.

    Yields:
        What decides an image: (epoch, row), and (epoch, row, number) where that row was drawn before in the epoch.

    Args:
        rows: size of the set.
        length: how many rows to draw in all, over all epochs.
        seed: decides the orders.
        start: how many rows the run had drawn when it was stopped.
        balanced_by: the classes of the rows, to draw each class equally often.
        repeats: copies of an image, which differ in their augmentation.
        batch_size: images of one optimizer step, over which copies are spread.
    """

    def __init__(
        self,
        rows: int,
        *,
        length: int,
        seed: int,
        start: int = 0,
        balanced_by: Sequence[int] | None = None,
        repeats: int = 1,
        batch_size: int = 1,
    ) -> None:
        self.rows, self.length, self.seed, self.start = rows, length, seed, start
        self.repeats, self.batch_size = repeats, batch_size
        self.shares: np.ndarray | None = None
        if balanced_by is not None:
            _, classes, counts = np.unique(np.asarray(balanced_by), return_inverse=True, return_counts=True)
            self.shares = 1 / (len(counts) * counts[classes])

    def __len__(self) -> int:
        return self.length - self.start

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        done = self.start % self.batch_size  # of the batch in which the run is resumed
        drawn = self._drawn(self.start - done)
        while batch := list(itertools.islice(drawn, self.batch_size)):
            spread = [place for copy in range(self.repeats) for place in batch[copy :: self.repeats]]
            yield from spread[done:]
            done = 0

    def _drawn(self, first: int) -> Iterator[tuple[int, ...]]:
        """Draw rows from the first position on, the copies of each side by side."""
        order_of = None
        for position in range(first, self.length):
            epoch, place = divmod(position, self.rows)
            if epoch != order_of:
                order_of, order = epoch, self._order(np.random.default_rng((self.seed, epoch)))
                before = _times_before(order)
            number, copy = divmod(place, self.repeats)
            row, copy = int(order[number]), copy + self.repeats * int(before[number])
            yield (epoch, row, copy) if copy else (epoch, row)

    def _order(self, rng: np.random.Generator) -> np.ndarray:
        if self.shares is None:
            return rng.permutation(self.rows)
        return rng.choice(self.rows, size=self.rows, p=self.shares)


def _times_before(order: np.ndarray) -> np.ndarray:
    """Return how often each row of an order occurs before each of its places."""
    places = np.argsort(order, kind="stable")
    _, first, counts = np.unique(order[places], return_index=True, return_counts=True)
    before = np.empty_like(order)
    before[places] = np.arange(len(order)) - np.repeat(first, counts)
    return before


class AugmentedImages(torch.utils.data.Dataset):
    """The training images as `ShuffledStream` asks for them: by epoch, row and copy, which decide the augmentation.

    In place of an image that cannot be read comes the next one that can; `broken` says which it was. Pixels are levels
    of 0 to 255, for the batch to be normalised as a whole.

    Args:
        split: rows with an `image` and a `label`.
        transform: from a stored image to levels (C, H, W).
        seed: decides the augmentation, with the epoch, the row and the copy.
    """

    def __init__(self, split: Dataset, transform: "TrainingTransform", seed: int) -> None:
        self.files, self.transform, self.seed = as_files(split), transform, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: tuple[int, ...]) -> dict[str, Any]:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
        examples = stored_rows(self.files, [row for _, row, *_ in places])
        return [self._augmented(example, place) for example, place in zip(examples, places, strict=True)]

    def _augmented(self, example: dict[str, Any], place: tuple[int, ...]) -> dict[str, Any]:
        key, row = (self.seed, *place), place[1]
        levels, broken = self.transform.read(example["image"], f"row {row}", key)
        others = iter(range(row + 1, row + len(self)))
        while levels is None and (other := next(others, None)) is not None:
            [example] = stored_rows(self.files, [other % len(self)])
            levels, _ = self.transform.read(example["image"], f"row {other}", key)
        if levels is None:
            raise DataError(f"None of the {len(self)} training images can be read, the first one is {broken}.")
        return {"pixel_values": levels, "labels": example["label"], "broken": broken}


class ReadableImages(torch.utils.data.Dataset):
    """The rows of a split, with `broken` where an image cannot be read.

    Args:
        split: rows with an `image` and a `label`.
    """

    def __init__(self, split: Dataset) -> None:
        self.files = as_files(split)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return read_rows(self.files, rows)


class UnreadableImages:
    """Watches over batches for images that could not be read.

    Args:
        stop: end at the first one; else they are counted, and named once.
        say: prints a line.
        count: how many there were when the run was stopped.
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
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest())


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


class CroppedImage:
    """Decode an image and resize a part of it, random or all of it.

    A JPEG file is decoded at 1/2, 1/4 or 1/8 of its size where that leaves the part at least as many pixels along each
    side as the result has. The edges of the part then lie on whole pixels of the smaller image: at most half a pixel of
    the result from where they were drawn.

    Args:
        size: (height, width) of the result, in pixels.
        interpolation: how it is resized, always with antialiasing.
        crop: draws the part; None takes all of the image.
        scaled: decode at less than the full size where that is enough.
    """

    def __init__(
        self,
        size: tuple[int, int],
        interpolation: InterpolationMode,
        *,
        crop: v2.RandomResizedCrop | None = None,
        scaled: bool = True,
    ) -> None:
        self.size, self.interpolation, self.crop, self.scaled = size, interpolation, crop, scaled

    def __call__(self, image: PIL.Image.Image) -> torch.Tensor:
        """Return levels (C, H, W) of an opened image, which is decoded here if it was not before."""
        turned = orientation(image)
        width, height = image.size if turned < 5 else reversed(image.size)
        part = {"top": 0, "left": 0, "height": height, "width": width}
        if self.crop is not None:
            part = self.crop.make_params([torch.empty(height, width, device="meta")])
        scale = 1.0
        if self.scaled:
            excess = min(part["height"] / self.size[0], part["width"] / self.size[1])
            whole, enough = image.width, (math.ceil(image.width / excess), math.ceil(image.height / excess))
            drafted = image.draft(None, enough)  # None of what is no JPEG file, or decoded already
            scale = drafted[1][2] / whole if drafted else 1.0
        image = upright(image)
        # The last pixels of a smaller image reach beyond the whole one: where it is mirrored, they are the first.
        beyond_left = image.width - width * scale if turned in (2, 3, 6, 7) else 0
        beyond_top = image.height - height * scale if turned in (3, 4, 7, 8) else 0
        left, right = (round(beyond_left + edge * scale) for edge in (part["left"], part["left"] + part["width"]))
        top, bottom = (round(beyond_top + edge * scale) for edge in (part["top"], part["top"] + part["height"]))
        levels = torch.from_numpy(np.array(in_rgb(image.crop((left, top, right, bottom)))))
        return v2.functional.resize(levels.permute(2, 0, 1), self.size, self.interpolation)


@dataclass(frozen=True)
class TrainingTransform:
    """What training images go through: each one its crop and its augmentation, the whole batch its normalisation.

    Args:
        crop: an opened image, not decoded yet, to what `augment` takes.
        augment: to levels (C, H, W) of 0 to 255.
        normalize: levels [..., C, H, W] to pixels.
    """

    crop: Callable[[PIL.Image.Image], Any]
    augment: Callable[[Any], torch.Tensor]
    normalize: Callable[[torch.Tensor], torch.Tensor]

    def read(self, stored: dict[str, Any] | None, place: str, key: tuple[int, ...]) -> tuple[torch.Tensor | None, str]:
        """Return the levels of a stored image; or None, and which image cannot be read and why.

        Args:
            stored: see `open_image`.
            place: of an image that is no file.
            key: decides everything random.
        """
        with cpu_randomness(*key):
            image, broken = try_image(stored, place, self.crop)
            return (None if broken else self.augment(image)), broken

    def __call__(self, image: PIL.Image.Image) -> torch.Tensor:
        """Return the pixels (C, H, W) of an image that stays as it is, so that it can be asked for again."""
        image.load()
        return self.normalize(self.augment(self.crop(image)))


def unchanged(levels: torch.Tensor) -> torch.Tensor:
    """Return what it is given."""
    return levels


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
    scaled: bool = True,
) -> TrainingTransform:
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
        random_erasing: probability, 0 to 1; erased is to the mean colour, in whole levels.
        scaled: decode JPEG files at less than their size where that is enough.

    Raises:
        TrainingError: Two ways of cropping are asked for, the crop is larger than what it is cut out of, or the
            processor resizes as torchvision cannot.
    """
    size = input_size(image_processor)
    resample = PIL.Image.Resampling(image_processor.resample)
    interpolation = InterpolationMode[resample.name]
    if interpolation in (InterpolationMode.BOX, InterpolationMode.HAMMING):
        raise TrainingError(f"The image processor resizes by {resample.name}: expected bilinear, bicubic or lanczos.")
    if resize_to is not None and crop_scale < 1:
        raise TrainingError(f"Both resize_to ({resize_to}) and crop_scale ({crop_scale}) ask for a crop: give one.")
    if resize_to is not None and resize_to < max(size):
        raise TrainingError(f"resize_to is {resize_to}: expected at least the {max(size)} pixels that are cut out.")
    resized = size if resize_to is None else (resize_to, resize_to)
    drawn = v2.RandomResizedCrop(size, scale=(crop_scale, 1)) if crop_scale < 1 else None
    steps: list[v2.Transform] = []
    if resize_to is not None:
        steps.append(v2.RandomCrop(size))
    if horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(horizontal_flip))
    if augmentation == "affine":
        bilinear = InterpolationMode.BILINEAR
        varied = [v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1), shear=10, interpolation=bilinear)]
    elif augmentation == "randaugment":
        varied = [v2.RandAugment(num_ops=augmentation_layers, magnitude=magnitude)]
    elif augmentation == "trivialaugment":
        varied = [v2.TrivialAugmentWide()]
    elif augmentation == "threeaugment":
        three = [v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(5, sigma=(0.1, 2.0))]
        varied = [v2.RandomChoice(three), v2.ColorJitter(0.3, 0.3, 0.3)]
    else:
        varied = []
    if varied:
        steps += [v2.ToPILImage(), *varied, v2.PILToTensor()]  # whose operations are the faster ones
    mean, std = (levels.tolist() for levels in pixel_levels(image_processor))
    if random_erasing:
        steps.append(v2.RandomErasing(random_erasing, value=[round(level) for level in mean]))
    return TrainingTransform(
        crop=CroppedImage(resized, interpolation, crop=drawn, scaled=scaled),
        augment=v2.Compose(steps) if steps else unchanged,
        normalize=v2.Compose([v2.ToDtype(torch.float32), v2.Normalize(mean, std, inplace=True)]),
    )


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
