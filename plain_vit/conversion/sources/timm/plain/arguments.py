"""timm's VisionTransformer as one table of arguments, for conversion to and from our config, modules and state dicts.

Source: timm 1.0.31, `timm/models/vision_transformer.py` and `timm/models/deit.py`.
"""

from collections.abc import Mapping
from typing import Any

from .....configuration_plain_vit import PlainViTConfig
from ....tables.compare_modules import epsilon_of
from ....tables.infer import ratio_of
from ..arguments import ACTIVATIONS, NEGATED, NORMS, POOLINGS, QK_NORMS, Argument, timm_name_for
from ..modules import is_there

BLOCKS = {
    "Block": "sequential",
    "ResPostBlock": "post_norm",
    "ParallelScalingBlock": "parallel",
    "DiffParallelScalingBlock": "parallel",
    "ParallelThingsBlock": "branches",
}
PARALLEL = ("ParallelScalingBlock", "DiffParallelScalingBlock")
MLPS = {"Mlp": "mlp", "SwiGLU": "swiglu", "SwiGLUPacked": "swiglu_packed"}
ATTENTIONS = {"attn": "self", "": "self", "diff": "differential"}
POSITIONS = {"none": "none", "": "none", "learn": "learned"}

# Three arguments are not timm's: `distilled` (the class with a distillation token), `norm_eps` (the epsilon bound to
# `norm_layer`) and `stem_depths` (the stages of a hybrid's ResNet). A hybrid's `patch_size` is in pixels of the image.
ARGUMENTS = (
    Argument("distilled", False, "use_distillation_token",
             module=lambda m: m.distilled, tensors=lambda t: "dist_token" in t.names),
    Argument("img_size", 224, "image_size", module=lambda m: tuple(m.model.patch_embed.img_size)),
    Argument("patch_size", 16, "patch_size", module=lambda m: m.patch_size, tensors=lambda t: t.patch_size),
    Argument("stem_depths", None, module=lambda m: m.stem_depths, tensors=lambda t: t.stem_depths),
    Argument("in_chans", 3, "num_channels", module=lambda m: m.model.in_chans, tensors=lambda t: t.channels),
    Argument("num_classes", 1000, "num_labels", module=lambda m: m.model.num_classes),
    Argument("global_pool", "token", "pooling", POOLINGS, module=lambda m: m.model.global_pool),
    Argument("embed_dim", 768, "hidden_size", module=lambda m: m.model.embed_dim, tensors=lambda t: t.embed_dim),
    Argument("depth", 12, "num_hidden_layers", module=lambda m: len(m.model.blocks), tensors=lambda t: t.depth),
    Argument("num_heads", 12, "num_attention_heads",
             module=lambda m: m.attention.num_heads, tensors=lambda t: t.num_heads),
    Argument("mlp_ratio", 4.0, module=lambda m: ratio_of(m.width, m.model.embed_dim)),
    Argument("qkv_bias", True, "qkv_bias",
             module=lambda m: m.qkv.bias is not None, tensors=lambda t: f"{t.qkv}.bias" in t.names),
    Argument("qk_norm", False, "qk_norm", QK_NORMS,
             module=lambda m: is_there(m.attention.q_norm),
             tensors=lambda t: f"{t.attention}q_norm.weight" in t.names),
    Argument("scale_attn_norm", False, "attention_inner_norm",
             module=lambda m: not m.parallel and is_there(m.attention.norm),
             tensors=lambda t: not t.parallel and f"{t.attention}norm.weight" in t.names),
    Argument("scale_mlp_norm", False, "mlp_inner_norm",
             module=lambda m: not m.parallel and is_there(m.mlp.norm),
             tensors=lambda t: f"{t.mlp}norm.weight" in t.names),
    Argument("proj_bias", True, "mlp_bias",
             module=lambda m: m.output.bias is not None, tensors=lambda t: f"{t.output}.bias" in t.names),
    Argument("init_values", None, "layer_scale_init_value",
             module=lambda m: getattr(m.layer_scale, "init_values", None)),
    Argument("class_token", True, "use_class_token",
             module=lambda m: m.model.has_class_token, tensors=lambda t: "cls_token" in t.names),
    Argument("pos_embed", "learn", "position_embedding_type", POSITIONS,
             module=lambda m: "none" if m.model.pos_embed is None else "learn",
             tensors=lambda t: "learn" if "pos_embed" in t.names else "none"),
    Argument("no_embed_class", False, "position_embedding_on_prefix", NEGATED,
             module=lambda m: m.model.no_embed_class),
    Argument("reg_tokens", 0, "num_register_tokens",
             module=lambda m: m.model.num_reg_tokens,
             tensors=lambda t: t.names["reg_token"].shape[1] if "reg_token" in t.names else 0),
    Argument("pre_norm", False, "embedding_norm",
             module=lambda m: is_there(m.model.norm_pre), tensors=lambda t: "norm_pre.weight" in t.names),
    Argument("final_norm", True, module=lambda m: is_there(m.model.norm) or is_there(m.model.fc_norm)),
    Argument("fc_norm", None,
             module=lambda m: is_there(m.model.fc_norm), tensors=lambda t: "fc_norm.weight" in t.names),
    Argument("pool_include_prefix", False, "pool_prefix_tokens", module=lambda m: m.model.pool_include_prefix),
    Argument("drop_rate", 0.0, "classifier_dropout_prob", module=lambda m: m.model.head_drop.p),
    Argument("pos_drop_rate", 0.0, "embedding_dropout_prob", module=lambda m: m.model.pos_drop.p),
    Argument("patch_drop_rate", 0.0, "patch_dropout_prob", module=lambda m: getattr(m.model.patch_drop, "prob", 0.0)),
    Argument("proj_drop_rate", 0.0, "hidden_dropout_prob", module=lambda m: m.dropout.p),
    Argument("attn_drop_rate", 0.0, "attention_probs_dropout_prob", module=lambda m: m.attention.attn_drop.p),
    Argument("drop_path_rate", 0.0, "drop_path_rate", module=lambda m: getattr(m.last_drop_path, "drop_prob", 0.0)),
    Argument("embed_norm_layer", None,
             module=lambda m: m.name_of(m.patch_norm) if is_there(m.patch_norm) else None),
    Argument("norm_layer", "layernorm", "norm_type", NORMS,
             module=lambda m: m.name_of(m.norm),
             tensors=lambda t: "layernorm" if f"{t.norm}.bias" in t.names else "rmsnorm"),
    Argument("norm_eps", 1e-6, "layer_norm_eps", module=lambda m: epsilon_of(m.norm)),
    Argument("act_layer", "gelu", "hidden_act", ACTIVATIONS, module=lambda m: m.name_of(m.activation)),
    Argument("block_fn", "Block", "block_type", BLOCKS, module=lambda m: m.kind, tensors=lambda t: t.kind),
    Argument("mlp_layer", "Mlp", "mlp_type", MLPS,
             module=lambda m: "Mlp" if m.parallel else m.name_of(m.mlp), tensors=lambda t: t.mlp_layer),
    Argument("attn_layer", "attn", "attention_type", ATTENTIONS,
             module=lambda m: "attn" if m.parallel else m.name_of(m.attention),
             tensors=lambda t: "diff" if t.differential and not t.parallel else "attn"),
    Argument("num_parallel", 2,
             module=lambda m: getattr(m.block, "num_parallel", 2), tensors=lambda t: t.num_branches or 2),
    Argument("dynamic_img_pad", False, module=lambda m: m.model.patch_embed.dynamic_img_pad),
    Argument("fuse_out_proj", False,
             module=lambda m: m.kind == "ParallelScalingBlock" and m.block.out_proj is not None,
             tensors=lambda t: t.kind == "ParallelScalingBlock" and t.output.endswith(".out_proj")),
)  # fmt: skip


