"""Image towers that consist of a timm model, read by the timm source, and a projection."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import ExportError, MappingError, UnknownFormatError
from ...tables.compare_modules import class_path, meta_device
from ...tables.engine import Row
from ...tables.format import DROP_HEAD, Description, Hints, Inference, StateDict
from ..timm.arguments import OPENED
from ..timm.constructors import constructor_named
from ..timm.source import TIMM
from .pixels import CHANNELS

TIMM_MODEL = "open_clip.timm_model.TimmModel"
TRUNK, HEAD, OWN_HEAD = "trunk.", "head.proj", "trunk.head"
PROJECTION = "vit.representation.0"
NO_PROJECTION = f"the head of open_clip's TimmModel is no projection ({DROP_HEAD}):"


def describe_live(module: Any) -> Description:
    """Read the configuration of a live TimmModel, which determines everything.

    Raises:
        ExportError: lists every part that plain-vit does not support.
    """
    if not TIMM.matches_module(module.trunk):
        raise ExportError(
            f"the image tower is timm's {class_path(module.trunk)}, which plain-vit does not open: it opens timm's "
            f"{OPENED}"
        )
    config = TIMM.describe_module(module.trunk, Hints()).config
    _check_head(module.head)
    return _with_projection(config, module.state_dict(), config.classifier_dropout_prob)


def _check_head(head: nn.Module) -> None:
    """Refuse a head with other parts than a dense layer and a dropout of rate 0."""
    parts = dict(head.named_children())
    faults = [f"head.{name} is a {class_path(part)}" for name, part in parts.items() if name not in ("drop", "proj")]
    if "proj" in parts and type(parts["proj"]) is not nn.Linear:
        faults.append(f"head.proj is a {class_path(parts['proj'])}")
    if getattr(parts.get("drop"), "p", 0.0):
        faults.append(f"{parts['drop']} before the projection: set its p to 0")
    if faults:
        raise ExportError(NO_PROJECTION, faults)


def describe_checkpoint(
    tensors: StateDict, settings: Mapping[str, Any] | None, hints: Hints, whence: str
) -> Description:
    """Read the configuration of a tower from its tensors.

    Args:
        tensors: Tensors of the tower.
        settings: The result of `vision_settings`; None if the settings are unknown.
        hints: The caller's hints.
        whence: The origin of the settings.

    Raises:
        PlainViTError: As from the timm source.
        MappingError: The head is not a projection.
    """
    if other := [name for name in tensors if not name.startswith((TRUNK, HEAD))]:
        raise MappingError(NO_PROJECTION, other)
    trunk = {name.removeprefix(TRUNK): tensor for name, tensor in tensors.items() if name.startswith(TRUNK)}
    described = {} if settings is None else _timm_settings(settings)
    if settings is not None:
        hints = replace(hints, architecture=None)
    found = TIMM.describe_checkpoint(trunk, described, hints)
    dropout = 0.0 if settings is None or settings["timm_proj"] != "linear" else settings["timm_drop"]
    description = _with_projection(found.config, tensors, dropout)
    inferences = [
        replace(one, source=one.source.replace("config.json", whence))
        for one in found.inferences
        if one.field != "id2label"  # timm guesses classes from their number, which here is a width
    ]
    if settings is not None:
        inferences = [one for one in inferences if one.field != "architecture"]
        inferences.append(Inference("architecture", settings["timm_model_name"], whence))
    return replace(description, inferences=inferences, stated_by=found.stated_by)


def config_of(settings: Mapping[str, Any]) -> PlainViTConfig:
    """Return our config of the tower that open_clip builds.

    Args:
        settings: The result of `vision_settings`.

    Raises:
        UnknownFormatError: plain-vit does not open the model of timm.
        ExportError: The head is not a projection, or our config cannot represent the model.
    """
    described, size = _timm_settings(settings), settings["embed_dim"]
    if settings["timm_proj"] == "mlp":
        raise ExportError(NO_PROJECTION, ["timm_proj='mlp'"])
    published = TIMM.settings_of(constructor_named(described["architecture"]).entrypoint(described["architecture"]))
    config = cast(PlainViTConfig, TIMM.config_of_settings({**published, **described, "num_classes": 0}))
    heads = {"linear": (HEAD, settings["timm_proj_bias"]), "none": None}
    place = heads.get(settings["timm_proj"], (OWN_HEAD, True))
    head = {} if place is None else {f"{place[0]}.{name}" for name in ("weight", "bias")[: 1 + place[1]]}
    return _with_projection(config, dict.fromkeys(head, torch.empty(size, device="meta"))).config


def _timm_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of timm's `config.json` for the model that open_clip builds."""
    name, pooling = settings["timm_model_name"], settings["timm_pool"]
    given: dict[str, Any] = {"global_pool": pooling} if pooling or not _has_projection(settings) else {}
    if settings["timm_drop_path"] is not None:
        given["drop_path_rate"] = settings["timm_drop_path"]
    if settings["patch_dropout"] > 0:
        given["patch_drop_rate"] = settings["patch_dropout"]
    # open_clip changes the pooling after the model is built, so the norms are those of the original pooling.
    try:
        constructor = constructor_named(name)
    except UnknownFormatError as error:
        raise UnknownFormatError(f"the image tower is a model of timm: {error}") from error
    if _has_projection(settings):
        given |= constructor.norms_of(constructor.architectures[constructor.entrypoint(name)])
    return {"architecture": name, "model_args": given}


