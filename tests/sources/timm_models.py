"""Small models of timm's entrypoints with randomised parameters, and differences between two models by stage."""

import functools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from plain_vit.conversion.sources.timm.constructors import CONSTRUCTORS
from plain_vit.conversion.sources.timm.naflex.source import NAFLEX
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import AmbiguousCheckpointError
from tests.conftest import randomize_
from tests.tiny import difference

# Arguments of all supported entrypoints of all classes.
ENTRYPOINTS: dict[str, Any] = {}
for constructor in CONSTRUCTORS:
    ENTRYPOINTS |= constructor.architectures

# One line for each kind of block, norm, MLP, token, head and position in the 179 entrypoints.
REPRESENTATIVES = [
    "vit_base_patch16_224",  # plain
    "deit_small_distilled_patch16_224",  # distillation token and head
    "vit_base_patch32_clip_quickgelu_224",  # norm before the blocks, epsilon 1e-5, quick GELU
    "vit_giant_patch14_reg4_dinov2",  # registers without positions, LayerScale, packed SwiGLU
    "vit_medium_patch16_gap_240",  # no class token, mean after the norm, no qkv bias
    "vit_so400m_patch14_siglip_384",  # map head, tanh GELU, partial patches
    "aimv2_large_patch14_224",  # RMSNorm, SwiGLU, a norm on the patches, no biases
    "beit3_base_patch16_224",  # norms inside attention and MLP, mean before the norm
    "vit_intern300m_patch14_448",  # no final norm
    "vit_dwee_patch16_reg1_gap_256",  # differential attention
    "vit_base_patch16_xp_224",  # parallel blocks, qk norm
    "vit_dpwee_patch16_reg1_gap_256",  # parallel blocks with differential attention
    "vit_small_patch16_18x2_224",  # branches
    "vit_base_patch16_rpn_224",  # norms at the end of the residual branches
    "test_vit3",  # map head that reads a register
    "vit_tiny_r_s16_p8_224",  # the root of a ResNet
]
DEEP: tuple[str, dict[str, Any]] = ("vit_small_r26_s32_224", {})  # a ResNet of four stages

# One line for each kind of rotation, block, norm, MLP, projection, head and position in the entrypoints of Eva.
EVA_REPRESENTATIVES = [
    "vit_small_patch16_dinov3",  # DINOv3: centred coordinates, halves, registers, no bias
    "vit_small_plus_patch16_dinov3_qkvb",  # the same with a gated MLP, and biases on queries and values
    "vit_7b_patch16_dinov3",  # another alignment of its MLP
    "eva_giant_patch14_224",  # no rotation, biases on queries and values
    "eva02_tiny_patch14_336",  # EVA-02: a grid that differs from the rotation's, a packed MLP, one projection
    "eva02_base_patch14_448",  # three projections, a norm inside the gated MLP
    "eva02_large_patch14_clip_336",  # a norm inside the attention
    "eva02_enormous_patch14_clip_224",  # norms at the end of the residual branches
    "vit_pe_core_tiny_patch16_384",  # a norm before the blocks, a pooling with heads of its own
    "vit_pe_core_gigantic_patch14_448",  # one with an MLP of its own
    "vit_pe_lang_large_patch14_448",  # no final norm
    "vit_base_patch16_rope_ape_224",  # positions added and rotated
    "vit_base_patch16_rope_mixed_ape_224",  # learned frequencies
    "vit_betwixt_patch16_rope_reg4_gap_256",  # registers without a class token
    "vit_large_patch16_sapiens2",  # keys and values shared by queries in some blocks, LayerScale on the attention alone
]

