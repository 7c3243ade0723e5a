"""Damaged checkpoints in `from_checkpoint`: they open with the values in the file or raise a documented error."""

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import safetensors.torch
import timm
import torch
import vit_pytorch
from hypothesis import strategies
from timm.models import save_for_hf
from transformers import ViTConfig, ViTForImageClassification

from plain_vit.conversion import from_checkpoint, from_module
from plain_vit.errors import PlainViTError
from tests.conftest import randomize_
from tests.files.test_hostile_files import mutated, mutations
from tests.sizes import draws
from tests.sources.bad_models import save_ours

QUIET = list(hypothesis.HealthCheck)


def vit() -> torch.nn.Module:
    return vit_pytorch.ViT(
        image_size=24, patch_size=8, num_classes=5, dim=20, depth=2, heads=3, dim_head=10, mlp_dim=24
    )


@pytest.mark.slow(quick=[".pt"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_mutated_model_opens_with_the_numbers_it_holds_or_gets_a_documented_error(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"vit{suffix}"
    state = randomize_(vit()).state_dict()
    safetensors.torch.save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    whole, opened = path.read_bytes(), []

    @hypothesis.settings(max_examples=draws(120, nightly=1000), database=None, suppress_health_check=QUIET)
    @hypothesis.given(mutations(len(whole)))
    def check(edits: list[tuple[str, int, int, bytes]]) -> None:
        path.write_bytes(mutated(whole, edits))
        started = time.monotonic()
        try:
            model = from_checkpoint(path, num_attention_heads=3, image_size=24, patch_size=8).model
        except PlainViTError:
            return
        finally:
            assert time.monotonic() - started < 60
        opened.append(edits)
        theirs = vit()  # opens the file with the format's own reader
        theirs.load_state_dict(
            safetensors.torch.load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
        )
        expected = from_module(theirs).state_dict()
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    check()
    assert opened, "no mutated file opened: the mutations are too coarse to say anything"


# ---- settings ----


def save_timm(folder: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2)
    save_for_hf(model, folder, model_args={"img_size": 32, "depth": 2}, safe_serialization=True)


def save_stock(folder: Path) -> None:
    config = ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=14, patch_size=7
    )
    ViTForImageClassification(config).save_pretrained(folder)


FOLDERS: dict[str, Callable[[Path], object]] = {"ours": save_ours, "timm": save_timm, "transformers": save_stock}

LEAVES = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(-(10**12), 10**12),
    strategies.integers(-2, 20),
    strategies.floats(allow_nan=False, allow_infinity=False),
    strategies.sampled_from(["", "gelu", "evil", "mean", "../x", "user/name", "auto", "0"]),
)
VALUES = strategies.recursive(
    LEAVES, lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text("ab0"), inner)
)


def places(settings: object, at: tuple = ()) -> list[tuple]:
    """Return the path of each value in nested settings."""
    if not isinstance(settings, dict):
        return []
    return [place for name, value in settings.items() for place in ((*at, name), *places(value, (*at, name)))]


def changed(settings: dict[str, Any], place: tuple, value: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(settings))
    inner = copy
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_spoilt_settings_open_the_model_or_get_a_documented_error(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    files = {name: json.loads((tmp_path / name).read_text()) for name in ("config.json", "preprocessor_config.json")
             if (tmp_path / name).exists()}  # fmt: skip
    spots = [(name, place) for name, settings in files.items() for place in places(settings)]
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    count = sum(tensor.numel() for tensor in tensors.values())

    @hypothesis.settings(max_examples=draws(120, nightly=1000), database=None, suppress_health_check=QUIET)
    @hypothesis.given(
        strategies.lists(strategies.tuples(strategies.sampled_from(spots), VALUES), min_size=1, max_size=2)
    )
    def check(edits: list[tuple[tuple[str, tuple], object]]) -> None:
        spoilt = dict(files)
        for (name, place), value in edits:
            if place in places(spoilt[name]):
                spoilt[name] = changed(spoilt[name], place, value)
        for name, settings in spoilt.items():
            (tmp_path / name).write_text(json.dumps(settings))
        started = time.monotonic()
        try:
            with warnings.catch_warnings():  # a key that a later version may know is kept, with a warning
                warnings.filterwarnings("ignore", "this config, saved by plain-vit .* does not know")
                model = from_checkpoint(tmp_path).model
        except PlainViTError:
            return
        finally:
            assert time.monotonic() - started < 60
        assert sum(tensor.numel() for tensor in model.state_dict().values()) == count

    check()
