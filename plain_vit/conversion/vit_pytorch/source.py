"""vit-pytorch (lucidrains): `ViT` and `SimpleViT` from release 0.0.2 on, and their plain variants.

All of them share exact GELU, norms with epsilon 1e-5, no bias on query, key and value, which are joined along
the first axis, and the pixels of a patch in the order row, column, channel. What the releases changed is in the
layouts' file.
"""

import copy
import dataclasses
import importlib
import importlib.metadata
import inspect
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...configuration_plain_vit import PlainViTConfig
from ...errors import SHOWN, AmbiguousCheckpointError, ExportError, MappingError
from ...layers_plain_vit import SinCos2DPositionEmbedding
from ..compare_modules import NEUTRAL_FIELDS, class_path, differences
from ..engine import (
    ADD_FIRST_AXIS,
    DROP_FIRST_AXIS,
    IDENTITY,
    INDEX,
    LEAF,
    PIXELS_TO_KERNEL,
    SPLIT_KV,
    SPLIT_QKV,
    Row,
    Transform,
    each,
    ignored_names,
    revert,
    then,
)
from ..format import Description, Format, Hints, Inference, StateDict, pair, write_state_dict
from ..infer import divisors, grids, head_counts, image_sizes, square_grid
from .families import FAMILIES
from .layouts import (
    CLASS_TOKEN,
    CLASSES,
    FC1,
    FINAL_NORM,
    HEAD,
    HIDDEN,
    K_NORM,
    LAYOUTS,
    NORM_1,
    OUT,
    PATCH_NORM,
    PIXEL_NORM,
    POOLED_NORM,
    POSITIONS,
    PROJECTION,
    Q_NORM,
    REGISTERS,
    RENAMED_FILES,
    K,
    Layout,
    Names,
    Q,
    V,
)

RELEASE = "1.26.11"  # the newest release that this file was compared with

# The first tensor that every model of the package has, and none of another package.
ANCHOR = re.compile(r"(?P<prefix>.*?)(to_patch_embedding\.[12]|patch_to_embedding)\.weight")

# What wrappers of the package keep beside the model.
BESIDE = (
    ("patch_to_emb.*", "MAE, SimMIM or MPP: the patch embedding a second time"),
    ("mask_token", "MAE, SimMIM or MPP: replaces hidden patches"),
    ("enc_to_dec.*", "MAE: leads to the decoder"),
    ("decoder.*", "MAE: the decoder"),
    ("decoder_pos_emb.*", "MAE: positions of the decoder"),
    ("to_pixels.*", "MAE or SimMIM: predicts pixels"),
    ("to_bits.*", "MPP: predicts colours"),
    ("projector.*", "DINO: the projection of the features, for its loss only"),
)
UNUSED = {"decorr_loss.proj": "random directions of the decorrelation loss"}

# Placeholders of numbers in the tables: of a layer, or of one half of a layer where they are counted in twos.
NUMBERS = {"{}": INDEX, "{even}": r"(\d*[02468])", "{odd}": r"(\d*[13579])"}

# One gain for each head and channel, (heads, 1, d) there and (heads, d) here.
DROP_TOKEN_AXIS = each(
    "DROP_TOKEN_AXIS",
    lambda gain, config: gain.squeeze(1),
    lambda gain, config: gain.unsqueeze(1),
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
    }
    rows = [Row(name, ours, transforms.get(ours, IDENTITY)) for ours, name in layout.names.items()]
    if config.patch_projection == "conv":  # only on the way back: what comes from vit-pytorch is linear
        rows = [row for row in rows if row.ours != PROJECTION]
        name = layout.names[PROJECTION]
        rows += [
            Row(f"{name}.weight", f"{PROJECTION}.weight", PIXELS_TO_KERNEL),
            Row(f"{name}.bias", f"{PROJECTION}.bias"),
        ]
    return list(_numbered(rows, config.num_hidden_layers))


def _numbered(rows: list[Row], depth: int) -> Iterator[Row]:
    """Write out the rows whose layers are counted in twos: attention even, MLP odd."""
    for row in rows:
        if isinstance(row.source, str) and "{even}" not in row.source and "{odd}" not in row.source:
            yield row
            continue
        for layer in range(depth):
            source = str(row.source).format(even=2 * layer, odd=2 * layer + 1)
            ours = [name.format(layer) for name in ([row.ours] if isinstance(row.ours, str) else row.ours)]
            yield Row(source, ours[0] if len(ours) == 1 else tuple(ours), row.transform)


# Reading


