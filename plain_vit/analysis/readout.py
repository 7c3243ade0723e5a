"""Weights of the last layer's tokens in the pooled features, for each type of pooling.

Legend: `B` batch, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size, `d` head width.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import AnalysisError
from ..modeling_plain_vit import PlainViTPreTrainedModel
from .inspection import TokenLayout, encoder, product

Readout = Callable[[PlainViTPreTrainedModel, TokenLayout, torch.Tensor], torch.Tensor]


def readout(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the weight of each token in the pooled features.

    Args:
        model: A plain ViT.
        layout: The layout of its tokens.
        hidden_states: Input of the pooling: the tokens (B, L, D) after the final norm.

    Returns:
        Weights of shape (B, 1, L) that sum to 1: the mean over the heads that pool, or over the channels.

    Raises:
        AnalysisError: The weights of this pooling are not defined, or the model was built without pooling.
    """
    pooling = model.config.pooling
    if pooling in NOT_READ_OUT:
        raise AnalysisError(
            f'pooling "{pooling}" reads the patches {NOT_READ_OUT[pooling]}: use attention_maps, grad_cam or '
            "integrated_gradients instead"
        )
    return READOUTS[pooling](model, layout, hidden_states)[:, None]


def probe_weights(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the attention of the pooling's probe to each token: (B, heads, L), 0 for tokens that are not pooled."""
    pooler: Any = getattr(encoder(model), "pooler", None)
    if pooler is None:
        raise AnalysisError(
            f"the model was built without its pooling {model.config.pooling!r}, which reads the patches: give "
            "one that has it"
        )
    probe = pooler.query if model.config.pooling == "query" else pooler.q_proj(pooler.probe)
    query = probe.unflatten(-1, (pooler.num_heads, -1))  # 1 1 heads d
    key = pooler.k_proj(hidden_states).unflatten(-1, (pooler.num_heads, -1))  # B L heads d
    scores = (query * key).sum(dim=-1).float() * query.shape[-1] ** -0.5  # B L heads
    if not model.config.pool_prefix_tokens:
        read = torch.zeros(hidden_states.shape[1], dtype=torch.bool, device=scores.device)
        read[layout.patches] = True
        scores = scores.masked_fill(~read[:, None], -torch.inf)
    return scores.softmax(dim=1).transpose(1, 2)


def _of_class_token(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    """Weight the class token by 1, or both by 1/2 if the logits average it with the distillation token."""
    tokens = 2 if getattr(model, "distillation_classifier", None) is not None else 1
    return _spread(hidden_states, slice(0, tokens), 1 / tokens)


def _of_prefix(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    count = model.config.pooling_tokens
    return _spread(hidden_states, slice(0, count), 1 / count)


def _of_mean(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    pooled = _pooled(model, layout)
    return _spread(hidden_states, pooled, 1 / hidden_states[:, pooled].shape[1])


def _of_maximum(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    """Assign each channel to the token with the maximum; tokens with equal values share it."""
    pooled = _pooled(model, layout)
    tokens = hidden_states[:, pooled].float()  # B N D
    highest = (tokens == tokens.amax(dim=1, keepdim=True)).float()
    return _spread(hidden_states, pooled, (highest / highest.sum(dim=1, keepdim=True)).mean(dim=2))


def _of_probe(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    return probe_weights(model, layout, hidden_states).mean(dim=1)


def _of_refinement(model: PlainViTPreTrainedModel, layout: TokenLayout, hidden_states: torch.Tensor) -> torch.Tensor:
    heads = hidden_states.unflatten(-1, (model.config.pooling_heads, -1)).transpose(1, 2)  # B heads L d
    scores = product(heads, heads.transpose(2, 3)) * heads.shape[-1] ** -0.5
    weights = scores.softmax(dim=-1).mean(dim=1)  # B L L
    return weights[:, 0] if model.config.use_class_token else weights.mean(dim=1)


def _half_each(one: Readout, other: Readout) -> Readout:
    return lambda *arguments: (one(*arguments) + other(*arguments)) / 2


def _pooled(model: PlainViTPreTrainedModel, layout: TokenLayout) -> slice:
    """Return the positions of the tokens that a pooling over patches reads."""
    return slice(None) if model.config.pool_prefix_tokens else layout.patches


def _spread(hidden_states: torch.Tensor, read: slice, values: torch.Tensor | float) -> torch.Tensor:
    """Return the weights of all tokens, (B, L): the given values for the tokens that are read, 0 for the others."""
    weights = torch.zeros(hidden_states.shape[:2], device=hidden_states.device)
    weights[:, read] = values
    return weights


READOUTS: dict[str, Readout] = {
    "cls": _of_class_token,
    "mean": _of_mean,
    "max": _of_maximum,
    "mean_max": _half_each(_of_mean, _of_maximum),
    "cls_mean": _half_each(_of_class_token, _of_mean),
    "map": _of_probe,
    "query": _of_probe,
    "prr": _of_refinement,
    **dict.fromkeys(("prefix_mean", "prefix_joined"), _of_prefix),
    "none": _of_mean,
}
NOT_READ_OUT = {
    "class_attention": "in several blocks, with negative weights too",
    "query_block": "with a query, and is not read out here",
    "query_attention": "with a query, and is not read out here",
}
