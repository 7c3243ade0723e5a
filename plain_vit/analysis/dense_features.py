"""Patch features: their principal components, their similarity, and correspondences between images.

All functions except `patch_features` take arrays, so the features can come from any layer, model or file.

Legend: `B` images, `C` channels, `H W` pixels, `h w` patch grid, `D` hidden size, `M` matches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..errors import AnalysisError
from .inspection import as_array, chosen, encoder, patch_in_grid, prepared, record_outputs, whole_numbers

Foreground = Literal["center", "border", "all"]
EXTREMES = (0.01, 0.99)  # quantiles of a component that get the darkest and the brightest shade of its colour
CHUNK = 1024  # patches compared with all others at a time
RESOLUTION = float(np.finfo(np.float32).eps)  # smaller deviations, relative to the features, are rounding errors


def patch_features(
    model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any], layer: int | None = None
) -> np.ndarray:
    """Return the features of the patches after a layer, without class, distillation and register tokens.

    The model's final norm is applied to them, unless it follows the pooling (`final_norm="after_pooling"`).

    Args:
        model: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        layer: The layer, counted from 0 or, if negative, from the end (default: the last).

    Returns:
        Features of shape (B, h, w, D), in float32.

    Raises:
        AnalysisError: The model has no such layer, or the pixels do not fit it.
    """
    model, pixel_values, layout = prepared(model, pixel_values)
    vit = encoder(model)
    number = (
        None if layer is None else chosen("layer", whole_numbers("layer", layer, shape=()).item(), len(vit.layers))[0]
    )
    module = [vit.embeddings, *vit.layers][-1] if number is None else vit.layers[number]
    states = record_outputs(module)
    with torch.no_grad():
        vit(pixel_values)
        tokens = vit.layernorm(states[0])[:, layout.patches]
    return as_array(tokens.unflatten(1, layout.grid_size))


@dataclass(frozen=True)
class PatchComponents:
    """The principal components of the patches of one or more images, and what colours other images alike.

    All fields are arrays: `np.savez(path, **dataclasses.asdict(components))` saves them, and
    `PatchComponents(**np.load(path))` loads them.

    Args:
        values: Patches projected on the components, including the background, of shape (B, h, w, count).
        foreground: Which patches are foreground, of shape (B, h, w).
        explained_variance: Fraction of the variance of the fitted patches along each component, of shape (count,).
        mean: Mean of the patches that the components were fitted to, of shape (D,).
        directions: Direction of each component, of shape (D, count), in columns.
        side: Mean of all patches, and direction from there to the foreground (0 if all are), of shape (2, D).
        limits: Values of the components that are darkest and brightest in figures, of shape (2, count).
    """

    values: np.ndarray
    foreground: np.ndarray
    explained_variance: np.ndarray
    mean: np.ndarray
    directions: np.ndarray
    side: np.ndarray
    limits: np.ndarray

    def apply(self, features: np.ndarray) -> "PatchComponents":
        """Return the same components of other images, on any grid: equal patches get equal values and colours.

        Args:
            features: Features of shape (B, h, w, D), of the same layer of the same model.

        Raises:
            AnalysisError: The features have another shape or are not finite.
        """
        tokens = _checked(features, 4)
        if tokens.shape[-1] != len(self.mean):
            raise AnalysisError(
                f"the features have width {tokens.shape[-1]}, and the components were fitted to width "
                f"{len(self.mean)}: expected those of one layer of one model"
            )
        values = ((tokens - self.mean) @ self.directions).astype(np.float32)
        return replace(self, values=values, foreground=_on_side(tokens, self.side))


def patch_components(features: np.ndarray, count: int = 3, *, foreground: Foreground = "center") -> PatchComponents:
    """Return the principal components of patch features, fitted to all images together.

    The sign of the first component of all patches separates foreground from background; the components are then fitted
    to the foreground alone. The background is the side on which most of the image border lies, on average. Components
    that do not exist, for example the third component of three patches, are 0.

    Args:
        features: Features of shape (B, h, w, D), such as `patch_features` returns.
        count: Number of components.
        foreground: "center", the side that is rarer at the border; "border", the opposite side; or "all" patches.

    Returns:
        The components. The sign of each is chosen so that the entry of its direction with the largest magnitude is
        positive.

    Raises:
        AnalysisError: The features have another shape or are not finite, or an argument is out of range.

    Source:
        Oquab et al. 2023, section 7.5.
    """
    if count < 1:
        raise AnalysisError(f"count is {count}: expected 1 or more principal components")
    if foreground not in ("center", "border", "all"):
        raise AnalysisError(f'foreground is {foreground!r}: expected "center", "border" or "all"')
    tokens = _checked(features, 4)
    side = np.zeros((2, tokens.shape[-1]))
    if foreground != "all":
        mean, direction, _ = _principal(tokens.reshape(-1, tokens.shape[-1]), 1)
        first = (tokens - mean) @ direction[:, 0]
        at_border = np.ones(first.shape[1:], dtype=bool)
        at_border[1:-1, 1:-1] = False
        turned = not at_border.all() and first[:, at_border].mean() > 0
        side = np.stack([mean, direction[:, 0] * (-1 if turned != (foreground == "border") else 1)])
    inside = _on_side(tokens, side)
    mean, directions, shares = _principal(tokens[inside], count)
    values = ((tokens - mean) @ directions).astype(np.float32)
    return PatchComponents(
        values=values,
        foreground=inside,
        explained_variance=shares.astype(np.float32),
        mean=mean,
        directions=directions,
        side=side,
        limits=np.quantile(values[inside], EXTREMES, axis=0),
    )


def patch_similarity(features: np.ndarray, patch: tuple[int, int], image: int = 0) -> np.ndarray:
    """Return the cosine similarity between one patch and the patches of all images.

    Args:
        features: Features of shape (B, h, w, D), such as `patch_features` returns.
        patch: (row, column) of the patch, from 0.
        image: Number of its image, from 0.

    Returns:
        Cosines of shape (B, h, w), from -1 to 1; 0 where all features are 0.

    Raises:
        AnalysisError: There is no such image or patch, or the features have another shape or are not finite.
    """
    tokens = _unit(_checked(features, 4))
    count, h, w, _ = tokens.shape
    image = whole_numbers("image", image, shape=()).item()
    if not 0 <= image < count:
        raise AnalysisError(f"image {image} is out of range: there are {count}, numbered 0 to {count - 1}")
    row, column = patch_in_grid("patch", patch, (h, w))
    return (tokens @ tokens[image, row, column]).clip(-1, 1).astype(np.float32)


@dataclass(frozen=True)
class Correspondences:
    """Pairs of patches of two images, the most similar first.

    Args:
        first: (row, column) of the patches in the first image, of shape (M, 2).
        second: (row, column) of the patches in the second image, of shape (M, 2).
        similarity: Cosine similarity of each pair, of shape (M,).
        grid_sizes: Patch grid (down, across) of both images.
    """

    first: np.ndarray
    second: np.ndarray
    similarity: np.ndarray
    grid_sizes: tuple[tuple[int, int], tuple[int, int]]


def correspondences(first: np.ndarray, second: np.ndarray) -> Correspondences:
    """Return the patches of two images that are each other's nearest neighbours by cosine similarity.

    Ties go to the first patch in raster order.

    Args:
        first: Features of shape (h, w, D) of one image: `patch_features(...)[0]`.
        second: Features of the other image, on the same grid or another.

    Returns:
        The pairs; there is at least one.

    Raises:
        AnalysisError: The features have other shapes or are not finite.

    Source:
        Dekel et al. 2015 (best-buddies pairs), on the features of a ViT as in Amir et al. 2022, section 4.3.
    """
    grids = [_checked(features, 3) for features in (first, second)]
    if grids[0].shape[-1] != grids[1].shape[-1]:
        raise AnalysisError(
            f"the features of the two images have widths {grids[0].shape[-1]} and {grids[1].shape[-1]}: expected those "
            "of one layer of one model"
        )
    ours, theirs = (_unit(grid).reshape(-1, grid.shape[-1]) for grid in grids)
    nearest, similarity = np.zeros(len(ours), dtype=np.intp), np.zeros(len(ours))
    nearest_back, highest = np.zeros(len(theirs), dtype=np.intp), np.full(len(theirs), -np.inf)
    for start in range(0, len(ours), CHUNK):
        cosines = ours[start : start + CHUNK] @ theirs.T
        rows = slice(start, start + len(cosines))
        nearest[rows], similarity[rows] = cosines.argmax(axis=1), cosines.max(axis=1)
        higher = cosines.max(axis=0) > highest
        nearest_back[higher] = start + cosines.argmax(axis=0)[higher]
        highest[higher] = cosines.max(axis=0)[higher]
    mutual = np.flatnonzero(nearest_back[nearest] == np.arange(len(ours)))
    mutual = mutual[np.argsort(-similarity[mutual], kind="stable")]
    sizes = [(grid.shape[0], grid.shape[1]) for grid in grids]
    return Correspondences(
        first=np.stack(np.divmod(mutual, sizes[0][1]), axis=1),
        second=np.stack(np.divmod(nearest[mutual], sizes[1][1]), axis=1),
        similarity=similarity[mutual].clip(-1, 1).astype(np.float32),
        grid_sizes=(sizes[0], sizes[1]),
    )


def _checked(features: np.ndarray, ndim: int) -> np.ndarray:
    """Return features in float64: sums of squares overflow in float16."""
    features = np.asarray(features)
    shape = "(B, h, w, D)" if ndim == 4 else "(h, w, D)"
    if features.ndim != ndim or 0 in features.shape:
        raise AnalysisError(f"got features of shape {features.shape}: expected {shape}, none of them 0")
    if not np.isfinite(features).all():
        raise AnalysisError("the features are not finite: compute them in float32 or bfloat16")
    return features.astype(np.float64)


def _unit(tokens: np.ndarray) -> np.ndarray:
    """Return vectors scaled to norm 1; zero vectors are unchanged."""
    norms = np.linalg.norm(tokens, axis=-1, keepdims=True)
    return np.divide(tokens, norms, out=np.zeros_like(tokens), where=norms > 0)


def _on_side(tokens: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Return which patches lie on a side: all, if its direction is 0."""
    mean, direction = side
    return np.asarray((tokens - mean) @ direction >= 0)


def _principal(fitted: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean of patches (n, D), their principal directions (D, count), and the share of variance of each."""
    mean = fitted.mean(axis=0)
    centred = fitted - mean
    # The covariance matrix is smaller than the data: there are many more patches than features.
    variances, directions = np.linalg.eigh(centred.T @ centred / len(fitted))
    variances, directions = variances[::-1][:count], directions[:, ::-1][:, :count]
    rounding = RESOLUTION**2 * np.square(fitted).sum(axis=1).mean()
    real = variances > rounding
    total = np.square(centred).sum(axis=1).mean()
    farthest = directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])]
    missing = count - directions.shape[1]
    directions = np.pad(directions * np.sign(farthest) * real, ((0, 0), (0, missing)))
    return mean, directions, np.pad(variances * real / (total or 1.0), (0, missing))
