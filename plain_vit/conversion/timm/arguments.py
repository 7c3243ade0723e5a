"""What timm's VisionTransformer is built from, and what that is in our config: one table each way.

Source: timm 1.0.31, `timm/models/vision_transformer.py` and `timm/models/deit.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...configuration_plain_vit import PlainViTConfig
from ...errors import ExportError, UnknownFormatError
from ..compare_modules import lost_fields
from .architectures import ARCHITECTURES, OLD_NAMES
from .families import FAMILIES

# The arguments of timm 1.0.31's VisionTransformer that change numbers, with their defaults. Ours are `distilled`, the
# class with a distillation token, `norm_eps`, what timm binds to `norm_layer`, and `stem_depths`, the stages of a
# hybrid's ResNet, whose `patch_size` is counted in pixels of the image here.
DEFAULTS: dict[str, Any] = {
    "distilled": False,
    "img_size": 224,
    "patch_size": 16,
    "stem_depths": None,
    "in_chans": 3,
    "num_classes": 1000,
    "global_pool": "token",
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "qk_norm": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "proj_bias": True,
    "init_values": None,
    "class_token": True,
    "pos_embed": "learn",
    "no_embed_class": False,
    "reg_tokens": 0,
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "pool_include_prefix": False,
    "drop_rate": 0.0,
    "pos_drop_rate": 0.0,
    "patch_drop_rate": 0.0,
    "proj_drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "drop_path_rate": 0.0,
    "embed_norm_layer": None,
    "norm_layer": "layernorm",
    "norm_eps": 1e-6,
    "act_layer": "gelu",
    "block_fn": "Block",
    "mlp_layer": "Mlp",
    "attn_layer": "attn",
    "num_parallel": 2,
    "fuse_out_proj": False,
}

# Arguments that change no number of a trained model.
SILENT_ARGUMENTS = {"dynamic_img_size", "dynamic_img_pad", "weight_init", "fix_init"}

# timm's word for a choice, and ours.
POOLINGS = {"token": "cls", "": "none", "avg": "mean", "max": "max", "avgmax": "mean_max", "map": "map", "prr": "prr"}
BLOCKS = {
    "Block": "sequential",
    "ResPostBlock": "post_norm",
    "ParallelScalingBlock": "parallel",
    "DiffParallelScalingBlock": "parallel",
    "ParallelThingsBlock": "branches",
}
MLPS = {"Mlp": "mlp", "SwiGLU": "swiglu", "SwiGLUPacked": "swiglu_packed"}
ATTENTIONS = {"attn": "self", "": "self", "diff": "differential"}
NORMS = {"layernorm": "layer_norm", "rmsnorm": "rms_norm"}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


def config_of(arguments: Mapping[str, Any], **fields: Any) -> PlainViTConfig:
    """Return our config of a timm model.

    Args:
        arguments: Of timm's VisionTransformer, as in `DEFAULTS`; what is left out has timm's default.
        **fields: Further fields of the config, such as `id2label`.

    Raises:
        ExportError: names all arguments that our model has no counterpart of.
    """
    given = {**DEFAULTS, **arguments}
    unknown = [name for name in given if name not in DEFAULTS]
    for name, known in (
        ("global_pool", POOLINGS), ("block_fn", BLOCKS), ("mlp_layer", MLPS), ("attn_layer", ATTENTIONS),
        ("norm_layer", NORMS), ("act_layer", ACTIVATIONS), ("pos_embed", {"learn", "none", ""}),
        ("embed_norm_layer", {None, given["norm_layer"]}),
    ):  # fmt: skip
        if given[name] not in known:
            unknown.append(f"{name}={given[name]!r}: expected one of {', '.join(repr(word) for word in known)}")
    parallel = given["block_fn"] in ("ParallelScalingBlock", "DiffParallelScalingBlock")
    if parallel and not given["proj_bias"]:
        unknown.append("proj_bias=False in parallel blocks, whose MLP keeps the bias of its first layer")
    if given["distilled"] and (given["reg_tokens"] or given["no_embed_class"] or given["pos_embed"] != "learn"):
        unknown.append("a distillation token with registers, or without positions of its own")
    if given["distilled"] and (given["fc_norm"] or given["global_pool"] != "token"):
        unknown.append(
            "a distillation token with fc_norm or another pooling than the two tokens: timm's head of two tokens reads "
            "neither (module.fc_norm = torch.nn.Identity() and module.global_pool = 'token' change no number there)"
        )
    if parallel and given["proj_drop_rate"]:
        unknown.append("proj_drop_rate in parallel blocks, which there drops inside the MLP only: set it to 0")
    if unknown:
        raise ExportError("plain-vit has no counterpart of parts of this timm model:", unknown)
    packed = given["mlp_layer"] == "SwiGLUPacked"
    width = int(given["embed_dim"] * given["mlp_ratio"])
    differential = given["attn_layer"] == "diff" or given["block_fn"] == "DiffParallelScalingBlock"
    fused = given["fuse_out_proj"] or given["block_fn"] == "DiffParallelScalingBlock"
    norm_after = given["fc_norm"]
    if norm_after is None:
        norm_after = given["global_pool"] in ("avg", "avgmax", "max")
    after, before = given["final_norm"] and norm_after, given["final_norm"] and not norm_after
    scaled = given["block_fn"] != "ResPostBlock" and given["init_values"]
    positions = given["pos_embed"] == "learn"
    described: dict[str, Any] = {
        "hidden_size": given["embed_dim"],
        "num_hidden_layers": given["depth"],
        "num_attention_heads": given["num_heads"],
        "intermediate_size": width // 2 if packed else width,
        "image_size": given["img_size"],
        "patch_size": given["patch_size"],
        "num_channels": given["in_chans"],
        "drop_partial_patches": any(
            pixels % patch for pixels, patch in zip(pair(given["img_size"]), pair(given["patch_size"]), strict=True)
        ),
        "use_class_token": given["class_token"],
        "use_distillation_token": given["distilled"],
        "num_register_tokens": given["reg_tokens"],
        "patch_projection": "conv" if given["stem_depths"] is None else "resnet",
        "stem_depths": tuple(given["stem_depths"] or ()),
        "stem_style": "timm",
        "patch_bias": not given["pre_norm"],
        "patch_post_norm": given["embed_norm_layer"] is not None,
        "embedding_norm": given["pre_norm"],
        "position_embedding_type": "learned" if positions else "none",
        "position_embedding_on_prefix": not given["no_embed_class"],
        "position_resampling": "bicubic_antialias",
        "block_type": BLOCKS[given["block_fn"]],
        "num_branches": given["num_parallel"] if given["block_fn"] == "ParallelThingsBlock" else 1,
        "norm_type": NORMS[given["norm_layer"]],
        "layer_norm_eps": given["norm_eps"],
        "attention_type": "differential" if differential else "self",
        "qkv_bias": given["qkv_bias"],
        "qk_norm": "norm" if given["qk_norm"] else None,
        "attention_inner_norm": given["scale_attn_norm"],
        # One projection for both has one bias: ours is in the MLP.
        "attention_output_bias": given["proj_bias"] and not fused,
        "mlp_type": "mlp" if parallel else MLPS[given["mlp_layer"]],
        "mlp_bias": given["proj_bias"],
        "mlp_inner_norm": given["scale_mlp_norm"],
        "hidden_act": ACTIVATIONS[given["act_layer"]],
        "layer_scale_init_value": given["init_values"] if scaled else None,
        "final_norm": "after_pooling" if after else "before_pooling" if before else "none",
        "pooling": POOLINGS[given["global_pool"]],
        "pool_prefix_tokens": given["pool_include_prefix"] or given["global_pool"] == "prr",
        "hidden_dropout_prob": given["proj_drop_rate"],
        "embedding_dropout_prob": given["pos_drop_rate"] if positions else 0.0,  # timm returns before that dropout
        "attention_probs_dropout_prob": given["attn_drop_rate"],
        "classifier_dropout_prob": given["drop_rate"],
        "drop_path_rate": given["drop_path_rate"],
        "patch_dropout_prob": given["patch_drop_rate"],
        "initialization": "timm",
        "num_labels": given["num_classes"],
    }
    return PlainViTConfig(**described, **fields)


def arguments_for(config: PlainViTConfig) -> dict[str, Any]:
    """Return the arguments with which timm builds this model, those of `DEFAULTS` left out that have their default.

    Raises:
        ExportError: names every part of the model that timm's VisionTransformer has no place for.
    """
    parallel, differential = config.block_type == "parallel", config.attention_type == "differential"
    fused = parallel and config.mlp_bias and not config.attention_output_bias
    if (config.head_dim or 0) * config.num_attention_heads != config.hidden_size:
        raise ExportError(
            "timm's heads share the width of the model out:",
            [f"{config.num_attention_heads} heads of {config.head_dim} in a width of {config.hidden_size}"],
        )
    width = config.intermediate_size * (2 if config.mlp_type == "swiglu_packed" else 1)
    embedding_dropout = config.embedding_dropout_prob
    given = {
        "distilled": config.use_distillation_token,
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "stem_depths": tuple(config.stem_depths) if config.patch_projection == "resnet" else None,
        "in_chans": config.num_channels,
        "num_classes": config.num_labels,
        "global_pool": word_of(POOLINGS, config.pooling),
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio_of(width, config.hidden_size),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm == "norm",
        "scale_attn_norm": config.attention_inner_norm,
        "scale_mlp_norm": config.mlp_inner_norm,
        "proj_bias": config.mlp_bias,
        "init_values": config.layer_scale_init_value,
        "class_token": config.use_class_token,
        "pos_embed": "learn" if config.position_embedding_type == "learned" else "none",
        "no_embed_class": not config.position_embedding_on_prefix,
        "reg_tokens": config.num_register_tokens,
        "pre_norm": config.embedding_norm,
        "final_norm": config.final_norm != "none",
        "fc_norm": config.final_norm == "after_pooling",
        "pool_include_prefix": config.pool_prefix_tokens,
        "drop_rate": config.classifier_dropout_prob,
        "pos_drop_rate": config.hidden_dropout_prob if embedding_dropout is None else embedding_dropout,
        "patch_drop_rate": config.patch_dropout_prob,
        "proj_drop_rate": config.hidden_dropout_prob,
        "attn_drop_rate": config.attention_probs_dropout_prob,
        "drop_path_rate": config.drop_path_rate,
        "embed_norm_layer": word_of(NORMS, config.norm_type) if config.patch_post_norm else None,
        "norm_layer": word_of(NORMS, config.norm_type),
        "norm_eps": config.layer_norm_eps,
        "act_layer": word_of(ACTIVATIONS, config.hidden_act),
        "block_fn": "DiffParallelScalingBlock" if parallel and differential else word_of(BLOCKS, config.block_type),
        "mlp_layer": word_of(MLPS, config.mlp_type),
        "attn_layer": "attn" if parallel else word_of(ATTENTIONS, config.attention_type),
        "num_parallel": config.num_branches if config.block_type == "branches" else 2,
        "fuse_out_proj": fused and not differential,
    }
    if lost := lost_fields(config, config_of(given)):
        raise ExportError("timm's VisionTransformer cannot express this model:", lost)
    if given["fc_norm"] == (given["global_pool"] in ("avg", "avgmax", "max")) or not given["final_norm"]:
        given["fc_norm"] = None
    return {name: value for name, value in given.items() if value != DEFAULTS[name]}


def word_of(table: Mapping[str, str], ours: str) -> str:
    """Return timm's word for ours, the first where it has several; the table's first where it has none."""
    return next((word for word, meaning in table.items() if meaning == ours), next(iter(table)))


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) of a size that may be an int."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def ratio_of(width: int, hidden_size: int) -> float:
    """Return a ratio that timm, which rounds down, turns back into this width."""
    ratio = width / hidden_size
    return ratio if int(hidden_size * ratio) == width else (width + 0.5) / hidden_size


def architecture_of(name: str) -> dict[str, Any]:
    """Return the arguments of a name such as "vit_base_patch16_224" or "vit_base_patch16_224.augreg_in1k"."""
    base = name.split(".")[0]
    base = OLD_NAMES.get(base, base)
    if file := next((file for file, family in FAMILIES.items() if base in family.entrypoints), None):
        raise UnknownFormatError(
            f"{name!r} is of timm's {file}.py ({FAMILIES[file].title}), which plain-vit does not open: it opens "
            f"its VisionTransformer and VisionTransformerDistilled"
        )
    if base not in ARCHITECTURES:
        raise UnknownFormatError(
            f"{name!r} is not one of the {len(ARCHITECTURES)} plain Vision Transformers of timm 1.0.31 "
            "(its vision_transformer.py and deit.py, and the ResNet-V2 hybrids)"
        )
    return ARCHITECTURES[base]


def architecture_for(config: PlainViTConfig) -> tuple[str, dict[str, Any]]:
    """Return the name and the `model_args` with which timm builds this model from a `config.json`.

    Classes cannot be written as JSON: the name is that of an architecture that has them, the nearest one in all else.

    Raises:
        ExportError: for what timm builds in Python but has no architecture for.
    """
    wanted = {**DEFAULTS, **arguments_for(config)}
    named = ("distilled", "stem_depths", "block_fn", "mlp_layer", "num_parallel", "fuse_out_proj", "embed_norm_layer")
    best: tuple[str, dict[str, Any]] | None = None
    for name in sorted(ARCHITECTURES, key=lambda name: not name.startswith("vit_")):
        have = {**DEFAULTS, **ARCHITECTURES[name]}
        if any(have[key] != wanted[key] for key in named):
            continue
        args = {key: value for key, value in wanted.items() if have[key] != value}
        if int(have["mlp_ratio"] * wanted["embed_dim"]) == int(wanted["mlp_ratio"] * wanted["embed_dim"]):
            args.pop("mlp_ratio", None)
        if {"norm_layer", "norm_eps"} & args.keys():
            if wanted["norm_eps"] != DEFAULTS["norm_eps"] or wanted["embed_norm_layer"] is not None:
                continue
            args.pop("norm_eps", None)
            args["norm_layer"] = wanted["norm_layer"]
        if "fc_norm" in args and args["fc_norm"] is None:
            args["fc_norm"] = wanted["global_pool"] in ("avg", "avgmax", "max")
        if best is None or len(args) < len(best[1]):
            best = name, args
    if best is None:
        parts = [f"{key}={wanted[key]!r}" for key in (*named, "norm_layer", "norm_eps") if wanted[key] != DEFAULTS[key]]
        raise ExportError("timm can build this model, but has no architecture for a config.json that combines:", parts)
    return best
