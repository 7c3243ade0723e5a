"""Training steps that compute less: one product for query, key and value, and no tokens that nobody reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..attention_plain_vit import PlainViTAttention
from ..modeling_plain_vit import PlainViTEncoder, PlainViTForImageClassification
from ..packed_plain_vit import Places


@contextmanager
def fast_steps(model: nn.Module) -> Iterator[None]:
    """Compute less in each forward and backward pass of a model, with the same gradients up to rounding.

    Each self-attention computes query, key and value as one product, so that its three layers are not called, and
    hooks on them see nothing; layers of another type (LoRA, quantised, parametrised) are called as usual. The last
    block of a classifier computes only the tokens that its pooling reads: of its hidden states and attentions, if they
    are asked for, only these are returned.

    The training scripts do each step in this context. With transformers' `Trainer` it is one line, and evaluations
    inside it differ by rounding:

        with fast_steps(model):
            trainer.train()

    Args:
        model: The model, or one that contains it (DistributedDataParallel, peft).
    """
    encoders: list[Any] = [module for module in model.modules() if isinstance(module, PlainViTEncoder)]
    blocks = [module for encoder in encoders for module in encoder.layers.modules()]
    attentions: list[Any] = [module for module in blocks if type(module) is PlainViTAttention and is_plain(module)]
    read = {
        module.vit: getattr(module.vit.pooler, "num_tokens_read", None)
        for module in model.modules()
        if isinstance(module, PlainViTForImageClassification) and module.training
    }
    before = {encoder: encoder.num_output_tokens for encoder in read}
    for attention in attentions:
        attention.project = MethodType(project_as_one, attention)
    for encoder, count in read.items():
        encoder.num_output_tokens = count
    try:
        yield
    finally:
        for attention in attentions:
            del attention.project
        for encoder, count in before.items():
            encoder.num_output_tokens = count


def is_plain(attention: PlainViTAttention) -> bool:
    """Return whether query, key and value are dense layers of torch, and nothing has replaced their calls."""
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    return "project" not in vars(attention) and all(
        type(layer) is nn.Linear and layer._parameters.get("weight") is not None and "forward" not in vars(layer)
        for layer in layers
    )


def project_as_one(attention: Any, hidden_states: torch.Tensor, places: Places) -> tuple[torch.Tensor, ...]:
    """Project as `PlainViTAttention.project` does, with one product of all three weights.

    Weights in shards, or in tensors of another type, are left to their layers; and so is evaluation, whose rounding is
    a source's.
    """
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    is_whole = all(type(layer.weight) in (nn.Parameter, torch.Tensor) for layer in layers)
    if not attention.training or not is_whole:
        return PlainViTAttention.project(attention, hidden_states, places)
    weight, bias = torch.cat([layer.weight for layer in layers]), None
    if any(layer.bias is not None for layer in layers):  # some keys have none beside a query that has one
        zeros = [weight.new_zeros(layer.out_features) for layer in layers]
        bias = torch.cat(
            [zero if layer.bias is None else layer.bias for layer, zero in zip(layers, zeros, strict=True)]
        )
    projected = nn.functional.linear(hidden_states, weight, bias).unflatten(-1, (-1, attention.head_dim))
    query, key, value = projected.split([layer.out_features // attention.head_dim for layer in layers], dim=2)
    return query[:, : places.num_output_tokens], key, value
