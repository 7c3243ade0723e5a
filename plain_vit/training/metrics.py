"""Accuracy and loss of a classifier, over any number of processes, offline."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    """Result of an evaluation, the same in every process.

    Args:
        accuracy: fraction of correct predictions, 0 to 1.
        loss: mean cross-entropy, in nats.
        probabilities: [images, classes], in the order of the split.
        labels: [images].
    """

    accuracy: float
    loss: float
    probabilities: np.ndarray
    labels: np.ndarray

    @property
    def count(self) -> int:
        """Return the number of evaluated images."""
        return len(self.labels)

    @property
    def values(self) -> dict[str, float]:
        """Return the logged values."""
        return {"loss": self.loss, "accuracy": self.accuracy}


@torch.no_grad()
def evaluate_classifier(
    model: nn.Module, loader: Iterable[Mapping[str, torch.Tensor]], accelerator: Accelerator, *, size: int
) -> Evaluation:
    """Evaluate a classifier on a whole split, each image once.

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
    metric = Accuracy(keep_in_memory=True)
    gathered_logits, gathered_labels = [], []
    for batch in loader:
        output = model(pixel_values=batch["pixel_values"])
        logits, labels = accelerator.gather_for_metrics((output.logits.float(), batch["labels"]))
        metric.add_batch(predictions=logits.argmax(dim=-1), references=labels)
        gathered_logits.append(logits.cpu())
        gathered_labels.append(labels.cpu())
    logits, labels = torch.cat(gathered_logits), torch.cat(gathered_labels)
    if len(labels) != size:
        raise TrainingError(f"{len(labels)} images were evaluated, but the set has {size}.")
    return Evaluation(
        accuracy=metric.compute()["accuracy"],
        loss=F.cross_entropy(logits, labels).item(),
        probabilities=logits.softmax(dim=-1).numpy(),
        labels=labels.numpy(),
    )