def _has_projection(settings: Mapping[str, Any]) -> bool:
    return settings["timm_proj"] in ("linear", "mlp")


def _with_projection(config: PlainViTConfig, tensors: StateDict, dropout: float = 0.0) -> Description:
    """Return the description of a tower without classifier, with its projection as our representation layer."""
    faults = []
    own, after = f"{OWN_HEAD}.weight" in tensors, f"{HEAD}.weight" in tensors
    if own and after:
        faults.append("a classifier and a projection after it")
    if config.use_distillation_token:
        faults.append("a distillation token, whose classifier is a second projection")
    if config.representation_size:
        faults.append("a representation layer before the projection")
    if dropout:
        faults.append(f"a dropout of {dropout} before the projection: set it to 0")
    if faults:
        raise ExportError("plain-vit has no counterpart of parts of this image tower:", faults)
    config = copy.deepcopy(config)
    config.num_labels = 0
    if own or after:
        head = OWN_HEAD if own else HEAD
        config.representation_size = tensors[f"{head}.weight"].shape[0]
        config.representation_act, config.representation_bias = "linear", f"{head}.bias" in tensors
    return Description(config, layout="trunk head" if own else "trunk")


def rows(config: PlainViTConfig, own_head: bool) -> list[Row]:
    """Return the table of the tower's tensors.

    Args:
        config: Our configuration.
        own_head: Whether the projection is the classifier of timm's model.
    """
    kept = [row for row in TIMM.rows(without_projection(config), None) if row.ours not in (PROJECTION, "classifier")]
    trunk = [replace(row, source=f"{TRUNK}{row.source}") for row in kept]
    return [*trunk, Row(OWN_HEAD if own_head else HEAD, PROJECTION)]


def without_projection(config: PlainViTConfig) -> PlainViTConfig:
    """Return the config of the timm model inside the tower.

    Raises:
        ExportError: lists what the tower cannot represent: a layer other than a projection, a classifier, or images
            that are not RGB.
    """
    faults = [f"num_labels={config.num_labels} (there is no classifier)"] if config.num_labels else []
    if config.num_channels != CHANNELS:
        faults.append(f"num_channels={config.num_channels} (there it would be {CHANNELS})")
    if config.representation_size and config.representation_act != "linear":
        faults.append(f"representation_act={config.representation_act!r} (there it would be 'linear')")
    if faults:
        raise ExportError("open_clip's TimmModel cannot represent this model:", faults)
    inside = copy.deepcopy(config)
    inside.representation_size = None
    return inside


def build(config: PlainViTConfig, own_head: bool) -> Any:
    """Build open_clip's TimmModel of this config, with random weights.

    Raises:
        ExportError: lists every part of the model that it cannot represent.
    """
    from open_clip.timm_model import TimmModel

    inside, size, bias = without_projection(config), config.representation_size, config.representation_bias
    if own_head and not (size and bias):
        raise ExportError("the head of timm's model has a bias:", [f"representation_size={size}, bias={bias}"])
    with meta_device():  # any timm model, replaced below: the constructor takes only a name
        module = TimmModel("vit_tiny_patch16_224", embed_dim=size or 1, proj="linear", proj_bias=bias)
    module.trunk = TIMM.build_module(inside, None)
    module.image_size = config.image_shape
    module.head = nn.Sequential()
    if own_head:
        module.trunk.reset_classifier(size)
    elif size:
        projection = nn.Linear(config.pooled_size, size, bias=bias)
        module.head = nn.Sequential()
        module.head.add_module("drop", nn.Dropout(0.0))
        module.head.add_module("proj", projection)
    return module