# The same for Beit and VisionTransformerRelPos, with additional arguments.
TABLES = {"rel_pos_type": "bias"}
EPSILON = {"norm_layer": functools.partial(nn.LayerNorm, eps=1e-5)}
RELATIVE_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("beit_base_patch16_224", {}),  # a table in each block, biases on queries and values, LayerScale
    ("vit_relpos_base_patch16_plus_240", {}),  # a network in each block, biases, norm before the pooling
    ("test_vit_relpos", {}),  # norm after the pooling
    ("vit_srelpos_small_patch16_224", {}),  # one network for all blocks
    ("vit_relpos_medium_patch16_cls_224", {}),  # a class token, a network of another width
    ("vit_relpos_base_patch16_clsgap_224", {}),  # a class token that is not pooled
    ("vit_relpos_base_patch32_plus_rpn_256", {}),  # norms at the end of the residual branches
    ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_abs_pos_emb": True, "init_values": None, **EPSILON}),
    ("beitv2_base_patch16_224", {"use_abs_pos_emb": True, "swiglu_mlp": True, "scale_mlp": True}),
    ("beit_large_patch16_224", {"qkv_bias": False, "init_values": 0.0, "use_fc_norm": False, "scale_mlp": True}),
    ("vit_relpos_base_patch16_plus_240", {**TABLES, **EPSILON, "qk_norm": True}),
    ("vit_srelpos_small_patch16_224", {**TABLES, "init_values": None}),
    ("vit_relpos_base_patch16_cls_224", {**TABLES, "qkv_bias": True}),
    ("vit_relpos_small_patch16_rpn_224", {**TABLES, "shared_rel_pos": True, "class_token": True}),
]
RELATIVE_QUICK = RELATIVE_VARIANTS[::3]
RELATIVE_SLOW = [case for case in RELATIVE_VARIANTS if case not in RELATIVE_QUICK]
NAFLEX_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAFLEX.architectures),
    ("naflexvit_base_patch16_map", {"attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 2.5, "pool_include_prefix": True}),
    ("naflexvit_base_patch16_gap", {"embed_proj_type": "conv", "pre_norm": True, "qk_norm": True, **EPSILON}),
    ("naflexvit_base_patch16_gap", {"global_pool": "avgmax", "fc_norm": None, "scale_mlp_norm": True}),
    ("naflexvit_base_patch16_gap", {"pos_embed": "none", "norm_layer": "rmsnorm", "embed_norm_layer": "rmsnorm"}),
    ("naflexvit_base_patch16_parfac_gap", {"pos_embed_ar_preserving": False, "proj_bias": False}),
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in [*REPRESENTATIVES, *EVA_REPRESENTATIVES]),
    ("eva_giant_patch14_224", EPSILON),
    *RELATIVE_QUICK,
    *NAFLEX_VARIANTS,
]

# Models with a different order of operations, and their tolerance; all others are equal.
REORDERED = {
    "ParallelScalingBlock": "timm multiplies by all first layers at once, and adds their bias afterwards",
    "DiffParallelScalingBlock": "timm multiplies by all first and by all last layers at once",
    "ResPostBlock": "timm's tokens lie transposed in memory, so that their mean sums in another order",
}
TOLERANCE = 1e-5
BFLOAT16_REORDERED = 2e-2  # each product or sum is rounded to 8 bits


def variants(quick: list[tuple[str, dict[str, Any]]], *slow: tuple[str, dict[str, Any]]) -> pytest.MarkDecorator:
    """Parametrise `name` and `arguments`."""
    marked = [*((case, []) for case in quick), *((case, [pytest.mark.slow]) for case in slow)]
    cases = [pytest.param(*case, id=f"{case[0]}{sorted(case[1]) or ''}", marks=marks) for case, marks in marked]
    return pytest.mark.parametrize(("name", "arguments"), cases)


def is_reordered(module: Any) -> bool:
    """Return whether timm's order of operations differs from ours.

    Beit's shared bias has three dimensions, for which torch uses an unfused kernel. If VisionTransformerRelPos has no
    token before the patches, its tokens are transposed in memory: products without a norm before them, and the mean,
    sum in a different order. The same holds for means and products of some kinds of NaFlexVit.
    """
    if getattr(module, "rel_pos_bias", None) is not None or type(module.blocks[0]).__name__ in REORDERED:
        return True
    kind = type(module).__name__
    return kind == "NaFlexVit" or (kind in ("Beit", "VisionTransformerRelPos") and module.num_prefix_tokens == 0)


