"""Report of a run: figures and a self-contained page."""

import platform
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...analysis import confusion_matrix
from ...analysis.page import framed, html_page, html_table, inline_picture, plain_text
from ...errors import counted
from ...files.staging import staged_file
from ...system.environment import version
from ...system.extras import needs
from ..data.decoding import as_files
from ..data.identity import image_paths
from ..data.inputs import model_inputs
from ..metrics import Evaluation, predictions_table
from ..run.folder import read_log, write_file
from ..vector_metrics import VectorEvaluation, vector_table
from .mistakes import confident_mistakes, confused_pairs, results_by_class, top_accuracy
from .show_batch import displayable_images
from .snapshots import OptionalFigure, Snapshots
from .vector_report import Section, reliability, vector_sections

with needs("plain-vit[train]"):
    from datasets import Dataset
    from matplotlib.figure import Figure

    from ...analysis import descriptions
    from ...analysis.plots import (
        plot_confused_pairs,
        plot_confusion_matrix,
        plot_predictions,
        plot_training_curves,
    )
    from ...analysis.words import class_labels

MATRIX_CLASSES = 1000  # beyond that a confusion matrix is larger than a screen
OPEN_TABLE = 30  # classes; a longer table is collapsed
DPI = 110
PAGE = 10.4  # inches at this resolution that the page is wide
PACKAGES = ("plain-vit", "torch", "torchvision", "transformers", "accelerate", "datasets")


def environment() -> dict[str, str]:
    """Return the environment of a run: versions and the device."""
    threads = counted(torch.get_num_threads(), "thread")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {threads}"
    return {
        "Python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "device": device,
    }


def write_report(
    snapshots: Snapshots,
    facts: Mapping[str, Mapping[str, object]],
    evaluation: Evaluation | VectorEvaluation,
    split: Dataset,
    *,
    split_name: str,
    model: nn.Module,
) -> Path:
    """Write the report of a run to the subfolder `report`.

    Args:
        snapshots: Snapshots of the model during training.
        facts: Tables of facts about the run, by title.
        evaluation: Evaluation of the split.
        split: Rows with an `image` and a `label`, as evaluated.
        split_name: Name of the split.
        model: The evaluated model.

    Returns:
        The path of the page.
    """
    run, class_names, image_processor = snapshots.run, snapshots.class_names, snapshots.image_processor
    folder = run / "report"
    folder.mkdir(exist_ok=True)
    parts = [_tables(facts)]
    section = partial(_section, folder)
    parts += section(
        "Training curves",
        "Training values are means since the last logged step, over augmented images and of the training loss: with "
        "label smoothing it cannot reach 0. Values of other splits are cross-entropies of whole images, without "
        "dropout.",
        {"curves": ("", _curves(run))},
    )
    if isinstance(evaluation, Evaluation):
        parts += _class_sections(section, evaluation, split, class_names, image_processor, split_name)
    else:
        parts += vector_sections(section, evaluation, class_names, split_name)
    parts += section(
        "Attention during training",
        "Attention of the last layer, mean of the heads, from the class token or, in models without one, averaged "
        "over all patches. Orange marks high values; each map has its own scale, from 0 to the value below it. The "
        "images are the same throughout.",
        {"attention": ("", snapshots.attention(model))},
    )
    positions = snapshots.positions(model)
    parts += section(
        "Position-embedding similarity",
        "Each tile belongs to the patch of its row and column, and shows the cosine similarity between the position "
        "embedding of that patch and those of all patches.",
        {f"positions_{i}": (when, picture) for i, (when, picture) in enumerate(positions.items())},
    )
    write_file(folder / "index.html", html_page(f"{run.resolve().name}: report of the run", "\n".join(parts)))
    return folder / "index.html"


