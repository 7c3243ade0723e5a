"""Training images, from file to pixels: decoding, crop, augmentation, normalisation.

Legend: `B` batch, `C` channels, `H W` pixels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import PIL.Image
import torch
from PIL.JpegImagePlugin import JpegImageFile
from torchvision.transforms import InterpolationMode, v2
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from ...errors import DataError, TrainingError
from ...files.images import decoding, orientation, upright
from ...image_processing_plain_vit import MOST_PIXELS, check_pixels
from ...system.extras import needs
from .decoding import as_files, decode_image, in_rgb, stored_rows, try_image
from .inputs import NormalizedPatches, PackedImages, max_num_patches_of
from .randaugment import Canvas, rand_augment, three_augment
from .sampling import cpu_randomness

with needs("plain-vit[train]"):
    from datasets import Dataset
    from simplejpeg import decode_jpeg


class AugmentedImages(torch.utils.data.Dataset):
    """Training images, indexed by the keys of `ShuffledStream`, which determine the augmentation.

    An unreadable image is replaced by the next readable one and reported in `broken`. Pixels are in [0, 255]; batches
    are normalised later.

    Args:
        split: rows with an `image` and a `label`.
        transform: maps a stored image to pixels (C, H, W) in [0, 255].
        seed: seed of the augmentation, together with the epoch, the row and the copy.
    """

    def __init__(self, split: Dataset, transform: "TrainingTransform", seed: int) -> None:
        self.files, self.transform, self.seed = as_files(split), transform, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: tuple[int, ...]) -> dict[str, Any]:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
        needed = list(dict.fromkeys(places))  # the first image of a batch may recur as the partner of the last
        examples = stored_rows(self.files, [row for _, row, *_ in needed])
        augmented = {place: self._augmented(example, place) for place, example in zip(needed, examples, strict=True)}
        return [augmented[place] for place in places]

    def _augmented(self, example: dict[str, Any], place: tuple[int, ...]) -> dict[str, Any]:
        key, row = (self.seed, *place), place[1]
        levels, broken = self.transform.read(example["image"], f"row {row}", key)
        others = iter(range(row + 1, row + len(self)))
        while levels is None and (other := next(others, None)) is not None:
            [example] = stored_rows(self.files, [other % len(self)])
            levels, _ = self.transform.read(example["image"], f"row {other}", key)
        if levels is None:
            raise DataError(f"None of the {len(self)} training images can be read, the first one is {broken}.")
        label = example["label"]
        return {
            "pixel_values": levels,
            "labels": torch.tensor(label) if isinstance(label, list) else label,
            "broken": broken,
        }


def input_size(image_processor: Any) -> tuple[int, int]:
    """Return height and width, in pixels, of the processor's output.

    Raises:
        TrainingError: The processor has no fixed size.
    """
    if most := max_num_patches_of(image_processor):
        raise TrainingError(
            f"The image processor keeps the aspect ratio of images, within {most} patches, but one size is needed: "
            "give a model whose images have one size."
        )
    size = dict(
        image_processor.crop_size if getattr(image_processor, "do_center_crop", False) else image_processor.size
    )
    if getattr(image_processor, "do_pad", False) and getattr(image_processor, "pad_size", None):
        size = dict(image_processor.pad_size)  # SAM's, after it resized the longest edge
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    if size.get("shortest_edge") and not size.get("longest_edge"):
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    raise TrainingError(
        f"The image processor's size is {size}: expected height and width, or shortest_edge. Save one of a fixed size "
        'in the folder of the model, such as PlainViTImageProcessor(size={"height": 224, "width": 224}), with the '
        "image_mean and image_std of the other."
    )


def pixel_levels(image_processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the processor's mean and standard deviation per channel, for pixels in [0, 255]."""
    level = image_processor.rescale_factor if image_processor.do_rescale else 1
    if not image_processor.do_normalize:
        return torch.zeros(3, dtype=torch.float64), torch.full((3,), 1 / level, dtype=torch.float64)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (image_processor.image_mean, image_processor.image_std))
    return mean / level, std / level


