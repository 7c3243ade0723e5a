"""Figures of patch features, in the style of `plots`, which exports them too.

Legend: `B` images, `H W` pixels, `h w` patch grid.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..system.extras import needs
from .dense_features import Correspondences, PatchComponents
from .drawing import (
    add_title,
    aspect,
    blank,
    describe,
    describe_maps,
    label_below,
    numbered,
    panels,
    percent,
    range_text,
    short_number,
    show_image,
    show_map,
    tint_scale,
)
from .words import one_line, plain_figure

with needs("plain-vit[analysis]"):
    from matplotlib import colormaps
    from matplotlib.figure import Figure

MARK = "#56b4e9"  # of the chosen patch: distinct from orange for colour-blind readers too


def plot_patch_components(
    images: np.ndarray, components: PatchComponents, *, titles: Sequence[str] | None = None
) -> Figure:
    """Draw each image next to its patches, whose first three components are red, green and blue.

    The scale of each colour is that of the images that the components were fitted to; the background is white.

    Args:
        images: Values in [0, 1] of shape (B, H, W, 3) or (B, H, W), as returned by `displayable`.
        components: Their components, from `patch_components` or `PatchComponents.apply`. With fewer than three, the
            other colours are constant.
        titles: One title per image.
    """
    height = 1.55 * aspect(images) + (0.4 if titles else 0.15)
    figure, axes = panels(len(images), 3, (0.2, 3.2), (0, height), each=2)
    for i, ((plain, coloured), image, grid) in enumerate(zip(axes, images, component_colours(components), strict=True)):
        show_image(plain, image)
        height, width = image.shape[:2]
        coloured.imshow(grid, interpolation="nearest", extent=(-0.5, width - 0.5, height - 0.5, -0.5))
        add_title(plain, titles, i)
    shares = ", ".join(f"{share:.1%}" for share in components.explained_variance)
    names = numbered(titles, len(images))
    items = [
        f"{name}: {percent(grid.mean())} foreground" for name, grid in zip(names, components.foreground, strict=True)
    ]
    what = f"Patches in colours of components that hold {shares} of the variance of the foreground"
    return describe(figure, what, items)


def component_colours(components: PatchComponents) -> np.ndarray:
    """Return the colours of patches: their first three components, from 0 to 1, and white for the background.

    Args:
        components: From `patch_components`.

    Returns:
        Red, green and blue of shape (B, h, w, 3).
    """
    values, (low, high) = components.values[..., :3], components.limits[:, :3]
    spread = np.where(high > low, high - low, 1.0)
    colours = np.where(high > low, (values - low) / spread, 0.5).clip(0, 1)
    colours = np.pad(colours, ((0, 0), (0, 0), (0, 0), (0, 3 - colours.shape[-1])), constant_values=0.5)
    return np.where(components.foreground[..., None], colours, 1.0)


def plot_patch_similarity(
    images: np.ndarray,
    similarity: np.ndarray,
    patch: tuple[int, int],
    image: int = 0,
    *,
    titles: Sequence[str] | None = None,
) -> Figure:
    """Draw the similarity of all patches to a chosen patch over the images, and a cross on the chosen patch.

    All maps share one scale, from 0 to 1: negative cosines are drawn as 0. The range of each map is printed below it.

    Args:
        images: Values in [0, 1] of shape (B, H, W, 3) or (B, H, W), as returned by `displayable`.
        similarity: Cosines of shape (B, h, w), from `patch_similarity`.
        patch: (row, column) of the chosen patch.
        image: Number of its image.
        titles: One title per image.
    """
    height = 2.4 * aspect(images) + (0.5 if titles else 0.3)
    figure, axes = panels(len(images), 3, (1.2, 2.4), (0, height))
    for i, (axis, picture, cosines) in enumerate(zip(axes.flat, images, similarity, strict=True)):
        show_map(axis, picture, cosines, 0.0, 1.0)
        label_below(axis, range_text(cosines))
        add_title(axis, titles, i)
    (x, y), *_ = _centres(np.array([patch]), similarity.shape[1:], images.shape[1:3])
    axes.flat[image].plot([x], [y], marker="+", markersize=13, markeredgewidth=2.5, color=MARK)
    tint_scale(figure, figure.axes, "cosine", ("0", "1"))
    which = "the first image" if image == 0 else f"image {image}"
    cross = f"The patch in row {patch[0]}, column {patch[1]} of {which} has a cross. "
    return describe_maps(figure, similarity, numbered(titles, len(images)), cross)


def plot_correspondences(
    first: np.ndarray,
    second: np.ndarray,
    matches: Correspondences,
    *,
    most: int = 30,
    titles: tuple[str, str] | None = None,
) -> Figure:
    """Draw two images side by side, and lines between patches that are each other's nearest neighbours.

    Args:
        first: Values in [0, 1] of shape (H, W, 3) or (H, W), as returned by `displayable`.
        second: The other image, in the same format, of any size.
        matches: From `correspondences`.
        most: Maximum number of lines; the most similar pairs are drawn. Colours only tell the lines apart.
        titles: One title per image.
    """
    height = first.shape[0]
    factor = height / second.shape[0]  # the second image is drawn as high as the first
    gap = 0.06 * first.shape[1]
    left, width = first.shape[1] + gap, first.shape[1] + gap + second.shape[1] * factor
    figure = plain_figure(7.0, max(1.9, 6.7 * height / width + (0.55 if titles else 0.3)))
    axis = figure.subplots()
    show_image(axis, first)
    axis.imshow(
        second, cmap="gray", vmin=0, vmax=1, interpolation="nearest",
        extent=(left - 0.5, width - 0.5, height - 0.5, -0.5),
    )  # fmt: skip
    starts = _centres(matches.first[:most], matches.grid_sizes[0], first.shape[:2])
    ends = _centres(matches.second[:most], matches.grid_sizes[1], (height, width - left))
    ends[:, 0] += left
    colours = colormaps["turbo"](np.linspace(0.05, 0.95, len(starts)))
    for rank, number in enumerate(np.argsort(starts[:, 1], kind="stable")):  # from top to bottom
        xs, ys = zip(starts[number], ends[number], strict=True)
        axis.plot(xs, ys, color=colours[rank], linewidth=1.2, marker="o", markersize=3.5, markeredgewidth=0)
    axis.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    blank(axis)
    cosines = [short_number(cosine) for cosine in (matches.similarity[len(starts) - 1], matches.similarity[0])]
    axis.set_xlabel(
        f"{len(starts)} of {len(matches.similarity)} pairs, with cosines from {cosines[0]} to {cosines[1]}", fontsize=8
    )
    if titles is not None:
        sides: tuple[Literal["left", "right"], ...] = ("left", "right")
        for side, title in zip(sides, titles, strict=True):
            axis.set_title(one_line(title, 44), loc=side, fontsize=9)  # half of the figure's width
    pairs = zip(matches.first, matches.second, matches.similarity, strict=True)
    items = [
        f"row {row}, column {column} and row {other_row}, column {other_column}: {cosine:.2f}"
        for (row, column), (other_row, other_column), cosine in pairs
    ]
    return describe(
        figure, f"Lines between the two images. There are {len(items)} pairs of patches, with cosines", items
    )


def _centres(patches: np.ndarray, grid_size: tuple[int, ...], image_size: tuple[float, ...]) -> np.ndarray:
    """Return the (x, y) of the centres of patches (row, column), in pixels."""
    steps = np.divide(image_size, grid_size)
    return ((patches + 0.5) * steps - 0.5)[:, ::-1]


__all__ = ["component_colours", "plot_correspondences", "plot_patch_components", "plot_patch_similarity"]
