"""Report of a run: figures and a self-contained page."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...analysis import confusion_matrix
from ...analysis.page import framed, html_figure, html_page, html_section, html_table, inline_picture, plain_text
from ...errors import counted
from ...files.staging import staged_file
from ...scores import MULTI_LABEL
from ...system.environment import version
from ...system.extras import needs
from ..data.decoding import as_files
from ..data.identity import image_paths
from ..data.inputs import model_inputs
from ..metrics import Evaluation, metric_text, predictions_table
from ..run.folder import read_log, write_file
from ..vector_metrics import VectorEvaluation, vector_table
from .mistakes import confident_mistakes, confused_pairs, results_by_class, top_accuracy
from .show_batch import displayable_images
from .snapshots import Picture, Snapshots

with needs("plain-vit[train]"):
    from datasets import Dataset

    from ...analysis.drawing import png
    from ...analysis.plots import (
        plot_confused_pairs,
        plot_confusion_matrix,
        plot_predicted_numbers,
        plot_predictions,
        plot_reliability,
        plot_training_curves,
    )

MATRIX_CLASSES = 1000  # a confusion matrix of more classes is larger than a screen
OPEN_TABLE = 30  # rows; longer tables are collapsed
PAGE = 10.4  # width of the page, in inches at this resolution
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
    """Write the report of a run to its subfolder `report`.

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
    page = ReportPage(run / "report")
    page.parts.append(_tables(facts))
    page.add(
        "Training curves",
        "Training values are means since the last logged step, over augmented images and of the training loss: with "
        "label smoothing it cannot reach 0. Values of other splits are cross-entropies of whole images, without "
        "dropout.",
        "curves",
        _curves(run),
    )
    if isinstance(evaluation, Evaluation):
        _add_class_sections(page, evaluation, split, class_names, image_processor, split_name)
    else:
        _add_vector_sections(page, evaluation, class_names, split_name)
    page.add(
        "Attention during training",
        "Attention of the last layer, mean of the heads, from the class token or, in models without one, averaged "
        "over all patches. Orange marks high values; each map has its own scale, from 0 to the value below it. The "
        "images are the same throughout.",
        "attention",
        snapshots.attention(model),
    )
    page.add(
        "Position-embedding similarity",
        "Each tile belongs to the patch of its row and column, and shows the cosine similarity between the position "
        "embedding of that patch and those of all patches.",
        "positions",
        snapshots.positions(model),
    )
    write_file(page.path, html_page(f"{run.resolve().name}: report of the run", "\n".join(page.parts)))
    return page.path


