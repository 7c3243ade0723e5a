"""Probes of frozen features: classifiers trained by gradient descent, few-shot ridge regression, nearest neighbours.

A classifier is a linear layer on pooled features, or on patch tokens pooled by a learned query (an attentive probe).
One is trained for each learning rate, all at once. The tokens of a split are on disk in float16; only one batch is in
memory at a time.

Legend: `N` images, `L` patches, `D` features, `H` heads, `d` features of a head, `K` classes, `P` probes (one per
learning rate), `B` batch, `Q` images to classify.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from ..errors import DataError, TrainingError
from ..files.staging import staged_file
from ..heads_plain_vit import QueryPooler
from ..modeling_plain_vit import PlainViTForImageClassification
from ..system.extras import needs
from .arguments import LEARNING_RATES, TEMPERATURE
from .data.inputs import model_inputs
from .data.splits import choose_shots
from .models import head_of
from .optimization import learning_rate_factor

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from sklearn.linear_model import Ridge

MOMENTUM = 0.9  # of SGD
BETAS = (0.9, 0.95)  # of AdamW, as in CAPI
DEVIATIONS = {"sgd": 0.0, "lars": 0.01, "adamw": 0.02}  # of the initial weights; LARS cannot update weights of norm 0
BASE_BATCH_SIZE = 256  # images per step at which learning rates are given
BIAS = 100.0  # value of the constant feature, as in big_vision's few-shot evaluation
EPSILON = 1e-5  # added to standard deviations
QUERIES, NEIGHBORS = 256, 16_384  # images compared at a time
TRUST = 0.001  # LARS: norm of a gradient relative to the norm of the weights
# Where to keep the final norm of the tokens without the norm of pooled features.
NORMS = {"after_pooling": "none", "both": "before_pooling"}


@dataclass(frozen=True)
class Features:
    """Features of a split, computed by a frozen model.

    Args:
        values: the inputs of the head in float32 [N, D], or the patch tokens in float16 [N, L, D], mapped from a file.
        labels: class numbers [N].
    """

    values: torch.Tensor
    labels: torch.Tensor

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches of values in float32 with their labels, in order."""
        for values, labels in zip(self.values.split(size), self.labels.split(size), strict=True):
            yield values.float(), labels

    def statistics(self, batch_size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of each feature over all images and patches, in float32 [D]."""
        sums = torch.zeros(2, self.values.shape[-1], dtype=torch.float64)
        for values, _ in self.batches(batch_size):
            flat = values.flatten(0, -2).double()
            sums += torch.stack([flat.sum(dim=0), flat.square().sum(dim=0)])
        mean, square = sums / self.values.shape[:-1].numel()
        return mean.float(), (square - mean.square()).clamp(min=0).sqrt().float() + EPSILON


def head_layer(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Return the name and the linear layer of a model that maps features to logits.

    Raises:
        TrainingError: The model has no such layer or several.
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
    """Compute the inputs of a model's head once for each image of a split.

    Args:
        model: any transformers image classifier with one linear head; left in evaluation mode.
        loader: prepared by the accelerator; batches of the model's inputs and `labels`, in the order of the split.
        accelerator: gathers the results of the processes.
        size: number of images of the split.

    Raises:
        TrainingError: The processes returned another number of images, or the model has no linear head.
    """
    read: list[torch.Tensor] = []
    hook = head_layer(model)[1].register_forward_pre_hook(lambda layer, given: read.append(given[0]))

    def of_batch(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        model(**model_inputs(batch))
        return read.pop().float(), batch["labels"]

    try:
        values, labels = zip(*_gathered(model, of_batch, loader, accelerator, size), strict=True)
    finally:
        hook.remove()
    return Features(torch.cat(values), torch.cat(labels))


@torch.no_grad()
def write_tokens(
    model: PreTrainedModel, loader: Iterable[Mapping[str, Any]], accelerator: Accelerator, file: Path, *, size: int
) -> None:
    """Write the patch tokens of a split, after the final norm, to a `.npy` file from the main process.

    Args:
        model: a plain ViT; left in evaluation mode.
        loader: prepared by the accelerator; batches of `pixel_values`, in the order of the split.
        accelerator: gathers the results of the processes.
        file: path of the new file.
        size: number of images of the split.

    Raises:
        TrainingError: The processes returned another number of images, or a value is too large for float16.
    """
    vit: Any = model.base_model

    def of_batch(batch: Mapping[str, Any]) -> tuple[torch.Tensor]:
        pixels = batch["pixel_values"]
        states = vit(pixel_values=pixels).last_hidden_state
        return (vit.tokens_to_map(states, *pixels.shape[-2:]).flatten(2).transpose(1, 2).half().contiguous(),)

    with staged_file(file, force=True) if accelerator.is_main_process else nullcontext() as new:
        stored: np.memmap | None = None
        done = 0
        for (tokens,) in _gathered(vit, of_batch, loader, accelerator, size):
            if not tokens.isfinite().all():
                raise TrainingError("Patch tokens are too large for float16, in which attentive probes store them.")
            if new is not None and stored is None:
                stored = np.lib.format.open_memmap(new, "w+", np.float16, (size, *tokens.shape[1:]))
            if stored is not None:
                stored[done : done + len(tokens)] = tokens.numpy()[: size - done]
            done += len(tokens)
        if stored is not None:
            stored.flush()


def _gathered(
    model: nn.Module,
    of_batch: Callable[[Mapping[str, Any]], tuple[torch.Tensor, ...]],
    loader: Iterable[Mapping[str, Any]],
    accelerator: Accelerator,
    size: int,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield a model's results for the batches of all processes, on the CPU; check the number of images."""
    model.eval()
    done = 0
    for batch in loader:
        with accelerator.autocast():
            computed = of_batch(batch)
        gathered = tuple(each.cpu() for each in accelerator.gather_for_metrics(computed))
        done += len(gathered[0])
        yield gathered
    if done != size:
        raise TrainingError(f"{done} images were processed, but the split has {size}.")


def open_tokens(file: Path, labels: torch.Tensor) -> Features:
    """Memory-map the patch tokens of a split from a file written by `write_tokens`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is read-only
        return Features(torch.from_numpy(np.load(file, mmap_mode="r")), labels)


@dataclass(frozen=True)
class Query:
    """Pooling of an attentive probe: the attention of one learned query.

    Args:
        heads: number of heads H.
        query: the query [D].
        key: weights of the keys [D, D]; a bias of the keys would not change the attention.
        value: weights of the values [D, D].
        bias: added to the pooled values [D].
    """

    heads: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the pooled values [B, D] of tokens [B, L, D]."""
        return (
            pool_by_query(tokens, self.query[None], self.key[None], self.value[None], heads=self.heads)[0] + self.bias
        )


@dataclass(frozen=True)
class Probe:
    """A linear classifier of features, or of tokens pooled by a query.

    Args:
        learning_rate: peak learning rate, for 256 images per step.
        weight: weights of the classifier [K, D].
        bias: bias of the classifier [K].
        pooling: pooling of tokens; None for features.
    """

    learning_rate: float
    weight: torch.Tensor
    bias: torch.Tensor
    pooling: Query | None = None

    def logits(self, values: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, K] of features [B, D], or of tokens [B, L, D]."""
        return F.linear(values if self.pooling is None else self.pooling(values), self.weight, self.bias)

    @torch.no_grad()
    def accuracy(self, features: Features, batch_size: int = 256) -> float:
        """Return the accuracy on labelled features, 0 to 1."""
        right = sum((self.logits(values).argmax(1) == labels).sum() for values, labels in features.batches(batch_size))
        return int(right) / len(features.labels)


def pool_by_query(
    tokens: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads: int
) -> torch.Tensor:
    """Pool tokens by the attention of learned queries, one per probe.

    The key weights are applied to the query, and the value weights to the weighted mean of the tokens. The result is as
    with keys and values of all tokens, for D / H times fewer multiplications.

    Args:
        tokens: patch tokens [B, L, D].
        query: queries [P, D].
        key: weights of the keys [P, D, D].
        value: weights of the values [P, D, D].
        heads: number of heads H.

    Returns:
        Pooled values [P, B, D].
    """
    width = query.shape[1] // heads
    asked = torch.einsum("phd,phdc->phc", query.unflatten(1, (heads, width)), key.unflatten(1, (heads, width)))
    weights = (torch.einsum("blc,phc->pbhl", tokens, asked) * width**-0.5).softmax(dim=-1)
    mixed = torch.einsum("pbhl,blc->pbhc", weights, tokens)
    return torch.einsum("pbhc,phdc->pbhd", mixed, value.unflatten(1, (heads, width))).flatten(2)


def train_probes(
    features: Features,
    classes: int,
    *,
    heads: int | None = None,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: float = 10.0,
    batch_size: int = 256,
    weight_decay: float = 0.0,
    optimizer: str = "sgd",
    warmup_epochs: float = 0.0,
    seed: int = 0,
) -> list[Probe]:
    """Train one classifier per learning rate, all on the same batches, with a cosine schedule.

    The features are standardised first, as by a batch norm without gain (the probes of MAE and AIM). This is folded
    into the returned probes, which take raw features.

    Args:
        features: training features, or tokens.
        classes: number of classes.
        heads: number of heads of the query that pools tokens, a divisor of D; None for features.
        learning_rates: peak learning rates, for 256 images per step; they scale with `batch_size`.
        epochs: passes over the features.
        batch_size: images per step.
        weight_decay: weight decay; it applies to the bias only with `sgd`.
        optimizer: optimizer for features: `sgd`, or `lars`, SGD with the gradient of each weight matrix scaled to the
            norm of the matrix (You et al. 2017, as in MAE's linear probe). Attentive probes are trained with AdamW.
        warmup_epochs: passes over the features during which the learning rates rise linearly.
        seed: seed of the order and of the initial weights, which are zero with `sgd`.

    Returns:
        The probes, in the order of the learning rates.

    Source:
        He et al. 2022 (MAE); El-Nouby et al. 2024 (AIM), section 4; Darcet et al. 2025 (CAPI): AdamW, many learning
        rates at once.
    """
    optimizer = optimizer if heads is None else "adamw"
    count, width = len(features.labels), features.values.shape[-1]
    mean, std = features.statistics()
    shapes: dict[str, tuple[int, ...]] = {"weight": (classes, width)}
    if heads is not None:
        shapes = {"query": (width,), "key": (width, width), "value": (width, width), **shapes}
    generator = torch.Generator().manual_seed(seed)
    start = {name: _initial(shape, DEVIATIONS[optimizer], generator) for name, shape in shapes.items()}
    start["bias"] = torch.zeros(classes)
    probes = [{name: nn.Parameter(value.clone()) for name, value in start.items()} for _ in learning_rates]
    descent = _make_optimizer(optimizer, probes, learning_rates, batch_size, weight_decay)
    total = max(1, math.ceil(epochs * count / batch_size))
    warmup = min(total, round(warmup_epochs * count / batch_size))
    schedule = LambdaLR(descent, lambda step: learning_rate_factor(step, total=total, warmup=warmup, schedule="cosine"))
    orders = (np.random.default_rng((seed, epoch)).permutation(count) for epoch in range(math.ceil(epochs) + 1))
    order = torch.from_numpy(np.concatenate(list(orders)))
    for step in range(total):
        rows = order[step * batch_size : (step + 1) * batch_size].sort().values  # read in file order
        inputs = (features.values[rows].float() - mean) / std
        stacked = {name: torch.stack([probe[name] for probe in probes]) for name in start}
        weight, bias = stacked.pop("weight"), stacked.pop("bias")
        if heads is None:
            logits = torch.einsum("bd,pkd->pbk", inputs, weight) + bias[:, None]
        else:
            logits = torch.einsum("pbd,pkd->pbk", pool_by_query(inputs, **stacked, heads=heads), weight) + bias[:, None]
        targets = features.labels[rows].expand(len(probes), -1)
        # Sum over the probes, which are independent.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / len(rows)
        descent.zero_grad()
        loss.backward()
        if optimizer == "lars":
            for probe in probes:
                _adapt_gradient(probe["weight"], weight_decay)
        descent.step()
        schedule.step()
    return [
        _for_raw_features(rate, heads, {name: value.detach() for name, value in probe.items()}, mean, std)
        for rate, probe in zip(learning_rates, probes, strict=True)
    ]


def _initial(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> torch.Tensor:
    start = torch.zeros(shape)
    return nn.init.trunc_normal_(start, std=deviation, generator=generator) if deviation else start


def _make_optimizer(
    name: str,
    probes: Sequence[Mapping[str, nn.Parameter]],
    learning_rates: Sequence[float],
    batch_size: int,
    weight_decay: float,
) -> torch.optim.Optimizer:
    undecayed = {"sgd": (), "lars": ("weight", "bias"), "adamw": ("bias",)}[name]  # LARS decays the gradients itself
    groups = [
        {
            "params": [parameter],
            "lr": rate * batch_size / BASE_BATCH_SIZE,
            "weight_decay": 0.0 if part in undecayed else weight_decay,
        }
        for rate, probe in zip(learning_rates, probes, strict=True)
        for part, parameter in probe.items()
    ]
    return torch.optim.AdamW(groups, betas=BETAS) if name == "adamw" else torch.optim.SGD(groups, momentum=MOMENTUM)


def _for_raw_features(
    rate: float, heads: int | None, probe: Mapping[str, torch.Tensor], mean: torch.Tensor, std: torch.Tensor
) -> Probe:
    """Fold the standardisation into a probe; the mean of tokens shifts all attention scores alike and drops out."""
    weight, bias = probe["weight"], probe["bias"]
    if heads is None:
        return Probe(rate, weight / std, bias - (weight / std) @ mean)
    value = probe["value"] / std
    return Probe(rate, weight, bias, Query(heads, probe["query"], probe["key"] / std, value, -value @ mean))


@torch.no_grad()
def _adapt_gradient(weight: torch.Tensor, weight_decay: float) -> None:
    """Add the weight decay to a gradient, and scale it to a thousandth of the norm of the weights."""
    gradient = weight.grad.add_(weight, alpha=weight_decay)  # type: ignore[union-attr]
    norms = weight.norm(), gradient.norm()
    if all(norms):
        gradient.mul_(TRUST * norms[0] / norms[1])


def attentive_heads(model: PreTrainedModel) -> int:
    """Return the number of heads of a probe: the model's, or its greatest common divisor with the width."""
    config: Any = model.config
    return math.gcd(config.num_attention_heads, config.hidden_size)


def attentive_classifier(model: PreTrainedModel) -> PlainViTForImageClassification:
    """Return a classifier with the layers of a model, and an untrained attentive probe as its pooling and head.

    Args:
        model: a plain ViT with a classifier; it is not changed.

    Raises:
        TrainingError: The model is not a plain ViT, or has a part that cannot be combined with this pooling.
    """
    if not isinstance(model, PlainViTForImageClassification):
        raise TrainingError(
            f"Attentive probes need the patch tokens of a plain ViT, but the model is a {type(model).__name__}: "
            "convert it with `plain-vit convert` first."
        )
    config = copy.deepcopy(model.config)
    changes = {
        "pooling": "query", "pooling_num_attention_heads": attentive_heads(model), "pooling_intermediate_size": None,
        "pooling_num_layers": None, "pooling_num_tokens": None, "pool_prefix_tokens": False,
        "representation_size": None, "classifier_bias": True,
        "final_norm": NORMS.get(config.final_norm, config.final_norm),
    }  # fmt: skip
    try:
        new = PlainViTForImageClassification(type(config)(**(config.to_dict() | changes)))
    except ValueError as error:
        raise TrainingError(f"The model cannot have an attentive probe: {error}") from error
    pooled = ("pooler.", "pooled_layernorm.", "representation.")
    layers = {name: value for name, value in model.vit.state_dict().items() if not name.startswith(pooled)}
    missing, unknown = new.vit.load_state_dict(layers, strict=False)
    if unknown or any(not name.startswith("pooler.") for name in missing):
        raise TrainingError(f"The model cannot have an attentive probe: {', '.join([*unknown, *missing][:5])} differ.")
    return new


@torch.no_grad()
def use_probe(classifier: PreTrainedModel, probe: Probe) -> None:
    """Copy a trained probe into the head of a model and, if attentive, into the pooling of `attentive_classifier`."""
    _, head = head_layer(classifier)
    head.weight.copy_(probe.weight)
    head.bias.copy_(probe.bias)
    if probe.pooling is None:
        return
    pooler = cast(QueryPooler, classifier.base_model.pooler)
    pooler.query.copy_(probe.pooling.query.expand_as(pooler.query))
    pooler.k_proj.weight.copy_(probe.pooling.key)
    pooler.v_proj.weight.copy_(probe.pooling.value)
    for projection in (pooler.k_proj, pooler.v_proj):
        if projection.bias is not None:
            projection.bias.zero_()
    nn.init.eye_(pooler.o_proj.weight)
    pooler.o_proj.bias.copy_(probe.pooling.bias)


def fit_ridge(features: Features, classes: int, *, l2: float = 2.0**10) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve the ridge regression from features to targets of -1 and 1 in closed form.

    Each feature is standardised. A constant feature is added and regularised like the others.

    Args:
        features: features of the few images.
        classes: number of classes.
        l2: weight of the squared norm of the solution.

    Returns:
        Weights [K, D] and bias [K] for the raw features, in float64.

    Source:
        Dosovitskiy et al. 2021, section 4.1; constants from big_vision's few-shot evaluation.
    """
    values = features.values.double()
    mean, std = values.mean(dim=0), values.std(dim=0, correction=0) + EPSILON
    inputs = torch.cat([(values - mean) / std, torch.full((len(values), 1), BIAS, dtype=torch.float64)], dim=1)
    targets = F.one_hot(features.labels, classes).double() * 2 - 1
    ridge = Ridge(alpha=l2, fit_intercept=False, solver="cholesky").fit(inputs.numpy(), targets.numpy())
    solution = torch.from_numpy(ridge.coef_)
    weight = solution[:, :-1] / std
    return weight, solution[:, -1] * BIAS - weight @ mean


def few_shot_accuracies(
    train: Features, held_out: Features, classes: int, *, shots: int, seeds: Sequence[int], l2: float = 2.0**10
) -> list[float]:
    """Return the accuracy of ridge regression for each seed, which selects `shots` images per class."""
    accuracies = []
    for seed in seeds:
        rows = choose_shots(train.labels.numpy(), [*map(str, range(classes))], shots, seed)
        weight, bias = fit_ridge(Features(train.values[rows], train.labels[rows]), classes, l2=l2)
        answers = F.linear(held_out.values.double(), weight, bias).argmax(dim=1)
        accuracies.append((answers == held_out.labels).double().mean().item())
    return accuracies


def nearest_neighbors(train: torch.Tensor, queries: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the nearest training features by cosine similarity, computed in chunks.

    Args:
        train: training features [N, D].
        queries: features to look up [Q, D].
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
    """Refuse numbers of neighbours above the number of training images.

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
    """Classify images by votes of the nearest training images, weighted by exp(cosine / temperature).

    Args:
        train: training features.
        queries: features to classify [Q, D].
        classes: number of classes.
        counts: numbers of neighbours that vote.
        temperature: above 0; the lower, the more the nearest neighbours count.

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
        votes = (similarity.double() / temperature).softmax(dim=1)  # proportional to the exponentials, without overflow
        labels = train.labels[rows]
        for count in counts:
            scores = torch.zeros(len(rows), classes, dtype=torch.float64)
            scores.scatter_add_(1, labels[:, :count], votes[:, :count])
            predictions[count].append(scores.argmax(dim=1))
    return {count: torch.cat(parts) for count, parts in predictions.items()}
