"""Settings of OpenCLIP's image towers, as in the `model_cfg` of an `open_clip_config.json`, and our config.

A native tower is open_clip's VisionTransformer or OpenAI's. OpenAI's has the same tensor names and fewer settings.
"""

from collections.abc import Mapping
from typing import Any

from ....configuration_plain_vit import PlainViTConfig
from ....errors import CheckpointError, ExportError
from ...tables.compare_modules import lost_fields, uneven_heads
from ...tables.data_files import data_file
from ...tables.infer import ratio_of

EPS = 1e-5  # of torch's LayerNorm

# The fields of open_clip's CLIPVisionCfg for a native tower, with their defaults.
DEFAULTS: dict[str, Any] = {
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
    "ls_init_value": None,
    "patch_dropout": 0.0,
    "attentional_pool": False,
    "attn_pooler_queries": 256,
    "attn_pooler_heads": 8,
    "no_ln_pre": False,
    "pos_embed_type": "learnable",
    "final_ln_after_pool": False,
    "pool_type": "tok",
    "output_tokens": False,
    "act_kwargs": None,
    "norm_kwargs": None,
    "block_type": None,
    "qk_norm": False,
    "scaled_cosine_attn": False,
    "scale_heads": False,
    "scale_attn_inner": False,
    "scale_attn": False,
    "scale_fc": False,
}
# The settings of open_clip's custom block. If `block_type` selects the plain block, it ignores them.
OF_CUSTOM_BLOCKS = ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
NORM_DEFAULTS = {"elementwise_affine": True, "bias": True}  # torch's, except for `eps`
# Additional fields for a tower that is a timm model. Of the fields above, it reads only `image_size` and
# `patch_dropout`.
TRUNK_DEFAULTS: dict[str, Any] = {
    "timm_model_name": None,
    "timm_model_pretrained": False,
    "timm_pool": "avg",
    "timm_proj": "linear",
    "timm_proj_bias": False,
    "timm_drop": 0.0,
    "timm_drop_path": None,
}

# Settings without a counterpart in our model: the part of the tensor names that shows each, and the reason.
REFUSED = {
    "attentional_pool": (
        "attn_pool", "CoCa's attentional pooling: normalised queries, most of them for a text decoder, attend to the "
        "tokens in the width of the projection"
    ),
    "scaled_cosine_attn": ("attn.logit_scale", "attention by the cosine of queries and keys, with a learned scale"),
    "scale_heads": ("attn.head_scale", "a learned factor on the output of each head"),
    "scale_attn": ("ln_attn", "a norm after the attention, before the residual sum"),
}  # fmt: skip

POOLINGS: dict[str, Any] = {"tok": "cls", "avg": "mean", "none": "none"}
# open_clip's activation, by `quick_gelu` and the arguments of the module.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"quick_gelu": False, "act_kwargs": None},
    "quick_gelu": {"quick_gelu": True, "act_kwargs": None},
    "gelu_pytorch_tanh": {"quick_gelu": False, "act_kwargs": {"approximate": "tanh"}},
}
# Our fields that have the same value in every native tower, if it is not our default.
FIXED_FIELDS: dict[str, Any] = {
    "patch_bias": False,
    "position_resampling": "bicubic_antialias",
    "representation_act": "linear",
    "representation_bias": False,
    "num_labels": 0,
}
# Our fields with the values of settings.
FIELDS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "layer_scale_init_value": "ls_init_value",
    "attention_inner_norm": "scale_attn_inner",
    "mlp_inner_norm": "scale_fc",
    "representation_size": "embed_dim",
    "patch_dropout_prob": "patch_dropout",
}


def architectures() -> dict[str, dict[str, Any]]:
    """Return `embed_dim`, `quick_gelu` and `vision_cfg` of open_clip's models by name, except for modified ResNets."""
    return data_file("open_clip/architectures.json")["architectures"]