def without_counterpart(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments, and combinations of them, without a counterpart in our model."""
    unknown = []
    if given["embed_norm_layer"] not in (None, given["norm_layer"]):
        unknown.append(f"embed_norm_layer={given['embed_norm_layer']!r}: expected None or {given['norm_layer']!r}")
    if given["dynamic_img_pad"]:
        unknown.append("dynamic_img_pad=True, which fills images up to whole patches: here they are cut, or refused")
    parallel = given["block_fn"] in PARALLEL
    if parallel and not given["proj_bias"]:
        unknown.append("proj_bias=False in parallel blocks, whose MLP keeps the bias of its first layer")
    if given["distilled"] and (given["reg_tokens"] or given["no_embed_class"] or given["pos_embed"] != "learn"):
        unknown.append("a distillation token with registers, or without its own position")
    if given["distilled"] and (given["fc_norm"] or given["global_pool"] != "token"):
        unknown.append(
            "a distillation token with fc_norm or another pooling than the two tokens: timm's head of two tokens reads "
            "neither (module.fc_norm = torch.nn.Identity() and module.global_pool = 'token' change no number there)"
        )
    if parallel and given["proj_drop_rate"]:
        unknown.append("proj_drop_rate in parallel blocks, which there drops inside the MLP only: set it to 0")
    return unknown


def joint_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of our config that depend on several arguments, or on part of one."""
    block, positions = given["block_fn"], given["pos_embed"] == "learn"
    width = int(given["embed_dim"] * given["mlp_ratio"])
    where = "after_pooling" if norm_follows_pooling(given) else "before_pooling"
    fields: dict[str, Any] = {
        "intermediate_size": width // 2 if given["mlp_layer"] == "SwiGLUPacked" else width,
        "resnet_stem": None if given["stem_depths"] is None else {"depths": given["stem_depths"], "style": "timm"},
        "patch_bias": not given["pre_norm"],
        "patch_post_norm": given["embed_norm_layer"] is not None,
        "num_branches": given["num_parallel"] if block == "ParallelThingsBlock" else 1,
        # Fused output projections have one bias, which our model has in the MLP.
        "attention_output_bias": given["proj_bias"] and not given["fuse_out_proj"],
        "final_norm": where if given["final_norm"] else "none",
        "pool_prefix_tokens": given["pool_include_prefix"] or given["global_pool"] == "prr",
        "embedding_dropout_prob": given["pos_drop_rate"] if positions else 0.0,  # timm returns before that dropout
    }
    if block == "ResPostBlock" or not given["init_values"]:
        fields["layer_scale_init_value"] = None
    if block in PARALLEL:
        fields["mlp_type"] = "mlp"
    if block == "DiffParallelScalingBlock":
        fields |= {"attention_type": "differential", "attention_output_bias": False}
    return fields


def norm_follows_pooling(given: Mapping[str, Any]) -> bool:
    """Return whether the final norm follows the pooling, which is the default for mean and max pooling."""
    after = given["fc_norm"]
    return given["global_pool"] in ("avg", "avgmax", "max") if after is None else bool(after)


def joint_arguments(config: PlainViTConfig, layout: str | None) -> dict[str, Any]:
    """Return the arguments that depend on several fields of our config."""
    parallel, differential = config.block_type == "parallel", config.attention_type == "differential"
    after = config.final_norm == "after_pooling"
    is_default = after == (config.pooling in ("mean", "max", "mean_max"))
    joint: dict[str, Any] = {
        "stem_depths": None if config.resnet_stem is None else config.resnet_stem["depths"],
        "mlp_ratio": ratio_of(
            config.intermediate_size * (2 if config.mlp_type == "swiglu_packed" else 1), config.hidden_size
        ),
        "final_norm": config.final_norm != "none",
        "fc_norm": None if is_default or config.final_norm == "none" else after,
        "embed_norm_layer": timm_name_for(NORMS, config.norm_type) if config.patch_post_norm else None,
        "num_parallel": config.num_branches if config.block_type == "branches" else 2,
        "dynamic_img_pad": False,
        "fuse_out_proj": parallel and not differential and config.mlp_bias and not config.attention_output_bias,
    }
    if parallel:
        joint |= {"attn_layer": "attn", "block_fn": "DiffParallelScalingBlock" if differential else PARALLEL[0]}
    return joint