class RelativeCrop:
    """Random crop whose aspect ratio is 3/4 to 4/3 times the image's, as timm's for NaFlex.

    Args:
        smallest: smallest fraction of the area to keep, above 0.
    """

    SIDE = 2**16  # side of the square in which the crop is drawn

    def __init__(self, smallest: float) -> None:
        self.of_square = v2.RandomResizedCrop(1, scale=(smallest, 1), ratio=(3 / 4, 4 / 3))

    def make_params(self, flat_inputs: list[Any]) -> dict[str, int]:
        """Draw a crop for the first image."""
        height, width = flat_inputs[0].shape[-2:]
        part = self.of_square.make_params([torch.empty(self.SIDE, self.SIDE, device="meta")])
        top, rows = self._span(part["top"], part["height"], height)
        left, columns = self._span(part["left"], part["width"], width)
        return {"top": top, "left": left, "height": rows, "width": columns}

    def _span(self, start: int, length: int, side: int) -> tuple[int, int]:
        """Return start and length of the crop along one side, in pixels; the length is at least 1."""
        first = min(round(start * side / self.SIDE), side - 1)
        return first, max(round((start + length) * side / self.SIDE) - first, 1)


class CroppedImage:
    """Decode an image, and resize a random crop or the whole image.

    A JPEG file is decoded at 1/2, 1/4 or 1/8 of its size if the crop still has at least as many pixels along each side
    as the result. The crop is then aligned to whole pixels of the reduced image: its edges move by at most half a pixel
    of the result.

    Args:
        size: (height, width) of the result, in pixels, or a function that computes it from the crop's height and width.
        interpolation: interpolation of the resize, always with antialiasing.
        crop: draws the crop; None uses the whole image.
        scaled: decode JPEG files at a reduced size if that is enough.
    """

    def __init__(
        self,
        size: tuple[int, int] | Callable[[int, int], tuple[int, int]],
        interpolation: InterpolationMode,
        *,
        crop: v2.RandomResizedCrop | RelativeCrop | None = None,
        scaled: bool = True,
    ) -> None:
        self.size, self.interpolations, self.crop, self.scaled = size, [interpolation], crop, scaled
        self.channels = 3  # or 1, grey

    def __call__(self, image: PIL.Image.Image) -> torch.Tensor:
        """Return the pixels (C, H, W) of an opened image, in [0, 255]; decode it if necessary.

        Raises:
            ValueError: A size that depends on the crop's shape has too many pixels.
        """
        turned = orientation(image)
        width, height = image.size if turned < 5 else reversed(image.size)
        part = {"top": 0, "left": 0, "height": height, "width": width}
        if self.crop is not None:
            part = self.crop.make_params([torch.empty(height, width, device="meta")])
        size = self.size(part["height"], part["width"]) if callable(self.size) else self.size
        check_pixels(part["height"], part["width"], size)
        scale = 1.0
        if self.scaled:
            excess = min(part["height"] / size[0], part["width"] / size[1])
            whole, enough = image.width, (math.ceil(image.width / excess), math.ceil(image.height / excess))
            drafted = image.draft(None, enough)  # None if not a JPEG file, or already decoded
            scale = drafted[1][2] / whole if drafted else 1.0
        # The last pixels of a reduced image extend beyond the original; in a mirrored image, these come first.
        wide, high = image.size if turned < 5 else reversed(image.size)
        beyond_left = wide - width * scale if turned in (2, 3, 6, 7) else 0
        beyond_top = high - height * scale if turned in (3, 4, 7, 8) else 0
        left, right = (round(beyond_left + edge * scale) for edge in (part["left"], part["left"] + part["width"]))
        top, bottom = (round(beyond_top + edge * scale) for edge in (part["top"], part["top"] + part["height"]))
        levels = jpeg_levels(image) if turned == 1 else None
        if levels is None:
            cropped = np.array(in_rgb(upright(image).crop((left, top, right, bottom))))
        else:
            cropped = levels[top:bottom, left:right]
        if self.channels == 1:
            cropped = np.array(PIL.Image.fromarray(cropped).convert("L"))[..., None]
        chosen = int(torch.randint(len(self.interpolations), ())) if len(self.interpolations) > 1 else 0
        return v2.functional.resize(torch.from_numpy(cropped).permute(2, 0, 1), size, self.interpolations[chosen])


