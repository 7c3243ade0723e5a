"""Backward compatibility: folders saved by every released version open with the same outputs."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import functional
from transformers import AutoImageProcessor, AutoModelForImageClassification

import plain_vit
from plain_vit.conversion import from_checkpoint
from tests.model.golden.save_this_version import golden_pixels
from tests.tiny import difference

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.name[0].isdigit())
# Other processors and releases of torch may sum in a different order.
REORDERED = 1e-5


def test_this_version_has_its_golden_folder() -> None:
    assert plain_vit.__version__ in VERSIONS, "run `python -m tests.model.golden.save_this_version` before the release"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_folder_opens_with_the_same_numbers(version: str) -> None:
    model_class: Any = AutoModelForImageClassification
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = model_class.from_pretrained(GOLDEN / version, output_loading_info=True)
    assert not any(info.values())
    expected = load_file(GOLDEN / version / "expected.safetensors")
    with torch.no_grad():
        assert difference(model(golden_pixels()).logits, expected["logits"]) < REORDERED
        assert difference(model(golden_pixels().view(2, 3, 24, 12)).logits, expected["resized"]) < REORDERED
    assert model.config.id2label == {0: "ant", 1: "bee", 2: "cat"}
    image = Image.fromarray(np.full((31, 17, 3), 255, dtype=np.uint8))
    processor: Any = AutoImageProcessor.from_pretrained(GOLDEN / version)
    assert torch.equal(processor(image, return_tensors="pt").pixel_values, torch.ones(1, 3, 12, 24))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 17, 3), dtype=np.uint8))
    resized = functional.to_tensor(image.resize((24, 12), Image.Resampling.BILINEAR))
    expected = functional.normalize(resized, [0.5] * 3, [0.5] * 3)
    converted: Any = from_checkpoint(GOLDEN / version).image_processor
    for opened in (processor, converted):
        assert torch.equal(opened(image, return_tensors="pt").pixel_values[0], expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_folder_is_small(version: str) -> None:
    assert sum(path.stat().st_size for path in (GOLDEN / version).iterdir()) < 100_000
