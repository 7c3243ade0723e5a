"""The model that a run starts from, with a head for the classes at hand."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from plain_vit.configuration_plain_vit import PRESET_NAME, PlainViTConfig
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import TrainingError
from plain_vit.image_processing_plain_vit import PlainViTImageProcessor
from plain_vit.modeling_plain_vit import PlainViTForImageClassification


def load_classifier(
    source: str,
    label_names: list[str],
    *,
    from_scratch: bool = False,
    trust_remote_code: bool = False,
    num_attention_heads: int | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Open any image classifier and give it a new head, whose first logits are all zero (paper, section 3.2).

    Args:
        source: a transformers folder or Hub id; a checkpoint of another library (see `from_checkpoint`); or, from
            scratch, a preset such as `vit-base-patch16-224`.
        label_names: the classes, in the order of their numbers.
        from_scratch: keep the architecture and the image processor, and draw all weights anew.
        trust_remote_code: run code that comes with the checkpoint.
        num_attention_heads: for another library's checkpoint that does not say.

    Returns:
        The model, in float32, and its image processor.

    Raises:
        TrainingError: The source is a preset but not trained from scratch, or lacks weights besides those of a head.
    """
    if PRESET_NAME.fullmatch(source):
        if not from_scratch:
            raise TrainingError(
                f"{source} names an architecture without weights: add --from_scratch, or name a checkpoint."
            )
        config = PlainViTConfig.from_name(source)
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        processor: Any = PlainViTImageProcessor(size={"height": height, "width": width})
        return _fresh(PlainViTForImageClassification, config, label_names), processor
    if not is_transformers_checkpoint(source):
        converted = from_checkpoint(source, num_attention_heads=num_attention_heads)
        model, processor = converted.model, converted.image_processor
        if processor is None:
            raise TrainingError(
                f"{source} does not say how its images were prepared: convert it first, with these said."
            )
        if not isinstance(model, PlainViTForImageClassification):
            body, model = model, _fresh(PlainViTForImageClassification, model.config, label_names)
            model.get_submodule("vit").load_state_dict(body.state_dict())
    else:
        if num_attention_heads is not None:
            raise TrainingError(f"The config of {source} says how many heads it has: leave out --num_attention_heads.")
        processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        if from_scratch:
            stored = _with_labels(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code), label_names)
            model = AutoModelForImageClassification.from_config(
                stored, trust_remote_code=trust_remote_code, dtype=torch.float32
            )
            return model, processor
        model, loading = AutoModelForImageClassification.from_pretrained(
            source, trust_remote_code=trust_remote_code, dtype=torch.float32, output_loading_info=True
        )
        missing = set(loading["missing_keys"]) - head_of(model)
        if missing:
            raise TrainingError(f"{source} lacks weights of its model: {', '.join(sorted(missing)[:5])}.")
    if from_scratch:
        return _fresh(type(model), model.config, label_names), processor
    return with_new_head(model, label_names), processor


def is_transformers_checkpoint(source: str) -> bool:
    """Tell a transformers folder or Hub id from a checkpoint of another library."""
    if Path(source).is_file():
        return False
    try:
        return "model_type" in PreTrainedConfig.get_config_dict(source)[0]
    except OSError:  # no config.json, here or on the Hub: `from_checkpoint` says what is wrong, if anything is
        return False


def with_new_head(model: PreTrainedModel, label_names: list[str]) -> PreTrainedModel:
    """Copy a classifier, but for its head, which starts at zero and has one logit per name.

    Args:
        model: any transformers image classifier.
        label_names: the classes, in the order of their numbers.
    """
    new = _fresh(type(model), model.config, label_names)
    head = head_of(model)
    new.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name not in head}, strict=False)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name in head:
                parameter.zero_()
    return new


def head_of(model: PreTrainedModel) -> set[str]:
    """Return the names of the tensors whose shape depends on the number of classes."""
    shapes = []
    for count in (2, 3):
        with torch.device("meta"):
            sized = _fresh(type(model), model.config, [str(number) for number in range(count)])
        shapes.append({name: tensor.shape for name, tensor in sized.state_dict().items()})
    return {name for name, shape in shapes[0].items() if shape != shapes[1][name]}


def _fresh(kind: type[PreTrainedModel], config: PreTrainedConfig, label_names: list[str]) -> PreTrainedModel:
    """Build a model with new weights, in float32 whatever its config says of those it was stored with."""
    return kind._from_config(_with_labels(config, label_names), dtype=torch.float32)


def _with_labels(config: PreTrainedConfig, label_names: list[str]) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: number for number, name in enumerate(label_names)}
    config.problem_type = "single_label_classification"
    return config