class ReportPage:
    """The parts of a report, and the folder with its figures.

    Args:
        folder: The folder; it is created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.path = folder, folder / "index.html"
        self.parts: list[str] = []  # HTML of the sections

    def add(self, title: str, caption: str, name: str, pictures: Picture | Mapping[str, Picture]) -> None:
        """Add a section with one figure, or with several that have headings.

        Args:
            title: Title as plain text.
            caption: What the figures show.
            name: File name of the figure; a number is added if there are several.
            pictures: The figure, or figures by heading.
        """
        named: dict[str, tuple[str, Picture]]
        if isinstance(pictures, Mapping):
            named = {f"{name}_{i}": each for i, each in enumerate(pictures.items())}
        else:
            named = {name: ("", pictures)}
        shown = []
        for file_name, (heading, picture) in named.items():
            if isinstance(picture, str):
                shown.append(f"<p>Nothing to draw. {plain_text(picture)}</p>")
                continue
            data = png(picture)
            with staged_file(self.folder / f"{file_name}.png", force=True) as file:
                file.write_bytes(data)
            seen = f"{heading}: {picture.get_label()}" if heading else str(picture.get_label())
            shown.append(html_figure(framed(inline_picture(data, seen), f"{title} {heading}"), heading))
        self.parts.append(html_section(title, caption, shown))

    def add_table(self, noun: str, caption: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
        """Add a table with one row per `noun`: per class, label or number."""
        table = html_table((noun, *head), rows, f"every {noun}")
        if len(rows) > OPEN_TABLE:
            table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
        self.parts.append(f'<h2>Every {noun}</h2><p class="caption">{plain_text(caption)}</p>{table}')


def _add_class_sections(
    page: ReportPage,
    evaluation: Evaluation,
    split: Dataset,
    class_names: list[str],
    image_processor: Any,
    split_name: str,
) -> None:
    """Add the sections about the evaluation of a classifier."""
    calibration = evaluation.calibration
    page.add(
        f"Calibration on the {split_name} split",
        "How often predictions of each confidence are correct; on the diagonal, as often as their confidence says. The "
        f"expected calibration error, {calibration.error:.1%}, is the mean distance to it over the images.",
        "reliability",
        plot_reliability(calibration.counts, calibration.confidences, calibration.accuracies),
    )
    page.add(
        f"Confusion matrix of the {split_name} split",
        "Rows are true classes, columns predicted ones. The numbers count images, the colour is the fraction "
        "of the true class.",
        "confusion_matrix",
        _confusion(evaluation, class_names),
    )
    page.add(
        "Most frequently confused classes",
        f"Number of images of one class predicted as another, in the {split_name} split.",
        "confused_pairs",
        _pairs(evaluation, class_names),
    )
    page.add(
        "Most confident mistakes",
        f"Images of the {split_name} split, preprocessed, with the predicted class, its probability, and the true "
        "class. Wrong labels show up here too.",
        "mistakes",
        _mistakes(evaluation, split, class_names, image_processor),
    )
    page.parts.append(_mistake_table(evaluation, split, class_names))
    top5 = f" Top-5 accuracy is {top_accuracy(evaluation, 5):.2%}." if len(class_names) > 5 else ""
    page.add_table(
        "class",
        f"On the {split_name} split. Recall is the fraction of the class predicted correctly, precision the fraction "
        f"of its predictions that are correct.{top5}",
        ("images", "right", "recall", "precision", "F1"),
        [
            (each.name, each.images, each.right, *map(_share, (each.recall, each.precision, each.f1)))
            for each in results_by_class(evaluation, class_names)
        ],
    )


def _add_vector_sections(page: ReportPage, evaluation: VectorEvaluation, names: list[str], split_name: str) -> None:
    """Add the sections about the evaluation of several labels per image, or of numbers."""
    are_labels = evaluation.problem_type == MULTI_LABEL
    if are_labels:
        shown = evaluation.calibration
        page.add(
            f"Calibration on the {split_name} split",
            "How often an image has a label that was predicted with a probability, over all labels; on the diagonal, "
            f"as often as the probability says. The expected calibration error, {shown.error:.1%}, is the mean "
            "distance to it over the predictions.",
            "reliability",
            plot_reliability(
                shown.counts, shown.confidences, shown.accuracies, of="labels", x="predicted probability of a label"
            ),
        )
    else:
        page.add(
            f"Predicted numbers of the {split_name} split",
            "Each point is an image; on the diagonal, the prediction is right.",
            "numbers",
            plot_predicted_numbers(evaluation.targets, evaluation.outputs, names),
        )
    results = evaluation.by_label(names)
    rows = [
        (each.name, each.images, *(metric_text(name, value) for name, value in each.values.items())) for each in results
    ]
    head = ("images", *results[0].values)
    page.add_table("label" if are_labels else "number", f"On the {split_name} split.", head, rows)


def _curves(run: Path) -> Picture:
    figure = plot_training_curves(read_log(run))
    figure.set_figwidth(min(figure.get_figwidth(), PAGE))
    return figure


def _confusion(evaluation: Evaluation, class_names: list[str]) -> Picture:
    classes = len(class_names)
    if classes > MATRIX_CLASSES:
        return f"A matrix of {classes} classes does not fit a screen: see the pairs below."
    return plot_confusion_matrix(confusion_matrix(evaluation.labels, evaluation.predictions, classes), class_names)


def _pairs(evaluation: Evaluation, class_names: list[str]) -> Picture:
    pairs = confused_pairs(evaluation)
    if not pairs:
        return "There are no confused classes."
    named = [(class_names[pair.true], class_names[pair.predicted]) for pair in pairs]
    return plot_confused_pairs([pair.count for pair in pairs], [pair.share for pair in pairs], named)


def _mistakes(evaluation: Evaluation, split: Dataset, class_names: list[str], image_processor: Any) -> Picture:
    rows = confident_mistakes(evaluation)
    if not len(rows):
        return "There are no mistakes."
    inputs = model_inputs(image_processor([split[int(row)]["image"] for row in rows], return_tensors="pt"))
    pictures = displayable_images(inputs, image_processor)
    probabilities = np.zeros((len(rows), len(class_names)), dtype=np.float32)  # only the stored predictions
    probabilities[np.arange(len(rows)), evaluation.predictions[rows]] = evaluation.confidences[rows]
    return plot_predictions(pictures, probabilities, class_names, evaluation.labels[rows])


def _mistake_table(evaluation: Evaluation, split: Dataset, class_names: list[str]) -> str:
    """Return the most confident mistakes as a table with their files."""
    files = as_files(split)
    rows = []
    for row in map(int, confident_mistakes(evaluation)):
        predicted, true = class_names[int(evaluation.predictions[row])], class_names[int(evaluation.labels[row])]
        names = (predicted, f"{evaluation.confidences[row]:.1%}", true)
        rows.append((image_name(files[row]["image"], row), *names))
    head = ("image", "predicted", "probability", "true")
    return html_table(head, rows, "mistakes") if rows else ""


def predictions_of(evaluation: Evaluation | VectorEvaluation, split: Dataset, class_names: list[str]) -> str:
    """Return file or row, label and likeliest classes of each image as a CSV table.

    Args:
        evaluation: Evaluation of the split.
        split: Rows with an `image` and a `label`, as evaluated.
        class_names: Names of the classes, in order.
    """
    names = [path or f"row {row}" for row, path in enumerate(image_paths(split))]
    if isinstance(evaluation, VectorEvaluation):
        return vector_table(evaluation, names, class_names)
    return predictions_table(evaluation, names, class_names)


def image_name(stored: Mapping[str, Any], row: int) -> str:
    """Return a name for an image: its row and, if it is a file, folder and file name without the private path."""
    path = stored.get("path")
    return f"row {row}" if not path else f"{'/'.join(Path(path).parts[-2:])} (row {row})"


def _share(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1%}"


def _tables(facts: Mapping[str, Mapping[str, object]]) -> str:
    """Return the HTML of tables side by side."""
    tables = [
        f"<section><h2>{plain_text(title)}</h2>{html_table((), list(rows.items()), title)}</section>"
        for title, rows in facts.items()
    ]
    return f'<div class="row">{"".join(tables)}</div>'
