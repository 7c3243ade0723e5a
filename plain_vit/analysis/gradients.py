"""Which pixels and patches a class score depends on.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `L` tokens, `D` hidden size.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from plain_vit.analysis.inspection import (
    as_batch,
    attention_modules,
    classify,
    encoder,
    evaluating,
    plain,
    recorded_outputs,
    target_scores,
    token_layout,
)
from plain_vit.extras import needs


def grad_cam(
    model: nn.Module,
    pixel_values: torch.Tensor | Mapping[str, Any],
    target: int | Sequence[int] | None = None,
) -> np.ndarray:
    """Return how much each patch speaks for a class, by the features of the last layer that still mixes patches.

    Each feature is weighted by the mean gradient of the class score over all patches; negative sums are dropped.

    Args:
        model: A plain ViT with a classifier.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        target: The class, or one for each image; the highest score of each image if not given.

    Returns:
        Relevance of shape (B, h, w), 0 or more, without unit.

    Raises:
        AnalysisError: for a class out of range, a model without classifier or layers, pixels that do not fit.

    Source:
        Selvaraju et al. 2017, equations 1 and 2, with `grad_cam_layer` in the place of the last convolution.
    """
    model, pixel_values = plain(model), as_batch(model, pixel_values)
    layout = token_layout(model, pixel_values)
    layer = grad_cam_layer(model)
    pixels = pixel_values.detach().clone().requires_grad_()  # so that frozen models have gradients too
    with torch.enable_grad(), evaluating(model), recorded_outputs(layer) as outputs:
        _, scores = target_scores(classify(model, pixels), target)
        gradients = torch.autograd.grad(scores.sum(), outputs[0])[0].float()
    features, gradients = (states[:, layout.patches] for states in (outputs[0].detach().float(), gradients))  # B N D
    maps = (features * gradients.mean(dim=1, keepdim=True)).sum(dim=-1).clamp(min=0)
    return maps.unflatten(-1, layout.grid_size).cpu().numpy()


def grad_cam_layer(model: nn.Module) -> nn.Module:
    """Return the module whose output Grad-CAM reads: what enters the attention of the last block.

    Behind that attention a class token no longer depends on the patches, and their gradients are 0. In blocks whose
    norms stand elsewhere it is the block (or the embeddings) below the last.

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
    """Return a function that takes the patches out of tokens (B, L, D) and lays them out as (B, D, h, w).

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
    target: int | Sequence[int] | None = None,
    baseline: torch.Tensor | float = 0.0,
    steps: int = 50,
) -> np.ndarray:
    """Return how much each pixel adds to a class score, compared with a baseline image.

    Args:
        model: A plain ViT with a classifier.
        pixel_values: Normalised pixels of shape (B, C, H, W), or the output of an image processor.
        target: The class, or one for each image; the highest score of each image if not given.
        baseline: Normalised pixels to start from, of shape (1 or B, C, H, W), or one level for all; 0 is the mean
            colour of the normalisation.
        steps: Gradients to take between the baseline and the image.

    Returns:
        Contributions of shape (B, C, H, W), in units of the class score. With enough steps they add up to the score of
        the image less that of the baseline; a warning says where they do not.

    Raises:
        AnalysisError: for a class out of range, a model without classifier, and pixels that do not fit.
        MissingPackageError: captum is not installed.

    Source:
        Sundararajan et al. 2017, as computed by captum.
    """
    with needs("plain-vit[analysis]"):
        from captum.attr import IntegratedGradients
    model, pixel_values = plain(model), as_batch(model, pixel_values).float()
    token_layout(model, pixel_values)
    if isinstance(baseline, torch.Tensor):
        baseline = baseline.to(pixel_values).expand_as(pixel_values)
    with torch.enable_grad(), evaluating(model):
        targets, _ = target_scores(classify(model, pixel_values), target)
        attributions, gaps = IntegratedGradients(lambda pixels: classify(model, pixels)).attribute(
            pixel_values,
            baseline,
            targets,
            n_steps=steps,
            internal_batch_size=len(pixel_values),
            return_convergence_delta=True,
        )
    contributions = attributions.detach().cpu().float().numpy()
    for i, (total, gap) in enumerate(zip(contributions.sum(axis=(1, 2, 3)), gaps.tolist(), strict=True)):
        if abs(gap) > 0.1 * max(1.0, abs(total - gap)):
            warnings.warn(
                f"the contributions of image {i} add up to {total:.3g}, but its score is {total - gap:.3g} above "
                "that of the baseline: take more steps, or a baseline that is less unlike images",
                stacklevel=2,
            )
    return contributions
