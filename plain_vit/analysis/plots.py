"""Figures of the results of the array functions. Each function returns a figure without showing or saving it.

The label of a figure, `figure.get_label()`, describes its content in words; pages use it as alternative text.

Colours are safe for colour-blind readers: sequential scales are cividis and viridis, signed ones range from purple to
orange, lines use the colours of Okabe and Ito.

Legend: `B` batch, `H W` pixels, `h w` patch grid.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..scores import REGRESSION, scores
from ..system.extras import needs
from .dense_plots import plot_correspondences, plot_patch_components, plot_patch_similarity  # noqa: F401
from .drawing import (
    add_title,
    aspect,
    blank,
    colour_scale,
    describe,
    describe_maps,
    highest_place,
    label_below,
    numbered,
    panels,
    percent,
    range_text,
    score_text,
    short_number,
    show_image,
    show_map,
    tint_scale,
)
from .embeddings import PatchFilters, PositionSimilarity, ResampledPositions
from .inspection import TokenLayout
from .words import class_labels, drawable, one_line, plain_figure

with needs("plain-vit[analysis]"):
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

SEQUENTIAL, SIGNED = "cividis", "PuOr"
RIGHT, WRONG, NEUTRAL = "#00735a", "#c04a00", "#404040"  # Okabe and Ito's bluish green and vermilion, darkened for text
ACROSS, UPWARDS = 40, 28  # characters of a label that fit a small panel; legends have room for UPWARDS
TRAINING = "train"  # the log's name for the training images
PHONE = 3.3  # inches: 363 pixels at the resolution of a page; margins leave 366 on a screen of 390 pixels
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def plot_maps_over_images(
    images: np.ndarray,
    maps: np.ndarray,
    *,
    titles: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    meaning: str = "attention",
) -> Figure:
    """Draw each image next to the same image overlaid with its map, and below it the range of the map.

    All maps share one scale, from 0 to their overall maximum, so that noise and uniform maps are recognisable.

    Args:
        images: Values in [0, 1] of shape (B, H, W, 3) or (B, H, W), as returned by `displayable`.
        maps: Maps of shape (B, h, w): rollout, Grad-CAM, or one head of `attention_maps`.
        titles: One title per image.
        classes: The class that each map explains, drawn instead of the title.
        meaning: Label of the colour scale.
    """
    above = titles if classes is None else classes
    height = 1.1 * aspect(images) + (0.5 if above is not None else 0.3)
    figure, axes = panels(len(images), 4, (1.3, 2.3), (0.1, height), each=2)
    low, high = min(0.0, float(maps.min())), float(maps.max())
    for i, ((plain, covered), image, weights) in enumerate(zip(axes, images, maps, strict=True)):
        show_image(plain, image)
        show_map(covered, image, weights, low, high)
        label_below(covered, range_text(weights))
        add_title(plain, above, i)
    tint_scale(figure, figure.axes, drawable(meaning), (short_number(low), short_number(high)))
    names = numbered(titles, len(images))
    if classes is not None:
        names = [f"{name} as {label}" for name, label in zip(names, classes, strict=True)]
    return describe_maps(figure, maps, names)


def plot_attention_heads(
    images: np.ndarray,
    maps: np.ndarray,
    *,
    row_names: Sequence[str] | None = None,
    column_names: Sequence[str] | None = None,
    most: int | None = None,
) -> Figure:
    """Draw a table of attention maps over images, each with its own scale from 0 to the map's maximum.

    The maximum is printed below each map. Maxima differ between heads by a factor of a hundred, so a common scale would
    show only the sharpest head.

    Args:
        images: Values in [0, 1]: one image of shape (H, W, 3) or (H, W) for all rows, or one such image per row.
        maps: Maps of shape (rows, columns, h, w): layers and heads of one image, `attention_maps(...)[0]`, or images
            and the heads of one layer, `attention_maps(...)[:, layer]`.
        row_names: Names of the rows (default: "layer 0" and so on).
        column_names: Names of the columns (default: "head 0" and so on).
        most: Maximum number of columns, evenly selected (default: all).
    """
    rows, columns = maps.shape[:2]
    drawn = spread(columns, most or columns)
    one = images.ndim == 2 or (images.ndim == 3 and images.shape[-1] == 3 and len(images) != rows)
    pictures = np.broadcast_to(images, (rows, *images.shape)) if one else images
    row_names = row_names or [f"layer {i}" for i in range(rows)]
    column_names = column_names or [f"head {i}" for i in range(columns)]
    size = 1.15 if len(drawn) <= 6 else 0.75  # twelve maps fit a page
    figure = plain_figure(1.4 + size * len(drawn), max(1.9, 0.4 + (size * aspect(pictures) + 0.17) * rows))
    axes = figure.subplots(rows, len(drawn), squeeze=False)
    highest = maps.max(axis=(2, 3))
    for i, image in enumerate(pictures):
        for axis, j in zip(axes[i], drawn, strict=True):
            show_map(axis, image, maps[i, j], 0.0, float(highest[i, j]))
            label_below(axis, short_number(highest[i, j]))
        axes[i, 0].set_ylabel(drawable(row_names[i]), fontsize=8)
    for axis, j in zip(axes[0], drawn, strict=True):
        axis.set_title(drawable(column_names[j]), fontsize=8)
    tint_scale(figure, axes, "attention", ("0", "number\nbelow\nthe map"))
    items = []
    for i, (sharp, flat) in enumerate(zip(highest.argmax(axis=1), highest.argmin(axis=1), strict=True)):
        items.append(
            f"{row_names[i]}: highest in {column_names[sharp]} ({short_number(highest[i, sharp])}, "
            f"{highest_place(maps[i, sharp])}), lowest in {column_names[flat]} (up to {short_number(highest[i, flat])})"
        )
    h, w = maps.shape[2:]
    return describe(figure, f"Attention to {h} x {w} patches, {columns} maps for each row", items)


def plot_top_classes(
    images: np.ndarray,
    probabilities: np.ndarray,
    class_names: Sequence[str],
    *,
    top: int = 5,
    titles: Sequence[str] | None = None,
    problem_type: str | None = None,
    columns: int = 2,
) -> Figure:
    """Draw images next to their most likely classes, or next to the outputs of a regression.

    Args:
        images: Values in [0, 1] of shape (B, H, W, 3) or (B, H, W), as returned by `displayable`.
        probabilities: Probabilities of shape (B, classes), or numbers, from `predict`.
        class_names: Names in the order of the classes.
        top: Number of classes.
        titles: One title per image.
        problem_type: From the model's config; the outputs of a `regression` keep their order.
        columns: Number of images side by side; one column is narrow enough for a phone.
    """
    names = class_labels(class_names, 18)
    count, top = len(images), min(top, probabilities.shape[1])
    width = PHONE if columns == 1 else 5.2
    ratios = (1, 1.6) * min(columns, count)
    figure, axes = panels(count, columns, (0, width), (0.4, 1.75), each=2, width_ratios=ratios)
    items = []
    for i, ((picture, axis), image) in enumerate(zip(axes, images, strict=True)):
        show_image(picture, image)
        if titles is not None and columns == 1:
            picture.set_title(drawable(titles[i]), fontsize=8, loc="left")
        else:
            add_title(picture, titles, i)
        axis.set_axis_on()
        first = leading(probabilities[i], problem_type)[:top]
        bars = axis.barh(range(top), probabilities[i, first], color=LINES[5])
        texts = [score_text(value, problem_type) for value in probabilities[i, first]]
        axis.bar_label(bars, texts, padding=3, fontsize=8)
        axis.set_yticks(range(top), [names[place] for place in first], fontsize=8)
        axis.set_ylim(top - 0.5, -0.5)
        axis.tick_params(axis="x", labelsize=8)
        if problem_type == REGRESSION:
            least, most = min(probabilities.min(), 0), max(probabilities.max(), 0)
            room = 0.5 * (most - least)  # for the labels of the bars
            axis.set_xlim(least - room * (least < 0), most + room * (most > 0))
            axis.set_xlabel("number", fontsize=8)
        else:
            axis.set(xlim=(0, 1.18), xticks=[0, 0.5, 1])
            axis.set_xlabel("probability", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        items.append(", ".join(f"{names[place]} {text}" for place, text in zip(first[:3], texts, strict=False)))
    what = "numbers" if problem_type == REGRESSION else "most likely classes"
    items = [f"{title}: {item}" for title, item in zip(numbered(titles, count), items, strict=True)]
    return describe(figure, f"Bars of the {what} of each image", items)


def plot_predictions(
    images: Sequence[np.ndarray] | np.ndarray,
    probabilities: np.ndarray,
    class_names: Sequence[str],
    labels: Sequence[int] | np.ndarray | None = None,
) -> Figure:
    """Draw images with predicted class and confidence; a mark shows whether the prediction is correct.

    Args:
        images: Values in [0, 1] of shape (H, W, 3) or (H, W), as returned by `displayable`; each may have its own size.
        probabilities: Probabilities of shape (B, classes), from `predict`.
        class_names: Names in the order of the classes.
        labels: True classes of shape (B,), if known.
    """
    names = class_labels(class_names)
    figure, axes = panels(len(images), 7, (0, 1.5), (0.3, 1.85))
    items = []
    for i, (axis, image) in enumerate(zip(axes.flat, images, strict=True)):
        predicted = int(probabilities[i].argmax())
        confidence = percent(probabilities[i, predicted])
        text = f"{names[predicted]}: {confidence}"
        truth = "" if labels is None else f"{names[labels[i]]} "
        items.append(f"{truth}predicted as {names[predicted]} ({confidence})")
        colour = NEUTRAL
        if labels is not None:
            right = predicted == labels[i]
            colour = RIGHT if right else WRONG
            text = f"✓ {text}" if right else f"✗ {text}\nis {names[labels[i]]}"
        show_image(axis, image)
        axis.set_axis_on()
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set(color=colour, linewidth=2.5)
        axis.set_title(text, fontsize=8, color=colour)
    return describe(figure, f"{len(items)} images", items)


def plot_training_batch(
    images: Sequence[np.ndarray] | np.ndarray, shares: np.ndarray, class_names: Sequence[str]
) -> Figure:
    """Draw training images with their labels; for a blended image, with the share of each class.

    Args:
        images: Values in [0, 1] of shape (H, W, 3) or (H, W), as returned by `displayable`; each may have its own size.
        shares: Share of each class, of shape (B, classes); an image that is not blended has a single 1.
        class_names: Names in the order of the classes.
    """
    names = class_labels(class_names)
    figure, axes = panels(len(images), 8, (0, 1.5), (0.3, 1.75))
    for axis, image, its_shares in zip(axes.flat, images, shares, strict=True):
        show_image(axis, image)
        likeliest = np.argsort(-its_shares, kind="stable")
        shown = [number for number in likeliest[:2] if its_shares[number] > 0]
        blended = its_shares[likeliest[0]] < 1
        text = [f"{names[number]}: {percent(its_shares[number])}" if blended else names[number] for number in shown]
        axis.set_title("\n".join(text), fontsize=8)
    return figure


def plot_confusion_matrix(matrix: np.ndarray, class_names: Sequence[str]) -> Figure:
    """Draw a confusion matrix, coloured by the fraction of the true class.

    Args:
        matrix: Counts of shape (classes, classes), from `confusion_matrix`.
        class_names: Names in the order of the classes.
    """
    classes, names = len(matrix), class_labels(class_names, 16)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    few = classes <= 40
    size = 0.45 * classes if few else 10
    figure = plain_figure(2.2 + size, 1.4 + size)
    axis = figure.subplots()
    picture = axis.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=1)
    if few:
        for (row, column), number in np.ndenumerate(matrix):
            if number:
                colour = "black" if shares[row, column] > 0.5 else "white"
                axis.text(column, row, str(number), ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(classes), names, rotation=90 if max(map(len, names)) > 3 else 0, fontsize=8)
        axis.set_yticks(range(classes), names, fontsize=8)
    right, total = int(np.trace(matrix)), int(matrix.sum())
    number_of = "" if few else ", by number"
    axis.set(xlabel=f"predicted class{number_of}", ylabel=f"true class{number_of}")
    axis.set_title(f"{right} of {total} right ({right / max(total, 1):.1%})", fontsize=10)
    figure.colorbar(picture, ax=axis, shrink=0.8, label="fraction of the true class")
    wrong = matrix - np.diag(np.diag(matrix))
    i, j = np.unravel_index(wrong.argmax(), wrong.shape)
    worst = f"; most often {names[i]} is predicted as {names[j]}, {wrong[i, j]} times" if wrong.any() else ""
    return describe(figure, f"A matrix of {classes} classes: {right} of {total} images are on its diagonal{worst}")


def plot_confused_pairs(counts: Sequence[int], shares: Sequence[float], pairs: Sequence[tuple[str, str]]) -> Figure:
    """Draw the counts of the most frequent confusions.

    Args:
        counts: Number of images for each pair.
        shares: The same as fractions of the true class.
        pairs: Names of the true and of the predicted class.
    """
    figure = plain_figure(6.4, 0.9 + 0.3 * len(pairs))
    axis = figure.subplots()
    bars = axis.barh(range(len(pairs)), counts, color=LINES[1], height=0.7)
    labels = [f"{count} ({percent(share)})" for count, share in zip(counts, shares, strict=True)]
    axis.bar_label(bars, labels, padding=3, fontsize=8)
    classes = list(dict.fromkeys(name for pair in pairs for name in pair))
    names_of = dict(zip(classes, class_labels(classes, 18), strict=True))
    names = [f"{names_of[true]} predicted as {names_of[predicted]}" for true, predicted in pairs]
    axis.set_yticks(range(len(pairs)), names, fontsize=8)
    axis.set(xlim=(0, 1.25 * max(counts)), ylim=(len(pairs) - 0.4, -0.6))
    axis.set_xlabel("images (and fraction of the true class)", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    return describe(figure, f"Bars of {len(pairs)} pairs of classes; the longest: {names[0]}, {counts[0]} times")


def plot_reliability(
    counts: np.ndarray,
    confidences: np.ndarray,
    accuracies: np.ndarray,
    *,
    of: str = "images",
    x: str = "probability of the predicted class",
) -> Figure:
    """Draw a reliability diagram: the accuracy and the number of predictions in each bin of confidence.

    Args:
        counts: Number of images in each bin of confidence, of shape (bins,); the bins divide 0 to 1 evenly.
        confidences: Mean confidence in each bin, NaN without images.
        accuracies: Fraction of correct predictions in each bin.
        of: What the bins count.
        x: Label of the horizontal axis.
    """
    figure = plain_figure(4.6, 5.2)
    axis, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges = np.linspace(0, 1, len(counts) + 1)
    middles, width = (edges[1:] + edges[:-1]) / 2, 0.9 / len(counts)
    axis.bar(middles, np.nan_to_num(accuracies), width=width, color=LINES[0])
    axis.plot([0, 1], [0, 1], color=LINES[1], linewidth=1, linestyle="--")
    filled = counts > 0
    axis.plot(confidences[filled], accuracies[filled], color=LINES[1], marker="o", markersize=3, linewidth=1)
    axis.set(ylabel="fraction correct", ylim=(0, 1), xlim=(0, 1))
    below.bar(middles, counts, width=width, color=LINES[0])
    below.set(xlabel=one_line(x, ACROSS), ylabel=one_line(of, UPWARDS))
    for each in (axis, below):
        _tidy(each)
    below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    items = [
        f"{counts[i]} {of} with a mean confidence of {percent(confidences[i])}: {percent(accuracies[i])} correct"
        for i in np.flatnonzero(filled)
    ]
    return describe(figure, "Bars of the fraction correct by confidence", items)


def plot_predicted_numbers(targets: np.ndarray, predictions: np.ndarray, names: Sequence[str], most: int = 6) -> Figure:
    """Draw predicted numbers over true ones.

    Args:
        targets: True numbers of shape (B, numbers).
        predictions: Predicted numbers, of the same shape.
        names: Names of the numbers.
        most: Maximum number of regression outputs to draw.
    """
    count = min(most, len(names))
    figure = plain_figure(3.6 * count, 3.4)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis, true, predicted, name in zip(axes, targets.T, predictions.T, names, strict=False):
        axis.scatter(true, predicted, s=8, color=LINES[0], alpha=0.5, linewidths=0)
        low, high = min(true.min(), predicted.min()), max(true.max(), predicted.max())
        axis.plot([low, high], [low, high], color=LINES[1], linewidth=1, linestyle="--")
        axis.set(xlabel=f"true {one_line(name, ACROSS)}", ylabel="predicted")
        _tidy(axis)
    return describe(figure, f"Points of {len(targets)} images, the prediction over the target")


def plot_training_curves(rows: Sequence[Mapping[str, Any]], *, x: str = "step") -> Figure:
    """Draw the losses, accuracies and learning rates in the log of a training run.

    A colour stands for the same images in every panel: the first colour for the training images and the learning rate.

    Args:
        rows: One dictionary per log entry, as returned by `plain_vit.training.run.folder.read_log`, or alike.
        x: Field of the horizontal axis.

    Raises:
        ValueError: No row has `x` and a loss, an accuracy or a learning rate.
    """
    panels = []
    for word, label in (("loss", "loss (nats)"), ("accuracy", "accuracy"), ("learning_rate", "learning rate")):
        names = sorted({name for row in rows for name in row if word in name and "/" not in name})  # not of a group
        curves = {
            name: [(row[x], row[name]) for row in rows if x in row and row.get(name) is not None] for name in names
        }
        curves = {name: points for name, points in curves.items() if points}
        if curves:
            panels.append((label, curves))
    if not panels:
        raise ValueError(
            f"none of {len(rows)} rows has {x!r} and a loss, an accuracy or a learning rate: expected a log"
        )
    figure = plain_figure(4.2 * len(panels), 3.2)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    measured = sorted({_measured_on(name) for _, curves in panels for name in curves} - {TRAINING})
    looks = {
        name: (LINES[i % len(LINES)], "-" if i < len(LINES) else ":") for i, name in enumerate([TRAINING, *measured])
    }
    for axis, (label, curves) in zip(axes, panels, strict=True):
        for name, points in curves.items():
            marker, (colour, style) = "o" if len(points) <= 40 else None, looks[_measured_on(name)]
            axis.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker=marker, markersize=3,
                      linewidth=1.5)  # fmt: skip
        several = len(curves) > 1
        axis.set(xlabel=one_line(x.replace("_", " "), ACROSS), ylabel=label if several else _with_unit(label, *curves))
        _tidy(axis)
        if several:
            _legend(axis, [name.replace("_", " ") for name in curves])
    items = [
        f"{name.replace('_', ' ')} goes from {points[0][1]:.3g} to {points[-1][1]:.3g}"
        for _, curves in panels for name, points in curves.items()
    ]  # fmt: skip
    return describe(figure, f"Curves over the {x.replace('_', ' ')}s of the run", items)


def _measured_on(name: str) -> str:
    """Return the images that a curve was measured on: "test" for `test_loss`, for example, otherwise "train"."""
    for word in ("loss", "accuracy", "learning_rate"):
        name = name.replace(word, "")
    return name.strip("_") or TRAINING


def plot_learning_rates(rates: np.ndarray, losses: np.ndarray, smooth: np.ndarray) -> Figure:
    """Draw the losses of a learning-rate range test.

    Args:
        rates: Learning rates of shape (steps,), positive.
        losses: Losses in nats of shape (steps,).
        smooth: Moving averages of the losses.
    """
    figure = plain_figure(4.8, 3.4)
    axis = figure.subplots()
    axis.plot(rates, losses, color=LINES[0], linewidth=0.8, alpha=0.5)
    axis.plot(rates, smooth, color=LINES[1], linewidth=1.8)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda rate, place: f"{rate:.0e}")  # matplotlib's own formatter needs math text
    axis.xaxis.set_minor_formatter(lambda rate, place: "")
    axis.set_ylim(min(losses.min(), smooth.min()) - 0.05, 2 * smooth[0] - smooth.min())
    axis.set(xlabel="learning rate", ylabel="loss (nats)")
    _tidy(axis)
    _legend(axis, ["of a step", "moving average"])
    return figure


def plot_step_times(seconds: Mapping[str, Sequence[float]]) -> Figure:
    """Draw where the time of training steps goes.

    Args:
        seconds: Seconds in each step by phase; the phases follow one another.
    """
    left = np.zeros(len(next(iter(seconds.values()))))
    figure = plain_figure(6.4, 1.4 + 0.3 * len(left))
    axis = figure.subplots()
    for colour, (name, values) in zip(LINES, seconds.items(), strict=False):
        times = 1e3 * np.asarray(values)
        axis.barh(np.arange(len(times)) + 1, times, left=left, color=colour, label=one_line(name, UPWARDS))
        left = left + times
    axis.invert_yaxis()
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="milliseconds", ylabel="profiled step")
    _tidy(axis)
    figure.legend(loc="outside upper center", ncols=len(seconds), fontsize=8, frameon=False)
    items = [f"{name} {1e3 * np.mean(values):.3g} ms" for name, values in seconds.items()]
    return describe(figure, "Time of the profiled steps, in the mean", items)


def plot_patch_filters(filters: PatchFilters) -> Figure:
    """Draw principal components of the patch-embedding filters as tiles, with their explained variance.

    Three channels are drawn in colour, one in grey; otherwise each component is a row of its first twelve channels.

    Args:
        filters: From `patch_filters`.
    """
    components = filters.components
    count, channels = components.shape[:2]
    scaled = components / np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    in_one = channels in (1, 3)
    columns = min(7, count) if in_one else min(12, channels)
    rows = math.ceil(count / columns) if in_one else count
    figure = plain_figure(1.5 + 0.95 * columns, 0.9 + 1.05 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i, (component, share) in enumerate(zip(scaled, filters.explained_variance, strict=True)):
        label = f"{i}: {share:.1%}"
        if in_one:
            axis = axes.flat[i]
            axis.imshow((component.transpose(1, 2, 0).squeeze() + 1) / 2, cmap="gray", vmin=0, vmax=1)
            axis.set_title(label, fontsize=8)
        else:
            for channel, tile in enumerate(component[:columns]):
                axes[i, channel].imshow((tile + 1) / 2, cmap="gray", vmin=0, vmax=1)
                if i == 0:
                    axes[i, channel].set_title(f"channel {channel}", fontsize=8)
            axes[i, 0].text(-0.15, 0.5, label, transform=axes[i, 0].transAxes, ha="right", va="center", fontsize=8)
    shown = filters.explained_variance.sum()
    rest = "" if in_one or channels == columns else f"; {columns} of {channels} channels"
    figure.suptitle(f"component: fraction of the filters' variance ({shown:.1%} in total){rest}", fontsize=9)
    meaning = "weight of a pixel" + (" (of each colour)" if channels == 3 else "")
    colour_scale(figure, ScalarMappable(Normalize(-1, 1), "gray"), axes, meaning,
                 {-1: "lowest", 0: "0", 1: "highest"}, fraction=0.04, pad=0.02, aspect=15)  # fmt: skip
    first = f"component 0 holds {filters.explained_variance[0]:.1%} of the filters' variance"
    return describe(figure, f"{count} components as tiles: {first}, all of them {shown:.1%}")


def plot_position_similarity(similarity: PositionSimilarity) -> Figure:
    """Draw for each patch the similarity of its position embedding to the embeddings of all patches.

    Args:
        similarity: From `position_similarity`; on grids above 14 x 14, an even selection of patches is drawn.
    """
    h, w = similarity.patches.shape[:2]
    rows, columns = spread(h, 14), spread(w, 14)
    gap = max(1, round(max(h, w) / 10))
    tall, wide = h + gap, w + gap  # tile plus gap
    mosaic = np.full((len(rows) * tall - gap, len(columns) * wide - gap), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            mosaic[i * tall : i * tall + h, j * wide : j * wide + w] = similarity.patches[row, column]
    size = min(0.8, 7.5 / max(len(rows), len(columns)))  # inches of a tile's longer side
    longer = max(tall, wide)
    figure = plain_figure(1.9 + size * len(columns) * wide / longer, 1.0 + size * len(rows) * tall / longer)
    axis = figure.subplots()
    shown = axis.imshow(mosaic, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    axis.set_xticks([j * wide + (w - 1) / 2 for j in range(len(columns))], map(str, columns), fontsize=8)
    axis.set_yticks([i * tall + (h - 1) / 2 for i in range(len(rows))], map(str, rows), fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_xlabel("column of the patch", fontsize=9)
    axis.set_ylabel("row of the patch", fontsize=9)
    colour_scale(figure, shown, axis, "cosine with the position of each patch", shrink=0.9, aspect=20)
    down, across = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    apart = np.hypot(down[..., None, None] - down, across[..., None, None] - across)
    near, far = similarity.patches[apart == 1], similarity.patches[apart > max(h, w) / 2]
    items = [
        f"{what} have a cosine of {values.mean():.2f} on average"
        for what, values in (("neighbouring patches", near), ("patches more than half the grid apart", far))
        if values.size
    ]
    return describe(figure, f"A tile for each of {h} x {w} patches", items)


def plot_relative_position_biases(biases: np.ndarray) -> Figure:
    """Draw the relative position bias by offset between patches, with a row per layer and a column per head.

    Args:
        biases: From `relative_position_biases`; above eight layers or heads, an even selection is drawn.
    """
    layers, heads = spread(len(biases), 8), spread(biases.shape[1], 8)
    h, w = ((count + 1) // 2 for count in biases.shape[2:])
    limit = max(float(np.abs(biases).max()), 1e-12)
    figure = plain_figure(1.6 + 1.0 * len(heads), 1.2 + 1.0 * len(layers) * min(2.0, biases.shape[2] / biases.shape[3]))
    axes = figure.subplots(len(layers), len(heads), squeeze=False)
    for row, layer in zip(axes, layers, strict=True):
        for axis, head in zip(row, heads, strict=True):
            axis.imshow(biases[layer, head], cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest",
                        extent=(0.5 - w, w - 0.5, h - 0.5, 0.5 - h))  # fmt: skip
            axis.set_xticks([])
            axis.set_yticks([])
    for axis, head in zip(axes[0], heads, strict=True):
        axis.set_title(f"head {head}", fontsize=8)
    for axis, layer in zip(axes[:, 0], layers, strict=True):
        axis.set_ylabel(f"layer {layer}" if len(biases) > 1 else "all layers", fontsize=8)
    for side in (axes[-1, 0].xaxis, axes[-1, 0].yaxis):
        side.set_major_locator(MaxNLocator(3, integer=True))
    axes[-1, 0].tick_params(labelsize=7)
    axes[-1, 0].set_xlabel("patches across", fontsize=8)
    figure.align_ylabels(axes[:, 0])
    colours = ScalarMappable(Normalize(-limit, limit), "RdBu_r")
    colour_scale(figure, colours, axes, "added to the attention score", fraction=0.05, pad=0.02, aspect=20)
    rows, columns = biases.shape[2:]
    itself = biases[:, :, rows // 2, columns // 2].mean()
    return describe(
        figure,
        f"A map of {rows} x {columns} distances for each of {biases.shape[1]} heads: the biases go from "
        f"{range_text(biases)}, with a mean of {short_number(itself)} from a patch to itself and of "
        f"{short_number(biases.mean())} over all distances",
    )


def plot_prefix_similarity(similarity: PositionSimilarity, names: Sequence[str]) -> Figure:
    """Draw the similarity between the positions of the tokens before the patches and the positions of the patches.

    Args:
        similarity: From `position_similarity`.
        names: Names of the tokens before the patches, `token_layout(...).before`.

    Raises:
        ValueError: The number of names differs from the number of tokens that have a position.
    """
    if len(names) != len(similarity.prefix) or not names:
        raise ValueError(
            f"got {len(names)} names for {len(similarity.prefix)} tokens with positions: expected one for each"
        )
    figure = plain_figure(1.8 + 1.9 * len(names), 2.8)
    axes = figure.subplots(1, len(names), squeeze=False)
    for axis, name, grid in zip(axes[0], names, similarity.prefix, strict=True):
        axis.imshow(grid, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        axis.set_title(drawable(name), fontsize=9)
        axis.set_xlabel("column of the patch", fontsize=8)
        _whole_ticks(axis)
    axes[0, 0].set_ylabel("row of the patch", fontsize=8)
    colours = ScalarMappable(Normalize(-1, 1), "viridis")
    colour_scale(figure, colours, axes, "cosine with each patch", fraction=0.05, pad=0.02, aspect=15)
    return describe_maps(figure, similarity.prefix, names)


def plot_attention_distance(distances: np.ndarray, *, even: float | None = None) -> Figure:
    """Draw the mean attention distance of each head of each layer.

    Args:
        distances: Distances of shape (layers, heads), in pixels: the mean of `attention_distance` over images.
        even: The distance for uniform attention, in pixels: the mean of `patch_distances`.
    """
    depth, heads = distances.shape
    figure = plain_figure(max(5.0, 1.5 + 0.32 * depth), 3.6)
    axis = figure.subplots()
    for layer, values in enumerate(distances):
        axis.scatter([layer] * heads, values, s=22, color=LINES[0], alpha=0.75, linewidths=0,
                     label="one head" if layer == 0 else None)  # fmt: skip
    axis.plot(range(depth), distances.mean(axis=1), color=LINES[1], linewidth=1.5, label="mean of the heads")
    axis.set(xlabel="layer", ylabel="mean attention distance (pixels)")
    if even is not None:
        axis.axhline(even, color=LINES[6], linestyle=":", linewidth=1.5, label="uniform attention")
    axis.set_ylim(0, 1.08 * axis.dataLim.y1 or 1)  # all may be 0
    axis.set_xticks(range(0, depth, math.ceil(depth / 16)))
    _tidy(axis)
    figure.legend(fontsize=8, frameon=False, loc="outside lower left", ncols=3)
    means = distances.mean(axis=1)
    near, far = (np.unravel_index(place, distances.shape) for place in (distances.argmin(), distances.argmax()))
    return describe(
        figure,
        f"A point for each head. The mean of the heads goes from {means[0]:.1f} pixels in layer 0 to {means[-1]:.1f} "
        f"in layer {depth - 1}; head {near[1]} of layer {near[0]} has the shortest ({distances[near]:.1f}), head "
        f"{far[1]} of layer {far[0]} the longest ({distances[far]:.1f})"
        + ("" if even is None else f"; uniform attention would be at {even:.1f}"),
    )


def plot_logit_lens(
    images: np.ndarray,
    logits: np.ndarray,
    class_names: Sequence[str],
    *,
    top: int = 5,
    titles: Sequence[str] | None = None,
    problem_type: str | None = None,
) -> Figure:
    """Draw the probabilities of the most likely classes by layer, or the outputs of a regression.

    Args:
        images: Values in [0, 1] of shape (B, H, W, 3) or (B, H, W), as returned by `displayable`.
        logits: Logits of shape (B, layers + 1, classes), from `logit_lens`.
        class_names: Names in the order of the classes.
        top: Number of classes, the most likely after the last layer.
        titles: One title per image.
        problem_type: From the model's config.
    """
    names = class_labels(class_names, 18)
    values = scores(torch.from_numpy(logits), problem_type).numpy()
    depth = logits.shape[1] - 1
    width = max(3.6, 1.2 + 0.3 * depth)
    figure = plain_figure(1.6 + width + 1.4, 2.1 * len(images) + 0.3)
    axes = figure.subplots(len(images), 2, squeeze=False, width_ratios=(1.5, width))
    for i, (image, curves) in enumerate(zip(images, values, strict=True)):
        picture, axis = axes[i]
        show_image(picture, image)
        picture.set_axis_off()
        add_title(picture, titles, i)
        first = leading(curves[-1], problem_type)[: min(top, len(LINES))]
        for place, name in enumerate(first):
            axis.plot(range(depth + 1), curves[:, name], color=LINES[place], marker="osD^vP*"[place], markersize=4)
        if problem_type == REGRESSION:
            axis.set_ylabel("number")
        else:
            axis.set(ylabel="probability", ylim=(-0.03, 1.03))
        _layer_ticks(axis, depth)
        _tidy(axis)
        labels = [f"{names[place]}: {score_text(curves[-1, place], problem_type)}" for place in first]
        _legend(axis, labels, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[-1, 1].set_xlabel("after the embeddings, then after layer")
    stories = [_story(each, names, problem_type) for each in logits]
    items = [f"{title}: {story}" for title, story in zip(numbered(titles, len(images)), stories, strict=True)]
    if problem_type == REGRESSION:
        return describe(figure, "Lines of numbers from the embeddings to the last layer", items)
    return describe(figure, "Lines of probability over the layers", items)


def _story(logits: np.ndarray, names: Sequence[str], problem_type: str | None) -> str:
    """Say from which layer on the final class leads, or where the outputs of a regression begin and end."""
    if problem_type == REGRESSION:
        return ", ".join(
            f"{name} {score_text(first, problem_type)} to {score_text(last, problem_type)}"
            for name, first, last in zip(names[:3], logits[0], logits[-1], strict=False)
        )
    leaders = logits.argmax(axis=-1)
    others = np.flatnonzero(leaders != leaders[-1])
    since = f"layer {others[-1]}" if len(others) else "the embeddings"  # row 0 is the embeddings, row 1 layer 0
    return f"{names[leaders[-1]]} is the most likely class from {since} on"


def plot_token_norms(norms: np.ndarray, layout: TokenLayout, image: np.ndarray) -> Figure:
    """Draw the token norms of one image by layer, and a map of the patch norms of the last layer.

    Args:
        norms: Norms of shape (layers + 1, L), from `token_norms(...)[0]`.
        layout: The token layout, from `token_layout`.
        image: Values in [0, 1] of shape (H, W, 3) or (H, W).
    """
    depth = len(norms) - 1
    figure = plain_figure(10, 3.5)
    axis, picture, grid = figure.subplots(1, 3, width_ratios=(2, 1, 1.25))
    patches = norms[:, layout.patches]
    axis.fill_between(range(depth + 1), patches.min(axis=1), patches.max(axis=1), color=LINES[5], alpha=0.4, lw=0,
                      label="patches, minimum to maximum")  # fmt: skip
    axis.plot(range(depth + 1), np.median(patches, axis=1), color=LINES[0], label="patches, median")
    others = [*enumerate(layout.before), *enumerate(layout.after, layout.patches.stop)]
    colours = (LINES[1], LINES[2], LINES[3], LINES[4], LINES[6])
    for i, (position, name) in enumerate(others):
        axis.plot(range(depth + 1), norms[:, position], color=colours[i % 5], linestyle="--", label=drawable(name))
    axis.set(xlabel="after the embeddings, then after layer", ylabel="norm of a token")
    axis.set_ylim(0, 1.08 * axis.dataLim.y1 or 1)  # all may be 0
    _layer_ticks(axis, depth)
    _tidy(axis)
    figure.legend(fontsize=8, frameon=False, loc="outside lower left", ncols=4)
    show_image(picture, image)
    picture.set_axis_off()
    picture.set_title("image", fontsize=9)
    shown = grid.imshow(patches[-1].reshape(layout.grid_size), cmap="viridis", interpolation="nearest")
    grid.set_aspect(layout.patch_size[0] / layout.patch_size[1])
    blank(grid)
    grid.set_title(f"patches after layer {depth - 1}", fontsize=9)
    figure.colorbar(shown, ax=grid, label="norm of a token", shrink=0.85).ax.tick_params(labelsize=8)
    first, last = (short_number(np.median(values)) for values in (patches[0], patches[-1]))
    return describe(
        figure,
        f"The median patch has a norm of {first} after the embeddings and of {last} after layer {depth - 1}, where the "
        f"largest is {short_number(patches[-1].max())}, {highest_place(patches[-1].reshape(layout.grid_size))}",
    )


def plot_contributions(
    images: np.ndarray, contributions: np.ndarray, *, titles: Sequence[str] | None = None, unit: str = "class score"
) -> Figure:
    """Draw each image next to the contributions of its pixels to the class score.

    Args:
        images: Values in [0, 1] of shape (B, H, W, 3) or (B, H, W), as returned by `displayable`.
        contributions: Contributions of shape (B, C, H, W), from `integrated_gradients`; channels are summed.
        titles: One title per image.
        unit: The quantity that the contributions sum to.
    """
    figure, axes = panels(len(images), 3, (0, 4.3), (0.3, 1.9), each=2)
    for i, ((picture, axis), image, parts) in enumerate(zip(axes, images, contributions.sum(axis=1), strict=True)):
        show_image(picture, image)
        add_title(picture, titles, i)
        # With the full range, a few strong pixels would leave the rest white.
        limit = float(np.quantile(np.abs(parts), 0.99)) or 1.0
        shown = axis.imshow(parts, cmap=SIGNED, vmin=-limit, vmax=limit, interpolation="nearest")
        colour_scale(figure, shown, axis, drawable(f"part of the {unit}"), size=7, shrink=0.85, extend="both")
    return figure


def plot_resampled_positions(positions: ResampledPositions, count: int = 4) -> Figure:
    """Draw the position embeddings on both grids, projected on the principal components of the model's own grid.

    Args:
        positions: From `resampled_positions`.
        count: Number of principal components.
    """
    before = positions.before.reshape(-1, positions.before.shape[-1])
    centre = before.mean(axis=0)
    directions = np.linalg.svd(before - centre, full_matrices=False)[2][:count]
    grids = [(grid - centre) @ directions.T for grid in (positions.before, positions.after)]
    figure = plain_figure(1.2 + 2.1 * len(directions), 4.2)
    axes = figure.subplots(2, len(directions), squeeze=False)
    for j in range(len(directions)):
        limit = float(np.abs(np.concatenate([grid[..., j].ravel() for grid in grids])).max())
        for i, (grid, when) in enumerate(zip(grids, ("before", "after"), strict=True)):
            axis = axes[i, j]
            shown = axis.imshow(grid[..., j], cmap=SIGNED, vmin=-limit, vmax=limit, interpolation="nearest")
            _whole_ticks(axis)
            if i == 0:
                axis.set_title(f"component {j}", fontsize=9)
            if j == 0:
                h, w = grid.shape[:2]
                axis.set_ylabel(f"{when}: {h} x {w}\nrow of the patch", fontsize=8)
            if i == 1:
                axis.set_xlabel("column of the patch", fontsize=8)
        colour_scale(figure, shown, axes[:, j], "value", size=7, location="bottom", shrink=0.9, aspect=15, pad=0.02)
    return figure


def _legend(axis: Axes, labels: Sequence[str], **place: Any) -> None:
    """Label the lines in order; matplotlib itself would omit labels that begin with an underscore."""
    axis.legend(axis.lines, [one_line(label, UPWARDS) for label in labels], fontsize=8, frameon=False, **place)


def _layer_ticks(axis: Axes, depth: int) -> None:
    """Label the ticks after the embeddings and after each layer, numbered from 0."""
    every = math.ceil((depth + 1) / 13)
    axis.set_xticks(range(depth + 1)[::every], ["emb.", *(str(layer) for layer in range(depth))][::every], fontsize=8)


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` indices below `count`, evenly spread from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def _whole_ticks(axis: Axes) -> None:
    """Use integer ticks."""
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(6, integer=True))
    axis.tick_params(labelsize=8)


def _tidy(axis: Axes) -> None:
    """Draw a light grid, and hide the top and right frame."""
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _with_unit(label: str, field: str) -> str:
    """Return the name of a panel's only field with the unit in the panel's label."""
    _, bracket, unit = label.partition(" (")
    return one_line(field.replace("_", " "), UPWARDS) + bracket + unit


def leading(values: np.ndarray, problem_type: str | None) -> np.ndarray:
    """Return the classes sorted by scores of shape (classes,), descending; regression outputs keep their order."""
    return np.arange(len(values)) if problem_type == REGRESSION else values.argsort()[::-1]
