"""Gradient-based attribution of class scores to pixels and patches.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `L` tokens, `D` hidden size.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ..errors import AnalysisError
from ..system.extras import needs
from .inspection import (
    Target,
    as_array,
    as_batch,
    attention_modules,
    differentiable_scores,
    encoder,
    observed,
    prepared,
    record_outputs,
    token_layout,
)


def grad_cam(
    model: nn.Module,
    pixel_values: torch.Tensor | Mapping[str, Any],
    target: Target = None,
) -> np.ndarray:
    """Return the relevance of each patch for a class, from the features of the last layer that mixes patches.

    Each feature is weighted by the mean gradient of the class score over all patches; negative sums are dropped.

    Args:
        model: A plain ViT; without a classifier, give a function as target.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        target: The class, or a function from one image's logits (of a model without classifier: its pooled features)
            to a number, such as a target of pytorch-grad-cam; or one for each image (default: the likeliest class).

    Returns:
        Nonnegative relevance of shape (B, h, w), without unit.

    Raises:
        AnalysisError: A class is out of range, the model has no classifier for it or no layers or computes without
            gradients, or the pixels do not fit.

    Source:
        Selvaraju et al. 2017, equations 1 and 2, with `grad_cam_layer` instead of the last convolution.
    """
    model, pixel_values, layout = prepared(model, pixel_values)
    outputs = record_outputs(grad_cam_layer(model))
    pixels = pixel_values.detach().clone().requires_grad_()  # for frozen models
    with torch.enable_grad():
        scores, _ = differentiable_scores(model, pixels, target)
        gradients = torch.autograd.grad(scores.sum(), outputs[0])[0].float()
    features, gradients = (states[:, layout.patches] for states in (outputs[0].detach().float(), gradients))  # B N D
    maps = (features * gradients.mean(dim=1, keepdim=True)).sum(dim=-1).clamp(min=0)
    return as_array(maps.unflatten(-1, layout.grid_size))


def grad_cam_layer(model: nn.Module) -> nn.Module:
    """Return the module whose output Grad-CAM uses: the norm before the attention of the last block.

    After that attention, the class token no longer depends on the patches, so their gradients are 0. If the norms of
    the block are elsewhere, the module is the block before the last one, or the embeddings.

    Args:
        model: A plain ViT.

    Raises:
        AnalysisError: The model has no layers.
    """
    attention_modules(model)
    vit = encoder(model)
    if vit.config.block_type in ("sequential", "parallel"):
        return cast(nn.Module, vit.layers[-1].layernorm_before)
    return vit.layers[-2] if len(vit.layers) > 1 else vit.embeddings


def tokens_to_grid(
    model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that reshapes the patches of tokens (B, L, D) to (B, D, h, w).

    This is the `reshape_transform` of pytorch-grad-cam.

    Args:
        model: A plain ViT.
        pixel_values: The images, of shape (B, C, H, W), or the output of an image processor.
    """
    layout = token_layout(model, as_batch(model, pixel_values))

    def to_grid(tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, layout.patches].transpose(1, 2).unflatten(-1, layout.grid_size)

    return to_grid


def integrated_gradients(
    model: nn.Module,
    pixel_values: torch.Tensor | Mapping[str, Any],
    target: Target = None,
    baseline: torch.Tensor | np.ndarray | float = 0.0,
    steps: int = 50,
) -> np.ndarray:
    """Return the contribution of each pixel to a class score, compared with a baseline image.

    Args:
        model: A plain ViT; without a classifier, give a function as target.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        target: The class, or a function from one image's logits (of a model without classifier: its pooled features)
            to a number, such as a target of pytorch-grad-cam; or one for each image (default: the likeliest class).
        baseline: Normalised pixels of the baseline, of shape (1 or B, C, H, W), or one value for all; 0 is the mean
            colour of the normalisation.
        steps: Number of gradients between the baseline and the image.

    Returns:
        Contributions of shape (B, C, H, W), in units of the class score. With enough steps they sum to the score of
        the image minus the score of the baseline; otherwise a warning is issued.

    Raises:
        AnalysisError: A class or the steps are out of range, the model has no classifier for it or computes without
            gradients, or the pixels or the baseline do not fit.
        MissingPackageError: captum is not installed.

    Source:
        Sundararajan et al. 2017, as computed by captum.
    """
    with needs("plain-vit[analysis]"):
        from captum.attr import IntegratedGradients
    model, pixel_values = observed(model), as_batch(model, pixel_values).float()
    token_layout(model, pixel_values)
    baseline = torch.as_tensor(baseline).to(pixel_values)
    if baseline.shape not in ((), (1, *pixel_values.shape[1:]), pixel_values.shape):
        raise AnalysisError(
            f"the baseline has shape {tuple(baseline.shape)}: expected that of the images, "
            f"{tuple(pixel_values.shape)}, or one image or value for all"
        )
    if steps < 1:
        raise AnalysisError(f"steps is {steps}: expected 1 or more")
    with torch.enable_grad():
        _, scores_of = differentiable_scores(model, pixel_values.detach().clone().requires_grad_(), target)
        attributions, gaps = IntegratedGradients(scores_of).attribute(
            pixel_values,
            baseline.expand_as(pixel_values),
            n_steps=int(steps),
            internal_batch_size=len(pixel_values),
            return_convergence_delta=True,
        )
    contributions = as_array(attributions)
    for i, (total, gap) in enumerate(zip(contributions.sum(axis=(1, 2, 3)), gaps.tolist(), strict=True)):
        if abs(gap) > 0.1 * max(1.0, abs(total - gap)):
            warnings.warn(
                f"the contributions of image {i} sum to {total:.3g}, but its score is {total - gap:.3g} above "
                "that of the baseline: use more steps, or a baseline more similar to images",
                stacklevel=2,
            )
    return contributions
