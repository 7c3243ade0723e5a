"""Small image towers of open_clip, one of each supported kind, and OpenAI's own class."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from open_clip.model import CLIP, CustomTextCLIP
from torch import nn

from tests.conftest import randomize_

TEXT: dict[str, Any] = {"context_length": 7, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
EMBED_DIM = 30
# All dimensions differ, and neither image nor patches are square.
VISION: dict[str, Any] = {"image_size": (24, 56), "patch_size": (8, 14), "width": 40, "layers": 3, "head_width": 8,
                          "mlp_ratio": 1.3}  # fmt: skip
CLIPA = {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True}

# `quick_gelu` is a setting of the model, the others are settings of its image tower.
NATIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "quick_gelu": {"quick_gelu": True},
    "CLIPA": CLIPA,
    "mean": {"pool_type": "avg"},
    "every token": {"pool_type": "none", "final_ln_after_pool": True},
    "LayerScale": {"ls_init_value": 0.1},
    "norms inside": {"qk_norm": True, "scale_attn_inner": True, "scale_fc": True},
    "custom blocks": {"block_type": "custom"},
    "sines": {"pos_embed_type": "sin_cos_2d", "image_size": 40, "patch_size": 8},
    "tanh, epsilon": {"act_kwargs": {"approximate": "tanh"}, "norm_kwargs": {"eps": 1e-3}},
    "CoCa's tokens": {"output_tokens": True},
}
# By type of the projection after the timm model.
TRUNKS: dict[str, dict[str, Any]] = {
    "projection": {"timm_pool": "token", "timm_proj": "linear"},
    "projection with bias": {"timm_pool": "avg", "timm_proj": "linear", "timm_proj_bias": True},
    "classifier as projection": {"timm_pool": "avg", "timm_proj": None},
    "no projection": {"timm_pool": "avg", "timm_proj": "none"},
}


def tower_settings(**changes: Any) -> dict[str, Any]:
    """Return a `model_cfg` with a small image tower."""
    quick_gelu = changes.pop("quick_gelu", False)
    vision_cfg = changes if "timm_model_name" in changes else VISION | changes
    return {"embed_dim": EMBED_DIM, "quick_gelu": quick_gelu, "vision_cfg": vision_cfg, "text_cfg": TEXT}


def trunk_settings(name: str) -> dict[str, Any]:
    """Return a `model_cfg` whose image tower is timm's smallest model."""
    return tower_settings(timm_model_name="test_vit", image_size=160, **TRUNKS[name])


def clip(model_cfg: dict[str, Any], custom_text: bool = False) -> Any:
    """Return a whole model in evaluation mode with random parameters."""
    return randomize_((CustomTextCLIP if custom_text else CLIP)(**model_cfg)).eval()


@cache
def openai_module() -> ModuleType:
    """Import the models of OpenAI's package, whose other modules need an outdated setuptools."""
    spec = importlib.util.find_spec("clip")
    assert spec is not None
    path = Path(str(spec.origin)).with_name("model.py")
    spec = importlib.util.spec_from_file_location("clip.model", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["clip.model"] = module
    spec.loader.exec_module(module)
    return module


def openai_clip() -> Any:
    """Return OpenAI's own model in evaluation mode with random parameters."""
    # Embedding, image size, layers, width and patch size of the image tower, then the text tower's.
    return randomize_(openai_module().CLIP(EMBED_DIM, 40, 3, 128, 8, 7, 50, 16, 2, 1)).eval()


def tower_of(model: nn.Module) -> Any:
    """Return the image tower of a model."""
    return model.visual
