"""timm's VisionTransformer as one table of arguments, for conversion to and from our config, modules and state dicts.

Source: timm 1.0.31, `timm/models/vision_transformer.py` and `timm/models/deit.py`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError, UnknownFormatError
from ...tables.compare_modules import epsilon_of, lost_fields
from ...tables.infer import pair
from .names import families, plain_names

# timm's classes that open, for error messages.
OPENED = "VisionTransformer, VisionTransformerDistilled, Eva, Beit, VisionTransformerRelPos and NaFlexVit"

# timm's name of a choice -> our name; if timm has several names, exports use the first.
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
POSITIONS = {"none": "none", "": "none", "learn": "learned"}
QK_NORMS = {False: None, True: "norm"}
NEGATED = {False: True, True: False}


@dataclass(frozen=True)
class Argument:
    """An argument of timm's VisionTransformer that affects its outputs, and where to read it from.

    A `config.json` holds the value itself, in `model_args` or in the architecture that it names.

    Args:
        name: timm's name.
        default: timm's default.
        field: Field of our config. Values that depend on several arguments or fields are corrected in `_joint_fields`
            and `_joint_arguments`.
        words: timm's names for the values of the field; None if both have the same values.
        module: Function that reads the argument from the `modules.Parts` of a live model.
        tensors: Function that reads it from the `shapes.Parts` of a state dict; None if no name or shape shows it.
    """

    name: str
    default: Any
    field: str | None = None
    words: Mapping[Any, Any] | None = None
    module: Callable[[Any], Any] = lambda parts: None
    tensors: Callable[[Any], Any] | None = None

    def ours(self, value: Any) -> Any:
        """Return our value for a value of timm's."""
        if self.words is None:
            return value
        return self.words[bool(value) if isinstance(self.default, bool) else value]

    def theirs(self, value: Any) -> Any:
        """Return timm's value for a value of ours."""
        return value if self.words is None else timm_name_for(self.words, value)


def _has(name: str) -> Callable[[Any], bool]:
    """Return a function that checks that a part of a live model is not the identity."""
    return lambda parts: not isinstance(getattr(parts.model, name), nn.Identity)


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
             module=lambda m: not isinstance(m.attention.q_norm, nn.Identity),
             tensors=lambda t: f"{t.attention}q_norm.weight" in t.names),
    Argument("scale_attn_norm", False, "attention_inner_norm",
             module=lambda m: not m.parallel and not isinstance(m.attention.norm, nn.Identity),
             tensors=lambda t: not t.parallel and f"{t.attention}norm.weight" in t.names),
    Argument("scale_mlp_norm", False, "mlp_inner_norm",
             module=lambda m: not m.parallel and not isinstance(m.mlp.norm, nn.Identity),
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
             module=_has("norm_pre"), tensors=lambda t: "norm_pre.weight" in t.names),
    Argument("final_norm", True, module=lambda m: _has("norm")(m) or _has("fc_norm")(m)),
    Argument("fc_norm", None, module=_has("fc_norm"), tensors=lambda t: "fc_norm.weight" in t.names),
    Argument("pool_include_prefix", False, "pool_prefix_tokens", module=lambda m: m.model.pool_include_prefix),
    Argument("drop_rate", 0.0, "classifier_dropout_prob", module=lambda m: m.model.head_drop.p),
    Argument("pos_drop_rate", 0.0, "embedding_dropout_prob", module=lambda m: m.model.pos_drop.p),
    Argument("patch_drop_rate", 0.0, "patch_dropout_prob", module=lambda m: getattr(m.model.patch_drop, "prob", 0.0)),
    Argument("proj_drop_rate", 0.0, "hidden_dropout_prob", module=lambda m: m.dropout.p),
    Argument("attn_drop_rate", 0.0, "attention_probs_dropout_prob", module=lambda m: m.attention.attn_drop.p),
    Argument("drop_path_rate", 0.0, "drop_path_rate", module=lambda m: getattr(m.last_drop_path, "drop_prob", 0.0)),
    Argument("embed_norm_layer", None,
             module=lambda m: None if isinstance(m.patch_norm, nn.Identity) else m.name_of(m.patch_norm)),
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
DEFAULTS: dict[str, Any] = {argument.name: argument.default for argument in ARGUMENTS}

