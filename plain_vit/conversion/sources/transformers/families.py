"""The families of Vision Transformers in transformers: tables of their tensors, settings and classes.

Each table has two columns, transformers' name on the left and ours on the right, with the names of transformers 5.23.
Its files keep the names of 4.x for the blocks of ViT, DeiT, MSN, MAE, I-JEPA and DINOv2.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError
from ....packed_plain_vit import cut_patches
from ...tables.engine import (
    ADD_FIRST_AXIS,
    ADD_TWO_AXES,
    DROP_FIRST_AXIS,
    GRID_TABLE,
    KERNEL_TO_PIXELS,
    PIXELS_TO_KERNEL,
    SPLIT_QKV,
    UNSTACK,
    Row,
    Tensors,
    Transform,
    each,
    ignoring,
    in_proj_rows,
    split,
    then,
)
from ...tables.format import Contract, Probes, StateDict
from ...tables.infer import pair, ratio_of

# Transforms


def _with_prefix_rows(table: torch.Tensor, config: PlainViTConfig) -> torch.Tensor:
    """Return the table with a row for each token before the patches: zeros if our table has no rows for them."""
    if config.position_embedding_on_prefix:
        return table
    return torch.cat((table.new_zeros(config.num_prefix_tokens, table.shape[1]), table))


def _positions_beside_registers(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Insert rows of zeros for the registers, which have no positions in transformers."""
    table, registers = tensors[0][0], tensors[1]
    return [torch.cat((table[:1], table.new_zeros(registers.shape[1:]), table[1:])), registers]


