"""Accuracy and loss of a classifier, over any number of processes, offline."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..errors import TrainingError
from ..extras import needs

with needs("plain-vit[train]"):
    import datasets
    import evaluate
    from accelerate import Accelerator


class Accuracy(evaluate.Metric):
    """Fraction of correct predictions. (`evaluate.load("accuracy")` downloads its code.)"""

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
class Evaluation:
    """Result of an evaluation, the same in every process: a few numbers for each image, in the order of the split.

    Args:
        loss: mean cross-entropy, in nats.
        labels: [images].
        predictions: likeliest class, [images].
        confidences: its probability, [images].
        ranks: number of classes that are likelier than the true one, [images]; of equally likely ones those with lower
            numbers count as likelier.
    """

    loss: float
    labels: np.ndarray
    predictions: np.ndarray
    confidences: np.ndarray
    ranks: np.ndarray

    @property
    def count(self) -> int:
        """Return the number of evaluated images."""
        return len(self.labels)

    @cached_property
    def accuracy(self) -> float:
        """Return the fraction of correct predictions, 0 to 1."""
        metric = Accuracy(keep_in_memory=True)
        return metric.compute(predictions=self.predictions, references=self.labels)["accuracy"]

    @property
    def values(self) -> dict[str, float]:
        """Return the logged values."""
        return {"loss": self.loss, "accuracy": self.accuracy}


def judge_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what an evaluation keeps of each image.

    Args:
        logits: [B, K], in float32.
        labels: [B].

    Returns:
        Label, prediction and rank of the label [B, 3]; confidence and loss [B, 2].
    """
    own = logits.gather(1, labels[:, None])
    numbers = torch.arange(logits.shape[1], device=logits.device)
    likelier = (logits > own) | ((logits == own) & (numbers < labels[:, None]))
    ranks = torch.where(own[:, 0].isnan(), logits.shape[1], likelier.sum(dim=1))
    predictions = logits.argmax(dim=-1)
    confidences = logits.softmax(dim=-1).gather(1, predictions[:, None])[:, 0]
    losses = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([labels, predictions, ranks], dim=1), torch.stack([confidences, losses], dim=1)


@torch.no_grad()
def evaluate_classifier(
    model: nn.Module, loader: Iterable[Mapping[str, torch.Tensor]], accelerator: Accelerator, *, size: int
) -> Evaluation:
    """Evaluate a classifier on a whole split, each image once.

    Logits are not kept: memory does not grow with the number of classes times images.

    Args:
        model: maps `pixel_values` to an output with `logits`; left in evaluation mode.
        loader: prepared loader, or an iterator over it; batches of `pixel_values` and `labels`, in the order of the
            split.
        accelerator: gathers the results of the processes.
        size: number of images of the split.

    Raises:
        TrainingError: The processes returned another number of images.
    """
    model.eval()
    parts = []
    for batch in loader:
        output = model(pixel_values=batch["pixel_values"])
        parts.append(accelerator.gather_for_metrics(judge_logits(output.logits.float(), batch["labels"])))
    classes, values = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    if len(classes) != size:
        raise TrainingError(f"{len(classes)} images were evaluated, but the set has {size}.")
    labels, predictions, ranks = classes.T.numpy()
    confidences, losses = values.T
    return Evaluation(float(losses.double().mean()), labels, predictions, confidences.numpy(), ranks)