def _class_sections(
    section: Section,
    evaluation: Evaluation,
    split: Dataset,
    class_names: list[str],
    image_processor: Any,
    split_name: str,
) -> list[str]:
    """Return the sections about the evaluation of a classifier."""
    parts = section(
        f"Calibration on the {split_name} split",
        "How often predictions of each confidence are correct; on the diagonal, as often as their confidence says. The "
        f"expected calibration error, {evaluation.calibration.error:.1%}, is the mean distance to it over the images.",
        {"reliability": ("", reliability(evaluation.calibration))},
    )
    parts += section(
        f"Confusion matrix of the {split_name} split",
        "Rows are true classes, columns predicted ones. The numbers count images, the colour is the fraction "
        "of the true class.",
        {"confusion_matrix": ("", _confusion(evaluation, class_names))},
    )
    parts += section(
        "Most frequently confused classes",
        f"Number of images of one class predicted as another, in the {split_name} split.",
        {"confused_pairs": ("", _pairs(evaluation, class_names))},
    )
    parts += section(
        "Most confident mistakes",
        f"Images of the {split_name} split, preprocessed, with the predicted class, its probability, and the true "
        "class. Wrong labels show up here too.",
        {"mistakes": ("", _mistakes(evaluation, split, class_names, image_processor))},
    )
    return [
        *parts,
        _mistake_table(evaluation, split, class_names),
        _class_table(evaluation, class_names, split_name),
    ]


def _section(folder: Path, title: str, caption: str, pictures: Mapping[str, tuple[str, OptionalFigure]]) -> list[str]:
    """Return a section; each figure has a file name, a heading, and a function that draws it."""
    shown = []
    for name, (words, picture) in pictures.items():
        if picture.figure is None:
            shown.append(f"<p>Nothing to draw. {plain_text(picture.reason)}</p>")
            continue
        data = _png(picture.figure)
        with staged_file(folder / f"{name}.png", force=True) as file:
            file.write_bytes(data)
        seen = f"{words}: {picture.seen}" if words else picture.seen
        above = f"<figcaption>{plain_text(words)}</figcaption>" if words else ""
        shown.append(f"<figure>{above}{framed(inline_picture(data, seen), f'{title} {words}')}</figure>")
    return [
        f'<h2>{plain_text(title)}</h2><p class="caption">{plain_text(caption)}</p>',
        f'<div class="row">{"".join(shown)}</div>',
    ]


def _curves(run: Path) -> OptionalFigure:
    rows = read_log(run)
    figure = plot_training_curves(rows)
    figure.set_figwidth(min(figure.get_figwidth(), PAGE))
    return OptionalFigure(figure, seen=descriptions.of_training_curves(rows))


def _confusion(evaluation: Evaluation, class_names: list[str]) -> OptionalFigure:
    classes = len(class_names)
    if classes > MATRIX_CLASSES:
        return OptionalFigure(None, f"A matrix of {classes} classes does not fit a screen: see the pairs below.")
    matrix = confusion_matrix(evaluation.labels, evaluation.predictions, classes)
    seen = descriptions.of_a_confusion_matrix(matrix, class_labels(class_names, 16))
    return OptionalFigure(plot_confusion_matrix(matrix, class_names), seen=seen)


def _pairs(evaluation: Evaluation, class_names: list[str]) -> OptionalFigure:
    pairs = confused_pairs(evaluation)
    if not pairs:
        return OptionalFigure(None, "There are no confused classes.")
    named = [(class_names[pair.true], class_names[pair.predicted]) for pair in pairs]
    figure = plot_confused_pairs([pair.count for pair in pairs], [pair.share for pair in pairs], named)
    labels = class_labels(class_names, 18)
    worst = pairs[0]
    seen = (
        f"Bars of {len(pairs)} pairs of classes; the longest: {labels[worst.true]} predicted as "
        f"{labels[worst.predicted]}, {worst.count} times"
    )
    return OptionalFigure(figure, seen=seen)


