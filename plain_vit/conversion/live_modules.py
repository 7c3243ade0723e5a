"""Wrappers around a live model, and modifications of it: each is either supported or refused by name.

A supported wrapper returns the output of the model inside, or adds only parts that a loss uses. Any other wrapper may
compute something else and is refused by name. So are modifications whose effect cannot be determined, such as hooks.
"""

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import AmbiguousCheckpointError, CheckpointError, ExportError, UnknownFormatError
from .dtypes import DTYPES
from .tables.compare_modules import ORDERED, class_path
from .tables.format import Format

# Wrappers that return the output of the model inside, by the path of their class or a base class.
COMPILED = "torch._dynamo.eval_frame.OptimizedModule"
TRANSPARENT = {
    COMPILED,
    "accelerate.utils.operations.ConvertOutputsToFp32",
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "lightning.fabric.wrappers._FabricModule",
    "lightning_fabric.wrappers._FabricModule",
    "timm.utils.model_ema.ModelEmaV2",
    "timm.utils.model_ema.ModelEmaV3",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.optim.swa_utils.AveragedModel",
    "transformers.models.timm_wrapper.modeling_timm_wrapper.TimmWrapperForImageClassification",
    "transformers.models.timm_wrapper.modeling_timm_wrapper.TimmWrapperModel",
    "vit_pytorch.extractor.Extractor",
    "vit_pytorch.recorder.Recorder",
}
# Trainers of vit-pytorch: only the loss uses their other parts.
TRAINERS = {
    "vit_pytorch.dino.Dino", "vit_pytorch.dino.NetWrapper", "vit_pytorch.distill.DistillWrapper",
    "vit_pytorch.es_vit.EsViTTrainer", "vit_pytorch.es_vit.NetWrapper", "vit_pytorch.lejepa.LeJEPA",
    "vit_pytorch.lejepa.NetWrapper", "vit_pytorch.mae.MAE", "vit_pytorch.mpp.MPP", "vit_pytorch.simmim.SimMIM",
}  # fmt: skip
LIGHTNING = ("lightning", "pytorch_lightning")
# Parts of a training module that predictions do not use.
LOSSES = ("torch.nn.modules.loss.", "torchmetrics.", "timm.loss.", "vit_pytorch.mpp.MPPLoss")
# Hooks that only record values and return nothing.
NOTING = ("transformers.utils.output_capturing", "vit_pytorch.")
# Packages whose layers replace those of a model, and how to restore the originals.
REPLACED = {
    "peft": "merge the PEFT adapter first: model = model.merge_and_unload()",
    "loralib": "merge the LoRA weights first",
    "bitsandbytes": "quantised weights cannot be converted: load the model without quantization",
    "torchao": "quantised weights cannot be converted: load the model without quantization",
    "optimum": "quantised weights cannot be converted: load the model without quantization",
    "torch.ao": "quantised weights cannot be converted: pass the model before quantization",
    "transformer_engine": "pass the model before its layers were replaced",
}
# Names of attributes with a dropout rate, in torch and every package.
DROPS = re.compile(r"p|prob|.*drop.*")


def find_model(
    module: nn.Module, formats: Mapping[str, Format], format: str | None, key: str | None
) -> tuple[nn.Module, Format]:
    """Return the only model of a known package in a module, and its format.

    Args:
        module: The model or a wrapper of it.
        formats: All formats by name.
        format: The format given by the caller.
        key: The submodule given by the caller; modules around it are not checked.

    Raises:
        UnknownFormatError: There is no model of a known package.
        AmbiguousCheckpointError: There are several models.
        ExportError: The model was modified, or a wrapper computes something else.
    """
    if not isinstance(module, nn.Module):
        raise UnknownFormatError(_no_module(module))
    if key is not None:
        children = dict(module.named_modules(remove_duplicate=False))
        if key not in children:
            raise UnknownFormatError(f"the module has no child {key!r}: it has {', '.join(filter(None, children))}")
        module = children[key]
    found = dict(_models(module, formats.values()))
    if len(found) > 1:
        raise AmbiguousCheckpointError(
            f"{class_path(module)} contains several models; which one should be used?", {"key": list(found)}
        )
    if not found:
        if format is None or _package_of(module, formats) is not None:
            raise _unknown(module, formats)
        return module, formats[format]  # a copy of the package's class
    ((path, (model, origin)),) = found.items()
    if format is not None and formats[format] is not origin:
        raise UnknownFormatError(
            f"{class_path(model)} is a model of {origin.name}, and format={format!r} was given: omit format"
        )
    _check_surroundings(module, path, origin, formats)
    return model, origin


