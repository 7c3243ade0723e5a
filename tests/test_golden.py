"""Folders outlive versions: what every released version saved opens today, with the same numbers."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

import plain_vit
from tests.golden.save_this_version import golden_pixels
from tests.tiny import difference

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.name[0].isdigit())
# Another processor or release of torch may sum in another order.
REORDERED = 1e-5


def test_this_version_has_its_golden_folder() -> None:
    assert plain_vit.__version__ in VERSIONS, "run `python -m tests.golden.save_this_version` before the release"


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
    prepared = AutoImageProcessor.from_pretrained(GOLDEN / version)(image, return_tensors="pt").pixel_values
    assert torch.equal(prepared, torch.ones(1, 3, 12, 24))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_folder_is_small(version: str) -> None:
    assert sum(path.stat().st_size for path in (GOLDEN / version).iterdir()) < 100_000
