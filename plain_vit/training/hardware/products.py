"""Matrix products of dense layers in training on a CPU: by oneDNN where torch's are far slower.

Shapes: `M` rows, `I` inputs, `O` outputs of a dense layer.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ...layers_plain_vit import is_eager
from ...system.environment import has_slow_float32_products


def products(device: torch.device) -> AbstractContextManager[object]:
    """Return a context for training steps (forward and backward) with the fastest matrix products on this processor.

    Evaluate outside the context, where results equal the original library's bit for bit.

    Args:
        device: device of the model.
    """
    return onednn_products() if device.type == "cpu" and has_slow_float32_products() else nullcontext()


@contextmanager
def onednn_products() -> Iterator[None]:
    """Context in which float32 dense layers on a CPU multiply with oneDNN.

    It replaces `torch.nn.functional.linear`, and sums in a different order. (A `TorchFunctionMode` would not do: torch
    leaves it for the backward pass, which may recompute blocks.) Layers in other dtypes, under autocast, with shards or
    tensor subclasses as weights, compiled or transformed are not changed.
    """
    linear = F.linear

    def multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return (_multiply if _is_plain_float32(input, weight, bias) else linear)(input, weight, bias)

    F.linear = multiply
    try:
        yield
    finally:
        F.linear = linear


def _is_plain_float32(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    return (
        all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
        and all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)
        and all(tensor.layout == torch.strided and tensor.numel() > 0 for tensor in tensors)
        and weight.ndim == 2
        and input.ndim >= 2
        and not torch.is_autocast_enabled("cpu")
        and is_eager()
    )


def _multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _Dense.apply(input, weight, bias) if torch.is_grad_enabled() else _product(input, weight, bias)


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


class _Dense(torch.autograd.Function):
    """`torch.nn.functional.linear` by oneDNN; its gradients are such products too, so they can be differentiated."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        outputs, inputs = gradient.reshape(-1, len(weight)), input.reshape(-1, weight.shape[1])  # M O, M I
        return (
            _multiply(outputs, weight.t()).view(input.shape) if of_input else None,
            _gradient_of_weight(outputs, inputs) if of_weight else None,
            outputs.sum(0) if of_bias else None,
        )


def _gradient_of_weight(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the product O I of gradients and inputs, the narrower factor first, as oneDNN copies it transposed."""
    if outputs.shape[1] > inputs.shape[1]:
        return _multiply(inputs.t(), outputs.t()).t()
    return _multiply(outputs.t(), inputs.t())
