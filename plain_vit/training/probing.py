"""Probes of frozen features: linear classifiers at many learning rates at once, few-shot ridge regression, kNN.

Legend: `N` images, `D` features, `K` classes, `P` probes (one for each learning rate), `Q` images to classify.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..errors import DataError, TrainingError
from ..system.extras import needs
from .data.inputs import model_inputs
from .models import head_of
from .optimization import learning_rate_factor

with needs("plain-vit[train]"):
    from accelerate import Accelerator

MOMENTUM = 0.9  # of SGD
BASE_BATCH_SIZE = 256  # images per step that learning rates are for
# From DINOv2 (Oquab et al. 2023).
LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
BIAS = 100.0  # of the constant feature, as big_vision's few-shot evaluation has it
EPSILON = 1e-5  # added to deviations
TEMPERATURE = 0.07  # of DINO's votes
QUERIES, NEIGHBORS = 256, 16_384  # images compared with each other at a time
TRUST = 0.001  # of LARS: norm of a gradient relative to that of the weights


@dataclass(frozen=True)
class Features:
    """Features of a split from a frozen model.

    Args:
        values: [N, D], the inputs of its head, in float32.
        labels: [N].
    """

    values: torch.Tensor
    labels: torch.Tensor


def head_layer(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Return the linear layer that maps features to logits, with its name.

    Raises:
        TrainingError: The model has no such layer, or several.
    """
    names = {name.rpartition(".")[0] for name in head_of(model)}
    layers = [(name, model.get_submodule(name)) for name in sorted(names)]
    if len(layers) != 1 or not isinstance(layers[0][1], nn.Linear):
        raise TrainingError(
            f"A probe needs a model with one linear head: {type(model).__name__} has {len(layers)} heads."
        )
    return layers[0]  # type: ignore[return-value]


@torch.no_grad()
def extract_features(
    model: PreTrainedModel, loader: Iterable[Mapping[str, Any]], accelerator: Accelerator, *, size: int
) -> Features:
    """Compute the inputs of a model's head for a split, each image once.

    Args:
        model: any transformers image classifier with one linear head; left in evaluation mode.
        loader: prepared by the accelerator; batches of the model's inputs and `labels`, in the order of the split.
        accelerator: gathers the results of the processes.
        size: number of images of the split.

    Raises:
        TrainingError: The processes returned another number of images, or the model has no linear head.
    """
    read: list[torch.Tensor] = []
    _, head = head_layer(model)
    hook = head.register_forward_pre_hook(lambda layer, given: read.append(given[0]))
    model.eval()
    values, labels = [], []
    try:
        for batch in loader:
            with accelerator.autocast():
                model(**model_inputs(batch))
            of_batch, numbers = accelerator.gather_for_metrics((read.pop().float(), batch["labels"]))
            values.append(of_batch.cpu())
            labels.append(numbers.cpu())
    finally:
        hook.remove()
    features = Features(torch.cat(values), torch.cat(labels))
    if len(features.labels) != size:
        raise TrainingError(f"{len(features.labels)} images were processed, but the split has {size}.")
    return features


@dataclass(frozen=True)
class Probe:
    """A linear classifier of features.

    Args:
        learning_rate: peak learning rate, for 256 images per step.
        weight: [K, D].
        bias: [K].
    """

    learning_rate: float
    weight: torch.Tensor
    bias: torch.Tensor

    def accuracy(self, features: Features) -> float:
        """Return the accuracy."""
        answers = F.linear(features.values, self.weight, self.bias).argmax(dim=1)
        return (answers == features.labels).double().mean().item()


