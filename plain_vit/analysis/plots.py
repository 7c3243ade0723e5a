"""Pictures of what the array functions return. Each function returns a figure; none shows or saves it.

Colours are told apart by colour-blind people too: sequential scales are cividis and viridis, signed ones go from purple
to orange, lines take the colours of Okabe and Ito.

Legend: `B` batch, `H W` pixels, `h w` patch grid.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

SEQUENTIAL, SIGNED = "cividis", "PuOr"
TINT = LinearSegmentedColormap.from_list("tint", [(1.0, 0.55, 0.0, 0.0), (1.0, 0.55, 0.0, 0.9)])  # clear to orange
RIGHT, WRONG, NEUTRAL = "#00735a", "#c04a00", "#404040"  # Okabe and Ito's bluish green and vermilion, darkened for text
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def plot_maps_over_images(
    images: np.ndarray, maps: np.ndarray, *, titles: Sequence[str] | None = None, meaning: str = "attention"
) -> Figure:
    """Draw each image beside the same image under its map.

    Args:
        images: Levels 0 to 1 of shape (B, H, W, 3) or (B, H, W), as `displayable` returns them.
        maps: 0 or more, of shape (B, h, w): rollout, Grad-CAM, or one head of `attention_maps`.
        titles: One for each image.
        meaning: What the maps show, for the colour scale.
    """
    count = len(images)
    pairs = min(4, count)  # image and map beside each other, at most four pairs in a row
    rows = math.ceil(count / pairs)
    figure = Figure(figsize=(0.9 + 2.5 * pairs, 0.5 + 1.5 * rows), layout="constrained")
    axes = figure.subplots(rows, 2 * pairs, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i, (image, weights) in enumerate(zip(images, maps, strict=True)):
        row, column = divmod(i, pairs)
        plain, covered = axes[row, 2 * column], axes[row, 2 * column + 1]
        _show_image(plain, image)
        _show_map(covered, image, weights)
        if titles is not None:
            plain.set_title(titles[i], fontsize=9)
    _relative_scale(figure, axes, f"{meaning}, relative to\nthe highest of its image")
    return figure


def plot_attention_heads(image: np.ndarray, maps: np.ndarray, *, layers: Sequence[int] | None = None) -> Figure:
    """Draw the attention of every head (across) in every layer (down) over one image.

    Args:
        image: Levels 0 to 1 of shape (H, W, 3) or (H, W).
        maps: Attention of one image, of shape (layers, heads, h, w), from `attention_maps(...)[0]`.
        layers: Their numbers, where `maps` holds only some.
    """
    depth, heads = maps.shape[:2]
    numbers = range(depth) if layers is None else layers
    size = 1.15 if heads <= 8 else 0.85
    figure = Figure(figsize=(1.3 + size * heads, 0.5 + size * depth), layout="constrained")
    axes = figure.subplots(depth, heads, squeeze=False)
    for i, number in enumerate(numbers):
        for head in range(heads):
            axis = axes[i, head]
            _show_map(axis, image, maps[i, head])
            axis.set_axis_on()
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
            if i == 0:
                axis.set_title(f"head {head}", fontsize=8)
            if head == 0:
                axis.set_ylabel(f"layer {number}", fontsize=8)
    _relative_scale(figure, axes, "attention, relative to\nthe highest of its map")
    return figure


def plot_predictions(
    images: np.ndarray,
    probabilities: np.ndarray,
    class_names: Sequence[str],
    labels: Sequence[int] | None = None,
) -> Figure:
    """Draw images with what the model takes them for and how sure it is; a mark says whether it is right.

    Args:
        images: Levels 0 to 1 of shape (B, H, W, 3) or (B, H, W), as `displayable` returns them.
        probabilities: Of shape (B, classes), from `predict`.
        class_names: In the order of the classes.
        labels: True classes of shape (B,), where they are known.
    """
    count = len(images)
    columns = min(8, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(1.35 * columns, 1.75 * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i, (axis, image) in enumerate(zip(axes.flat, images, strict=False)):
        predicted = int(probabilities[i].argmax())
        text = f"{_short(class_names[predicted])} {_percent(probabilities[i, predicted])}"
        colour = NEUTRAL
        if labels is not None:
            right = predicted == labels[i]
            colour = RIGHT if right else WRONG
            text = f"✓ {text}" if right else f"✗ {text}\nis {_short(class_names[labels[i]])}"
        _show_image(axis, image)
        axis.set_axis_on()
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set(color=colour, linewidth=2.5)
        axis.set_title(text, fontsize=9, color=colour)
    return figure


def plot_confusion_matrix(matrix: np.ndarray, class_names: Sequence[str]) -> Figure:
    """Draw how often each class is taken for each other; the colour is the share of the true class.

    Args:
        matrix: Counts of shape (classes, classes), from `confusion_matrix`.
        class_names: In the order of the classes.
    """
    classes = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    figure = Figure(figsize=(2.2 + 0.45 * classes, 1.4 + 0.45 * classes), layout="constrained")
    axis = figure.subplots()
    picture = axis.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=1)
    if classes <= 40:
        for (row, column), number in np.ndenumerate(matrix):
            if number:
                colour = "black" if shares[row, column] > 0.5 else "white"
                axis.text(column, row, str(number), ha="center", va="center", fontsize=8, color=colour)
    upright = max(len(str(name)) for name in class_names) > 3
    axis.set_xticks(range(classes), class_names, rotation=90 if upright else 0, fontsize=8)
    axis.set_yticks(range(classes), class_names, fontsize=8)
    right, total = int(np.trace(matrix)), int(matrix.sum())
    axis.set(xlabel="predicted class", ylabel="true class")
    axis.set_title(f"{right} of {total} right ({right / max(total, 1):.1%})", fontsize=10)
    figure.colorbar(picture, ax=axis, shrink=0.8, label="share of the true class")
    return figure


def plot_training_curves(rows: Sequence[Mapping[str, Any]], *, x: str = "step") -> Figure:
    """Draw what a training run logged: losses, accuracies and learning rates, whichever it has.

    Args:
        rows: One dictionary per logged line, such as `plain_vit.training.run.read_log` returns.
        x: The field across.

    Raises:
        ValueError: No row has `x` and a number whose name speaks of a loss, an accuracy or a learning rate.
    """
    panels = []
    for word, label in (("loss", "loss (nats)"), ("accuracy", "accuracy"), ("learning_rate", "learning rate")):
        names = sorted({name for row in rows for name in row if word in name})
        curves = {
            name: [(row[x], row[name]) for row in rows if x in row and row.get(name) is not None] for name in names
        }
        curves = {name: points for name, points in curves.items() if points}
        if curves:
            panels.append((label, curves))
    if not panels:
        raise ValueError(
            f"none of {len(rows)} rows has {x!r} and a loss, an accuracy or a learning rate: is it the log?"
        )
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (label, curves) in zip(axes, panels, strict=True):
        for i, (name, points) in enumerate(curves.items()):
            marker = "o" if len(points) <= 40 else None
            axis.plot(*zip(*points, strict=True), color=LINES[i % len(LINES)], label=name.replace("_", " "),
                      marker=marker, markersize=3, linewidth=1.5)  # fmt: skip
        axis.set(xlabel=x.replace("_", " "), ylabel=label)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1:
            axis.legend(fontsize=8, frameon=False)
    return figure


def _show_image(axis: Axes, image: np.ndarray) -> None:
    axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _show_map(axis: Axes, image: np.ndarray, weights: np.ndarray) -> None:
    """Tint an image, in grey, the stronger the higher the map is there; each map goes from 0 to its highest value."""
    grey = image if image.ndim == 2 else image @ np.array([0.299, 0.587, 0.114])
    height, width = grey.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axis.imshow(grey, cmap="gray", vmin=-0.25, vmax=1.25, interpolation="nearest")  # neither black nor white
    axis.imshow(weights, cmap=TINT, vmin=0, vmax=weights.max() or 1, extent=extent, interpolation="nearest")
    axis.set_axis_off()


def _relative_scale(figure: Figure, axes: np.ndarray, label: str) -> None:
    """Add the colour scale of maps that are each drawn from 0 to their highest value."""
    scale = figure.colorbar(
        ScalarMappable(Normalize(0, 1), TINT), ax=axes, label=label, fraction=0.03, pad=0.02, aspect=15
    )
    scale.set_ticks([0, 0.5, 1])
    scale.ax.tick_params(labelsize=8)
    scale.ax.yaxis.label.set_size(8)


def _short(name: str, length: int = 12) -> str:
    """Return the first of a class's names (ImageNet's classes list several), cut to a length that fits."""
    name = str(name).split(",")[0]
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _percent(share: float) -> str:
    """Return a share in percent, never rounded up to certainty."""
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"
