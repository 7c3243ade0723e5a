"""Report of a run whose targets are several labels per image, or numbers."""

from collections.abc import Callable, Mapping

import numpy as np

from ...analysis.page import html_table, plain_text
from ...extras import needs
from ...scores import MULTI_LABEL
from ..vector_metrics import VectorEvaluation
from .snapshots import OptionalFigure

with needs("plain-vit[train]"):
    from ...analysis import descriptions
    from ...analysis.plots import plot_predicted_numbers, plot_reliability

BINS = 15
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
            "as often as the probability says.",
        )
        pictures = {"reliability": ("", _reliability(evaluation))}
    else:
        title, caption = (
            f"Predicted numbers of the {split_name} split",
            "Each point is an image; on the diagonal, the prediction is right.",
        )
        pictures = {"numbers": ("", _numbers(evaluation, names))}
    return [*section(title, caption, pictures), _table(evaluation, names, split_name)]


def _reliability(evaluation: VectorEvaluation) -> OptionalFigure:
    shares, targets = evaluation.predictions.ravel().astype(np.float64), evaluation.targets.ravel()
    bins = np.clip(np.ceil(shares * BINS).astype(int) - 1, 0, BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    with np.errstate(invalid="ignore"):
        means, fractions = (np.bincount(bins, weights=each, minlength=BINS) / counts for each in (shares, targets))
    figure = plot_reliability(counts, means, fractions, of="labels", x="predicted probability of a label")
    return OptionalFigure(figure, seen=descriptions.of_reliability(counts, means, fractions, of="labels"))


def _numbers(evaluation: VectorEvaluation, names: list[str]) -> OptionalFigure:
    figure = plot_predicted_numbers(evaluation.targets, evaluation.outputs, names)
    seen = f"Points of {evaluation.count} images, the prediction over the target; R2 is {evaluation.values['r2']:.3f}"
    return OptionalFigure(figure, seen=seen)


def _table(evaluation: VectorEvaluation, names: list[str], split_name: str) -> str:
    results = evaluation.by_label(names)
    head = ("label" if evaluation.problem_type == MULTI_LABEL else "number", "images", *results[0].values)
    rows = [
        (each.name, each.images, *("–" if np.isnan(value) else f"{value:.4g}" for value in each.values.values()))
        for each in results
    ]
    table = html_table(head, rows, "every label")
    if len(rows) > OPEN_TABLE:
        table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
    return f'<h2>Every {head[0]}</h2><p class="caption">On the {plain_text(split_name)} split.</p>{table}'
