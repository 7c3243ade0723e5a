"""Random models of timm's entrypoints, live and as folders that timm saves: equal outputs, or errors for both."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from plain_vit.conversion import from_checkpoint, from_module, to_module
from plain_vit.errors import PlainViTError
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.timm_models import layout_of, same_tensors
from tests.sources.truthful import logits_differ_by
from tests.tiny import difference

Options = Mapping[str, Sequence[Any]]

BOTH = (True, False)
NORMS = ("layernorm", "rmsnorm", "simplenorm")
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "leaky_relu")
POOLINGS = ("", "avg", "avgmax", "max", "token", "map")

# Entrypoints of each class whose layers do not depend on a config.json's arguments, and arguments it can contain.
ENTRYPOINTS: dict[str, Sequence[str]] = {
    "VisionTransformer": (
        "vit_base_patch16_224", "vit_small_patch14_dinov2", "vit_base_patch16_rpn_224", "vit_giant_patch14_dinov2",
        "vit_small_patch16_18x2_224", "vit_pwee_patch16_reg1_gap_256", "vit_dwee_patch16_reg1_gap_256",
        "vit_dpwee_patch16_reg1_gap_256", "aimv2_large_patch14_224", "test_vit3", "beit3_base_patch16_224",
        "vit_base_patch16_xp_224", "vit_so400m_patch14_siglip_384", "deit_small_distilled_patch16_224",
        "vit_base_patch32_clip_quickgelu_224", "deit3_small_patch16_224",
    ),
    "hybrid": ("vit_tiny_r_s16_p8_224",),
    "Eva": (
        "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3_qkvb", "eva_giant_patch14_224",
        "eva02_tiny_patch14_336", "eva02_base_patch14_448", "eva02_large_patch14_clip_336",
        "eva02_enormous_patch14_clip_224", "vit_pe_core_tiny_patch16_384", "vit_pe_core_gigantic_patch14_448",
        "vit_pe_lang_large_patch14_448", "vit_base_patch16_rope_ape_224", "vit_base_patch16_rope_mixed_ape_224",
        "vit_betwixt_patch16_rope_reg4_gap_256", "vit_large_patch16_sapiens2", "vit_7b_patch16_dinov3",
    ),
    "Beit": ("beit_base_patch16_224", "beitv2_base_patch16_224", "beit_large_patch16_512"),
    "VisionTransformerRelPos": (
        "vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "vit_relpos_medium_patch16_cls_224",
        "vit_relpos_base_patch16_clsgap_224", "vit_relpos_base_patch16_rpn_224",
        "vit_relpos_base_patch32_plus_rpn_256",
    ),
    "NaFlexVit": (
        "naflexvit_base_patch16_gap", "naflexvit_base_patch16_par_gap", "naflexvit_base_patch16_parfac_gap",
        "naflexvit_base_patch16_map", "naflexvit_so150m2_patch16_reg1_gap", "naflexvit_so150m2_patch16_reg1_map",
        "naflexvit_base_patch16_siglip",
    ),
}  # fmt: skip
PLAIN: Options = {
    "qkv_bias": BOTH, "qk_norm": BOTH, "init_values": (None, 0.1, 0.0), "class_token": BOTH, "no_embed_class": BOTH,
    "reg_tokens": (0, 1, 3), "pre_norm": BOTH, "final_norm": BOTH, "fc_norm": (None, True, False),
    "pool_include_prefix": BOTH, "global_pool": (*POOLINGS, "prr"), "norm_layer": NORMS, "act_layer": ACTIVATIONS,
    "dynamic_img_size": BOTH, "dynamic_img_pad": BOTH,
}  # fmt: skip
OPTIONS: dict[str, Options] = {
    "VisionTransformer": {
        **PLAIN, "scale_attn_norm": BOTH, "scale_mlp_norm": BOTH, "proj_bias": BOTH,
        "pos_embed": ("learn", "none", ""), "embed_norm_layer": (None, *NORMS), "attn_layer": ("attn", "diff", ""),
    },
    "hybrid": PLAIN,
    "Eva": {
        "global_pool": POOLINGS, "qkv_bias": BOTH, "qkv_fused": BOTH, "qk_norm": BOTH, "swiglu_mlp": BOTH,
        "swiglu_align_to": (0, 8, 16), "scale_mlp": BOTH, "scale_attn_inner": BOTH, "attn_type": ("eva", "rope"),
        "init_values": (None, 0.1, 0.0), "attn_only_layer_scale": BOTH, "class_token": BOTH, "num_reg_tokens": (0, 2),
        "no_embed_class": BOTH, "use_abs_pos_emb": BOTH, "use_rot_pos_emb": BOTH,
        "rope_type": ("cat", "dinov3", "mixed"), "rope_grid_offset": (0.0, 0.5), "rope_grid_indexing": ("ij", "xy"),
        "rope_temperature": (100.0, 10000.0), "rope_rotate_half": BOTH, "rope_shift_coords": (None, 0.1),
        "rope_jitter_coords": (None, 1.5), "rope_rescale_coords": (None, 2.0), "ref_feat_shape": (None, (4, 4), (3, 5)),
        "use_post_norm": BOTH, "use_pre_transformer_norm": BOTH, "use_post_transformer_norm": (None, True, False),
        "use_fc_norm": (None, True, False), "attn_pool_num_heads": (None, 1), "attn_pool_mlp_ratio": (None, 2.0),
        "dynamic_img_size": BOTH, "dynamic_img_pad": BOTH, "num_kv_heads": (None, 1), "norm_layer": NORMS,
    },
    "Beit": {
        "global_pool": POOLINGS, "qkv_bias": BOTH, "init_values": (None, 0.1, 0.0), "use_abs_pos_emb": BOTH,
        "use_rel_pos_bias": BOTH, "use_shared_rel_pos_bias": BOTH, "swiglu_mlp": BOTH, "scale_mlp": BOTH,
        "norm_layer": NORMS,
    },
    "VisionTransformerRelPos": {
        "global_pool": ("", "avg", "token", "map"), "qkv_bias": BOTH, "qk_norm": BOTH,
        "init_values": (None, 0.1, 0.0, 1e-6), "class_token": BOTH, "fc_norm": BOTH,
        "rel_pos_type": ("mlp", "bias", "mlpswin"), "rel_pos_dim": (None, 8, 32), "shared_rel_pos": BOTH,
        "norm_layer": NORMS, "act_layer": ACTIVATIONS,
    },
    "NaFlexVit": {
        "global_pool": POOLINGS, "scale_mlp_norm": BOTH, "scale_attn_inner_norm": BOTH, "num_kv_heads": (None, 1),
        "qkv_bias": BOTH, "qk_norm": BOTH, "proj_bias": BOTH, "init_values": (None, 0.1, 0.0), "class_token": BOTH,
        "reg_tokens": (0, 1, 3), "pos_embed": ("learned", "factorized", "none", ""),
        "pos_embed_interp_mode": ("bicubic", "bilinear", "nearest"), "pos_embed_ar_preserving": BOTH,
        "pos_embed_antialias": BOTH, "pos_embed_align_corners": BOTH, "pos_embed_use_grid_sample": BOTH,
        "rope_type": ("", "axial", "mixed"), "dynamic_img_pad": BOTH, "patchify_channels_last": BOTH, "pre_norm": BOTH,
        "final_norm": BOTH, "fc_norm": (None, True, False), "pool_include_prefix": BOTH,
        "attn_pool_num_heads": (None, 1), "attn_pool_mlp_ratio": (None, 2.0), "embed_proj_type": ("linear", "conv"),
        "norm_layer": NORMS, "embed_norm_layer": (None, *NORMS), "act_layer": ACTIVATIONS,
        "attn_type": ("standard", "rope"), "attn_gated": BOTH, "swiglu_mlp": BOTH, "qkv_fused": BOTH,
        "attn_only_layer_scale": BOTH, "enable_patch_interpolator": BOTH, "use_key_only_attn_mask": BOTH,
    },
}  # fmt: skip

# For two models in float64. Both compute rotations and resampled positions in float32, whose rounding errors are
# amplified by norms over few channels.
EXACT, ROUNDED = 1e-9, 1e-6


def drawn(kind: str, draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw an entrypoint and arguments, which do not always fit together."""
    heads, patch = draw.choice([1, 2, 3, 4]), draw.choice([2, 4, (2, 4), (4, 3)])
    rows, columns = draw.choice([(2, 2), (3, 3), (4, 4), (2, 8), (3, 4), (5, 3), (2, 3)])
    sides = (32, 32) if kind == "hybrid" else (patch, patch) if isinstance(patch, int) else patch
    rest = draw.choice([0, 0, 0, 1])
    arguments = {
        "img_size": (rows * sides[0] + rest, columns * sides[1]), "patch_size": patch,
        "in_chans": draw.choice([1, 2, 3]), "num_classes": draw.choice([0, 2, 7]),
        "embed_dim": heads * draw.choice([4, 8, 12]), "num_heads": heads, "depth": draw.choice([1, 2, 3]),
        "mlp_ratio": draw.choice([1, 2.5, 4]),
    }  # fmt: skip
    if kind == "hybrid":
        arguments |= {"img_size": (32 * draw.choice([1, 2]), 32 * draw.choice([1, 2, 3]))}
        del arguments["patch_size"]
    if kind == "NaFlexVit":
        del arguments["img_size"]
        arguments["pos_embed_grid_size"] = (rows, columns)
    arguments |= {name: draw.choice(values) for name, values in OPTIONS[kind].items() if draw.random() < 0.2}
    return draw.choice(ENTRYPOINTS[kind]), arguments


