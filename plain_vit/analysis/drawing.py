"""Parts of figures: images, maps over images, their colour scale, and numbers in words."""

import numpy as np

from plain_vit.system.extras import needs

with needs("plain-vit[analysis]"):
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
    from matplotlib.figure import Figure

TINT = LinearSegmentedColormap.from_list("tint", [(1.0, 0.55, 0.0, 0.0), (1.0, 0.55, 0.0, 0.9)])  # clear to orange
OVER_GREY = ListedColormap([(1 - a) * 0.5 + a * np.array([r, g, b]) for r, g, b, a in TINT(np.linspace(0, 1, 256))])


def show_image(axis: Axes, image: np.ndarray) -> None:
    """Draw an image, grey or in colours, without smoothing."""
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


def tint_scale(figure: Figure, axes: np.ndarray, label: str, ends: tuple[str, str]) -> None:
    """Add the colour scale of maps: the tint over mid-grey, since the images are grey."""
    scale = figure.colorbar(
        ScalarMappable(Normalize(0, 1), OVER_GREY), ax=axes, label=label, fraction=0.03, pad=0.02, aspect=15
    )
    scale.set_ticks([0, 1], labels=ends)
    scale.ax.tick_params(labelsize=8)
    scale.ax.yaxis.label.set_fontsize(8)


def aspect(images: np.ndarray) -> float:
    """Return the aspect ratio, height over width, of a batch of images."""
    return float(images.shape[1] / images.shape[2])


def blank(axis: Axes) -> None:
    """Hide ticks and frame, but keep the labels."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def short_number(value: float) -> str:
    """Return a value with as many digits as tell something."""
    return "0" if value == 0 else f"{value:.2g}"
