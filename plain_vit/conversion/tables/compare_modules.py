"""Compare two live modules or two configs, to detect parts of a model that a conversion would lose."""

import copy
import enum
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ... import modeling_plain_vit as modeling
from ...configuration_plain_vit import PlainViTConfig
from ...positions_plain_vit import repeats_positions

# Attributes of every module, and attributes that packages set on modules but do not use in a forward pass.
BOOKKEEPING = {*vars(nn.Module()), "_is_hf_initialized", "_compiled_call_impl", "_is_torch_compile", "_fast_norm"}
# Containers that run their parts in order.
ORDERED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# Fields without a counterpart in other packages. They do not affect a trained model at its native size.
NEUTRAL_FIELDS = {
    "initialization", "initializer_range", "zero_init_classifier", "reconstruction_target", "image_mean", "image_std",
    "apply_layernorm", "reshape_hidden_states", "_out_features", "_out_indices", "position_resampling",
}  # fmt: skip
# Fields of the config that affect training alone.
RATES = {
    "hidden_dropout_prob", "embedding_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob",
    "drop_path_rate", "patch_dropout_prob",
}  # fmt: skip


MASKED = "PlainViTForMaskedImageModeling"

# Methods of tensors with which packages initialise parameters.
INITIALIZERS = {
    getattr(torch.Tensor, f"{name}_") for name in ("add", "clamp", "erfinv", "fill", "mul", "normal", "uniform", "zero")
}


class _WithoutValues(TorchFunctionMode):
    """Skip the initialisation of tensors on the meta device, where torch would trace each step in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in INITIALIZERS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def meta_device() -> Iterator[None]:
    """Build modules of any package on the meta device, without the time that initialisation takes."""
    with torch.device("meta"), no_init_weights(), _WithoutValues():
        yield


def empty_model(config: PlainViTConfig) -> PreTrainedModel:
    """Build our model for a config on the meta device.

    Args:
        config: The config. The model is a classifier, unless `architectures` names the masked-image model.
    """
    classes = modeling.PlainViTForImageClassification, modeling.PlainViTForMaskedImageModeling
    with meta_device():
        return classes[MASKED in (config.architectures or [])](copy.deepcopy(config))


def class_path(module: nn.Module) -> str:
    """Return the full path of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def class_name(module: nn.Module, classes: Mapping[str, str]) -> str:
    """Return the name that a module's class shares with its equivalents, or the path of the class.

    Args:
        module: The module. torch's GELU computes two functions: the tanh approximation is "...GELU(tanh)".
        classes: Paths of equivalent classes, with their shared name.
    """
    path = class_path(module)
    if type(module) is nn.GELU and module.approximate != "none":
        path += f"({module.approximate})"
    return classes.get(path, path)


def epsilon_of(norm: Any) -> float | None:
    """Return a norm's epsilon; for an RMSNorm with `eps=None`, the value that torch derives from the dtype."""
    if type(norm) is not nn.RMSNorm or norm.eps is not None:
        return getattr(norm, "eps", None)
    dtype = torch.float32 if norm.weight is None else norm.weight.dtype
    small = torch.linspace(1e-6, 1e-2, 8, dtype=dtype)
    chosen = nn.functional.rms_norm(small, small.shape)
    for candidate in (torch.float64, torch.float32, dtype):  # recent releases of torch compute float16 in float32
        eps = torch.finfo(candidate).eps
        if torch.equal(nn.functional.rms_norm(small, small.shape, eps=eps), chosen):
            return eps
    return None


def differences(
    module: nn.Module,
    other: nn.Module,
    classes: Mapping[str, str],
    silent: Collection[str],
    without: str | tuple[str, ...] = (),
) -> list[str]:
    """Return how two modules differ in the classes, settings, functions and shapes of their parts.

    The values of tensors are not compared.

    Args:
        module: The module described first in each line.
        other: The module to compare it with.
        classes: Paths of equivalent classes, with their shared name.
        silent: Attributes to ignore, because they do not affect the computation.
        without: Prefix or prefixes of the paths to skip.
    """
    ours, theirs = _description(module, classes, silent), _description(other, classes, silent)
    return [
        f"{name} is {ours.get(name, 'not there')}, not {theirs.get(name, 'there')}"
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if not name.startswith(without) and not _same(ours.get(name), theirs.get(name))
    ]


