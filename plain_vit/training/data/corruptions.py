"""Corruptions of images in five severities, as in ImageNet-C.

Source: Hendrycks and Dietterich (2019) and their `make_imagenet_c.py`, in which the severities are for images of 224
pixels. Of its 15 corruptions these are the ones that need neither other packages nor photographs (of frost).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from torchvision.transforms import v2

from ...files.images import open_image
from .augmentation import Normalization, ProcessedImage, pixel_levels


def _replaced(levels: np.ndarray, share: float, draw: np.random.Generator) -> np.ndarray:
    """Replace a share of the values by black or white (salt and pepper)."""
    replaced = draw.random(levels.shape) < share
    return np.where(replaced, draw.random(levels.shape) < 0.5, levels / 255)


def _defocused(levels: np.ndarray, disk: tuple[int, float], draw: np.random.Generator) -> np.ndarray:
    """Blur with a disk, whose edge is softened, over an image that continues as in a mirror."""
    radius, softness = disk
    around, size = max(radius, 8), 3 if radius <= 8 else 5
    places = torch.arange(-around, around + 1)
    flat = (places[:, None] ** 2 + places**2 <= radius**2).double()
    kernel = v2.functional.gaussian_blur((flat / flat.sum())[None], [size, size], [softness, softness])[None]
    padded = np.pad(levels / 255, ((around, around), (around, around), (0, 0)), mode="reflect")
    return F.conv2d(torch.from_numpy(padded).permute(2, 0, 1)[:, None], kernel)[:, 0].permute(1, 2, 0).numpy()


def _brightened(levels: np.ndarray, more: float, draw: np.random.Generator) -> np.ndarray:
    """Raise the value of the hue, saturation and value of each pixel."""
    value = levels.max(axis=2, keepdims=True) / 255
    raised = np.clip(value + more, 0, 1)
    return np.where(value > 0, levels / 255 * raised / np.where(value > 0, value, 1), raised)


def _pixelated(levels: np.ndarray, scale: float, draw: np.random.Generator) -> np.ndarray:
    image, box = PIL.Image.fromarray(levels), PIL.Image.Resampling.BOX
    coarse = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))), box)
    return np.array(coarse.resize(image.size, box))


def _compressed(levels: np.ndarray, quality: int, draw: np.random.Generator) -> np.ndarray:
    file = BytesIO()
    PIL.Image.fromarray(levels).save(file, "JPEG", quality=quality)
    return np.array(open_image(file))


# Each has a function and its five strengths. The function returns values in [0, 1], or integers in [0, 255].
CORRUPTIONS: dict[str, tuple[Callable[[np.ndarray, Any, np.random.Generator], np.ndarray], Sequence[Any]]] = {
    "gaussian_noise": (lambda x, std, draw: x / 255 + draw.normal(0, std, x.shape), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (lambda x, photons, draw: draw.poisson(x / 255 * photons) / photons, (60, 25, 12, 5, 3)),
    "impulse_noise": (_replaced, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (_defocused, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "brightness": (_brightened, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (lambda x, part, draw: (x * part + x.mean((0, 1)) * (1 - part)) / 255, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "pixelate": (_pixelated, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (_compressed, (25, 18, 15, 10, 7)),
}  # fmt: skip


def corrupted(levels: np.ndarray, name: str, severity: int, draw: np.random.Generator) -> np.ndarray:
    """Return a corrupted copy of an image (H, W, 3) of integers in [0, 255].

    Args:
        levels: the image.
        name: one of `CORRUPTIONS`.
        severity: 1 to 5.
        draw: source of the noise.
    """
    function, strengths = CORRUPTIONS[name]
    changed = function(levels, strengths[severity - 1], draw)
    return changed if changed.dtype == np.uint8 else (np.clip(changed, 0, 1) * 255).astype(np.uint8)


@dataclass(frozen=True)
class CorruptedImages:
    """Collate function that corrupts images after they are resized and cropped as by the image processor.

    Args:
        image_processor: the model's image processor.
        name: one of `CORRUPTIONS`.
        severity: 1 to 5.
    """

    image_processor: Any
    name: str
    severity: int

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return `pixel_values` and `labels` [B]; the noise of an image is a function of its row."""
        crop, (mean, std) = ProcessedImage(self.image_processor), pixel_levels(self.image_processor)
        images = []
        for each in examples:
            draw, levels = np.random.default_rng((each["row"], self.severity)), crop(each["image"]).permute(1, 2, 0)
            coloured = levels.expand(-1, -1, 3).contiguous().numpy()  # also of a model for grey images
            images.append(torch.from_numpy(corrupted(coloured, self.name, self.severity, draw))[..., : len(mean)])
        pixels = Normalization((*mean.tolist(),), (*std.tolist(),))(torch.stack(images).permute(0, 3, 1, 2))
        return {"pixel_values": pixels, "labels": torch.tensor([each["label"] for each in examples])}
