"""timm's Eva as one table of arguments, for conversion to and from our config, modules and state dicts.

Source: timm 1.0.31, `timm/models/eva.py`, `timm/layers/pos_embed_sincos.py`, `timm/layers/attention.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .....configuration_plain_vit import PlainViTConfig
from ....tables.infer import pair
from .. import constructor
from ..arguments import NEGATED, QK_NORMS, Argument, timm_name_for
from ..modules import Parts, is_there

POOLINGS = {"avg": "mean", "token": "cls", "": "none", "max": "max", "avgmax": "mean_max", "map": "map"}
ATTENTIONS = ("eva", "rope")
ROTATIONS = {"cat": "axial", "dinov3": "axial", "mixed": "mixed"}
AXES = {"ij": "yx", "xy": "xy"}
TABLES = {True: "learned", False: "none"}


@dataclass(frozen=True)
class EvaParts(Parts):
    """The parts of a live model that `ARGUMENTS` reads."""

    @property
    def qkv_bias(self) -> bool:
        """Whether queries have a bias, inside the projection or as a separate parameter."""
        attention = self.attention
        if attention.qkv is None:
            return attention.q_proj.bias is not None
        return attention.qkv.bias is not None or getattr(attention, "q_bias", None) is not None

    @property
    def num_kv_heads(self) -> tuple[int, ...] | None:
        """Number of key and value heads in each block; None if equal to the number of query heads."""
        counts = tuple(getattr(block.attn, "num_kv_heads", block.attn.num_heads) for block in self.model.blocks)
        return None if set(counts) == {self.attention.num_heads} else counts

    @property
    def attn_only_layer_scale(self) -> bool:
        """Whether only the attention has a LayerScale."""
        gains = (getattr(self.block, name, None) for name in ("gamma_1", "gamma_2"))
        return [gain is not None for gain in gains] == [True, False]


# Values that depend on several arguments or fields are corrected in `joint_fields` and `joint_arguments`.
ARGUMENTS = (
    *constructor.ARGUMENTS,
    Argument("global_pool", "avg", "pooling", POOLINGS, module=lambda m: m.model.global_pool),
    Argument("num_kv_heads", None, "num_key_value_heads", module=lambda m: m.num_kv_heads),
    Argument("qkv_bias", True, "qkv_bias", module=lambda m: m.qkv_bias),
    Argument("qkv_fused", True, module=lambda m: m.attention.qkv is not None),
    Argument("qk_norm", False, "qk_norm", QK_NORMS, module=lambda m: is_there(m.attention.q_norm)),
    Argument("swiglu_mlp", False, module=lambda m: m.name_of(m.mlp) != "Mlp"),
    Argument("swiglu_align_to", 0,
             module=lambda m: int(m.name_of(m.mlp) == "SwiGLU" and not is_there(m.mlp.norm))),
    Argument("scale_mlp", False, "mlp_inner_norm", module=lambda m: is_there(m.mlp.norm)),
    Argument("scale_attn_inner", False, "attention_inner_norm", module=lambda m: is_there(m.attention.norm)),
    Argument("attn_type", "eva", module=lambda m: m.name_of(m.attention)),
    Argument("pos_drop_rate", 0.0, "embedding_dropout_prob", module=lambda m: m.model.pos_drop.p),
    Argument("patch_drop_rate", 0.0, "patch_dropout_prob", module=lambda m: getattr(m.model.patch_drop, "prob", 0.0)),
    Argument("init_values", None, "layer_scale_init_value", module=lambda m: getattr(m.block, "init_values", None)),
    Argument("attn_only_layer_scale", False, "scale_mlp_branch", NEGATED, module=lambda m: m.attn_only_layer_scale),
    Argument("class_token", True, "use_class_token", module=lambda m: m.model.cls_token is not None),
    Argument("num_reg_tokens", 0, "num_register_tokens",
             module=lambda m: 0 if m.model.reg_token is None else m.model.reg_token.shape[1]),
    Argument("no_embed_class", False, "position_embedding_on_prefix", NEGATED,
             module=lambda m: m.model.no_embed_class),
    Argument("use_abs_pos_emb", True, "position_embedding_type", TABLES,
             module=lambda m: m.model.pos_embed is not None),
    Argument("use_rot_pos_emb", False, module=lambda m: m.model.rope is not None),
    Argument("rope_type", "cat", module=lambda m: "cat" if m.model.rope is None else m.name_of(m.model.rope)),
    Argument("rope_grid_offset", 0.0, module=lambda m: getattr(m.model.rope, "grid_offset", 0.0)),
    Argument("rope_grid_indexing", "ij", words=AXES, module=lambda m: getattr(m.model.rope, "grid_indexing", "ij")),
    Argument("rope_temperature", 10000.0, module=lambda m: getattr(m.model.rope, "temperature", 10000.0)),
    Argument("rope_rotate_half", False, module=lambda m: getattr(m.model.rope or m.attention, "rotate_half", False)),
    Argument("rope_shift_coords", None, module=lambda m: getattr(m.model.rope, "shift_coords", None)),
    Argument("rope_jitter_coords", None, module=lambda m: getattr(m.model.rope, "jitter_coords", None)),
    Argument("rope_rescale_coords", None, module=lambda m: getattr(m.model.rope, "rescale_coords", None)),
    Argument("rope_mrope_section", None),
    Argument("ref_feat_shape", None, module=lambda m: getattr(m.model.rope, "ref_feat_shape", None)),
    Argument("use_post_norm", False, module=lambda m: type(m.block).__name__ == "EvaBlockPostNorm"),
    Argument("use_pre_transformer_norm", False, "embedding_norm", module=lambda m: is_there(m.model.norm_pre)),
    Argument("use_post_transformer_norm", None, module=lambda m: is_there(m.model.norm)),
    Argument("use_fc_norm", None, module=lambda m: is_there(m.model.fc_norm)),
    *constructor.ATTENTION_POOLING,
    Argument("dynamic_img_size", False, module=lambda m: m.model.dynamic_img_size),
    Argument("dynamic_img_pad", False, module=lambda m: m.model.patch_embed.dynamic_img_pad),
)  # fmt: skip

# Arguments for which only this value has a counterpart in our model.
CLOSED = {"rope_mrope_section": None, "dynamic_img_pad": False}


def without_counterpart(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments, and combinations of them, without a counterpart in our model."""
    unknown = [f"{name}={given[name]!r}" for name, only in CLOSED.items() if given[name] != only]
    choices: dict[str, Collection[str]] = {"attn_type": ATTENTIONS}
    if given["use_rot_pos_emb"]:
        choices["rope_type"] = ROTATIONS
    for name, words in choices.items():
        if given[name] not in words:
            unknown.append(f"{name}={given[name]!r}: expected one of {', '.join(repr(word) for word in words)}")
    if given["use_rot_pos_emb"] and given["rope_type"] == "mixed" and given["rope_rotate_half"]:
        unknown.append("rope_rotate_half=True with rope_type='mixed', which timm refuses")
    if given["swiglu_mlp"] and given["global_pool"] == "map":
        unknown.append("global_pool='map' with swiglu_mlp=True, whose activations differ")
    if given["use_post_norm"] and given["qk_norm"]:
        unknown.append("qk_norm=True with use_post_norm=True, which timm refuses")
    return [*unknown, *_without_shared_heads(given)]


