"""Changes of gradients between the backward pass and the step: adaptive clipping and sharpness-aware steps."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from ..system.extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator

SMALLEST_NORM = 1e-3  # lower bound of weight norms, so that weights initialised to zero are trained


def clip_adaptively(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Clip each unit's gradient to a multiple of the norm of its weights (AGC; Brock et al. 2021).

    Args:
        parameters: parameters with the units as first dimension; a one-dimensional parameter is one unit.
        factor: largest norm of a gradient, relative to the norm of the weights.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            most = _norms(parameter.detach()).clamp(min=SMALLEST_NORM) * factor
            norms = _norms(parameter.grad)
            parameter.grad.mul_(torch.where(norms < most, 1.0, most / norms.clamp(min=1e-6)))


def _norms(values: torch.Tensor) -> torch.Tensor:
    """Return the norm of each unit, shaped for broadcasting."""
    dims = tuple(range(1, values.ndim)) or None
    return torch.linalg.vector_norm(values, dim=dims, keepdim=True)


def repeat_uphill(
    model: nn.Module, closures: Sequence[Callable[[], torch.Tensor]], accelerator: Accelerator, radius: float
) -> None:
    """Replace the gradients by those at nearby weights where the loss is highest (SAM; Foret et al. 2021).

    Args:
        model: prepared model with the gradients of a whole step, over all processes; its weights are not changed.
        closures: one per micro-batch of the step; each recomputes its loss.
        accelerator: accelerator of the run.
        radius: distance of the nearby weights.
    """
    weights: list[torch.Tensor] = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        scale = radius / (nn.utils.get_total_norm(gradients) + 1e-12)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.add_(gradient * scale)
    for weight in weights:
        weight.grad = None
    for place, closure in enumerate(closures):
        is_last = place == len(closures) - 1
        with nullcontext() if is_last else accelerator.no_sync(model):
            accelerator.backward(closure())
    with torch.no_grad():
        for weight, kept in zip(weights, before, strict=True):
            weight.copy_(kept)
