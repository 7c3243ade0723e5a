"""Parts of figures: panels, images, maps over images, colour scales, and descriptions in words."""

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np

from ..scores import REGRESSION
from ..system.extras import needs
from .words import drawable, plain_figure

with needs("plain-vit[analysis]"):
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
    from matplotlib.figure import Figure

DPI = 110  # of the figures on a page
MOST = 8  # items that a description names
TINT = LinearSegmentedColormap.from_list("tint", [(1.0, 0.55, 0.0, 0.0), (1.0, 0.55, 0.0, 0.9)])  # clear to orange
OVER_GREY = ListedColormap([(1 - a) * 0.5 + a * np.array([r, g, b]) for r, g, b, a in TINT(np.linspace(0, 1, 256))])


def panels(
    count: int,
    most: int,
    width: tuple[float, float],
    height: tuple[float, float],
    each: int = 1,
    **options: Any,
) -> tuple[Figure, np.ndarray]:
    """Return a figure with hidden axes for several items, and these axes, of shape (items, each).

    Args:
        count: Number of items.
        most: Maximum number of items side by side.
        width: Width of the margins and of an item, in inches.
        height: Height of the margins and of an item, in inches; no figure is lower than its colour scale.
        each: Number of axes per item, side by side.
        **options: Further arguments of `Figure.subplots`.
    """
    columns = min(most, count)
    rows = math.ceil(count / columns)
    figure = plain_figure(width[0] + width[1] * columns, max(1.9, height[0] + height[1] * rows))
    axes = figure.subplots(rows, each * columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.set_axis_off()
    return figure, axes.reshape(-1, each)[:count]


def add_title(axis: Axes, titles: Sequence[str] | None, number: int) -> None:
    """Write the title of this item above it, if there are titles."""
    if titles is not None:
        axis.set_title(drawable(titles[number]), fontsize=9)


def show_image(axis: Axes, image: np.ndarray) -> None:
    """Draw a grey or colour image without smoothing."""
    axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def show_map(axis: Axes, image: np.ndarray, weights: np.ndarray, low: float, high: float) -> None:
    """Overlay a grey image with a map: transparent at `low`, orange at `high`."""
    grey = image if image.ndim == 2 else image @ np.array([0.299, 0.587, 0.114])
    height, width = grey.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axis.imshow(grey, cmap="gray", vmin=-0.25, vmax=1.25, interpolation="nearest")  # neither black nor white
    axis.imshow(weights, cmap=TINT, vmin=low, vmax=high, extent=extent, interpolation="nearest")


def label_below(axis: Axes, text: str) -> None:
    """Write a label below a map, and hide its frame and ticks."""
    axis.set_axis_on()
    blank(axis)
    axis.set_xlabel(text, fontsize=7.5, labelpad=2)


def tint_scale(figure: Figure, axes: np.ndarray | Sequence[Axes], label: str, ends: tuple[str, str]) -> None:
    """Add the colour scale of maps: the tint over mid-grey, since the images are grey."""
    colours = ScalarMappable(Normalize(0, 1), OVER_GREY)
    colour_scale(figure, colours, axes, label, {0: ends[0], 1: ends[1]}, fraction=0.03, pad=0.02, aspect=15)


def colour_scale(
    figure: Figure,
    colours: ScalarMappable,
    axes: Axes | np.ndarray | Sequence[Axes],
    label: str,
    ticks: dict[float, str] | None = None,
    size: float = 8,
    **place: Any,
) -> None:
    """Add a colour scale with small labels.

    Args:
        figure: The figure.
        colours: An image drawn by matplotlib, or the colour mapping of several images.
        axes: The axes that make room for the scale.
        label: What the colours mean.
        ticks: Values that are labelled, and their labels (default: as matplotlib chooses).
        size: Font size of the labels.
        **place: Further arguments of `Figure.colorbar`.
    """
    scale = figure.colorbar(colours, ax=axes, **place)
    if ticks is not None:
        scale.set_ticks(list(ticks), labels=list(ticks.values()))
    scale.ax.tick_params(labelsize=size)
    scale.set_label(label, fontsize=8)


def aspect(images: np.ndarray) -> float:
    """Return the aspect ratio, height over width, of a batch of images."""
    return float(images.shape[1] / images.shape[2])


def blank(axis: Axes) -> None:
    """Hide ticks and frame, but keep the labels."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def short_number(value: float) -> str:
    """Format a value with as many digits as are meaningful."""
    return "0" if value == 0 else f"{value:.2g}"


def percent(share: float) -> str:
    """Format a share in percent, never rounded to 0% or 100%."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def score_text(value: float, problem_type: str | None) -> str:
    """Format a probability in percent, or an output of a regression as a number."""
    return f"{value:.4g}" if problem_type == REGRESSION else percent(value)


def range_text(values: np.ndarray) -> str:
    """Return the range of values in words."""
    return f"{short_number(values.min())} to {short_number(values.max())}"


def highest_place(a_map: np.ndarray) -> str:
    """Return row and column of the highest value of a map in words."""
    row, column = np.unravel_index(a_map.argmax(), a_map.shape)
    return f"row {row}, column {column}"


def numbered(titles: Sequence[str] | None, count: int) -> Sequence[str]:
    """Return the titles of images, or numbers for images that have none."""
    return [f"image {i}" for i in range(count)] if titles is None else titles[:count]


def describe(figure: Figure, what: str, items: Sequence[str] = ()) -> Figure:
    """Set a description of a figure as its label, which pages use as alternative text, and return the figure.

    Args:
        figure: The figure.
        what: What it shows.
        items: Descriptions of its parts; only the first `MOST` are used.
    """
    more = [f"and {len(items) - MOST} more"] if len(items) > MOST else []
    figure.set_label(f"{what}. {'; '.join([*items[:MOST], *more])}" if items else what)
    return figure


def describe_maps(figure: Figure, maps: np.ndarray, titles: Sequence[str], first: str = "") -> Figure:
    """Describe a figure with one map per title, of shape (B, h, w), after a first sentence."""
    items = [
        f"{title}: {highest_place(a_map)}, {range_text(a_map)}, mean {short_number(a_map.mean())}"
        for title, a_map in zip(titles, maps, strict=True)
    ]
    return describe(figure, f"{first}Maps, with row and column of their highest patch", items)


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file, at the resolution of a page."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()
