"""Original files of models that timm's Eva builds, with the names of DINOv3, EVA-02 and Perception Encoder.

Their tensors do not show how queries and keys are rotated, so the name of timm's architecture is needed.

Source: facebookresearch/dinov3, `dinov3/models/vision_transformer.py`; facebookresearch/perception_models,
`core/vision_encoder/pe.py`; baaivision/EVA, `EVA-02`; timm 1.0.31 converts the same names as it loads.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from .....configuration_plain_vit import PlainViTConfig
from ....tables.engine import (
    ADD_FIRST_AXIS,
    ADD_TWO_AXES,
    SPLIT_QKV,
    TRANSPOSED,
    Row,
    Tensors,
    Transform,
    ignoring,
    in_proj_rows,
)
from ....tables.format import Description
from ..tables import QKV

DINOV3, DINOV3_UNMASKED = "dinov3", "dinov3_without_bias_mask"
EVA02, EVA02_FUSED = "eva02", "eva02_fused"
PERCEPTION, PERCEPTION_WHOLE = "perception_encoder", "perception_encoder_visual"
LAYOUTS = (DINOV3, DINOV3_UNMASKED, EVA02, EVA02_FUSED, PERCEPTION, PERCEPTION_WHOLE)

EMBEDDINGS, BLOCK, LAYER = "vit.embeddings", "blocks.{}", "vit.layers.{}"
WEIGHTS = tuple(f"{name}.weight" for name in QKV)
LOCAL_NORM = ("local_cls_norm.*", "normalises the class token of small crops in training")
SINES = tuple(
    (f"{path}rope.freqs_{name}", "computed from the grid") for path in ("", "blocks.*.attn.") for name in ("cos", "sin")
)
IGNORED = {
    DINOV3: (LOCAL_NORM,),
    DINOV3_UNMASKED: (LOCAL_NORM,),
    EVA02: SINES,
    EVA02_FUSED: SINES,
    PERCEPTION: (),
    PERCEPTION_WHOLE: (
        *ignoring("the text tower", "transformer.*", "token_embedding.*", "ln_final.*"),
        *ignoring("the text tower", "positional_embedding", "text_projection", "attn_mask"),
        *ignoring("compares images with texts", "logit_scale"),
    ),
}  # fmt: skip


def layout_of(names: Collection[str]) -> str | None:
    """Return the layout of a state dict with the original names of one of these models; None for other names."""
    if "patch_embed.proj.weight" in names:
        if "storage_tokens" in names or "rope_embed.periods" in names:
            return DINOV3 if "blocks.0.attn.qkv.bias_mask" in names else DINOV3_UNMASKED
        if "blocks.0.attn.q_bias" not in names:
            return None
        if "blocks.0.attn.q_proj.weight" in names:
            return EVA02
        return EVA02_FUSED if "rope.freqs_cos" in names or "blocks.0.mlp.w12.weight" in names else None
    whole = "visual.conv1.weight" in names
    prefix = "visual." if whole else ""
    if f"{prefix}conv1.weight" not in names or f"{prefix}transformer.resblocks.0.ln_1.weight" not in names:
        return None
    pooled, clip = f"{prefix}attn_pool.probe" in names, f"{prefix}ln_post.weight" in names  # every CLIP has `ln_post`
    if not pooled and (clip or "token_embedding.weight" in names):  # with a text tower, this encoder has `attn_pool`
        return None
    return PERCEPTION_WHOLE if whole else PERCEPTION


def shown(tensors: Mapping[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """Return the tensors that show channels, patches and grid, by timm's names; values are not needed."""
    prefix = "visual." if layout == PERCEPTION_WHOLE else ""
    if layout in (PERCEPTION, PERCEPTION_WHOLE):
        kernel, table = tensors[f"{prefix}conv1.weight"], tensors.get(f"{prefix}positional_embedding")
        return {"patch_embed.proj.weight": kernel, **({} if table is None else {"pos_embed": table[None]})}
    names = ("patch_embed.proj.weight", "pos_embed", "head.weight")
    return {name: tensors[name] for name in names if name in tensors}