def _models(module: nn.Module, formats: Any) -> Iterator[tuple[str, tuple[nn.Module, Format]]]:
    """Yield the outermost submodules that are models of a format, with their paths."""
    found: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in found):
            continue
        origin = next((one for one in formats if one.matches_module(child)), None)
        if origin is not None:
            found.append(path)
            yield path, (child, origin)


def _no_module(thing: object) -> str:
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if isinstance(thing, str | bytes) or hasattr(thing, "__fspath__"):
        return f"{thing!r} is not a torch.nn.Module: open files, folders and Hub ids with from_checkpoint"
    if isinstance(thing, Mapping):
        return f"a {kind} is not a torch.nn.Module: save it and open it with from_checkpoint, or load it into its model"
    if inner := next((name for name in ("module", "model") if isinstance(getattr(thing, name, None), nn.Module)), None):
        return f"a {kind} is not a torch.nn.Module: pass its .{inner}"
    if isinstance(thing, type):
        return f"{thing.__qualname__} is a class: pass an instance of it"
    return f"a {kind} is not a torch.nn.Module: pass the model itself"


def _unknown(module: nn.Module, formats: Mapping[str, Format]) -> Exception:
    """Return the error for a module without a supported model, as specific as its classes allow."""
    if (known := _package_of(module, formats)) is not None:
        package, opens = known
        return ExportError(
            f"{class_path(module)} is a model that plain-vit does not open yet; of {package.split('.')[0]} it opens "
            f"{', '.join(opens)}"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return UnknownFormatError("a scripted or traced module does not show its parts: pass the original model")
    parts = ((path, part) for path, part in module.named_modules() if _package_of(part, formats) is not None)
    path, part = next(parts, ("", module))
    inside = f"; its {path} is a {class_path(part)}, which plain-vit does not open on its own" if path else ""
    return UnknownFormatError(
        f"{class_path(module)} contains no model of {', '.join(formats)}: for a class copied from one of them, give "
        f"format={inside}"
    )


def _package_of(module: nn.Module, formats: Mapping[str, Format]) -> tuple[str, Sequence[str]] | None:
    """Return the package of a module's class, and the package's classes that open; None if the package is unknown."""
    packages = (item for format in formats.values() for item in format.opens.items())
    return next((item for item in packages if _is_of(module, item[0])), None)


def _is_of(module: nn.Module, package: str) -> bool:
    return any(base.__module__ == package or base.__module__.startswith(f"{package}.") for base in type(module).__mro__)


# Modifications of a model


def check_unaltered(model: nn.Module) -> None:
    """Refuse a model with modifications whose effect on its outputs cannot be determined.

    Raises:
        ExportError: lists every modified part.
        CheckpointError: for unsupported dtypes or several devices.
    """
    faults = [
        f"{path or 'the model itself'}{fault}"
        for path, part in model.named_modules()
        for fault in (
            *(*_hooks(part), *_replaced_methods(part), *_replaced_layers(part), *_tensors(part)),
            *(*_hidden(part), *_other_mode(part, model.training)),
        )
    ]
    faults += _shared(model)
    if faults:
        raise ExportError(
            f"this {type(model).__name__} was modified, and plain-vit cannot determine what it computes now:", faults
        )
    _check_tensors(model)


def _hooks(part: nn.Module) -> list[str]:
    """Return the hooks that may change inputs or outputs."""
    kinds = {
        "_forward_pre_hooks": "a forward pre-hook", "_forward_hooks": "a forward hook",
        "_state_dict_hooks": "a hook on its state dict", "_state_dict_pre_hooks": "a hook on its state dict",
    }  # fmt: skip
    return [
        f" has {kind}, {_name_of(hook)}: remove it ({_removal_of(hook)})"
        for kinds_of, kind in kinds.items()
        for hook in getattr(part, kinds_of, {}).values()
        if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith(NOTING)
    ]


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _removal_of(hook: Any) -> str:
    """Return the code that removes a hook."""
    name = type(hook).__name__
    if type(hook).__module__ == "torch.nn.utils.prune":
        return "torch.nn.utils.prune.remove(module, name) makes the pruning permanent"
    if name in ("WeightNorm", "SpectralNorm"):
        return f"torch.nn.utils.remove_{'weight' if name == 'WeightNorm' else 'spectral'}_norm(module)"
    return "handle.remove(), or module._forward_hooks.clear() and module._forward_pre_hooks.clear()"


def _replaced_methods(part: nn.Module) -> list[str]:
    """Return the methods that were replaced on this instance."""
    if hasattr(part, "_hf_hook") or hasattr(part, "_original_forward"):
        return [
            " has a forward replaced by Accelerate: pass accelerator.unwrap_model(model, keep_fp32_wrapper=False), "
            "or call accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
        ]
    return [
        f" has a {name} that replaces that of its class: del module.{name} restores it"
        for name, value in vars(part).items()
        if callable(value) and isinstance(getattr(type(part), name, None), types.FunctionType)
    ]


def _replaced_layers(part: nn.Module) -> list[str]:
    """Describe the part if its class shows that it replaces another layer."""
    if hasattr(part, "parametrizations"):
        names = ", ".join(part.parametrizations)  # type: ignore[arg-type]
        remedy = "torch.nn.utils.parametrize.remove_parametrizations(module, name)"
        return [f" has a parametrization of its {names}: {remedy} makes it permanent"]
    for package, remedy in REPLACED.items():
        if type(part).__module__.startswith(f"{package}."):
            return [f" is a {class_path(part)}: {remedy}"]
    return []


def _tensors(part: nn.Module) -> list[str]:
    """Return the parameters that are not plain tensors: quantised, sharded, or not initialized yet."""
    plain = (torch.Tensor, nn.Parameter, nn.Buffer)
    tensors = {**part._parameters, **part._buffers}
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None and type(tensor) not in plain}
    return [
        f".{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, not a plain tensor: {_remedy(tensor)}"
        for name, tensor in named.items()
    ]