# Arguments that do not affect a trained model.
SILENT_ARGUMENTS = {"dynamic_img_size", "weight_init", "fix_init"}

PARALLEL = ("ParallelScalingBlock", "DiffParallelScalingBlock")


def config_of(arguments: Mapping[str, Any], **fields: Any) -> PlainViTConfig:
    """Return our config of a timm model.

    Args:
        arguments: Arguments of timm's VisionTransformer, as in `ARGUMENTS`; the others have timm's defaults.
        **fields: Further fields of the config, such as `id2label`.

    Raises:
        ExportError: lists all arguments without a counterpart in our model.
    """
    given = {**DEFAULTS, **arguments}
    if unknown := _without_counterpart(given):
        raise ExportError("plain-vit has no counterpart of parts of this timm model:", unknown)
    described = {one.field: one.ours(given[one.name]) for one in ARGUMENTS if one.field is not None}
    return PlainViTConfig(**described | _joint_fields(given), **fields)


def _without_counterpart(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments, and combinations of them, without a counterpart in our model."""
    unknown = [name for name in given if name not in DEFAULTS]
    choices: dict[str, Collection[Any]] = {
        one.name: one.words for one in ARGUMENTS if one.words is not None and not isinstance(one.default, bool)
    }
    for name, words in (choices | {"embed_norm_layer": (None, given["norm_layer"])}).items():
        if given[name] not in words:
            unknown.append(f"{name}={given[name]!r}: expected one of {', '.join(repr(word) for word in words)}")
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


def _joint_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of our config that depend on several arguments, or on part of one."""
    block, positions = given["block_fn"], given["pos_embed"] == "learn"
    width = int(given["embed_dim"] * given["mlp_ratio"])
    sides = zip(pair(given["img_size"]), pair(given["patch_size"]), strict=True)
    where = "after_pooling" if norm_follows_pooling(given) else "before_pooling"
    fields: dict[str, Any] = {
        "intermediate_size": width // 2 if given["mlp_layer"] == "SwiGLUPacked" else width,
        "drop_partial_patches": any(pixels % patch for pixels, patch in sides),
        "resnet_stem": None if given["stem_depths"] is None else {"depths": given["stem_depths"], "style": "timm"},
        "patch_bias": not given["pre_norm"],
        "patch_post_norm": given["embed_norm_layer"] is not None,
        "position_resampling": "bicubic_antialias",
        "num_branches": given["num_parallel"] if block == "ParallelThingsBlock" else 1,
        # Fused output projections have one bias, which our model has in the MLP.
        "attention_output_bias": given["proj_bias"] and not given["fuse_out_proj"],
        "final_norm": where if given["final_norm"] else "none",
        "pool_prefix_tokens": given["pool_include_prefix"] or given["global_pool"] == "prr",
        "embedding_dropout_prob": given["pos_drop_rate"] if positions else 0.0,  # timm returns before that dropout
        "initialization": "timm",
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


def arguments_for(config: PlainViTConfig) -> dict[str, Any]:
    """Return the arguments with which timm builds this model, except those that have timm's default.

    Raises:
        ExportError: lists every part of the model that timm's VisionTransformer cannot represent.
    """
    check_heads(config)
    given = {one.name: one.theirs(getattr(config, one.field)) for one in ARGUMENTS if one.field is not None}
    given |= _joint_arguments(config)
    if lost := lost_with(ARGUMENTS, config, lambda: config_of(given)):
        raise ExportError("timm's VisionTransformer cannot represent this model:", lost)
    if given["fc_norm"] == norm_follows_pooling({**given, "fc_norm": None}) or not given["final_norm"]:
        given["fc_norm"] = None
    return {name: given[name] for name, default in DEFAULTS.items() if given[name] != default}


def check_heads(config: PlainViTConfig) -> None:
    """Refuse heads whose widths do not add up to the hidden size.

    Raises:
        ExportError: The widths do not add up.
    """
    if (config.head_dim or 0) * config.num_attention_heads != config.hidden_size:
        raise ExportError(
            "timm's heads must add up to the width of the model:",
            [f"{config.num_attention_heads} heads of {config.head_dim} in a width of {config.hidden_size}"],
        )


def lost_with(
    arguments: Sequence[Argument], config: PlainViTConfig, read_back: Callable[[], PlainViTConfig]
) -> list[str]:
    """Return the fields of a config that timm would lose, like `lost_fields`.

    A value without a name in timm is written as another value. If that value makes the config invalid when it is read
    back, the original value is reported.
    """
    try:
        read_back()
    except ValueError:
        fields = [(one.field, getattr(config, one.field), one.words) for one in arguments if one.field and one.words]
        if nameless := [f"{field}={value!r}" for field, value, words in fields if value not in words.values()]:
            return nameless
    return lost_fields(config, read_back)


def _joint_arguments(config: PlainViTConfig) -> dict[str, Any]:
    """Return the arguments that depend on several fields of our config."""
    parallel, differential = config.block_type == "parallel", config.attention_type == "differential"
    dropout, norm = config.embedding_dropout_prob, timm_name_for(NORMS, config.norm_type)
    joint: dict[str, Any] = {
        "stem_depths": None if config.resnet_stem is None else config.resnet_stem["depths"],
        "mlp_ratio": ratio_of(
            config.intermediate_size * (2 if config.mlp_type == "swiglu_packed" else 1), config.hidden_size
        ),
        "final_norm": config.final_norm != "none",
        "fc_norm": config.final_norm == "after_pooling",
        "pos_drop_rate": config.hidden_dropout_prob if dropout is None else dropout,
        "embed_norm_layer": norm if config.patch_post_norm else None,
        "num_parallel": config.num_branches if config.block_type == "branches" else 2,
        "dynamic_img_pad": False,
        "fuse_out_proj": parallel and not differential and config.mlp_bias and not config.attention_output_bias,
    }
    if parallel:
        joint |= {"attn_layer": "attn", "block_fn": "DiffParallelScalingBlock" if differential else PARALLEL[0]}
    return joint


def timm_name_for(table: Mapping[Any, Any], ours: Any) -> Any:
    """Return timm's name for our value: the first if it has several, the first of the table if it has none."""
    return next((word for word, meaning in table.items() if meaning == ours), next(iter(table)))


def ratio_of(width: int, hidden_size: int) -> float:
    """Return a ratio from which timm computes exactly this width, although it rounds down."""
    ratio = width / hidden_size
    return ratio if int(hidden_size * ratio) == width else (width + 0.5) / hidden_size


def architecture_of(name: str) -> dict[str, Any]:
    """Return the arguments of a name such as "vit_base_patch16_224" or "vit_base_patch16_224.augreg_in1k"."""
    base, plain = name.split(".")[0], plain_names()
    base = plain.old_names.get(base, base)
    if file := next((file for file, family in families().items() if base in family.entrypoints), None):
        raise UnknownFormatError(
            f"{name!r} is of timm's {file}.py ({families()[file].title}), which plain-vit does not open: it opens "
            f"its {OPENED}"
        )
    if base not in plain.architectures:
        raise UnknownFormatError(
            f"{name!r} is not one of the {len(plain.architectures)} plain Vision Transformers of timm {plain.timm} "
            "(its vision_transformer.py and deit.py, and the ResNet-V2 hybrids)"
        )
    return plain.architectures[base]


def architecture_for(config: PlainViTConfig) -> tuple[str, dict[str, Any]]:
    """Return the name and the `model_args` with which timm builds this model from a `config.json`.

    JSON cannot store classes, so the name is the closest architecture with the same classes.

    Raises:
        ExportError: for a model that timm can build in Python but has no architecture for.
    """
    wanted = {**DEFAULTS, **arguments_for(config)}
    named = ("distilled", "stem_depths", "block_fn", "mlp_layer", "num_parallel", "fuse_out_proj", "embed_norm_layer")
    best: tuple[str, dict[str, Any]] | None = None
    plain = plain_names().architectures
    for name in sorted(plain, key=lambda name: not name.startswith("vit_")):
        have = {**DEFAULTS, **plain[name]}
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
            args["fc_norm"] = norm_follows_pooling(wanted)
        if best is None or len(args) < len(best[1]):
            best = name, args
    if best is None:
        parts = [f"{key}={wanted[key]!r}" for key in (*named, "norm_layer", "norm_eps") if wanted[key] != DEFAULTS[key]]
        raise ExportError("timm can build this model, but has no architecture for a config.json that combines:", parts)
    return best