def jpeg_levels(image: PIL.Image.Image) -> np.ndarray | None:
    """Decode an opened RGB JPEG file with simplejpeg to pixels (H, W, C) in [0, 255], at the size set by `draft`.

    The pixels equal Pillow's, in two thirds of the time. Return None for other or already decoded images, and for
    damaged files: Pillow reads some of them, and explains what is wrong with the others.
    """
    if type(image) is not JpegImageFile or image.mode != "RGB" or not image.tile or image.fp is None:
        return None
    image.fp.seek(0)
    try:
        levels = decode_jpeg(
            image.fp.read(), fastdct=False, fastupsample=False, min_height=image.height, min_width=image.width
        )
    except ValueError:
        return None
    return levels if levels.shape[:2] == (image.height, image.width) else None


def covering_size(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Return the smallest size with the aspect ratio of (`height`, `width`) that covers `size`."""
    excess = min(height / size[0], width / size[1])
    return max(size[0], int(height / excess)), max(size[1], int(width / excess))


class ProcessedImage:
    """Decode an image, and resize and crop it with the image processor, as in evaluation.

    Args:
        image_processor: the model's image processor.
    """

    def __init__(self, image_processor: Any) -> None:
        self.image_processor, self.size = image_processor, input_size(image_processor)

    def __call__(self, image: PIL.Image.Image) -> torch.Tensor:
        """Return the pixels (C, H, W) of an opened image, in [0, 255].

        Raises:
            DataError: The image processor's output does not have its size.
        """
        decoded = decode_image(image)
        with decoding():
            prepared = self.image_processor(decoded, do_rescale=False, do_normalize=False, return_tensors="pt")
        levels = prepared["pixel_values"][0]
        if tuple(levels.shape[-2:]) != self.size:
            raise DataError(
                f"the image processor makes it {levels.shape[-2]} x {levels.shape[-1]} pixels, not "
                f"{self.size[0]} x {self.size[1]}: add --crop_scale 0.08, or --test_crop 1"
            )
        return levels if levels.dtype == torch.uint8 else levels.round().clamp(0, 255).to(torch.uint8)


class PixelErasing(v2.RandomErasing):
    """Fill a random rectangle with standard normal noise in normalised units (timm's mode `pixel`).

    The pixels are not limited to [0, 255], so images are converted to half precision, which represents all integers
    from 0 to 255 exactly.

    Args:
        probability: 0 to 1.
        mean: mean of the image processor for each channel, for pixels in [0, 255].
        std: standard deviation of the image processor for each channel, likewise.
    """

    def __init__(self, probability: float, mean: torch.Tensor, std: torch.Tensor) -> None:
        super().__init__(probability, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value="random")
        self.mean, self.std = mean.float()[:, None, None], std.float()[:, None, None]

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Return pixels (C, H, W) in half precision."""
        return super().forward(levels.half())

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a rectangle and its content."""
        drawn = super().make_params(flat_inputs)
        if drawn["v"] is not None:
            drawn["v"] = drawn["v"] * self.std + self.mean
        return drawn


@cache
def per_channel(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return values per channel as a tensor (C, 1, 1), cached on the device so that steps do not wait for a copy."""
    return torch.tensor(values, device=device)[:, None, None]


@dataclass(frozen=True)
class Normalization:
    """Normalise pixels [..., C, H, W] to float32 on their device; float32 pixels are changed in place.

    Args:
        mean: mean of each channel.
        std: standard deviation of each channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, levels: torch.Tensor) -> torch.Tensor:
        mean, std = (per_channel(values, levels.device) for values in (self.mean, self.std))
        return levels.float().sub_(mean).div_(std)


@dataclass(frozen=True)
class TrainingTransform:
    """Transform of training images: crop and augmentation per image, normalisation per batch.

    Args:
        crop: maps an opened, undecoded image to the input of `augment`.
        augment: maps the output of `crop` to pixels (C, H, W) in [0, 255].
        normalize: normalises pixels [..., C, H, W].
        patch_size: side of the patches that images of many sizes are cut into; None for images of one size.
    """

    crop: Callable[[PIL.Image.Image], Any]
    augment: Callable[[Any], torch.Tensor]
    normalize: Callable[[torch.Tensor], torch.Tensor]
    patch_size: int | None = None

    @property
    def collate(self) -> PackedImages | None:
        """Return the collate function for images of many sizes, or None to stack images of one size."""
        return None if self.patch_size is None else PackedImages(self.patch_size)

    @property
    def normalize_batch(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that normalises the `pixel_values` of a batch."""
        return self.normalize if self.patch_size is None else NormalizedPatches(self.normalize, self.patch_size)

    def read(self, stored: dict[str, Any] | None, place: str, key: tuple[int, ...]) -> tuple[torch.Tensor | None, str]:
        """Return the augmented pixels of a stored image, or None and the reason why it cannot be read.

        Args:
            stored: see `open_stored`.
            place: description of an image that is not a file.
            key: key of the random state.
        """
        with cpu_randomness(*key):
            image, broken = try_image(stored, place, self.crop)
            return (None if broken else self.augment(image)), broken

    def __call__(self, image: PIL.Image.Image) -> torch.Tensor:
        """Return the normalised pixels (C, H, W) of an image, which itself is not changed."""
        image.load()
        return self.normalize(self.augment(self.crop(image)))


def unchanged(levels: torch.Tensor) -> torch.Tensor:
    """Return the pixels as they are."""
    return levels


def training_transform(
    image_processor: Any,
    *,
    crop_scale: float = 1.0,
    resize_to: int | None = None,
    crop_padding: int = 0,
    train_interpolation: str | None = None,
    horizontal_flip: float = 0.0,
    vflip: float = 0.0,
    augmentation: str = "none",
    magnitude_scale: str = "timm_increasing",
    magnitude: int = 9,
    magnitude_std: float = 0.0,
    augmentation_layers: int = 2,
    color_jitter: Sequence[float] = (),
    grayscale_prob: float = 0.0,
    gaussian_blur_prob: float = 0.0,
    random_erasing: float = 0.0,
    random_erasing_mode: str = "mean",
    scaled: bool = True,
) -> TrainingTransform:
    """Build the training transform, with the size, rescaling and normalisation of the image processor.

    Without a random crop, images are resized and cropped as by the image processor. If the processor keeps the aspect
    ratio within a number of patches, training keeps that of the random crop, which is close to the image's.

    Args:
        image_processor: the model's image processor.
        crop_scale: smallest fraction of the area that a random crop keeps, above 0; 1 means no crop.
        resize_to: resize to a square of this many pixels, and take a random crop of the processor's size.
        crop_padding: resize until the shorter edge has the processor's size, pad all sides by reflection with this many
            pixels, and take a random crop of that size (the simple random crop of DeiT-III); 0 means no such crop.
        train_interpolation: `bilinear`, `bicubic` or `random`, one of both for each image; None means the processor's.
        horizontal_flip: probability, 0 to 1.
        vflip: probability, 0 to 1.
        augmentation: `affine` (10 degrees, a tenth of shift, scale and slant: for characters), `randaugment`,
            `autoaugment` (Cubuk et al. 2019, the policy for ImageNet, as in torchvision), `trivialaugment`,
            `threeaugment` (grey, solarised or blurred, then colour jitter: Touvron et al. 2022) or `none`.
        magnitude_scale: scale of `magnitude`, for `randaugment`; see `rand_augment`.
        magnitude: magnitude of the operations of `randaugment`.
        magnitude_std: standard deviation of the magnitude.
        augmentation_layers: operations per image of `randaugment`.
        color_jitter: largest relative change of brightness, contrast and saturation, one for all or one of each, and
            perhaps the largest change of the hue, up to 0.5.
        grayscale_prob: probability, 0 to 1.
        gaussian_blur_prob: probability, 0 to 1.
        random_erasing: probability, 0 to 1.
        random_erasing_mode: content of an erased rectangle: `mean`, the mean colour rounded to integers, or `pixel`,
            normal noise in each pixel.
        scaled: decode JPEG files at a reduced size if that is enough.

    Raises:
        TrainingError: Two ways of cropping are given, the crop exceeds the image, torchvision does not support the
            processor's interpolation, or the magnitude is outside its scale.
    """
    mean, std = pixel_levels(image_processor)
    crop, cropped = _geometry(image_processor, crop_scale, resize_to, crop_padding, scaled)
    if isinstance(crop, CroppedImage):
        crop.channels = len(mean)
    if train_interpolation is not None:
        if not isinstance(crop, CroppedImage):
            raise TrainingError("train_interpolation needs a random crop: add --crop_scale 0.08, or omit it.")
        either = ("bilinear", "bicubic") if train_interpolation == "random" else (train_interpolation,)
        crop.interpolations = [*map(InterpolationMode, either)]
    if len(color_jitter) not in (0, 1, 3, 4) or max([*color_jitter[3:], 0]) > 0.5:
        raise TrainingError(f"color_jitter is {color_jitter}: expected one, three or four numbers, the last up to 0.5.")
    steps: list[Callable[[Any], Any]] = [cropped] if cropped else []
    if horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(horizontal_flip))
    if vflip:
        steps.append(v2.RandomVerticalFlip(vflip))
    if augmentation == "randaugment":
        resample = PIL.Image.Resampling(image_processor.resample)
        if resample not in (PIL.Image.Resampling.BILINEAR, PIL.Image.Resampling.BICUBIC):
            resample = PIL.Image.Resampling.BICUBIC  # the finest that Pillow offers for geometric operations
        varied: Any = rand_augment(
            magnitude_scale,
            magnitude=magnitude,
            magnitude_std=magnitude_std,
            layers=augmentation_layers,
            canvas=Canvas(tuple(round(level) for level in mean.tolist()), resample),
        )
    else:
        varied = _variation(augmentation)
    operations = [varied] if varied is not None else []
    if color_jitter:
        operations.append(v2.ColorJitter(*(color_jitter if len(color_jitter) > 1 else [*color_jitter] * 3)))
    if grayscale_prob:
        operations.append(v2.RandomGrayscale(grayscale_prob))
    if gaussian_blur_prob:
        operations.append(v2.RandomApply([_blurred], gaussian_blur_prob))
    if operations:
        steps += [v2.ToPILImage(), *operations, v2.PILToTensor()]  # Pillow's operations are faster
    if random_erasing and random_erasing_mode == "pixel":
        steps.append(PixelErasing(random_erasing, mean, std))
    elif random_erasing:
        steps.append(v2.RandomErasing(random_erasing, value=[round(level) for level in mean.tolist()]))
    return TrainingTransform(
        crop=crop,
        augment=v2.Compose(steps) if steps else unchanged,
        normalize=Normalization(tuple(mean.tolist()), tuple(std.tolist())),
        patch_size=image_processor.patch_size if max_num_patches_of(image_processor) else None,
    )


def _blurred(image: PIL.Image.Image) -> PIL.Image.Image:
    """Blur by a random standard deviation with timm's kernel, or the largest for an image of fewer than 12 pixels."""
    blurred: PIL.Image.Image = v2.GaussianBlur(min(23, 2 * min(image.size) - 1))(image)
    return blurred


def _variation(augmentation: str) -> Callable[[Any], Any] | None:
    """Return an augmentation of Pillow images that has no further options."""
    if augmentation == "affine":
        bilinear = InterpolationMode.BILINEAR
        return v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1), shear=10, interpolation=bilinear)
    if augmentation == "autoaugment":
        return v2.AutoAugment(interpolation=InterpolationMode.BILINEAR)
    if augmentation == "trivialaugment":
        return v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)  # as torchvision's reference script
    return three_augment() if augmentation == "threeaugment" else None


