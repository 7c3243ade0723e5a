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
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from plain_vit import PlainViTImageProcessor
from plain_vit.errors import TrainingError
from plain_vit.training.data.augmentation import training_transform
from plain_vit.training.data.decoding import try_image
from plain_vit.training.models import with_test_crop, with_test_size
from tests.training.runs import RESNET, SMALL, small_vit
from tests.training.test_images import photograph, stored

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
    """Return a white circle of 50 pixels in the centre of a 200 x 100 image."""
    image = PIL.Image.new("RGB", (200, 100))
    PIL.ImageDraw.Draw(image).ellipse((75, 25, 124, 74), fill="white")
    return image


def extent(pixels: torch.Tensor) -> tuple[int, int]:
    """Return height and width of the part that is brighter than the background."""
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
    # torch resizes if the whole image is stretched: each of its two passes rounds to integers.
    assert (pixels - expected).abs().max() <= (2.5 * level if name in ("stretch", "stock ViT") else 1e-3 * level)


def test_an_image_whose_shape_decides_its_size_is_named():
    processor = PlainViTImageProcessor(size={"shortest_edge": 24}, do_center_crop=False)
    crop = training_transform(processor).crop
    assert try_image(stored(photograph(40, 40), "png"), "", crop)[0].shape == (3, 24, 24)
    _, broken = try_image(stored(photograph(61, 47), "png"), "row 3", crop)
    assert broken.startswith("row 3 (the image processor makes it 24 x 31 pixels, not 24 x 24: add --crop_scale")


def test_an_elongated_image_is_named_rather_than_resized_to_gigabytes():
    crop = training_transform(PlainViTImageProcessor(size={"height": 224, "width": 224}), crop_padding=4).crop
    assert try_image(stored(photograph(500, 1), "png"), "", crop)[0].shape == (3, 224, 112_000)
    _, broken = try_image(stored(photograph(8_000, 1), "png"), "row 3", crop)
    assert broken.startswith("row 3 (an image of 1x8000 pixels would become 224x1792000, but at most 268435456 pixels")


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
        assert off[corner] <= 2  # both round after each pass
        corners.add(corner)
    assert len(corners) > 40
    assert {top for top, _ in corners} >= {0, 10}


@pytest.mark.parametrize("options", [{}, {"crop_scale": 0.5, "augmentation": "randaugment", "color_jitter": [0.4]}])
def test_a_model_of_one_channel_is_trained_on_the_grey_pixels_of_its_processor(options):
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16}, image_mean=[0.4], image_std=[0.3])
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50), dtype=np.uint8))
    transform = training_transform(processor, **options)
    pixels = transform(image.convert("RGB"))
    assert pixels.shape == (1, 24, 16)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    assert options or (pixels - expected).abs().max() <= 1.001 / 255 / 0.3  # torch and Pillow round differently


def test_two_crops_and_crops_that_cannot_be_are_refused():
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16})
    for options, message in (
        ({"crop_scale": 0.5, "crop_padding": 4}, "crop_scale and crop_padding each set a crop"),
        ({"resize_to": 32, "crop_padding": 4}, "resize_to and crop_padding each set a crop"),
        ({"crop_scale": 0.5, "resize_to": 32}, "crop_scale and resize_to each set a crop"),
        ({"resize_to": 20}, "resize_to is 20: expected at least the 24 pixels"),
        ({"crop_padding": 16}, "crop_padding is 16: expected less than the 16 pixels"),
        ({"resize_to": 16385}, "resize_to is 16385: expected at most 16384 pixels"),
    ):
        with pytest.raises(TrainingError, match=message):
            training_transform(processor, **options)


# The geometry of evaluations, on request


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "stock ConvNeXt"])
def test_test_crop_evaluates_the_centre_of_an_image_that_keeps_its_shape(name):
    processor: Any = PROCESSORS[name]
    height, width = (24, 16) if name == "stretch" else (24, 24)
    cropping = with_test_crop(processor, 0.75)
    image = photograph(90, 67)
    # Like the sources: resize the shorter edge to 32, and crop the centre.
    ratio = min(67 / (height / 0.75), 90 / (width / 0.75))
    sides = (round(90 / ratio), round(67 / ratio)) if height != width else (int(90 / ratio), int(67 / ratio))
    resized = image.resize(sides, PIL.Image.Resampling(processor.resample))
    left, top = round((sides[0] - width) / 2), round((sides[1] - height) / 2)
    expected = np.asarray(resized.crop((left, top, left + width, top + height)), dtype=float).transpose(2, 0, 1)
    seen = cropping(image, do_rescale=False, do_normalize=False, return_tensors="pt").pixel_values[0].numpy()
    within = 0 if isinstance(processor, PlainViTImageProcessor) and processor.resize_with == "pillow" else 2
    assert np.abs(seen.astype(float) - expected).max() <= within or name.startswith("stock")
    assert seen.shape == (3, height, width)
    trained = training_transform(cropping)(image)
    evaluated = cropping(image, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(trained, evaluated, rtol=0, atol=1e-5)
    assert with_test_crop(processor, 1.0)(image, return_tensors="pt").pixel_values.shape[-2:] == (height, width)


def test_a_processor_that_cannot_crop_is_refused():
    with pytest.raises(TrainingError, match="ConvNextImageProcessor cannot crop to 24 x 24: omit --test_crop"):
        with_test_crop(PROCESSORS["stock ConvNeXt"], 0.75)


def test_models_are_evaluated_at_another_size_than_they_are_trained_on():
    model = small_vit()  # 24 x 16, patches of 8
    larger = with_test_size(PlainViTImageProcessor(size={"height": 24, "width": 16}), model, (32, 24))
    assert dict(larger.size) == {"height": 32, "width": 24}
    assert model.config.image_size == (24, 16)
    cropping = with_test_size(PROCESSORS["shorter edge, crop"], model, (48, 48))
    assert dict(cropping.size) == {"shortest_edge": 54}
    assert dict(cropping.crop_size) == {"height": 48, "width": 48}
    with pytest.raises(TrainingError, match="cannot be evaluated at --test_size: .*multiple of patch_size"):
        with_test_size(PROCESSORS["stretch"], model, (33, 24))
    stock = ViTForImageClassification(ViTConfig(**SMALL, image_size=24, patch_size=8))
    with pytest.raises(TrainingError, match="ViTConfig takes images of one size: omit --test_size"):
        with_test_size(PROCESSORS["stock ViT"], stock, (32, 32))
    network = with_test_size(PROCESSORS["stock BiT"], ResNetForImageClassification(ResNetConfig(**RESNET)), (48, 48))
    assert dict(network.crop_size) == {"height": 48, "width": 48}
