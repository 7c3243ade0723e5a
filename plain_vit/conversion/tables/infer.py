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
        usual: The most likely count (default: as many heads as have width 64, or 4 heads if that is less than three).
    """
    likely = usual or (width / USUAL_HEAD_DIM if width >= 3 * USUAL_HEAD_DIM else 4)
    return sorted(divisors(width), key=lambda count: abs(math.log(count / likely)))


def grids(patches: int) -> list[tuple[int, int]]:
    """Return the grids (rows, columns) with this number of patches, squarest first and wide before tall."""
    sides = [(side, patches // side) for side in divisors(patches)]
    return sorted(sides, key=lambda size: (max(size) / min(size), size))


def square_grid(patches: int) -> tuple[int, int] | None:
    """Return the square grid with this number of patches; None if there is none."""
    side = math.isqrt(max(patches, 0))
    return (side, side) if side and side * side == patches else None


def image_sizes(patches: int, patch_size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the image size (height, width) in pixels of the square grid with this number of patches, if any.

    Other grids are too many to offer. A number that is not square may also come from overlapping patches.
    """
    grid = square_grid(patches)
    return [] if grid is None else [(grid[0] * patch_size[0], grid[1] * patch_size[1])]


def patches_in(size: int | Sequence[int], patch_size: tuple[int, int]) -> int:
    """Return the number of patches of an image, without partial patches."""
    return math.prod(pixels // patch for pixels, patch in zip(pair(size), patch_size, strict=True))


def size_fault(size: tuple[int, int], patch_size: tuple[int, int], patches: Sequence[int]) -> str | None:
    """Return an error message if an image of this size has none of these numbers of patches, otherwise None."""
    (height, width), (patch_height, patch_width) = size, patch_size
    if (count := patches_in(size, patch_size)) in patches:
        return None
    expected = " or ".join(map(str, patches))
    for stride in range(min(patch_size) - 1, 0, -1):
        if ((height - patch_height) // stride + 1) * ((width - patch_width) // stride + 1) in patches:
            return (
                f"image_size={size} has {count} patches of {patch_size}, and the positions are of {expected}, as of "
                f"patches that overlap (one every {stride} pixels): plain-vit does not open overlapping patches"
            )
    return (
        f"image_size={size} has {count} patches of {patch_size}, and the positions are of {expected}: correct "
        "image_size"
    )


def ratio_of(width: int, hidden_size: int) -> float:
    """Return a ratio from which a source that rounds down computes exactly this width."""
    ratio = width / hidden_size
    return ratio if int(hidden_size * ratio) == width else (width + 0.5) / hidden_size


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return a size as (height, width); an int is both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
