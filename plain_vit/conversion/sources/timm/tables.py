"""Tables of the tensors of timm's VisionTransformer, in parts that timm's other models share.

Source: timm 1.0.31, `timm/models/vision_transformer.py`.
"""

import functools
from collections.abc import Iterable

import torch

from ....configuration_plain_vit import PlainViTConfig
from ...tables.engine import DROP_FIRST_AXIS, IDENTITY, KERNEL_TO_PIXELS, SPLIT_KV, SPLIT_QKV, Row, Transform
from .names import part_of

# The parallel block fuses the first layer of the MLP, query, key and value, in this order.
SPLIT_MLP_QKV = Transform(
    "SPLIT_MLP_QKV",
    lambda tensors, config: tensors[0].split((config.intermediate_size, *(config.hidden_size,) * 3), dim=0),
    lambda tensors, config: [torch.cat(list(tensors), dim=0)],
)

# If its two output projections are fused, the inputs are the concatenated heads, then the MLP.
SPLIT_ATTENTION_MLP = Transform(
    "SPLIT_ATTENTION_MLP",
    lambda tensors, config: tensors[0].split((config.hidden_size, config.intermediate_size), dim=1),
    lambda tensors, config: [torch.cat(list(tensors), dim=1)],
)

QKV = tuple(f"vit.layers.{{}}.attention.{name}_proj" for name in "qkv")
# Beit and Eva, whose keys have no bias.
WITHOUT_KEY_BIAS_ROWS = [
    Row("blocks.{}.attn.qkv.weight", tuple(f"{name}.weight" for name in QKV), SPLIT_QKV),
    Row("blocks.{}.attn.q_bias", "vit.layers.{}.attention.q_proj.bias"),
    Row("blocks.{}.attn.v_bias", "vit.layers.{}.attention.v_proj.bias"),
]
EMBEDDING_ROWS = [
    Row("cls_token", "vit.embeddings.cls_token"),
    Row("dist_token", "vit.embeddings.distillation_token"),
    Row("reg_token", "vit.embeddings.register_tokens"),
    Row("pos_embed", "vit.embeddings.position_embeddings.weight", DROP_FIRST_AXIS),
    Row("patch_embed.proj.bias", "vit.embeddings.patch_embeddings.projection.bias"),
    Row("patch_embed.norm", "vit.embeddings.patch_embeddings.post_norm"),
    Row("norm_pre", "vit.embeddings.norm"),
]
# A hybrid's ResNet after its root.
UNIT, OUR_UNIT = "patch_embed.backbone.stages.{}.blocks.{}", "vit.embeddings.patch_embeddings.stages.{}.{}"
STEM_ROWS = [
    *(Row(f"{UNIT}.{name}", f"{OUR_UNIT}.{name}") for name in ("conv1", "norm1", "conv2", "norm2", "conv3", "norm3")),
    Row(f"{UNIT}.downsample.conv", f"{OUR_UNIT}.shortcut.0"),
    Row(f"{UNIT}.downsample.norm", f"{OUR_UNIT}.shortcut.1"),
]
HEAD_ROWS = [
    Row("norm", "vit.layernorm"),
    Row("attn_pool.latent", "vit.pooler.probe"),
    Row("attn_pool.q", "vit.pooler.q_proj"),
    Row("attn_pool.kv", ("vit.pooler.k_proj", "vit.pooler.v_proj"), SPLIT_KV),
    Row("attn_pool.proj", "vit.pooler.o_proj"),
    Row("attn_pool.norm", "vit.pooler.layernorm"),
    Row("attn_pool.mlp.fc1", "vit.pooler.fc1"),
    Row("attn_pool.mlp.fc2", "vit.pooler.fc2"),
    Row("fc_norm", "vit.pooled_layernorm"),
    Row("pre_logits.fc", "vit.representation.0"),  # timm before 0.8
    Row("head", "classifier"),
    Row("head_dist", "distillation_classifier"),
]
# DeiT III's own files, before timm renames them.
GAMMA_ROWS = [
    Row("blocks.{}.gamma_1", "vit.layers.{}.layer_scale1.weight"),
    Row("blocks.{}.gamma_2", "vit.layers.{}.layer_scale2.weight"),
]
# Beit and Eva, from the output of the attention on.
GAMMA_BLOCK_ROWS = [
    Row("blocks.{}.attn.proj", "vit.layers.{}.attention.o_proj"),
    GAMMA_ROWS[0],
    Row("blocks.{}.norm2", "vit.layers.{}.layernorm_after"),
    GAMMA_ROWS[1],
]


def attention_rows(source: str, ours: str) -> list[Row]:
    """Return the rows of one attention."""
    return [
        Row(f"{source}.qkv", (f"{ours}.q_proj", f"{ours}.k_proj", f"{ours}.v_proj"), SPLIT_QKV),
        Row(f"{source}.q_norm", f"{ours}.q_norm"),
        Row(f"{source}.k_norm", f"{ours}.k_norm"),
        *differential_rows(source, ours),
        Row(f"{source}.norm", f"{ours}.norm"),
        Row(f"{source}.proj", f"{ours}.o_proj"),
    ]


def differential_rows(source: str, ours: str) -> list[Row]:
    """Return the rows that only differential attention has."""
    return [
        *(Row(f"{source}.lambda_{end}", f"{ours}.lambda_{end}") for end in ("q1", "k1", "q2", "k2")),
        Row(f"{source}.sub_norm", f"{ours}.head_norm"),
    ]


