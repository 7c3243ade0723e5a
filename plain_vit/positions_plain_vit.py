"""Positions: embeddings added to the tokens, rotations of queries and keys, and biases on the attention scores.

Shapes: `B` batch, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size, `d` head width.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .configuration_plain_vit import PlainViTConfig
from .initialization_plain_vit import FreshWeights

# Added to the tokens


class SinCos2DPositionEmbedding(nn.Module):
    """Sines and cosines of column and row, for any grid (Beyer et al. 2022; in the order of big_vision)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.hidden_size = config.hidden_size

    def forward(self, grid_size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        h, w = grid_size
        quarter = self.hidden_size // 4
        rows, columns = torch.meshgrid(
            torch.arange(h, device=like.device), torch.arange(w, device=like.device), indexing="ij"
        )
        frequencies = torch.arange(quarter, device=like.device) / (quarter - 1)
        frequencies = 1.0 / (10000**frequencies)
        rows, columns = rows.flatten()[:, None] * frequencies, columns.flatten()[:, None] * frequencies
        table = torch.cat((columns.sin(), columns.cos(), rows.sin(), rows.cos()), dim=1)  # N D
        return table.to(like.dtype)


class GridTables(nn.Module, ABC):
    """Base class of tables learned for a native patch grid; for other grids, each call resamples them."""

    grid_size: tuple[int, int]

    @abstractmethod
    def resampled(self, config: PlainViTConfig) -> dict[str, torch.Tensor]:
        """Return the tables, by name, with which a config with another native grid computes the same positions.

        Raises:
            ValueError: No tables of that grid give the same positions.
        """


class AxialTables(GridTables):
    """Base class of learned embeddings of the row and of the column.

    Tokens before the patches have a table of their own, with all channels.
    """

    def __init__(self, config: PlainViTConfig, width: int):
        super().__init__()
        self.grid_size = config.position_table_shape
        self.resampling = config.position_resampling
        self.is_square = config.position_resampling_to_square
        self.rows = nn.Parameter(torch.zeros(self.grid_size[0], width))
        self.columns = nn.Parameter(torch.zeros(self.grid_size[1], width))
        prefix = config.num_prefix_tokens if config.position_embedding_on_prefix else 0
        self.prefix = nn.Parameter(torch.zeros(prefix, config.hidden_size)) if prefix else None

    def forward(self, grid_size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        h, w = grid_size
        rows = resample_axis(self.rows, h, max(grid_size) if self.is_square else h, self.resampling)
        columns = resample_axis(self.columns, w, max(grid_size) if self.is_square else w, self.resampling)
        patches = self.combined(rows[:, None].expand(-1, w, -1), columns.expand(h, -1, -1)).flatten(0, 1)  # N D
        return patches if self.prefix is None else torch.cat((self.prefix, patches))

    def resampled(self, config: PlainViTConfig) -> dict[str, torch.Tensor]:
        (h, w), mode = config.position_table_shape, config.position_resampling
        if self.is_square and h != w:
            raise ValueError(
                f"position_resampling_to_square resamples the tables of a grid of {h} x {w} patches even for images of "
                "the native size: give a square size"
            )
        tables = {"rows": resample_axis(self.rows, h, h, mode), "columns": resample_axis(self.columns, w, w, mode)}
        return tables if self.prefix is None else {**tables, "prefix": self.prefix}

    @abstractmethod
    def combined(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Combine embeddings of shape (h, w, width) to (h, w, D)."""

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the tables."""
        for table in (self.rows, self.columns, self.prefix):
            fresh.draw("positions", table)


class Learned2DPositionEmbedding(AxialTables):
    """Embeddings of the row and of the column, half of the channels each (the paper's appendix D.4)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config, config.hidden_size // 2)

    def combined(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows, columns), dim=-1)


class FactorizedPositionEmbedding(AxialTables):
    """Embeddings of the row and of the column, added (Dehghani et al. 2023, section 2.2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config, config.hidden_size)

    def combined(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return rows + columns


def is_any_size(*sides: int) -> bool:
    """Return whether a program is being exported for any size: it then cannot branch on the native grid."""
    return torch.compiler.is_exporting() and any(isinstance(side, torch.SymInt) for side in sides)


def is_used_as_it_is(native_grid: tuple[int, int], grid_size: tuple[int, int], mode: str) -> bool:
    """Return whether the table of the native grid is that of a grid; "bucketed" rows may repeat even there."""
    return mode != "bucketed" and not is_any_size(*grid_size) and grid_size == native_grid


def resample_axis(table: torch.Tensor, count: int, length: int, mode: str) -> torch.Tensor:
    """Resample a table (old, D) to a length, unless it already has that length, and return its first `count` rows."""
    if not is_any_size(length) and length == table.shape[0]:
        return table[:count]
    return resample_positions(table, (table.shape[0], 1), (length, 1), mode)[:count]


def resample_grid(
    table: torch.Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], mode: str, square: bool
) -> torch.Tensor:
    """Resample a table like `resample_positions`; with `square`, to a square of the longer side, then crop the grid.

    A step then has the same length in both directions, which preserves the aspect ratio.
    """
    if not square:
        return resample_positions(table, old_grid, new_grid, mode)
    side = max(new_grid)
    whole = resample_positions(table, old_grid, (side, side), mode).unflatten(0, (side, side))
    return whole[: new_grid[0], : new_grid[1]].flatten(0, 1)


def resample_positions(
    table: torch.Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], mode: str
) -> torch.Tensor:
    """Resample a table of patch positions to another grid, equal to `torch.nn.functional.interpolate`.

    Its two-dimensional filters are separable: one small matrix for the rows, one for the columns. In this form they
    compile and export for any size, and their gradient is deterministic on every device. Since they round differently,
    only compiled programs use them for the values.

    Args:
        table: Positions in raster order, of shape (h * w, D).
        old_grid: Grid (h, w) of the table, in patches.
        new_grid: Target grid (h, w).
        mode: One of the values of `PlainViTConfig.position_resampling`.

    Returns:
        The positions of the new grid, of shape (new h * new w, D), in the dtype of the table.

    Raises:
        ValueError: The mode is "truncate" and the table has fewer positions than needed.
    """
    if mode == "truncate":
        wanted = new_grid[0] * new_grid[1]
        if wanted > table.shape[0]:
            raise ValueError(
                f"the position table has {table.shape[0]} rows, but the image has {wanted} patches: "
                'position_resampling "truncate" cannot grow a table; choose another mode or smaller images'
            )
        return table[:wanted]
    if mode == "bucketed":
        rows, columns = (buckets(old, new, table.device) for old, new in zip(old_grid, new_grid, strict=True))
        return table[(rows[:, None] * old_grid[1] + columns).flatten()]
    grid = table.float().reshape(*old_grid, -1)
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or table.device.type not in ("cpu", "cuda"):
        return _by_matrices(grid, new_grid, mode).flatten(0, 1).to(table.dtype)
    resampled = _by_torch(grid, new_grid, mode)
    if torch.is_grad_enabled() and table.requires_grad:
        differentiable = _by_matrices(grid, new_grid, mode)
        resampled = resampled.detach() + (differentiable - differentiable.detach())  # adds zeros and the gradient
    return resampled.flatten(0, 1).to(table.dtype)


def buckets(old: int, new: int, device: torch.device) -> torch.Tensor:
    """Return the old cell, along one axis, in which each of `new` cells begins, as the towers of Idefics compute it.

    Their float32 fractions may fall below a border that they meet, so that a cell repeats, even if `new` is `old`.
    """
    borders = torch.arange(1 / old, 1.0, 1 / old, device=device, dtype=torch.float32)
    width = 1.0 / torch.full((), new, device=device, dtype=torch.float32)
    begins = torch.arange(new, device=device, dtype=torch.float32) * width
    return (borders <= begins.clamp(max=1.0 - 1e-6)[:, None]).sum(dim=1)


def repeats_positions(config: PlainViTConfig) -> bool:
    """Return whether patches of an image of the native size share positions, because fractions were rounded."""
    sides = config.grid_size if config.position_resampling == "bucketed" else ()
    return any(buckets(side, side, torch.device("cpu")).unique().numel() < side for side in sides)


def _by_torch(grid: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """Resample (h, w, D) bit-equal to the sources: with one call, and channels last in memory."""
    kind, _, option = mode.partition("_")
    image = grid[None].permute(0, 3, 1, 2)
    corners, antialias = option == "align_corners", option == "antialias"
    return F.interpolate(image, size=size, mode=kind, align_corners=corners, antialias=antialias)[0].permute(1, 2, 0)


def _by_matrices(grid: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """Resample (h, w, D) with a matrix product per axis, in float32 even under autocast."""
    device = grid.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _by_matrices(grid, size, mode)
    rows = _interpolation_matrix(grid.shape[0], size[0], mode, grid.device)
    columns = _interpolation_matrix(grid.shape[1], size[1], mode, grid.device)
    return torch.einsum("yh,xw,hwd->yxd", rows, columns, grid)


def _interpolation_matrix(old: int, new: int, mode: str, device: torch.device) -> torch.Tensor:
    """Return the (new, old) matrix that resamples one axis, with torch's filter and border handling."""
    cubic = mode.startswith("bicubic")
    index = torch.arange(new, device=device, dtype=torch.float32)
    # A tensor, because a compiler would specialise a symbolic size on whether the axis shrinks or grows.
    scale = torch.full((), old, device=device, dtype=torch.float32) / new
    if mode.endswith("align_corners"):
        centers = index * (old - 1) / (new - 1) if new > 1 else index
    else:
        centers = (index + 0.5) * scale - 0.5
    sources = torch.arange(old, device=device, dtype=torch.float32)
    if mode.endswith("antialias"):
        # The filter widens when the axis shrinks, and is cut and renormalised at the borders.
        stretch = scale.clamp(min=1)
        distance = (sources - centers[:, None]) / stretch
        weights = _cubic(distance, -0.5) if cubic else _triangle(distance)
        return weights / weights.sum(dim=1, keepdim=True)
    # The filter keeps its width, and taps beyond a border use the border value.
    weights = torch.zeros(new, old, device=device)
    first = centers.floor()
    for offset in (-1, 0, 1, 2) if cubic else (0, 1):
        tap = first + offset
        weight = _cubic(tap - centers, -0.75) if cubic else _triangle(tap - centers)
        weights = weights + weight[:, None] * (tap.clamp(0, old - 1)[:, None] == sources)
    return weights


def _cubic(distance: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic convolution kernel."""
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def _triangle(distance: torch.Tensor) -> torch.Tensor:
    """Linear interpolation kernel."""
    return (1 - distance.abs()).clamp(min=0)


# Rotating queries and keys


class Rotation(NamedTuple):
    """Rotation of the channel pairs of queries and keys by angles that depend on the position (Su et al. 2021).

    Args:
        cos: Cosines of the angles, of shape (L, d), (heads, L, d) or (B, 1 or heads, L, d); 1 for prefix tokens.
        sin: Sines, signed as `rotate` needs them; 0 for prefix tokens.
        halves: Whether channel i is paired with channel i + d / 2, instead of 2 i with 2 i + 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    halves: bool

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys of the first L tokens, of shape (B, heads, L, d)."""
        count, tokens = heads.shape[2], heads.transpose(1, 2)  # B L heads d, as in memory: no copy
        if self.halves:
            partners = tokens.roll(tokens.shape[-1] // 2, dims=-1)
        else:
            partners = tokens.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        partners = partners.transpose(1, 2)
        return (heads * self.cos[..., :count, :]).add_(partners * self.sin[..., :count, :]).type_as(heads)

    def keep(self, kept: torch.Tensor) -> "Rotation":
        """Return the rotation of the tokens kept in each image, given by their indices (B, L)."""

        def gather(table: torch.Tensor) -> torch.Tensor:  # (L, d) or (heads, L, d)
            rows = table[:, kept] if table.ndim == 3 else table[None, kept]  # (1 or heads) B L d
            return rows.transpose(0, 1)

        return self._replace(cos=gather(self.cos), sin=gather(self.sin))


class NoRotaryEmbedding(nn.Module):
    """No rotation of queries and keys."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.num_layers = config.num_hidden_layers

    def forward(
        self, grid_size: tuple[int, int], like: torch.Tensor, kept: torch.Tensor | None
    ) -> list[Rotation | None]:
        return [None] * self.num_layers


class AxialRotaryEmbedding(nn.Module):
    """Rotate half of the channel pairs by the row of a patch, the other half by its column, with fixed frequencies."""

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.num_layers = config.num_hidden_layers
        self.head_dim = config.attention_shape[1]
        self.num_prefix_tokens = config.num_prefix_tokens
        rope = config.group("rope_parameters")
        self.theta = float(rope["rope_theta"])
        self.centered = rope["coordinates"] == "centered"
        self.x_first = rope["axes"] == "xy"
        self.offset = float(rope["offset"])
        self.reference_grid = rope["reference_grid"]
        self.by_periods = rope["frequencies"] == "period"
        self.num_series = 2 if rope["axis_frequencies"] == "alternating" else 1
        self.as_weights = rope["dtype"] == "weights"
        self.halves = rope["pairs"] == "halves"
        is_learned = rope["prefix_angles"] == "learned"
        prefix = torch.zeros(self.num_prefix_tokens, self.head_dim // 2)
        self.prefix_angles = nn.Parameter(prefix) if is_learned else None
        # Separate if learned: checkpointing runs backward through one block at a time.
        self.num_angles = self.num_layers if is_learned else 1
        self.shift, self.jitter, self.rescale = rope["shift"], rope["jitter"], rope["rescale"]
        self.uniform_of_step: Callable[..., torch.Tensor] | None = None  # a training loop may set numbers for each step

    def forward(
        self, grid_size: tuple[int, int], like: torch.Tensor, kept: torch.Tensor | None
    ) -> list[Rotation | None]:
        """Return the rotation of each block.

        Args:
            grid_size: Patches (down, across).
            like: Tokens with the device and the dtype of the weights.
            kept: Indices of the tokens that patch dropout keeps, of shape (B, L); None for all.
        """
        angles = self.angles(self.coordinates(grid_size, like.device))
        rotations = [self.rotation(one, like.dtype) for one in angles]
        if kept is not None:
            rotations = [rotation.keep(kept) for rotation in rotations]
        return [*(rotations if len(rotations) == self.num_layers else rotations * self.num_layers)]

    def coordinates(self, grid_size: tuple[int, int], device: torch.device) -> torch.Tensor:
        """Return the coordinates of the patches in raster order, of shape (N, 2), in float32."""
        axes = []
        for axis, count in enumerate(grid_size):
            if self.centered:  # patch centres, in an image that extends from -1 to 1
                along = torch.arange(count, device=device).float() + 0.5
                along = 2.0 * ((along + self.offset) / count) - 1.0
            else:
                along = torch.arange(count, device=device).float() + self.offset
            if self.reference_grid is not None:
                along = along / count * self.reference_grid[axis]
            axes.append(along)
        coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
        if self.x_first:
            coordinates = coordinates.flip(-1)
        return self.augmented(coordinates) if self.training else coordinates

    def augmented(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Shift, stretch and scale all coordinates at random (Simeoni et al. 2025, section 3.2)."""

        given = None if self.uniform_of_step is None else self.uniform_of_step(5, device=coordinates.device)

        def draw(places: slice, limit: float) -> torch.Tensor:
            if given is None:
                return coordinates.new_empty(places.stop - places.start).uniform_(-limit, limit)
            return (2 * given[places] - 1) * limit

        if self.shift is not None:
            coordinates = coordinates + draw(slice(0, 2), self.shift)
        if self.jitter is not None:
            coordinates = coordinates * draw(slice(2, 4), math.log(self.jitter)).exp()
        if self.rescale is not None:
            coordinates = coordinates * draw(slice(4, 5), math.log(self.rescale)).exp()
        return coordinates

    def angles(self, coordinates: torch.Tensor) -> list[torch.Tensor]:
        """Return the angles of the channel pairs, of shape (N, d / 2): once for all blocks, or for each block."""
        count = self.head_dim // 4 * self.num_series
        exponents = torch.arange(count, device=coordinates.device) / count
        periods = self.theta**exponents
        factors = periods if self.by_periods else 1.0 / periods
        factors = factors.unflatten(0, (-1, self.num_series)).T  # of both axes, or of each
        if self.centered:
            coordinates = 2 * math.pi * coordinates
        coordinates = coordinates[:, :, None]
        angles = coordinates / factors if self.by_periods else coordinates * factors
        return [angles.flatten(1)] * self.num_angles

    def rotation(self, angles: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation by angles of shape (..., N, d / 2), and by those of the tokens before the patches."""
        if self.prefix_angles is None:
            angles = F.pad(angles, (0, 0, self.num_prefix_tokens, 0))
            cos, sin = angles.cos(), angles.sin()
        else:  # each in its own dtype, as in MLCD
            prefix = self.prefix_angles.expand(*angles.shape[:-2], -1, -1)
            cos, sin = (torch.cat((wave(prefix), wave(angles)), dim=-2) for wave in (torch.cos, torch.sin))
        if self.as_weights:
            cos, sin = cos.to(dtype), sin.to(dtype)
        if self.halves:
            return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), True)
        return Rotation(cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2), False)

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the angles of the tokens before the patches as MLCD does."""
        if self.prefix_angles is not None:
            init.normal_(self.prefix_angles, std=(self.head_dim // 2) ** -0.5)


class MixedRotaryEmbedding(AxialRotaryEmbedding):
    """Rotate each channel pair by row and column together, with learned frequencies (Heo et al. 2024, section 3.2)."""

    def __init__(self, config: PlainViTConfig):
        super().__init__(config)
        shape = 2, config.num_hidden_layers, config.num_attention_heads, self.head_dim // 2
        self.frequencies = nn.Parameter(torch.zeros(shape))  # by the first coordinate, by the second

    def angles(self, coordinates: torch.Tensor) -> list[torch.Tensor]:
        """Return the angles of the channel pairs for each block, of shape (heads, N, d / 2)."""
        angles = []
        for block in range(self.num_layers):  # separate: checkpointing runs backward through one block at a time
            first, second = self.frequencies[:, block].float().unsqueeze(-2)  # heads 1 d/2
            angles.append(coordinates[:, 0, None] * first + coordinates[:, 1, None] * second)
        return angles

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Start with axial frequencies, turned by a random angle for each block and head."""
        blocks, heads = self.frequencies.shape[1:3]
        exponents = torch.arange(0, self.head_dim, 4) / self.head_dim
        lengths = 1.0 / self.theta**exponents
        turns = torch.rand(blocks, heads, 1) * 2 * math.pi
        both = torch.cat((turns + torch.zeros_like(lengths), turns + math.pi / 2 + torch.zeros_like(lengths)), dim=-1)
        init.copy_(self.frequencies, lengths.repeat(2) * torch.stack((both.cos(), both.sin())))


ROTARY_EMBEDDINGS: dict[str, type[AxialRotaryEmbedding]] = {
    "axial": AxialRotaryEmbedding,
    "mixed": MixedRotaryEmbedding,
}


def rotary_embedding(config: PlainViTConfig) -> nn.Module:
    """Return the rotary embedding of a model."""
    if config.rope_parameters is None:
        return NoRotaryEmbedding(config)
    return ROTARY_EMBEDDINGS[config.rope_parameters["rope_type"]](config)


# Biases on the attention scores: each maps the distances of all pairs of tokens to a bias of shape (heads, L, L), or
# distances and queries of shape (B, heads, L, d) to a bias of shape (B, heads, L, L)


class Distances(NamedTuple):
    """Distances of all pairs of tokens.

    Args:
        grid_size: Patches (down, across).
        of_pairs: Index of the distance of each pair, of shape (L, L): for two patches, one of (2 h - 1) (2 w - 1) in
            raster order; then three more, for prefix token to patch, patch to prefix token, and two prefix tokens.
            Empty for a "decomposed" bias, which treats rows and columns apart.
    """

    grid_size: tuple[int, int]
    of_pairs: torch.Tensor


def distances_of(config: PlainViTConfig, grid_size: tuple[int, int], device: torch.device) -> Distances | None:
    """Return the distances on a patch grid; None if no bias depends on them."""
    if config.relative_position_bias is None:
        return None
    if config.relative_position_bias["type"] == "decomposed":
        return Distances(grid_size, torch.empty(0, 0, dtype=torch.int64, device=device))
    h, w = grid_size
    rows, columns = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    rows, columns = rows.flatten(), columns.flatten()
    down, across = rows[:, None] - rows + h - 1, columns[:, None] - columns + w - 1
    index, count, prefix = down * (2 * w - 1) + across, (2 * h - 1) * (2 * w - 1), config.num_prefix_tokens
    if prefix:  # concatenated, because ONNX cannot assign to a slice
        to_patches, between = index.new_full((prefix, h * w), count), index.new_full((prefix, prefix), count + 2)
        from_patches = index.new_full((h * w, prefix), count + 1)
        index = torch.cat((torch.cat((between, to_patches), dim=1), torch.cat((from_patches, index), dim=1)))
    return Distances(grid_size, index)


class TableRelativePositionBias(GridTables):
    """A learned bias for each head and distance (Liu et al. 2021; Bao et al. 2022).

    With a class token, three more rows follow the distances: class token to patch, patch to class token, class token to
    itself.
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.grid_size = config.grid_size
        self.resampling = config.group("relative_position_bias")["resampling"]
        h, w = self.grid_size
        rows = (2 * h - 1) * (2 * w - 1) + 3 * config.num_prefix_tokens
        self.table = nn.Parameter(torch.zeros(rows, config.num_attention_heads))

    def forward(self, distances: Distances, query: None = None, scaling: float = 1.0) -> torch.Tensor:
        table = resample_distances(self.table, self.grid_size, distances.grid_size, self.resampling)
        return table[distances.of_pairs].permute(2, 0, 1)

    def resampled(self, config: PlainViTConfig) -> dict[str, torch.Tensor]:
        return {"table": resample_distances(self.table, self.grid_size, config.grid_size, self.resampling)}

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Start without any bias."""
        init.zeros_(self.table)


def resample_distances(
    table: torch.Tensor, old_grid: tuple[int, int], grid_size: tuple[int, int], resampling: str
) -> torch.Tensor:
    """Resample a table with one row per distance to another grid; rows after the distances stay unchanged."""
    if not is_any_size(*grid_size) and grid_size == old_grid:
        return table
    (old_h, old_w), (h, w) = ((2 * h - 1, 2 * w - 1) for h, w in (old_grid, grid_size))
    distances, others = table[: old_h * old_w], table[old_h * old_w :]
    image = distances.view(old_h, old_w, -1).float()
    if resampling == "bilinear":
        distances = resample_positions(image.flatten(0, 1), (old_h, old_w), (h, w), "bilinear")
    else:
        rows, columns = geometric_matrix(old_h, h), geometric_matrix(old_w, w)
        if is_any_size(*grid_size):  # an exported program cannot branch on the native grid, which must not change
            is_native = (torch.arange(h)[-1] == old_h - 1) & (torch.arange(w)[-1] == old_w - 1)
            rows = torch.where(is_native, torch.eye(h, old_h), rows)
            columns = torch.where(is_native, torch.eye(w, old_w), columns)
        distances = torch.einsum("yh,xw,hwd->yxd", rows.to(image), columns.to(image), image).flatten(0, 1)
    return torch.cat((distances.to(table.dtype), others))


HALVINGS = 19  # of an interval of 0.49, down to 1e-6


def geometric_matrix(old: int, new: int) -> torch.Tensor:
    """Return the (new, old) matrix that resamples the distances along one axis as BEiT's code does.

    The old distances are placed further and further apart, in a geometric progression that reaches the largest new
    one, so that short distances keep their biases; the new ones are interpolated linearly between them.
    """

    wanted = torch.arange(-(new // 2), new // 2 + 1)
    if old == 1:
        return torch.ones_like(wanted)[:, None].float()
    # Tensors and a fixed number of halvings, so that an exported program runs this search for any size.
    powers = torch.arange(old // 2, dtype=torch.float64)
    least, most = torch.tensor([1.01, 1.5], dtype=torch.float64).unbind()
    ratio = least
    for _ in range(HALVINGS):
        ratio = (least + most) / 2
        is_too_far = (1.0 - ratio ** (old // 2)) / (1.0 - ratio) > wanted[-1]
        least, most = torch.where(is_too_far, least, ratio), torch.where(is_too_far, ratio, most)
    places = F.pad((ratio**powers).cumsum(0), (1, 0))
    places = torch.cat((-places.flip(0), places[1:])).float()
    after = (places < wanted[:, None]).sum(1).clamp(1, old - 1)
    share = ((wanted - places[after - 1]) / (places[after] - places[after - 1])).clamp(0, 1)
    columns, share = torch.arange(old), share[:, None]
    return (columns == after[:, None] - 1) * (1 - share) + (columns == after[:, None]) * share


class MLPRelativePositionBias(nn.Module):
    """Bias that a small network computes from the logarithms of the distances (Liu et al. 2022, as timm computes it).

    Tokens before the patches have no bias.
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        width = config.group("relative_position_bias")["mlp_size"]
        self.fc1 = nn.Linear(2, width)
        self.dropout = nn.Dropout(0.125)
        self.fc2 = nn.Linear(width, config.num_attention_heads)

    def forward(self, distances: Distances, query: None = None, scaling: float = 1.0) -> torch.Tensor:
        device, dtype = self.fc1.weight.device, self.fc1.weight.dtype
        axes = [torch.arange(1 - count, count, device=device).float() for count in distances.grid_size]
        steps = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
        steps = (steps.sign() * torch.log(1.0 + steps.abs())).to(dtype)
        table = F.pad(self.fc2(self.dropout(F.relu(self.fc1(steps)))), (0, 0, 0, 3))  # for tokens before the patches
        return table[distances.of_pairs].permute(2, 0, 1)


class QueryRelativePositionBias(GridTables):
    """The product of each query and a learned vector of the offset (Dosovitskiy et al. 2021, appendix D.4).

    An offset is the difference of two patch indices in raster order, which the distance determines: for another grid,
    the vectors of all distances are resampled. With a class token, three more vectors follow, as in the table.
    """

    def __init__(self, config: PlainViTConfig):
        super().__init__()
        self.grid_size = h, w = config.grid_size
        self.resampling = config.group("relative_position_bias")["resampling"]
        rows = 2 * h * w - 1 + 3 * config.num_prefix_tokens
        self.table = nn.Parameter(torch.zeros(rows, config.attention_shape[1]))

    def forward(self, distances: Distances, query: torch.Tensor, scaling: float) -> torch.Tensor:
        h, w = self.grid_size
        down, across = (torch.arange(1 - count, count, device=query.device) for count in (h, w))
        offsets = (down[:, None] * w + across + h * w - 1).flatten()
        vectors = torch.cat((self.table[offsets], self.table[2 * h * w - 1 :]))
        vectors = resample_distances(vectors, self.grid_size, distances.grid_size, self.resampling).type_as(query)
        products = torch.matmul(query, vectors.T) * scaling  # B heads L distances
        return products.gather(-1, distances.of_pairs[: query.shape[2]].expand(*query.shape[:3], -1))

    def resampled(self, config: PlainViTConfig) -> dict[str, torch.Tensor]:
        raise ValueError(
            'a relative position bias of type "query" has a vector for each offset in raster order, which two '
            "distances share: resampled, they differ, and no vectors of another grid give both; keep the model's own "
            "size"
        )

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Initialise the vectors."""
        fresh.draw("positions", self.table)


class DecomposedRelativePositionBias(GridTables):
    """The products of each query and two learned vectors, of the distance down and of the distance across.

    Source:
        Li et al. 2022 (MViTv2), section 4.1, as ViTDet and SAM use it.
    """

    def __init__(self, config: PlainViTConfig, window: int | None = None):
        super().__init__()
        self.window = window
        self.grid_size = h, w = config.grid_size if window is None else (window, window)
        self.rows = nn.Parameter(torch.zeros(2 * h - 1, config.attention_shape[1]))
        self.columns = nn.Parameter(torch.zeros(2 * w - 1, config.attention_shape[1]))

    def forward(self, distances: Distances, query: torch.Tensor, scaling: float) -> torch.Tensor:
        h, w = distances.grid_size
        queries = query.flatten(0, 1).unflatten(1, (h, w))  # B heads, h, w, d
        down = torch.einsum("bhwd,hkd->bhwk", queries, self.vectors(self.rows, h))
        across = torch.einsum("bhwd,wkd->bhwk", queries, self.vectors(self.columns, w))
        biases = down[..., :, None] + across[..., None, :]
        return biases.flatten(3).flatten(1, 2).unflatten(0, query.shape[:2])

    def vectors(self, table: torch.Tensor, count: int) -> torch.Tensor:
        """Return the vectors of all pairs along an axis of `count` patches, of shape (count, count, d)."""
        table = resample_axis(table, 2 * count - 1, 2 * count - 1, "bilinear")
        index = torch.arange(count, device=table.device)
        return table[index[:, None] - index + count - 1]

    def resampled(self, config: PlainViTConfig) -> dict[str, torch.Tensor]:
        h, w = config.grid_size if self.window is None else self.grid_size
        tables = {"rows": (self.rows, 2 * h - 1), "columns": (self.columns, 2 * w - 1)}
        return {name: resample_axis(table, count, count, "bilinear") for name, (table, count) in tables.items()}

    def init_own_weights(self, fresh: FreshWeights) -> None:
        """Start without any bias."""
        init.zeros_(self.rows)
        init.zeros_(self.columns)


RELATIVE_POSITION_BIASES: dict[str, Callable[[PlainViTConfig], nn.Module]] = {
    "table": TableRelativePositionBias,
    "mlp": MLPRelativePositionBias,
    "query": QueryRelativePositionBias,
    "decomposed": DecomposedRelativePositionBias,
}


def relative_position_bias(config: PlainViTConfig, shared: bool) -> nn.Module | None:
    """Return the bias that all blocks share, or a block's own; None if the config has no bias of this kind."""
    chosen = config.relative_position_bias
    if chosen is None or chosen["shared"] != shared:
        return None
    return RELATIVE_POSITION_BIASES[chosen["type"]](config)


# Windows of the patch grid


class Windows(NamedTuple):
    """Square windows of the patch grid, padded with zeros at the right and at the bottom.

    Args:
        grid_size: Patches (down, across).
        size: Side of a window in patches.
        distances: Distances within a window, for a relative position bias; None if no bias depends on them.
        mask: Added to the scores, of shape (windows, 1, 1, size ** 2): minus infinity for the padding; None if the
            padding is attended to, or there is none.
    """

    grid_size: tuple[int, int]
    size: int
    distances: Distances | None = None
    mask: torch.Tensor | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Number of windows (down, across)."""
        return -(-self.grid_size[0] // self.size), -(-self.grid_size[1] // self.size)

    def cut(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Cut the tokens (B, L, D) into windows of shape (B windows, size ** 2, D)."""
        (h, w), (down, across) = self.grid_size, self.counts
        grid = hidden_states.unflatten(1, self.grid_size)
        grid = F.pad(grid, (0, 0, 0, across * self.size - w, 0, down * self.size - h))
        windows = grid.unflatten(2, (across, self.size)).unflatten(1, (down, self.size))  # B down s across s D
        return windows.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def rotation(self, rotation: Rotation | None, batch: int) -> Rotation | None:
        """Return the rotation of the tokens in the windows of a batch of images."""
        if rotation is None:
            return None
        cos, sin = (self.cut(table[None]).repeat(batch, 1, 1)[:, None] for table in (rotation.cos, rotation.sin))
        return rotation._replace(cos=cos, sin=sin)

    def join(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the tokens (B, L, D) of windows, without the padding."""
        grid = windows.unflatten(1, (self.size, self.size)).unflatten(0, (-1, *self.counts))  # B down across s s D
        grid = grid.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return grid[:, : self.grid_size[0], : self.grid_size[1]].flatten(1, 2)

    def spread(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights between all patches, of shape (B, heads, L, L): 0 between windows, without the padding."""
        count, (down, across) = self.grid_size[0] * self.grid_size[1], self.counts
        numbers = torch.arange(1, count + 1, device=weights.device, dtype=torch.float32)[None, :, None]
        places = self.cut(numbers)[..., 0].long()  # windows, size ** 2: 0 where padded
        every = weights.new_zeros(weights.shape[0] // (down * across), weights.shape[1], count + 1, count + 1)
        every[:, :, places[:, :, None], places[:, None]] = weights.unflatten(0, (-1, down * across)).transpose(1, 2)
        return every[..., 1:, 1:]


def windows_of(config: PlainViTConfig, grid_size: tuple[int, int], device: torch.device) -> Windows | None:
    """Return the windows of a patch grid; None if all blocks attend to the whole image."""
    if config.window_attention is None:
        return None
    size = config.window_attention["size"]
    windows = Windows(grid_size, size, distances_of(config, (size, size), device))
    is_whole = not is_any_size(*grid_size) and all(side % size == 0 for side in grid_size)
    if is_whole or config.window_attention["padding"] == "attended":
        return windows
    inside = windows.cut(torch.ones(1, grid_size[0] * grid_size[1], 1, device=device))  # 0 where padded
    return windows._replace(mask=inside.log().transpose(1, 2)[:, None])
