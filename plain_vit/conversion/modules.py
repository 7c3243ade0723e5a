"""Convert live modules in both directions: `from_module` and `to_module`."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import ExportError, PlainViTError, UnknownFormatError
from .dtypes import common_dtype, several_dtypes
from .export import naming_droppable_parts, our_tensors
from .heads import check_live_head, dropout_of, read_live_head
from .live_modules import check_unaltered, find_model
from .plan import fill_module, without_empty_head
from .registry import FORMATS, format_named
from .tables.compare_modules import class_path, empty_model
from .tables.engine import convert, sources_of, without_prefix
from .tables.format import HINTS, Format, Hints, check_hints, label_fields, name_labels
from .unseen import class_names


def from_module(module: nn.Module, *, format: str | None = None, **hints: Any) -> PreTrainedModel:
    """Convert a live ViT of another package to ours, with the same outputs.

    Wrappers (DDP, compiled and Lightning modules, MAE, DINO, extractors) are unwrapped.

    Args:
        module: The model or a wrapper of it. It is not changed.
        format: One of `FORMATS`, for a class outside its package, such as a copy of the package's source code.
        **hints: Fields of `Hints`, for settings that the live module does not determine.

    Returns:
        Our model, with the source's dtype, device and training mode; it shares no memory with the source. If the
        source has several dtypes, the model gets the dtype that holds all values exactly, and a warning is issued.
        Without a classifier it is a `PlainViTModel`.

    Raises:
        UnknownFormatError: The module contains no ViT of a known package.
        AmbiguousCheckpointError: The module contains several ViTs, or does not determine all settings.
        ExportError: The ViT has parts that plain-vit does not support.
    """
    if unknown := sorted(hints.keys() - set(HINTS)):
        raise TypeError(f"from_module has no hint {', '.join(map(repr, unknown))}: it has {', '.join(HINTS)}")
    known = Hints(**hints)
    if format is not None:
        format_named(format)
    found, source = find_model(module, FORMATS, format, known.key)
    head = read_live_head(found, source, known.drop)
    check_unaltered(head.module)
    wrapped, found = found, head.module
    with _explain_module_errors(found, source):
        check_live_head(found, source)
        description = source.describe_module(found, known)
        check_hints(known, description, type(found).__name__)
        _name_classes(description.config, module, wrapped)
        if known.id2label is not None:
            name_labels(description.config, known.id2label)
        dropouts = [description.config.classifier_dropout_prob, head.dropout]
        description.config.classifier_dropout_prob = dropout_of(dropouts)
        model = empty_model(description.config)
        tensors = without_prefix(found.state_dict(), description.prefix, description.ignored)
    rows = source.rows(description.config, description.layout)
    read = {name for names in sources_of(rows, model.state_dict()).values() for name in names}
    tensors |= _of_one_dtype({name: tensors[name] for name in tensors if name in read})
    state = convert(rows, tensors, model.state_dict(), description.config, description.ignored)
    model.load_state_dict(state, assign=True)
    trained = {name: None for name, parameter in found.named_parameters() if parameter.requires_grad}
    _freeze(model, sources_of(rows, state), set(without_prefix(trained, description.prefix, description.ignored)))
    return without_empty_head(model).train(found.training)


def to_module(
    model: PreTrainedModel, format: str, *, layout: str | None = None, drop: Collection[str] = ()
) -> nn.Module:
    """Convert our model to a live module of another package; every tensor is copied bit for bit.

    Args:
        model: A `PlainViTForImageClassification`, or a `PlainViTModel`.
        format: One of `FORMATS`; its package must be installed.
        layout: The layout of the format (default: that of the installed package).
        drop: Parts to drop if the target cannot represent them, as named in `DROPPABLE`.

    Returns:
        The module, with the model's dtype, device and training mode; it shares no memory with the model.

    Raises:
        ExportError: lists every part that the target cannot represent, and which of them can be dropped.
    """
    target, (config, tensors) = format_named(format), our_tensors(model, drop)
    with naming_droppable_parts(config):
        module = target.build_module(config, layout)
    fill_module(module, target, config, tensors, layout)
    made: dict[str, list[str]] = {}
    for ours, sources in sources_of(target.rows(config, layout), tensors).items():
        for source in sources:
            made.setdefault(source, []).append(ours)
    prefix = "vit." if isinstance(model, modeling.PlainViTModel) else ""
    trained = {prefix + name for name, parameter in model.named_parameters() if parameter.requires_grad}
    _freeze(module, made, trained)
    return module.train(model.training)


def _of_one_dtype(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in a common dtype that holds all values exactly; warn if they had several."""
    dtypes = [tensor.dtype for tensor in tensors.values()]
    if (note := several_dtypes(dtypes)) is None:
        return tensors
    warnings.warn(note, stacklevel=3)
    one = common_dtype(dtypes)
    return {name: tensor.to(one) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _name_classes(config: PlainViTConfig, module: nn.Module, found: nn.Module) -> None:
    """Copy the class names from transformers' wrapper around a model of another package that has none."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part is not found and any(each is found for each in part.modules()):
            names = class_names(part.config)
            if names and len(names) == config.num_labels and not class_names(config):
                vars(config).update(label_fields(names))


def _freeze(module: nn.Module, sources: Mapping[str, Sequence[str]], trained: Collection[str]) -> None:
    """Freeze exactly the parameters that are made from frozen parameters.

    Args:
        module: The converted module.
        sources: The original parameters that each of its parameters is made from.
        trained: The original parameters that are not frozen.

    Raises:
        ExportError: lists the parameters that are made from both trained and frozen ones.
    """
    mixed = []
    for name, parameter in module.named_parameters():
        if name in sources:
            given = [source in trained for source in sources[name]]
            parameter.requires_grad_(any(given))
            mixed += [f"{name} combines {', '.join(sources[name])}"] if len(set(given)) > 1 else []
    if mixed:
        raise ExportError("a parameter cannot be trained in part: freeze all of these, or none:", mixed)


@contextmanager
def _explain_module_errors(module: nn.Module, origin: Format) -> Iterator[None]:
    """Turn any error from reading a module as a model of a format into an error about the module."""
    try:
        yield
    except PlainViTError:
        raise
    except ValueError as error:  # of our configuration or model
        raise ExportError(f"plain-vit cannot be this {class_path(module)}:", [str(error)]) from error
    except (
        *(AttributeError, LookupError, StopIteration, TypeError, ArithmeticError, RuntimeError, AssertionError),
        StrictDataclassError,
    ) as error:
        raise UnknownFormatError(
            f"{class_path(module)} does not have the parts of a plain ViT of {origin.name} "
            f"({type(error).__name__}: {error}): pass the model as its package builds it, or give its format"
        ) from error
