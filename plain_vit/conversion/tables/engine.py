"""Conversion engine: one table of rows maps a source's tensors to ours, and in reverse.

A row names a module or a tensor of the source, its counterpart in our model, and the transform between them. Names are
matched as a whole, `{}` matches an index, and the order of the rows has no effect. Every source tensor must be used
exactly once, and every tensor of our model filled exactly once; one error lists all violations.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TypeVar

import torch

from ...configuration_plain_vit import PlainViTConfig
from ...errors import MappingError

T = TypeVar("T")

Tensors = Sequence[torch.Tensor]

INDEX = r"(0|[1-9]\d*)"
LEAF = r"(\.weight|\.bias)?"
LEAVES = ("", ".weight", ".bias")


@dataclass(frozen=True)
class Transform:
    """The conversion of the tensors of one row, in both directions.

    Both functions also work on the meta device.

    Args:
        name: Name of the transform in a table.
        to_ours: Converts the source tensors of the row to ours.
        to_source: The exact inverse of `to_ours`.
    """

    name: str
    to_ours: Callable[[Tensors, PlainViTConfig], Tensors]
    to_source: Callable[[Tensors, PlainViTConfig], Tensors]

    def __repr__(self) -> str:
        return self.name


IDENTITY = Transform("IDENTITY", lambda tensors, config: tensors, lambda tensors, config: tensors)


@dataclass(frozen=True)
class Row:
    """One line of a conversion table.

    `{}` is an index, the same on both sides. If our name has more indices than the source's, the source stores the
    tensors of all further indices together, and the transform takes or returns our tensors in the order of the indices.

    Args:
        source: Names of modules (for their weight, and for their bias if our model has one) or tensors of the source.
        ours: Names of modules or tensors in our model.
        transform: The transform between them.
    """

    source: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    transform: Transform = IDENTITY

    @property
    def sources(self) -> tuple[str, ...]:
        """All names in the source."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def targets(self) -> tuple[str, ...]:
        """All names in our model."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class _Group:
    """A row with concrete indices: its source tensors and our tensors."""

    sources: tuple[str, ...]
    ours: tuple[str, ...]
    transform: Transform


def convert(
    rows: Sequence[Row],
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    config: PlainViTConfig,
    ignored: Sequence[tuple[str, str]] = (),
    *,
    owned: bool = False,
) -> dict[str, torch.Tensor]:
    """Convert the tensors of a source to ours, strictly.

    Args:
        rows: The table.
        tensors: The source's tensors.
        expected: Our model's state dict, for names and shapes; it may be on the meta device.
        config: Our model's configuration, for the transforms.
        ignored: Patterns of source names (`*` matches anything) that no row needs, each with its reason.
        owned: Whether the caller gives up the tensors: their memory is then reused instead of copied, wherever our
            tensor is a contiguous part of it.

    Returns:
        Contiguous tensors by our names, with the source's dtype and device. No two share a storage.

    Raises:
        MappingError: lists every tensor that is missing, left over, used twice, of a wrong shape or not finite.
    """
    result: dict[str, torch.Tensor] = {}
    for converted in _converted_groups(rows, tensors, expected, config, ignored):
        result |= _take_ownership(converted) if owned else {name: _copy(tensor) for name, tensor in converted.items()}
    return result


def stream(
    rows: Sequence[Row],
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    config: PlainViTConfig,
    ignored: Sequence[tuple[str, str]] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert like `convert`, one row at a time, for sources that do not fit in memory.

    Each source tensor is read once, and the yielded tensors may be views of it. If any name is wrong, nothing is
    yielded. All other errors are raised together at the end, so the output is valid only if the iteration completes.
    """
    for converted in _converted_groups(rows, tensors, expected, config, ignored):
        yield from converted.items()


