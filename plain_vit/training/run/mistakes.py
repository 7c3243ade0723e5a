"""Mistakes of a classifier: by class, by pair of classes, and image by image."""

from dataclasses import dataclass

import numpy as np

from ...extras import needs
from ..metrics import Evaluation

with needs("plain-vit[train]"):
    from sklearn.metrics import precision_recall_fscore_support


@dataclass(frozen=True)
class ClassResult:
    """How a classifier does on one class.

    Args:
        name: Of the class.
        images: How many there are of it.
        right: How many of those were recognised.
        recall: The share of those, 0 to 1; NaN where there are none.
        precision: Share of the images that were taken for the class and are of it; NaN where none was taken for it.
        f1: Harmonic mean of the two; NaN where both are.
    """

    name: str
    images: int
    right: int
    recall: float
    precision: float
    f1: float


@dataclass(frozen=True)
class ConfusedPair:
    """A class that is taken for another.

    Args:
        true: The class.
        predicted: What it is taken for.
        count: How often.
        share: Of the images of the class, 0 to 1.
    """

    true: int
    predicted: int
    count: int
    share: float


def results_by_class(evaluation: Evaluation, class_names: list[str]) -> list[ClassResult]:
    """Return how the classifier does on each class, in their order."""
    predictions = evaluation.probabilities.argmax(axis=1)
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


def confused_pairs(evaluation: Evaluation, count: int = 12) -> list[ConfusedPair]:
    """Return the pairs of classes that are confused most often, the worst first.

    Args:
        evaluation: Probabilities and labels.
        count: How many pairs at most.
    """
    predictions = evaluation.probabilities.argmax(axis=1)
    wrong = predictions != evaluation.labels
    pairs, counts = np.unique(np.stack([evaluation.labels, predictions])[:, wrong], axis=1, return_counts=True)
    images = np.bincount(evaluation.labels)
    worst = np.argsort(-counts, kind="stable")[:count]
    return [
        ConfusedPair(int(true), int(predicted), int(number), float(number / images[true]))
        for (true, predicted), number in zip(pairs.T[worst], counts[worst], strict=True)
    ]


def confident_mistakes(evaluation: Evaluation, count: int = 16) -> np.ndarray:
    """Return the rows that were taken for a wrong class with the highest probability, the most confident first.

    Args:
        evaluation: Probabilities and labels.
        count: How many rows at most.
    """
    wrong = np.flatnonzero(evaluation.probabilities.argmax(axis=1) != evaluation.labels)
    return wrong[np.argsort(-evaluation.probabilities[wrong].max(axis=1), kind="stable")][:count]


def top_accuracy(evaluation: Evaluation, k: int) -> float:
    """Return the share of images whose class is among the `k` likeliest; of equals the first come first."""
    likeliest = np.argsort(-evaluation.probabilities, axis=1, kind="stable")[:, :k]
    return float((likeliest == evaluation.labels[:, None]).any(axis=1).mean())
