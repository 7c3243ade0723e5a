"""Head counts, grids and image sizes consistent with the tensors of a checkpoint, the most likely first."""

import math
from collections.abc import Sequence

USUAL_HEAD_DIM = 64


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*low, *(number // count for count in low)})


def head_counts(width: int, usual: int | None = None) -> list[int]:
    """Return the head counts that divide a width, the most likely first.

    Args:
        width: Total width of all heads.
        usual: The most likely count (default: that of heads of width 64, or 4 if fewer than three of those fit).
    """
    likely = usual or (width / USUAL_HEAD_DIM if width >= 3 * USUAL_HEAD_DIM else 4)
    return sorted(divisors(width), key=lambda count: abs(math.log(count / likely)))


def grids(patches: int) -> list[tuple[int, int]]:
    """Return the grids (rows, columns) with this number of patches, the squarest first, wide before tall."""
    sides = [(side, patches // side) for side in divisors(patches)]
    return sorted(sides, key=lambda size: (max(size) / min(size), size))


def square_grid(patches: int) -> tuple[int, int] | None:
    """Return the square grid with this number of patches; None if there is none."""
    side = math.isqrt(max(patches, 0))
    return (side, side) if side and side * side == patches else None


def image_sizes(patches: int, patch_size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the image sizes (height, width) in pixels with this number of patches, the squarest grid first."""
    return [(rows * patch_size[0], columns * patch_size[1]) for rows, columns in grids(patches)]


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return a size as (height, width); a single number is used for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
