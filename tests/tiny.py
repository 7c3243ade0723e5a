"""Small models of every kind, and a comparison of results."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from tests.conftest import randomize_
from tests.sizes import NIGHTLY

# All dimensions differ, and neither the patches nor the grid (3 x 4) are square.
SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 52,
    "image_size": (24, 56),
    "patch_size": (8, 14),
    "num_labels": 7,
}

# Every choice of the config at least once.
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deit": {"use_distillation_token": True},
    "registers": {"num_register_tokens": 2, "position_embedding_on_prefix": False},
    "registers_last": {"num_register_tokens": 2, "register_tokens_last": True, "pooling": "mean"},
    "mask_token": {"use_mask_token": True},
    "linear_patches": {"patch_projection": "linear", "patch_pre_norm": True, "patch_post_norm": True},
    "resnet": {"resnet_stem": {"depths": (1,)}, "patch_size": (8, 28)},
    "frames": {"num_frames": 2},
    "clip": {"embedding_norm": True, "hidden_act": "quick_gelu", "patch_bias": False, "final_norm": "after_pooling"},
    "sincos": {
        "position_embedding_type": "sincos_2d", "position_embedding_on_prefix": False, "use_class_token": False,
        "pooling": "mean",
    },
    "learned_2d": {"position_embedding_type": "learned_2d"},
    "factorized": {
        "position_embedding_type": "factorized", "position_resampling": "bilinear",
        "position_resampling_to_square": True,
    },
    "no_positions": {"position_embedding_type": "none"},
    "truncate": {"position_resampling": "truncate"},
    "bucketed": {"position_resampling": "bucketed"},
    "rotary": {
        "rope_parameters": {"rope_type": "axial", "axes": "xy", "offset": 1.0, "reference_grid": (5, 7)},
        "key_bias": False,
    },
    "rotary_centered": {
        "rope_parameters": {
            "rope_type": "axial", "rope_theta": 100.0, "coordinates": "centered", "pairs": "halves",
            "frequencies": "period",
        },
        "num_register_tokens": 2, "position_embedding_type": "none",
    },
    "rotary_alternating": {"rope_parameters": {"axis_frequencies": "alternating", "prefix_angles": "learned"}},
    "rotary_mixed": {"rope_parameters": {"rope_type": "mixed", "rope_theta": 10.0, "dtype": "weights"}},
    "relative_table": {"relative_position_bias": {"type": "table"}, "position_embedding_type": "none"},
    "relative_shared": {
        "relative_position_bias": {"type": "table", "shared": True, "resampling": "geometric"},
        "use_class_token": False, "pooling": "mean",
    },
    "relative_mlp": {
        "relative_position_bias": {"type": "mlp", "mlp_size": 30}, "num_register_tokens": 2, "pooling": "mean",
    },
    "relative_mlp_shared": {
        "relative_position_bias": {"type": "mlp", "mlp_size": 30, "shared": True},
    },
    "relative_query": {"relative_position_bias": {"type": "query"}, "position_embedding_type": "none"},
    "relative_windows": {  # of 2 x 2 patches, the lower ones half padding; the middle block attends to the whole image
        "window_attention": {"size": 2, "global_layers": (1,)}, "relative_position_bias": {"type": "decomposed"},
        "use_class_token": False, "pooling": "mean",
    },
    "masked_windows": {
        "window_attention": {"size": 2, "global_layers": (1,), "padding": "masked"}, "rope_parameters": {},
        "position_embedding_type": "none", "use_class_token": False, "pooling": "mean",
    },
    "sandwich": {
        "block_type": "sandwich", "norm_type": "rms_norm", "qk_norm": "norm", "value_norm": True,
        "attention_scale": 1.0, "position_embedding_type": "factorized", "position_table_length": 9,
        "position_resampling": "truncate",
    },
    "prefix_mean": {"pooling": "prefix_mean", "num_register_tokens": 2},
    "prefix_joined": {"pooling": "prefix_joined", "num_register_tokens": 2, "pooling_num_tokens": 2},
    "post_norm": {"block_type": "post_norm"},
    "parallel": {"block_type": "parallel", "qk_norm": "norm", "layer_scale_init_value": 0.3},
    "branches": {"block_type": "branches", "num_branches": 2, "layer_scale_init_value": 0.3},
    "rms": {"norm_type": "rms_norm", "qkv_bias": False, "mlp_bias": False, "attention_output_bias": False},
    "differential": {"attention_type": "differential"},
    "re_attention": {"attention_type": "re_attention"},
    "class_attention": {
        "pooling": "class_attention", "pooling_num_layers": 4, "attention_type": "talking_heads",
        "use_class_token": False, "layer_scale_init_value": 0.3, "final_norm": "after_pooling",
    },
    "locality": {"attention_type": "locality", "patch_projection": "shifted", "patch_pre_norm": True},
    "rms_per_head": {"qk_norm": "rms_per_head", "attention_scale": 0.2},
    "rms_all_heads": {"qk_norm": "rms_all_heads"},
    "shared_keys": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": "norm", "layer_scale_init_value": 0.3,
        "scale_mlp_branch": False,
    },
    "wide_heads": {"head_dim": 12},
    "inner_norms": {"attention_inner_norm": True, "mlp_inner_norm": True},
    "no_projection": {"attention_output_projection": False},
    "swiglu": {"mlp_type": "swiglu", "hidden_act": "silu"},
    "swiglu_packed": {"mlp_type": "swiglu_packed", "hidden_act": "silu", "layer_scale_init_value": 0.3},
    "mean": {"pooling": "mean", "final_norm": "after_pooling"},
    "mean_all": {"pooling": "mean", "pool_prefix_tokens": True, "final_norm": "both"},
    "max": {"pooling": "max", "final_norm": "none"},
    "mean_max": {"pooling": "mean_max"},
    "cls_mean": {"pooling": "cls_mean", "num_register_tokens": 2},
    "map": {"pooling": "map", "use_class_token": False},
    "map_sizes": {"pooling": "map", "pooling_num_attention_heads": 2, "pooling_intermediate_size": 44},
    "query": {"pooling": "query", "use_class_token": False, "qkv_bias": False},
    "prr": {"pooling": "prr"},
    "query_block": {
        "pooling": "query_block", "use_class_token": False, "qk_norm": "norm", "head_dim": 12,
        "final_norm": "both",
    },
    "query_attention": {
        "pooling": "query_attention", "use_class_token": False, "qk_norm": "norm", "final_norm": "both",
        "norm_type": "layer_norm_without_bias", "patch_projection": "linear", "patch_pre_norm": True,
        "patch_post_norm": True,
    },
    "no_pooling": {"pooling": "none"},
    "representation": {"representation_size": 30},
    "projection": {"representation_size": 30, "representation_act": "linear", "representation_bias": False},
}  # fmt: skip


def in_turn(choices: Sequence[Any], quick: Collection[str]) -> list[Any]:
    """Combine variations with choices: each variation with one choice, in turn, or with all choices in the nightly run.

    Args:
        choices: Values of another parameter of a test.
        quick: Cases, as CHOICE-VARIATION, that stay in the default tier; the others are slow.
    """
    cases = []
    for row, name in enumerate(sorted(VARIATIONS)):
        for column, choice in enumerate(choices):
            case = f"{getattr(choice, '__name__', choice)}-{name}"
            if case in quick or NIGHTLY or row % len(choices) == column:
                marks = () if case in quick else pytest.mark.slow
                cases.append(pytest.param(choice, name, id=case, marks=marks))
    return cases


def tiny_config(**fields: Any) -> PlainViTConfig:
    """Return the config of a small model with unequal sizes."""
    return PlainViTConfig(**{**SIZES, **fields})


def build(name: str = "plain", kind: Any = PlainViTForImageClassification, **fields: Any) -> Any:
    """Return a small model of a variation in evaluation mode, with random parameters."""
    return randomize_(kind(tiny_config(**{**VARIATIONS[name], **fields}))).eval()


def pixels(batch: int = 2, height: int = 24, width: int = 56, channels: int = 3, seed: int = 1) -> torch.Tensor:
    """Return normalised pixels of shape (batch, channels, height, width)."""
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(seed))


def difference(ours: torch.Tensor, source: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value of the source."""
    assert ours.shape == source.shape, f"{tuple(ours.shape)} is not {tuple(source.shape)}"
    return ((ours - source).abs().max() / source.abs().max()).item()
