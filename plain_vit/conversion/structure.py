"""What sets two live modules, or two configs, apart: so that no part of a model is lost on the way there or back."""

import copy
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig

# Fields that no other package has a word for, and that change no number of a trained model at its native size.
NEUTRAL_FIELDS = {
    "initialization", "initializer_range", "zero_init_classifier", "reconstruction_target", "pixel_mean", "pixel_std",
    "apply_layernorm", "reshape_hidden_states", "_out_features", "_out_indices", "position_resampling",
}  # fmt: skip


MASKED = "PlainViTForMaskedImageModeling"


def empty_model(config: PlainViTConfig) -> PreTrainedModel:
    """Build our model of a config on the meta device.

    Args:
        config: A masked-image model is told by its `architectures`; anything else is one that classifies.
    """
    classes = modeling.PlainViTForImageClassification, modeling.PlainViTForMaskedImageModeling
    with torch.device("meta"), no_init_weights():
        return classes[MASKED in (config.architectures or [])](copy.deepcopy(config))


def class_path(module: nn.Module) -> str:
    """Return where a module's class stands."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def differences(
    module: nn.Module, other: nn.Module, classes: Mapping[str, str], silent: Collection[str], without: str = " "
) -> list[str]:
    """Return what sets two modules apart: classes, settings and shapes of their parts; not the values of tensors.

    Args:
        module: The one that is described first in each line.
        other: The one it is held against.
        classes: Paths of classes that compute the same, with the name that they share.
        silent: Attributes that change no number.
        without: Parts whose path begins with this are left out.
    """
    ours, theirs = _description(module, classes, silent), _description(other, classes, silent)
    return [
        f"{name} is {ours.get(name, 'not there')}, not {theirs.get(name, 'there')}"
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if not name.startswith(without) and not _same(ours.get(name), theirs.get(name))
    ]


def _description(module: nn.Module, classes: Mapping[str, str], silent: Collection[str]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for path, part in module.named_modules():
        place = f"{path}." if path else ""
        described[f"{place}class"] = classes.get(class_path(part), class_path(part))
        for name, value in vars(part).items():
            plain = isinstance(value, bool | int | float | str | tuple | list) and not name.startswith("_")
            if plain and name not in silent and name != "training":
                described[place + name] = value
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                described[place + name] = f"a tensor of shape {tuple(tensor.shape)}"
    return described


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-6)  # stochastic depth is spread over the blocks in float32
    return value == other


def lost_fields(config: PlainViTConfig, again: PlainViTConfig) -> list[str]:
    """Return the fields in which a config differs from what a target's own description of it says.

    Args:
        config: Ours.
        again: What it is when it is read back from the target.
    """
    ours, theirs = _meaning(config), _meaning(again)
    return [
        f"{name}={ours[name]!r} (there it would be {theirs[name]!r})" for name in ours if ours[name] != theirs[name]
    ]


def _meaning(config: PlainViTConfig) -> dict[str, Any]:
    """Return the fields by name, those that stand for others filled in, those without effect emptied."""
    fields = {name: getattr(config, name) for name in PlainViTConfig.__annotations__ if name not in NEUTRAL_FIELDS}
    head_dim = config.head_dim or 0
    fields["num_labels"] = config.num_labels
    if config.patch_projection != "resnet":
        # The other two compute the same, from the same numbers in another order.
        fields["patch_projection"] = fields["stem_style"] = None
    fields["representation_act"] = config.representation_act if config.representation_size else None
    fields["representation_bias"] = config.representation_bias if config.representation_size else None
    fields["register_tokens_last"] = config.register_tokens_last and config.num_register_tokens > 0
    if fields["attention_scale"] is None:
        fields["attention_scale"] = (head_dim // 2 if config.attention_type == "differential" else head_dim) ** -0.5
    if fields["embedding_dropout_prob"] is None:
        fields["embedding_dropout_prob"] = config.hidden_dropout_prob
    return fields
