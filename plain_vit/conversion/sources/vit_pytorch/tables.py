"""Tables of a layout in both directions: its rows, the fields it determines, and what it cannot represent."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, cast

from transformers import PreTrainedConfig

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError
from ...tables.compare_modules import NEUTRAL_FIELDS, RATES
from ...tables.engine import (
    ADD_FIRST_AXIS,
    ADD_TWO_AXES,
    DROP_FIRST_AXIS,
    IDENTITY,
    PIXELS_TO_KERNEL,
    SPLIT_KV,
    SPLIT_QKV,
    Row,
    Transform,
    each,
    inverse,
    then,
)
from ...tables.infer import pair
from .layouts import (
    BLOCK_OF_QUERY,
    CLASS_TOKEN,
    FINAL_NORM,
    HEAD,
    HIDDEN,
    K_NORM,
    LAYOUTS,
    OUT,
    PATCH_NORM,
    PIXEL_NORM,
    POOLED_NORM,
    POOLER_QUERY,
    POSITIONS,
    PROJECTION,
    Q_NORM,
    REGISTERS,
    SCALE_1,
    SCALE_2,
    K,
    Layout,
    Q,
    V,
    in_pooler,
)

RELEASE = "1.26.11"  # the newest release that these tables were compared with

# Gains per head and channel, (heads, 1, d) in the source, (heads, d) here.
DROP_TOKEN_AXIS = each(
    "DROP_TOKEN_AXIS",
    lambda gain, config: gain.squeeze(1),
    lambda gain, config: gain.unsqueeze(1),
)
DROP_TWO_AXES = inverse("DROP_TWO_AXES", ADD_TWO_AXES)
# The source has the values of a patch in the order channel, row, column.
CHANNELS_LAST = each(
    "CHANNELS_LAST",
    lambda values, config: values.unflatten(-1, (config.num_channels, *config.patch_shape)).movedim(-3, -1).flatten(-3),
    lambda values, config: values.unflatten(-1, (*config.patch_shape, config.num_channels)).movedim(-1, -3).flatten(-3),
)
TOKEN_TRANSFORMS = {3: IDENTITY, 2: ADD_FIRST_AXIS, 1: then(ADD_FIRST_AXIS, ADD_FIRST_AXIS)}
POSITION_TRANSFORMS = {3: DROP_FIRST_AXIS, 2: IDENTITY}


def layout_rows(layout: Layout, config: PlainViTConfig) -> list[Row]:
    """Return the conversion table of one layout."""
    transforms: dict[str | tuple[str, ...], Transform] = {
        CLASS_TOKEN: TOKEN_TRANSFORMS[layout.token_axes],
        POSITIONS: POSITION_TRANSFORMS[layout.position_axes],
        REGISTERS: ADD_FIRST_AXIS,
        (Q, K, V): SPLIT_QKV,
        (K, V): SPLIT_KV,
        Q_NORM: DROP_TOKEN_AXIS,
        K_NORM: DROP_TOKEN_AXIS,
        SCALE_1: DROP_TWO_AXES,
        SCALE_2: DROP_TWO_AXES,
    }
    transforms |= {
        in_pooler(ours, *place): transform
        for ours, transform in list(transforms.items())
        for place in ((), (BLOCK_OF_QUERY,))
    }
    transforms[POOLER_QUERY] = TOKEN_TRANSFORMS[1]
    if layout.channels_first:
        transforms |= {f"{PIXEL_NORM}.weight": CHANNELS_LAST, f"{PIXEL_NORM}.bias": CHANNELS_LAST}
    rows = [Row(name, _placed(ours, layout), transforms.get(ours, IDENTITY)) for ours, name in layout.names.items()]
    kernels = CHANNELS_LAST if layout.channels_first else None
    if config.patch_projection == "conv":  # only for exports: models from vit-pytorch are linear
        kernels = PIXELS_TO_KERNEL
    if kernels is not None:
        rows = [row for row in rows if row.ours != PROJECTION]
        name = layout.names[PROJECTION]
        rows += [
            Row(f"{name}.weight", f"{PROJECTION}.weight", kernels),
            Row(f"{name}.bias", f"{PROJECTION}.bias"),
        ]
    return list(_numbered(rows, config.num_hidden_layers))


# Our names in a block with one attention and MLP -> in a block with several.
IN_BRANCHES = {
    ".layernorm_before": ".attention_branches.{}.layernorm",
    ".attention.": ".attention_branches.{}.attention.",
    ".layernorm_after": ".mlp_branches.{}.layernorm",
    ".mlp.": ".mlp_branches.{}.mlp.",
}


def _placed(ours: str | tuple[str, ...], layout: Layout) -> str | tuple[str, ...]:
    """Return our names of a part for the type of block that a layout has."""
    if layout.fields.get("block_type") != "branches":
        return ours
    if isinstance(ours, tuple):
        return tuple(str(_placed(name, layout)) for name in ours)
    return functools.reduce(lambda name, part: name.replace(part, IN_BRANCHES[part]), IN_BRANCHES, ours)


def _numbered(rows: list[Row], depth: int) -> Iterator[Row]:
    """Yield the rows, with one per layer if attentions have even numbers and MLPs odd ones."""
    for row in rows:
        if isinstance(row.source, str) and "{even}" not in row.source and "{odd}" not in row.source:
            yield row
            continue
        for layer in range(depth):
            source = str(row.source).format(even=2 * layer, odd=2 * layer + 1)
            yield Row(source, tuple(name.format(layer) for name in row.targets), row.transform)


def layouts_at(release: str) -> list[Layout]:
    """Return the layout that each file of the package has at a release.

    Args:
        release: A release such as "1.26.11", or a file at a release such as "simple_vit 1.4.1".

    Raises:
        ValueError: for an unknown release or file.
    """
    *file, number = release.split(" ")
    if not re.fullmatch(r"\d+(\.\d+)*", number) or not set(file) <= {layout.file for layout in LAYOUTS}:
        titles = ", ".join(layout.title for layout in LAYOUTS)
        raise ValueError(f"{release!r} is no release of vit-pytorch: give one such as '1.26.11', or one of {titles}")
    latest = {
        layout.file: layout
        for layout in LAYOUTS  # sorted by release within each file
        if _number(layout.since) <= _number(number) and file in ([], [layout.file])
    }
    return list(latest.values())


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def layout_fields(layout: Layout, config: PlainViTConfig) -> dict[str, Any]:
    """Return the fields of our config that a layout determines, given the heads and the pooling."""
    has = layout.names
    pools_mean = config.pooling == "mean" or (config.pooling == "none" and not config.use_class_token)
    one_plain_head = config.num_attention_heads == 1 and config.head_dim == config.hidden_size
    norms = {(True, True): "both", (True, False): "before_pooling", (False, True): "after_pooling"}
    fields = {
        "register_tokens_last": REGISTERS in has,
        "patch_pre_norm": PIXEL_NORM in has,
        "patch_post_norm": PATCH_NORM in has,
        "position_embedding_type": "learned" if POSITIONS in has else "sincos_2d",
        "position_embedding_on_prefix": POSITIONS in has and layout.class_token_has_position,
        "layer_norm_eps": 1e-5,
        "qkv_bias": False,
        "qk_norm": "rms_per_head" if Q_NORM in has else None,
        "attention_output_projection": not (OUT in layout.optional and one_plain_head),
        "attention_output_bias": layout.output_bias,
        "final_norm": norms.get((FINAL_NORM in has, POOLED_NORM in has), "none"),
        "pool_prefix_tokens": config.pooling == "mean" and config.use_class_token and layout.mean_reads_class_token,
    }
    if CLASS_TOKEN not in layout.optional:
        fields["use_class_token"] = CLASS_TOKEN in has and (layout.mean_has_class_token or not pools_mean)
    if PIXEL_NORM in has:
        fields["patch_projection"] = "linear"
    if HIDDEN in has:
        fields["representation_act"] = "gelu"
    return {**fields, **layout.fields}


def layout_scale(layout: Layout, hidden_size: int, head_dim: int) -> float:
    """Return the factor on the attention scores."""
    widths = {"hidden_size": hidden_size, "head_dim": head_dim, "nothing": 1}
    return float(widths[layout.scale] ** -0.5)


def choose_layout(config: PlainViTConfig, layout: str) -> Layout:
    """Return the layout that can represent this model.

    Args:
        config: Our configuration.
        layout: A release, or the title of a layout.

    Raises:
        ExportError: lists the parts that the closest layout cannot represent.
    """
    parts = {target: inexpressible(config, target) for target in layouts_at(layout)}
    target = min(parts, key=lambda target: len(parts[target]))
    if parts[target]:
        others = [other.title for other in LAYOUTS if not inexpressible(config, other)]
        remedy = f"; to_checkpoint(..., layout=...) can write {', '.join(others)}" if others else ""
        raise ExportError(
            f"vit-pytorch {layout} ({target.title}) has no place for parts of this model{remedy}:", parts[target]
        )
    return target


# Fields that need no check: sizes, which follow from the state dict.
SIZES = {
    "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size", "image_size",
    "patch_size", "num_channels",
}  # fmt: skip
NEEDED = {REGISTERS: "num_register_tokens", HIDDEN: "representation_size"}


def inexpressible(config: PlainViTConfig, layout: Layout) -> list[str]:
    """Return every part of a model that a layout cannot represent."""
    has = layout.names
    settled = layout_fields(layout, config)
    free = SIZES | RATES | NEUTRAL_FIELDS | {"pooling", "attention_scale"}
    free |= {"use_class_token"} - settled.keys()
    # A convolution and a dense layer have the same weights in another order.
    free |= {"patch_projection"} - settled.keys()
    free |= {"num_register_tokens"} if REGISTERS in has and config.num_register_tokens else set()
    free |= {"representation_size"} if HIDDEN in has and config.representation_size else set()
    free |= {"layer_scale_init_value"} if SCALE_1 in has and config.layer_scale_init_value is not None else set()
    free |= {"pooling_num_layers"} if config.pooling in layout.poolings else set()
    free -= {"num_channels"} & layout.fields.keys()
    free |= {"num_branches"} if layout.fields.get("block_type") == "branches" else set()
    parts = [
        f"{field} = {getattr(config, field)!r}: {wanted!r} there"
        for field, wanted in {**_defaults(), **settled}.items()
        if field not in free and getattr(config, field) != wanted
    ]
    sides = {size: pair(getattr(config, size)) for size in layout.square}
    parts += [f"{size} = {given}: a square there" for size, given in sides.items() if given[0] != given[1]]
    parts += [] if layout.fault is None else [f"it is not a plain ViT: {layout.fault}"]
    parts += [f"{what}: none there" for ours, what in NEEDED.items() if ours in has and not getattr(config, what)]
    head_dim = cast(int, config.head_dim)  # the config fills it in
    scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    wanted_scale = layout_scale(layout, config.hidden_size, head_dim)
    if not math.isclose(scale, wanted_scale, rel_tol=1e-12):
        parts.append(f"attention_scale = {scale}: {wanted_scale} there")
    headless = HEAD not in has or (config.pooling == "none" and HEAD in layout.optional)
    if config.pooling not in (*layout.poolings, *(["none"] if HEAD in layout.optional else [])):
        parts.append(f"pooling = {config.pooling!r}: {' or '.join(layout.poolings)} there")
    if headless != (config.num_labels == 0):
        parts.append(f"num_labels = {config.num_labels}: {'no classifier' if headless else 'a classifier'} there")
    return parts


def _defaults() -> dict[str, Any]:
    """Return the defaults of the fields that our config adds to PreTrainedConfig."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name: field.default for field in dataclasses.fields(PlainViTConfig) if field.name not in inherited}