def _geometry(
    image_processor: Any, crop_scale: float, resize_to: int | None, crop_padding: int, scaled: bool
) -> tuple[Callable[[PIL.Image.Image], torch.Tensor], v2.Transform | None]:
    """Return the function that resizes an opened image to pixels, and the random crop of these pixels, if any."""
    resample = PIL.Image.Resampling(image_processor.resample)
    interpolation = InterpolationMode[resample.name]
    if interpolation in (InterpolationMode.BOX, InterpolationMode.HAMMING):
        raise TrainingError(f"The image processor resizes with {resample.name}: expected bilinear, bicubic or lanczos.")
    crops = {"crop_scale": crop_scale < 1, "resize_to": resize_to is not None, "crop_padding": crop_padding > 0}
    given = [name for name, used in crops.items() if used]
    if len(given) > 1:
        raise TrainingError(f"{' and '.join(given)} each set a crop: give one of them.")
    if (most := max_num_patches_of(image_processor)) and set(given) <= {"crop_scale"}:
        fitting = partial(
            get_image_size_for_max_num_patches, patch_size=image_processor.patch_size, max_num_patches=most
        )
        relative = RelativeCrop(crop_scale) if given else None
        return CroppedImage(fitting, interpolation, crop=relative, scaled=scaled), None
    size = input_size(image_processor)
    if resize_to is not None and resize_to < max(size):
        raise TrainingError(f"resize_to is {resize_to}: expected at least the {max(size)} pixels of the crop.")
    if resize_to is not None and resize_to > (most_pixels := math.isqrt(MOST_PIXELS)):
        raise TrainingError(f"resize_to is {resize_to}: expected at most {most_pixels} pixels.")
    if crop_padding >= min(size):
        raise TrainingError(f"crop_padding is {crop_padding}: expected less than the {min(size)} pixels of the crop.")
    if crop_scale < 1:
        drawn = v2.RandomResizedCrop(size, scale=(crop_scale, 1))
        return CroppedImage(size, interpolation, crop=drawn, scaled=scaled), None
    if resize_to is not None:
        return CroppedImage((resize_to, resize_to), interpolation, scaled=scaled), v2.RandomCrop(size)
    if crop_padding:
        padded = v2.RandomCrop(size, padding=crop_padding, padding_mode="reflect")
        return CroppedImage(partial(covering_size, size), interpolation, scaled=scaled), padded
    if _stretches(image_processor):
        return CroppedImage(size, interpolation, scaled=scaled), None
    return ProcessedImage(image_processor), None


def _stretches(image_processor: Any) -> bool:
    """Return whether the image processor only resizes images to a fixed height and width, whatever their shape."""
    others = ("do_center_crop", "do_pad", "resize_mode", "crop_pct")
    size = dict(image_processor.size)
    has_both_sides = bool(size.get("height") and size.get("width"))
    does_others = any(getattr(image_processor, name, None) for name in others)
    return bool(image_processor.do_resize) and has_both_sides and not does_others
