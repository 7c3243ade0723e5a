"""Accuracy, loss and calibration of a classifier, over any number of processes, offline."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..errors import TrainingError
from ..files.csv import csv_table
from ..system.extras import needs
from .data.inputs import model_inputs

with needs("plain-vit[train]"):
    import datasets
    import evaluate
    from accelerate import Accelerator
    from sklearn.metrics import f1_score, recall_score

TOP = 5  # number of likeliest classes to keep for each image
BINS = 15  # confidence bins of the calibration error (Guo et al. 2017)
# Results between 0 and 1, shown as percentages; for several labels per image too.
FRACTIONS = frozenset({
    "accuracy", "top5_accuracy", "balanced_accuracy", "macro_f1", "micro_f1", "mean_average_precision",
    "calibration_error", "average precision", "recall", "precision", "f1", "mean accuracy",
    *(f"severity {each}" for each in range(1, 6)),
})  # fmt: skip


def metric_text(name: str, value: float) -> str:
    """Format a result: a fraction as a percentage, any other number with four digits or as a count, NaN as a dash."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "–"
    return f"{value:.2%}" if name in FRACTIONS else f"{value:.4f}"


class Accuracy(evaluate.Metric):
    """Fraction of correct predictions; unlike `evaluate.load("accuracy")`, it downloads no code."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The fraction of predictions that equal their references.",
            citation="",
            inputs_description="predictions and references: class numbers.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, *, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


@dataclass(frozen=True)
class Calibration:
    """Accuracy of predictions by confidence, in bins of equal width.

    Args:
        counts: number of predictions in each bin, [BINS].
        confidences: mean confidence in each bin, NaN in empty bins.
        accuracies: fraction of correct predictions in each bin, NaN in empty bins.
    """

    counts: np.ndarray
    confidences: np.ndarray
    accuracies: np.ndarray

    @classmethod
    def of(cls, confidences: np.ndarray, right: np.ndarray) -> Self:
        """Return the calibration of predictions from their confidences [N] and whether each is right [N]."""
        confidences = confidences.astype(np.float64)
        bins = np.clip(np.ceil(np.nan_to_num(confidences) * BINS).astype(int) - 1, 0, BINS - 1)
        counts = np.bincount(bins, minlength=BINS)
        with np.errstate(invalid="ignore"):
            means, fractions = (np.bincount(bins, each, minlength=BINS) / counts for each in (confidences, right))
        return cls(counts, means, fractions)

    @property
    def error(self) -> float:
        """Return the expected calibration error: the mean gap between confidence and accuracy over all predictions."""
        gaps = np.abs(self.confidences - self.accuracies)
        return float(np.nansum(gaps * self.counts) / self.counts.sum())


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation: a few numbers per image, in the order of the split; the same in every process.

    Args:
        loss: mean cross-entropy, in nats.
        labels: true classes, [images].
        ranks: number of classes that are likelier than the true one, [images]; among equally likely classes, those with
            lower numbers count as likelier.
        top: the likeliest classes in descending order, [images, at most TOP].
        probabilities: probabilities of the likeliest classes, [images, at most TOP].
    """

    loss: float
    labels: np.ndarray
    ranks: np.ndarray
    top: np.ndarray
    probabilities: np.ndarray

    @property
    def count(self) -> int:
        """Return the number of evaluated images."""
        return len(self.labels)

    @property
    def predictions(self) -> np.ndarray:
        """Return the likeliest class of each image."""
        return self.top[:, 0]

    @property
    def confidences(self) -> np.ndarray:
        """Return the probability of the likeliest class of each image."""
        return self.probabilities[:, 0]

    @cached_property
    def accuracy(self) -> float:
        """Return the fraction of correct predictions, 0 to 1."""
        metric = Accuracy(keep_in_memory=True)
        return metric.compute(predictions=self.predictions, references=self.labels)["accuracy"]

    @property
    def summary(self) -> str:
        """Return the main results in words."""
        return f"accuracy {metric_text('accuracy', self.accuracy)}, loss {metric_text('loss', self.loss)}"

    @property
    def scores(self) -> dict[str, float]:
        """Return the results of the model card."""
        return {
            "accuracy": self.accuracy,
            "top5_accuracy": float((self.ranks < 5).mean()),
            "calibration_error": self.calibration.error,
        }

    @cached_property
    def calibration(self) -> Calibration:
        """Return the accuracy by confidence over all images."""
        return Calibration.of(self.confidences, self.predictions == self.labels)

    @cached_property
    def values(self) -> dict[str, float]:
        """Return the logged values.

        As in scikit-learn, balanced accuracy averages over the classes that have images. F1 also averages over classes
        that have none but are predicted, where it is 0.
        """
        averages = {"average": "macro", "zero_division": 0.0}
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "balanced_accuracy": float(
                recall_score(self.labels, self.predictions, labels=np.unique(self.labels), **averages)
            ),
            "macro_f1": float(f1_score(self.labels, self.predictions, **averages)),
            "calibration_error": self.calibration.error,
        }