def _description(module: nn.Module, classes: Mapping[str, str], silent: Collection[str]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        place = f"{path}." if path else ""
        described[f"{place}class"] = class_name(part, classes)
        if isinstance(part, ORDERED):
            described[f"{place}parts"] = tuple(part._modules)
        for name, value in vars(part).items():
            if name not in BOOKKEEPING and name not in silent:
                described[place + name] = _comparable(value)
        if type(part) is nn.GELU:
            described.pop(f"{place}approximate", None)  # part of the class name
        if type(part) is nn.RMSNorm:
            described[f"{place}eps"] = epsilon_of(part)
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                described[place + name] = f"a tensor of shape {tuple(tensor.shape)}"
    return described


def _comparable(value: Any, depth: int = 4) -> Any:
    """Return an attribute in a form that compares equal for attributes with the same effect."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return tuple(_comparable(part, depth - 1) for part in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(str, value)))
    if isinstance(value, Mapping):
        return tuple((str(key), _comparable(part, depth - 1)) for key, part in value.items())
    if isinstance(value, functools.partial):
        bound = _comparable(value.args, depth - 1), _comparable(value.keywords, depth - 1)
        return f"{_comparable(value.func)} with {bound}"
    if isinstance(value, Callable) and hasattr(value, "__qualname__"):  # type: ignore[arg-type]
        return _function(value, depth)
    if isinstance(value, torch.dtype | torch.Size | enum.Enum):
        return str(value)
    if isinstance(value, torch.device):
        return "a device"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    settings = getattr(value, "__dict__", None)
    return kind if not settings or depth <= 0 else (kind, _comparable(settings, depth - 1))


def _function(function: Any, depth: int) -> Any:
    """Return a function's name, closure and defaults; functions of one name may differ in the other two."""
    name = f"{getattr(function, '__module__', None)}.{function.__qualname__}"
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held = _comparable((*cells, *(getattr(function, "__defaults__", None) or ())), depth - 1) if depth > 0 else ()
    return (name, held) if held else name


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-6)  # stochastic depth rates are computed in float32
    return value == other


def uneven_heads(config: PlainViTConfig) -> list[str]:
    """Return the fault of heads that do not add up to the width of the model; an empty list if they do."""
    heads, head_dim, width = config.num_attention_heads, config.head_dim or 0, config.hidden_size
    return [] if heads * head_dim == width else [f"{heads} heads of {config.head_dim} in a width of {width}"]


def lost_fields(config: PlainViTConfig, read_back: Callable[[], PlainViTConfig]) -> list[str]:
    """Return the fields of a config that a round trip through a target changes.

    Args:
        config: Our config.
        read_back: Returns the config as read back from the target. If the target cannot keep a field, the config may
            be invalid there: the message of its ValueError is returned.
    """
    try:
        again = read_back()
    except ValueError as error:
        return [str(error)]
    return [
        f"{name}={ours!r} (there it would be {theirs!r})"
        for name, ours, theirs in differing(meaning_of(config), meaning_of(again))
    ]


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each field that differs; keys of a group are named "group.key"."""
    for name, value in ours.items():
        if isinstance(value, dict) and isinstance(theirs[name], dict):
            yield from ((f"{name}.{key}", one, other) for key, one, other in differing(value, theirs[name]))
        elif value != theirs[name]:
            yield name, value, theirs[name]


def meaning_of(config: PlainViTConfig) -> dict[str, Any]:
    """Return the fields of a config by name, with defaults resolved and fields without effect set to None."""
    fields = {name: getattr(config, name) for name in PlainViTConfig.__annotations__ if name not in NEUTRAL_FIELDS}
    head_dim = config.head_dim or 0
    fields["num_labels"] = config.num_labels
    fields["position_resampling"] = "bucketed" if repeats_positions(config) else None  # others: at other sizes only
    if config.patch_projection != "shifted":
        fields["patch_projection"] = None  # the other two compute the same, from the same weights in another order
    fields["representation_act"] = config.representation_act if config.representation_size else None
    fields["representation_bias"] = config.representation_bias if config.representation_size else None
    attends = config.pooling in ("map", "query", "prr")
    fields["pooling_num_attention_heads"] = config.pooling_heads if attends else None
    fields["pooling_intermediate_size"] = config.pooling_width if config.pooling == "map" else None
    if config.position_embedding_type not in ("learned", "learned_2d", "factorized"):
        fields["position_resampling_to_square"] = False
    fields["pooling_num_layers"] = config.pooling_depth if config.pooling == "class_attention" else None
    fields["key_bias"] = config.qkv_bias and config.key_bias
    fields["register_tokens_last"] = config.register_tokens_last and config.num_register_tokens > 0
    if (bias := config.relative_position_bias) is not None:
        unused = {"resampling"} if bias["type"] == "mlp" else {"resampling", "mlp_size"}
        fields["relative_position_bias"] = {**bias, **dict.fromkeys(unused)}
    if fields["attention_scale"] is None:
        fields["attention_scale"] = (head_dim // 2 if config.attention_type == "differential" else head_dim) ** -0.5
    if fields["embedding_dropout_prob"] is None:
        fields["embedding_dropout_prob"] = config.hidden_dropout_prob
    return fields