def _without_shared_heads(given: Mapping[str, Any]) -> list[str]:
    """Return why timm refuses this number of key and value heads."""
    if not _shares_heads(given):
        return []
    counts, heads, depth = given["num_kv_heads"], given["num_heads"], given["depth"]
    found = f"num_kv_heads={counts!r}"
    if isinstance(counts, list | tuple) and len(counts) != depth:
        return [f"{found} has {len(counts)} numbers for depth={depth}"]
    if any(heads % count for count in (counts if isinstance(counts, list | tuple) else [counts])):
        return [f"{found} beside num_heads={heads}, which they must divide"]
    if given["use_post_norm"] or given["qkv_fused"] or given["attn_type"] != "rope":
        return [f"{found}, which timm takes with use_post_norm=False, qkv_fused=False and attn_type='rope'"]
    return []


def _shares_heads(given: Mapping[str, Any]) -> bool:
    """Return whether queries share keys and values in a block; None means as many heads as queries."""
    counts = given["num_kv_heads"]
    counts = counts if isinstance(counts, list | tuple) else [counts]
    return not set(counts) <= {None, given["num_heads"]}


def joint_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of our config that depend on several arguments, or on part of one."""
    after = given["global_pool"] == "avg" if given["use_fc_norm"] is None else given["use_fc_norm"]
    before = not after if given["use_post_transformer_norm"] is None else given["use_post_transformer_norm"]
    norms = {(True, True): "both", (True, False): "before_pooling", (False, True): "after_pooling"}
    has_scale = given["init_values"] is not None and not given["use_post_norm"]
    return {
        **_mlp_fields(given),
        **constructor.pooling_fields(given),
        **({"pool_prefix_tokens": True} if given["global_pool"] == "map" else {}),  # other poolings read only patches
        "rope_parameters": _rope_parameters(given) if given["use_rot_pos_emb"] else None,
        "patch_bias": not given["use_pre_transformer_norm"],
        "block_type": "post_norm" if given["use_post_norm"] else "sequential",
        "key_bias": given["attn_type"] == "rope" or not given["qkv_bias"],
        "layer_scale_init_value": given["init_values"] if has_scale else None,
        "scale_mlp_branch": not (has_scale and given["attn_only_layer_scale"]),
        "num_key_value_heads": given["num_kv_heads"] if _shares_heads(given) else None,
        "final_norm": norms.get((bool(before), bool(after)), "none"),
    }


def _mlp_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the MLP: timm packs gate and value unless there is a norm or an alignment."""
    width, align_to = int(given["embed_dim"] * given["mlp_ratio"]), given["swiglu_align_to"]
    if not given["swiglu_mlp"]:
        return {"intermediate_size": width, "mlp_type": "mlp", "hidden_act": "gelu"}
    if not given["scale_mlp"] and (given["use_post_norm"] or not align_to):
        return {"intermediate_size": width, "mlp_type": "swiglu_packed", "hidden_act": "silu"}
    aligned = width + (-width % align_to if align_to else 0)
    return {"intermediate_size": aligned, "mlp_type": "swiglu", "hidden_act": "silu"}