# Values of an evaluation that can select weights; the first one is the default.
METRICS = ("accuracy", "loss", "balanced_accuracy", "macro_f1", "calibration_error")
LOWER_IS_BETTER = frozenset({"loss", "calibration_error", "mean_absolute_error"})


def evaluation_of(classes: torch.Tensor, values: torch.Tensor) -> Evaluation:
    """Return the evaluation from the results of `judge_logits` for all images."""
    labels, ranks, *top = classes.T.cpu().numpy()
    losses, *probabilities = values.T.cpu()
    shares = torch.stack(probabilities, dim=1).numpy()
    return Evaluation(float(losses.double().mean()), labels, ranks, np.stack(top, axis=1), shares)


def judge_logits(
    logits: torch.Tensor, labels: torch.Tensor, *, classes: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the per-image results that an evaluation keeps.

    Args:
        logits: logits [B, K], in float32.
        labels: true classes [B]; or several [B, any], filled up with -1, of which the likeliest counts.
        classes: the only classes that may be predicted (default: all).

    Returns:
        Label, rank of the label, and likeliest classes [B, 2 + at most TOP]; loss, and probabilities of these classes
        [B, 1 + at most TOP]. Among equally likely classes, the one with the lowest number is the prediction.
    """
    if classes is not None:
        least = torch.full_like(logits, torch.finfo(logits.dtype).min)
        logits = least.index_copy(1, (numbers := torch.tensor(classes, device=logits.device)), logits[:, numbers])
    if labels.ndim == 2:
        own = logits.gather(1, labels.clamp(min=0)).masked_fill(labels < 0, -math.inf)
        labels = labels.gather(1, own.argmax(dim=1, keepdim=True))[:, 0]
    own = logits.gather(1, labels[:, None])
    numbers = torch.arange(logits.shape[1], device=logits.device)
    likelier = (logits > own) | ((logits == own) & (numbers < labels[:, None]))
    ranks = torch.where(own[:, 0].isnan(), logits.shape[1], likelier.sum(dim=1))
    losses = F.cross_entropy(logits, labels, reduction="none")
    first = logits.argmax(dim=-1, keepdim=True)
    others = logits.scatter(1, first, -math.inf).topk(min(TOP, logits.shape[1]) - 1).indices
    top = torch.cat([first, others], dim=1)
    probabilities = logits.softmax(dim=-1).gather(1, top)
    return torch.cat([torch.stack([labels, ranks], dim=1), top], dim=1), torch.cat([losses[:, None], probabilities], 1)


def predictions_table(evaluation: Evaluation, images: Sequence[str], class_names: Sequence[str]) -> str:
    """Return a CSV table with a row per image: name, label, and the likeliest classes.

    Args:
        evaluation: evaluation of the images.
        images: names of the images, in the same order.
        class_names: names in the order of the classes.
    """
    places = range(1, evaluation.top.shape[1] + 1)
    head = ["path", "label", *(word for place in places for word in (f"top{place}", f"probability{place}"))]
    rows = []
    for image, label, top, shares in zip(
        images, evaluation.labels, evaluation.top, evaluation.probabilities, strict=True
    ):
        likeliest = zip(top, shares, strict=True)
        words = (word for number, share in likeliest for word in (class_names[number], f"{share:.6g}"))
        rows.append([image, class_names[label], *words])
    return csv_table(head, rows)


@torch.no_grad()
def gather_results(
    model: nn.Module,
    loader: Iterable[Mapping[str, torch.Tensor]],
    accelerator: Accelerator,
    judge: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    *,
    size: int,
) -> list[torch.Tensor]:
    """Return the results of `judge` for all batches, gathered from all processes and concatenated.

    Args:
        model: maps its inputs to an output with `logits`; left in evaluation mode.
        loader: prepared loader, or an iterator over it; batches of the model's inputs and `labels`, in the order of
            the split.
        accelerator: gathers the results of the processes.
        judge: maps logits in float32 and labels to tensors; all have images as the first dimension.
        size: number of images of the split.

    Raises:
        TrainingError: The processes returned another number of images.
    """
    model.eval()
    parts = []
    for batch in loader:
        logits = model(**model_inputs(batch)).logits.float()
        logits = logits.to(batch["labels"].device)  # an inference engine returns logits on the CPU
        parts.append(accelerator.gather_for_metrics(judge(logits, batch["labels"])))
    results = [torch.cat(each) for each in zip(*parts, strict=True)]
    if len(results[0]) != size:
        raise TrainingError(f"{len(results[0])} images were evaluated, but the set has {size}.")
    return results


def evaluate_classifier(
    model: nn.Module, loader: Iterable[Mapping[str, torch.Tensor]], accelerator: Accelerator, *, size: int
) -> Evaluation:
    """Evaluate a classifier once on each image of a split.

    Logits are not kept, so memory does not grow with classes times images.

    Args:
        model: see `gather_results`.
        loader: batches with `labels`, see `judge_logits`.
        accelerator: accelerator of the run.
        size: number of images of the split.

    Raises:
        TrainingError: The processes returned another number of images.
    """
    return evaluation_of(*gather_results(model, loader, accelerator, judge_logits, size=size))
