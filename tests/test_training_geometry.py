"""Training images have the geometry of the image processor, unless a crop is asked for."""

from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest
import torch
from transformers import (
    BitImageProcessor,
    CLIPImageProcessor,
    ConvNextImageProcessor,
    DeiTImageProcessor,
    ViTImageProcessor,
)

from plain_vit import PlainViTImageProcessor
from plain_vit.errors import TrainingError
from plain_vit.training.data.augmentation import training_transform
from plain_vit.training.data.decoding import try_image
from tests.test_training_images import photograph, stored

SIZE = {"height": 24, "width": 24}
CROP = {"do_center_crop": True, "crop_size": SIZE}
PROCESSORS = {
    "stretch": PlainViTImageProcessor(size={"height": 24, "width": 16}),
    "shorter edge, crop": PlainViTImageProcessor(size={"shortest_edge": 27}, **CROP),
    "cover, crop": PlainViTImageProcessor(size={"height": 30, "width": 26}, resize_mode="cover", **CROP),
    "contain, pad": PlainViTImageProcessor(size=SIZE, resize_mode="contain", **CROP, pad_color=(9, 99, 199)),
    "stretch, crop": PlainViTImageProcessor(size={"height": 31, "width": 29}, **CROP),
    "bicubic": PlainViTImageProcessor(size={"shortest_edge": 24}, resample=3, **CROP),
    "torch": PlainViTImageProcessor(size={"shortest_edge": 27}, resize_with="torch", **CROP),
    "stock ViT": ViTImageProcessor(size=SIZE),
    "stock DeiT": DeiTImageProcessor(size={"height": 27, "width": 27}, **CROP),
    "stock CLIP": CLIPImageProcessor(size={"shortest_edge": 24}, **CROP),
    "stock BiT": BitImageProcessor(size={"shortest_edge": 24}, **CROP),
    "stock ConvNeXt": ConvNextImageProcessor(size={"shortest_edge": 24}, crop_pct=0.9),
}


def circle() -> PIL.Image.Image:
    """Return a white circle of 50 pixels in the middle of 200 x 100."""
    image = PIL.Image.new("RGB", (200, 100))
    PIL.ImageDraw.Draw(image).ellipse((75, 25, 124, 74), fill="white")
    return image


def extent(pixels: torch.Tensor) -> tuple[int, int]:
    """Return height and width of what is brighter than the background."""
    bright = pixels.mean(dim=0) > 0
    return int(bright.any(dim=1).sum()), int(bright.any(dim=0).sum())


@pytest.mark.parametrize("options", [{}, {"crop_padding": 4}, {"horizontal_flip": 0.5}], ids=str)
def test_a_circle_stays_a_circle_where_the_evaluation_crops(options):
    processor = PlainViTImageProcessor(
        size={"shortest_edge": 56}, do_center_crop=True, crop_size={"height": 56, "width": 56}
    )
    evaluated = extent(processor(circle(), return_tensors="pt").pixel_values[0])
    assert evaluated == (28, 28)
    shapes = set()
    for seed in range(5):
        torch.manual_seed(seed)
        shapes.add(extent(training_transform(processor, **options)(circle())))
    assert evaluated in shapes
    if "crop_padding" not in options:
        assert shapes == {evaluated}
    else:
        assert all(height <= 28 and width <= 28 for height, width in shapes)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(61, 47), (47, 61), (40, 40), (23, 90)], ids=str)
def test_training_without_a_crop_shows_what_the_evaluation_shows(name, size):
    processor: Any = PROCESSORS[name]
    image = photograph(*size)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    pixels = training_transform(processor)(image)
    assert pixels.shape == expected.shape
    level = 1 / 255 / min(processor.image_std)
    # torch resizes where the whole image is stretched: each of two passes rounds to whole levels.
    assert (pixels - expected).abs().max() <= (2.5 * level if name in ("stretch", "stock ViT") else 1e-3 * level)


def test_an_image_whose_shape_decides_its_size_is_named():
    processor = PlainViTImageProcessor(size={"shortest_edge": 24}, do_center_crop=False)
    crop = training_transform(processor).crop
    assert try_image(stored(photograph(40, 40), "png"), "", crop)[0].shape == (3, 24, 24)
    _, broken = try_image(stored(photograph(61, 47), "png"), "row 3", crop)
    assert broken.startswith("row 3 (the image processor makes it 24 x 31 pixels, not 24 x 24: add --crop_scale")


def test_simple_random_crop_keeps_the_shape_and_reaches_into_the_padding():
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16})
    transform = training_transform(processor, crop_padding=5)
    image = photograph(160, 120)  # covers 24 x 16 at 24 x 32
    whole = np.asarray(image.resize((32, 24), PIL.Image.Resampling.BILINEAR), dtype=float).transpose(2, 0, 1)
    padded = np.pad(whole, ((0, 0), (5, 5), (5, 5)), mode="reflect")
    corners = set()
    for seed in range(60):
        torch.manual_seed(seed)
        levels = transform.augment(transform.crop(image)).numpy().astype(float)
        off = {
            (top, left): np.abs(padded[:, top : top + 24, left : left + 16] - levels).max()
            for top in range(11)
            for left in range(27)
        }
        corner = min(off, key=lambda place: off[place])
        assert off[corner] <= 2  # both round each pass
        corners.add(corner)
    assert len(corners) > 40
    assert {top for top, _ in corners} >= {0, 10}


def test_two_crops_and_crops_that_cannot_be_are_refused():
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16})
    for options, message in (
        ({"crop_scale": 0.5, "crop_padding": 4}, "crop_scale and crop_padding each set a crop"),
        ({"resize_to": 32, "crop_padding": 4}, "resize_to and crop_padding each set a crop"),
        ({"crop_scale": 0.5, "resize_to": 32}, "crop_scale and resize_to each set a crop"),
        ({"resize_to": 20}, "resize_to is 20: expected at least the 24 pixels"),
        ({"crop_padding": 16}, "crop_padding is 16: expected less than the 16 pixels"),
    ):
        with pytest.raises(TrainingError, match=message):
            training_transform(processor, **options)