def _hidden(part: nn.Module) -> list[str]:
    """Return the tensors and submodules that are hidden by an attribute of the same name."""
    hidden = vars(part).keys() & {**part._parameters, **part._buffers, **part._modules}
    return [f" has an attribute that hides its {name}: del vars(module)[{name!r}]" for name in sorted(hidden)]


def _other_mode(part: nn.Module, training: bool) -> list[str]:
    """Describe the part if it is not in the model's mode (training or evaluation) and the mode affects its output."""
    if part.training == training or not any(map(_acts_in_training, part.modules())):
        return []
    named = {True: "training", False: "evaluation"}
    return [
        f" is in {named[part.training]} mode and the model in {named[training]} mode, and a converted model has one: "
        "call model.eval() or model.train() first"
    ]


def _acts_in_training(part: nn.Module) -> bool:
    """Return whether a module computes something else in training: it has dropout or batch normalisation."""
    rates = [value for name, value in vars(part).items() if DROPS.fullmatch(name) and isinstance(value, int | float)]
    return any(rate > 0 for rate in rates) or isinstance(part, nn.modules.batchnorm._NormBase)


def _remedy(tensor: torch.Tensor) -> str:
    if hasattr(tensor, "full_tensor"):
        return "gather the weights first (full_tensor(), or a full state dict) and load them into an unsharded model"
    if nn.parameter.is_lazy(tensor):
        return "run the model once to initialize it"
    return "pass the model before its weights were replaced"