def _converted_groups(
    rows: Sequence[Row],
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    config: PlainViTConfig,
    ignored: Sequence[tuple[str, str]],
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield our tensors of each group, by name."""
    groups, faults = _groups(rows, expected)
    used = Counter(source for group in groups for source in group.sources)
    faults += [f"{uses} rows use {source!r}" for source, uses in used.items() if uses > 1]
    faults += [
        f"missing: {source!r}, which {group.ours[0]!r} is made from"
        for group in groups
        for source in group.sources
        if source not in tensors
    ]
    left_over = [source for source in tensors if source not in used]
    skipped = ignored_names(left_over, ignored)
    faults += [f"left over: {source!r}" for source in left_over if source not in skipped]
    complete = not faults
    for group in groups:
        if all(source in tensors for source in group.sources):
            given = [tensors[source].detach() for source in group.sources]
            converted, wrong = _convert_group(group, given, expected, config)
            faults += wrong
            if complete and not wrong:
                yield converted
    if faults:
        raise MappingError("the tensors do not fit the model that the configuration describes:", faults)


def _convert_group(
    group: _Group, given: Tensors, expected: Mapping[str, torch.Tensor], config: PlainViTConfig
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return our tensors by name, and the errors found in them."""
    described = ", ".join(
        f"{source!r} of shape {tuple(tensor.shape)}" for source, tensor in zip(group.sources, given, strict=True)
    )
    try:
        converted = group.transform.to_ours(given, config)
    except (RuntimeError, ValueError, IndexError) as error:
        return {}, [f"{described} cannot become {group.ours[0]!r}: {error}"]
    if len(converted) != len(group.ours):
        return {}, [f"{described} makes {len(converted)} tensors: expected {len(group.ours)}, {group.ours[0]!r} and on"]
    faults = []
    for name, tensor in zip(group.ours, converted, strict=True):
        if tensor.shape != expected[name].shape:
            wanted = tuple(expected[name].shape)
            faults.append(f"{described} makes {name!r} of shape {tuple(tensor.shape)}: expected {wanted}")
        elif not tensor.is_floating_point():
            faults.append(f"{described} makes {name!r} of dtype {tensor.dtype}: expected a floating one")
        elif not is_finite(tensor):
            faults.append(f"{described} makes {name!r} with NaN or infinite values")
    return dict(zip(group.ours, converted, strict=True)), faults


def _take_ownership(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each tensor a storage of its own: a copy only if other tensors overlap the memory that it fills."""
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values() if tensor.is_contiguous())
    apart = all(start + nbytes <= later for (start, nbytes), (later, _) in pairwise(spans))
    return {
        name: _within_its_span(tensor) if apart and tensor.is_contiguous() else _copy(tensor)
        for name, tensor in tensors.items()
    }


def _within_its_span(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the same memory, with a storage that covers only this tensor."""
    return torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy()).view(tensor.dtype).reshape(tensor.shape)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite. A finite sum, which is fast, nearly always proves it."""
    return tensor.device.type == "meta" or bool(tensor.sum(dtype=torch.float32).isfinite() or tensor.isfinite().all())


def revert(rows: Sequence[Row], ours: Mapping[str, torch.Tensor], config: PlainViTConfig) -> dict[str, torch.Tensor]:
    """Convert our tensors to the source's, with the same rows in reverse.

    Args:
        rows: The table.
        ours: Our model's state dict.
        config: Our model's configuration, for the transforms.

    Returns:
        Contiguous tensors by the source's names, which share no storage with ours.

    Raises:
        MappingError: lists every tensor that no row or more than one row uses.
    """
    groups, faults = _groups(rows, ours)
    made = Counter(source for group in groups for source in group.sources)
    faults += [f"{times} rows make {source!r}" for source, times in made.items() if times > 1]
    if faults:
        raise MappingError("the table does not fit the model in reverse:", faults)
    result: dict[str, torch.Tensor] = {}
    for group in groups:
        reverted = group.transform.to_source([ours[name].detach() for name in group.ours], config)
        for source, tensor in zip(group.sources, reverted, strict=True):
            result[source] = _copy(tensor)
    return result


def sources_of(rows: Sequence[Row], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the source tensors that each of our tensors is made from.

    Args:
        rows: The table.
        names: The names of our tensors.
    """
    groups, _ = _groups(rows, names)
    return {name: group.sources for group in groups for name in group.ours}


def ignoring(reason: str, *patterns: str) -> tuple[tuple[str, str], ...]:
    """Return patterns of source names that our model does not use, each with the reason."""
    return tuple((pattern, reason) for pattern in patterns)


def ignored_names(names: Collection[str], ignored: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the names that match a pattern, each with the reason of the first pattern that it matches."""
    reasons: dict[str, str] = {}
    for pattern, reason in reversed(ignored):
        reasons.update((name, reason) for name in names if fnmatchcase(name, pattern))
    return reasons


def without_prefix(tensors: Mapping[str, T], prefix: str, ignored: Sequence[tuple[str, str]] = ()) -> dict[str, T]:
    """Remove the model's prefix from the names of a source's tensors; other names are kept.

    Raises:
        MappingError: Two tensors get the same name, and the tensor outside the model does not match `ignored`.
    """
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    outside = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    twice = inside.keys() & outside.keys()
    if unexplained := twice - ignored_names(twice, ignored).keys():
        raise MappingError(
            f"the tensors of the model in {prefix!r} are also there without that prefix:", sorted(unexplained)
        )
    return inside | {f"{name} outside {prefix}" if name in twice else name: outside[name] for name in outside}


def _groups(rows: Sequence[Row], names: Collection[str]) -> tuple[list[_Group], list[str]]:
    """Return the groups of all rows for our names, and an error for each name that is not filled exactly once."""
    groups = [group for row in rows for group in _groups_of(row, names)]
    filled = Counter(name for group in groups for name in group.ours)
    faults = [f"no row fills {name!r}" for name in names if name not in filled]
    faults += [f"{times} rows fill {name!r}" for name, times in filled.items() if times > 1]
    unknown = {name for name in filled if name not in names}
    faults += [f"a row fills {name!r}, which the model does not have" for name in sorted(unknown)]
    return [group for group in groups if not unknown.intersection(group.ours)], faults


def _groups_of(row: Row, names: Collection[str]) -> Iterator[_Group]:
    """Yield the groups of a row: the names in our model that it matches, grouped by their source tensors."""
    shared = row.sources[0].count("{}")
    found: dict[tuple[tuple[str, ...], str], set[tuple[str, ...]]] = {}
    for pattern in row.targets:
        expression = re.compile(re.escape(pattern).replace(r"\{\}", INDEX) + LEAF)
        # Most rows of a large table have no index: look their names up instead of matching all names.
        candidates = names if "{}" in pattern else [pattern + leaf for leaf in LEAVES if pattern + leaf in names]
        for match in filter(None, map(expression.fullmatch, candidates)):
            *numbers, leaf = match.groups(default="")
            found.setdefault((tuple(numbers[:shared]), leaf), set()).add(tuple(numbers))
    for (index, leaf), indices in found.items():
        in_order = sorted(indices, key=lambda index: [int(number) for number in index])
        yield _Group(
            tuple(source.format(*index) + leaf for source in row.sources),
            tuple(pattern.format(*index) + leaf for index in in_order for pattern in row.targets),
            row.transform,
        )


# Transforms used by more than one format


def then(first: Transform, second: Transform) -> Transform:
    """Return the composition of two transforms; `to_ours` applies `first`, then `second`."""
    return Transform(
        f"{first.name}, then {second.name}",
        lambda tensors, config: second.to_ours(first.to_ours(tensors, config), config),
        lambda tensors, config: first.to_source(second.to_source(tensors, config), config),
    )


def each(
    name: str,
    to_ours: Callable[[torch.Tensor, PlainViTConfig], torch.Tensor],
    to_source: Callable[[torch.Tensor, PlainViTConfig], torch.Tensor],
) -> Transform:
    """Return the transform that applies the same functions to each tensor of a row."""
    return Transform(
        name,
        lambda tensors, config: [to_ours(tensor, config) for tensor in tensors],
        lambda tensors, config: [to_source(tensor, config) for tensor in tensors],
    )


def split(name: str, count: int) -> Transform:
    """Return the transform from one source tensor to the `count` tensors concatenated along its first axis."""
    return Transform(
        name,
        lambda tensors, config: tensors[0].chunk(count, dim=0),
        lambda tensors, config: [torch.cat(list(tensors), dim=0)],
    )


def inverse(name: str, transform: Transform) -> Transform:
    """Return the inverse transform."""
    return Transform(name, transform.to_source, transform.to_ours)


SPLIT_QKV = split("SPLIT_QKV", 3)  # query, key and value
SPLIT_KV = split("SPLIT_KV", 2)  # key and value


def in_proj_rows(source: str, ours: str) -> list[Row]:
    """Return the rows of torch's MultiheadAttention, or of an attention with the same names."""
    fused = [
        Row(f"{source}.in_proj_{leaf}", tuple(f"{ours}.{name}_proj.{leaf}" for name in "qkv"), SPLIT_QKV)
        for leaf in ("weight", "bias")
    ]
    return [*fused, Row(f"{source}.out_proj", f"{ours}.o_proj")]


# The source stacks the tensors of all layers along a first axis, as `nn.scan` of flax does.
UNSTACK = Transform(
    "UNSTACK",
    lambda tensors, config: tensors[0].unbind(0),
    lambda tensors, config: [torch.stack(list(tensors))],
)

# (L, D) in the source, (1, L, D) here, and the reverse.
ADD_FIRST_AXIS = each(
    "ADD_FIRST_AXIS",
    lambda tensor, config: tensor.unsqueeze(0),
    lambda tensor, config: tensor.squeeze(0),
)
DROP_FIRST_AXIS = inverse("DROP_FIRST_AXIS", ADD_FIRST_AXIS)

# A token (D,) in the source, (1, 1, D) here.
ADD_TWO_AXES = each(
    "ADD_TWO_AXES",
    lambda token, config: token[None, None],
    lambda token, config: token[0, 0],
)

# A table of positions is a map, (1, h, w, D).
GRID_TABLE = each(
    "GRID_TABLE",
    lambda table, config: table.flatten(0, 2),
    lambda table, config: table.unflatten(0, config.grid_size)[None],
)

# A matrix that multiplies features from the right.
TRANSPOSED = each("TRANSPOSED", lambda matrix, config: matrix.mT, lambda weight, config: weight.mT)

# A dense layer on the pixels of a patch (row, column, channel) is a convolution whose stride is its kernel size.
PIXELS_TO_KERNEL = each(
    "PIXELS_TO_KERNEL",
    lambda weight, config: weight.unflatten(1, (*config.patch_shape, config.num_channels)).permute(0, 3, 1, 2),
    lambda kernel, config: kernel.permute(0, 2, 3, 1).flatten(1),
)
KERNEL_TO_PIXELS = inverse("KERNEL_TO_PIXELS", PIXELS_TO_KERNEL)