def train_probes(
    features: Features,
    classes: int,
    *,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: float = 10.0,
    batch_size: int = 256,
    momentum: float = MOMENTUM,
    weight_decay: float = 0.0,
    optimizer: str = "sgd",
    warmup_epochs: float = 0.0,
    seed: int = 0,
) -> list[Probe]:
    """Train one linear classifier for each learning rate, all on the same batches, with a cosine schedule.

    The features are standardised first, like with a batch norm without gain (MAE's probe); this is folded into the
    returned probes, which take the raw features.

    Args:
        features: training features.
        classes: number of classes.
        learning_rates: peak learning rates, for 256 images per step; they scale with `batch_size`.
        epochs: passes over the features.
        batch_size: images per step.
        momentum: momentum of SGD.
        weight_decay: weight decay.
        optimizer: `sgd`, or `lars`: SGD with the gradient of each weight matrix scaled to its norm (You et al. 2017, as
            in MAE's linear probe).
        warmup_epochs: passes over the features during which the learning rates rise linearly.
        seed: seed of the order and, with `lars`, of the initial weights, which are 0 with `sgd`.

    Returns:
        The probes, in the order of the learning rates.
    """
    mean, std = features.values.mean(dim=0), features.values.std(dim=0, correction=0) + EPSILON
    inputs = (features.values - mean) / std
    count, width = inputs.shape
    start = torch.zeros(classes, width)
    if optimizer == "lars":  # would not move weights of norm 0
        nn.init.trunc_normal_(start, std=0.01, generator=torch.Generator().manual_seed(seed))
    weights: list[torch.Tensor] = [nn.Parameter(start.clone()) for _ in learning_rates]
    biases: list[torch.Tensor] = [nn.Parameter(torch.zeros(classes)) for _ in learning_rates]
    peaks = [rate * batch_size / BASE_BATCH_SIZE for rate in learning_rates]
    groups = [
        {"params": [weight, bias], "lr": peak, "peak_lr": peak}
        for weight, bias, peak in zip(weights, biases, peaks, strict=True)
    ]
    descent = torch.optim.SGD(groups, momentum=momentum, weight_decay=0.0 if optimizer == "lars" else weight_decay)
    total = max(1, math.ceil(epochs * count / batch_size))
    warmup = min(total, round(warmup_epochs * count / batch_size))
    orders = (np.random.default_rng((seed, epoch)).permutation(count) for epoch in range(math.ceil(epochs) + 1))
    order = torch.from_numpy(np.concatenate(list(orders)))
    for step in range(total):
        rows = order[step * batch_size : (step + 1) * batch_size]
        for group in descent.param_groups:
            factor = learning_rate_factor(step, total=total, warmup=warmup, schedule="cosine")
            group["lr"] = group["peak_lr"] * factor
        logits = torch.einsum("bd,pkd->pbk", inputs[rows], torch.stack(weights)) + torch.stack(biases)[:, None]
        targets = features.labels[rows].expand(len(weights), -1)
        # The sum over the probes, which are independent.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / len(rows)
        loss.backward()
        if optimizer == "lars":
            for weight in weights:
                _adapt_gradient(weight, weight_decay)
        descent.step()
        descent.zero_grad()
    return [
        Probe(rate, weight.detach() / std, bias.detach() - (weight.detach() / std) @ mean)
        for rate, weight, bias in zip(learning_rates, weights, biases, strict=True)
    ]


@torch.no_grad()
def _adapt_gradient(weight: torch.Tensor, weight_decay: float) -> None:
    """Add the weight decay to a gradient, and scale it to a thousandth of the norm of the weights."""
    gradient = weight.grad.add_(weight, alpha=weight_decay)  # type: ignore[union-attr]
    norms = weight.norm(), gradient.norm()
    if all(norms):
        gradient.mul_(TRUST * norms[0] / norms[1])


def check_shots(labels: torch.Tensor, classes: int, shots: int) -> None:
    """Refuse a number of images that some class does not have.

    Raises:
        DataError: A class has fewer.
        TrainingError: The number is below 1.
    """
    if shots < 1:
        raise TrainingError(f"Expected 1 or more shots: got {shots}.")
    counts = torch.bincount(labels, minlength=classes)
    fewest = int(counts.argmin())
    if counts[fewest] < shots:
        raise DataError(
            f"Class {fewest} has {counts[fewest]} training images, fewer than {shots} shots: set smaller --shots."
        )


def choose_shots(labels: torch.Tensor, classes: int, shots: int, *, seed: int) -> torch.Tensor:
    """Return the rows of `shots` images of each class.

    Raises:
        DataError: A class has fewer.
        TrainingError: The number is below 1.
    """
    check_shots(labels, classes, shots)
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.flatnonzero(labels.numpy() == number)) for number in range(classes)]
    return torch.from_numpy(np.sort(np.concatenate([part[:shots] for part in rows])))


