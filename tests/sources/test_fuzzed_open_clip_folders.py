"""Random image towers of open_clip, live and as pushed folders: equal outputs, or errors for both."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.model import _build_vision_tower
from safetensors.torch import save_file
from torch import nn

from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.open_clip_models import tower_settings
from tests.sources.test_fuzzed_timm_folders import both_opened
from tests.sources.truthful import logits_differ_by

BOTH = (True, False)
NATIVE: Mapping[str, Sequence[Any]] = {
    "ls_init_value": (None, 0.1, 0.0), "patch_dropout": (0.0, 0.3), "no_ln_pre": BOTH, "final_ln_after_pool": BOTH,
    "pool_type": ("tok", "avg", "none"), "pos_embed_type": ("learnable", "sin_cos_2d"), "output_tokens": BOTH,
    "act_kwargs": (None, {}, {"approximate": "tanh"}, {"approximate": "none"}),
    "norm_kwargs": (None, {}, {"eps": 1e-3}, {"eps": 1e-5, "elementwise_affine": True}, {"elementwise_affine": False}),
    "block_type": (None, "default", "custom"), "qk_norm": BOTH, "scale_attn_inner": BOTH, "scale_fc": BOTH,
    "scale_attn": BOTH, "scale_heads": BOTH, "scaled_cosine_attn": BOTH, "attentional_pool": (False, True, "cascade"),
    "attn_pooler_heads": (2,), "attn_pooler_queries": (3,), "timm_pool": ("avg", ""), "timm_proj": ("linear", None),
    "timm_drop": (0.5,), "timm_model_name": (None, ""), "quick_gelu": BOTH,
}  # fmt: skip
TRUNK: Mapping[str, Sequence[Any]] = {
    "timm_model_name": (
        "test_vit", "test_vit2", "test_vit3", "test_vit4", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224",
        "eva02_tiny_patch14_224", "vit_pe_core_tiny_patch16_384", "vit_relpos_small_patch16_224", "test_resnet",
    ),
    "timm_pool": ("avg", "token", "map", "avgmax", "max", "", "abs_attn"),
    "timm_proj": ("linear", "mlp", "none", None, ""), "timm_proj_bias": BOTH, "timm_drop": (0.0, 0.2),
    "timm_drop_path": (None, 0.1), "patch_dropout": (0.0, 0.25), "image_size": (160, 224, (96, 128)),
    "width": (64,), "layers": (2,), "quick_gelu": BOTH, "pool_type": ("avg",), "output_tokens": BOTH,
}  # fmt: skip
EXACT, ROUNDED = 1e-9, 1e-6  # in float64; rotations are computed in float32


def drawn(kind: str, draw: random.Random) -> dict[str, Any]:
    """Return a `model_cfg`; not all of its settings fit together."""
    options = NATIVE if kind == "native" else TRUNK
    share = 0.15 if kind == "native" else 0.4
    changes = {name: draw.choice(values) for name, values in options.items() if draw.random() < share}
    if kind == "trunk":
        return tower_settings(**{**changes, "timm_model_name": draw.choice(TRUNK["timm_model_name"])})
    high, wide = draw.choice([(4, 4), (4, 6), (5, 3)])
    head_width = draw.choice([8, 12, 9])
    rows, columns, rest = draw.randint(1, 4), draw.randint(1, 4), draw.choice([0, 0, 0, 1])
    geometry = {
        "patch_size": (high, wide), "image_size": (high * rows + rest, wide * columns), "head_width": head_width,
        "width": draw.choice([1, 2, 3]) * head_width + draw.choice([0, 0, 0, 2]), "layers": draw.randint(1, 3),
        "mlp_ratio": draw.choice([1.5, 2.0, 4.9231]),
    }  # fmt: skip
    return tower_settings(**geometry | changes)


def save_folder(folder: Path, tower: nn.Module, model_cfg: Mapping[str, Any]) -> None:
    """Write the folder of a whole model whose text tower is reduced to one tensor."""
    state = {f"visual.{name}": tensor.contiguous() for name, tensor in tower.state_dict().items()}
    save_file(state | {"ln_final.weight": torch.ones(3)}, folder / "open_clip_model.safetensors")
    described = {"model_cfg": model_cfg, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(described), encoding="utf-8")


def size_of(tower: Any) -> tuple[int, int]:
    """Return the image size of a tower; a timm trunk keeps the size in its name, whatever the settings say."""
    size = tower.trunk.patch_embed.img_size if hasattr(tower, "trunk") else tower.image_size
    return tuple(size)


def off_by(tower: Any, ours: nn.Module) -> float:
    """Return the largest difference of the features, in float64."""
    tower, ours = tower.double().eval(), ours.double().eval()
    tower.output_tokens = False
    return logits_differ_by(tower, ours, (3, *size_of(tower)), dtype=torch.float64)


def differing_fields(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Return the differing fields of two configs, except weight initialisation, which a module does not reveal."""
    first, second = one.config.to_dict(), other.config.to_dict()
    first["drop_path_rate"] = pytest.approx(first["drop_path_rate"])  # timm spaces the rates of its blocks in float32
    names = (first.keys() | second.keys()) - {"_name_or_path", "architectures", "dtype", "layer_scale_init_value"}
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


@pytest.mark.slow
@pytest.mark.parametrize("kind, usually, nightly", [("native", 40, 1000), ("trunk", 12, 100)])
def test_a_folder_of_open_clip_has_its_numbers_or_is_refused_like_the_module(
    kind: str, usually: int, nightly: int, tmp_path: Path
) -> None:
    built = opened = 0
    for seed in range(draws(usually, nightly)):
        model_cfg = drawn(kind, random.Random(seed))
        try:
            torch.manual_seed(seed)
            tower: Any = _build_vision_tower(model_cfg["embed_dim"], model_cfg["vision_cfg"], model_cfg["quick_gelu"])
            tower = randomize_(tower, seed).eval()
            with torch.no_grad():
                tower(torch.zeros(1, 3, *(size_of(tower) if hasattr(tower, "conv1") else (160, 160))))
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:  # open_clip's refusals
            if not isinstance(error, AssertionError) or "height" not in str(error):  # a trunk of another size
                continue
        built += 1
        save_folder(tmp_path, tower, model_cfg)
        what = f"{kind}, seed {seed}: {model_cfg['vision_cfg']}, quick_gelu {model_cfg['quick_gelu']}"
        both = both_opened(what, tower, tmp_path)
        if both is None:
            continue
        opened += 1
        assert not (differing := differing_fields(*both)), f"{what}: module and folder have {differing}"
        limit = ROUNDED if "eva02" in str(model_cfg) or "_pe_" in str(model_cfg) else EXACT
        for name, ours in zip(("module", "folder"), both, strict=True):
            off = off_by(tower, ours)
            assert off <= limit, f"{what}: the {name} is off by {off:.1e}"
    assert opened > built / 5, f"{opened} of {built}"
