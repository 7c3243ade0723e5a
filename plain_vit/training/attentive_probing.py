"""Attentive probes: a learned query reads the patch tokens of a frozen model, and a linear layer classifies the result.

The tokens of a split are on disk, in float16; one batch of them is in memory at a time.

Legend: `N` images, `L` patches, `D` features, `H` heads, `d` features of a head, `K` classes, `P` probes (one for each
learning rate), `B` batch.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..errors import TrainingError
from ..files.staging import staged_file
from ..heads_plain_vit import QueryPooler
from ..modeling_plain_vit import PlainViTForImageClassification
from ..system.extras import needs
from .optimization import learning_rate_factor
from .probing import EPSILON, LEARNING_RATES

with needs("plain-vit[train]"):
    from accelerate import Accelerator

BETAS = (0.9, 0.95)  # of AdamW, as CAPI has them
DEVIATION = 0.02  # of the initial weights
# The final norm of the tokens, without the one of pooled features.
NORMS = {"after_pooling": "none", "both": "before_pooling"}


@dataclass(frozen=True)
class Tokens:
    """Patch tokens of a split from a frozen model.

    Args:
        values: [N, L, D] in float16, mapped from a file.
        labels: [N].
    """

    values: np.ndarray
    labels: torch.Tensor

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield tokens in float32 with their labels, in order."""
        for start in range(0, len(self.labels), size):
            rows = slice(start, start + size)
            yield torch.from_numpy(self.values[rows].astype(np.float32)), self.labels[rows]


@torch.no_grad()
def write_tokens(
    model: PreTrainedModel,
    loader: Iterable[Mapping[str, Any]],
    accelerator: Accelerator,
    file: Path,
    *,
    size: int,
) -> None:
    """Write the patch tokens of a split after the final norm, each image once, as a `.npy` file of the main process.

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
    vit.eval()
    with staged_file(file, force=True) if accelerator.is_main_process else nullcontext() as new:
        stored: np.memmap | None = None
        done = 0
        for batch in loader:
            pixels = batch["pixel_values"]
            with accelerator.autocast():
                states = vit(pixel_values=pixels).last_hidden_state
            tokens = vit.tokens_to_map(states, *pixels.shape[-2:]).flatten(2).transpose(1, 2).half()
            tokens = accelerator.gather_for_metrics(tokens.contiguous()).cpu()
            if not tokens.isfinite().all():
                raise TrainingError("Patch tokens are too large for float16, in which attentive probes store them.")
            if new is not None and stored is None:
                stored = np.lib.format.open_memmap(new, "w+", np.float16, (size, *tokens.shape[1:]))
            if stored is not None:
                stored[done : done + len(tokens)] = tokens.numpy()[: size - done]
            done += len(tokens)
        if done != size:
            raise TrainingError(f"{done} images were processed, but the split has {size}.")
        if stored is not None:
            stored.flush()


@dataclass(frozen=True)
class AttentiveProbe:
    """A classifier that reads patch tokens with one learned query.

    Args:
        learning_rate: peak learning rate, for 256 images per step.
        heads: number of heads H of the query.
        query: [D].
        key: weights of the keys [D, D]; keys have no bias, which would not change the attention.
        value: weights of the values [D, D].
        pooled_bias: added to the pooled values [D].
        weight: of the classifier [K, D].
        bias: of the classifier [K].
    """

    learning_rate: float
    heads: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pooled_bias: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, K] of tokens [B, L, D]."""
        parameters = [each[None] for each in (self.query, self.key, self.value)]
        pooled = pool_by_query(tokens, *parameters, heads=self.heads)[0]
        return F.linear(pooled + self.pooled_bias, self.weight, self.bias)

    @torch.no_grad()
    def accuracy(self, tokens: Tokens, batch_size: int = 256) -> float:
        """Return the accuracy."""
        right = sum((self.logits(values).argmax(1) == labels).sum() for values, labels in tokens.batches(batch_size))
        return int(right) / len(tokens.labels)


def pool_by_query(
    tokens: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads: int
) -> torch.Tensor:
    """Pool tokens by the attention of learned queries, one for each probe.

    The query is taken through the weights of the keys, and the weighted mean of the tokens through those of the values:
    the same numbers as with keys and values of all tokens, for D / H times fewer multiplications.

    Args:
        tokens: [B, L, D].
        query: [P, D].
        key: [P, D, D].
        value: [P, D, D].
        heads: number of heads H.

    Returns:
        Pooled values [P, B, D].
    """
    width = query.shape[1] // heads
    asked = torch.einsum("phd,phdc->phc", query.unflatten(1, (heads, width)), key.unflatten(1, (heads, width)))
    weights = (torch.einsum("blc,phc->pbhl", tokens, asked) * width**-0.5).softmax(dim=-1)
    mixed = torch.einsum("pbhl,blc->pbhc", weights, tokens)
    return torch.einsum("pbhc,phdc->pbhd", mixed, value.unflatten(1, (heads, width))).flatten(2)


