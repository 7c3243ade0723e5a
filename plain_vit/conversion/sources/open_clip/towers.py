"""Native image towers: read their settings from tensors and from live modules."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError
from ...tables.compare_modules import class_path, differences, epsilon_of, meta_device
from ...tables.format import Description, Hints, Inference, StateDict, unused_hints
from ...tables.infer import head_counts, image_sizes, pair, patches_in, ratio_of, size_fault, square_grid
from .settings import (
    ACTIVATIONS,
    DEFAULTS,
    EPS,
    POOLINGS,
    REFUSED,
    architectures,
    config_of,
    is_trunk,
    mlp_width,
    settings_for,
    vision_settings,
)

OPEN_CLIP = "open_clip.transformer.VisionTransformer"
OPENAI = ("clip.model.VisionTransformer", "clip.model.VisualTransformer")  # the second is the older name

# Computes the same in float32; open_clip uses it in models of mixed precision.
SAME_CLASSES = {"open_clip.transformer.LayerNormFp32": "open_clip.transformer.LayerNorm"}
# Attributes that do not affect the pooled output: stored preprocessing and constructor arguments, the form of the
# output, training switches.
SILENT_ATTRIBUTES = {
    "grad_checkpointing", "image_mean", "image_std", "output_dim", "output_tokens", "preprocess_cfg",
}  # fmt: skip
FRESH_GAIN = 1e-5  # open_clip's default; only new weights depend on it
BLOCK = "transformer.resblocks.{}"


# Tensors


def observed(tensors: StateDict) -> dict[str, Any]:
    """Return what a tower's tensors show about its settings, to compare with `expected`."""
    first = BLOCK.format(0)
    width, channels, *patch = tensors["conv1.weight"].shape
    prefix = BLOCK.format("")
    return {
        "width": width,
        "channels": channels,
        "patch_size": tuple(patch),
        "layers": len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)}),
        "mlp_width": tensors[f"{first}.mlp.c_fc.weight"].shape[0],
        "embed_dim": tensors["proj"].shape[1] if "proj" in tensors else None,
        "no_ln_pre": "ln_pre.weight" not in tensors,
        "layer_scale": f"{first}.ls_1.gamma" in tensors,
        "qk_norm": f"{first}.attn.ln_q.weight" in tensors,
        "scale_attn_inner": f"{first}.attn.ln_inner.weight" in tensors,
        "scale_fc": f"{first}.mlp.ln.weight" in tensors,
        **{name: any(f".{part}." in f".{tensor}." for tensor in tensors) for name, (part, _) in REFUSED.items()},
    }


