"""Rendered characters: a dataset of any size, drawn with Pillow's font and determined by a seed."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

# I and O are left out: rotated and squeezed, they look like 1 and 0.
CHARACTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
IMAGE_SIZE = 24  # three times the 8 pixels of scikit-learn's handwritten digits
STROKES = (0, 2, 4, 6)  # extra pen width, in pixels of the template
TEMPLATE_SIZE = 96
RESOLUTIONS = (8, 12, 24)  # pixels per side at which a glyph may have been scanned; each divides SUPERSAMPLED_SIZE
SUPERSAMPLED_SIZE = 48
CHUNK = 1024  # glyphs rendered at once, to bound memory


@cache
def _templates() -> torch.Tensor:
    """Draw each character with each pen, cropped to the template's height: [characters * strokes, 1, 96, 96]."""
    font = ImageFont.load_default(size=TEMPLATE_SIZE)
    drawn = []
    for character in CHARACTERS:
        for stroke in STROKES:
            left, top, right, bottom = font.getbbox(character, stroke_width=stroke)
            canvas = Image.new("L", (int(right - left), int(bottom - top)))
            ImageDraw.Draw(canvas).text((-left, -top), character, fill=255, font=font, stroke_width=stroke)
            height = TEMPLATE_SIZE
            width = round(canvas.width * height / canvas.height)
            canvas = canvas.resize((min(width, TEMPLATE_SIZE), height), Image.Resampling.BILINEAR)
            template = Image.new("L", (TEMPLATE_SIZE, TEMPLATE_SIZE))
            template.paste(canvas, ((TEMPLATE_SIZE - canvas.width) // 2, 0))
            drawn.append(np.asarray(template, dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(drawn))[:, None]


def _sampling_grid(rng: np.random.Generator, count: int) -> torch.Tensor:
    """Draw the sampling grid on the template: an affine map and a smooth deformation, [count, 48, 48, 2]."""
    angle = rng.normal(0, 0.14, count)  # radians
    shear = rng.normal(0, 0.18, count)
    height = rng.uniform(0.75, 1.05, count)  # fractions of the image
    width = height * rng.uniform(0.65, 1.15, count)
    offset = rng.normal(0, 0.06, (count, 2))
    cos, sin = np.cos(angle), np.sin(angle)
    # From output to template: undo the offset, the rotation, the slant and the size, in this order.
    rows = [
        [(cos - shear * sin) / width, (sin + shear * cos) / width, offset[:, 0]],
        [-sin / height, cos / height, offset[:, 1]],
    ]
    affine = torch.from_numpy(np.stack([np.stack(row, axis=-1) for row in rows], axis=1)).float()  # [count, 2, 3]
    grid = F.affine_grid(affine, [count, 1, SUPERSAMPLED_SIZE, SUPERSAMPLED_SIZE], align_corners=False)
    bend = torch.from_numpy(rng.normal(0, 0.09, (count, 2, 4, 4))).float()
    bend = F.interpolate(bend, size=(SUPERSAMPLED_SIZE, SUPERSAMPLED_SIZE), mode="bicubic", align_corners=False)
    return grid + bend.permute(0, 2, 3, 1)


def _render_chunk(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    count = len(labels)
    pens = rng.integers(len(STROKES), size=count)
    templates = _templates()[labels * len(STROKES) + pens]
    ink = F.grid_sample(templates, _sampling_grid(rng, count), align_corners=False)  # [count, 1, 48, 48]
    resolution = rng.choice(RESOLUTIONS, size=count)
    images = torch.empty(count, 1, IMAGE_SIZE, IMAGE_SIZE)
    for size in RESOLUTIONS:
        chosen = torch.from_numpy(resolution == size)
        scanned = F.avg_pool2d(ink[chosen], SUPERSAMPLED_SIZE // size)
        images[chosen] = F.interpolate(scanned, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    paper = torch.from_numpy(rng.uniform(0, 0.15, (count, 1, 1, 1))).float()
    contrast = torch.from_numpy(rng.uniform(0.7, 1.6, (count, 1, 1, 1))).float()  # above 1, ink saturates
    noise = torch.from_numpy(rng.normal(0, 0.04, (count, 1, IMAGE_SIZE, IMAGE_SIZE))).float()
    images = (paper + images * contrast + noise).clamp(0, 1)
    return (images[:, 0] * 255).round().to(torch.uint8).numpy()


def render_glyphs(count: int, *, seed: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Render characters of random size, position, rotation, slant, deformation, pen, sharpness, contrast and noise.

    Args:
        count: number of images; the counts of the characters differ by at most one.
        seed: the same seed gives the same glyphs.

    Returns:
        Images [count, 24, 24], light ink on dark paper, 0 to 255; labels [count], indices into `CHARACTERS`.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(CHARACTERS))
    images = [_render_chunk(rng, labels[start : start + CHUNK]) for start in range(0, count, CHUNK)]
    return np.concatenate(images), labels