def _shared(model: nn.Module) -> list[str]:
    """Return the parameters used in several places. Our model would train a separate copy of each."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return [
        f": {' and '.join(names)} are one parameter; make them separate (copy.deepcopy of the part that contains it)"
        for names in places.values()
        if len(names) > 1
    ]


def _check_tensors(model: nn.Module) -> None:
    """Refuse tensors that our model cannot store unchanged."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise CheckpointError(f"{class_path(model)} has no parameters: there is nothing to convert")
    by_device: dict[str, str] = {}
    for name, parameter in parameters.items():
        by_device.setdefault(str(parameter.device), name)
        if parameter.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise CheckpointError(f"{name} is of {parameter.dtype}: expected one of {known}; convert the module first")
    if len(by_device) > 1:
        raise CheckpointError(
            f"the module's parameters are on several devices ({_listed(by_device)}): move it to one with "
            "module.to(device) first, or load it onto a single device"
        )


def _listed(examples: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} as {name}" for kind, name in examples.items())


# Wrappers


def _check_surroundings(module: nn.Module, path: str, origin: Format, formats: Mapping[str, Format]) -> None:
    """Refuse wrappers that may compute more than the model at `path`.

    Raises:
        ExportError: names the wrapper and its parts, and how to pass only the model.
    """
    names = path.split(".") if path else []
    for depth in range(len(names)):
        place, inner = ".".join(names[:depth]), names[depth]
        around = module.get_submodule(place)
        # torch.compile's wrapper keeps the compiled function as its forward.
        faults = [*_hooks(around), *([] if _is_wrapper(around, {COMPILED}) else _replaced_methods(around))]
        if faults or not (_is_wrapper(around, TRANSPARENT | TRAINERS) or origin.contains_model(around)):
            faults += _other_parts(around, inner, ".".join(names[depth:]))
        if faults:
            prefix = "" if _package_of(around, formats) is None else " is a model that plain-vit does not open yet: it"
            raise ExportError(
                f"{class_path(around)}{prefix} computes more than the model in it, which the conversion would lose. "
                f"Pass the model itself (module.{path}), or give key={path!r}:",
                [f"{place or 'the module'} {fault.strip()}" for fault in faults],
            )


def _is_wrapper(module: nn.Module, known: set[str]) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" in known for base in type(module).__mro__)


def _other_parts(around: nn.Module, inner: str, path: str) -> list[str]:
    """Return the parts of an unknown wrapper beside the model, or else its own forward."""
    lightning = any(
        base.__name__ == "LightningModule" and base.__module__.startswith(LIGHTNING) for base in type(around).__mro__
    )
    silent = isinstance(around, ORDERED[1:]) or type(around).forward is nn.Module.forward
    others = [(name, part) for name, part in around.named_children() if name != inner and not _is_loss(part)]
    own = [f"{name} {tuple(tensor.shape)}" for name, tensor in (*around._parameters.items(), *around._buffers.items())
           if tensor is not None]  # fmt: skip
    faults = [f"contains {name} besides {path}" for name in own]
    for name, part in others:
        weights = [*part.parameters(), *part.buffers()]
        if weights or not (silent or type(part) is nn.Identity):
            held = f" with {len(weights)} tensors" if weights else ""
            faults.append(f"contains {name}, a {class_path(part)}{held}, besides {path}")
    passes_on = lightning or silent or type(around) is nn.Sequential
    return faults if faults or passes_on else [f"has its own forward, {_name_of(type(around).forward)}"]


def _is_loss(part: nn.Module) -> bool:
    return class_path(part).startswith(LOSSES)
