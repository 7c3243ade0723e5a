"""RandAugment with the operations and strengths of timm, big_vision or torchvision, and 3-Augment.

The same magnitude means different strengths: timm and big_vision divide it by 10 and torchvision by 30, so magnitude 9
rotates by up to 27 degrees in timm and big_vision and by 9 degrees in torchvision. Recipes name their package.

Everything random is drawn from torch's CPU generator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import PIL.Image
import PIL.ImageEnhance
import PIL.ImageFilter
import PIL.ImageOps
import torch
from torchvision.transforms import InterpolationMode, v2

from ...errors import TrainingError

Image = PIL.Image.Image
Resampling = PIL.Image.Resampling

GREY = (128, 128, 128)
BIG_VISION_SIDE = 224  # side in pixels of the images that big_vision's distances are meant for


@dataclass(frozen=True)
class Canvas:
    """Fill and interpolation of operations that move pixels.

    Args:
        color: fill value of each channel, 0 to 255.
        resample: Pillow's interpolation.
    """

    color: tuple[int, ...]
    resample: Resampling


def _sheared(image: Image, x: float, y: float, canvas: Canvas) -> Image:
    return _affine(image, (1, x, 0, y, 1, 0), canvas)


def _moved(image: Image, x: float, y: float, canvas: Canvas) -> Image:
    """Move an image by fractions of its sides."""
    return _affine(image, (1, 0, x * image.width, 0, 1, y * image.height), canvas)


def _affine(image: Image, matrix: tuple[float, ...], canvas: Canvas) -> Image:
    return image.transform(
        image.size, PIL.Image.Transform.AFFINE, matrix, resample=canvas.resample, fillcolor=canvas.color
    )


def _rotated(image: Image, degrees: float, canvas: Canvas) -> Image:
    return image.rotate(degrees, resample=canvas.resample, fillcolor=canvas.color)


def _brightened_below(image: Image, amount: float, threshold: int = 128) -> Image:
    table = [min(255, level + int(amount)) if level < threshold else level for level in range(256)]
    return image.point(table * len(image.getbands()))


def _posterized(image: Image, bits: float) -> Image:
    if bits < 1:
        return PIL.Image.new(image.mode, image.size)  # black; Pillow 13 refuses 0 bits
    return image if bits >= 8 else PIL.ImageOps.posterize(image, int(bits))


def _cut_out(image: Image, radius: float, canvas: Canvas) -> Image:
    """Cover a square around a random pixel; `radius` is a fraction of the sides."""
    centre = [int(torch.randint(side, ())) for side in image.size]
    radii = [round(radius * side) for side in image.size]
    left, top = (max(0, middle - half) for middle, half in zip(centre, radii, strict=True))
    right, bottom = (min(side, middle + half) for side, middle, half in zip(image.size, centre, radii, strict=True))
    image = image.copy()
    image.paste(canvas.color, (left, top, right, bottom))
    return image


# Operations by name: functions of an RGB image, a strength in the operation's own unit, and the canvas.
OPERATIONS: dict[str, Callable[[Image, float, Canvas], Image]] = {
    "auto_contrast": lambda image, strength, canvas: PIL.ImageOps.autocontrast(image),
    "equalize":      lambda image, strength, canvas: PIL.ImageOps.equalize(image),
    "invert":        lambda image, strength, canvas: PIL.ImageOps.invert(image),
    "rotate":        lambda image, degrees, canvas: _rotated(image, degrees, canvas),
    "posterize":     lambda image, bits, canvas: _posterized(image, bits),
    "solarize":      lambda image, threshold, canvas: PIL.ImageOps.solarize(image, int(threshold)),
    "solarize_add":  lambda image, amount, canvas: _brightened_below(image, amount),
    "color":         lambda image, factor, canvas: PIL.ImageEnhance.Color(image).enhance(factor),
    "contrast":      lambda image, factor, canvas: PIL.ImageEnhance.Contrast(image).enhance(factor),
    "brightness":    lambda image, factor, canvas: PIL.ImageEnhance.Brightness(image).enhance(factor),
    "sharpness":     lambda image, factor, canvas: PIL.ImageEnhance.Sharpness(image).enhance(factor),
    "shear_x":       lambda image, slope, canvas: _sheared(image, slope, 0, canvas),
    "shear_y":       lambda image, slope, canvas: _sheared(image, 0, slope, canvas),
    "translate_x":   lambda image, fraction, canvas: _moved(image, fraction, 0, canvas),
    "translate_y":   lambda image, fraction, canvas: _moved(image, 0, fraction, canvas),
    "cutout":        lambda image, radius, canvas: _cut_out(image, radius, canvas),
}  # fmt: skip


def _fixed(share: float, sign: int) -> float:
    return 0.0


def _either_way(full: float) -> Callable[[float, int], float]:
    """Return the strength of an operation in a random direction."""
    return lambda share, sign: sign * share * full


def _enhanced(share: float, sign: int) -> float:
    return 1.8 * share + 0.1


def _enhanced_or_reduced(share: float, sign: int) -> float:
    return max(0.1, 1 + sign * 0.9 * share)


ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")

# Strength of each operation as a function of the magnitude divided by 10 and a random sign.
Strengths = Mapping[str, Callable[[float, int], float]]
_SHARED: Strengths = {
    **dict.fromkeys(("auto_contrast", "equalize", "invert"), _fixed),
    "rotate": _either_way(30),
    **dict.fromkeys(("shear_x", "shear_y"), _either_way(0.3)),
    **dict.fromkeys(ENHANCEMENTS, _enhanced),
}
_TIMM: Strengths = {
    **_SHARED,
    "posterize": lambda share, sign: int(share * 4),
    "solarize": lambda share, sign: min(256, int(share * 256)),
    "solarize_add": lambda share, sign: min(128, int(share * 110)),
    **dict.fromkeys(("translate_x", "translate_y"), _either_way(0.45)),
}
_TIMM_INCREASING: Strengths = {
    **_TIMM,
    "posterize": lambda share, sign: 4 - int(share * 4),
    "solarize": lambda share, sign: 256 - min(256, int(share * 256)),
    **dict.fromkeys(ENHANCEMENTS, _enhanced_or_reduced),
}
_BIG_VISION: Strengths = {
    **_SHARED,
    "posterize": lambda share, sign: max(1, int(share * 4)),  # TensorFlow shifts by 7 bits at most
    "solarize": lambda share, sign: int(share * 256),
    "solarize_add": lambda share, sign: int(share * 110),
    **dict.fromkeys(("translate_x", "translate_y"), _either_way(100 / BIG_VISION_SIDE)),
    "cutout": lambda share, sign: int(share * 40) / BIG_VISION_SIDE,
}


@dataclass(frozen=True)
class MagnitudeScale:
    """Meaning of a magnitude.

    Args:
        largest: the largest magnitude.
        strengths: the strength of each operation; empty if torchvision applies the operations.
        probability: probability of applying a selected operation.
        takes_noise: whether the magnitude may be drawn from a normal distribution.
    """

    largest: int
    strengths: Strengths
    probability: float
    takes_noise: bool


MAGNITUDE_SCALES: dict[str, MagnitudeScale] = {
    "timm_increasing": MagnitudeScale(10, _TIMM_INCREASING, 0.5, takes_noise=True),
    "timm": MagnitudeScale(10, _TIMM, 0.5, takes_noise=True),
    "big_vision": MagnitudeScale(30, _BIG_VISION, 1.0, takes_noise=False),
    "torchvision": MagnitudeScale(30, {}, 1.0, takes_noise=False),
}


class RandAugment:
    """Randomly selected operations, all with the same magnitude (Cubuk et al. 2020).

    Args:
        scale: one of `MAGNITUDE_SCALES` that has strengths.
        magnitude: magnitude of the operations.
        magnitude_std: standard deviation of the magnitude, drawn for each operation.
        layers: operations per image.
        canvas: fill for pixels from outside the image.

    Source:
        `rand_augment_transform` of timm 1.0.31; `distort_image_with_randaugment` of big_vision, with two differences:
        its distances of 100 and 40 pixels are fractions of 224 pixels here, and its contrast blends with the number of
        pixels / 256 instead of the mean grey.
    """

    def __init__(self, scale: str, *, magnitude: int, magnitude_std: float, layers: int, canvas: Canvas) -> None:
        self.scale, self.magnitude, self.magnitude_std = scale, magnitude, magnitude_std
        self.layers, self.canvas = layers, canvas

    def __call__(self, image: Image) -> Image:
        """Return an augmented RGB image of the same size."""
        scale = MAGNITUDE_SCALES[self.scale]
        names = list(scale.strengths)
        for _ in range(self.layers):
            name = names[int(torch.randint(len(names), ()))]
            if torch.rand(()).item() < scale.probability:
                magnitude = self.magnitude + self.magnitude_std * torch.randn(()).item()
                share = min(max(magnitude, 0), scale.largest) / 10
                sign = 1 - 2 * int(torch.randint(2, ()))
                image = OPERATIONS[name](image, scale.strengths[name](share, sign), self.canvas)
        return image


def rand_augment(
    scale: str, *, magnitude: int, magnitude_std: float, layers: int, canvas: Canvas
) -> Callable[[Image], Image]:
    """Build RandAugment.

    Args:
        scale: one of `MAGNITUDE_SCALES`. `timm_increasing` (`inc1`) uses variants whose effect grows with the
            magnitude; with `timm` and `big_vision`, some operations are strongest at magnitude 0.
        magnitude: magnitude of the operations.
        magnitude_std: standard deviation of the magnitude (`mstd`), for timm only.
        layers: operations per image.
        canvas: fill of timm for pixels from outside the image; big_vision fills with grey, torchvision with black.

    Raises:
        TrainingError: The magnitude is outside the scale, or the scale does not take noise.
    """
    chosen = MAGNITUDE_SCALES[scale]
    if not 0 <= magnitude <= chosen.largest:
        raise TrainingError(f"magnitude is {magnitude}: expected 0 to {chosen.largest}, the range of {scale}.")
    if magnitude_std and not chosen.takes_noise:
        raise TrainingError(
            f"magnitude_std is {magnitude_std}, which {scale} does not have: use timm's, or set it to 0."
        )
    if scale == "torchvision":
        return v2.RandAugment(layers, magnitude, interpolation=InterpolationMode.BILINEAR)
    if scale == "big_vision":
        canvas = Canvas(GREY, Resampling.NEAREST)
    return RandAugment(scale, magnitude=magnitude, magnitude_std=magnitude_std, layers=layers, canvas=canvas)


def blur(image: Image) -> Image:
    """Apply a Gaussian blur with a random radius of 0.1 to 2 pixels."""
    return image.filter(PIL.ImageFilter.GaussianBlur(0.1 + 1.9 * torch.rand(()).item()))


def three_augment() -> Callable[[Image], Image]:
    """Build 3-Augment: grey, solarised or blurred, then colour jitter (Touvron et al. 2022, `augment.py`)."""
    kinds = [v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.Lambda(blur)]
    return v2.Compose([v2.RandomChoice(kinds), v2.ColorJitter(0.3, 0.3, 0.3)])
