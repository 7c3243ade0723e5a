"""Attention maps, attention rollout and attention distance.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size, `d` head
width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..errors import AnalysisError
from ..modeling_plain_vit import PlainViTPreTrainedModel
from .inspection import (
    Target,
    TokenLayout,
    as_array,
    attention_modules,
    chosen,
    differentiable_scores,
    encoder,
    prepared,
    product,
    record_attentions,
    record_outputs,
)
from .readout import probe_weights, readout

SIGNED = ("differential", "re_attention", "talking_heads")  # types of attention whose weights may be negative

HEAD_FUSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda weights: weights.mean(dim=1),
    "max": lambda weights: weights.amax(dim=1),
    "min": lambda weights: weights.amin(dim=1),
}


def attention_maps(
    model: nn.Module,
    pixel_values: torch.Tensor | Mapping[str, Any],
    query: str | tuple[int, int] | None = None,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
) -> np.ndarray:
    """Return the attention from a query to each patch, in every layer and head.

    Args:
        model: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        query: The token that attends ("class", "distillation", "register 0", ...), a patch as (row, column), or
            "patches" for the mean over all patches (default: the class token, or else "patches").
        layers: Layers, counted from 0 or, if negative, from the end (default: all).
        heads: Heads, in the same way.

    Returns:
        Attention weights of shape (B, layers, heads, h, w). A map sums to 1 minus the attention to other tokens, unless
        the type of attention has negative weights. In blocks with several attentions, their heads are concatenated.

    Raises:
        AnalysisError: The model has no such token, patch, layer or head, or the pixels do not fit it.
    """
    model, pixel_values, layout = prepared(model, pixel_values)
    rows = layout.query(query if query is not None else "class" if "class" in layout.before else "patches")
    modules = attention_modules(model)
    numbers = chosen("layer", layers, len(modules))
    head_numbers = chosen("head", heads, len(modules[0]) * model.config.num_attention_heads)

    def keep(weights: torch.Tensor) -> torch.Tensor:
        return weights[:, :, rows, layout.patches].float().mean(dim=2)  # B heads N

    attentions = record_attentions(model, keep)
    with torch.no_grad():
        model(pixel_values)
    maps = torch.stack([torch.cat(attentions[i], dim=1)[:, head_numbers] for i in numbers], dim=1)
    return as_array(maps.unflatten(-1, layout.grid_size))


def attention_rollout(
    model: nn.Module,
    pixel_values: torch.Tensor | Mapping[str, Any],
    head_fusion: Literal["mean", "max", "min"] = "mean",
    discard: float = 0.0,
) -> np.ndarray:
    """Return the contribution of each patch to the pooled features, following attention through all layers.

    In each layer the heads are fused, the identity is added for the residual connection, rows are rescaled to sum to 1,
    and the matrices of all layers are multiplied. The result is the row of the class token (averaged with the row
    of the distillation token if the logits are averaged too), or of the pooled tokens, weighted like the pooling.

    Args:
        model: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        head_fusion: How heads are fused.
        discard: Fraction of the smallest fused weights of each layer to set to 0 first, in [0, 1).

    Returns:
        Contributions of shape (B, h, w). They sum to 1 minus the contribution of the other tokens.

    Raises:
        AnalysisError: The fusion or fraction is invalid, attention is signed, or the pixels do not fit the model.

    Source:
        Abnar and Zuidema 2020, section 3; discarding as in github.com/jacobgil/vit-explain.
    """
    if head_fusion not in HEAD_FUSIONS:
        raise AnalysisError(f"head_fusion is {head_fusion!r}: expected one of {list(HEAD_FUSIONS)}")
    if not 0 <= discard < 1:
        raise AnalysisError(f"discard is {discard}: expected a number in [0, 1)")
    model, pixel_values, layout = prepared(model, pixel_values)
    _refuse_signed(model, "attention rollout")
    fuse = HEAD_FUSIONS[head_fusion]
    attentions = record_attentions(model, lambda weights: fuse(weights.float()))
    hidden_states = record_outputs(encoder(model).layernorm)
    with torch.no_grad():
        model(pixel_values)
        read = readout(model, layout, hidden_states[0])
    layers = [fuse(torch.stack(branches, dim=1)) for branches in attentions]  # of B L L
    return _patches_of(product(read, rollout(layers, discard)), layout)


def rollout(layers: Sequence[torch.Tensor], discard: float = 0.0) -> torch.Tensor:
    """Multiply the attentions of all layers, including residual connections.

    Args:
        layers: Attention weights of each layer, from input to output, of shape (B, L, L), from row to column.
        discard: Fraction of the smallest weights of each matrix to set to 0 first.

    Returns:
        The contribution of each input token (column) to each token of the last layer (row), of shape (B, L, L).
    """
    identity = torch.eye(layers[0].shape[-1], device=layers[0].device)
    total = identity
    for weights in layers:
        count = int(discard * weights.shape[-1] ** 2)
        if count:
            smallest = weights.flatten(1).argsort(dim=1)[:, :count]
            weights = weights.flatten(1).scatter(1, smallest, 0.0).view_as(weights)
        weights = weights + identity
        total = product(weights / weights.sum(dim=-1, keepdim=True), total)
    return total


def gradient_rollout(
    model: nn.Module,
    pixel_values: torch.Tensor | Mapping[str, Any],
    target: Target = None,
) -> np.ndarray:
    """Return the relevance of each patch for a class, following attention through all layers.

    Each weight is multiplied by the gradient of the class score, negative products are dropped, heads are averaged,
    and the matrices of all layers are accumulated along all paths. A path has at least one attention: being pooled does
    not make a patch relevant. (In the paper only the class token is read, which is not a patch.)

    Args:
        model: A plain ViT; without a classifier, give a function as target.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        target: The class, or a function from one image's logits (of a model without classifier: its pooled features)
            to a number, such as a target of pytorch-grad-cam; or one for each image (default: the likeliest class).

    Returns:
        Nonnegative relevance of shape (B, h, w), without unit.

    Raises:
        AnalysisError: A class is out of range, the model has no classifier for it or computes without gradients,
            or its attention is differential or within windows.

    Source:
        Chefer et al. 2021b, equations 5 and 6.
    """
    model, pixel_values, layout = prepared(model, pixel_values)
    pixels = pixel_values.detach().clone().requires_grad_()  # for frozen models
    relevant = record_attentions(model, _relevance)
    hidden_states = record_outputs(encoder(model).layernorm)
    with torch.enable_grad():
        scores, _ = differentiable_scores(model, pixels, target)
        torch.autograd.grad(scores.sum(), pixels)
        read = readout(model, layout, hidden_states[0]).detach()
    if not all(branch for layer in relevant for branch in layer):
        kind = f"of the type {model.config.attention_type!r}"
        kind = kind if model.config.window_attention is None else "within windows"
        raise AnalysisError(
            f"gradient rollout uses the gradients of the attention weights, and attention {kind} is not computed from "
            "the weights that it returns: use grad_cam or integrated_gradients instead"
        )
    total = torch.zeros_like(relevant[0][0][0])  # the paper's matrix minus the identity
    for layer in relevant:
        mean = torch.stack([branch[0] for branch in layer]).mean(dim=0)
        total = total + mean + product(mean, total)
    return _patches_of(product(read, total), layout)


def _relevance(weights: torch.Tensor) -> list[torch.Tensor]:
    """Return a list that the backward pass fills, so that only one attention's gradients are in memory at a time."""
    found: list[torch.Tensor] = []
    values = weights.detach()
    if weights.requires_grad:  # otherwise the scores require none either, which is an error
        weights.register_hook(lambda gradient: found.append((gradient * values).float().clamp(min=0).mean(dim=1)))
    return found