def described(config: PlainViTConfig, tensors: Mapping[str, torch.Tensor], layout: str) -> Description:
    """Return the description of a file, after adding what timm's model lacks to the config."""
    prefix = "visual." if layout == PERCEPTION_WHOLE else ""
    if f"{prefix}proj" in tensors:
        config.representation_size = tensors[f"{prefix}proj"].shape[1]
        config.representation_act, config.representation_bias = "linear", False
    config.use_mask_token = layout in (DINOV3, DINOV3_UNMASKED) and "mask_token" in tensors
    return Description(config, layout, ignored=IGNORED[layout])


def rows(timm_rows: Sequence[Row], config: PlainViTConfig, layout: str) -> list[Row]:
    """Return the table of tensors.

    Args:
        timm_rows: The table of timm's names with fused query, key and value projections; EVA-02 may have separate ones.
        config: Our configuration.
        layout: A layout from `layout_of`.
    """
    if layout in (PERCEPTION, PERCEPTION_WHOLE):
        prefix = "visual." if layout == PERCEPTION_WHOLE else ""
        return [replace(row, source=f"{prefix}{row.source}") for row in PERCEPTION_ROWS]
    names = EVA02_NAMES if layout in (EVA02, EVA02_FUSED) else DINOV3_NAMES
    gated = config.mlp_type != "mlp"
    packed = {f"{BLOCK}.mlp.fc1": f"{BLOCK}.mlp.w12"} if config.mlp_type == "swiglu_packed" else {}
    names = {**names, **packed, **({f"{BLOCK}.mlp.fc2": f"{BLOCK}.mlp.w3"} if gated else {})}
    own = _dinov3_rows(config, layout) if layout in (DINOV3, DINOV3_UNMASKED) else EVA02_ROWS[layout]
    filled = {name for row in own for name in _parts(row)}
    kept = [row for row in timm_rows if not filled & set(_parts(row))]
    return [*(replace(row, source=names.get(str(row.source), row.source)) for row in kept), *own]


def _parts(row: Row) -> tuple[str, ...]:
    """Return the modules of ours that a row fills."""
    return tuple(name.removesuffix(".weight").removesuffix(".bias") for name in row.targets)


# DINOv3

DINOV3_NAMES = {
    "reg_token": "storage_tokens",
    f"{BLOCK}.gamma_1": f"{BLOCK}.ls1.gamma",
    f"{BLOCK}.gamma_2": f"{BLOCK}.ls2.gamma",
    f"{BLOCK}.mlp.fc1_g": f"{BLOCK}.mlp.w1",
    f"{BLOCK}.mlp.fc1_x": f"{BLOCK}.mlp.w2",
}


def _dinov3_rows(config: PlainViTConfig, layout: str) -> list[Row]:
    """Return the rows that differ from timm's: a masked key bias, rotation periods, and a mask token."""
    bias, mask = f"{BLOCK}.attn.qkv.bias", f"{BLOCK}.attn.qkv.bias_mask"
    biases = (bias, mask) if layout == DINOV3 else (bias,)
    if config.qkv_bias:
        attention = [
            Row(f"{BLOCK}.attn.qkv.weight", WEIGHTS, SPLIT_QKV),
            Row(biases, (f"{QKV[0]}.bias", f"{QKV[2]}.bias"), BIAS_WITHOUT_KEY),
        ]
    else:
        attention = [Row((f"{BLOCK}.attn.qkv.weight", *biases), WEIGHTS, WITHOUT_BIAS)]
    return [
        *attention,
        Row(("cls_token", "rope_embed.periods"), f"{EMBEDDINGS}.cls_token", WITH_PERIODS),
        Row("mask_token", f"{EMBEDDINGS}.mask_token", ADD_FIRST_AXIS),
    ]