def mlp_rows(source: str, ours: str, config: PlainViTConfig) -> list[Row]:
    """Return the rows of one MLP."""
    gated = config.mlp_type == "swiglu"
    return [
        Row(f"{source}.fc1_g", f"{ours}.gate"),
        Row(f"{source}.fc1_x" if gated else f"{source}.fc1", f"{ours}.fc1"),
        Row(f"{source}.norm", f"{ours}.norm"),
        Row(f"{source}.fc2", f"{ours}.fc2"),
    ]


def sequential_rows(config: PlainViTConfig) -> list[Row]:
    """Return the rows of a block whose attention comes before its MLP."""
    return [
        Row("blocks.{}.norm1", "vit.layers.{}.layernorm_before"),
        *attention_rows("blocks.{}.attn", "vit.layers.{}.attention"),
        Row("blocks.{}.ls1.gamma", "vit.layers.{}.layer_scale1.weight"),
        Row("blocks.{}.norm2", "vit.layers.{}.layernorm_after"),
        *mlp_rows("blocks.{}.mlp", "vit.layers.{}.mlp", config),
        Row("blocks.{}.ls2.gamma", "vit.layers.{}.layer_scale2.weight"),
    ]


def parallel_rows(config: PlainViTConfig) -> list[Row]:
    """Return the rows of a block whose attention and MLP run in parallel."""
    block, layer = "blocks.{}", "vit.layers.{}"
    first = tuple(f"{layer}.{name}" for name in ("mlp.fc1", "attention.q_proj", "attention.k_proj", "attention.v_proj"))
    if config.qkv_bias:
        inputs = [Row(f"{block}.in_proj", first, SPLIT_MLP_QKV)]
    else:
        inputs = [
            Row(f"{block}.in_proj.weight", tuple(f"{name}.weight" for name in first), SPLIT_MLP_QKV),
            Row(f"{block}.mlp_bias", f"{layer}.mlp.fc1.bias"),
        ]
    if config.attention_output_bias:
        outputs = [
            Row(f"{block}.attn_out_proj", f"{layer}.attention.o_proj"),
            Row(f"{block}.mlp_out_proj", f"{layer}.mlp.fc2"),
        ]
    else:
        joined = (f"{layer}.attention.o_proj.weight", f"{layer}.mlp.fc2.weight")
        outputs = [
            Row(f"{block}.out_proj.weight", joined, SPLIT_ATTENTION_MLP),
            Row(f"{block}.out_proj.bias", f"{layer}.mlp.fc2.bias"),
        ]
    return [
        Row(f"{block}.in_norm", f"{layer}.layernorm_before"),
        *inputs,
        Row(f"{block}.q_norm", f"{layer}.attention.q_norm"),
        Row(f"{block}.k_norm", f"{layer}.attention.k_norm"),
        *differential_rows(block, f"{layer}.attention"),
        *outputs,
        Row(f"{block}.ls.gamma", f"{layer}.layer_scale1.weight"),
    ]


def branches_rows(config: PlainViTConfig) -> list[Row]:
    """Return the rows of a block with several attentions followed by several MLPs."""
    attns, ffns = "blocks.{}.attns.{}", "blocks.{}.ffns.{}"
    attentions, mlps = "vit.layers.{}.attention_branches.{}", "vit.layers.{}.mlp_branches.{}"
    return [
        Row(f"{attns}.norm", f"{attentions}.layernorm"),
        *attention_rows(f"{attns}.attn", f"{attentions}.attention"),
        Row(f"{attns}.ls.gamma", f"{attentions}.layer_scale.weight"),
        Row(f"{ffns}.norm", f"{mlps}.layernorm"),
        *mlp_rows(f"{ffns}.mlp", f"{mlps}.mlp", config),
        Row(f"{ffns}.ls.gamma", f"{mlps}.layer_scale.weight"),
    ]


BLOCK_ROWS = {
    "sequential": sequential_rows,
    "post_norm": sequential_rows,
    "parallel": parallel_rows,
    "branches": branches_rows,
}


def kernel_row(config: PlainViTConfig) -> Row:
    """Return the row of the patch projection."""
    kernel = KERNEL_TO_PIXELS if config.patch_projection == "linear" else IDENTITY
    return Row("patch_embed.proj.weight", "vit.embeddings.patch_embeddings.projection.weight", kernel)


def rows_of(config: PlainViTConfig) -> list[Row]:
    """Return the table of tensors for this model."""
    root = "patch_embed.backbone.stem" if config.group("resnet_stem")["depths"] else "patch_embed.backbone"
    stem = [Row(f"{root}.{name}", f"vit.embeddings.patch_embeddings.{name}") for name in ("conv", "norm")]
    return [kernel_row(config), *stem, *STEM_ROWS, *EMBEDDING_ROWS, *BLOCK_ROWS[config.block_type](config), *HEAD_ROWS]


def parts_of(rows: Iterable[Row]) -> set[str]:
    """Return the parts, in the sense of `part_of`, of the source names in a table."""
    return {part_of(source) for row in rows for source in row.sources}


@functools.cache
def own_parts() -> frozenset[str]:
    """Return the parts, in the sense of `part_of`, that a VisionTransformer of timm may have."""
    parts = parts_of([*EMBEDDING_ROWS, *STEM_ROWS, *HEAD_ROWS, *GAMMA_ROWS])
    parts |= {"patch_embed.proj", *(f"patch_embed.backbone.{name}" for name in ("conv", "norm"))}
    parts |= {f"patch_embed.backbone.stem.{name}" for name in ("conv", "norm")}
    for block in BLOCK_ROWS:
        for gated in ("mlp", "swiglu"):
            for bias in (True, False):
                config = PlainViTConfig(mlp_type=gated, qkv_bias=bias, attention_output_bias=bias)
                parts |= parts_of(BLOCK_ROWS[block](config))
    return frozenset(parts)
