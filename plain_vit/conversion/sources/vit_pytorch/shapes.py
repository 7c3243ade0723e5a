"""What the names and shapes of a checkpoint show: possible layouts, our config, and missing settings."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....configuration_plain_vit import PlainViTConfig
from ....errors import SHOWN, AmbiguousCheckpointError, ExportError, MappingError
from ....layers_plain_vit import ShiftedPatchEmbeddings
from ...tables.data_files import data_file
from ...tables.engine import INDEX, LEAF
from ...tables.format import Hints, Inference, pair
from ...tables.infer import divisors, grids, head_counts, size_fault, square_grid
from .layouts import (
    CLASS_TOKEN,
    COLUMNS,
    FC1,
    HEAD,
    HEAD_MIX,
    HIDDEN,
    LAYOUTS,
    OUT,
    POOLED_NORM,
    POSITIONS,
    PROJECTION,
    Q_HEAD_NORM,
    Q_NORM,
    REGISTERS,
    ROWS,
    SCORES_MIX,
    K,
    Layout,
    Q,
    V,
    in_pooler,
)
from .tables import layout_fields, layout_scale, layouts_at

# Placeholders in the tables: for the number of a layer, or of its attention (even) or MLP (odd).
NUMBERS = {"{}": INDEX, "{even}": r"(\d*[02468])", "{odd}": r"(\d*[13579])"}
USUAL_CHANNELS = (3, 1, 4, 2)
FEW = 12  # sizes to list if many fit


def layouts_of(shapes: Mapping[str, tuple[int, ...]], release: str | None) -> list[Layout]:
    """Return the layouts whose names and shapes match a checkpoint exactly.

    Raises:
        MappingError: lists what is missing and left over, compared with the closest layout.
    """
    misfits = {layout: _misfits(layout, shapes) for layout in (LAYOUTS if release is None else layouts_at(release))}
    nearest = min(misfits, key=lambda layout: len(misfits[layout]))
    if misfits[nearest]:
        family = family_of(shapes)
        other = "" if family is None else f" They look like {family}, which plain-vit does not open yet."
        raise MappingError(
            f"the tensors match no plain ViT of vit-pytorch.{other} Compared with the nearest, {nearest.title}:",
            misfits[nearest],
        )
    return [layout for layout, faults in misfits.items() if not faults]


def head_of(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the path of the classifier, found by the other tensors: they fit a layout with a classifier there."""
    for place in dict.fromkeys(layout.names[HEAD] for layout in LAYOUTS if HEAD in layout.names):
        outside = {name: shape for name, shape in shapes.items() if not name.startswith(f"{place}.")}
        if any(layout.names.get(HEAD) == place and fits(layout, with_head(outside, place)) for layout in LAYOUTS):
            return place
    return None