def rounding(module: Any) -> float:
    """Return the tolerance for a model."""
    if not is_reordered(module):
        return 0.0
    return TOLERANCE if next(module.parameters()).dtype == torch.float32 else BFLOAT16_REORDERED


def layout_of(module: Any) -> str | None:
    """Return the layout of a module's tensors."""
    return TIMM.describe_module(module, Hints()).layout


def image_size(name: str) -> tuple[int, int]:
    """Return a small size of 3 x 5 patches, with partial patches if the entrypoint's own size has them."""
    patch, size = ENTRYPOINTS[name]["patch_size"], ENTRYPOINTS[name]["img_size"]
    rest = (size if isinstance(size, int) else size[0]) % patch
    return 3 * patch + rest, 5 * patch + rest


def tiny_timm(name: str, **arguments: Any) -> Any:
    """Return timm's entrypoint at a small geometry, in evaluation mode, with random parameters."""
    return randomize_(timm.create_model(name, **small_arguments(name, **arguments))).eval()


def small_arguments(name: str, **arguments: Any) -> dict[str, Any]:
    """Return the arguments of a small geometry, updated with others."""
    geometry = {"pos_embed_grid_size": (3, 5)} if name in NAFLEX.architectures else {"img_size": image_size(name)}
    small = {**geometry, "embed_dim": 56, "num_heads": 7, "depth": 3, "num_classes": 11, **arguments}
    if "num_kv_heads" in ENTRYPOINTS[name] and name not in NAFLEX.architectures:
        small.setdefault("num_kv_heads", ([1] + [7, 1] * small["depth"])[: small["depth"]])
    return small


def pixels_for(module: Any, seed: int = 1, size: tuple[int, int] | None = None) -> torch.Tensor:
    """Return normalised pixels of the module's own or another size, in its dtype."""
    height, width = size or (module.patch_embed.img_size if hasattr(module, "patch_embed") else (48, 80))
    pixel_values = torch.randn(2, module.in_chans, height, width, generator=torch.Generator().manual_seed(seed))
    return pixel_values.to(next(module.parameters()).dtype)


@torch.no_grad()
def stage_differences(module: Any, model: nn.Module, pixel_values: torch.Tensor) -> dict[str, float]:
    """Return the relative difference of every block's output and of the logits (features without a classifier)."""
    tokens: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _, args, output: tokens.append(output)) for block in module.blocks]
    theirs = module(pixel_values)
    for hook in hooks:
        hook.remove()
    outputs = model(pixel_values, output_hidden_states=True)
    result = {
        f"block {i}": difference(ours.float(), source.float())
        for i, (ours, source) in enumerate(zip(outputs.hidden_states[1:], tokens, strict=True), start=1)
    }
    ours = outputs.logits if "logits" in outputs else outputs.pooler_output
    return result | {"logits": difference(ours.float(), theirs.float())}


def same_tensors(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two state dicts have the same names, shapes and bits."""
    ones, others = one.state_dict(), other.state_dict()
    return ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)


def save_bare(module: nn.Module, path: Path) -> Path:
    """Save only the tensors."""
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, path)
    return path


def meta_state(name: str, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return an entrypoint's tensors on the meta device."""
    with torch.device("meta"):
        return timm.create_model(name, **arguments).state_dict()


def asked_of(tensors: Any, **hints: Any) -> AmbiguousCheckpointError:
    """Return the error with the questions about a state dict."""
    with pytest.raises(AmbiguousCheckpointError) as caught:
        TIMM.describe_checkpoint(tensors, {}, Hints(**hints))
    return caught.value


def as_timm(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return padded patches as the dict from timm's collator, which NaFlexVit takes."""
    coordinates = torch.zeros(*inputs["pixel_values"].shape[:2], 2, dtype=torch.long)
    for row, (h, w) in zip(coordinates, inputs["spatial_shapes"].tolist(), strict=True):
        row[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    return {
        "patches": inputs["pixel_values"],
        "patch_coord": coordinates,
        "patch_valid": inputs["pixel_attention_mask"].bool(),
    }
