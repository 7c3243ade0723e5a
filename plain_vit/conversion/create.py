"""Build configs, models and image processors by name."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import UnknownFormatError
from ..files.reading import download_settings
from ..image_processing_plain_vit import PlainViTImageProcessor
from ..positions_plain_vit import GridTables
from .catalogue import HUB, OURS, find
from .open import explain_errors, from_checkpoint
from .plan import without_empty_head
from .recognition import refuse_settings
from .registry import FORMATS, NAMED
from .sources.transformers.pixels import processor_from_transformers
from .tables.format import Format, Hints

# Names of fields in timm, for scripts that were written for its `create_model`.
OF_TIMM = {"num_classes": "num_labels", "img_size": "image_size", "in_chans": "num_channels"}


def create_model(name: str, pretrained: bool = False, num_labels: int | None = None, **fields: Any) -> PreTrainedModel:
    """Build a model by name, with the weights of its source or with random ones.

    Called with pixels, it returns transformers' output: `.logits` is the tensor that a model of timm returns.

    Args:
        name: As `list_models` lists them, with or without the prefix of the source: "timm:vit_base_patch16_224" or
            "vit_base_patch16_224.augreg_in21k"; a preset such as "vit-base-patch16-224"; or the id of a repository on
            the Hub. A name of timm without a tag has the weights of timm's default tag.
        pretrained: Download the weights, and convert them as `from_checkpoint` does. Otherwise they are drawn by our
            own `initialization`, and only of a repository on the Hub the config is downloaded.
        num_labels: Number of labels (default: those of the source); another number than the source's gets a new
            classifier, and 0 none.
        **fields: Fields of the config to change. With weights these may be `image_size`, for which positions are
            resampled, and fields on which no tensor depends, such as `drop_path_rate`. timm's `num_classes`, `img_size`
            and `in_chans` are understood, too.

    Returns:
        A `PlainViTForImageClassification`, or a `PlainViTModel` without labels; with weights in evaluation mode.

    Raises:
        CheckpointError: There is no such model (suggests similar names), or it has no weights.
        ValueError: A field is unknown or its value invalid, or the weights have other shapes with it.
        PlainViTError: As from `from_checkpoint`.
    """
    given = [*fields.items(), *([] if num_labels is None else [("num_labels", num_labels)])]
    fields = {OF_TIMM.get(field, field): value for field, value in given}
    if len(fields) < len(given):
        raise ValueError(f"{', '.join(field for field, _ in given)} name a field twice: give each once")
    if not pretrained:
        return _built(config_named(name, **fields))
    model = from_checkpoint(str(find(name))).model
    return changed(model, **fields).eval() if fields else model


def create_image_processor(name: str) -> Any:
    """Return the image processor of a model by name: with the preprocessing of its weights, if they are published.

    Args:
        name: As for `create_model`.
    """
    config, settings, preprocessor, origin = _described(name)
    if origin is not None:
        return origin.image_processor(config, settings, preprocessor, Hints())[0]
    if preprocessor:
        return processor_from_transformers(preprocessor, settings)
    height, width = config.image_shape
    return PlainViTImageProcessor(size={"height": height, "width": width})


def config_named(name: str, **fields: Any) -> PlainViTConfig:
    """Return the config of a model by name, with some fields changed; of a preset, a field may change the others.

    Args:
        name: As for `create_model`.
        **fields: Fields of the config.
    """
    named = find(name)
    if named.prefix == OURS:
        return PlainViTConfig.from_name(named.name, **fields)
    config = _described(name)[0]
    return _with_fields(config, fields) if fields else config


def changed(model: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    """Return a model with some fields of its config changed, and its weights.

    Positions are resampled to another `image_size`; a classifier for another number of labels is new.

    Raises:
        ValueError: The weights have other shapes with these fields.
    """
    config = _with_fields(cast(PlainViTConfig, model.config), fields)
    new = cast(Any, _built(config)).to(model.dtype)
    state = {**model.base_model.state_dict(), **resampled_tables(model.base_model, config)}
    try:
        new.base_model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"with {', '.join(fields)} the weights have other shapes: {error}") from error
    if config.num_labels == model.config.num_labels and new is not new.base_model:
        head = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("vit.")}
        new.load_state_dict(head, strict=False)
    return new


def resampled_tables(model: nn.Module, config: PlainViTConfig) -> dict[str, torch.Tensor]:
    """Return position embeddings resampled to the native grid of a config, by their names in the model."""
    return {
        f"{name}.{key}": table.detach()
        for name, module in model.named_modules()
        if isinstance(module, GridTables) and module.grid_size != config.grid_size
        for key, table in module.resampled(config).items()
    }


def _with_fields(config: PlainViTConfig, fields: Mapping[str, Any]) -> PlainViTConfig:
    """Return a copy of a config with some fields changed.

    The width of a head and the names of the labels follow, unless they are given.
    """
    saved = config.to_dict()
    if fields.get("num_labels", config.num_labels) != config.num_labels:
        saved = {name: value for name, value in saved.items() if name not in ("id2label", "label2id")}
    if (config.head_dim or 0) * config.num_attention_heads == config.hidden_size:
        del saved["head_dim"]
    return PlainViTConfig.from_dict(saved, **fields)


def _built(config: PlainViTConfig) -> PreTrainedModel:
    return without_empty_head(modeling.PlainViTForImageClassification(config))


def _described(name: str) -> tuple[PlainViTConfig, Mapping[str, Any], Mapping[str, Any], Format | None]:
    """Return the config of a model by name, what its `config.json` and preprocessor say, and the source they are of.

    Raises:
        UnknownFormatError: plain-vit does not open the model, or a repository does not describe it.
    """
    named = find(name)
    if named.prefix == OURS:
        return PlainViTConfig.from_name(named.name), {}, {}, None
    settings, preprocessor = dict[str, Any](), dict[str, Any]()
    if named.prefix == HUB:
        settings, preprocessor = download_settings(named.name)
    else:
        settings |= NAMED[named.prefix].settings_of(named.name)
    if settings.get("model_type") == OURS:
        fields = {key: value for key, value in settings.items() if key != "auto_map"}
        return PlainViTConfig.from_dict(fields), settings, preprocessor, None
    with explain_errors(named.name):
        for origin in FORMATS.values():
            if (config := origin.config_of_settings(settings)) is not None:
                return config, settings, preprocessor, origin
    refuse_settings(settings, FORMATS, named.name)
    raise UnknownFormatError(
        f"{named.name} has no config.json that describes a model of {', '.join(FORMATS)}: its weights may open, "
        f"from_checkpoint({named.name!r})"
    )