def expected(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tensors of a tower with these settings show."""
    shown = ("width", "layers", "embed_dim", "no_ln_pre", "qk_norm", "scale_attn_inner", "scale_fc")
    return {
        **{name: settings[name] for name in shown},
        **{name: bool(settings[name]) for name in REFUSED},
        "channels": 3,
        "patch_size": pair(settings["patch_size"]),
        "mlp_width": mlp_width(settings),
        "layer_scale": settings["ls_init_value"] is not None,
    }


def describe_by_settings(
    tensors: StateDict, settings: Mapping[str, Any], hints: Hints, whence: str, *, resizes: bool
) -> Description:
    """Describe a tower whose settings are known.

    Args:
        tensors: Tensors of the tower.
        settings: The result of `vision_settings`.
        hints: The caller's hints.
        whence: The origin of the settings.
        resizes: Whether a position table of another size than the settings' is for a square image, as in open_clip.

    Raises:
        ExportError: lists all settings without a counterpart in our model.
        MappingError: The tensors show other settings.
        AmbiguousCheckpointError: for an unknown image size.
    """
    config = config_of(settings)
    found, named = observed(tensors), expected(settings)
    if faults := [f"{key} is {named[key]!r} there and {found[key]!r} in the tensors"
                  for key in found if found[key] != named[key]]:  # fmt: skip
        raise MappingError(f"the tensors are not of the model that {whence} describes:", faults)
    patches = tensors["positional_embedding"].shape[0] - 1
    inferences = [
        Inference(field, "head_dim**-0.5" if field == "attention_scale" else getattr(config, field), whence)
        for field in ("num_attention_heads", "attention_scale", "layer_norm_eps", "hidden_act", "pooling")
    ]
    size, patch_size = config.image_shape, config.patch_shape
    if hints.image_size is not None:
        size = pair(hints.image_size)
    elif patches_in(size, patch_size) != patches and resizes and (grid := square_grid(patches)):
        size = grid[0] * patch_size[0], grid[1] * patch_size[1]
        whose = f"the {patches} positions of the patches; open_clip resizes them for {settings['image_size']} pixels"
        inferences.append(Inference("image_size", size, whose))
    if hints.image_size is not None and (fault := size_fault(size, patch_size, [patches])):
        raise CheckpointError(fault)
    if patches_in(size, patch_size) != patches:
        raise AmbiguousCheckpointError(
            f"{whence} describes a model for {size} pixels, and positional_embedding has {patches} positions of "
            "patches: the size of its images is open",
            {"image_size": image_sizes(patches, patch_size)},
        )
    return Description(config_of({**settings, "image_size": size}), inferences=inferences)


def describe_by_hints(tensors: StateDict, hints: Hints) -> Description:
    """Describe a tower from its tensors and the caller's hints.

    Raises:
        AmbiguousCheckpointError: lists all missing settings, with the architectures that fit.
        ExportError: for parts without a counterpart in our model.
        CheckpointError: for impossible hints.
    """
    found = observed(tensors)
    if found["channels"] != 3:
        raise CheckpointError(f"conv1 has {found['channels']} input channels: expected 3, as in every CLIP")
    width, patch_size = found["width"], found["patch_size"]
    patches = tensors["positional_embedding"].shape[0] - 1
    inferences = [Inference("attention_scale", "head_dim**-0.5", "open_clip's attention, the only value there")]
    shown = None
    if found["qk_norm"]:
        head_dim = tensors[f"{BLOCK.format(0)}.attn.ln_q.weight"].shape[0]
        shown = width // head_dim
        inferences.append(Inference("num_attention_heads", shown, f"a query norm of {head_dim} in a width of {width}"))
    heads, settled = hints.heads_in(width, shown)
    inferences += settled
    choices: dict[str, Sequence[object]] = {
        "num_attention_heads": head_counts(width),
        "hidden_act": list(ACTIVATIONS),
        "layer_norm_eps": [EPS, 1e-6],
        "pooling": list(POOLINGS.values()),
        "final_norm": ["after_pooling", "before_pooling"],
        "image_size": image_sizes(patches, patch_size),
    }
    given = {**{name: getattr(hints, name) for name in choices}, "num_attention_heads": heads}
    if hints.pooling in ("cls", "none") and hints.final_norm is None:
        given["final_norm"] = "before_pooling"
        same = f"open_clip's default: with pooling {hints.pooling!r} the output is the same either way"
        inferences.append(Inference("final_norm", "before_pooling", same))
    elif hints.pooling is None:
        del choices["final_norm"]  # matters only for some poolings
    for name in ("hidden_act", "pooling"):
        if given[name] is not None and given[name] not in choices[name]:
            raise CheckpointError(f"{name} is {given[name]!r}: open_clip has {', '.join(map(str, choices[name]))}")
    open_ = {name: values for name, values in choices.items() if given[name] is None}
    if open_:
        raise _missing(found, patches, hints, open_)
    if fault := size_fault(pair(given["image_size"]), patch_size, [patches]):
        raise CheckpointError(fault)
    settings = _settings(found, given)
    return Description(config_of(settings), inferences=inferences)


def _settings(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tower from what its tensors show and from the given settings."""
    size = pair(given["image_size"])
    return {
        **DEFAULTS,
        **{name: found[name] for name in found if name in DEFAULTS},
        **ACTIVATIONS[given["hidden_act"]],
        "embed_dim": found["embed_dim"],
        "mlp_ratio": ratio_of(found["mlp_width"], found["width"]),
        "head_width": found["width"] // given["num_attention_heads"],
        "ls_init_value": FRESH_GAIN if found["layer_scale"] else None,
        "norm_kwargs": {"eps": given["layer_norm_eps"]},
        "pool_type": next(theirs for theirs, ours in POOLINGS.items() if ours == given["pooling"]),
        "final_ln_after_pool": given["final_norm"] == "after_pooling",
        "image_size": size,
    }


def _missing(
    found: Mapping[str, Any], patches: int, hints: Hints, open_: Mapping[str, Sequence[object]]
) -> AmbiguousCheckpointError:
    """Return the error that asks for the missing settings, or for an architecture with these shapes instead."""
    message = "the tensors of a CLIP's image tower do not show everything that its outputs depend on; give"
    of_grid: list[str] = []
    others: list[str] = []
    for name, model_cfg in architectures().items():
        settings = vision_settings(model_cfg)
        if is_trunk(settings) or expected(settings) != found or any(settings[one] for one in REFUSED):
            continue
        config = config_of(settings)
        if unused_hints(replace(hints, image_size=None, architecture=None), Description(config)):
            continue
        (of_grid if patches_in(config.image_shape, config.patch_shape) == patches else others).append(name)
    if of_grid and hints.image_size is None:
        return AmbiguousCheckpointError(message, {"architecture": of_grid}, open_)
    if of_grid or others:
        size = {"image_size": open_["image_size"]} if "image_size" in open_ else {}
        return AmbiguousCheckpointError(message, {"architecture": of_grid + others, **size}, open_)
    return AmbiguousCheckpointError(message, open_)


# Live modules


def describe_live(module: Any) -> Description:
    """Read the configuration of a live tower, which determines everything.

    Raises:
        ExportError: lists every part that plain-vit does not support.
    """
    if not len(module.transformer.resblocks):
        raise ExportError("the tower has no blocks: its heads cannot be read")
    config = config_of(_live_settings(module))
    with meta_device():
        rebuilt = _rebuilt(module, config)
    if faults := differences(module, rebuilt, SAME_CLASSES, SILENT_ATTRIBUTES):
        raise ExportError("plain-vit does not know parts of this image tower (found, not expected):", faults)
    return Description(config)


def _live_settings(module: Any) -> dict[str, Any]:
    """Return the settings with which open_clip would build this tower."""
    block, width = module.transformer.resblocks[0], module.conv1.out_channels
    is_openai = class_path(module) in OPENAI
    act = block.mlp.gelu
    kind = "quick_gelu" if type(act).__name__ == "QuickGELU" else "gelu"
    kind = "gelu_pytorch_tanh" if getattr(act, "approximate", None) == "tanh" else kind
    present = {  # parts that depend on the class of the blocks
        "qk_norm": "attn.ln_q", "scale_attn_inner": "attn.ln_inner", "scale_fc": "mlp.ln", "scale_attn": "ln_attn",
        "ls_init_value": "ls_1",
    }  # fmt: skip
    parts = {name: _has(block, path) for name, path in present.items()}
    return {
        **DEFAULTS,
        **ACTIVATIONS[kind],
        **parts,
        "attentional_pool": getattr(module, "attn_pool", None) is not None,
        "scaled_cosine_attn": getattr(block.attn, "logit_scale", None) is not None,
        "scale_heads": getattr(block.attn, "head_scale", None) is not None,
        "image_size": module.input_resolution if is_openai else module.image_size,
        "patch_size": module.conv1.kernel_size,
        "width": width,
        "layers": len(module.transformer.resblocks),
        "head_width": width // block.attn.num_heads,
        "mlp_ratio": ratio_of(block.mlp.c_fc.out_features, width),
        "ls_init_value": FRESH_GAIN if parts["ls_init_value"] else None,
        "norm_kwargs": {"eps": epsilon_of(block.ln_1)},
        "no_ln_pre": not _has(module, "ln_pre"),
        "pool_type": "tok" if is_openai else module.pool_type,
        # OpenAI's class normalises only the class token.
        "final_ln_after_pool": is_openai or module.final_ln_after_pool,
        "patch_dropout": getattr(getattr(module, "patch_dropout", None), "prob", 0.0),
        "embed_dim": None if module.proj is None else module.proj.shape[1],
    }


def _has(module: nn.Module, path: str) -> bool:
    """Return whether a module has a part that is not the identity."""
    parts = dict(module.named_modules())
    return path in parts and not isinstance(parts[path], nn.Identity)


def _rebuilt(module: Any, config: PlainViTConfig) -> nn.Module:
    """Build a tower of the same class as the module from our config."""
    if class_path(module) in OPENAI:
        size, patch_size = config.image_shape[0], config.patch_shape[0]
        output_dim = config.representation_size or 1
        heads = config.num_attention_heads
        rebuilt = type(module)(size, patch_size, config.hidden_size, config.num_hidden_layers, heads, output_dim)
    else:
        custom = type(module.transformer.resblocks[0]).__name__ == "CustomResidualAttentionBlock"
        rebuilt = build(config, block_type="custom" if custom else None)
    if module.proj is None:
        rebuilt.proj = None
    return rebuilt


def build(config: PlainViTConfig, block_type: str | None = None) -> Any:
    """Build open_clip's VisionTransformer of this config, with random weights.

    Args:
        config: Our configuration.
        block_type: "custom" for open_clip's blocks with norms inside attention and MLP; None for its own choice.

    Raises:
        ExportError: lists every part of the model that the class cannot represent.
    """
    from open_clip.transformer import LayerNorm, QuickGELU, VisionTransformer

    settings = settings_for(config)
    shared = ("image_size", "patch_size", "width", "layers", "mlp_ratio", "ls_init_value", "patch_dropout", "no_ln_pre",
              "final_ln_after_pool", "pool_type", "qk_norm", "scale_attn_inner", "scale_fc")  # fmt: skip
    act_kwargs = settings["act_kwargs"] or {}
    module = VisionTransformer(
        **{name: settings[name] for name in shared},
        heads=config.num_attention_heads,
        output_dim=config.representation_size or 1,
        act_layer=functools.partial(QuickGELU if settings["quick_gelu"] else nn.GELU, **act_kwargs),
        norm_layer=functools.partial(LayerNorm, eps=config.layer_norm_eps),
        block_type=block_type,
    )
    if config.representation_size is None:
        module.proj = None
    return module