def _rope_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding.

    For a fixed image size, timm stores cosines and sines as buffers, which a cast of the model rounds. For any size it
    computes them in float32. With learned frequencies, they have the dtype of the frequencies.
    """
    kind, reference = given["rope_type"], given["ref_feat_shape"]
    return {
        "rope_type": ROTATIONS[kind],
        "rope_theta": given["rope_temperature"],
        "coordinates": "centered" if kind == "dinov3" else "index",
        "axes": AXES[given["rope_grid_indexing"]],
        "offset": 0.0 if kind == "mixed" else given["rope_grid_offset"],
        "reference_grid": pair(reference) if reference is not None and kind == "cat" else None,
        "pairs": "halves" if given["rope_rotate_half"] else "adjacent",
        "frequencies": "period" if kind == "dinov3" else "inverse",
        "dtype": "float32" if given["dynamic_img_size"] and kind != "mixed" else "weights",
        "shift": given["rope_shift_coords"],
        "jitter": given["rope_jitter_coords"],
        "rescale": given["rope_rescale_coords"],
    }


def joint_arguments(config: PlainViTConfig) -> dict[str, Any]:
    """Return the arguments that depend on several fields of our config."""
    rope = config.group("rope_parameters")
    resamples = config.position_resampling == "bicubic_antialias" and not config.drop_partial_patches
    before, after = (config.final_norm in (place, "both") for place in ("before_pooling", "after_pooling"))
    return {
        "swiglu_mlp": config.mlp_type != "mlp",
        "swiglu_align_to": int(config.mlp_type == "swiglu" and not config.mlp_inner_norm),
        "attn_type": "rope" if (config.qkv_bias and config.key_bias) or config.num_key_value_heads else "eva",
        "use_rot_pos_emb": config.rope_type != "none",
        "rope_type": "mixed"
        if config.rope_type == "mixed"
        else "dinov3"
        if rope["coordinates"] == "centered"
        else "cat",
        "rope_temperature": rope["rope_theta"],
        "rope_grid_indexing": timm_name_for(AXES, rope["axes"]),
        "rope_grid_offset": rope["offset"],
        "rope_rotate_half": rope["pairs"] == "halves",
        "rope_shift_coords": rope["shift"],
        "rope_jitter_coords": rope["jitter"],
        "rope_rescale_coords": rope["rescale"],
        "ref_feat_shape": rope["reference_grid"],
        "use_post_norm": config.block_type == "post_norm",
        "use_post_transformer_norm": None if before != after else before,
        "use_fc_norm": None if after == (config.pooling == "mean") else after,
        **constructor.pooling_arguments(config),
        "dynamic_img_size": rope["dtype"] == "float32" if config.rope_type == "axial" else resamples,
    }


def separate_by_default(config: PlainViTConfig) -> bool:
    """Return whether timm's own architectures have three separate projections in such a model.

    EVA-02 has them from base size on, and Sapiens2, whose keys and values are narrower than its queries.
    """
    return (config.mlp_type == "swiglu" and config.mlp_inner_norm) or config.num_key_value_heads is not None
