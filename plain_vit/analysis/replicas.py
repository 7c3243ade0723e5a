"""Replicas of models: new modules with the same tensors, which can have hooks while the model stays unchanged."""

import operator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

from torch import nn

from ..errors import AnalysisError

Module = TypeVar("Module", bound=nn.Module)
Twins = dict[int, Any]  # the replicas, by the identity of their modules
OF_THE_MODEL_ITSELF = ("_compiled_call_impl", "graphs")  # compiled code and CUDA graphs, which are not copied


def replica(model: Module) -> Module:
    """Return a copy of a model's modules that holds the same tensors, is in evaluation mode and is not compiled.

    The copy keeps the model's hooks, and hooks added to the copy do not affect the model: several threads may inspect
    one model, each through its own replica, while another thread trains it.

    Args:
        model: Any model; compiled modules are copied uncompiled.

    Raises:
        AnalysisError: The `forward` of a module was replaced by one that cannot be copied.
    """
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(eager(module), name)
    twins: Twins = {id(module): object.__new__(type(module)) for module in names}
    for module, name in names.items():
        twin = twins[id(module)]
        twin.__dict__ = {
            attribute: value.copy() if _is_registry(attribute, value) else _rebound(value, twins)
            for attribute, value in vars(module).items()
            if attribute not in OF_THE_MODEL_ITSELF
        }
        twin._modules = {part: twins.get(id(eager(child))) for part, child in module._modules.items()}
        twin.training = False
        _check_forward(module, twin, name)
    return cast(Module, twins[id(eager(model))])


def _is_registry(attribute: str, value: Any) -> bool:
    """Return whether an attribute of a module holds its hooks."""
    return "_hooks" in attribute and isinstance(value, dict)


def _check_forward(module: nn.Module, twin: nn.Module, name: str) -> None:
    """Refuse a replaced `forward` that may compute with the original module, and undo the compilation of a class's."""
    own = _before_compiling(vars(module).get("forward"))
    of_class = _before_compiling(type(module).forward)
    if own is None and of_class is not type(module).forward:
        twin.forward = MethodType(of_class, twin)
    elif own is not None and own is twin.forward:
        place = f"model.get_submodule({name!r})" if name else "model"
        raise AnalysisError(
            f"the forward of {name or 'the model'} ({type(module).__name__}) was replaced by {own!r}, which may "
            f"compute with other modules than those that are looked at: remove it, `del {place}.forward`, and put it "
            "back after the call, or use a hook instead"
        )


def eager(module: Any) -> Any:
    """Return the module inside a `torch.compile` wrapper, or the module itself."""
    while isinstance(module, nn.Module) and "_orig_mod" in module._modules:
        module = module._orig_mod
    return module


def _before_compiling(function: Any) -> Any:
    return getattr(function, "_torchdynamo_orig_callable", function) if isinstance(function, FunctionType) else function


def _rebound(value: Any, twins: Twins) -> Any:
    """Return an attribute with each module replaced by its twin, also in a method or in the arguments of a partial.

    A replaced `forward` is usually a method of its module, or a function with the module as an argument that is fixed.
    Values that hold no module are returned unchanged.
    """
    value = _before_compiling(value)
    if isinstance(value, nn.Module):
        return twins.get(id(eager(value)), value)
    if isinstance(value, MethodType):
        held = _rebound(value.__self__, twins)
        return value if held is value.__self__ else MethodType(value.__func__, held)
    if isinstance(value, partial):
        function, *fixed = (_rebound(part, twins) for part in (value.func, *value.args))
        named = {name: _rebound(part, twins) for name, part in value.keywords.items()}
        before, after = (value.func, *value.args, *value.keywords.values()), (function, *fixed, *named.values())
        return value if all(map(operator.is_, after, before)) else partial(function, *fixed, **named)
    return value