def _positions_without_registers(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Add the position rows of the registers to the registers themselves, as our forward pass does."""
    table, registers = tensors
    if not config.position_embedding_on_prefix:
        return [torch.cat((table.new_zeros(1, table.shape[1]), table))[None], registers]
    end = 1 + config.num_register_tokens
    return [torch.cat((table[:1], table[end:]))[None], registers + table[1:end]]


def _the_same(tensors: Tensors) -> torch.Tensor:
    """Return the value of tensors that must be equal, because they are one tensor in transformers."""
    if not tensors[0].is_meta and not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
        raise ExportError(
            "the norms before and after pooling are one there, and this model was trained until they differ: no "
            "tensors of that class compute the same pooled token"
        )
    return tensors[0]


POSITIONS = each("POSITIONS", lambda table, config: table.squeeze(0),
                 lambda table, config: _with_prefix_rows(table, config).unsqueeze(0))  # fmt: skip
POSITION_TABLE = each("POSITION_TABLE", lambda table, config: table, _with_prefix_rows)
POSITIONS_AND_REGISTERS = Transform(
    "POSITIONS_AND_REGISTERS", _positions_beside_registers, _positions_without_registers
)
SPLIT_GATE = split("SPLIT_GATE", 2)  # gate, then value
SHARED = Transform(  # transformers applies one norm twice
    "SHARED", lambda tensors, config: [tensors[0], tensors[0]], lambda tensors, config: [_the_same(tensors)]
)
POINTWISE = each(  # a 1x1 convolution is a dense layer
    "POINTWISE",
    lambda kernel, config: kernel.flatten(1),
    lambda weight, config: weight[:, :, None, None],
)
FRAMES = each(  # a convolution in three dimensions, of which the first ends after one step
    "FRAMES",
    lambda kernel, config: kernel.flatten(1, 2),
    lambda kernel, config: kernel.unflatten(1, (config.num_channels, config.num_frames)),
)


def _split_heads(tensors: Tensors, config: PlainViTConfig) -> Tensors:
    """Split queries, keys and values, of which the latter two may be shared by several heads of the queries."""
    heads, head_dim = config.attention_shape
    shared = config.key_value_heads_of(0) * head_dim
    return tensors[0].split([heads * head_dim, shared, shared])


def _axes_first(tensor: torch.Tensor, config: PlainViTConfig) -> torch.Tensor:
    """Swap the halves of the pairs that rotate, and the axes that rotate them, among the channels of each head."""
    return tensor.unflatten(0, (-1, 2, 2, config.attention_shape[1] // 4)).transpose(1, 2).flatten(0, 3)


AXES_FIRST = each("AXES_FIRST", _axes_first, _axes_first)


def _interleaved(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Swap the last two of the axes (halves, ...) that the channels of each head consist of."""
    return tensor.unflatten(0, (-1, 2, *shape)).transpose(2, 3).flatten(0, 3)


INTERLEAVED_AXES = each(  # rows and columns rotate every other pair there
    "INTERLEAVED_AXES",
    lambda tensor, config: _interleaved(tensor, config.attention_shape[1] // 4, 2),
    lambda tensor, config: _interleaved(tensor, 2, config.attention_shape[1] // 4),
)
MAP_TABLE = each(
    "MAP_TABLE",
    lambda table, config: table.flatten(0, 1),
    lambda table, config: table.unflatten(0, config.grid_size),
)
CLASS_LAST = each(
    "CLASS_LAST",
    lambda table, config: table.roll(1, 0),
    lambda table, config: _with_prefix_rows(table, config).roll(-1, 0),
)
SPLIT_CLASS_TOKENS = Transform(  # the class token, and further ones as registers
    "SPLIT_CLASS_TOKENS",
    lambda tensors, config: [tensors[0][:, :1], tensors[0][:, 1:]],
    lambda tensors, config: [torch.cat(list(tensors), dim=1)],
)
CHANNELS_FIRST = each(  # a dense layer on the pixels of a patch in the order channel, row, column
    "CHANNELS_FIRST",
    lambda weight, config: weight.unflatten(1, (config.num_channels, *config.patch_shape)),
    lambda kernel, config: kernel.flatten(1),
)
SPLIT_HEADS = replace(SPLIT_QKV, name="SPLIT_HEADS", to_ours=_split_heads)

# Tensors

EMBEDDINGS, LAYER = "vit.embeddings", "vit.layers.{}"
TABLE, KERNEL = f"{EMBEDDINGS}.position_embeddings.weight", f"{EMBEDDINGS}.patch_embeddings.projection.weight"
NORMS = [  # whichever of the two our model has
    Row("layernorm", "vit.layernorm"),
    Row("layernorm", "vit.pooled_layernorm"),
]


def _patch_rows(projection: str) -> list[Row]:
    """Return the rows of the patch projection."""
    return [Row(f"{projection}.weight", KERNEL), Row(f"{projection}.bias", KERNEL.replace("weight", "bias"))]


def _attention_rows(
    source: str, inputs: Sequence[str] = ("q_proj", "k_proj", "v_proj"), output: str = "o_proj"
) -> list[Row]:
    """Return the rows of an attention's projections of queries, keys and values, and of its output projection."""
    names = zip((*inputs, output), "qkvo", strict=True)
    return [Row(f"{source}.{theirs}", f"{LAYER}.attention.{ours}_proj") for theirs, ours in names]


def _renamed(rows: Sequence[Row], name: str, other: str) -> list[Row]:
    """Return the rows with a part of the name in the source, with another instead."""
    return [replace(row, source=row.sources[0].replace(name, other)) for row in rows if name in row.sources[0]]


def _with_rows(rows: Sequence[Row], changed: Sequence[Row]) -> list[Row]:
    """Return a table with some rows changed: in place of those that fill the same tensors."""
    elsewhere = {name for row in changed for name in row.targets}
    return [*(row for row in rows if elsewhere.isdisjoint(row.targets)), *changed]


def _gated_rows(source: str) -> list[Row]:
    """Return the rows of an MLP that may have a gate."""
    names = zip(("gate_proj", "up_proj", "down_proj"), ("gate", "fc1", "fc2"), strict=True)
    return [Row(f"{source}.{theirs}", f"{LAYER}.mlp.{ours}") for theirs, ours in names]


def _qk_norm_rows(source: str) -> list[Row]:
    """Return the rows of an attention's norms of queries and keys."""
    return [Row(f"{source}.{name}", f"{LAYER}.attention.{name}") for name in ("q_norm", "k_norm")]


def _mlp_rows(source: str) -> list[Row]:
    """Return the rows of an MLP without a gate."""
    return [Row(f"{source}.{name}", f"{LAYER}.mlp.{name}") for name in ("fc1", "fc2")]


PATCHES_AND_TOKENS = [
    *_patch_rows("embeddings.patch_embeddings.projection"),
    Row("embeddings.cls_token", f"{EMBEDDINGS}.cls_token"),
]
VIT_ROWS = [
    *PATCHES_AND_TOKENS,
    Row("embeddings.mask_token", f"{EMBEDDINGS}.mask_token"),
    Row("embeddings.position_embeddings", TABLE, POSITIONS),
    Row("layers.{}.layernorm_before", f"{LAYER}.layernorm_before"),
    *_attention_rows("layers.{}.attention"),
    Row("layers.{}.layernorm_after", f"{LAYER}.layernorm_after"),
    *_mlp_rows("layers.{}.mlp"),
    *NORMS,
]
DINOV2_ON_DISK = _attention_rows(
    "encoder.layer.{}.attention", ("attention.query", "attention.key", "attention.value"), "output.dense"
)
VIT_ON_DISK = [  # names in files
    Row("encoder.layer.{}.layernorm_before", f"{LAYER}.layernorm_before"),
    *DINOV2_ON_DISK,
    Row("encoder.layer.{}.layernorm_after", f"{LAYER}.layernorm_after"),
    Row("encoder.layer.{}.intermediate.dense", f"{LAYER}.mlp.fc1"),
    Row("encoder.layer.{}.output.dense", f"{LAYER}.mlp.fc2"),
]
VIT_4_ROWS = _with_rows(VIT_ROWS, VIT_ON_DISK)  # names of 4.x in modules too
CLASS_TOKENS = (f"{EMBEDDINGS}.cls_token", f"{EMBEDDINGS}.register_tokens")
PIXIO_ROWS = _with_rows(VIT_ROWS, [Row("embeddings.cls_token", CLASS_TOKENS, SPLIT_CLASS_TOKENS)])
PIXIO_ON_DISK = [
    Row("encoder.layer.{}.norm1", f"{LAYER}.layernorm_before"),
    Row("encoder.layer.{}.norm2", f"{LAYER}.layernorm_after"),
    *(row for row in VIT_ON_DISK if "layernorm" not in row.sources[0]),
]
DEIT_ROWS = [  # without a head that reads it, the distillation token is a register
    *VIT_ROWS,
    Row("embeddings.distillation_token", f"{EMBEDDINGS}.distillation_token"),
    Row("embeddings.distillation_token", f"{EMBEDDINGS}.register_tokens"),
]
GATED = (f"{LAYER}.mlp.gate", f"{LAYER}.mlp.fc1")
LAYER_QKV = tuple(f"{LAYER}.attention.{name}_proj" for name in "qkv")
DINOV2_BLOCK = [
    *PATCHES_AND_TOKENS,
    Row("embeddings.mask_token", f"{EMBEDDINGS}.mask_token", ADD_FIRST_AXIS),
    Row("encoder.layer.{}.norm1", f"{LAYER}.layernorm_before"),
    *_attention_rows("encoder.layer.{}.attention"),
    Row("encoder.layer.{}.layer_scale1.lambda1", f"{LAYER}.layer_scale1.weight"),
    Row("encoder.layer.{}.norm2", f"{LAYER}.layernorm_after"),
    Row("encoder.layer.{}.layer_scale2.lambda1", f"{LAYER}.layer_scale2.weight"),
    *NORMS,
]
DINOV2_SWIGLU = [
    Row(("encoder.layer.{}.mlp.gate_proj", "encoder.layer.{}.mlp.up_proj"), GATED),
    Row("encoder.layer.{}.mlp.down_proj", f"{LAYER}.mlp.fc2"),
]
DINOV2_SWIGLU_ON_DISK = [
    Row("encoder.layer.{}.mlp.weights_in", GATED, SPLIT_GATE),
    Row("encoder.layer.{}.mlp.weights_out", f"{LAYER}.mlp.fc2"),
]
DINOV2_MLPS = {"mlp": (_mlp_rows("encoder.layer.{}.mlp"), ()), "swiglu": (DINOV2_SWIGLU, DINOV2_SWIGLU_ON_DISK)}
TIPS_ON_DISK = [
    *_patch_rows("patch_embed.proj"),
    Row("cls_token", f"{EMBEDDINGS}.cls_token"),
    Row("mask_token", f"{EMBEDDINGS}.mask_token", ADD_FIRST_AXIS),
    Row(("pos_embed", "register_tokens"), (TABLE, f"{EMBEDDINGS}.register_tokens"), POSITIONS_AND_REGISTERS),
    Row("blocks.{}.norm1", f"{LAYER}.layernorm_before"),
    Row("blocks.{}.attn.qkv", LAYER_QKV, SPLIT_QKV),
    Row("blocks.{}.attn.proj", f"{LAYER}.attention.o_proj"),
    Row("blocks.{}.ls1.gamma", f"{LAYER}.layer_scale1.weight"),
    Row("blocks.{}.norm2", f"{LAYER}.layernorm_after"),
    Row("blocks.{}.ls2.gamma", f"{LAYER}.layer_scale2.weight"),
    *_renamed(NORMS, "layernorm", "norm"),
]
TIPS_MLP_ON_DISK = [Row("blocks.{}.mlp.c_fc", f"{LAYER}.mlp.fc1"), Row("blocks.{}.mlp.c_proj", f"{LAYER}.mlp.fc2")]
TIPS_SWIGLU_ON_DISK = [
    Row("blocks.{}.mlp.w12", GATED, SPLIT_GATE),
    Row("blocks.{}.mlp.w3", f"{LAYER}.mlp.fc2"),
]
TIPS_MARK = "blocks.0.mlp.c_fc.weight"
RADIO_BLOCK = [
    *(row for row in DINOV2_BLOCK if ".layer." in row.sources[0] and "attention" not in row.sources[0]),
    Row("encoder.layer.{}.attn.qkv", LAYER_QKV, SPLIT_QKV),
    Row("encoder.layer.{}.attn.proj", f"{LAYER}.attention.o_proj"),
]
RADIO_ON_DISK = [
    Row("radio_model.model.patch_generator.embedder.weight", KERNEL, CHANNELS_FIRST),
    Row("radio_model.model.patch_generator.pos_embed", TABLE, DROP_FIRST_AXIS),
    Row("radio_model.model.patch_generator.cls_token.token", CLASS_TOKENS, then(ADD_FIRST_AXIS, SPLIT_CLASS_TOKENS)),
    *_renamed(RADIO_BLOCK, "encoder.layer", "radio_model.model.blocks"),
]
RADIO_MLPS = {
    name: (rows, _renamed(rows, "encoder.layer", "radio_model.model.blocks"))
    for name, rows in (("mlp", DINOV2_MLPS["mlp"][0]), ("swiglu", [
        Row("encoder.layer.{}.mlp.gate_proj", GATED[0]), Row("encoder.layer.{}.mlp.up_proj", GATED[1]),
        Row("encoder.layer.{}.mlp.down_proj", f"{LAYER}.mlp.fc2")]))
}  # fmt: skip
RADIO_ROWS = [
    Row("embeddings.patch_projection.weight", KERNEL, CHANNELS_FIRST),
    Row("embeddings.position_embedding", TABLE, DROP_FIRST_AXIS),
    Row("embeddings.cls_register_token", CLASS_TOKENS, then(ADD_FIRST_AXIS, SPLIT_CLASS_TOKENS)),
    *(row for row in DINOV2_BLOCK if ".layer." in row.sources[0]),
]
DINOV3_ROWS = [
    *_patch_rows("embeddings.patch_embeddings"),
    Row("embeddings.cls_token", f"{EMBEDDINGS}.cls_token"),
    Row("embeddings.mask_token", f"{EMBEDDINGS}.mask_token"),
    Row("embeddings.register_tokens", f"{EMBEDDINGS}.register_tokens"),
    Row("model.layer.{}.norm1", f"{LAYER}.layernorm_before"),
    *_attention_rows("model.layer.{}.attention"),
    Row("model.layer.{}.layer_scale1.lambda1", f"{LAYER}.layer_scale1.weight"),
    Row("model.layer.{}.norm2", f"{LAYER}.layernorm_after"),
    *_gated_rows("model.layer.{}.mlp"),
    Row("model.layer.{}.layer_scale2.lambda1", f"{LAYER}.layer_scale2.weight"),
    Row("norm", "vit.layernorm"),
]
SAPIENS2_ROWS = [
    *(row for row in DINOV3_ROWS if row.ours != f"{LAYER}.layer_scale2.weight"),
    *_qk_norm_rows("model.layer.{}.attention"),
]
SAPIENS2_ON_DISK = [
    *_patch_rows("patch_embed.projection"),
    Row("cls_token", f"{EMBEDDINGS}.cls_token"),
    Row("embeddings.mask_token", f"{EMBEDDINGS}.mask_token"),  # the one name that transformers does not change
    Row("storage_tokens", f"{EMBEDDINGS}.register_tokens"),
    Row("blocks.{}.ln1", f"{LAYER}.layernorm_before"),
    *_attention_rows("blocks.{}.attn", ("wq", "wk", "wv"), "proj"),
    *_qk_norm_rows("blocks.{}.attn"),
    Row("blocks.{}.attn.gamma.weight", f"{LAYER}.layer_scale1.weight"),
    Row("blocks.{}.ln2", f"{LAYER}.layernorm_after"),
    Row("blocks.{}.ffn.w12", GATED, SPLIT_GATE),
    Row("blocks.{}.ffn.w3", f"{LAYER}.mlp.fc2"),
    Row("ln1", "vit.layernorm"),
]
BIAS_TABLE = "attention.relative_position_bias.table"
BEIT_ROWS = [
    *(row for row in VIT_ROWS if row not in NORMS),
    Row("layers.{}.lambda_1", f"{LAYER}.layer_scale1.weight"),
    Row("layers.{}.lambda_2", f"{LAYER}.layer_scale2.weight"),
    Row("layers.{}.relative_position_bias.relative_position_bias_table", f"{LAYER}.{BIAS_TABLE}"),
    Row("shared_position_bias.relative_position_bias_table", "vit.relative_position_bias.table"),
    Row("layernorm", "vit.layernorm"),
    Row("pooler.layernorm", "vit.pooled_layernorm"),
]
BEIT_ON_DISK = [
    *VIT_ON_DISK,
    Row("encoder.layer.{}.lambda_1", f"{LAYER}.layer_scale1.weight"),
    Row("encoder.layer.{}.lambda_2", f"{LAYER}.layer_scale2.weight"),
    Row(
        "encoder.layer.{}.attention.attention.relative_position_bias.relative_position_bias_table",
        f"{LAYER}.{BIAS_TABLE}",
    ),
    Row("encoder.relative_position_bias.relative_position_bias_table", "vit.relative_position_bias.table"),
]
TOWER_BLOCK = [
    *_patch_rows("embeddings.patch_embedding"),
    Row("embeddings.position_embedding.weight", TABLE, POSITION_TABLE),
    Row("encoder.layers.{}.layer_norm1", f"{LAYER}.layernorm_before"),
    *_attention_rows("encoder.layers.{}.self_attn", output="out_proj"),
    Row("encoder.layers.{}.layer_norm2", f"{LAYER}.layernorm_after"),
    *_mlp_rows("encoder.layers.{}.mlp"),
]
CLIP_ROWS = [
    *TOWER_BLOCK,
    Row("embeddings.class_embedding", f"{EMBEDDINGS}.cls_token", ADD_TWO_AXES),
    Row("pre_layrnorm", f"{EMBEDDINGS}.norm"),  # sic
    Row("post_layernorm", "vit.pooled_layernorm"),
]
MLCD_ROWS = [
    *(row for row in CLIP_ROWS if row.ours != TABLE),
    Row("class_pos_emb", "vit.rotary_embedding.prefix_angles"),
]
OWLVIT_ROWS = [replace(row, source="pre_layernorm") if row.source == "pre_layrnorm" else row for row in CLIP_ROWS]
GIT_ROWS = [replace(row, ours="vit.layernorm") if row.source == "post_layernorm" else row for row in CLIP_ROWS]
BLIP_ROWS = [
    *_patch_rows("embeddings.patch_embedding"),
    Row("embeddings.class_embedding", f"{EMBEDDINGS}.cls_token"),
    Row("embeddings.position_embedding", TABLE, POSITIONS),
    Row("encoder.layers.{}.layer_norm1", f"{LAYER}.layernorm_before"),
    Row("encoder.layers.{}.self_attn.qkv", LAYER_QKV, SPLIT_QKV),
    Row("encoder.layers.{}.self_attn.projection", f"{LAYER}.attention.o_proj"),
    Row("encoder.layers.{}.layer_norm2", f"{LAYER}.layernorm_after"),
    *_mlp_rows("encoder.layers.{}.mlp"),
    *(Row(f"post_layernorm.{name}", (f"vit.layernorm.{name}", f"vit.pooled_layernorm.{name}"), SHARED)
      for name in ("weight", "bias")),
]  # fmt: skip
INTERNVL_ROWS = [
    *PATCHES_AND_TOKENS,
    Row("embeddings.mask_token", f"{EMBEDDINGS}.mask_token"),
    Row("embeddings.position_embeddings", TABLE, POSITIONS),
    Row("encoder.layer.{}.layernorm_before", f"{LAYER}.layernorm_before"),
    *_attention_rows("encoder.layer.{}.attention", output="projection_layer"),
    *_qk_norm_rows("encoder.layer.{}.attention"),
    Row("encoder.layer.{}.lambda_1", f"{LAYER}.layer_scale1.weight"),
    Row("encoder.layer.{}.layernorm_after", f"{LAYER}.layernorm_after"),
    *_mlp_rows("encoder.layer.{}.mlp"),
    Row("encoder.layer.{}.lambda_2", f"{LAYER}.layer_scale2.weight"),
    *NORMS,
]
QIANFAN_ROWS = [replace(row, source=str(row.source).replace("encoder.layer.", "layers.")) for row in INTERNVL_ROWS]
QIANFAN_ON_DISK = [  # of the whole model, as InternViT's own code names them
    *_patch_rows("embeddings.patch_embedding"),
    Row("embeddings.class_embedding", f"{EMBEDDINGS}.cls_token"),
    Row("embeddings.position_embedding", TABLE, POSITIONS),
    Row("encoder.layers.{}.norm1", f"{LAYER}.layernorm_before"),
    Row("encoder.layers.{}.attn.qkv", LAYER_QKV, SPLIT_QKV),
    *_qk_norm_rows("encoder.layers.{}.attention"),
    Row("encoder.layers.{}.attn.proj", f"{LAYER}.attention.o_proj"),
    Row("encoder.layers.{}.ls1", f"{LAYER}.layer_scale1.weight"),
    Row("encoder.layers.{}.norm2", f"{LAYER}.layernorm_after"),
    *_mlp_rows("encoder.layers.{}.mlp"),
    Row("encoder.layers.{}.ls2", f"{LAYER}.layer_scale2.weight"),
]
INTERN_VIT_ON_DISK = [replace(row, source=str(row.source).replace(".attention.", ".attn.")) for row in QIANFAN_ON_DISK]
SIGLIP_ROWS = [
    *TOWER_BLOCK,
    Row("post_layernorm", "vit.layernorm"),
    Row("head.probe", "vit.pooler.probe"),
    *in_proj_rows("head.attention", "vit.pooler"),
    Row("head.layernorm", "vit.pooler.layernorm"),
    Row("head.mlp.fc1", "vit.pooler.fc1"),
    Row("head.mlp.fc2", "vit.pooler.fc2"),
]
JANUS_ROWS = [
    replace(row, source=row.source.replace("out_proj", "projection_layer")) if isinstance(row.source, str) else row
    for row in TOWER_BLOCK
] + [Row("post_layernorm", "vit.layernorm")]
AIMV2_ROWS = [
    *_patch_rows("embeddings.patch_embed"),
    Row("embeddings.rms_norm", f"{EMBEDDINGS}.patch_embeddings.post_norm"),
    Row("embeddings.position_embedding.weight", TABLE, POSITION_TABLE),
    Row("encoder.layers.{}.rms_norm1", f"{LAYER}.layernorm_before"),
    *_attention_rows("encoder.layers.{}.attention", output="out_proj"),
    Row("encoder.layers.{}.rms_norm2", f"{LAYER}.layernorm_after"),
    *_gated_rows("encoder.layers.{}.ffn"),
    Row("rms_norm", "vit.layernorm"),
    Row("head.cls_token", "vit.pooler.query"),
    Row("head.k_proj", "vit.pooler.k_proj"),
    Row("head.v_proj", "vit.pooler.v_proj"),
    Row("head.output_proj", "vit.pooler.o_proj"),
]

PIXTRAL_ROWS = [
    Row("patch_conv.weight", KERNEL),
    Row("ln_pre", f"{EMBEDDINGS}.norm"),
    Row("transformer.layers.{}.attention_norm", f"{LAYER}.layernorm_before"),
    *_attention_rows("transformer.layers.{}.attention"),
    Row("transformer.layers.{}.ffn_norm", f"{LAYER}.layernorm_after"),
    *_gated_rows("transformer.layers.{}.feed_forward"),
]

QWEN_BLOCK = [
    Row("patch_embed.proj.weight", KERNEL, FRAMES),
    Row("patch_embed.proj.bias", KERNEL.replace("weight", "bias")),
    Row("blocks.{}.norm1", f"{LAYER}.layernorm_before"),
    Row("blocks.{}.attn.qkv", LAYER_QKV, SPLIT_HEADS),
    Row("blocks.{}.attn.proj", f"{LAYER}.attention.o_proj"),
    Row("blocks.{}.norm2", f"{LAYER}.layernorm_after"),
]
QWEN2_VL_ROWS = [*QWEN_BLOCK, *_mlp_rows("blocks.{}.mlp")]
QWEN2_5_VL_ROWS = [*QWEN_BLOCK, *_gated_rows("blocks.{}.mlp")]
QWEN2_5_OMNI_ROWS = _with_rows(QWEN2_5_VL_ROWS, _attention_rows("blocks.{}.attn", "qkv", "proj"))
QWEN3_VL_ROWS = [
    *QWEN_BLOCK,
    Row("pos_embed.weight", TABLE),
    Row("blocks.{}.mlp.linear_fc1", f"{LAYER}.mlp.fc1"),
    Row("blocks.{}.mlp.linear_fc2", f"{LAYER}.mlp.fc2"),
]
GLM_OCR_ROWS = [*QWEN2_5_VL_ROWS, *_qk_norm_rows("blocks.{}.attn"), Row("post_layernorm", "vit.layernorm")]
GLM4V_ROWS = [
    *GLM_OCR_ROWS,
    Row("embeddings.position_embedding.weight", TABLE),
    Row("post_conv_layernorm", f"{EMBEDDINGS}.patch_embeddings.post_norm"),
]
POSITION_TABLES = tuple(f"{EMBEDDINGS}.position_embeddings.{name}" for name in ("columns", "rows"))
GEMMA4_ROWS = [
    Row("patch_embedder.input_proj.weight", KERNEL),
    Row("patch_embedder.position_embedding_table", POSITION_TABLES, UNSTACK),
    Row("encoder.layers.{}.input_layernorm", f"{LAYER}.layernorm_before"),
    Row("encoder.layers.{}.self_attn.q_proj.linear", f"{LAYER}.attention.q_proj", AXES_FIRST),
    Row("encoder.layers.{}.self_attn.k_proj.linear", f"{LAYER}.attention.k_proj", AXES_FIRST),
    Row("encoder.layers.{}.self_attn.v_proj.linear", f"{LAYER}.attention.v_proj"),
    Row("encoder.layers.{}.self_attn.o_proj.linear", f"{LAYER}.attention.o_proj"),
    *(replace(row, transform=AXES_FIRST) for row in _qk_norm_rows("encoder.layers.{}.self_attn")),
    Row("encoder.layers.{}.post_attention_layernorm", f"{LAYER}.attention_norm"),
    Row("encoder.layers.{}.pre_feedforward_layernorm", f"{LAYER}.layernorm_after"),
    *(replace(row, source=f"{row.source}.linear") for row in _gated_rows("encoder.layers.{}.mlp")),
    Row("encoder.layers.{}.post_feedforward_layernorm", f"{LAYER}.mlp_norm"),
]
LLAMA4_ROWS = [
    Row("patch_embedding.linear.weight", KERNEL, CHANNELS_FIRST),
    Row("class_embedding", f"{EMBEDDINGS}.cls_token", ADD_TWO_AXES),
    Row("positional_embedding_vlm", TABLE, CLASS_LAST),
    Row("layernorm_pre", f"{EMBEDDINGS}.norm"),
    Row("model.layers.{}.input_layernorm", f"{LAYER}.layernorm_before"),
    *_attention_rows("model.layers.{}.self_attn"),
    Row("model.layers.{}.post_attention_layernorm", f"{LAYER}.layernorm_after"),
    *_mlp_rows("model.layers.{}.mlp"),
    Row("layernorm_post", "vit.layernorm"),
]
KIMI_TABLE = "patch_embed.pos_emb.position_embeddings"
KIMI_ROWS = [
    *_patch_rows("patch_embed.proj"),
    Row(KIMI_TABLE, TABLE, MAP_TABLE),
    Row("layers.{}.norm1", f"{LAYER}.layernorm_before"),
    Row("layers.{}.attn.q_proj", f"{LAYER}.attention.q_proj", INTERLEAVED_AXES),
    Row("layers.{}.attn.k_proj", f"{LAYER}.attention.k_proj", INTERLEAVED_AXES),
    Row("layers.{}.attn.v_proj", f"{LAYER}.attention.v_proj"),
    Row("layers.{}.attn.proj", f"{LAYER}.attention.o_proj"),
    Row("layers.{}.norm2", f"{LAYER}.layernorm_after"),
    *_mlp_rows("layers.{}.mlp"),
    Row("final_layernorm", "vit.layernorm"),
]
SAM_ROWS = [
    *_patch_rows("patch_embed.projection"),
    Row("pos_embed", TABLE, GRID_TABLE),
    Row("layers.{}.layer_norm1", f"{LAYER}.layernorm_before"),
    Row("layers.{}.attn.qkv", LAYER_QKV, SPLIT_QKV),
    Row("layers.{}.attn.rel_pos_h", f"{LAYER}.attention.relative_position_bias.rows"),
    Row("layers.{}.attn.rel_pos_w", f"{LAYER}.attention.relative_position_bias.columns"),
    Row("layers.{}.attn.proj", f"{LAYER}.attention.o_proj"),
    Row("layers.{}.layer_norm2", f"{LAYER}.layernorm_after"),
    Row("layers.{}.mlp.lin1", f"{LAYER}.mlp.fc1"),
    Row("layers.{}.mlp.lin2", f"{LAYER}.mlp.fc2"),
]
MGP_STR_ROWS = [
    *_patch_rows("embeddings.proj"),
    Row("embeddings.cls_token", f"{EMBEDDINGS}.cls_token"),
    Row("embeddings.pos_embed", TABLE, POSITIONS),
    Row("encoder.blocks.{}.norm1", f"{LAYER}.layernorm_before"),
    Row("encoder.blocks.{}.attn.qkv", LAYER_QKV, SPLIT_QKV),
    Row("encoder.blocks.{}.attn.proj", f"{LAYER}.attention.o_proj"),
    Row("encoder.blocks.{}.norm2", f"{LAYER}.layernorm_after"),
    *_mlp_rows("encoder.blocks.{}.mlp"),
]
# Of Qwen3-VL, of the other Qwens and of GLM, whose patch projections are called as timm's.
MERGER, QWEN_MERGER, GLM_MERGER = (f"merger.{name}.weight" for name in ("norm", "ln_q", "post_projection_norm"))

# Ends of names of which every file has one, and none of our models: their patch projection may have the same name.
NOT_OURS = (
    "position_embeddings",
    "position_embedding",
    "position_embedding.weight",
    "embeddings.rms_norm.weight",  # AIMv2, which may have no table
    "embeddings.patch_embeddings.weight",  # DINOv3, without a position table
    "relative_position_bias_table",
    ".lambda_1",  # BEiT and InternVL, which may have no positions at all
    ".attention.attention.query.weight",  # BEiT without LayerScale
    "embeddings.class_embedding",  # Qianfan-OCR without positions
    ".attn.wq.weight",  # Sapiens2
    "patch_conv.weight",  # Pixtral
    TIPS_MARK,
    "positional_embedding_vlm",  # Llama 4
    "patch_embedder.position_embedding_table",  # Gemma 4
    "patch_generator.embedder.weight",  # RADIO
    "cls_register_token",
    "layers.0.layer_norm1.weight",  # SAM
    "embeddings.pos_embed",  # MGP-STR
    MERGER,
    QWEN_MERGER,
    GLM_MERGER,
)
ON_THE_NORM = ("beit.",)  # prefixes that transformers saves on the last norm only, of a BeitBackbone
PROBES = (  # ViT's are the same as ours
    Probes("embeddings.patch_embeddings", "encoder.layer.{}", "layernorm"),  # DINOv2
    Probes("embeddings.patch_embeddings", "model.layer.{}", "norm"),  # DINOv3
    Probes("embeddings.patch_embedding", "encoder.layers.{}", None),  # CLIP and SigLIP
    Probes("embeddings.rms_norm", "encoder.layers.{}", None),  # AIMv2, whose patches are normalised
    Probes("patch_embedding", "model.layers.{}", "layernorm_post"),  # Llama 4
    Probes("patch_embed.proj", "layers.{}", "final_layernorm"),  # Kimi
    Probes("patch_embedder.input_proj", "encoder.layers.{}", None),  # Gemma 4
    Probes("embeddings.patch_projection", "encoder.layer.{}", None),  # RADIO
    Probes("patch_conv", "transformer.layers.{}", None),  # Pixtral
    Probes("patch_embed", "layers.{}", None),  # SAM
    Probes("embeddings.proj", "encoder.blocks.{}", None),  # MGP-STR
    Probes("post_conv_layernorm", "blocks.{}", "post_layernorm"),  # GLM-4V
    Probes("patch_embed", "blocks.{}", "post_layernorm"),  # GLM-OCR
    Probes("patch_embed", "blocks.{}", "merger"),  # Qwen
)
# Classes that differ only in the kernel, which a setting selects.
KERNELS = {
    f"transformers.models.{module}{kind}{attention}": module
    for module, attention in (
        ("beit.modeling_beit.Beit", "SelfAttention"),
        ("data2vec.modeling_data2vec_vision.Data2VecVision", "SelfAttention"),
        ("sam.modeling_sam.SamVision", "Attention"),
        ("sam_hq.modeling_sam_hq.SamHQVision", "Attention"),
        ("deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2SamVision", "Attention"),
    )
    for kind in ("", "Sdpa")
}

# Contracts


def _cut(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the patches of images as (B, N, C, rows, columns)."""
    side = model.config.patch_size
    return cut_patches(pixel_values, side, side).unflatten(2, (side, side, -1)).permute(0, 1, 4, 2, 3)


def _grids(model: Any, pixel_values: torch.Tensor, *frames: int) -> torch.Tensor:
    """Return the grid of each image, after its number of frames."""
    height, width = pair(getattr(model.config, "vision_config", model.config).patch_size)
    grid = [*frames, pixel_values.shape[-2] // height, pixel_values.shape[-1] // width]
    return torch.tensor([grid] * len(pixel_values), device=pixel_values.device)


def _naflex_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    patches = cut_patches(pixel_values, *pair(getattr(model.config, "vision_config", model.config).patch_size))
    mask = torch.ones(patches.shape[:2], dtype=torch.int32, device=patches.device)
    shapes = _grids(model, pixel_values)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _merge_order(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the patches, counted in raster order, in the order of the squares that merge."""
    merge = model.spatial_merge_size
    h, w = _grids(model, pixel_values)[0].tolist()
    numbers = torch.arange(h * w, device=pixel_values.device).view(h // merge, merge, w // merge, merge)
    return numbers.transpose(1, 2).flatten()


def _merging_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    patches = _cut(model, pixel_values)[:, _merge_order(model, pixel_values)].flatten(0, 1)
    frames = patches[:, :, None].expand(-1, -1, model.config.temporal_patch_size, -1, -1)
    return {"hidden_states": frames.flatten(1), "grid_thw": _grids(model, pixel_values, 1)}


def _flat_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    side = model.config.patch_size
    patches = cut_patches(pixel_values, side, side)[:, _merge_order(model, pixel_values)]
    return {"pixel_values": patches.flatten(0, 1), "grid_thw": _grids(model, pixel_values, 1)}


def _merged_rows(model: Any, tokens: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
    return tokens.view(len(pixel_values), -1, tokens.shape[-1])[:, _merge_order(model, pixel_values).argsort()]


def _windowed_rows(model: Any, tokens: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return tokens that are in the order of windows, each of whole squares that merge."""
    merge, side = model.spatial_merge_size, model.window_size // model.spatial_merge_size // model.config.patch_size
    h, w = (count // merge for count in _grids(model, pixel_values)[0].tolist())
    squares = torch.arange(h * w, device=tokens.device).view(h, w)
    order = torch.cat([part.flatten() for rows in squares.split(side) for part in rows.split(side, dim=1)])
    merged = tokens.unflatten(0, (len(pixel_values), h * w, -1))[:, order.argsort()]
    return _merged_rows(model, merged.flatten(0, 2), pixel_values)


def _raster_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": _cut(model, pixel_values).flatten(0, 1)[None], "grid_thw": _grids(model, pixel_values, 1)}


def _unmerged_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    sizes = torch.ones(len(pixel_values), dtype=torch.int64, device=pixel_values.device)
    return {**_raster_inputs(model, pixel_values), "merge_sizes": sizes}


def _raster_rows(model: Any, tokens: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
    return tokens.view(len(pixel_values), -1, tokens.shape[-1])


def _raw_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return pixels that the model itself normalises."""
    norm = model.input_conditioner
    return {"pixel_values": pixel_values * norm.norm_std.to(pixel_values) + norm.norm_mean.to(pixel_values)}


def _gemma4_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    side = model.config.patch_size
    h, w = _grids(model, pixel_values)[0].tolist()
    down, across = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    places = torch.stack((across, down), dim=-1).flatten(0, 1).to(pixel_values.device)
    patches = cut_patches(pixel_values, side, side).float() / 2 + 0.5  # the model itself scales them to [-1, 1]
    return {"pixel_values": patches, "pixel_position_ids": places.expand(len(patches), -1, -1)}


def _patch_inputs(model: Any, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": _cut(model, pixel_values).flatten(0, 1), "grid_thw": _grids(model, pixel_values, 1)}


ADAPTED = Contract(  # before the layers of an adapter; the class token is the last
    rows=lambda model, tokens, pixel_values: tokens.roll(1, 1), others=("patches", "last_hidden_state")
)
AVERAGING = Contract(_gemma4_inputs, others=("last_hidden_state",))
NORMALISING = Contract(_raw_inputs)
PIXELS, NAFLEX = Contract(), Contract(_naflex_inputs)
IN_ONE_ROW = Contract(in_one_row=True)
MAPS = Contract(  # before the convolutions of its neck, whose output takes the place of the tokens
    rows=lambda model, tokens, pixel_values: tokens.flatten(1, -2), others=("last_hidden_state",)
)
IN_SQUARES = Contract(_flat_inputs, _merged_rows, True, ("pooler_output",))
MERGING = Contract(_merging_inputs, _merged_rows, True, ("final norm", "pooler_output"))
DOWNSAMPLING = replace(MERGING, others=("last_hidden_state", "pooler_output"))
BY_PATCH = Contract(_patch_inputs, _raster_rows, True, ("pooler_output",))
RASTER = Contract(_raster_inputs, _raster_rows, True)
UNMERGED = replace(RASTER, inputs=_unmerged_inputs)
WINDOWED = replace(MERGING, rows=_windowed_rows, others=("patches", *MERGING.others))  # patches are not in windows yet

# Settings


def _alike(*names: str) -> dict[str, str]:
    """Return settings with the same names as our fields."""
    return {name: name for name in names}


SIZES = _alike("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size",
               "patch_size", "num_channels", "hidden_act")  # fmt: skip
BACKBONE = _alike("apply_layernorm", "reshape_hidden_states") | {
    "_out_features": "out_features", "_out_indices": "out_indices",
}  # fmt: skip
VIT_SETTINGS = SIZES | _alike(
    "layer_norm_eps", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"
)
DINOV2_SETTINGS = {
    **{name: name for name in VIT_SETTINGS if name not in ("intermediate_size", "hidden_dropout_prob")},
    "embedding_dropout_prob": "hidden_dropout_prob",  # in transformers, only on the embeddings
    "layer_scale_init_value": "layerscale_value",
    **_alike("drop_path_rate"),
    **BACKBONE,
}
DINOV3_SETTINGS = {
    **SIZES,
    **_alike("layer_norm_eps", "mlp_bias", "initializer_range", "drop_path_rate", "num_register_tokens"),
    "qkv_bias": "query_bias",
    "attention_output_bias": "proj_bias",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_scale_init_value": "layerscale_value",
    **BACKBONE,
}
DINOV3_ROPE = {
    "rope_theta": "rope_theta",
    "shift": "pos_embed_shift",
    "jitter": "pos_embed_jitter",
    "rescale": "pos_embed_rescale",
}
SAPIENS2_SETTINGS = {
    **DINOV3_SETTINGS,
    "layer_norm_eps": "rms_norm_eps",
    "use_mask_token": "use_mask_token",
    "apply_layernorm": "normalize_backbone_outputs",
}
BEIT_SETTINGS = {name: name for name in (*VIT_SETTINGS, "use_mask_token", "drop_path_rate") if name != "qkv_bias"}
TOWER_SETTINGS = {**SIZES, **_alike("layer_norm_eps"), "attention_probs_dropout_prob": "attention_dropout"}
AIMV2_SETTINGS = {
    **TOWER_SETTINGS,
    **_alike("qkv_bias", "mlp_bias", "initializer_range"),
    "layer_norm_eps": "rms_norm_eps",
    "attention_output_bias": "qkv_bias",
}
INTERNVL_SETTINGS = {
    **TOWER_SETTINGS,
    **_alike("norm_type", "hidden_dropout_prob", "initializer_range", "layer_scale_init_value"),
    "qkv_bias": "attention_bias",
}

# Settings that any model's configuration may have and that no part of a Vision Transformer reads.
BOOKKEEPING = {
    "_name_or_path", "_attn_implementation_autoset", "architectures", "attn_implementation", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "dtype", "early_stopping", "eos_token_id",
    "finetuning_task", "id2label", "is_encoder_decoder", "label2id", "length_penalty", "max_length", "model_type",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "repetition_penalty", "return_dict", "sep_token_id", "temperature",
    "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "transformers_version", "typical_p", "use_cache", "use_decoder_only_language_model",
}  # fmt: skip
# Settings of a language model and of the projection to it, which multimodal models write into the tower's config.
AROUND = {"num_image_tokens", "num_positions", "projection_dim", "projector_hidden_act", "vocab_size"}


# What settings say where our field is None: a LayerScale that our model lacks multiplies by 1.
IF_NONE = {"layer_scale_init_value": 1.0}


@dataclass(frozen=True)
class Family:
    """Models of transformers that share an encoder and the class of its configuration.

    Args:
        model_type: `model_type` of the configuration.
        rows: The encoder's tensors by their names in transformers 5.23, without prefix.
        on_disk: The rows with other names in files.
        settings: Our field -> their setting, where both mean the same.
        fixed: Our fields that have one value in the whole family.
        unread: Their other settings that `read` reads, or that do not affect the encoder's features.
        read: Returns our other fields from their settings.
        write: Returns their other settings from our config.
        only: Their settings with one value that has a counterpart in our model, and what an error says after another.
        equal: Pairs of their settings that have a counterpart if they are equal.
        check: Returns other combinations of their settings without a counterpart.
        mlps: Rows of the MLP, and those with other names in files, by our `mlp_type`; the other rows lack them.
        square: Whether images and patches must be square.
        many_sizes: Whether the input is patches of images of many sizes, projected by a dense layer.
        is_bare: Whether tensors without a `config.json` show enough of the settings.
        pools: What a class without a head does instead of the pooling that is usual for the family, for the report.
        drop_path_rises: Whether `drop_path_rate` is of the last block, as ours is, and not of every block.
        loader: The class of the whole model and the tower's place in it, if only that reads the tower's files.
        left_out: Settings of layers whose tensors are ignored, and others that nothing reads.
        normalises: Whether its classes normalise pixels themselves, as the settings of our config say.
        mark: The name by which an encoder is found, if its patch projection is called as that of another source.
        contract: How its classes take images and return tokens.
    """

    model_type: str
    rows: Sequence[Row]
    on_disk: Sequence[Row] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unread: Collection[str] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda settings: {}
    write: Callable[[PlainViTConfig], dict[str, Any]] = lambda config: {}
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    equal: Sequence[tuple[str, str]] = ()
    check: Callable[[Mapping[str, Any]], Sequence[str]] = lambda settings: ()
    mlps: Mapping[str, tuple[Sequence[Row], Sequence[Row]]] = field(default_factory=dict)
    square: bool = False
    many_sizes: bool = False
    is_bare: bool = True
    pools: str = ""
    drop_path_rises: bool = False
    loader: tuple[str, str] | None = None
    left_out: tuple[str, ...] = ()
    normalises: bool = False
    mark: str | None = None
    contract: Contract = PIXELS

    def fields(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that their settings determine."""
        said = {ours: settings[theirs] for ours, theirs in self.settings.items()}
        return {**self.fixed, **said, **_partial_patches(settings), **self.read(settings)}

    def settings_for(self, config: PlainViTConfig) -> dict[str, Any]:
        """Return the settings closest to our config."""
        values = {ours: getattr(config, ours) for ours in self.settings}
        said = {self.settings[ours]: IF_NONE.get(ours) if one is None else one for ours, one in values.items()}
        said |= {name: value for name, (value, _) in self.only.items()}
        said |= {one: said[other] for one, other in self.equal}
        return {**said, **self.write(config)}

    def faults(self, settings: Mapping[str, Any]) -> list[str]:
        """Return what in their settings has no counterpart in our model."""
        only = [f"{name}={settings[name]!r}{reason}" for name, (value, reason) in self.only.items()
                if settings[name] != value]  # fmt: skip
        equal = [f"{one}={settings[one]} beside {other}={settings[other]}" for one, other in self.equal
                 if settings[one] != settings[other]]  # fmt: skip
        return [*only, *equal, *self.check(settings)]

    def rows_of(self, config: PlainViTConfig, on_disk: bool) -> list[Row]:
        """Return the table of the encoder's tensors, with their names in files or in modules."""
        mlp, mlp_on_disk = self.mlps.get(config.mlp_type, ((), ()))
        rows, changed = [*self.rows, *mlp], [*self.on_disk, *mlp_on_disk] if on_disk else []
        if self.many_sizes != (config.patch_projection == "linear"):  # one of the two projections is dense
            kernel = PIXELS_TO_KERNEL if self.many_sizes else KERNEL_TO_PIXELS
            rows = [replace(row, transform=then(row.transform, kernel)) if row.ours == KERNEL else row for row in rows]
        return _with_rows(rows, changed)


def _partial_patches(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field for partial patches: transformers' convolution silently drops pixels at the right and bottom."""
    if "image_size" not in settings:
        return {}
    image, patch = pair(settings["image_size"]), pair(settings["patch_size"])
    return {"drop_partial_patches": any(pixels % step for pixels, step in zip(image, patch, strict=True))}


def _read_head_dim(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the head width: an undeclared setting that the classes use, or else their rounded-down quotient."""
    return {"head_dim": settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]}


def _write_head_dim(config: PlainViTConfig) -> dict[str, Any]:
    heads, head_dim = config.attention_shape
    return {"head_dim": head_dim} if head_dim != config.hidden_size // heads else {}


def gated_width(hidden_size: int, ratio: int) -> int:
    """Return the inner width of DINOv2's SwiGLU: two thirds of the MLP's, rounded up to a multiple of 8."""
    return (int(int(hidden_size * ratio) * 2 / 3) + 7) // 8 * 8


def _read_dinov2(settings: Mapping[str, Any]) -> dict[str, Any]:
    width, ratio = settings["hidden_size"], settings["mlp_ratio"]
    gated = {"mlp_type": "swiglu", "hidden_act": "silu", "intermediate_size": gated_width(width, ratio)}
    return {
        **_read_head_dim(settings),
        **(gated if settings["use_swiglu_ffn"] else {"intermediate_size": int(width * ratio)}),
    }


def _write_dinov2(config: PlainViTConfig) -> dict[str, Any]:
    width, gated = config.hidden_size, config.mlp_type == "swiglu"
    widths = {gated_width(width, ratio) if gated else width * ratio: ratio for ratio in range(1, 17)}
    return {
        **_write_head_dim(config),
        **({"hidden_act": "gelu"} if gated else {}),  # as in published configs; not read
        "use_swiglu_ffn": gated,
        "mlp_ratio": widths.get(config.intermediate_size, 4),
        "hidden_dropout_prob": config.hidden_dropout_prob
        if config.embedding_dropout_prob is None
        else config.embedding_dropout_prob,
    }


def _write_any_ratio(config: PlainViTConfig) -> dict[str, Any]:
    """Return the settings of DINOv2 where the ratio of a plain MLP may be any number."""
    whole, ratio = _write_dinov2(config), ratio_of(config.intermediate_size, config.hidden_size)
    return whole if config.mlp_type == "swiglu" else {**whole, "mlp_ratio": int(ratio) if ratio % 1 == 0 else ratio}


def _read_pixio(settings: Mapping[str, Any]) -> dict[str, Any]:
    width = int(settings["hidden_size"] * settings["mlp_ratio"])
    return {
        **_read_head_dim(settings), "intermediate_size": width, "num_register_tokens": settings["n_cls_tokens"] - 1
    }  # fmt: skip


def _write_pixio(config: PlainViTConfig) -> dict[str, Any]:
    ratio, tokens = config.intermediate_size // config.hidden_size, config.num_prefix_tokens
    return {**_write_head_dim(config), "mlp_ratio": ratio, "n_cls_tokens": tokens}


def _read_radio(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read_dinov2(settings),
        "num_register_tokens": settings["num_cls_tokens"] + settings["num_registers"] - 1,
        "pooling_num_tokens": len(settings["summary_idxs"]),
        "image_mean": settings["norm_mean"],
        "image_std": settings["norm_std"],
    }


def _write_radio(config: PlainViTConfig) -> dict[str, Any]:
    pooled = config.pooling_tokens
    mean, std = (per_channel(value, config) for value in (config.image_mean, config.image_std))
    return {
        **_write_any_ratio(config), "mlp_ratio": float(_write_any_ratio(config)["mlp_ratio"]),
        "num_cls_tokens": pooled, "num_registers": config.num_prefix_tokens - pooled,
        "summary_idxs": list(range(pooled)), "norm_mean": mean, "norm_std": std,
    }  # fmt: skip


def per_channel(value: Any, config: PlainViTConfig) -> list[float]:
    """Return a mean or a deviation as one number per channel."""
    return [value] * config.num_channels if isinstance(value, int | float) else list(value)


def _check_radio(settings: Mapping[str, Any]) -> list[str]:
    chosen = settings["summary_idxs"]
    return [] if chosen == [*range(len(chosen))] else [f"summary_idxs={chosen}: expected the first tokens, in order"]


def _read_dinov3(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "head_dim": settings["hidden_size"] // settings["num_attention_heads"],
        "key_bias": settings["key_bias"],
        "mlp_type": "swiglu" if settings["use_gated_mlp"] else "mlp",
        "rope_parameters": {
            "rope_type": "axial",
            "coordinates": "centered",
            "pairs": "halves",
            "dtype": "weights",
            **{ours: settings[theirs] for ours, theirs in DINOV3_ROPE.items()},
        },
    }


def _write_dinov3(config: PlainViTConfig) -> dict[str, Any]:
    return {
        "key_bias": config.qkv_bias and config.key_bias,
        "use_gated_mlp": config.mlp_type == "swiglu",
        **{theirs: config.group("rope_parameters")[ours] for ours, theirs in DINOV3_ROPE.items()},
    }


def _read_sapiens2(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read_dinov3(settings),
        "mlp_type": "swiglu",
        "qk_norm": "norm" if settings["use_qk_norm"] else None,
        "num_key_value_heads": settings["num_key_value_heads_per_layer"],
    }


def _write_sapiens2(config: PlainViTConfig) -> dict[str, Any]:
    return {
        **_write_dinov3(config),
        "use_qk_norm": config.qk_norm == "norm",
        "num_key_value_heads_per_layer": [config.key_value_heads_of(i) for i in range(config.num_hidden_layers)],
    }


def _read_sam(settings: Mapping[str, Any]) -> dict[str, Any]:
    blocks, size = settings["num_hidden_layers"], settings["window_size"]
    layers = [layer for layer in settings["global_attn_indexes"] if 0 <= layer < blocks]
    return {
        "head_dim": settings["hidden_size"] // settings["num_attention_heads"],
        "position_embedding_type": "learned" if settings["use_abs_pos"] else "none",
        "relative_position_bias": {"type": "decomposed"} if settings["use_rel_pos"] else None,
        "window_attention": {"size": size, "global_layers": layers} if size else None,
    }


def _write_sam(config: PlainViTConfig) -> dict[str, Any]:
    windows = config.window_attention
    return {
        "use_abs_pos": config.position_embedding_type == "learned",
        "use_rel_pos": config.relative_position_bias is not None,
        "window_size": 0 if windows is None else windows["size"],
        "global_attn_indexes": [] if windows is None else list(windows["global_layers"]),
    }


def _read_beit(settings: Mapping[str, Any]) -> dict[str, Any]:
    own, shared = settings["use_relative_position_bias"], settings["use_shared_relative_position_bias"]
    mean, gain = settings["use_mean_pooling"], settings["layer_scale_init_value"]
    return {
        **_read_head_dim(settings),
        "layer_scale_init_value": gain if gain > 0 else None,
        "position_embedding_type": "learned" if settings["use_absolute_position_embeddings"] else "none",
        "relative_position_bias": {"type": "table", "shared": bool(shared)} if own or shared else None,
        "pooling": "mean" if mean else "cls",
        "final_norm": "after_pooling" if mean else "before_pooling",
        **{f"_{name}": settings.get(name) for name in ("out_features", "out_indices")},
    }


def _write_beit(config: PlainViTConfig) -> dict[str, Any]:
    bias, gain = config.relative_position_bias, config.layer_scale_init_value
    return {
        **_write_head_dim(config),
        "layer_scale_init_value": 0.0 if gain is None else float(gain),
        "use_absolute_position_embeddings": config.position_embedding_type == "learned",
        "use_relative_position_bias": bias is not None and not bias["shared"],
        "use_shared_relative_position_bias": bias is not None and bias["shared"],
        "use_mean_pooling": config.pooling == "mean",
    }


def _check_beit(settings: Mapping[str, Any]) -> list[str]:
    both = settings["use_relative_position_bias"] and settings["use_shared_relative_position_bias"]
    return ["use_shared_relative_position_bias=True beside use_relative_position_bias=True"] if both else []


def _read_internvl(settings: Mapping[str, Any]) -> dict[str, Any]:
    positions = "learned" if settings["use_absolute_position_embeddings"] else "none"
    pooled = {"pooling": "mean", "final_norm": "none"} if settings["use_mean_pooling"] else {}
    norm = "rms_all_heads" if settings["use_qk_norm"] else None
    return {"position_embedding_type": positions, "qk_norm": norm, **pooled}


def _write_internvl(config: PlainViTConfig) -> dict[str, Any]:
    return {
        "use_absolute_position_embeddings": config.position_embedding_type != "none",
        "use_mean_pooling": config.final_norm == "none",
        "use_mask_token": config.use_mask_token,
        "use_qk_norm": config.qk_norm == "rms_all_heads",
    }


def _check_internvl(settings: Mapping[str, Any]) -> list[str]:
    faults = []
    if settings["use_qk_norm"] and settings["layer_norm_eps"] != 1e-6:
        faults.append(f"layer_norm_eps={settings['layer_norm_eps']} beside use_qk_norm=True, whose epsilon is 1e-06")
    if not settings["use_mean_pooling"] and settings["norm_type"] != "layer_norm":
        faults.append(f"norm_type={settings['norm_type']!r}, except for the last norm, a LayerNorm")
    return faults


def _read_ratio(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": int(settings["hidden_size"] * settings["mlp_ratio"])}


def _write_ratio(config: PlainViTConfig) -> dict[str, Any]:
    return {"mlp_ratio": ratio_of(config.intermediate_size, config.hidden_size)}


# Defaults of InternViT's own code, and Qianfan-OCR's names of its settings.
INTERN_VIT_DEFAULTS = {
    "num_channels": 3, "patch_size": 14, "image_size": 224, "qkv_bias": False, "hidden_size": 3200,
    "num_attention_heads": 25, "intermediate_size": 12800, "qk_normalization": True, "num_hidden_layers": 48,
    "hidden_act": "gelu", "norm_type": "rms_norm", "layer_norm_eps": 1e-6, "dropout": 0.0, "drop_path_rate": 0.0,
    "attention_dropout": 0.0, "initializer_range": 0.02, "initializer_factor": 0.1,
}  # fmt: skip
INTERN_VIT_NAMES = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm", "dropout": "hidden_dropout_prob",
                    "initializer_factor": "layer_scale_init_value"}  # fmt: skip
INTERN_VIT_TYPES = ("intern_vit_6b", "intern_vit_300m")


def original_in(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a model of its own code, which is never run, as a class with the same parameters has them.

    So far this is InternViT, with the parameters of Qianfan-OCR's class.

    Args:
        settings: The `config.json` of the tower or of an InternVL around it.
    """
    inside = settings.get("vision_config")
    tower = inside if isinstance(inside, Mapping) else settings
    if tower.get("model_type") not in INTERN_VIT_TYPES:
        return None
    unread = ("auto_map", "use_flash_attn", "use_bfloat16")  # how to compute, not what
    said = INTERN_VIT_DEFAULTS | {name: value for name, value in tower.items() if name not in unread}
    named = {str(INTERN_VIT_NAMES.get(name, name)): value for name, value in said.items()}
    fixed = {"projection_dropout": said["dropout"], "use_mean_pooling": True, "use_mask_token": False}
    return {**named, **fixed, "model_type": INTERN_VIT.model_type, "architectures": ["InternVisionModel"]}


def _read_siglip2(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"image_size": math.isqrt(settings["num_patches"]) * pair(settings["patch_size"])[0]}


def _write_siglip2(config: PlainViTConfig) -> dict[str, Any]:
    return {"num_patches": math.prod(config.grid_size)}


def _check_siglip2(settings: Mapping[str, Any]) -> list[str]:
    patches = settings["num_patches"]
    is_square = math.isqrt(patches) ** 2 == patches
    return [] if is_square else [f"num_patches={patches}: the class itself takes the grid for a square"]


PIXTRAL_ROPE = {"rope_type": "axial", "axis_frequencies": "alternating", "pairs": "halves", "dtype": "weights"}


MLCD_ROPE = {"rope_type": "axial", "prefix_angles": "learned", "pairs": "halves"}


def _read_theta(rope: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the reader of a rotation of which only the base of the frequencies varies."""
    return lambda settings: {"rope_parameters": {**rope, "rope_theta": settings["rope_parameters"]["rope_theta"]}}


def _write_theta(config: PlainViTConfig) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "axial", "rope_theta": config.group("rope_parameters")["rope_theta"]}}


def _write_default_theta(config: PlainViTConfig) -> dict[str, Any]:
    return {"rope_parameters": {**_write_theta(config)["rope_parameters"], "rope_type": "default"}}


def _check_theta(settings: Mapping[str, Any]) -> list[str]:
    rope = settings["rope_parameters"]
    is_known = rope.get("rope_type") in ("axial", "default") and rope.keys() <= {"rope_type", "rope_theta"}
    return [] if is_known else [f"rope_parameters={rope}"]


def _check_pixtral(settings: Mapping[str, Any]) -> list[str]:
    width = settings["hidden_size"] // settings["num_attention_heads"]
    head_dim = [] if settings["head_dim"] == width else [f"head_dim={settings['head_dim']}: its heads have {width}"]
    return [*head_dim, *_check_theta(settings)]


MERGER_SETTINGS = ("deepstack_visual_indexes", "out_hidden_size")
QWEN_ROPE = {"rope_type": "axial", "pairs": "halves"}
USUAL_GRID = 16  # patches down and across, of towers without a native size
QWEN_SETTINGS = {
    **_alike("hidden_size", "hidden_act", "patch_size", "initializer_range"),
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "num_channels": "in_channels",
    "num_frames": "temporal_patch_size",
}
QWEN3_VL_SETTINGS = {**QWEN_SETTINGS, "intermediate_size": "intermediate_size"}
GLM4V_SETTINGS = {
    **QWEN_SETTINGS,
    "image_size": "image_size",
    "intermediate_size": "out_hidden_size",
    "layer_norm_eps": "rms_norm_eps",
    "qkv_bias": "attention_bias",
    "attention_probs_dropout_prob": "attention_dropout",
}


def _read_any_size(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotation of a tower without a native size, and a usual one."""
    return {**_read_theta(QWEN_ROPE)(settings), "image_size": USUAL_GRID * settings["patch_size"]}


def _read_qwen2_vl(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read_any_size(settings), "intermediate_size": int(settings["embed_dim"] * settings["mlp_ratio"])}


def _write_qwen2_vl(config: PlainViTConfig) -> dict[str, Any]:
    return {**_write_theta(config), "mlp_ratio": config.intermediate_size // config.hidden_size}


def _read_qwen2_5_vl(settings: Mapping[str, Any]) -> dict[str, Any]:
    merge, blocks = settings["spatial_merge_size"], settings["depth"]
    size = settings["window_size"] // merge // settings["patch_size"] * merge
    layers = [layer for layer in settings["fullatt_block_indexes"] if 0 <= layer < blocks]
    windows = {"size": size, "global_layers": layers, "padding": "masked"}
    shared = settings.get("num_key_value_heads")  # of EXAONE 4.5
    return {**_read_any_size(settings), "window_attention": windows, "num_key_value_heads": shared}


def _write_qwen2_5_vl(config: PlainViTConfig) -> dict[str, Any]:
    windows, side = config.group("window_attention"), config.patch_shape[0]
    layers = list(windows["global_layers"])
    return {**_write_theta(config), "window_size": windows["size"] * side, "fullatt_block_indexes": layers}


def _write_exaone(config: PlainViTConfig) -> dict[str, Any]:
    return {**_write_qwen2_5_vl(config), "num_key_value_heads": config.key_value_heads_of(0)}


def _read_qwen3_vl(settings: Mapping[str, Any]) -> dict[str, Any]:
    side = math.isqrt(settings["num_position_embeddings"]) * pair(settings["patch_size"])[0]
    return {**_read_theta(QWEN_ROPE)(settings), "image_size": side}


def _check_qwen3_vl(settings: Mapping[str, Any]) -> list[str]:
    rows = settings["num_position_embeddings"]
    uneven = [] if math.isqrt(rows) ** 2 == rows else [f"num_position_embeddings={rows}: expected a square"]
    return [*uneven, *_check_theta(settings)]


GEMMA4_ROPE = {"rope_type": "axial", "axes": "xy", "pairs": "halves", "dtype": "weights"}
GEMMA4_GRID = 15  # a multiple of 3, because 3 x 3 tokens are averaged there


def _read_gemma4(settings: Mapping[str, Any]) -> dict[str, Any]:
    size, shared = GEMMA4_GRID * settings["patch_size"], settings["num_key_value_heads"]
    return {**_read_theta(GEMMA4_ROPE)(settings), "image_size": size, "num_key_value_heads": shared}


def _write_gemma4(config: PlainViTConfig) -> dict[str, Any]:
    return {**_write_theta(config), "num_key_value_heads": config.key_value_heads_of(0)}


LLAMA4_ROPE = {"rope_type": "axial", "axes": "xy", "offset": 1.0}
KIMI_ROPE = {"rope_type": "axial", "axes": "xy", "pairs": "halves"}


def _read_kimi(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read_theta(KIMI_ROPE)(settings), "image_size": settings["pos_emb_height"] * settings["patch_size"]}


def _write_kimi(config: PlainViTConfig) -> dict[str, Any]:
    return {**_write_theta(config), "pos_emb_height": config.grid_size[0], "pos_emb_width": config.grid_size[1]}


def _check_kimi(settings: Mapping[str, Any]) -> list[str]:
    h, w = settings["pos_emb_height"], settings["pos_emb_width"]
    oblong = [] if h == w else [f"pos_emb_height={h} beside pos_emb_width={w}: the class itself takes one for both"]
    merged = settings["merge_kernel_size"]
    others = [] if [*merged] == [2, 2] else [f"merge_kernel_size={merged}: expected (2, 2)"]
    return [*oblong, *others, *_check_theta(settings)]


POOLER_SETTINGS = ("pooler_output_size", "pooler_act")  # read if there are tensors of a pooler
STAGES = ("stage_names", "out_features", "out_indices")  # of a backbone
DINO = (*STAGES, "mlp_ratio", "use_swiglu_ffn", "num_register_tokens")
SEMANTIC = "semantic_loss_ignore_index"  # of heads that do not open
NOTHING = "pools nothing"

VIT = Family(
    "vit", VIT_ROWS, VIT_ON_DISK, VIT_SETTINGS, {"position_resampling": "bicubic"},
    (*POOLER_SETTINGS, "encoder_stride"),  # the latter is of the decoder of the masked-image model
    _read_head_dim, _write_head_dim,
)  # fmt: skip
DEIT = replace(VIT, model_type="deit", rows=DEIT_ROWS)
VIT_MSN = replace(VIT, model_type="vit_msn", unread=(), pools=NOTHING)
VIT_MAE = replace(
    VIT, model_type="vit_mae",
    # Of the pre-training, whose decoder is left out: every patch is seen here.
    unread=("decoder_num_attention_heads", "decoder_hidden_size", "decoder_num_hidden_layers",
            "decoder_intermediate_size", "mask_ratio", "norm_pix_loss"),
    pools=NOTHING,
)  # fmt: skip
IJEPA = replace(
    VIT, model_type="ijepa", fixed={**VIT.fixed, "use_class_token": False, "pooling": "mean"}, unread=POOLER_SETTINGS
)
DINOV2 = Family(
    "dinov2", [*DINOV2_BLOCK, Row("embeddings.position_embeddings", TABLE, POSITIONS)], DINOV2_ON_DISK, DINOV2_SETTINGS,
    VIT.fixed, (*DINO, "use_mask_token"), _read_dinov2,
    lambda config: {**_write_dinov2(config), "use_mask_token": config.use_mask_token}, mlps=DINOV2_MLPS, square=True,
)  # fmt: skip
DINOV2_WITH_REGISTERS = replace(
    DINOV2, model_type="dinov2_with_registers",
    rows=[
        *DINOV2_BLOCK,
        Row(
            ("embeddings.position_embeddings", "embeddings.register_tokens"),
            (TABLE, f"{EMBEDDINGS}.register_tokens"),
            POSITIONS_AND_REGISTERS,
        ),
    ],
    settings={**DINOV2_SETTINGS, **_alike("num_register_tokens")},
    fixed={"position_resampling": "bicubic_antialias"}, unread=DINO, write=_write_dinov2,
)  # fmt: skip
TIPS_V2 = replace(
    DINOV2_WITH_REGISTERS, model_type="tipsv2_vision_model", on_disk=TIPS_ON_DISK,
    fixed={"position_resampling": "bilinear_antialias"}, write=_write_any_ratio, mark=TIPS_MARK,
    is_bare=False,
    mlps={"mlp": (DINOV2_MLPS["mlp"][0], TIPS_MLP_ON_DISK), "swiglu": (DINOV2_SWIGLU, TIPS_SWIGLU_ON_DISK)},
)  # fmt: skip
RADIO = Family(
    "radio", RADIO_ROWS, RADIO_ON_DISK,
    {**{ours: theirs for ours, theirs in DINOV2_SETTINGS.items()
        if theirs not in (*BACKBONE.values(), "hidden_dropout_prob")}, "image_size": "max_img_size"},
    {"position_resampling": "bilinear", "position_resampling_to_square": True, "position_embedding_on_prefix": False,
     "patch_bias": False, "final_norm": "none", "pooling": "prefix_joined"},
    ("mlp_ratio", "use_swiglu_ffn", "image_size", "num_cls_tokens", "num_registers", "summary_idxs", "norm_mean",
     "norm_std", "patch_dim", "video_patch_dim", "video_temporal_patch_size", "hidden_dropout_prob"),
    _read_radio, _write_radio, check=_check_radio, square=True, is_bare=False,
    mlps=RADIO_MLPS, left_out=("video_temporal_patch_size", "video_patch_dim", "image_size"), normalises=True,
    contract=NORMALISING,
)  # fmt: skip
PIXIO = replace(
    VIT, model_type="pixio", rows=PIXIO_ROWS, on_disk=PIXIO_ON_DISK,
    settings={**{name: name for name in VIT_SETTINGS if name != "intermediate_size"}, **_alike("drop_path_rate"),
              **BACKBONE},
    fixed={**VIT.fixed, "pooling": "prefix_mean"}, unread=(*STAGES, "mlp_ratio", "n_cls_tokens"),
    read=_read_pixio, write=_write_pixio, square=True, is_bare=False,
)  # fmt: skip
FLAVA = replace(
    VIT, model_type="flava_image_model", rows=VIT_4_ROWS, on_disk=(),
    settings={**VIT_SETTINGS, "use_mask_token": "mask_token"}, unread=("vocab_size",),
    read=lambda settings: {}, write=lambda config: {},
)  # fmt: skip
DPT = replace(
    FLAVA, model_type="dpt", settings=VIT_SETTINGS, fixed={"position_resampling": "bilinear"},
    only={"is_hybrid": (False, ", with a ResNet that is not one of the paper's")},
    unread=(
        *POOLER_SETTINGS,
        # Of the neck and the heads.
        "backbone_out_indices", "readout_type", "reassemble_factors", "neck_hidden_sizes", "fusion_hidden_size",
        "head_in_index", "use_batch_norm_in_fusion_residual", "use_bias_in_fusion_residual", "add_projection",
        "use_auxiliary_head", "auxiliary_loss_weight", SEMANTIC, "semantic_classifier_dropout",
        "is_hybrid", "backbone_config", "backbone_featmap_shape", "neck_ignore_stages",  # of hybrids
    ),
    square=True,
)  # fmt: skip
BEIT = Family(
    "beit", BEIT_ROWS, BEIT_ON_DISK, BEIT_SETTINGS,
    {"position_resampling": "bicubic", "key_bias": False, "apply_layernorm": False},
    (
        "use_absolute_position_embeddings", "use_relative_position_bias", "use_shared_relative_position_bias",
        "layer_scale_init_value", "use_mean_pooling", *STAGES, "reshape_hidden_states",
        # Of heads that do not open.
        "vocab_size", "pool_scales", "use_auxiliary_head", "auxiliary_loss_weight", "auxiliary_channels",
        "auxiliary_num_convs", "auxiliary_concat_input", SEMANTIC, "add_fpn",
    ),
    _read_beit, _write_beit, check=_check_beit, square=True, drop_path_rises=True,
)  # fmt: skip
DATA2VEC_VISION = replace(
    BEIT, model_type="data2vec-vision", on_disk=(), rows=_with_rows(BEIT_ROWS, BEIT_ON_DISK),
    # Its `out_indices` are of a head that does not open.
    read=lambda settings: _read_beit({name: value for name, value in settings.items() if name != "out_indices"}),
)  # fmt: skip
DINOV3 = Family(
    "dinov3_vit", DINOV3_ROWS,
    _renamed(DINOV3_ROWS, "model.layer", "layer"), DINOV3_SETTINGS, {"position_embedding_type": "none"},
    (*DINO, "value_bias", "key_bias", "use_gated_mlp", *DINOV3_ROPE.values(), "return_class_token"),
    _read_dinov3, _write_dinov3, equal=[("value_bias", "query_bias")],
)  # fmt: skip
SAPIENS2 = Family(
    "sapiens2", SAPIENS2_ROWS, SAPIENS2_ON_DISK, SAPIENS2_SETTINGS,
    {**DINOV3.fixed, "norm_type": "rms_norm", "scale_mlp_branch": False},
    (
        *DINOV3.unread, "use_qk_norm", "num_key_value_heads_per_layer", "num_key_value_attention_heads",
        "num_first_full_attention_layers", "num_last_full_attention_layers",
        "head_config", "flip_pairs", SEMANTIC,  # of heads that do not open
    ),
    _read_sapiens2, _write_sapiens2, equal=DINOV3.equal,
    only={"use_gated_mlp": (True, ", of whose files transformers itself reads no MLP")},
)  # fmt: skip
CLIP = Family(
    "clip_vision_model", CLIP_ROWS, (), {**TOWER_SETTINGS, **_alike("initializer_range")},
    {"position_resampling": "bicubic", "embedding_norm": True, "patch_bias": False, "final_norm": "after_pooling"},
    ("projection_dim", "initializer_factor"), square=True,
)  # fmt: skip
METACLIP_2 = replace(CLIP, model_type="metaclip_2_vision_model")
ALTCLIP = replace(  # transformers 5 applies the text model's old names to the whole file of an AltCLIPModel
    CLIP, model_type="altclip_vision_model",
    on_disk=_renamed(CLIP_ROWS, ".layers.", ".layer."),
    loader=("AltCLIPModel", "vision_model."),
)  # fmt: skip
OWLVIT = replace(CLIP, model_type="owlvit_vision_model", rows=OWLVIT_ROWS)
GIT = replace(
    CLIP, model_type="git_vision_model", rows=GIT_ROWS,
    fixed={name: value for name, value in CLIP.fixed.items() if name != "final_norm"}, pools=NOTHING,
)  # fmt: skip
BLIP = Family(
    "blip_vision_model", BLIP_ROWS, (),
    {ours: theirs for ours, theirs in CLIP.settings.items() if ours != "num_channels"},
    {"position_resampling": "bicubic", "num_channels": 3, "final_norm": "both"},
    ("projection_dim", "initializer_factor", "num_channels"), square=True,  # the class always has three channels
)  # fmt: skip
BLIP_2 = replace(BLIP, model_type="blip_2_vision_model", settings={**BLIP.settings, "qkv_bias": "qkv_bias"})
INTERNVL = Family(
    "internvl_vision", INTERNVL_ROWS, (), INTERNVL_SETTINGS, VIT.fixed,
    ("projection_dropout", "use_absolute_position_embeddings", "use_mean_pooling", "use_qk_norm", "use_mask_token"),
    _read_internvl, _write_internvl, equal=[("projection_dropout", "hidden_dropout_prob")], check=_check_internvl,
    square=True, pools=NOTHING,
)  # fmt: skip
QIANFAN_OCR = replace(
    INTERNVL, model_type="qianfan_ocr_vision", rows=QIANFAN_ROWS, on_disk=QIANFAN_ON_DISK,
    settings={**INTERNVL.settings, "drop_path_rate": "drop_path_rate"}, drop_path_rises=True,
    loader=("QianfanOCRModel", "vision_tower."),
)  # fmt: skip
INTERN_VIT = replace(QIANFAN_OCR, on_disk=INTERN_VIT_ON_DISK, pools="")
SIGLIP = Family(
    "siglip_vision_model", SIGLIP_ROWS, (), TOWER_SETTINGS,
    {"position_resampling": "bicubic", "use_class_token": False, "pooling": "mean"},
    ("vision_use_head",), square=True,
)  # fmt: skip
IDEFICS2 = Family(
    "idefics2_vision", SIGLIP_ROWS, (), {**TOWER_SETTINGS, **_alike("initializer_range")},
    {**SIGLIP.fixed, "position_resampling": "bucketed"},
    ("max_image_size", "size", "use_base_siglip"), square=True,  # in published files, and read by no class
)  # fmt: skip
JANUS = Family(
    "janus_vision_model", JANUS_ROWS, (),
    {
        **{ours: theirs for ours, theirs in IDEFICS2.settings.items() if ours != "intermediate_size"},
        "qkv_bias": "attention_bias", "hidden_dropout_prob": "hidden_dropout_rate",
    },
    {**SIGLIP.fixed, "embedding_dropout_prob": 0.0},
    ("mlp_ratio", "projection_dropout", "use_qk_norm", "depth", "projection_dim", "num_image_tokens"),
    _read_ratio, _write_ratio, only={"use_qk_norm": (False, ", which the class itself cannot compute")},
    equal=[("projection_dropout", "hidden_dropout_rate")], square=True,
    pools="returns its first patch, normalised twice", contract=Contract(others=("pooler_output",)),
)  # fmt: skip
SIGLIP2 = Family(
    "siglip2_vision_model", SIGLIP_ROWS, (), {ours: theirs for ours, theirs in TOWER_SETTINGS.items()
                                              if ours != "image_size"},
    {"position_resampling": "bilinear_antialias", "use_class_token": False, "pooling": "mean",
     "patch_projection": "linear"},
    ("vision_use_head", "num_patches"), _read_siglip2, _write_siglip2, check=_check_siglip2, square=True,
    many_sizes=True, contract=NAFLEX,
)  # fmt: skip
COSMOS3_EDGE = replace(
    SIGLIP2, model_type="cosmos3_edge_vision", unread=("num_patches", "spatial_merge_size"),
    only={"spatial_merge_size": (2, ": expected 2")}, is_bare=False, contract=IN_SQUARES,
)  # fmt: skip
CONNECTOR_SETTINGS = ("out_hidden_size", "scale_factor", "deepstack_visual_indexes", "use_fine_route")
GRANITE_DOCLING = replace(
    SIGLIP, model_type="granite_docling_vision", settings=IDEFICS2.settings, unread=CONNECTOR_SETTINGS, is_bare=False,
    left_out=CONNECTOR_SETTINGS, contract=Contract(others=("pooler_output",)),
)  # fmt: skip
SAM = Family(
    "sam_vision_model", SAM_ROWS, (),
    {**TOWER_SETTINGS, **_alike("qkv_bias", "initializer_range"), "intermediate_size": "mlp_dim"},
    {"use_class_token": False, "pooling": "mean", "final_norm": "none"},
    ("mlp_ratio", "scale", "use_abs_pos", "use_rel_pos", "window_size", "global_attn_indexes", "num_pos_feats",
     "downsample_channels", "output_channels"),
    _read_sam, _write_sam, square=True, left_out=("output_channels",), contract=MAPS,
)  # fmt: skip
MGP_STR = Family(
    "mgp-str", MGP_STR_ROWS, (),
    {
        **{ours: theirs for ours, theirs in SIZES.items() if ours not in ("intermediate_size", "hidden_act")},
        **_alike("layer_norm_eps", "qkv_bias", "initializer_range", "drop_path_rate"),
        "hidden_dropout_prob": "drop_rate", "attention_probs_dropout_prob": "attn_drop_rate",
    },
    {"hidden_act": "gelu", "final_norm": "none"},
    ("mlp_ratio", "distilled", "max_token_length", "num_character_labels", "num_bpe_labels", "num_wordpiece_labels",
     "output_a3_attentions"),
    _read_ratio, _write_ratio, only={"distilled": (False, ", whose position is of no token")}, drop_path_rises=True,
    pools=NOTHING,
)  # fmt: skip
AIMV2 = Family(
    "aimv2_vision_model", AIMV2_ROWS, (), AIMV2_SETTINGS,
    {"use_class_token": False, "pooling": "mean", "norm_type": "rms_norm", "mlp_type": "swiglu",
     "patch_post_norm": True},
    ("use_head",), square=True,
)  # fmt: skip
PIXTRAL = Family(
    "pixtral", PIXTRAL_ROWS, (),
    {name: theirs for name, theirs in TOWER_SETTINGS.items() if name != "layer_norm_eps"} | _alike("initializer_range"),
    {"layer_norm_eps": 1e-5, "norm_type": "rms_norm", "final_norm": "none", "mlp_type": "swiglu",
     "embedding_norm": True, "use_class_token": False, "pooling": "mean", "position_embedding_type": "none",
     **dict.fromkeys(("patch_bias", "qkv_bias", "attention_output_bias", "mlp_bias"), False)},
    ("rope_parameters", "head_dim"), _read_theta(PIXTRAL_ROPE), _write_theta, check=_check_pixtral, square=True,
    contract=IN_ONE_ROW,
)  # fmt: skip
GEMMA4 = Family(
    "gemma4_vision", GEMMA4_ROWS, (),
    {
        **_alike("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size",
                 "patch_size", "initializer_range"),
        "hidden_act": "hidden_activation", "layer_norm_eps": "rms_norm_eps",
        "attention_probs_dropout_prob": "attention_dropout", "position_table_length": "position_embedding_size",
    },
    {
        "norm_type": "rms_norm", "mlp_type": "swiglu", "block_type": "sandwich", "final_norm": "none",
        "pooling": "mean", "use_class_token": False, "patch_projection": "linear",
        "position_embedding_type": "factorized", "position_resampling": "truncate", "qk_norm": "norm",
        "value_norm": True, "attention_scale": 1.0,
        **dict.fromkeys(("patch_bias", "qkv_bias", "attention_output_bias", "mlp_bias"), False),
    },
    ("rope_parameters", "num_key_value_heads", "pooling_kernel_size", "standardize", "max_position_embeddings",
     "use_clipped_linears", "attention_bias"),
    _read_gemma4, _write_gemma4, check=_check_theta, square=True, many_sizes=True, is_bare=False,
    only={"use_clipped_linears": (False, ", with layers that limit their inputs and outputs"),
          "attention_bias": (False, ", which the class itself does not read")},
    left_out=("standardize", "pooling_kernel_size"), normalises=True, contract=AVERAGING,
)  # fmt: skip
LLAMA4_ADAPTER = ("projector_input_dim", "projector_output_dim", "projector_dropout", "pixel_shuffle_ratio",
                  "vision_output_dim", "vision_feature_select_strategy", "multi_modal_projector_bias")  # fmt: skip
LLAMA4 = Family(
    "llama4_vision_model", LLAMA4_ROWS, (),
    {ours: theirs for ours, theirs in TOWER_SETTINGS.items() if ours not in ("layer_norm_eps", "hidden_act")}
    | _alike("initializer_range"),
    {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "patch_bias": False, "embedding_norm": True, "pooling": "mean"},
    ("rope_parameters", "norm_eps", "hidden_act", *LLAMA4_ADAPTER), _read_theta(LLAMA4_ROPE), _write_default_theta,
    check=_check_theta, square=True, is_bare=False, left_out=(*LLAMA4_ADAPTER, "norm_eps", "hidden_act"),
    contract=ADAPTED,
)  # fmt: skip
KIMI = Family(
    "kimi_k25_vision", KIMI_ROWS, (),
    _alike("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "patch_size"),
    {"layer_norm_eps": 1e-5, "use_class_token": False, "pooling": "mean", "position_resampling": "bicubic"},
    ("rope_parameters", "pos_emb_height", "pos_emb_width", "pos_emb_time", "merge_kernel_size"),
    _read_kimi, _write_kimi, check=_check_kimi, square=True, is_bare=False,
    only={"pos_emb_time": (4, ": expected 4")}, mark=KIMI_TABLE, contract=BY_PATCH,
)  # fmt: skip
MLCD = replace(
    CLIP, model_type="mlcd_vision_model", rows=MLCD_ROWS, fixed={**CLIP.fixed, "position_embedding_type": "none"},
    unread=(*CLIP.unread, "rope_parameters", "num_key_value_groups"),
    read=_read_theta(MLCD_ROPE), write=_write_theta, only={"num_key_value_groups": (1, "")}, check=_check_theta,
)  # fmt: skip
QWEN3_VL = Family(
    "qwen3_vl_vision", QWEN3_VL_ROWS, (), QWEN3_VL_SETTINGS,
    {"layer_norm_eps": 1e-6, "final_norm": "none", "use_class_token": False, "pooling": "mean",
     "position_resampling": "bilinear_align_corners"},
    ("rope_parameters", "num_position_embeddings", "spatial_merge_size", *MERGER_SETTINGS),
    _read_qwen3_vl,
    lambda config: {**_write_theta(config), "num_position_embeddings": math.prod(config.grid_size)},
    only={"spatial_merge_size": (2, ": expected 2")}, check=_check_qwen3_vl, square=True, is_bare=False,
    left_out=MERGER_SETTINGS, mark=MERGER, contract=MERGING,
)  # fmt: skip
QWEN3_OMNI = replace(QWEN3_VL, model_type="qwen3_omni_moe_vision_encoder", mark=QWEN_MERGER)
QWEN2_VL = replace(
    QWEN3_VL, model_type="qwen2_vl_vision", rows=QWEN2_VL_ROWS, settings={**QWEN_SETTINGS, "hidden_size": "embed_dim"},
    fixed={**QWEN3_VL.fixed, "position_embedding_type": "none", "patch_bias": False},
    unread=("rope_parameters", "spatial_merge_size", "mlp_ratio", "hidden_size"), read=_read_qwen2_vl,
    write=_write_qwen2_vl, check=_check_theta, left_out=("hidden_size",), mark=QWEN_MERGER,
)  # fmt: skip
QWEN2_5_VL = replace(
    QWEN2_VL, model_type="qwen2_5_vl_vision", rows=QWEN2_5_VL_ROWS, settings=QWEN3_VL_SETTINGS,
    fixed={**QWEN2_VL.fixed, "norm_type": "rms_norm", "mlp_type": "swiglu"},
    unread=("rope_parameters", "spatial_merge_size", "window_size", "fullatt_block_indexes", "out_hidden_size",
            "tokens_per_second", "num_key_value_heads"),
    read=_read_qwen2_5_vl, write=_write_qwen2_5_vl, left_out=("out_hidden_size",), contract=WINDOWED,
)  # fmt: skip
EXAONE_4_5 = replace(QWEN2_5_VL, model_type="exaone4_5_vision", write=_write_exaone)
GLM4V = replace(
    QWEN2_5_VL, model_type="glm4v_vision", rows=GLM4V_ROWS, settings=GLM4V_SETTINGS,
    fixed={"norm_type": "rms_norm", "mlp_type": "swiglu", "use_class_token": False, "pooling": "mean",
           "position_resampling": "bicubic", "patch_post_norm": True, "mlp_bias": False,
           "attention_output_bias": False},
    unread=("rope_parameters", "spatial_merge_size", "intermediate_size"), read=_read_theta(QWEN_ROPE),
    write=_write_theta, left_out=("intermediate_size",), mark=GLM_MERGER, contract=DOWNSAMPLING,
)  # fmt: skip
GLM_OCR = replace(
    GLM4V, model_type="glm_ocr_vision", rows=GLM_OCR_ROWS,
    settings={**GLM4V_SETTINGS, "intermediate_size": "intermediate_size",
              **dict.fromkeys(("attention_output_bias", "mlp_bias"), "attention_bias")},
    fixed={**QWEN2_5_VL.fixed, "final_norm": "before_pooling", "patch_bias": True, "qk_norm": "norm"},
    unread=("rope_parameters", "spatial_merge_size", "out_hidden_size"), left_out=("out_hidden_size",),
)  # fmt: skip
PADDLE_OCR_VL = replace(
    SIGLIP, model_type="paddleocr_vl_vision", fixed={**SIGLIP.fixed, "position_resampling": "bilinear"},
    unread=("rope_parameters", "spatial_merge_size"), read=_read_theta(QWEN_ROPE), write=_write_theta,
    check=_check_theta, is_bare=False, contract=RASTER,
)  # fmt: skip
VIDEO_LLAMA_3 = replace(
    PADDLE_OCR_VL, model_type="video_llama_3_vision",
    settings={ours: theirs for ours, theirs in IDEFICS2.settings.items() if ours != "image_size"},
    fixed={**SIGLIP.fixed, "position_embedding_type": "none"}, unread=("rope_parameters",), read=_read_any_size,
    contract=UNMERGED,
)  # fmt: skip

# Classes


@dataclass(frozen=True)
class Head:
    """What a class has after its encoder: a classifier, a decoder, a pooling, or nothing.

    Args:
        rows: Its tensors.
        is_optional: Whether a model of the class may lack them.
        is_decoder: Whether it predicts masked patches.
        read: Returns the fields of our config that its tensors and the settings determine.
        write: Returns its settings from our config.
        options: Returns the arguments of the class beside its configuration.
        any_value: Returns our fields for which the class has a place whatever their value.
    """

    rows: Sequence[Row] = ()
    is_optional: bool = False
    is_decoder: bool = False
    read: Callable[[StateDict, Mapping[str, Any]], dict[str, Any]] = lambda tensors, settings: {}
    write: Callable[[PlainViTConfig], dict[str, Any]] = lambda config: {}
    options: Callable[[PlainViTConfig], dict[str, Any]] = lambda config: {}
    any_value: Callable[[PlainViTConfig], dict[str, Any]] = lambda config: {}


def _mask_token(config: PlainViTConfig) -> dict[str, Any]:
    return {"use_mask_token": config.use_mask_token}


def _read_pooler(tensors: StateDict, settings: Mapping[str, Any]) -> dict[str, Any]:
    if (dense := tensors.get("pooler.dense.weight")) is None:
        return {}
    return {"representation_size": dense.shape[0], "representation_act": settings.get("pooler_act", "tanh")}


def _write_pooler(config: PlainViTConfig) -> dict[str, Any]:
    size, act = config.representation_size, config.representation_act
    return {"pooler_output_size": size, "pooler_act": act} if size else {}


def _has_pooler(config: PlainViTConfig) -> dict[str, Any]:
    return {"add_pooling_layer": config.representation_size is not None}


def _any_pooler(config: PlainViTConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("representation_size", "representation_act")}


def _any_flava_pooler(config: PlainViTConfig) -> dict[str, Any]:
    return {"representation_size": config.representation_size and config.hidden_size, "representation_act": "tanh"}


def _read_projection(tensors: StateDict, settings: Mapping[str, Any]) -> dict[str, Any]:
    weight = tensors.get("visual_projection.weight")
    return {**LINEAR, "representation_size": settings["projection_dim"] if weight is None else weight.shape[0]}


def _read_beit_pooler(tensors: StateDict, settings: Mapping[str, Any]) -> dict[str, Any]:
    lacks = settings["use_mean_pooling"] and "pooler.layernorm.weight" not in tensors
    return {"final_norm": "none"} if lacks else {}


def _any_beit_pooler(config: PlainViTConfig) -> dict[str, Any]:
    return {"final_norm": "none"} if config.pooling == "mean" and config.final_norm == "none" else {}


def _any_intern_pooling(config: PlainViTConfig) -> dict[str, Any]:
    pooling = {"pooling": config.pooling} if config.final_norm == "none" else {}  # the class returns tokens alone
    return {**_mask_token(config), **pooling}


def _pooling(pooling: str, name: str, setting: str) -> Head:
    """Return a pooling that a setting adds, and that there is if there is a tensor of this name."""
    there = {"pooling": pooling}
    return Head(
        read=lambda tensors, settings: there if name in tensors else {},
        write=lambda config: {setting: config.pooling == pooling},
        any_value=lambda config: there if config.pooling == pooling else {},
    )


def _read_radio_tensors(tensors: StateDict, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether there are LayerScales, and the mean and deviation in the tensors, if not those of the settings."""
    fields: dict[str, Any] = {}
    if not any("layer_scale1" in name for name in tensors):
        fields["layer_scale_init_value"] = None  # multiplies by 1, and published files lack it
    for ours, setting in (("image_mean", "norm_mean"), ("image_std", "norm_std")):
        for tensor in (tensors[name] for name in tensors if name.endswith(f"input_conditioner.{setting}")):
            if not tensor.is_meta and tensor.flatten().tolist() != torch.tensor(settings[setting]).tolist():
                fields[ours] = tensor.flatten().tolist()
    return fields


LINEAR = {"representation_act": "linear", "representation_bias": False}
NO_HEAD = Head()
CLASSIFIER = Head([Row("classifier", "classifier")])
TEACHER = Head([Row("cls_classifier", "classifier"), Row("distillation_classifier", "distillation_classifier")])
DECODER = Head(
    [Row("decoder.0.weight", "decoder.projection.weight", POINTWISE), Row("decoder.0.bias", "decoder.projection.bias")],
    is_decoder=True, write=lambda config: {"encoder_stride": config.patch_size},
    any_value=lambda config: {"use_mask_token": True},
)  # fmt: skip
DPT_POOLER = Head(
    [Row("pooler.dense", "vit.representation.0")], is_optional=True, read=_read_pooler, write=_write_pooler,
    options=_has_pooler, any_value=_any_pooler,
)  # fmt: skip
FLAVA_POOLER = replace(DPT_POOLER, write=NO_HEAD.write, any_value=_any_flava_pooler)
POOLER = replace(
    DPT_POOLER,
    options=lambda config: {**_has_pooler(config), **_mask_token(config)},
    any_value=lambda config: {**_any_pooler(config), **_mask_token(config)},
)
PROJECTION = Head(
    [Row("visual_projection", "vit.representation.0")], read=_read_projection,
    write=lambda config: {"projection_dim": config.representation_size} if config.representation_size else {},
    any_value=lambda config: {**LINEAR, "representation_size": config.representation_size}
    if config.representation_size else {},
)  # fmt: skip
BEIT_POOLER = Head(
    read=_read_beit_pooler, options=lambda config: {"add_pooling_layer": config.final_norm != "none"},
    any_value=_any_beit_pooler,
)  # fmt: skip
BEIT_CLASSIFIER = replace(CLASSIFIER, read=_read_beit_pooler)
WITH_MASK_TOKEN = Head(any_value=_mask_token)
CLASSIFIER_WITH_MASK_TOKEN = replace(CLASSIFIER, any_value=_mask_token)
RADIO_TENSORS = Head(
    read=_read_radio_tensors,
    any_value=lambda config: {"layer_scale_init_value": None} if config.layer_scale_init_value is None else {},
)
INTERN_POOLING = Head(any_value=_any_intern_pooling)
ATTENTION_POOLING = _pooling("map", "head.probe", "vision_use_head")
QUERY_POOLING = _pooling("query", "head.cls_token", "use_head")
IN_FILES_ONLY = Head(read=ATTENTION_POOLING.read)  # a file may have the pooling, and the class has not
CLASSIFIER_WITHOUT_POOLING = replace(CLASSIFIER, write=lambda config: {"vision_use_head": False})

UNREAD_HEAD = ignoring("the pooling head, which no logit reads", "*head.*", "vision_model.use_head")
UNREAD_NORM = ignoring("the norm of the pooled token, which no logit reads", "*post_layernorm.*")
MEAN_BEFORE_NORM = {"pooling": "mean", "final_norm": "none"}
UNREAD_POOLER = ignoring("a pooler that no logit reads", "*pooler.dense.*")


@dataclass(frozen=True)
class Architecture:
    """One class of transformers.

    Args:
        family: The family of the class.
        head: What it has after the encoder.
        fields: Our fields that the class determines.
        ignored: Patterns of its tensors that our model does not use, with the reason.
    """

    family: Family
    head: Head = NO_HEAD
    fields: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[tuple[str, str]] = ()


NORMALISATION = (
    *ignoring("the image processor normalises pixels instead", "*input_conditioner.*"),
    *ignoring("numbers of the pooled tokens, which the config has", "*summary_idxs"),
    *ignoring("projects videos", "*video_embedder.*", "*video_patch_projection.*"),
)
STANDARDISING = ignoring("of the averaged tokens", "std_bias", "std_scale")
CONNECTOR = ignoring("makes fewer tokens for the language model", "connector.*")
ADAPTER = ignoring("makes fewer tokens for the language model", "vision_adapter.*")
SIGLIP_HEAD = ignoring("a head that the model does not read", "*vision_model.head.*", "*packing_position_embedding.*")
NECK = ignoring("the convolutions after the tower", "*neck.*")
MERGERS = ignoring("merges tokens for the language model", "merger.*", "merger_list.*", "deepstack_*",
                    "downsample.*")  # fmt: skip
NO_REGISTERS = ignoring("empty where there are no registers", "embeddings.register_tokens", "storage_tokens")
# Towers whose tokens merge into fewer before a language model reads them.
MERGED = {
    **{
        f"{name}VisionModel": replace(QWEN3_VL, model_type=f"{model_type}_vision")
        for name, model_type in (("Qwen3VL", "qwen3_vl"), ("Qwen3VLMoe", "qwen3_vl_moe"), ("Qwen3_5", "qwen3_5"),
                                 ("Qwen3_5Moe", "qwen3_5_moe"), ("Qwen4Exp", "qwen4_exp"))
    },
    "Qwen3OmniMoeVisionEncoder": QWEN3_OMNI,
    "Qwen2VisionTransformerPretrainedModel": QWEN2_VL,
    "Qwen2_5_VisionTransformerPretrainedModel": QWEN2_5_VL,
    "Qwen2_5OmniVisionEncoder": replace(
        QWEN2_5_VL, model_type="qwen2_5_omni_vision_encoder", rows=QWEN2_5_OMNI_ROWS
    ),
    "Exaone4_5_VisionModel": EXAONE_4_5,
    "Glm4vVisionModel": GLM4V,
    "Glm4vMoeVisionModel": replace(GLM4V, model_type="glm4v_moe_vision"),
    "GlmOcrVisionModel": GLM_OCR,
}  # fmt: skip
CLS_MEAN = {"pooling": "cls_mean"}
AS_REGISTER = {"num_register_tokens": 1}  # no head reads the distillation token

ARCHITECTURES = {
    "ViTModel": Architecture(VIT, POOLER),
    "ViTForImageClassification": Architecture(VIT, CLASSIFIER, ignored=UNREAD_POOLER),
    "ViTForMaskedImageModeling": Architecture(VIT, DECODER),
    "DeiTModel": Architecture(DEIT, POOLER, AS_REGISTER),
    "DeiTForImageClassification": Architecture(DEIT, CLASSIFIER, AS_REGISTER, UNREAD_POOLER),
    "DeiTForImageClassificationWithTeacher": Architecture(
        DEIT, TEACHER, {"use_distillation_token": True}, UNREAD_POOLER
    ),
    "DeiTForMaskedImageModeling": Architecture(DEIT, DECODER, AS_REGISTER),
    "ViTMSNModel": Architecture(VIT_MSN),
    "ViTMSNForImageClassification": Architecture(VIT_MSN, CLASSIFIER),
    "ViTMAEModel": Architecture(VIT_MAE),
    "IJepaModel": Architecture(IJEPA),
    "IJepaForImageClassification": Architecture(IJEPA, CLASSIFIER),
    "Dinov2Model": Architecture(DINOV2, WITH_MASK_TOKEN),
    "Dinov2ForImageClassification": Architecture(DINOV2, CLASSIFIER_WITH_MASK_TOKEN, CLS_MEAN),
    "Dinov2WithRegistersModel": Architecture(DINOV2_WITH_REGISTERS, WITH_MASK_TOKEN),
    "Dinov2WithRegistersForImageClassification": Architecture(
        DINOV2_WITH_REGISTERS, CLASSIFIER_WITH_MASK_TOKEN, CLS_MEAN
    ),
    "Tipsv2VisionModel": Architecture(TIPS_V2, WITH_MASK_TOKEN),
    "RadioModel": Architecture(RADIO, RADIO_TENSORS, ignored=NORMALISATION),
    "PixioModel": Architecture(PIXIO),
    "FlavaImageModel": Architecture(FLAVA, FLAVA_POOLER),
    "DPTModel": Architecture(DPT, DPT_POOLER),
    "BeitModel": Architecture(BEIT, BEIT_POOLER),
    "BeitForImageClassification": Architecture(BEIT, BEIT_CLASSIFIER),
    "Data2VecVisionModel": Architecture(DATA2VEC_VISION, BEIT_POOLER),
    "Data2VecVisionForImageClassification": Architecture(DATA2VEC_VISION, BEIT_CLASSIFIER),
    "DINOv3ViTModel": Architecture(DINOV3, WITH_MASK_TOKEN, ignored=NO_REGISTERS[:1]),
    "Sapiens2Model": Architecture(SAPIENS2, ignored=NO_REGISTERS),
    "CLIPVisionModel": Architecture(CLIP),
    "CLIPVisionModelWithProjection": Architecture(CLIP, PROJECTION),
    "CLIPForImageClassification": Architecture(CLIP, CLASSIFIER, MEAN_BEFORE_NORM, UNREAD_NORM),
    "MetaClip2VisionModel": Architecture(METACLIP_2),
    "MetaClip2VisionModelWithProjection": Architecture(METACLIP_2, PROJECTION),
    "MetaClip2ForImageClassification": Architecture(METACLIP_2, CLASSIFIER, MEAN_BEFORE_NORM, UNREAD_NORM),
    "AltCLIPVisionModel": Architecture(ALTCLIP),
    "ChineseCLIPVisionModel": Architecture(replace(CLIP, model_type="chinese_clip_vision_model")),
    "CLIPSegVisionModel": Architecture(replace(CLIP, model_type="clipseg_vision_model")),
    "Kosmos2VisionModel": Architecture(replace(CLIP, model_type="kosmos_2_vision_model")),
    "OwlViTVisionModel": Architecture(OWLVIT),
    "Owlv2VisionModel": Architecture(replace(OWLVIT, model_type="owlv2_vision_model")),
    "GitVisionModel": Architecture(GIT),
    "BlipVisionModel": Architecture(BLIP),
    "Blip2VisionModel": Architecture(BLIP_2),
    "InstructBlipVisionModel": Architecture(replace(BLIP_2, model_type="instructblip_vision_model")),
    "InstructBlipVideoVisionModel": Architecture(replace(BLIP_2, model_type="instructblipvideo_vision_model")),
    "InternVLVisionModel": Architecture(INTERNVL, INTERN_POOLING),
    "QianfanOCRVisionModel": Architecture(QIANFAN_OCR, INTERN_POOLING),
    "InternVisionModel": Architecture(INTERN_VIT, INTERN_POOLING, {"pooling": "cls", "final_norm": "none"}),
    "SiglipVisionModel": Architecture(SIGLIP, ATTENTION_POOLING),
    "SiglipForImageClassification": Architecture(SIGLIP, CLASSIFIER_WITHOUT_POOLING, ignored=UNREAD_HEAD),
    "Idefics2VisionTransformer": Architecture(IDEFICS2, IN_FILES_ONLY),
    "Idefics3VisionTransformer": Architecture(replace(IDEFICS2, model_type="idefics3_vision"), IN_FILES_ONLY),
    "SmolVLMVisionTransformer": Architecture(replace(IDEFICS2, model_type="smolvlm_vision"), IN_FILES_ONLY),
    "JanusVisionModel": Architecture(JANUS),
    "Siglip2VisionModel": Architecture(SIGLIP2, ATTENTION_POOLING),
    "Siglip2ForImageClassification": Architecture(SIGLIP2, CLASSIFIER_WITHOUT_POOLING, ignored=UNREAD_HEAD),
    "Cosmos3EdgeVisionModel": Architecture(COSMOS3_EDGE),
    "GraniteDoclingVisionModel": Architecture(GRANITE_DOCLING, ignored=CONNECTOR),
    "Aimv2VisionModel": Architecture(AIMV2, QUERY_POOLING),
    "PixtralVisionModel": Architecture(PIXTRAL),
    "Gemma4VisionModel": Architecture(GEMMA4, ignored=STANDARDISING),
    "Llama4VisionModel": Architecture(LLAMA4, ignored=ADAPTER),
    "Kimi_K25VisionModel": Architecture(KIMI),
    "MLCDVisionModel": Architecture(MLCD),
    "MgpstrModel": Architecture(MGP_STR),
    "SamVisionModel": Architecture(SAM, ignored=NECK),
    "SamHQVisionModel": Architecture(replace(SAM, model_type="sam_hq_vision_model"), ignored=NECK),
    "GotOcr2VisionEncoder": Architecture(replace(SAM, model_type="got_ocr2_vision"), ignored=NECK),
    "DeepseekOcr2SamVisionEncoder": Architecture(
        replace(SAM, model_type="deepseek_ocr2_sam_vision_model", left_out=("output_channels", "downsample_channels")),
        ignored=ignoring("the convolutions after the tower", "*neck.*", "proj.*"),
    ),
    **{name: Architecture(family, ignored=MERGERS) for name, family in MERGED.items()},
    "PaddleOCRVisionModel": Architecture(PADDLE_OCR_VL, ignored=SIGLIP_HEAD),
    "VideoLlama3VisionModel": Architecture(VIDEO_LLAMA_3),
}

# Names by which an encoder is found; what precedes them is the prefix of the encoder.
PATCHES = {
    one.family.mark or row.sources[0]
    for one in ARCHITECTURES.values()
    for row in (*one.family.rows, *one.family.on_disk)
    if row.ours == KERNEL
}
# Classes to export to, in the order in which they are tried. MSN and MAE are ViTs: callers name their classes.
CANDIDATES = {
    "masked": ["ViTForMaskedImageModeling", "DeiTForMaskedImageModeling"],
    "classifier": [
        "ViTForImageClassification", "DeiTForImageClassificationWithTeacher", "DeiTForImageClassification",
        "IJepaForImageClassification", "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification",
        "BeitForImageClassification", "Siglip2ForImageClassification", "CLIPForImageClassification",
    ],
    "encoder": [
        "ViTModel", "DeiTModel", "IJepaModel", "Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel",
        "CLIPVisionModel", "CLIPVisionModelWithProjection", "Siglip2VisionModel", "SiglipVisionModel",
        "Aimv2VisionModel", "GitVisionModel", "BlipVisionModel", "Blip2VisionModel", "BeitModel", "InternVLVisionModel",
        "Sapiens2Model", "PixtralVisionModel", "Idefics3VisionTransformer", "MLCDVisionModel", "Qwen3VLVisionModel",
        "SamVisionModel", "Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel",
        "Exaone4_5_VisionModel", "Glm4vVisionModel", "GlmOcrVisionModel", "PaddleOCRVisionModel",
        "VideoLlama3VisionModel", "PixioModel", "Tipsv2VisionModel", "RadioModel",
        "Gemma4VisionModel", "Llama4VisionModel", "Kimi_K25VisionModel", "MgpstrModel",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Container:
    """A class that contains a class of `ARCHITECTURES` and other parts.

    Args:
        holds: The class that opens.
        ignored: Patterns of ignored tensors, with the reason.
        whole: Whether its modules have the names of the modules of `holds`, so that a live instance is read as one. If
            not, one of its modules is of that class and opens on its own.
    """

    holds: str
    ignored: Sequence[tuple[str, str]] = ()
    whole: bool = False


TEXT = (
    *ignoring("the text model and the projection after it", "text_*"),
    *ignoring("compares images with texts", "logit_scale", "logit_bias"),
)
BESIDE = (*TEXT, ("visual_projection.*", "the projection beside the text model's"))
DETECTION = ignoring("of the detector", "box_head.*", "class_head.*", "objectness_head.*", "layer_norm.*")


def _inside(ignored: Sequence[tuple[str, str]], path: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{path}.{pattern}", reason) for pattern, reason in ignored)


CONTAINERS = {
    "ViTMAEForPreTraining": Container("ViTMAEModel", (("decoder.*", "the decoder of the pre-training"),)),
    "Dinov2Backbone": Container("Dinov2Model", whole=True),
    "Dinov2WithRegistersBackbone": Container("Dinov2WithRegistersModel", whole=True),
    **{
        f"DPTFor{task}": Container("DPTModel", ignoring("of the task", "neck.*", "head.*", "auxiliary_head.*"))
        for task in ("DepthEstimation", "SemanticSegmentation")
    },
    "BeitBackbone": Container("BeitModel"),
    "BeitForMaskedImageModeling": Container("BeitModel", ignoring("predicts visual words", "layernorm.*", "lm_head.*")),
    "DINOv3ViTBackbone": Container("DINOv3ViTModel", whole=True),
    "Sapiens2Backbone": Container("Sapiens2Model", whole=True),
    **{
        f"Sapiens2For{task}": Container("Sapiens2Model", ignoring("of the task", "decode_head.*", "scale_head.*"))
        for task in ("ImageMatting", "NormalEstimation", "PointmapEstimation", "PoseEstimation", "SemanticSegmentation")
    },
    "CLIPModel": Container("CLIPVisionModelWithProjection", TEXT, whole=True),
    "MetaClip2Model": Container("MetaClip2VisionModelWithProjection", TEXT, whole=True),
    "OwlViTModel": Container("OwlViTVisionModel", BESIDE, whole=True),
    "OwlViTForObjectDetection": Container("OwlViTVisionModel", (*_inside(BESIDE, "owlvit"), *DETECTION)),
    "Owlv2Model": Container("Owlv2VisionModel", BESIDE, whole=True),
    "Owlv2ForObjectDetection": Container("Owlv2VisionModel", (*_inside(BESIDE, "owlv2"), *DETECTION)),
    "MgpstrForSceneTextRecognition": Container(
        "MgpstrModel", ignoring("reads characters, pieces and words", *(f"{kind}_*" for kind in ("char", "bpe", "wp")))
    ),
    "SamVisionEncoder": Container("SamVisionModel", whole=True),
    "SamHQVisionEncoder": Container("SamHQVisionModel", whole=True),
    "SiglipModel": Container("SiglipVisionModel", TEXT),
    "Siglip2Model": Container("Siglip2VisionModel", TEXT),
}


def container_of(name: str) -> Container:
    """Return a container by its name; a class of `ARCHITECTURES` contains itself and nothing else."""
    return CONTAINERS.get(name, Container(name))


# Models whose configuration contains that of the vision tower, and classes of which more than the tower opens.
COMPOSITES = {
    "clip": "clip_vision_model", "metaclip_2": "metaclip_2_vision_model", "owlvit": "owlvit_vision_model",
    "owlv2": "owlv2_vision_model", "siglip": "siglip_vision_model", "siglip2": "siglip2_vision_model",
}  # fmt: skip
