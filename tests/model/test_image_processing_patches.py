"""Image processors that keep the aspect ratio within a maximum number of patches: SigLIP 2's pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, Siglip2ImageProcessor, Siglip2ImageProcessorPil

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor, PlainViTImageProcessorPil
from plain_vit.conversion.sources.timm.pixels import processor_to_timm
from plain_vit.conversion.sources.transformers.pixels import stock_processor
from plain_vit.errors import ExportError
from tests.conftest import randomize_
from tests.tiny import difference, tiny_config

SIZES = [(70, 95), (300, 40), (33, 600), (256, 256), (5, 5)]


def photos(sizes: list[tuple[int, int]] = SIZES) -> list[Image.Image]:
    """Return images of these sizes (height, width)."""
    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


@pytest.mark.parametrize("most", [7, 64, 256])
@pytest.mark.parametrize("kind", [PlainViTImageProcessor, PlainViTImageProcessorPil])
def test_the_patches_are_those_of_siglip_2s_processor_with_pillow(kind: Any, most: int) -> None:
    settings = {"patch_size": 16, "max_num_patches": most, "image_mean": (0.4, 0.5, 0.6), "resample": 3}
    ours = kind(**settings)(photos(), return_tensors="pt")
    theirs = Siglip2ImageProcessorPil(**settings)(photos(), return_tensors="pt")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype
        assert difference(ours[name].float(), theirs[name].float()) <= 1e-6, name
    assert torch.equal(ours["spatial_shapes"], theirs["spatial_shapes"])


def test_the_patches_are_those_of_siglip_2s_processor_with_torch() -> None:
    settings = {"patch_size": 14, "max_num_patches": 64}
    ours = PlainViTImageProcessor(**settings, resize_with="torch")(photos(), return_tensors="pt")
    theirs = Siglip2ImageProcessor(**settings)(photos(), return_tensors="pt")
    assert torch.equal(ours["spatial_shapes"], theirs["spatial_shapes"])
    assert difference(ours["pixel_values"], theirs["pixel_values"]) <= 2e-6


@pytest.mark.parametrize("resize_with", ["pillow", "torch"])
def test_settings_are_saved_and_go_to_siglip_2s_class(resize_with: str, tmp_path: Path) -> None:
    processor = PlainViTImageProcessor(patch_size=16, max_num_patches=64, resize_with=resize_with)
    processor.save_pretrained(tmp_path)
    again = AutoImageProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    expected = processor(photos(), return_tensors="pt")
    for other in (again, stock_processor(processor)):
        found = other(photos(), return_tensors="pt")
        assert found.keys() == expected.keys() == set(other.model_input_names)
        assert difference(found["pixel_values"], expected["pixel_values"]) <= 1e-6
    with pytest.raises(ExportError, match="max_num_patches=64"):
        processor_to_timm(processor)


def test_a_model_takes_what_the_processor_returns_and_gets_each_image_whole() -> None:
    processor = PlainViTImageProcessor(patch_size=14, max_num_patches=20)
    model = randomize_(PlainViTForImageClassification(tiny_config(patch_size=14, image_size=56))).eval()
    together = model(**processor(photos(), return_tensors="pt")).logits
    for image, logits in zip(photos(), together, strict=True):
        assert difference(model(**processor(image, return_tensors="pt")).logits[0], logits) <= 1e-5


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_num_patches": 64}, "patch_size is None: expected a positive int"),
        ({"patch_size": 16}, "max_num_patches is None: expected a positive int"),
        ({"patch_size": 16, "max_num_patches": 0}, "max_num_patches is 0"),
        ({"patch_size": (16, 8), "max_num_patches": 4}, r"patch_size is \(16, 8\)"),
        ({"patch_size": 16, "max_num_patches": 4, "resize_mode": "cover"}, "omit resize_mode"),
        ({"patch_size": 16, "max_num_patches": 4, "do_center_crop": True, "crop_size": 32}, "omit do_center_crop"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PlainViTImageProcessor(**settings)


def test_images_that_are_not_resized_must_consist_of_patches() -> None:
    processor = PlainViTImageProcessor(patch_size=16, max_num_patches=8, do_resize=False)
    assert processor(photos([(32, 48)]), return_tensors="pt")["spatial_shapes"].tolist() == [[2, 3]]
    for size in ((33, 48), (48, 64)):
        with pytest.raises(ValueError, match="expected a multiple of 16 in each direction, and at most 8 patches"):
            processor(photos([size]))