def _mistakes(evaluation: Evaluation, split: Dataset, class_names: list[str], image_processor: Any) -> OptionalFigure:
    rows = confident_mistakes(evaluation)
    if not len(rows):
        return OptionalFigure(None, "There are no mistakes.")
    inputs = model_inputs(image_processor([split[int(row)]["image"] for row in rows], return_tensors="pt"))
    pictures = displayable_images(inputs, image_processor)
    labels = evaluation.labels[rows]
    probabilities = np.zeros((len(rows), len(class_names)), dtype=np.float32)  # of the predictions alone
    probabilities[np.arange(len(rows)), evaluation.predictions[rows]] = evaluation.confidences[rows]
    figure = plot_predictions(pictures, probabilities, class_names, labels)
    return OptionalFigure(figure, seen=descriptions.of_mistakes(probabilities, labels, class_labels(class_names)))


def _mistake_table(evaluation: Evaluation, split: Dataset, class_names: list[str]) -> str:
    """Return the same mistakes as a table that names their files."""
    files = as_files(split)
    rows = []
    for row in map(int, confident_mistakes(evaluation)):
        predicted, true = class_names[int(evaluation.predictions[row])], class_names[int(evaluation.labels[row])]
        names = (predicted, f"{evaluation.confidences[row]:.1%}", true)
        rows.append((image_name(files[row]["image"], row), *names))
    head = ("image", "predicted", "probability", "true")
    return html_table(head, rows, "mistakes") if rows else ""


def write_predictions(
    run: Path, evaluation: Evaluation | VectorEvaluation, split: Dataset, class_names: list[str]
) -> Path:
    """Write `predictions.csv`: the file or the row of each image, its label, and the likeliest classes.

    Args:
        run: The run folder.
        evaluation: Evaluation of the split.
        split: Rows with an `image` and a `label`, as evaluated.
        class_names: Names in the order of the classes.

    Returns:
        The path of the file.
    """
    write_file(run / "predictions.csv", predictions_of(evaluation, split, class_names))
    return run / "predictions.csv"


def predictions_of(evaluation: Evaluation | VectorEvaluation, split: Dataset, class_names: list[str]) -> str:
    """Return the CSV table of the predictions for the images of a split; see `write_predictions`."""
    names = [path or f"row {row}" for row, path in enumerate(image_paths(split))]
    if isinstance(evaluation, VectorEvaluation):
        return vector_table(evaluation, names, class_names)
    return predictions_table(evaluation, names, class_names)


def image_name(stored: Mapping[str, Any], row: int) -> str:
    """Return the name of an image: its folder and file if it is a file, without the private path, and its row."""
    path = stored.get("path")
    return f"row {row}" if not path else f"{'/'.join(Path(path).parts[-2:])} (row {row})"


def _class_table(evaluation: Evaluation, class_names: list[str], split_name: str) -> str:
    head = ("class", "images", "right", "recall", "precision", "F1")
    rows = [
        (result.name, result.images, result.right, *map(_share, (result.recall, result.precision, result.f1)))
        for result in results_by_class(evaluation, class_names)
    ]
    table = html_table(head, rows, "every class")
    if len(rows) > OPEN_TABLE:
        table = f"<details><summary>{len(rows)} classes</summary>{table}</details>"
    top5 = f" Top-5 accuracy is {top_accuracy(evaluation, 5):.2%}." if len(class_names) > 5 else ""
    return (
        f'<h2>Every class</h2><p class="caption">On the {plain_text(split_name)} split. Recall is the fraction of '
        f"the class predicted correctly, precision the fraction of its predictions that are correct.{top5}</p>" + table
    )


def _share(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1%}"


def _tables(facts: Mapping[str, Mapping[str, object]]) -> str:
    """Return tables side by side."""
    tables = [
        f"<section><h2>{plain_text(title)}</h2>{html_table((), list(rows.items()), title)}</section>"
        for title, rows in facts.items()
    ]
    return f'<div class="row">{"".join(tables)}</div>'


def _png(figure: Figure) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, dpi=DPI)
    return picture.getvalue()