def fit_ridge(features: Features, classes: int, *, l2: float = 2.0**10) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve ridge regression from features to -1 and 1 in closed form.

    Each feature is standardised, and a constant feature is added, which is regularised like the others.

    Args:
        features: features of the few images.
        classes: number of classes.
        l2: weight of the squared norm.

    Returns:
        Weights [K, D] and bias [K] for the raw features, in float64.

    Source:
        Dosovitskiy et al. 2021, section 4.1; the constants are those of big_vision's few-shot evaluation.
    """
    values = features.values.double()
    mean, std = values.mean(dim=0), values.std(dim=0, correction=0) + EPSILON
    inputs = torch.cat([(values - mean) / std, torch.full((len(values), 1), BIAS, dtype=torch.float64)], dim=1)
    targets = F.one_hot(features.labels, classes).double() * 2 - 1
    if inputs.shape[1] <= len(inputs):
        gram = inputs.T @ inputs + l2 * torch.eye(inputs.shape[1], dtype=torch.float64)
        solution = torch.linalg.solve(gram, inputs.T @ targets)
    else:  # fewer images than features: the same solution from the smaller system
        gram = inputs @ inputs.T + l2 * torch.eye(len(inputs), dtype=torch.float64)
        solution = inputs.T @ torch.linalg.solve(gram, targets)
    weight = solution[:-1].T / std
    return weight, solution[-1] * BIAS - weight @ mean


def few_shot_accuracies(
    train: Features, held_out: Features, classes: int, *, shots: int, seeds: Sequence[int], l2: float = 2.0**10
) -> list[float]:
    """Return the accuracy of ridge regression on `shots` images per class for each seed, which selects them."""
    accuracies = []
    for seed in seeds:
        rows = choose_shots(train.labels, classes, shots, seed=seed)
        weight, bias = fit_ridge(Features(train.values[rows], train.labels[rows]), classes, l2=l2)
        answers = F.linear(held_out.values.double(), weight, bias).argmax(dim=1)
        accuracies.append((answers == held_out.labels).double().mean().item())
    return accuracies


def nearest_neighbors(train: torch.Tensor, queries: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest features by cosine similarity, a chunk of them at a time.

    Args:
        train: [N, D].
        queries: [Q, D].
        count: number of neighbours, at most N.

    Returns:
        Cosines in descending order, and the rows of `train`, both [Q, count].
    """
    queries = F.normalize(queries, dim=1)
    similarity, rows = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long)
    for start in range(0, len(train), NEIGHBORS):
        cosines = queries @ F.normalize(train[start : start + NEIGHBORS], dim=1).T
        best = cosines.topk(min(count, cosines.shape[1]), dim=1)
        candidates = torch.cat([rows, best.indices + start], dim=1)
        kept = torch.cat([similarity, best.values], dim=1).topk(min(count, candidates.shape[1]), dim=1)
        similarity, rows = kept.values, candidates.gather(1, kept.indices)
    return similarity, rows


def check_neighbors(images: int, counts: Sequence[int], temperature: float) -> None:
    """Refuse numbers of neighbours that a number of training images does not have.

    Raises:
        DataError: There are fewer training images than neighbours.
        TrainingError: A number of neighbours is below 1, or the temperature is not above 0.
    """
    if min(counts, default=0) < 1 or not temperature > 0:
        raise TrainingError(f"Expected neighbours from 1 and a temperature above 0: got {counts} and {temperature}.")
    if max(counts) > images:
        raise DataError(f"There are {images} training images, fewer than {max(counts)} neighbours: set --neighbors.")


def classify_by_neighbors(
    train: Features, queries: torch.Tensor, classes: int, *, counts: Sequence[int], temperature: float = TEMPERATURE
) -> dict[int, torch.Tensor]:
    """Classify images by the votes of the nearest training images, each weighted by exp(cosine / temperature).

    Args:
        train: training features.
        queries: features to classify [Q, D].
        classes: number of classes.
        counts: numbers of neighbours that vote.
        temperature: the lower, the more the nearest count.

    Returns:
        The predicted classes [Q] for each number of neighbours.

    Raises:
        DataError: There are fewer training images than neighbours.
        TrainingError: A number of neighbours is below 1, or the temperature is not above 0.

    Source:
        Caron et al. 2021 (DINO), section 4.1 and its `eval_knn.py`; Wu et al. 2018, section 3.4.
    """
    check_neighbors(len(train.labels), counts, temperature)
    predictions: dict[int, list[torch.Tensor]] = {count: [] for count in counts}
    for start in range(0, len(queries), QUERIES):
        similarity, rows = nearest_neighbors(train.values, queries[start : start + QUERIES], max(counts))
        votes = (similarity.double() / temperature).softmax(dim=1)  # proportional to the exponentials, for any width
        labels = train.labels[rows]
        for count in counts:
            scores = torch.zeros(len(rows), classes, dtype=torch.float64)
            scores.scatter_add_(1, labels[:, :count], votes[:, :count])
            predictions[count].append(scores.argmax(dim=1))
    return {count: torch.cat(parts) for count, parts in predictions.items()}
