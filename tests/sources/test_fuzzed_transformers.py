"""Models of transformers with changed configurations, live and as folders: equal outputs, or errors for both."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plain_vit.conversion import from_checkpoint, from_module
from plain_vit.errors import PlainViTError
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.transformers_models import CASES, REPRESENTATIVES, UNSIZED, outputs_of, pixels_for, stage_differences

PLAIN = "ViTForImageClassification"
ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu", "tanh"]
WORDS = ["none", "mean", "cls", "layer_norm", "rms_norm", "absolute", "relative_key", "bilinear", "axial"]
# Settings without effect on outputs, and names of classes.
LEFT = {"transformers_version", "model_type", "architectures", "dtype", "id2label", "label2id", "return_dict",
        "output_hidden_states", "output_attentions", "problem_type", "is_encoder_decoder", "chunk_size_feed_forward",
        "initializer_range", "initializer_factor"}  # fmt: skip
# In float64, except transformers' eager attention and rotations, which compute in float32.
TOLERANCE = 3e-6
MOST_PATCHES = 1000  # of an image; with one-pixel patches, attention maps could take gigabytes


def other(name: str, value: Any, draw: random.Random) -> Any:
    """Return another value of a setting, which is not always valid."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([0, 1, 2, 3, value + 1, value * 2, max(1, value // 2)])
    if isinstance(value, float) and "theta" in name:
        return draw.choice([10.0, 100.0, 1e4])  # smaller values rotate so far that float32 keeps few digits
    if isinstance(value, float):
        return draw.choice([0.0, 1e-6, 1e-3, 0.1, 0.5, 1.0, 2.0])
    if isinstance(value, str):
        return draw.choice(ACTIVATIONS if value in ACTIVATIONS or "act" in name else [*WORDS, f"{value}x"])
    if value is None:
        return draw.choice([True, False, 1, 2, 0.1, "gelu"])
    if isinstance(value, list | tuple) and value and all(isinstance(number, int) for number in value):
        place = draw.randrange(len(value))
        changed = [*value[:place], draw.choice([value[place] + 1, value[place] * 2, 1]), *value[place + 1 :]]
        return draw.choice([changed, changed, value[0], list(value[:-1])])
    return value


def patches_of(tower: dict[str, Any]) -> float:
    """Return the number of patches of an image for the settings of a tower, or 0 if there are no patches."""
    try:
        sizes = (tower.get("image_size", UNSIZED), tower["patch_size"])
        sides = [np.broadcast_to(np.asarray(size, float), 2) for size in sizes]
        return float(np.prod(sides[0] / np.maximum(sides[1], 1)))
    except (KeyError, TypeError, ValueError):
        return 0.0


def changed_model(case: str, draw: random.Random) -> tuple[Any, dict[str, Any]] | None:
    """Return a model with one to three changed settings, and the changes; None if transformers cannot run it."""
    plain = CASES[case]()
    settings = plain.config.to_dict()
    towers = [settings.get(name) for name in ("vision_config", "backbone_config", "encoder")]
    tower = next((tower for tower in towers if isinstance(tower, dict)), settings)
    fixed = LEFT | {name for name, value in tower.items() if isinstance(value, dict) or name.startswith("_")}
    names = [name for name in tower if name not in fixed]
    edits = {name: other(name, tower[name], draw) for name in draw.sample(names, draw.choice([1, 1, 2, 3]))}
    tower |= edits
    # The file of a tower without blocks cannot be recognised.
    if patches_of(tower) > MOST_PATCHES or 0 in (edits.get("num_hidden_layers"), edits.get("depth")):
        return None
    try:
        module = type(plain)(type(plain.config).from_dict(copy.deepcopy(settings)))
        module = randomize_(module, draw.randrange(10**6)).eval()
        module.set_attn_implementation("eager")
        outputs = outputs_of(module, pixels_for(module)).values()
    except Exception:  # transformers raises many kinds of errors for settings
        return None
    return (module, edits) if all(bool(values.isfinite().all()) for values in outputs) else None


def off_by(module: Any, ours: Any) -> float:
    """Return the largest difference of any stage, in float64."""
    ours = ours.double().eval()
    ours.set_attn_implementation("eager")
    module = copy.deepcopy(module).double()
    found = dict(stage_differences(module, ours, pixels_for(module).double()))
    if type(module).__name__.startswith("QianfanOCR"):
        found.pop(f"block {ours.config.num_hidden_layers}")  # in this class the last hidden state is normalised
    return max(found.values())


def check_case(case: str, count: int, folder: Path) -> int:
    """Compare changed models of a case with transformers, and return how many opened."""
    opened = 0
    for seed in range(count):
        torch.manual_seed(seed)
        changed = changed_model(case, random.Random(f"{case} {seed}"))
        if changed is None:
            continue
        module, edits = changed
        what = f"{case}, seed {seed}, with {edits}"
        module.save_pretrained(folder / str(seed))
        ours: dict[str, Any] = {}
        for name, way, source in (("module", from_module, module), ("folder", from_checkpoint, folder / str(seed))):
            try:
                found = way(source)
            except PlainViTError:
                continue
            ours[name] = getattr(found, "model", found) if name == "folder" else found
        assert len(ours) != 1, f"{what}: only the {next(iter(ours))} opens"
        for name, model in ours.items():
            off = off_by(module, model)
            assert off <= TOLERANCE, f"{what}: the {name} is off by {off:.1e}"
        opened += len(ours) == 2
    return opened


@pytest.mark.slow(quick=REPRESENTATIVES[::8])
@pytest.mark.parametrize("case", CASES)
def test_a_changed_configuration_is_followed_or_refused(case: str, tmp_path: Path) -> None:
    opened = check_case(case, draws({PLAIN: 12}.get(case, 2 if case in REPRESENTATIVES else 1), nightly=12), tmp_path)
    assert case != PLAIN or opened >= 4