def train_attentive_probes(
    tokens: Tokens,
    classes: int,
    *,
    heads: int,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: float = 10.0,
    batch_size: int = 256,
    weight_decay: float = 0.0,
    warmup_epochs: float = 0.0,
    seed: int = 0,
) -> list[AttentiveProbe]:
    """Train one attentive probe for each learning rate, all on the same batches, by AdamW with a cosine schedule.

    The tokens are standardised first, like with a batch norm without gain (AIM's probe); this is folded into the
    returned probes, which take the raw tokens.

    Args:
        tokens: training tokens.
        classes: number of classes.
        heads: number of heads of the query; it divides the width of the tokens.
        learning_rates: peak learning rates, for 256 images per step; they scale with `batch_size`.
        epochs: passes over the tokens.
        batch_size: images per step.
        weight_decay: weight decay of all but the bias.
        warmup_epochs: passes over the tokens during which the learning rates rise linearly.
        seed: seed of the order and of the initial weights.

    Returns:
        The probes, in the order of the learning rates.

    Source:
        El-Nouby et al. 2024 (AIM), section 4; Darcet et al. 2025 (CAPI): AdamW, many learning rates at once.
    """
    count, _, width = tokens.values.shape
    mean, std = token_statistics(tokens)
    shapes = {"query": (width,), "key": (width, width), "value": (width, width), "weight": (classes, width)}
    generator = torch.Generator().manual_seed(seed)
    start = {name: nn.init.trunc_normal_(torch.empty(shape), std=DEVIATION, generator=generator)
             for name, shape in shapes.items()} | {"bias": torch.zeros(classes)}  # fmt: skip
    probes = [{name: nn.Parameter(value.clone()) for name, value in start.items()} for _ in learning_rates]
    groups: list[dict[str, Any]] = []
    for rate, probe in zip(learning_rates, probes, strict=True):
        peak = rate * batch_size / 256
        for name, parameter in probe.items():
            decay = 0.0 if name == "bias" else weight_decay
            groups.append({"params": [parameter], "lr": peak, "peak_lr": peak, "weight_decay": decay})
    descent = torch.optim.AdamW(groups, betas=BETAS)
    total = max(1, math.ceil(epochs * count / batch_size))
    warmup = min(total, round(warmup_epochs * count / batch_size))
    orders = (np.random.default_rng((seed, epoch)).permutation(count) for epoch in range(math.ceil(epochs) + 1))
    order = np.concatenate(list(orders))
    for step in range(total):
        rows = np.sort(order[step * batch_size : (step + 1) * batch_size])  # in the order of the file
        inputs = (torch.from_numpy(tokens.values[rows].astype(np.float32)) - mean) / std
        for group in descent.param_groups:
            group["lr"] = group["peak_lr"] * learning_rate_factor(step, total=total, warmup=warmup, schedule="cosine")
        query, key, value, weight, bias = (torch.stack([probe[name] for probe in probes]) for name in start)
        pooled = pool_by_query(inputs, query, key, value, heads=heads)
        logits = torch.einsum("pbd,pkd->pbk", pooled, weight) + bias[:, None]
        targets = tokens.labels[torch.from_numpy(rows)].expand(len(probes), -1)
        # The sum over the probes, which are independent.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / len(rows)
        descent.zero_grad()
        loss.backward()
        descent.step()
    return [
        _for_raw_tokens(rate, heads, {name: value.detach() for name, value in probe.items()}, mean, std)
        for rate, probe in zip(learning_rates, probes, strict=True)
    ]


def _for_raw_tokens(
    rate: float, heads: int, probe: Mapping[str, torch.Tensor], mean: torch.Tensor, std: torch.Tensor
) -> AttentiveProbe:
    """Fold the standardisation of tokens into a probe; the mean adds the same to all scores of the attention."""
    value = probe["value"] / std
    return AttentiveProbe(
        rate, heads, probe["query"], probe["key"] / std, value, -value @ mean, probe["weight"], probe["bias"]
    )


def token_statistics(tokens: Tokens, batch_size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of each feature over all patches of all images, in float32."""
    sums = torch.zeros(2, tokens.values.shape[2], dtype=torch.float64)
    for values, _ in tokens.batches(batch_size):
        flat = values.flatten(0, 1).double()
        sums += torch.stack([flat.sum(dim=0), flat.square().sum(dim=0)])
    mean, square = sums / math.prod(tokens.values.shape[:2])
    return mean.float(), (square - mean.square()).clamp(min=0).sqrt().float() + EPSILON


def attentive_heads(model: PreTrainedModel) -> int:
    """Return the heads of a probe: those of the model's attention, or the most that divide them and the width."""
    config: Any = model.config
    return math.gcd(config.num_attention_heads, config.hidden_size)


def attentive_classifier(model: PreTrainedModel) -> PlainViTForImageClassification:
    """Return a classifier with the layers of a model and, untrained, the pooling and classifier of an attentive probe.

    Args:
        model: a plain ViT with a classifier, which is left as it is.

    Raises:
        TrainingError: It is another model, or has a part that is not combined with this pooling.
    """
    if not isinstance(model, PlainViTForImageClassification):
        raise TrainingError(
            f"Attentive probes read the patch tokens of a plain ViT, and {type(model).__name__} is none: convert the "
            "model with `plain-vit convert` first."
        )
    config = copy.deepcopy(model.config)
    changes = {
        "pooling": "query", "pooling_num_attention_heads": attentive_heads(model), "pooling_intermediate_size": None,
        "pooling_num_layers": None, "pool_prefix_tokens": False, "representation_size": None, "classifier_bias": True,
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
def use_probe(classifier: PlainViTForImageClassification, probe: AttentiveProbe) -> None:
    """Put a trained probe into the classifier that `attentive_classifier` returned."""
    pooler = cast(QueryPooler, classifier.vit.pooler)
    pooler.query.copy_(probe.query.expand_as(pooler.query))
    pooler.k_proj.weight.copy_(probe.key)
    pooler.v_proj.weight.copy_(probe.value)
    for projection in (pooler.k_proj, pooler.v_proj):
        if projection.bias is not None:
            projection.bias.zero_()
    nn.init.eye_(pooler.o_proj.weight)
    pooler.o_proj.bias.copy_(probe.pooled_bias)
    layer = cast(nn.Linear, classifier.classifier)
    layer.weight.copy_(probe.weight)
    layer.bias.copy_(probe.bias)