def _misfits(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return where a checkpoint's names and shapes do not fit a layout."""
    found: set[str | tuple[str, ...]] = set()
    left_over = []
    patterns = {ours: _pattern(name) for ours, name in layout.names.items()}
    for name, shape in shapes.items():
        ours = next((ours for ours, pattern in patterns.items() if pattern.fullmatch(name)), None)
        if ours is None or not _shape_fits(layout, ours, name, shape):
            left_over.append(f"left over: {name!r} of shape {shape}")
        else:
            found.add(ours)
    needed = [name for ours, name in layout.names.items() if ours not in found and ours not in layout.optional]
    return [*(f"missing: {name!r}" for name in needed), *left_over]


def _shape_fits(layout: Layout, ours: str | tuple[str, ...], name: str, shape: tuple[int, ...]) -> bool:
    """Hold a shape against what tells layouts of equal names apart."""
    if ours == CLASS_TOKEN:
        has_rows = 0 not in shape
        return len(shape) == layout.token_axes and (has_rows or not layout.mean_has_class_token)
    if ours == POSITIONS:
        return len(shape) == layout.position_axes
    if ours in (HEAD, HIDDEN) and name.endswith(".weight"):
        return len(shape) == 2
    if ours == POOLED_NORM:
        return len(shape) == 1
    return True


def _layouts_of(shapes: Mapping[str, tuple[int, ...]], release: str | None) -> list[Layout]:
    """Return the layouts that a checkpoint fits exactly: those that differ in no name or shape.

    Raises:
        MappingError: says what is missing and left over in the nearest layout.
    """
    misfits = {layout: _misfits(layout, shapes) for layout in (LAYOUTS if release is None else layouts_at(release))}
    nearest = min(misfits, key=lambda layout: len(misfits[layout]))
    if misfits[nearest]:
        family = family_of(shapes)
        other = "" if family is None else f" They look like {family}, which plain-vit does not open yet."
        raise MappingError(
            f"the tensors are those of no plain ViT of vit-pytorch.{other} Held against the nearest, {nearest.title}:",
            misfits[nearest],
        )
    return [layout for layout, faults in misfits.items() if not faults]


def family_of(names: Collection[str]) -> str | None:
    """Return the model of the package that has these names and does not open yet."""
    for family, patterns in FAMILIES:
        if all(_has(names, pattern.lstrip("!")) != pattern.startswith("!") for pattern in patterns):
            return family
    return None


def _has(names: Collection[str], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in names)


def layouts_at(release: str) -> list[Layout]:
    """Return the layout that each file of the package has at a release.

    Args:
        release: Such as "1.26.11", or with the name of a file before it, such as "simple_vit 1.4.1".

    Raises:
        ValueError: for what is no release and no such file.
    """
    *file, number = release.split(" ")
    if not re.fullmatch(r"\d+(\.\d+)*", number) or not set(file) <= {layout.file for layout in LAYOUTS}:
        titles = ", ".join(layout.title for layout in LAYOUTS)
        raise ValueError(f"{release!r} is no release of vit-pytorch: give one such as '1.26.11', or one of {titles}")
    latest = {
        layout.file: layout
        for layout in LAYOUTS  # those of a file in the order of their releases
        if _number(layout.since) <= _number(number) and file in ([], [layout.file])
    }
    return list(latest.values())


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def layout_fields(layout: Layout, config: PlainViTConfig) -> dict[str, Any]:
    """Return the fields of our config that a layout settles, given the heads and the pooling."""
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
    return fields


def layout_scale(layout: Layout, hidden_size: int, head_dim: int) -> float:
    """Return the factor on the attention scores."""
    widths = {"hidden_size": hidden_size, "head_dim": head_dim, "nothing": 1}
    return float(widths[layout.scale] ** -0.5)


class _Reader:
    """Reads our config off the names and shapes of one checkpoint; notes what was inferred and what stays open."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], hints: Hints, live: bool):
        self.hints = hints
        self.shapes = shapes
        self.live = live  # a module knows its class, and its patch size
        layouts = _layouts_of(shapes, hints.layout)
        plain = [layout for layout in layouts if layout.fault is None]
        if not plain:
            raise ExportError(
                "plain-vit does not open this model of vit-pytorch yet:",
                [f"{layout.title}: {layout.fault}" for layout in layouts],
            )
        self.layouts = plain if live else layouts
        self.names = self.layouts[0].names  # layouts that fit the same names have the same names
        self.inferences: list[Inference] = []
        self.open: dict[str, Sequence[object]] = {}

    def read(self) -> tuple[PlainViTConfig, Layout]:
        """Return our config and the layout.

        Raises:
            AmbiguousCheckpointError: for everything at once that neither checkpoint nor hints say.
        """
        hidden_size, pixels = self.shape(PROJECTION)
        (class_rows,) = self.shape(CLASS_TOKEN)[-2:-1] or (1,) if self.has(CLASS_TOKEN) else (0,)
        num_labels = self.shape(HEAD)[0] if self.has(HEAD) else 0
        fields: dict[str, Any] = {
            "hidden_size": hidden_size,
            "num_hidden_layers": 1 + max(self.layer_numbers()),
            "intermediate_size": self.shape(FC1)[0],
            "num_labels": num_labels,
            "use_class_token": class_rows > 0,
            "patch_projection": "linear",
            "initialization": "vit_pytorch",
            "num_register_tokens": self.shape(REGISTERS)[0] if self.has(REGISTERS) else 0,
            "representation_size": self.shape(HIDDEN)[0] if self.has(HIDDEN) else None,
        }
        heads, head_dim = self.heads(hidden_size)
        pooling = self.pooling(class_rows > 0)
        layout = self.layout(pooling, class_rows > 0, hidden_size, head_dim)
        image_size, patch_size, num_channels = self.geometry(pixels, self.patches(class_rows))
        if self.open:
            raise AmbiguousCheckpointError(
                f"the tensors of a ViT of vit-pytorch ({layout.title}) do not say all that its logits depend on. "
                "Give what follows, as the model was built (the most usual values come first), or "
                "reference=(pixel_values, logits):",
                self.open,
            )
        fields |= {"num_attention_heads": heads, "head_dim": head_dim, "pooling": pooling, "image_size": image_size}
        fields |= {"patch_size": patch_size, "num_channels": num_channels}
        draft = PlainViTConfig(**fields)
        fields |= layout_fields(layout, draft)
        if fields["position_embedding_type"] == "learned":
            # The package reads the first rows of the table for smaller images, whatever their shape.
            fields["position_resampling"] = "truncate"
        scale = self.hints.scale(hidden_size, head_dim)
        if scale is None:
            scale = layout_scale(layout, hidden_size, head_dim)
            self.settle("attention_scale", f"{layout.scale}**-0.5", f"what {layout.title} computes")
        fields["attention_scale"] = None if scale == head_dim**-0.5 else scale
        config = PlainViTConfig(**fields)
        for field in ("layer_norm_eps", "hidden_act"):
            if (said := getattr(self.hints, field)) is not None:  # of somebody's own copy of the package
                fields[field] = said
            else:
                self.settle(field, getattr(config, field), "vit-pytorch, which has no other")
        if self.hints.layout is not None:
            self.settle("layout", layout.title, "the caller")
        return PlainViTConfig(**fields), layout

    def has(self, ours: str) -> bool:
        """Tell whether the checkpoint holds this part of ours."""
        return ours in self.names and any(True for _ in self.found(ours))

    def found(self, ours: str | tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """Return the names that belong to this part of ours, each with the number of its layer."""
        for name in self.shapes:
            if match := _pattern(self.names[ours]).fullmatch(name):
                yield name, (match.groups(default="")[0])

    def shape(self, ours: str | tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of the weight of this part, in the first layer that has it."""
        return next(self.shapes[name] for name, _ in self.found(ours) if not name.endswith(".bias"))

    def layer_numbers(self) -> list[int]:
        """Return the numbers of the layers."""
        step = 2 if "{even}" in self.names[NORM_1] else 1
        return [int(number) // step for _, number in self.found(NORM_1)]

    def settle(self, field: str, value: object, source: str) -> None:
        """Note where a value came from."""
        self.inferences.append(Inference(field, value, source))

    def heads(self, hidden_size: int) -> tuple[int, int]:
        """Return the count and the width of the heads: a checkpoint has their product, and rarely a trace of either."""
        packed = self.names.get((Q, K, V))
        width = self.shape((Q, K, V))[0] // 3 if packed else self.shape(Q)[0]
        said = self.hints.num_attention_heads, self.hints.head_dim
        if Q_NORM in self.names:
            exact, source = self.shape(Q_NORM)[0], "the shape of its query norm"
        elif OUT in self.layouts[0].optional and not self.has(OUT):
            exact, source = 1, "the missing output projection"
        elif said == (None, None):
            counts = head_counts(width)
            if OUT in self.layouts[0].optional and width == hidden_size:
                counts.remove(1)  # a single head as wide as the model has no output projection
            self.open["num_attention_heads"] = counts
            return 1, width
        elif said[0] is None:
            exact, source = max(1, width // (said[1] or width)), f"head_dim {said[1]} in a width of {width}"
        else:
            exact, source = said[0], ""
        count, head_dim = said[0] or exact, said[1] or width // exact
        if count != exact or count * head_dim != width:
            raise MappingError(
                f"num_attention_heads {said[0]} and head_dim {said[1]} do not fit: the heads of this checkpoint are "
                f"{width} wide together" + (f", and {exact} by {source}" if source else "")
            )
        if source:
            self.settle("num_attention_heads", count, source)
        return count, head_dim

    def poolings(self, layout: Layout, has_class_token: bool) -> tuple[str, ...]:
        """Return what a model of this layout may pool, given whether it has a class token."""
        if HEAD in self.names and not self.has(HEAD):
            return ("none",)
        if layout.mean_has_class_token:
            return layout.poolings
        return ("cls",) if has_class_token else ("mean",)

    def pooling(self, has_class_token: bool) -> str:
        """Return what is pooled; before release 1.16 the checkpoint is the same for class token and mean."""
        possible = sorted({pooling for layout in self.layouts for pooling in self.poolings(layout, has_class_token)})
        said = self.hints.pooling
        if possible == ["none"]:
            self.settle("pooling", "none", "the missing head (num_classes=0), without which every token is returned")
            return "none"
        if said is not None and said not in possible:
            raise MappingError(
                f"pooling={said!r} does not fit: this checkpoint was trained with {' or '.join(possible)}"
            )
        if said is None and len(possible) > 1:
            self.open["pooling"] = possible
        elif said is None:
            decides = all(len(layout.poolings) == 1 for layout in self.layouts)
            source = "the layout" if decides else "the class token" if has_class_token else "the missing class token"
            self.settle("pooling", possible[0], source)
        return said or possible[0]

    def layout(self, pooling: str, has_class_token: bool, hidden_size: int, head_dim: int) -> Layout:
        """Return the newest layout that fits; some have the same names and compute something else."""
        fitting = [
            layout
            for layout in self.layouts
            if "pooling" in self.open or pooling in self.poolings(layout, has_class_token)
        ]
        fitting.sort(key=lambda layout: layout.fault is not None)
        said = self.hints.scale(hidden_size, head_dim)
        different = {(layout.scale if said is None else "", layout.fault): layout for layout in fitting}
        if len(different) > 1:
            self.open["layout"] = [layout.title for layout in different.values()]
        opened = [layout for layout in fitting if layout.fault is None] or fitting
        of_that_scale = [layout for layout in opened if layout_scale(layout, hidden_size, head_dim) == said]
        return (of_that_scale or opened)[-1]

    def patches(self, class_rows: int) -> int | None:
        """Return the count of the patches, which a position table has; sines and cosines say nothing."""
        if POSITIONS not in self.names:
            return None
        return self.shape(POSITIONS)[-2] - (class_rows if self.layouts[0].class_token_has_position else 0)

    def geometry(
        self, numbers: int, patches: int | None
    ) -> tuple[tuple[int, int] | None, tuple[int, int] | None, int | None]:
        """Return native image size, patch size and channels; None for what is open.

        Args:
            numbers: Of one patch, over its channels, which is all that a checkpoint has of them.
            patches: Of an image, where they are counted.
        """
        hints = self.hints
        said = None if hints.image_size is None else pair(hints.image_size)
        if hints.patch_size is None:
            patch_sizes = _patch_sizes(numbers, hints.num_channels)
        else:
            patch_sizes = [size for size in [pair(hints.patch_size)] if numbers % (size[0] * size[1]) == 0]
        counts = {numbers // (height * width) for height, width in patch_sizes}
        if not patch_sizes or (hints.num_channels is not None and counts != {hints.num_channels}):
            raise MappingError(
                f"patch_size {hints.patch_size} and num_channels {hints.num_channels} do not fit: a patch has "
                f"{numbers} numbers"
            )
        patch_sizes = [size for size in patch_sizes if said is None or _cuts(said, size, patches)]
        if not patch_sizes:
            counted = "" if patches is None else f"; the position table is for {patches} patches"
            raise MappingError(
                f"image_size {hints.image_size} does not fit: expected whole patches of {hints.patch_size or numbers} "
                f"{'pixels' if hints.patch_size else 'numbers'}{counted}"
            )
        image_size = said or self.image_size(patch_sizes, patches)
        if hints.patch_size is None:
            self.open["patch_size"] = patch_sizes[: SHOWN if hints.num_channels else FEW]
            return image_size, None, None
        (count,) = counts
        if hints.num_channels is None:
            self.settle("num_channels", count, f"the {numbers} numbers of a patch")
        return image_size, patch_sizes[0], count

    def image_size(self, patch_sizes: Sequence[tuple[int, int]], patches: int | None) -> tuple[int, int] | None:
        """Return the native image size of a live module whose patches make a square; it is open otherwise."""
        possible = [] if patches is None else grids(patches)
        if self.live and patches is not None and square_grid(patches):
            return image_sizes(patches, patch_sizes[0])[0]
        pairs = itertools.product(enumerate(patch_sizes[:FEW]), enumerate(possible))
        ranked = {
            (rows * height, columns * width): None
            for (_, (height, width)), (_, (rows, columns)) in sorted(
                pairs, key=lambda ranks: ranks[0][0] + 4 * ranks[1][0]
            )
        }
        self.open["image_size"] = list(ranked)[:FEW]
        return None


def _pattern(name: str) -> re.Pattern[str]:
    """Return the expression for the names of the tensors that one line of a table covers."""
    escaped = re.escape(name)
    for placeholder, number in NUMBERS.items():
        escaped = escaped.replace(re.escape(placeholder), number)
    return re.compile(escaped + LEAF)


USUAL_CHANNELS = (3, 1, 4, 2)
FEW = 12  # sizes that are named where many fit


def _patch_sizes(numbers: int, num_channels: int | None) -> list[tuple[int, int]]:
    """Return the patches that have so many numbers: those of usual channels first, squares before others."""
    counts = divisors(numbers) if num_channels is None else [num_channels] if numbers % num_channels == 0 else []
    counts.sort(key=lambda count: USUAL_CHANNELS.index(count) if count in USUAL_CHANNELS else len(USUAL_CHANNELS))
    sizes = [(count, size) for count in counts for size in grids(numbers // count)]
    sizes.sort(key=lambda one: (one[0] not in (*USUAL_CHANNELS, num_channels), one[1][0] != one[1][1]))
    return [size for _, size in sizes]


def _cuts(image_size: tuple[int, int], patch_size: tuple[int, int], patches: int | None) -> bool:
    """Tell whether these patches cut this image into so many."""
    (height, width), (rows, columns) = image_size, patch_size
    whole = height % rows == 0 and width % columns == 0
    return whole and patches in (None, (height // rows) * (width // columns))


class VitPytorchFormat(Format):
    """Models and state dicts of vit-pytorch."""

    name = "vit_pytorch"
    suffixes: tuple[str, ...] = (".pt", ".pth", ".bin", ".safetensors")

    def matches_names(self, names: Collection[str]) -> bool:
        """Tell whether a state dict with these names is of vit-pytorch, wrapped or not."""
        prefixes = _prefixes(names)
        return any(name.startswith(f"{prefix}transformer.") for prefix in prefixes for name in names)

    def names_of_others(self, names: Collection[str]) -> str | None:
        """Return the model of the package that has these names and does not open yet, wrapped or not."""
        family = family_of(names)
        return family and f"vit-pytorch's {family}"

    def strangers(self, names: Collection[str]) -> list[str]:
        """Return the names outside the prefix of the model that none of the package's wrappers has."""
        prefixes = _prefixes(names)
        if len(prefixes) != 1 or not prefixes[0]:
            return []
        outside = [name for name in names if not name.startswith(prefixes[0])]
        known = ignored_names(outside, [*BESIDE, *UNUSED.items()])
        return [name for name in outside if name not in known]

    def matches_module(self, module: nn.Module) -> bool:
        """Tell whether this very module is one of the package's plain ViTs, or derived from one."""
        return any(_file(base) is not None for base in type(module).__mro__)

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration off a live module, which knows its heads, its attention scale and its dropouts."""
        if overridden := _overridden(type(module)):
            raise ExportError(
                f"{class_path(module)} is derived from a ViT of vit-pytorch and computes something of its own, which "
                "plain-vit cannot read:",
                overridden,
            )
        state = module.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in UNUSED}
        layout = _layouts_of(shapes, hints.layout)[0]
        if layout.file == "vit_with_decorr":
            reads_norm = _mlp_reads_norm(module.get_submodule("transformer.layers.0.1"))
            hints = replace(hints, layout=f"vit_with_decorr {'1.21.5' if reads_norm else '1.15.0'}")
        description = self._describe(state, _live_hints(module, layout, hints), live=True)
        config = _with_dropouts(description.config, module, layout.names)
        if changed := _changed_parts(module, config, layout):
            raise ExportError("this model has other parts than the class of vit-pytorch that it is of:", changed)
        given = [inference for inference in description.inferences if inference.source == "the caller"]
        return replace(description, config=config, inferences=given)

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration off the names and shapes of a state dict; the package writes no settings."""
        return self._describe(tensors, hints, live=False)

    def _describe(self, tensors: StateDict, hints: Hints, live: bool) -> Description:
        prefixes = _prefixes(tensors)
        if len(prefixes) > 1:
            raise AmbiguousCheckpointError(
                "there are several models of vit-pytorch side by side; which one is meant?",
                {"key": [prefix.rstrip(".") for prefix in prefixes]},
            )
        if not prefixes:
            raise MappingError(
                "there is no patch embedding of vit-pytorch among the tensors, such as", [ANCHOR.pattern]
            )
        (prefix,) = prefixes
        shapes = {
            name.removeprefix(prefix): tuple(tensor.shape)
            for name, tensor in tensors.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in UNUSED
        }
        reader = _Reader(shapes, hints, live)
        config, layout = reader.read()
        ignored = [*(BESIDE if prefix else ()), *UNUSED.items()]
        if 0 in shapes.get("cls_token", ()):
            ignored.append(("cls_token", "it has no rows: the mean of the patches is pooled"))
        return Description(config, layout.title, reader.inferences, ignored, prefix)

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the conversion table of a layout, by its title, or of the one in a release that holds this model."""
        target = next((known for known in LAYOUTS if known.title == layout), None)
        return layout_rows(target or choose_layout(config, layout or _installed()), config)

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build the class of the installed release that expresses this config.

        Raises:
            ExportError: lists every part that none of its classes can express.
        """
        release = _installed()
        target = choose_layout(config, layout or release)
        if target not in layouts_at(release):
            raise ExportError(
                f"the installed vit-pytorch {release} has no class in the layout {target.title}: install that release, "
                "or write the state dict alone with to_checkpoint"
            )
        return _build(target, config)

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        """Write the state dict, with `torch.save` or as safetensors; the format has no place for a processor."""
        target = choose_layout(config, layout or RELEASE)
        state = revert(layout_rows(target, config), tensors, config)
        if CLASS_TOKEN in target.names and not config.use_class_token and CLASS_TOKEN not in target.optional:
            like = next(iter(state.values()))
            state["cls_token"] = like.new_empty((1,) * (target.token_axes - 2) + (0, config.hidden_size))
        write_state_dict(state, path)


def _file(kind: type) -> str | None:
    """Return the file of the package that a class is from, as it is called today."""
    package, *file = kind.__module__.split(".")
    if package != "vit_pytorch" or len(file) != 1:
        return None
    name = RENAMED_FILES.get(file[0], file[0])
    return name if CLASSES.get(name) == kind.__name__ else None


def _prefixes(names: Collection[str]) -> list[str]:
    """Return what precedes the names of each model of the package among these."""
    matches = (ANCHOR.fullmatch(name) for name in names)
    return sorted({match["prefix"] for match in matches if match and not match["prefix"].endswith("patch_to_emb.")})


def _live_hints(module: nn.Module, layout: Layout, hints: Hints) -> Hints:
    """Return the hints that a live module makes superfluous, and what the caller said beyond them."""
    names = layout.names
    attentions = [module.get_submodule(path) for path in _attention_paths(module, names)]
    known: dict[str, Any] = {"num_attention_heads": _same("heads", [attention.heads for attention in attentions])}
    if Q_NORM not in names:
        known["attention_scale"] = _same("attention scale", [attention.scale for attention in attentions])
    if "cls" in layout.poolings:
        known["pooling"] = getattr(module, "pool", "cls")  # releases before 0.5.0 could pool nothing else
    known["patch_size"] = _patch_size(module)
    table = getattr(module, "pos_embedding", None)
    if table is not None and POSITIONS not in names and not table.is_meta:
        known["image_size"] = tuple(
            count * side for count, side in zip(_sincos_grid(table), known["patch_size"], strict=True)
        )
    for field, value in known.items():
        said = getattr(hints, field)
        if said is not None and said != value and (said, said) != value:
            raise ValueError(f"{field}={said!r} was given, and the module itself says {value!r}: leave it out")
    return replace(hints, **known)


def _attention_paths(module: nn.Module, names: Names) -> list[str]:
    """Return the paths of the attentions of a live module."""
    pattern = _pattern(names.get((Q, K, V)) or names[Q])
    return [name.rpartition(".")[0] for name, _ in module.named_modules() if pattern.fullmatch(name)]


def _same(what: str, values: list[Any]) -> Any:
    if len(set(values)) != 1:
        raise ExportError(f"the layers of this model differ in their {what}, and ours have one:", [str(values)])
    return values[0]


def _patch_size(module: nn.Module) -> tuple[int, int]:
    """Return the patch size, from the einops layer that cuts the image or the attribute of the oldest releases."""
    if hasattr(module, "to_patch_embedding"):
        lengths: Any = module.get_submodule("to_patch_embedding.0")
        return lengths.axes_lengths["p1"], lengths.axes_lengths["p2"]
    return module.patch_size, module.patch_size  # type: ignore[return-value]


# Attributes that belong to the decorrelation loss, and those of a whole model that keep its arguments.
SILENT_ATTRIBUTES = {"has_decorr_loss", "decorr_layer_outputs_across_depth"}
KEPT_ARGUMENTS = {"args", "kwargs", "dim", "num_classes"}


def _overridden(kind: type) -> list[str]:
    """Return the methods in which a derived class may compute something else than the class of the package."""
    derived: list[type] = []
    for base in kind.__mro__:
        if _file(base) is not None:
            return [f"{base.__qualname__}.{name}" for base in derived for name, value in vars(base).items()
                    if callable(value) and name != "__init__"]  # fmt: skip
        if not base.__module__.startswith("vit_pytorch."):  # the package's own students compute the same
            derived.append(base)
    return []


def _changed_parts(module: nn.Module, config: PlainViTConfig, layout: Layout) -> list[str]:
    """Return what sets a live module apart from a fresh one of its class, such as an activation put in later."""
    kind = next((base for base in type(module).__mro__ if _file(base) is not None), None)
    copied = kind is None  # a copy of the class, for which its owner says format=
    if kind is None:
        kind = _class_of(layout.file)
    with torch.device("meta"):
        fresh = kind(**_arguments(kind, config))
    if Q_NORM not in layout.names:
        for path in _attention_paths(module, layout.names):  # read into our config
            fresh.get_submodule(path).scale = getattr(module.get_submodule(path), "scale", None)
    vars(fresh).update({name: vars(module)[name] for name in KEPT_ARGUMENTS & vars(module).keys()})
    same_classes = {class_path(module): class_path(fresh)}
    if copied:
        pairs = zip(module.modules(), fresh.modules(), strict=False)
        same_classes |= {class_path(one): class_path(other) for one, other in pairs
                         if type(one).__name__ == type(other).__name__}  # fmt: skip
    changed = differences(module, fresh, same_classes, SILENT_ATTRIBUTES, without="decorr_loss.")
    table = vars(module).get("pos_embedding")
    if isinstance(table, torch.Tensor) and not table.is_meta:
        positions = SinCos2DPositionEmbedding(config)(config.grid_size, table.new_empty(0, dtype=torch.float32))
        if table.shape != positions.shape or not torch.allclose(table.float(), positions, rtol=0, atol=1e-6):
            changed.append("pos_embedding holds other values than the sines and cosines of its grid")
    return changed


def _class_of(file: str) -> type[nn.Module]:
    """Return the class that a file of the installed package has.

    Raises:
        ExportError: The package is not installed, or no longer has the file.
    """
    try:
        package = importlib.import_module(f"vit_pytorch.{file}")
    except ImportError as error:
        raise ExportError(f"a module of vit-pytorch needs the package: pip install vit-pytorch=={RELEASE}") from error
    kind: type[nn.Module] = getattr(package, CLASSES[file])
    return kind


def _mlp_reads_norm(mlp: nn.Module) -> bool:
    """Tell whether an MLP of vit_with_decorr reads its norm's result: before release 1.21.5 it does not."""
    read: list[torch.Tensor] = []
    hook = mlp.get_submodule("net").register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    tokens = torch.ones_like(next(mlp.parameters()).detach()[None, None])
    mlp(tokens)
    hook.remove()
    return read[0] is not tokens


def _sincos_grid(table: torch.Tensor) -> tuple[int, int]:
    """Return the grid of a table of sines and cosines: the sine of the row leaves 0 where the second row begins."""
    count, width = table.shape
    later = table[:, width // 2].nonzero()
    columns = int(later[0]) if len(later) else count
    return count // columns, columns


def _with_dropouts(config: PlainViTConfig, module: Any, names: Names) -> PlainViTConfig:
    """Return the config with the dropouts of a live module: one for the blocks, one for the embeddings."""
    paths = _attention_paths(module, names)
    rates: dict[str, list[float]] = {"weights": [], "blocks": [], "head": [0.0]}
    for path, child in module.named_modules():
        if isinstance(child, nn.Dropout) and "." in path:
            parent, _, name = path.rpartition(".")
            kind = (
                "head"
                if path.startswith("mlp_head")
                else "weights"
                if parent in paths and name == "dropout"
                else "blocks"
            )
            rates[kind].append(child.p)
    config = copy.deepcopy(config)
    config.hidden_dropout_prob = _same("dropout", rates["blocks"] or [0.0])
    config.attention_probs_dropout_prob = _same("dropout", rates["weights"] or [0.0])
    config.classifier_dropout_prob = rates["head"][-1]
    config.embedding_dropout_prob = (
        module.dropout.p if isinstance(getattr(module, "dropout", None), nn.Dropout) else 0.0
    )
    config.patch_dropout_prob = module.patch_dropout.prob if hasattr(module, "patch_dropout") else 0.0
    return config


# Writing


def choose_layout(config: PlainViTConfig, layout: str) -> Layout:
    """Return the layout that holds this model.

    Args:
        config: Our configuration.
        layout: A release, or the title of a layout.

    Raises:
        ExportError: lists what the nearest of them cannot express.
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


# Fields that a state dict has no part in: sizes that follow from it, and what matters in training alone.
SIZES = {
    "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size", "image_size",
    "patch_size", "num_channels",
}  # fmt: skip
RATES = {
    "hidden_dropout_prob", "embedding_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob",
    "drop_path_rate", "patch_dropout_prob",
}  # fmt: skip


def inexpressible(config: PlainViTConfig, layout: Layout) -> list[str]:
    """Return every part of a model that a layout has no place for."""
    has = layout.names
    settled = layout_fields(layout, config)
    free = SIZES | RATES | NEUTRAL_FIELDS | {"pooling", "attention_scale"}
    free |= {"use_class_token"} - settled.keys()
    if config.patch_projection != "resnet":  # a kernel and a dense layer are the same, in another order
        free |= {"patch_projection", "stem_style"} - settled.keys()
    free |= {"num_register_tokens"} if REGISTERS in has and config.num_register_tokens else set()
    free |= {"representation_size"} if HIDDEN in has and config.representation_size else set()
    parts = [
        f"{field} = {getattr(config, field)!r}: {wanted!r} there"
        for field, wanted in {**_defaults(), **settled}.items()
        if field not in free and getattr(config, field) != wanted
    ]
    parts += [] if layout.fault is None else [f"it is no plain ViT: {layout.fault}"]
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


NEEDED = {REGISTERS: "num_register_tokens", HIDDEN: "representation_size"}


def _defaults() -> dict[str, Any]:
    """Return the default of every field that our config adds to what all configs have."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name: field.default for field in dataclasses.fields(PlainViTConfig) if field.name not in inherited}


def _installed() -> str:
    """Return the installed release, or the newest known one where none is."""
    try:
        return importlib.metadata.version("vit-pytorch")
    except importlib.metadata.PackageNotFoundError:
        return RELEASE


def _build(layout: Layout, config: PlainViTConfig) -> nn.Module:
    """Build the class of a layout, unless it cannot be trained on as ours can."""
    file = layout.file
    if file == "simple_vit" and config.patch_dropout_prob:
        file = "simple_vit_with_patch_dropout"
    kind = _class_of(file)
    accepted = inspect.signature(kind).parameters
    dropout = config.hidden_dropout_prob
    expressed = {
        "hidden_dropout_prob": dropout if "dropout" in accepted else 0,
        "embedding_dropout_prob": config.embedding_dropout_prob if "emb_dropout" in accepted else 0,
        "attention_probs_dropout_prob": dropout if "dropout" in accepted else 0,
        "classifier_dropout_prob": dropout if HIDDEN in layout.names else 0,
        "drop_path_rate": 0,
        "patch_dropout_prob": config.patch_dropout_prob if "patch_dropout" in accepted else 0,
    }
    parts = [
        f"{field} = {getattr(config, field)}: {rate} there"
        for field, rate in expressed.items()
        if (getattr(config, field) or 0) != (rate or 0)
    ]
    if parts:
        raise ExportError(
            f"vit-pytorch's {file} cannot be trained on with these rates; set them in model.config:", parts
        )
    return kind(**_arguments(kind, config))


def _arguments(kind: type[nn.Module], config: PlainViTConfig) -> dict[str, Any]:
    """Return the arguments of a class of the package, those that it has."""
    dropout, embedding_dropout = config.hidden_dropout_prob, config.embedding_dropout_prob
    arguments = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_classes": config.num_labels,
        "dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "mlp_dim": config.intermediate_size,
        "channels": config.num_channels,
        "dim_head": config.head_dim,
        "pool": "cls" if config.use_class_token and config.pooling != "mean" else "mean",
        "dropout": dropout,
        "emb_dropout": dropout if embedding_dropout is None else embedding_dropout,
        "patch_dropout": config.patch_dropout_prob,
        "num_register_tokens": config.num_register_tokens,
        "use_cls_token": config.use_class_token,
    }
    accepted = inspect.signature(kind).parameters
    return {name: value for name, value in arguments.items() if name in accepted}


VIT_PYTORCH = VitPytorchFormat()
