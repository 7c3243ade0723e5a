"""Results of models that predict vectors: several labels per image, or numbers.

Legend: `N` images, `K` labels or numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..errors import TrainingError
from ..files.csv import csv_table
from ..scores import MULTI_LABEL, REGRESSION, scores
from ..system.extras import needs
from .metrics import Calibration, gather_results, metric_text

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from sklearn.metrics import (
        average_precision_score,
        mean_absolute_error,
        precision_score,
        r2_score,
        recall_score,
    )

# Values of an evaluation that can select weights; the first one is the default.
METRICS = {
    MULTI_LABEL: ("mean_average_precision", "loss", "macro_f1", "micro_f1", "calibration_error"),
    REGRESSION: ("loss", "mean_absolute_error", "r2"),
}


@dataclass(frozen=True)
class LabelResult:
    """Result for one label or one predicted number; values that do not apply are NaN.

    Args:
        name: name of the label or number.
        images: number of images that have the label, or of all images.
        values: results by name.
    """

    name: str
    images: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class VectorEvaluation:
    """Result of an evaluation, in the order of the split; the same in every process.

    Args:
        problem_type: `multi_label_classification` or `regression`.
        loss: mean binary cross-entropy in nats, or mean squared error.
        targets: targets [N, K].
        outputs: logits or predicted numbers [N, K].
    """

    problem_type: str
    loss: float
    targets: np.ndarray
    outputs: np.ndarray

    @property
    def count(self) -> int:
        """Return the number of evaluated images."""
        return len(self.targets)

    @property
    def predictions(self) -> np.ndarray:
        """Return probabilities or predicted numbers [N, K]."""
        return scores(torch.from_numpy(self.outputs), self.problem_type).numpy()

    @cached_property
    def calibration(self) -> Calibration:
        """Return the calibration of the predicted probabilities, over all labels."""
        return Calibration.of(self.predictions.ravel(), self.targets.ravel())

    @cached_property
    def values(self) -> dict[str, float]:
        """Return the logged values.

        Average precision is averaged over labels that occur. F1 is averaged also over labels that are predicted but do
        not occur, where it is 0, as in scikit-learn with `zero_division=nan`.
        """
        if self.problem_type == MULTI_LABEL:
            present = np.flatnonzero(self.targets.any(axis=0))
            given, shown = self.targets > 0, self.outputs > 0
            counted = given.any(axis=0) | shown.any(axis=0)
            return {
                "loss": self.loss,
                "mean_average_precision": float(
                    average_precision_score(given[:, present], self.outputs[:, present], average="macro")
                ),
                "macro_f1": float(f1_scores(given, shown)[counted].mean()),
                "micro_f1": float(f1_scores(given.ravel(), shown.ravel())),
                "calibration_error": self.calibration.error,
            }
        return {
            "loss": self.loss,
            "mean_absolute_error": float(mean_absolute_error(self.targets, self.outputs)),
            "r2": float(r2_score(self.targets, self.outputs)),
        }

    @property
    def summary(self) -> str:
        """Return the main results in words."""
        return ", ".join(f"{name.replace('_', ' ')} {metric_text(name, value)}" for name, value in self.values.items())

    @property
    def scores(self) -> dict[str, float]:
        """Return the results of the model card."""
        return {name: value for name, value in self.values.items() if name != "loss"}

    def by_label(self, names: Sequence[str]) -> list[LabelResult]:
        """Return the results for each label or number."""
        results = []
        for place, name in enumerate(names):
            target, output = self.targets[:, place], self.outputs[:, place]
            if self.problem_type == MULTI_LABEL:
                shown, images = output > 0, int(target.sum())
                values = {
                    "average precision": float(average_precision_score(target, output)) if images else np.nan,
                    "recall": float(recall_score(target, shown, zero_division=np.nan)),
                    "precision": float(precision_score(target, shown, zero_division=np.nan)),
                }
            else:
                images, values = (
                    len(target),
                    {
                        "mean absolute error": float(mean_absolute_error(target, output)),
                        "R2": float(r2_score(target, output)),
                    },
                )
            results.append(LabelResult(name, images, values))
        return results


def f1_scores(given: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Return F1 of each label; 0 for labels that neither occur nor are predicted.

    scikit-learn would treat a single label as two classes and return their mean.

    Args:
        given: whether images have the labels [N, ...].
        shown: whether the labels are predicted [N, ...].
    """
    return 2 * (given & shown).sum(axis=0) / np.maximum(given.sum(axis=0) + shown.sum(axis=0), 1)


def vector_table(evaluation: VectorEvaluation, images: Sequence[str], names: Sequence[str]) -> str:
    """Return a CSV table with a row per image: name, and exact target and prediction of each label or number."""
    head = ["path", *(word for name in names for word in (name, f"predicted {name}"))]
    rows = []
    for image, target, predicted in zip(images, evaluation.targets, evaluation.predictions, strict=True):
        pairs = zip(target, predicted, strict=True)
        rows.append([image, *(np.format_float_positional(value, trim="-") for pair in pairs for value in pair)])
    return csv_table(head, rows)


def evaluate_vectors(
    model: nn.Module,
    loader: Iterable[Mapping[str, torch.Tensor]],
    accelerator: Accelerator,
    *,
    size: int,
    problem_type: str,
) -> VectorEvaluation:
    """Evaluate a model once on each image of a split.

    Args:
        model: see `gather_results`.
        loader: batches with `labels` [B, K].
        accelerator: accelerator of the run.
        size: number of images of the split.
        problem_type: `multi_label_classification` or `regression`.

    Raises:
        TrainingError: The processes returned another number of images.
    """
    results = gather_results(model, loader, accelerator, lambda logits, labels: (labels.float(), logits), size=size)
    targets, outputs = (each.cpu() for each in results)
    if problem_type == MULTI_LABEL:
        loss = F.binary_cross_entropy_with_logits(outputs.double(), targets.double())
    else:
        loss = F.mse_loss(outputs.double(), targets.double())
    if not loss.isfinite():  # scikit-learn refuses such outputs
        raise TrainingError("The outputs of the model are not finite: train with a lower --learning_rate.")
    return VectorEvaluation(problem_type, float(loss), targets.numpy(), outputs.numpy())