def vision_settings(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the image tower in a `model_cfg`, with open_clip's defaults for missing ones.

    Raises:
        CheckpointError: for a `model_cfg` without an image tower, or a setting that open_clip 3.3.0 does not have.
    """
    vision_cfg, embed_dim = model_cfg.get("vision_cfg"), model_cfg.get("embed_dim")
    if not isinstance(vision_cfg, Mapping) or not isinstance(embed_dim, int):
        raise CheckpointError("model_cfg has no vision_cfg or no embed_dim: expected those of an open_clip model")
    known = DEFAULTS | TRUNK_DEFAULTS
    if unknown := sorted(vision_cfg.keys() - known.keys()):
        raise CheckpointError(f"vision_cfg has settings that open_clip 3.3.0 does not have: {', '.join(unknown)}")
    quick_gelu = bool(model_cfg.get("quick_gelu", False))
    settings = {**known, **vision_cfg, "quick_gelu": quick_gelu, "embed_dim": embed_dim}
    if settings["block_type"] not in (None, "custom"):
        settings |= {name: DEFAULTS[name] for name in OF_CUSTOM_BLOCKS}
    return settings


def is_trunk(settings: Mapping[str, Any]) -> bool:
    """Return whether these settings describe a tower that is a timm model."""
    return bool(settings["timm_model_name"])


def mlp_width(settings: Mapping[str, Any]) -> int:
    """Return the inner width of the MLP, which open_clip rounds down."""
    return int(settings["width"] * settings["mlp_ratio"])


def config_of(settings: Mapping[str, Any]) -> PlainViTConfig:
    """Return our config of a native tower.

    Args:
        settings: The result of `vision_settings`.

    Raises:
        ExportError: lists all settings without a counterpart in our model.
    """
    faults = [f"{name}={settings[name]!r}: {reason}" for name, (_, reason) in REFUSED.items() if settings[name]]
    if not isinstance(settings["layers"], int):
        faults.append(f"layers={settings['layers']}: a modified ResNet, a convolutional network")
    norm = settings["norm_kwargs"] or {}
    if {**NORM_DEFAULTS, **norm, "eps": EPS} != {**NORM_DEFAULTS, "eps": EPS}:
        faults.append(f"norm_kwargs={norm}: expected only eps")
    said = bool(settings["quick_gelu"]), settings["act_kwargs"] or None
    if said == (False, {"approximate": "none"}):  # torch's default
        said = False, None
    act = [name for name, one in ACTIVATIONS.items() if (one["quick_gelu"], one["act_kwargs"]) == said]
    if not act:
        faults.append(f"act_kwargs={settings['act_kwargs']} with quick_gelu={settings['quick_gelu']}")
    if settings["pool_type"] not in POOLINGS:
        faults.append(f"pool_type={settings['pool_type']!r}: expected one of {', '.join(POOLINGS)}")
    if faults:
        raise ExportError("plain-vit has no counterpart of parts of this open_clip model:", faults)
    return PlainViTConfig(
        **FIXED_FIELDS,
        **{ours: settings[theirs] for ours, theirs in FIELDS.items()},
        num_attention_heads=settings["width"] // settings["head_width"],
        intermediate_size=mlp_width(settings),
        hidden_act=act[0],
        layer_norm_eps=norm.get("eps", EPS),
        embedding_norm=not settings["no_ln_pre"],
        qk_norm="norm" if settings["qk_norm"] else None,
        pooling=POOLINGS[settings["pool_type"]],
        final_norm="after_pooling" if settings["final_ln_after_pool"] else "before_pooling",
    )


def settings_for(config: PlainViTConfig) -> dict[str, Any]:
    """Return the settings of the native tower that represents our model.

    Raises:
        ExportError: lists every part of the model that open_clip's VisionTransformer cannot represent.
    """
    width = config.hidden_size
    poolings = {ours: theirs for theirs, ours in POOLINGS.items()}
    settings = {
        **DEFAULTS,
        **ACTIVATIONS.get(config.hidden_act, ACTIVATIONS["gelu"]),
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "head_width": width // config.num_attention_heads,
        "mlp_ratio": ratio_of(config.intermediate_size, width),
        "norm_kwargs": None if config.layer_norm_eps == EPS else {"eps": config.layer_norm_eps},
        "no_ln_pre": not config.embedding_norm,
        "qk_norm": config.qk_norm == "norm",
        "pool_type": poolings.get(config.pooling, "tok"),
        "final_ln_after_pool": config.final_norm == "after_pooling",
    }
    if faults := [*uneven_heads(config), *lost_fields(config, lambda: config_of(settings))]:
        raise ExportError("open_clip's VisionTransformer cannot represent this model:", faults)
    return settings
