"""Hooks of modules: a module without a user's hook may be replaced by an equivalent computation."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as registry
from torch.utils.module_tracker import ModuleTracker
from transformers.utils.output_capturing import capture_outputs


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has a hook, its own or a global one, or a `forward` that replaces its type's."""
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own) or "forward" in module.__dict__ or registry._has_any_global_hook()


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return all hooks, own and global, that see the inputs or outputs of a module, or their gradients.

    The hooks of torch's counters of operations are left out: they only note which module runs.
    """
    if not has_hooks(module):
        return []
    own = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    of_all = (
        *(registry._global_forward_pre_hooks, registry._global_forward_hooks),
        *(registry._global_backward_pre_hooks, registry._global_backward_hooks),
    )
    found = [hook for hooks in (*own, *of_all) if hooks for hook in hooks.values()]
    return [hook for hook in found if getattr(hook, "__module__", None) != ModuleTracker.__module__]


def has_user_hooks(module: nn.Module) -> bool:
    """Return whether a user's hook sees the inputs or outputs of a module; transformers' own hooks do not count."""
    return not all(map(is_recorder, hooks_of(module)))


def is_recorder(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of transformers, which record hidden states and attention weights."""
    return getattr(hook, "__module__", None) == capture_outputs.__module__