def opened_by(way: Callable[..., Any], source: Any) -> nn.Module | None:
    """Return the opened model, or None if it is refused."""
    try:
        opened = way(source)
        return opened if isinstance(opened, nn.Module) else opened.model
    except PlainViTError:
        return None


def both_opened(what: str, module: nn.Module, folder: Path) -> tuple[nn.Module, nn.Module] | None:
    """Open a module and its folder; return None if both are refused, and fail if only one is."""
    live, saved = opened_by(from_module, module), opened_by(from_checkpoint, folder)
    assert (live is None) == (saved is None), f"{what}: {'the folder' if live is None else 'the module'} alone opens"
    return None if live is None or saved is None else (live, saved)


def sizes_of(theirs: Any, ours: Any) -> list[tuple[int, int]]:
    """Return a model's image size and, if timm accepts others, two more with whole patches, one of them oblong."""
    own, (high, wide) = ours.config.image_size, ours.config.patch_shape
    own = (own, own) if isinstance(own, int) else tuple(own)
    others = [(3 * high, 4 * wide), (4 * high, 2 * wide)]
    return [own, *others] if getattr(theirs, "dynamic_img_size", not hasattr(theirs, "patch_embed")) else [own]


def off_by(theirs: Any, ours: Any, is_folder: bool) -> float:
    """Return the largest difference of logits at any size, in float64."""
    theirs, ours = theirs.double().eval(), ours.double().eval()
    own, *others = sizes_of(theirs, ours)
    channels = ours.config.num_channels
    off = logits_differ_by(theirs, ours, (channels, *own), dtype=torch.float64)
    for size in others if is_folder else ():
        pixels = torch.randn(2, channels, *size, dtype=torch.float64)
        with torch.no_grad():
            outputs = ours(pixels, interpolate_pos_encoding=True)
            off = max(off, difference(outputs.get("logits", outputs.get("pooler_output")), theirs(pixels)))
    return off


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_folder_that_timm_saved_has_its_numbers_at_every_size_or_is_refused_like_the_module(
    kind: str, tmp_path: Path
) -> None:
    built = opened = 0
    for seed in range(draws(15, nightly=40) if kind == "hybrid" else draws(30, nightly=200)):
        name, arguments = drawn(kind, random.Random(seed))
        try:
            torch.manual_seed(seed)
            module = randomize_(timm.create_model(name, **arguments), seed).eval()
            size = arguments.get("img_size", (8, 8))
            with torch.no_grad():
                module(torch.zeros(1, arguments["in_chans"], *size))
            save_for_hf(module, str(tmp_path), safe_serialization=True)
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):  # timm's own refusals
            continue
        built += 1
        what = f"{kind}, seed {seed}: {name} with {arguments}"
        both = both_opened(what, module, tmp_path)
        if both is None:
            continue
        opened += 1
        back = to_module(both[0], "timm", layout=layout_of(module))
        assert same_tensors(module, back), what
        assert from_module(back).config.to_dict() == both[0].config.to_dict(), what
        limit = ROUNDED if kind == "NaFlexVit" or getattr(module, "rope", None) is not None else EXACT
        for ours, is_folder in zip(both, (False, True), strict=True):
            off = off_by(module, ours, is_folder)
            assert off <= limit, f"{what}: {'the folder' if is_folder else 'the module'} is off by {off:.1e}"
    assert opened > built / 5, f"{opened} of {built}"
