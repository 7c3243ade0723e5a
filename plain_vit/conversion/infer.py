"""Head counts, grids and image sizes consistent with the tensors of a checkpoint, the most likely first."""

import math
from collections.abc import Sequence

USUAL_HEAD_DIM = 64


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    low = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*low, *(number // count for count in low)})


def head_counts(width: int, usual: int | None = None) -> list[int]:
    """Return the head counts that divide a width, the likeliest first.

    Args:
        width: Of all heads together.
        usual: The likeliest count; if not given that of heads 64 wide, or four where fewer than three of those fit.
    """
    likely = usual or (width / USUAL_HEAD_DIM if width >= 3 * USUAL_HEAD_DIM else 4)
    return sorted(divisors(width), key=lambda count: abs(math.log(count / likely)))


def grids(patches: int) -> list[tuple[int, int]]:
    """Return the grids (rows, columns) of so many patches, the squarest first, the wide before the high."""
    sides = [(side, patches // side) for side in divisors(patches)]
    return sorted(sides, key=lambda size: (max(size) / min(size), size))


def square_grid(patches: int) -> tuple[int, int] | None:
    """Return the square grid of so many patches; None where there is none."""
    side = math.isqrt(max(patches, 0))
    return (side, side) if side and side * side == patches else None


def image_sizes(patches: int, patch_size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the image sizes (height, width) of so many patches, in pixels, the squarest grid first."""
    return [(rows * patch_size[0], columns * patch_size[1]) for rows, columns in grids(patches)]


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return the height and width of a size; one number is both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
