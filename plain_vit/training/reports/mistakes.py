"""Mistakes of a classifier: per class, per pair of classes, and per image."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...system.extras import needs
from ..metrics import Evaluation

with needs("plain-vit[train]"):
    import pandas
    from sklearn.metrics import precision_recall_fscore_support


@dataclass(frozen=True)
class ClassResult:
    """Results of a classifier for one class.

    Args:
        name: Name of the class.
        images: Number of its images.
        right: Number of its images predicted correctly.
        recall: Fraction of its images predicted correctly, 0 to 1; NaN without images.
        precision: Fraction of its predictions that are correct; NaN without predictions.
        f1: Harmonic mean of recall and precision; NaN if both are NaN.
    """

    name: str
    images: int
    right: int
    recall: float
    precision: float
    f1: float


@dataclass(frozen=True)
class ConfusedPair:
    """A pair of confused classes.

    Args:
        true: The true class.
        predicted: The predicted class.
        count: Number of images of the true class predicted as the other.
        share: `count` as a fraction of the images of the true class, 0 to 1.
    """

    true: int
    predicted: int
    count: int
    share: float


def results_by_class(evaluation: Evaluation, class_names: list[str]) -> list[ClassResult]:
    """Return the result of each class, in order."""
    predictions = evaluation.predictions
    classes = len(class_names)
    precision, recall, f1, _ = precision_recall_fscore_support(
        evaluation.labels, predictions, labels=range(classes), zero_division=np.nan
    )
    images = np.bincount(evaluation.labels, minlength=classes)
    right = np.bincount(evaluation.labels[predictions == evaluation.labels], minlength=classes)
    return [
        ClassResult(name, int(images[i]), int(right[i]), float(recall[i]), float(precision[i]), float(f1[i]))
        for i, name in enumerate(class_names)
    ]


def results_by_group(evaluation: Evaluation, groups: list[str]) -> list[dict[str, Any]]:
    """Return the accuracy of each group of images, the worst group first.

    Args:
        evaluation: Evaluation of the images.
        groups: Group of each image.
    """
    right = pandas.Series(evaluation.predictions == evaluation.labels).groupby(groups).agg(["size", "mean"])
    rows = right.sort_values("mean", kind="stable").itertuples()
    return [{"name": row.Index, "images": int(row.size), "accuracy": float(row.mean)} for row in rows]


def confused_pairs(evaluation: Evaluation, count: int = 12) -> list[ConfusedPair]:
    """Return the most frequently confused pairs of classes, most frequent first.

    Args:
        evaluation: Evaluation of the split.
        count: Maximum number of pairs.
    """
    predictions = evaluation.predictions
    wrong = predictions != evaluation.labels
    pairs, counts = np.unique(np.stack([evaluation.labels, predictions])[:, wrong], axis=1, return_counts=True)
    images = np.bincount(evaluation.labels)
    worst = np.argsort(-counts, kind="stable")[:count]
    return [
        ConfusedPair(int(true), int(predicted), int(number), float(number / images[true]))
        for (true, predicted), number in zip(pairs.T[worst], counts[worst], strict=True)
    ]


def confident_mistakes(evaluation: Evaluation, count: int = 16) -> np.ndarray:
    """Return the rows with the most confident wrong predictions, most confident first.

    Args:
        evaluation: Evaluation of the split.
        count: Maximum number of rows.
    """
    wrong = np.flatnonzero(evaluation.predictions != evaluation.labels)
    return wrong[np.argsort(-evaluation.confidences[wrong], kind="stable")][:count]


def top_accuracy(evaluation: Evaluation, k: int) -> float:
    """Return the top-k accuracy; ties are resolved in favour of lower class numbers."""
    return float((evaluation.ranks < k).mean())