def attention_distance(model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]) -> np.ndarray:
    """Return the mean attention distance of each head: from query patch to key patch, weighted by attention.

    Only patches are used as queries and keys; the weights are rescaled to sum to 1 over the patches. Distances are
    between the centres of two patches, in pixels of the input.

    Args:
        model: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.

    Returns:
        Mean distances of shape (B, layers, heads), in pixels; NaN for a head that pays no attention to the patches of
        an image. `average_over_images` averages them over a dataset.

    Raises:
        AnalysisError: Attention is signed, or the pixels do not fit the model.

    Source:
        Dosovitskiy et al. 2021, Figure 7 (right) and appendix D.7.
    """
    model, pixel_values, layout = prepared(model, pixel_values)
    _refuse_signed(model, "attention distance")
    distances = patch_distances(layout.grid_size, layout.patch_size).to(pixel_values.device)

    def keep(weights: torch.Tensor) -> torch.Tensor:
        weights = weights[:, :, layout.patches, layout.patches].float()
        return ((weights * distances).sum(dim=-1) / weights.sum(dim=-1)).nanmean(dim=-1)  # B heads

    attentions = record_attentions(model, keep)
    with torch.no_grad():
        model(pixel_values)
    return as_array(torch.stack([torch.cat(layer, dim=1) for layer in attentions], dim=1))


def patch_distances(grid_size: tuple[int, int], patch_size: tuple[int, int]) -> torch.Tensor:
    """Return the distances between the centres of all pairs of patches.

    Args:
        grid_size: Patch grid (down, across).
        patch_size: Patch (height, width) in pixels.

    Returns:
        Distances of shape (N, N), in pixels.
    """
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in grid_size), indexing="ij")
    centres = torch.stack((rows.flatten() * patch_size[0], columns.flatten() * patch_size[1]), dim=1)  # N 2
    return (centres[:, None] - centres).norm(dim=-1)


def probe_attention(model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]) -> np.ndarray:
    """Return the attention from the probe of attention pooling to each patch, in every head.

    Args:
        model: A plain ViT with `pooling="map"` or "query".
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.

    Returns:
        Attention weights of shape (B, heads, h, w).

    Raises:
        AnalysisError: The model has another pooling, or the pixels do not fit it.
    """
    model, pixel_values, layout = prepared(model, pixel_values)
    if model.config.pooling not in ("map", "query"):
        raise AnalysisError(
            f'the model has pooling {model.config.pooling!r}: only pooling "map" and "query" have a probe'
        )
    hidden_states = record_outputs(encoder(model).layernorm)
    with torch.no_grad():
        model(pixel_values)
        weights = probe_weights(model, layout, hidden_states[0])[..., layout.patches]
    return as_array(weights.unflatten(-1, layout.grid_size))


def _patches_of(shares: torch.Tensor, layout: TokenLayout) -> np.ndarray:
    """Return the patches of (B, 1, L) as an array (B, h, w)."""
    return as_array(shares[:, 0, layout.patches].unflatten(-1, layout.grid_size))


def _refuse_signed(model: PlainViTPreTrainedModel, what: str) -> None:
    if model.config.attention_type in SIGNED:
        raise AnalysisError(
            f"{what} uses attention as weights, and attention of the type {model.config.attention_type!r} has negative "
            "ones: use attention_maps instead"
        )