def with_head(shapes: Mapping[str, tuple[int, ...]], place: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes with a classifier of one class added."""
    return {**shapes, f"{place}.weight": (1, 1), f"{place}.bias": (1,)}


def fits(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether all names and shapes of a checkpoint match a layout."""
    return not _misfits(layout, shapes)


def _misfits(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names and shapes of a checkpoint that do not fit a layout."""
    found: set[str | tuple[str, ...]] = set()
    left_over = []
    patterns = {ours: name_pattern(name) for ours, name in layout.names.items()}
    for name, shape in shapes.items():
        ours = next((ours for ours, pattern in patterns.items() if pattern.fullmatch(name)), None)
        if ours is None or not _shape_fits(layout, ours, name, shape):
            left_over.append(f"left over: {name!r} of shape {shape}")
        else:
            found.add(ours)
    needed = [name for ours, name in layout.names.items() if ours not in found and ours not in layout.optional]
    return [*(f"missing: {name!r}" for name in needed), *left_over]


def _shape_fits(layout: Layout, ours: str | tuple[str, ...], name: str, shape: tuple[int, ...]) -> bool:
    """Check a shape that distinguishes layouts with equal names."""
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


def family_of(names: Collection[str]) -> str | None:
    """Return the unsupported model of the package that has these names; None if there is none."""
    for family, patterns in data_file("vit_pytorch/families.json")["families"].items():
        if all(_has(names, pattern.lstrip("!")) != pattern.startswith("!") for pattern in patterns):
            return family
    return None


def _has(names: Collection[str], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in names)


class Reader:
    """Reads our config from the names and shapes of a checkpoint; records inferences and missing settings."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], hints: Hints, live: bool):
        self.hints = hints
        self.shapes = shapes
        self.live = live  # a live module determines its class and patch size
        layouts = layouts_of(shapes, hints.layout)
        plain = [layout for layout in layouts if layout.fault is None]
        if not plain:
            raise ExportError(
                "plain-vit does not open this model of vit-pytorch yet:",
                [f"{layout.title}: {layout.fault}" for layout in layouts],
            )
        self.layouts = plain if live else layouts
        self.names = self.layouts[0].names  # all these layouts have the same names
        if hints.num_channels is None:  # some classes have a fixed number of channels
            self.hints = replace(hints, num_channels=self.layouts[0].fields.get("num_channels"))
        self.inferences: list[Inference] = []
        self.open: dict[str, Sequence[object]] = {}

    def read(self) -> tuple[PlainViTConfig, Layout]:
        """Return our config and the layout.

        Raises:
            AmbiguousCheckpointError: lists all settings that neither checkpoint nor hints determine.
        """
        hidden_size, pixels = self.shape(PROJECTION)
        (class_rows,) = self.shape(CLASS_TOKEN)[-2:-1] or (1,) if self.has(CLASS_TOKEN) else (0,)
        num_labels = self.shape(HEAD)[0] if self.has(HEAD) else 0
        fields: dict[str, Any] = {
            "hidden_size": hidden_size,
            "num_hidden_layers": self.num_layers(),
            "intermediate_size": self.shape(FC1)[0],
            "num_labels": num_labels,
            "use_class_token": class_rows > 0,
            "patch_projection": "linear",
            "initialization": "vit_pytorch",
            "num_register_tokens": self.shape(REGISTERS)[0] if self.has(REGISTERS) else 0,
            "representation_size": self.shape(HIDDEN)[0] if self.has(HIDDEN) else None,
            "num_branches": self.num_branches(),
            "pooling_num_layers": self.num_class_layers(),
            **self.layouts[0].fields,
        }
        heads, head_dim = self.heads(hidden_size)
        pooling = self.pooling(class_rows > 0)
        layout = self.layout(pooling, class_rows > 0, hidden_size, head_dim)
        views = ShiftedPatchEmbeddings.num_views if fields["patch_projection"] == "shifted" else 1
        image_size, patch_size, num_channels = self.geometry(pixels // views, self.patches(class_rows))
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
            # For smaller images, the package uses the first rows of the table, whatever the shape of the image.
            fields["position_resampling"] = "truncate"
        scale = self.hints.scale(hidden_size, head_dim)
        if scale is None:
            scale = layout_scale(layout, hidden_size, head_dim)
            self.settle("attention_scale", f"{layout.scale}**-0.5", f"what {layout.title} computes")
        fields["attention_scale"] = None if scale == head_dim**-0.5 else scale
        fields |= layout.fields
        config = PlainViTConfig(**fields)
        for field in ("layer_norm_eps", "hidden_act"):
            if (said := getattr(self.hints, field)) is not None:  # for a modified copy of the package
                fields[field] = said
            else:
                self.settle(field, getattr(config, field), "vit-pytorch, the only value there")
        if self.hints.layout is not None:
            self.settle("layout", layout.title, "the caller")
        return PlainViTConfig(**fields), layout

    def has(self, ours: str) -> bool:
        """Return whether the checkpoint has this part of our model."""
        return ours in self.names and any(self.found(ours))

    def found(self, ours: str | tuple[str, ...]) -> Iterator[re.Match[str]]:
        """Return the names that belong to this part of our model, matched with its entry in the table."""
        return filter(None, map(name_pattern(self.names[ours]).fullmatch, self.shapes))

    def shape(self, ours: str | tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of the weight of this part, in the first layer that has it.

        Raises:
            MappingError: No layer has it.
        """
        for match in self.found(ours):
            if not match[0].endswith(".bias"):
                return self.shapes[match[0]]
        fault = f"missing: {self.names[ours] + '.weight'!r}"
        raise MappingError(f"the tensors of a ViT of vit-pytorch ({self.layouts[0].title}) are not all here:", [fault])

    def num_layers(self) -> int:
        """Return the number of blocks."""
        return 1 + max(int(match[1]) for match in self.found(FC1)) // (2 if "{odd}" in self.names[FC1] else 1)

    def num_branches(self) -> int:
        """Return the number of attentions in a block."""
        return 1 if self.names[FC1].count("{}") < 2 else 1 + max(int(match[2]) for match in self.found(FC1))

    def num_class_layers(self) -> int | None:
        """Return the number of blocks in the pooling; None if it has none."""
        dense = in_pooler(FC1)
        return 1 + max(int(match[1]) for match in self.found(dense)) if dense in self.names else None

    def settle(self, field: str, value: object, source: str) -> None:
        """Record a value and its origin."""
        self.inferences.append(Inference(field, value, source))

    def heads(self, hidden_size: int) -> tuple[int, int]:
        """Return the number and the width of the heads; most checkpoints show only their product."""
        packed = self.names.get((Q, K, V))
        width = self.shape((Q, K, V))[0] // 3 if packed else self.shape(Q)[0]
        said = self.hints.num_attention_heads, self.hints.head_dim
        if Q_NORM in self.names:
            exact, source = self.shape(Q_NORM)[0], "the shape of its query norm"
        elif Q_HEAD_NORM in self.names:
            exact, source = width // self.shape(Q_HEAD_NORM)[0], "the width of its query norm"
        elif mix := {HEAD_MIX, SCORES_MIX} & self.names.keys():
            exact, source = self.shape(mix.pop())[0], "the shape of what mixes them"
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
        """Return the possible poolings of this layout, given whether it has a class token."""
        if HEAD in self.names and not self.has(HEAD):
            return ("none",)
        if layout.mean_has_class_token:
            return layout.poolings
        return ("cls",) if has_class_token else ("mean",)

    def pooling(self, has_class_token: bool) -> str:
        """Return the pooling; before release 1.16, checkpoints are the same for class token and mean."""
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
        """Return the newest layout that fits; layouts with the same names may compute different outputs."""
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
        """Return the number of patches in the position table; None for sine-cosine positions."""
        if ROWS in self.names:
            return self.shape(ROWS)[0] * self.shape(COLUMNS)[0]
        if POSITIONS not in self.names:
            return None
        return self.shape(POSITIONS)[-2] - (class_rows if self.layouts[0].class_token_has_position else 0)

    def geometry(
        self, numbers: int, patches: int | None
    ) -> tuple[tuple[int, int] | None, tuple[int, int] | None, int | None]:
        """Return the native image size, the patch size and the number of channels; None for missing ones.

        Args:
            numbers: Number of values in a patch: the product of height, width and channels.
            patches: Number of patches of an image, if known.
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
        patch_sizes = [size for size in patch_sizes if said is None or _cuts(said, size, self.grids(patches))]
        if not patch_sizes:
            if fault := self.overlap(patches):
                raise MappingError(fault)
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

    def overlap(self, patches: int | None) -> str | None:
        """Return why the caller's sizes do not give this number of patches; None if a size is not given."""
        image_size, patch_size = self.hints.image_size, self.hints.patch_size
        if image_size is None or patch_size is None or patches is None:
            return None
        return size_fault(pair(image_size), pair(patch_size), [patches])

    def image_size(self, patch_sizes: Sequence[tuple[int, int]], patches: int | None) -> tuple[int, int] | None:
        """Return the native image size, if the grid and the patch size are known; otherwise record it as missing."""
        possible = self.grids(patches) or []
        is_known = ROWS in self.names or (self.live and patches is not None and square_grid(patches) is not None)
        if is_known and self.hints.patch_size is not None:
            (rows, columns), (height, width) = possible[0], patch_sizes[0]
            return rows * height, columns * width
        pairs = itertools.product(enumerate(patch_sizes[:FEW]), enumerate(possible))
        ranked = {
            (rows * height, columns * width): None
            for (_, (height, width)), (_, (rows, columns)) in sorted(
                pairs, key=lambda ranks: ranks[0][0] + 4 * ranks[1][0]
            )
        }
        self.open["image_size"] = list(ranked)[:FEW]
        return None

    def grids(self, patches: int | None) -> list[tuple[int, int]] | None:
        """Return the possible grids with this number of patches; None if any grid is possible."""
        if ROWS in self.names:
            return [(self.shape(ROWS)[0], self.shape(COLUMNS)[0])]
        return None if patches is None else grids(patches)


def name_pattern(name: str) -> re.Pattern[str]:
    """Return a regular expression for the tensor names that an entry of a table covers."""
    escaped = re.escape(name)
    for placeholder, number in NUMBERS.items():
        escaped = escaped.replace(re.escape(placeholder), number)
    return re.compile(escaped + LEAF)


def _patch_sizes(numbers: int, num_channels: int | None) -> list[tuple[int, int]]:
    """Return the patch sizes with this number of values: usual channel counts first, squares before others."""
    counts = divisors(numbers) if num_channels is None else [num_channels] if numbers % num_channels == 0 else []
    counts.sort(key=lambda count: USUAL_CHANNELS.index(count) if count in USUAL_CHANNELS else len(USUAL_CHANNELS))
    sizes = [(count, size) for count in counts for size in grids(numbers // count)]
    sizes.sort(key=lambda one: (one[0] not in (*USUAL_CHANNELS, num_channels), one[1][0] != one[1][1]))
    return [size for _, size in sizes]


def _cuts(image_size: tuple[int, int], patch_size: tuple[int, int], possible: Sequence[tuple[int, int]] | None) -> bool:
    """Return whether this patch size divides the image into one of the possible grids."""
    (height, width), (rows, columns) = image_size, patch_size
    whole = height % rows == 0 and width % columns == 0
    return whole and (possible is None or (height // rows, width // columns) in possible)