def _key_mask(like: torch.Tensor) -> torch.Tensor:
    """Return the mask of the fused bias: 0 for keys, 1 for queries and values."""
    mask = torch.ones_like(like)
    mask[len(like) // 3 : 2 * len(like) // 3] = 0
    return mask


def _bias_without_key(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Return the biases of queries and values, after checking that keys have none."""
    query, key, value = tensors[0].chunk(3)
    masked = len(tensors) > 1
    if not key.is_meta and (not torch.equal(tensors[1], _key_mask(tensors[1])) if masked else key.any()):
        raise ValueError("keys have a bias, which no model of DINOv3 has")
    return [query, value]


def _bias_with_key(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    query, value = tensors
    bias = torch.cat((query, torch.zeros_like(query), value))
    return [bias, _key_mask(bias)]


def _without_bias(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Return the query, key and value weights, after checking that the bias is zero."""
    weight, bias = tensors[:2]
    if not bias.is_meta and bias.any():
        raise ValueError(
            "queries and values have biases: give timm's architecture that has them, whose name ends in _qkvb"
        )
    return weight.chunk(3)


def _with_bias(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    weight = torch.cat(list(tensors))
    bias = weight.new_zeros(len(weight))
    return [weight, bias, _key_mask(bias)]


def _periods(config: PlainViTConfig) -> torch.Tensor:
    count = config.attention_shape[1] // 4
    return float(config.group("rope_parameters")["rope_theta"]) ** (torch.arange(count) / count)


def _checked_periods(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Return the class token, after comparing the stored periods with ours, up to rounding to bfloat16."""
    token, periods = tensors
    if not periods.is_meta:
        ours = _periods(config)
        if periods.shape != ours.shape or not torch.allclose(periods.float().cpu(), ours, rtol=2**-8, atol=0):
            raise ValueError(f"the periods are not those of rope_theta={config.group('rope_parameters')['rope_theta']}")
    return [token]


BIAS_WITHOUT_KEY = Transform("BIAS_WITHOUT_KEY", _bias_without_key, _bias_with_key)
WITHOUT_BIAS = Transform("WITHOUT_BIAS", _without_bias, _with_bias)
WITH_PERIODS = Transform(
    "WITH_PERIODS", _checked_periods, lambda tensors, config: [tensors[0], _periods(config).to(tensors[0])]
)

# EVA-02

EVA02_NAMES = {
    f"{BLOCK}.attn.norm": f"{BLOCK}.attn.inner_attn_ln",
    f"{BLOCK}.mlp.norm": f"{BLOCK}.mlp.ffn_ln",
    f"{BLOCK}.mlp.fc1_g": f"{BLOCK}.mlp.w1",
    f"{BLOCK}.mlp.fc1_x": f"{BLOCK}.mlp.w2",
}


EVA02_ROWS = {
    EVA02: [  # three projections, with biases outside them
        *(Row(f"{BLOCK}.attn.{name[-6:]}.weight", f"{name}.weight") for name in QKV),
        Row(f"{BLOCK}.attn.q_bias", f"{QKV[0]}.bias"),
        Row(f"{BLOCK}.attn.v_bias", f"{QKV[2]}.bias"),
    ],
    EVA02_FUSED: [],
}


# Perception Encoder

RESBLOCK, POOLER = "transformer.resblocks.{}", "vit.pooler"
CLIP_ROWS = [  # OpenAI's names, which OpenCLIP has, too; without the patch projection
    Row("class_embedding", f"{EMBEDDINGS}.cls_token", ADD_TWO_AXES),
    Row("positional_embedding", f"{EMBEDDINGS}.position_embeddings.weight"),
    Row("ln_pre", f"{EMBEDDINGS}.norm"),
    Row(f"{RESBLOCK}.ln_1", f"{LAYER}.layernorm_before"),
    *in_proj_rows(f"{RESBLOCK}.attn", f"{LAYER}.attention"),
    Row(f"{RESBLOCK}.ls_1.gamma", f"{LAYER}.layer_scale1.weight"),
    Row(f"{RESBLOCK}.ln_2", f"{LAYER}.layernorm_after"),
    Row(f"{RESBLOCK}.mlp.c_fc", f"{LAYER}.mlp.fc1"),
    Row(f"{RESBLOCK}.mlp.c_proj", f"{LAYER}.mlp.fc2"),
    Row(f"{RESBLOCK}.ls_2.gamma", f"{LAYER}.layer_scale2.weight"),
    Row("ln_post", "vit.layernorm"),
    Row("proj", "vit.representation.0.weight", TRANSPOSED),
]
PERCEPTION_ROWS = [
    *CLIP_ROWS,
    Row("conv1.weight", f"{EMBEDDINGS}.patch_embeddings.projection.weight"),
    Row("attn_pool.probe", f"{POOLER}.probe"),
    *in_proj_rows("attn_pool.attn", POOLER),
    Row("attn_pool.layernorm", f"{POOLER}.layernorm"),
    Row("attn_pool.mlp.c_fc", f"{POOLER}.fc1"),
    Row("attn_pool.mlp.c_proj", f"{POOLER}.fc2"),
]
