"""Classifiers that are not one dense layer: a dense layer is taken out of its container, others may be dropped.

A format names the modules of its classifier (`Format.heads`). The functions here run before the format reads a
checkpoint or a module, so that it always finds one dense layer or no classifier at all.
"""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ExportError, few
from ..files.tensors import LazyTensors
from .tables.compare_modules import class_path
from .tables.format import DROP_HEAD, HEAD, Format, Hints, Inference

LAYERS = ({"weight", "bias"}, {"kernel", "bias"})  # the tensors of a dense layer, in torch and in flax
# Encoders whose head is a projector that only the pre-training loss uses, by the last part of their key.
PROJECTORS = dict.fromkeys(("base_encoder", "momentum_encoder"), "MoCo's projector, which only its loss reads")


@dataclass(frozen=True)
class Heads:
    """The tensors of a checkpoint after its classifier was renamed or left out.

    Args:
        tensors: All tensors; the classifier has the names of the format, or is left out.
        dropped: The tensors that were left out, each with the reason.
        inferences: Assumptions about the classifier.
        fault: The error if the classifier is not supported; it is then left out of the tensors.
    """

    tensors: LazyTensors
    dropped: Mapping[str, str] = field(default_factory=dict)
    inferences: Sequence[Inference] = ()
    fault: CheckpointError | None = None


def read_heads(origin: Format, tensors: LazyTensors, hints: Hints, wrappers: Sequence[str]) -> Heads:
    """Give the classifier of a checkpoint the names of its format, or leave it out.

    Args:
        origin: The format of the checkpoint.
        tensors: Its tensors.
        hints: The caller's hints.
        wrappers: The keys under which the tensors are nested.

    Raises:
        CheckpointError: It has no classifier to drop.
    """
    meta = tensors.meta()
    if hints.drop:
        if not (places := origin.heads_in(meta)):
            raise CheckpointError(f"drop has {HEAD!r}, but the checkpoint has no classifier: omit it")
        return _without(tensors, places, "of the head, which drop= leaves out")
    renamed, inferences = dict(tensors.entries), []
    for place in origin.classifiers(meta):
        inside = [name for name in tensors if _is_in(name, place)]
        layers = {re.split("[./]", name)[-1] for name in inside}
        containers = {name.rpartition(".")[0] for name in inside}
        is_dense = layers in LAYERS and len(inside) == 2 and max(meta[name].ndim for name in inside) == 2
        if not is_dense or len(containers) > 1:
            key = wrappers[-1].rpartition(".")[2] if wrappers else ""
            left = _without(tensors, origin.heads_in(meta), PROJECTORS.get(key, ""))
            fault = None if key in PROJECTORS else _fault(place, {name: meta[name] for name in inside})
            return Heads(left.tensors, left.dropped, fault=fault)
        layer = containers.pop() or place
        if layer != place or layer.rpartition(".")[2].isdigit():
            source = f"{layer}, the only part of the head with tensors: another may be there that has none"
            inferences.append(Inference("head", "a dense layer", source))
        if layer != place:
            renamed = {_under(name, layer, place): entry for name, entry in renamed.items()}
    return Heads(LazyTensors(renamed), inferences=inferences)


def _under(name: str, layer: str, place: str) -> str:
    """Move the name of a tensor from a layer to the module around the layer; other names are kept."""
    return place + name.removeprefix(layer) if _is_in(name, layer) else name


def _is_in(name: str, place: str) -> bool:
    return name.startswith((f"{place}.", f"{place}/"))


def _without(tensors: LazyTensors, places: Sequence[str], reason: str) -> Heads:
    """Return the tensors without the classifier."""
    dropped = {name: reason for name in tensors if any(_is_in(name, place) for place in places)}
    return Heads(LazyTensors({name: tensors.entries[name] for name in tensors if name not in dropped}), dropped)


def _fault(place: str, inside: Mapping[str, torch.Tensor]) -> CheckpointError:
    held = few([f"{name!r} of shape {tuple(tensor.shape)}" for name, tensor in inside.items()], most=8)
    return CheckpointError(f"{place} is not one dense layer with a bias, it has the tensors {held}; {DROP_HEAD}")


@dataclass(frozen=True)
class LiveHead:
    """A live model after its classifier was unpacked or left out.

    Args:
        module: The model, or a copy that shares all parts with it except the classifier.
        dropout: Dropout rate before the dense layer in a container, in addition to the dropout that the format reads.
    """

    module: Any
    dropout: float = 0.0


def read_live_head(module: nn.Module, origin: Format, drop: Sequence[str] | None) -> LiveHead:
    """Take the dense layer of a live model's classifier out of its container, or leave the classifier out.

    Raises:
        ExportError: It has no classifier to drop.
    """
    state = module.state_dict()
    if drop:
        if not (places := origin.heads_in(state)):
            raise ExportError(f"drop has {HEAD!r}, but {class_path(module)} has no classifier: omit it")
        for place in places:
            module = _with_part(module, place, nn.Identity())
        return LiveHead(_counting(module, 0))
    dropout = 0.0
    for place in origin.classifiers(state):
        part = module.get_submodule(place)
        layer, rate = _dense_layer_in(part)
        if layer is None:
            continue
        if layer is not part:
            module, dropout = _with_part(module, place, layer), rate
        module = _counting(module, layer.out_features)
    return LiveHead(module, dropout)


def check_live_head(module: nn.Module, origin: Format) -> None:
    """Raise an error if a live model's classifier is not one dense layer.

    Raises:
        ExportError: names the parts of the classifier, and how to open only the encoder.
    """
    for place in origin.classifiers(module.state_dict()):
        part = module.get_submodule(place)
        if type(part) is not nn.Linear or part.bias is None:
            parts = [f"{place}{'.' if path else ''}{path} is a {class_path(one)}" for path, one in part.named_modules()]
            raise ExportError(f"{place} is not one dense layer with a bias; {DROP_HEAD}:", parts)


def _dense_layer_in(part: nn.Module) -> tuple[nn.Linear | None, float]:
    """Return the dense layer of a container with only dropout before it and nothing after it, and the dropout rate.

    The layer is None if the container is not of this form.
    """
    leaves = [one for one in part.modules() if type(one) not in (nn.Sequential, nn.Identity)]
    *before, last = leaves or [part]
    dropouts = [one for one in before if type(one) is nn.Dropout]
    if type(last) is not nn.Linear or last.bias is None or len(dropouts) < len(before):
        return None, 0.0
    return last, dropout_of([one.p for one in dropouts])


def dropout_of(rates: Sequence[float]) -> float:
    """Return the rate of one dropout that is equivalent to several in a row."""
    acting = [rate for rate in rates if rate]
    return acting[0] if len(acting) == 1 else 1 - math.prod(1 - rate for rate in acting)


def _with_part(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """Return a copy of a module with another part at a path; all other parts are shared."""
    name, _, rest = path.partition(".")
    changed = copy.copy(module)
    inner = _with_part(module.get_submodule(name), rest, part) if rest else part
    changed._modules = {**module._modules, name: inner}
    return changed


def _counting(module: nn.Module, classes: int) -> nn.Module:
    """Return the model with this `num_classes`, if it has such an attribute; no forward pass reads it."""
    if getattr(module, "num_classes", classes) == classes:
        return module
    changed: Any = copy.copy(module)
    changed.num_classes = classes
    return changed
