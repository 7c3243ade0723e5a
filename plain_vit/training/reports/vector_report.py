"""Report of a run whose targets are several labels per image, or numbers."""

from collections.abc import Callable, Mapping
from typing import Any

from ...analysis.page import html_table, plain_text
from ...scores import MULTI_LABEL
from ...system.extras import needs
from ..metrics import Calibration, metric_text
from ..vector_metrics import VectorEvaluation
from .snapshots import OptionalFigure

with needs("plain-vit[train]"):
    from ...analysis import descriptions
    from ...analysis.plots import plot_predicted_numbers, plot_reliability

OPEN_TABLE = 30  # labels; a longer table is collapsed
Section = Callable[[str, str, Mapping[str, tuple[str, OptionalFigure]]], list[str]]


def vector_sections(section: Section, evaluation: VectorEvaluation, names: list[str], split_name: str) -> list[str]:
    """Return the sections of the report about an evaluation.

    Args:
        section: Makes a section of a title, a caption and figures.
        evaluation: Evaluation of the split.
        names: Names of the labels or numbers.
        split_name: Name of the split.
    """
    if evaluation.problem_type == MULTI_LABEL:
        title, caption = (
            f"Calibration on the {split_name} split",
            "How often an image has a label that was predicted with a probability, over all labels; on the diagonal, "
            f"as often as the probability says. The expected calibration error, {evaluation.calibration.error:.1%}, is "
            "the mean distance to it over the predictions.",
        )
        drawn = reliability(evaluation.calibration, of="labels", x="predicted probability of a label")
        pictures = {"reliability": ("", drawn)}
    else:
        title, caption = (
            f"Predicted numbers of the {split_name} split",
            "Each point is an image; on the diagonal, the prediction is right.",
        )
        pictures = {"numbers": ("", _numbers(evaluation, names))}
    return [*section(title, caption, pictures), _table(evaluation, names, split_name)]


def reliability(calibration: Calibration, *, of: str = "images", **words: Any) -> OptionalFigure:
    """Return the figure of a calibration; `of` says what is counted."""
    shown = (calibration.counts, calibration.confidences, calibration.accuracies)
    return OptionalFigure(plot_reliability(*shown, of=of, **words), seen=descriptions.of_reliability(*shown, of=of))


def _numbers(evaluation: VectorEvaluation, names: list[str]) -> OptionalFigure:
    figure = plot_predicted_numbers(evaluation.targets, evaluation.outputs, names)
    seen = f"Points of {evaluation.count} images, the prediction over the target; R2 is {evaluation.values['r2']:.3f}"
    return OptionalFigure(figure, seen=seen)


def _table(evaluation: VectorEvaluation, names: list[str], split_name: str) -> str:
    results = evaluation.by_label(names)
    head = ("label" if evaluation.problem_type == MULTI_LABEL else "number", "images", *results[0].values)
    rows = [
        (each.name, each.images, *(metric_text(name, value) for name, value in each.values.items())) for each in results
    ]
    table = html_table(head, rows, "every label")
    if len(rows) > OPEN_TABLE:
        table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
    return f'<h2>Every {head[0]}</h2><p class="caption">On the {plain_text(split_name)} split.</p>{table}'
