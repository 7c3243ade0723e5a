"""Precision: TF32 matrix products on GPUs, and blocks that compute with bfloat16 copies of their weights."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._pytree import tree_map

from ...errors import TrainingError


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Context that enables or disables TF32 (10 bits of mantissa) for float32 matrix products and convolutions on GPUs.

    Args:
        enabled: whether to use TF32, which is several times as fast; CPUs and 16-bit types are not affected.
    """
    # torch.compile reads these switches, which the newer `fp32_precision` does not set.
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = enabled
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks in a list that a model (or the model inside it) declares, from first to last.

    Raises:
        TrainingError: The model declares no blocks.
    """
    kinds = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for each in lists for block in each if type(block).__name__ in kinds]
    if not blocks:
        raise TrainingError(f"{type(model).__name__} does not declare its blocks: omit --param_dtype.")
    return blocks


def train_on_copies(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the blocks of a model compute with cast copies of their weights, made by one operation per block and pass.

    In training, everything inside a block has this dtype, including tokens, without autocast, as under FSDP2 with a
    `param_dtype` in its policy. The weights themselves, their gradients and evaluations are not affected.

    Args:
        model: a transformers model; the classes of its blocks are replaced.
        dtype: dtype of the copies.

    Raises:
        TrainingError: The model declares no blocks.
    """
    for block in blocks_of(model):
        kind = type(block)
        # The new class keeps the name, by which blocks are recognised.
        block.__class__ = type(kind.__name__, (_OnCopies, kind), {"copied_to": dtype, "__module__": kind.__module__})


class _OnCopies(nn.Module):
    """A block whose forward pass in training uses copies of its parameters."""

    copied_to: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        parameters = [module._parameters[name] for module, name in self._slots]
        copies = _Copies.apply(self.copied_to, *parameters)
        given = [self._cast(value) for value in args]
        named = {name: self._cast(value) for name, value in kwargs.items()}
        try:
            for (module, name), copy in zip(self._slots, copies, strict=True):
                module._parameters[name] = copy
            with torch.autocast(copies[0].device.type, enabled=False):
                return super().forward(*given, **named)
        finally:
            for (module, name), parameter in zip(self._slots, parameters, strict=True):
                module._parameters[name] = parameter

    @functools.cached_property
    def _slots(self) -> list[tuple[nn.Module, str]]:
        """Return the module and name of each parameter of the block, matrices first, to align them in memory."""
        slots = [
            (module, name, parameter.ndim)
            for module in self.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        return [(module, name) for module, name, _ in sorted(slots, key=lambda slot: -slot[2])]

    def _cast(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | torch.Tensor):  # the common case: no search for tensors inside
            return self._cast_tensor(value)
        return tree_map(self._cast_tensor, value)

    def _cast_tensor(self, value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.copied_to) if is_floating else value


class _Copies(torch.autograd.Function):
    """Cast several tensors at once, as views of one tensor; their gradients are cast at once too."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        copies = _cast_together(tensors, dtype)
        trained = ctx.needs_input_grad[1:]
        if not all(trained):
            ctx.mark_non_differentiable(*(copy for copy, needed in zip(copies, trained, strict=True) if not needed))
        ctx.dtype = tensors[0].dtype
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        casted = iter(_cast_together(given, ctx.dtype)) if given else iter(())
        return None, *(None if gradient is None else next(casted) for gradient in gradients)


def _cast_together(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the tensors in another dtype, as views of one tensor."""
    together = _flatten_dense_tensors(tensors).to(dtype)
    return tuple(_unflatten_dense_tensors(together, tensors))
