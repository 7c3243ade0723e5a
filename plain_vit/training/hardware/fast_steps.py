"""Faster training steps: one matrix product for query, key and value, and no tokens that the head does not read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from ...attention_plain_vit import PlainViTAttention
from ...layers_plain_vit import cast_once
from ...modeling_plain_vit import PlainViTEncoder, PlainViTForImageClassification
from ...packed_plain_vit import Places

# Packages whose layers map each token by itself; another one's may mix the tokens of the last block.
KNOWN = ("plain_vit", "torch", "transformers", "peft", "accelerate", "torchao", "bitsandbytes")


@contextmanager
def fast_steps(model: nn.Module) -> Iterator[None]:
    """Skip redundant work in each forward and backward pass of a model; gradients stay the same up to rounding.

    Each self-attention computes query, key and value in one matrix product. Its three layers are not called, so hooks
    on them do not run; layers of another type (LoRA, quantised, parametrised) are called as usual. The last block of a
    classifier computes only the tokens that its pooling reads, so its hidden states and attentions, if requested, have
    only these tokens. A classifier with a `forward` of its own, or with other layers there, computes all.

    The training scripts run each step in this context. With transformers' `Trainer`, wrap the training; results of
    evaluations inside the context differ by rounding:

        with fast_steps(model):
            trainer.train()

    Args:
        model: The model, or one that contains it (DistributedDataParallel, peft).
    """
    encoders: list[Any] = [module for module in model.modules() if isinstance(module, PlainViTEncoder)]
    attentions = [attention for encoder in encoders for attention in attentions_of(encoder) if is_plain(attention)]
    classifiers: list[Any] = [
        module for module in model.modules() if isinstance(module, PlainViTForImageClassification)
    ]
    read = {
        getattr(classifier.vit, "_orig_mod", classifier.vit): classifier.vit.pooler.num_tokens_read
        for classifier in classifiers
        if classifier.training and reads_few(classifier)
    }
    before = {encoder: vars(encoder).get("encode") for encoder in encoders}
    for attention in attentions:
        attention.project, attention.held = MethodType(project_as_one, attention), Held()
    for encoder in encoders:
        encoder.encode = partial(encode_fast, encoder, read.get(encoder))
    try:
        yield
    finally:
        for attention in attentions:
            del attention.project, attention.held
        for encoder, replaced in before.items():
            del encoder.encode
            if replaced is not None:
                encoder.encode = replaced


def reads_few(classifier: Any) -> bool:
    """Return whether nothing in a classifier but known code reads the tokens of the last block."""
    vit = classifier.vit
    parts = [inside for part in (*vit.layers[-1:], vit.layernorm, vit.pooler) for inside in part.modules()]
    is_known = all(type(part).__module__.partition(".")[0] in KNOWN for part in parts)
    return is_known and type(classifier).forward is PlainViTForImageClassification.forward


def attentions_of(encoder: Any) -> list[Any]:
    """Return the self-attentions of all blocks."""
    return [module for module in encoder.layers.modules() if type(module) is PlainViTAttention]


def is_plain(attention: Any) -> bool:
    """Return whether query, key and value are torch's dense layers with their own `forward`."""
    return "project" not in vars(attention) and all(
        type(layer) is nn.Linear and layer._parameters.get("weight") is not None and "forward" not in vars(layer)
        for layer in layers_of(attention)
    )


def layers_of(attention: Any) -> list[nn.Linear]:
    """Return the layers for query, key and value."""
    return [attention.q_proj, attention.k_proj, attention.v_proj]


class Joined(NamedTuple):
    """Fused weight and bias: the rows for query, key and value, one after the other."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Held:
    """Holds the fused weights of an attention during one pass; a copy is empty."""

    joined: Joined | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, ()


def encode_fast(encoder: Any, num_output_tokens: int | None, *args: Any, **kwargs: Any) -> Any:
    """Fuse the projections of all blocks, then run `PlainViTEncoder.encode`.

    The gradients of all projections are then ready at once, after all others. With several processes, which exchange
    gradients during the backward pass, each attention fuses its own weights instead, so that their gradients are ready
    with those of its block.
    """
    attentions = [attention for attention in attentions_of(encoder) if can_join(attention)]
    apart = among_processes()
    joined = [None] * len(attentions) if apart else join([layers_of(attention) for attention in attentions])
    for attention, one in zip(attentions, joined, strict=True):
        attention.held.joined = one
    return type(encoder).encode(encoder, *args, num_output_tokens=num_output_tokens, **kwargs)


def among_processes() -> bool:
    """Return whether this process is one of several."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def can_join(attention: Any) -> bool:
    """Return whether one product may replace three: only in training, with plain, unsharded weights.

    The fused product is as accurate, but its rounding differs from that of the original library.
    """
    if "project" not in vars(attention) or not attention.training:
        return False
    return all(type(layer.weight) in (nn.Parameter, torch.Tensor) for layer in layers_of(attention))


def join(blocks: Sequence[Sequence[nn.Linear]]) -> list[Joined] | list[None]:
    """Concatenate the weights of the layers of each block and, under autocast, cast them, all in one operation."""
    layers = [layer for block in blocks for layer in block]
    if len({(layer.weight.device, layer.weight.dtype, layer.in_features) for layer in layers}) != 1:
        return [None] * len(blocks)
    width, counts = layers[0].in_features, [sum(layer.out_features for layer in block) for block in blocks]
    parts, sizes = [layer.weight.flatten() for layer in layers], [width * count for count in counts]
    if has_bias := any(layer.bias is not None for layer in layers):  # in some models, only the keys have no bias
        parts += [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        sizes += counts
    tensors = cast_once(torch.cat(parts)).split(sizes)
    biases = tensors[len(blocks) :] if has_bias else [None] * len(blocks)
    return [Joined(weight.view(-1, width), bias) for weight, bias in zip(tensors, biases, strict=False)]


def project_as_one(attention: Any, hidden_states: torch.Tensor, places: Places) -> tuple[torch.Tensor, ...]:
    """Compute `PlainViTAttention.project` with one matrix product."""
    layers = layers_of(attention)
    joined = attention.held.joined or (join([layers])[0] if can_join(attention) else None)
    if joined is None:
        return PlainViTAttention.project(attention, hidden_states, places)
    projected = nn.functional.linear(hidden_states, *joined).unflatten(-1, (-1, attention.head_dim))
    query, key, value = projected.split([layer.out_features // attention.head_dim for layer in layers], dim=2)
    return query[:, : places.num_output_tokens], key, value
