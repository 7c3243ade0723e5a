"""Patch-embedding filters, position embeddings, and biases of relative positions.

Legend: `C` channels, `h w` patch grid, `N` patches, `P` tokens before the patches, `D` hidden size.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import AnalysisError
from ..modeling_plain_vit import PlainViTModel
from ..positions_plain_vit import Distances
from .inspection import as_array, encoder, observed, product, whole_numbers

BRIGHT = 1024.0  # a pixel value so large that rounding of the bias is negligible


@dataclass(frozen=True)
class PatchFilters:
    """The principal components of the patch-embedding filters.

    Args:
        components: Unit vectors of shape (count, C, patch height, patch width), in order of explained variance; the
            sign makes the entry with the largest magnitude positive.
        explained_variance: Fraction of the filters' variance along each component, of shape (count,).
    """

    components: np.ndarray
    explained_variance: np.ndarray


def patch_filters(model: nn.Module, count: int = 28) -> PatchFilters:
    """Return the first principal components of the patch-embedding filters.

    Args:
        model: A plain ViT.
        count: Number of components; fewer if a patch has fewer values, or the model fewer filters.

    Raises:
        AnalysisError: The count is below 1, all filters are equal, or the projection does not read just the pixels of a
            patch: it reads the features of a hybrid, or shifted patches as well.

    Source:
        Dosovitskiy et al. 2021, Figure 7 (left).
    """
    if count < 1:
        raise AnalysisError(f"count is {count}: expected 1 or more principal components")
    vit = encoder(observed(model))
    if vit.config.resnet_stem is not None:
        raise AnalysisError("the patch projection reads the features of a ResNet: it has no filters over pixels")
    if vit.config.patch_projection == "shifted":
        raise AnalysisError("the patch projection reads five images, moved by a pixel: it has no filters over one")
    weight = _filters(vit)
    filters = weight.flatten(1).numpy()
    if not np.ptp(filters, axis=0).any():
        raise AnalysisError("all filters of the patch projection are equal: they have no principal components")
    _, strengths, components = np.linalg.svd(filters - filters.mean(axis=0), full_matrices=False)
    farthest = components[np.arange(len(components)), np.abs(components).argmax(axis=1)]
    components = components * np.sign(farthest)[:, None]
    variance = strengths**2
    return PatchFilters(
        components=components[:count].reshape(-1, *weight.shape[1:]).astype(np.float32),
        explained_variance=(variance / variance.sum())[:count].astype(np.float32),
    )


def _filters(vit: PlainViTModel) -> torch.Tensor:
    """Return the filters of the patch projection, of shape (D, C, patch height, patch width), in float64."""
    projection: Any = vit.embeddings.patch_embeddings.projection
    (height, width), channels = vit.config.patch_shape, vit.config.num_channels
    is_dense = vit.config.patch_projection == "linear"
    shape = (height, width, channels) if is_dense else (channels, height, width)
    if type(projection) in (nn.Conv2d, nn.Linear):
        weight = projection.weight.detach()
        weight = weight if is_dense else weight.unflatten(1, (channels, -1)).sum(2)  # frames see the same pixels
    else:  # packed, quantised or with an adapter: measure its output for each pixel
        pixels = BRIGHT * torch.eye(math.prod(shape), dtype=vit.dtype, device=vit.device)
        pixels = pixels if is_dense else pixels.unflatten(1, shape).repeat_interleave(vit.config.num_frames, 1)
        with torch.no_grad():
            weight = (projection(pixels) - projection(torch.zeros_like(pixels[:1]))).flatten(1).T / BRIGHT
    weight = weight.cpu().double().reshape(-1, *shape)
    return weight.permute(0, 3, 1, 2) if is_dense else weight


@dataclass(frozen=True)
class PositionSimilarity:
    """Cosine similarity of position embeddings, from -1 to 1; 0 where an embedding is all zeros.

    Args:
        patches: Similarity of all pairs of patches, of shape (h, w, h, w).
        prefix: Similarity of each token before the patches with each patch, of shape (P, h, w); P is 0 if those tokens
            have no positions.
    """

    patches: np.ndarray
    prefix: np.ndarray


def position_similarity(model: nn.Module, grid_size: tuple[int, int] | None = None) -> PositionSimilarity:
    """Return the cosine similarity of the position embeddings.

    Args:
        model: A plain ViT.
        grid_size: Grid (down, across) to resample the positions to (default: the model's own).

    Raises:
        AnalysisError: The model has no position embeddings, or they cannot be resampled to this grid.

    Source:
        Dosovitskiy et al. 2021, Figure 7 (centre).
    """
    vit = encoder(observed(model))
    h, w = _grid(vit, grid_size)
    prefix, patches = _positions(vit, (h, w))
    prefix, patches = (torch.nn.functional.normalize(table, dim=1) for table in (prefix, patches))
    return PositionSimilarity(
        patches=as_array(product(patches, patches.T).reshape(h, w, h, w)),
        prefix=as_array(product(prefix, patches.T).reshape(-1, h, w)),
    )


def relative_position_biases(model: nn.Module, grid_size: tuple[int, int] | None = None) -> np.ndarray:
    """Return the relative position biases that are added to the attention scores.

    Args:
        model: A plain ViT.
        grid_size: Grid (down, across) whose relative positions are covered (default: the model's own).

    Returns:
        Biases of shape (layers or 1, heads, 2 h - 1, 2 w - 1), laid out around the querying patch, which is in the
        middle: keys below it in the image are below it here. The first axis is 1 if all blocks share one bias; in
        blocks with several attentions, there is one entry per attention.

    Raises:
        AnalysisError: The model has no relative position bias, or its bias depends on the query.

    Source:
        Bao et al. 2022; Liu et al. 2021, section 3.2.
    """
    vit = encoder(observed(model))
    config = vit.config
    h, w = _grid(vit, grid_size)
    if config.relative_position_bias is None:
        raise AnalysisError("the model adds no bias of relative positions (relative_position_bias=None)")
    if (kind := config.relative_position_bias["type"]) in ("query", "decomposed"):
        raise AnalysisError(
            f'each query has biases of its own (a relative_position_bias of type "{kind}"): look at the attention'
        )
    shape = 2 * h - 1, 2 * w - 1
    every = torch.arange(shape[0] * shape[1], device=vit.device).view(shape)
    modules: list[Any] = [vit, *(module for layer in vit.layers for module in layer.modules())]
    owners = [module for module in modules if isinstance(getattr(module, "relative_position_bias", None), nn.Module)]
    with torch.no_grad():
        biases = [owner.relative_position_bias(Distances((h, w), every)) for owner in owners]
    return as_array(torch.stack(biases).flip(-2, -1))  # the model counts from the key to the query


@dataclass(frozen=True)
class ResampledPositions:
    """Position embeddings of the patches on two grids.

    Args:
        before: Positions on the model's own grid, of shape (h, w, D).
        after: Positions on the other grid, of shape (new h, new w, D).
    """

    before: np.ndarray
    after: np.ndarray


def resampled_positions(model: nn.Module, image_size: tuple[int, int]) -> ResampledPositions:
    """Return the position embeddings before and after resampling to another image size.

    Args:
        model: A plain ViT.
        image_size: Image (height, width) in pixels.

    Raises:
        AnalysisError: The patch size does not divide the image size, the model has no position embeddings, or they
            cannot be resampled to this size.
    """
    vit = encoder(observed(model))
    height, width = whole_numbers("image_size", image_size, shape=(2,)).tolist()
    try:
        grids = vit.config.grid_size, vit.config.grid_of(height, width)
    except ValueError as error:
        raise AnalysisError(str(error)) from error
    return ResampledPositions(*(as_array(_positions(vit, grid)[1].unflatten(0, grid)) for grid in grids))


def _grid(vit: PlainViTModel, given: tuple[int, int] | None) -> tuple[int, int]:
    """Return the given grid (down, across), or the model's own if there is none."""
    if given is None:
        return vit.config.grid_size
    h, w = whole_numbers("grid_size", given, shape=(2,)).tolist()
    if min(h, w) < 1:
        raise AnalysisError(f"grid_size is {(h, w)}: expected 1 or more patches down and across")
    return h, w


def _positions(vit: PlainViTModel, grid_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the tokens before the patches, (P, D), and of the patches, (N, D), in float32."""
    positions = vit.embeddings.position_embeddings
    if positions is None:
        places = [name for name in ("rope_parameters", "relative_position_bias") if getattr(vit.config, name)]
        instead = f"; it has {' and '.join(places)}" if places else ""
        raise AnalysisError(f'the model adds no position embeddings to its tokens (type "none"){instead}')
    try:
        with torch.no_grad():
            table = positions(grid_size, torch.empty(0, device=vit.device)).float().cpu()
    except ValueError as error:
        raise AnalysisError(str(error)) from error
    first = len(table) - grid_size[0] * grid_size[1]
    return table[:first], table[first:]
