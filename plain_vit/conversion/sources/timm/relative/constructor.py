"""Base of timm's two classes with relative positions: image sizes that a table shows.

Source: timm 1.0.31, `timm/models/beit.py`, `timm/models/vision_transformer_relpos.py`, `timm/layers/pos_embed_rel.py`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from .....configuration_plain_vit import PlainViTConfig
from .....errors import CheckpointError, MappingError
from ....tables.format import Hints, StateDict
from ....tables.infer import pair
from .. import constructor
from ..arguments import Argument
from ..constructor import Constructor
from ..names import part_of
from ..tables import parts_of

POOLINGS = {"avg": "mean", "token": "cls", "": "none"}

TABLE = "relative_position_bias_table"
OUR_BIAS, OUR_SHARED_BIAS = "vit.layers.{}.attention.relative_position_bias", "vit.relative_position_bias"

ARGUMENTS = (
    *constructor.ARGUMENTS,
    Argument("global_pool", "avg", "pooling", POOLINGS, module=lambda m: m.model.global_pool),
)


class RelativeConstructor(Constructor):
    """A class of timm with relative positions.

    Attributes:
        kinds: The kinds of relative positions that only this class has.
    """

    kinds: tuple[str, ...]
    unseen = "the epsilon of the norms"

    def is_certain(self, names: Collection[str]) -> bool:
        """Return whether these names certainly belong to this class, not to a VisionTransformer."""
        parts = {part_of(name) for name in names}
        rows = [row for kind in ("mlp", "swiglu") for row in self.rows(PlainViTConfig(mlp_type=kind), None)]
        own = parts_of(rows)
        return parts <= own and any("rel_pos" in part or part.endswith(TABLE) for part in parts)

    def position_rows(self, tensors: StateDict) -> str:
        """Describe, for errors, the tensor that shows the number of patches."""
        table = _table(tensors)
        return super().position_rows(tensors) if table is None else f"{TABLE} has {table.shape[0]} rows"

    def changed_by_loading(self, config: PlainViTConfig) -> list[str]:
        """Return what timm's own loader would change: it mistakes some tables of other grids for a square grid's."""
        h, w = config.grid_size
        distances = (2 * h - 1) * (2 * w - 1)
        bias = config.relative_position_bias
        if bias is None or bias["type"] != "table" or h == w or math.isqrt(distances) ** 2 != distances:
            return []
        return [
            f"the biases of a grid of {h} x {w} patches, {distances} distances, which it takes for those of a square"
        ]

    def claims(self, config: PlainViTConfig) -> bool:
        """Return whether a model has parts of this class that the VisionTransformer lacks."""
        return config.relative_position_bias is not None and config.relative_position_bias["type"] in self.kinds

    def _image_size(
        self, arguments: Mapping[str, Any], tensors: StateDict, hints: Hints, stated: Sequence[tuple[Any, str]]
    ) -> tuple[Any, str] | list[tuple[int, int]]:
        """Return the image size and its origin, or the possible sizes; the table has a row for each distance."""
        table = _table(tensors)
        if table is None:
            return super()._image_size(arguments, tensors, hints, stated)
        config = self.config_of(arguments)
        height, width = config.patch_shape
        prefix = config.num_prefix_tokens
        grids = _grids(table.shape[0] - 3 * prefix)
        if "pos_embed" in tensors:
            grids = [grid for grid in grids if math.prod(grid) + prefix == tensors["pos_embed"].shape[1]]
        if hints.image_size is not None:
            stated = [(hints.image_size, "the caller")]
        for size, origin in stated:
            if size is not None and (pair(size)[0] // height, pair(size)[1] // width) in grids:
                return pair(size), f"{origin}, and the {table.shape[0]} rows of {TABLE}"
        if not grids:
            raise MappingError("the table has not a row for each distance of a grid:", [self.position_rows(tensors)])
        if hints.image_size is not None:
            raise CheckpointError(
                f"image_size={hints.image_size!r} is not of a grid for which {self.position_rows(tensors)}: correct "
                "image_size"
            )
        return [(rows * height, columns * width) for rows, columns in grids]


def _table(tensors: StateDict) -> torch.Tensor | None:
    """Return the first table of relative positions."""
    return next((tensors[name] for name in tensors if name.endswith(f".{TABLE}")), None)


def _grids(distances: int) -> list[tuple[int, int]]:
    """Return the grids (rows, columns) with this number of distances, squarest first."""
    sides = [side for side in range(1, distances + 1, 2) if distances % side == 0] if distances % 2 else []
    grids = [((side + 1) // 2, (distances // side + 1) // 2) for side in sides]
    return sorted(grids, key=lambda grid: (abs(grid[0] - grid[1]), grid))
