"""The example that converts a custom model: equal outputs in both directions, and as a script."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageClassification

from plain_vit.conversion.tables.engine import convert
from plain_vit.errors import MappingError
from tests import ROOT
from tests.conftest import randomize_

SCRIPT = ROOT / "examples" / "convert_your_own.py"
spec: Any = importlib.util.spec_from_file_location("convert_your_own", SCRIPT)
example: Any = importlib.util.module_from_spec(spec)
sys.modules["convert_your_own"] = example  # transformers looks up classes by their module
spec.loader.exec_module(example)

# Sums in a different order: our patch projection is a convolution, and we scale queries before the product.
TOLERANCE = 1e-5


def unequal(seed: int = 0) -> Any:
    """Return a custom model with random parameters, whose sizes all differ."""
    model = example.HomeGrownViT(
        image=(12, 35), patch=(4, 7), channels=3, width=30, depth=2, heads=5, mlp_width=44, classes=11
    )
    randomize_(model, seed)
    return model.eval()


def test_the_example_has_the_size_of_the_tutorials() -> None:
    model = example.HomeGrownViT()
    assert sum(parameter.numel() for parameter in model.parameters()) == 7850


def test_the_logits_are_the_home_grown_model_s() -> None:
    model = unequal()
    assert example.largest_difference(model, example.to_plain_vit(model)) <= TOLERANCE


def test_the_export_gives_every_tensor_bit_for_bit() -> None:
    model, again = unequal(), unequal(seed=1)
    example.from_plain_vit(example.to_plain_vit(model), again)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_missing_and_a_strange_tensor_are_named_together() -> None:
    model = unequal()
    state = model.state_dict()
    state["blocks.1.gain"] = state.pop("blocks.0.key.bias")
    converted = example.to_plain_vit(model)
    with pytest.raises(MappingError, match=r"(?s)blocks\.0\.key\.bias.*blocks\.1\.gain"):
        convert(example.ROWS, state, converted.state_dict(), converted.config)


def test_the_loss_is_that_of_the_bounded_logits() -> None:
    model = example.to_plain_vit(unequal())
    pixel_values, labels = torch.randn(3, 3, 12, 35), torch.tensor([1, 5, 10])
    outputs = model(pixel_values, labels=labels)
    assert torch.equal(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))
    assert torch.equal(model(pixel_values, return_dict=False)[0], outputs.logits)


@pytest.mark.slow
def test_the_script_saves_a_folder_that_the_auto_classes_open(tmp_path: Path) -> None:
    source = randomize_(example.HomeGrownViT()).eval()
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    script = [sys.executable, str(SCRIPT), "weights.pt", "converted"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "largest difference of the logits" in done.stdout
    pixels = torch.randn(4, 1, 28, 28)
    theirs = source(pixels)
    plain = AutoModelForImageClassification.from_pretrained(tmp_path / "converted")
    bounded = example.TanhClassifier.from_pretrained(tmp_path / "converted")
    assert torch.allclose(plain(pixels).logits.tanh(), theirs, rtol=0, atol=TOLERANCE)
    assert torch.allclose(bounded(pixels).logits, theirs, rtol=0, atol=TOLERANCE)
    assert torch.equal(plain(pixels).logits.argmax(dim=-1), theirs.argmax(dim=-1))


def test_the_config_names_every_size() -> None:
    config = example.config_of(unequal())
    assert (config.image_size, config.patch_size, config.num_channels) == ((12, 35), (4, 7), 3)
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (30, 5, 44)
    assert (config.num_labels, config.layer_norm_eps) == (11, 1e-5)
