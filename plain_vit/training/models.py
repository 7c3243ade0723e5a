"""Models that runs start from, with a head for the classes at hand; teachers; low-rank additions."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..configuration_plain_vit import PRESET_NAME, PlainViTConfig
from ..conversion import from_checkpoint
from ..conversion.format import EXPECTED
from ..errors import TrainingError
from ..extras import needs
from ..image_processing_plain_vit import PlainViTImageProcessor
from ..modeling_plain_vit import PlainViTForImageClassification, PlainViTPositionEmbedding
from .data.augmentation import input_size, pixel_levels

# The layers that get low-rank additions by default (Hu et al. 2022, section 4.2), as their classes call them.
QUERY_AND_VALUE = {"q_proj", "v_proj", "query", "value", "q", "v"}


def checkpoint_hints(words: Sequence[str] | None) -> dict[str, Any]:
    """Read what a command line says of a checkpoint.

    Args:
        words: such as `["num_attention_heads=4", "image_size=32x24"]`.

    Returns:
        Arguments of `from_checkpoint`.

    Raises:
        TrainingError: A word is not of this form, or names no hint.
    """
    hints: dict[str, Any] = {}
    for word in words or []:
        name, _, text = word.partition("=")
        if name not in EXPECTED or not text:
            raise TrainingError(f"{word!r} is no hint: expected name=value, the name one of {', '.join(EXPECTED)}.")
        size = re.fullmatch(r"(\d+)x(\d+)", text)
        try:
            hints[name] = (int(size[1]), int(size[2])) if size else json.loads(text)
        except ValueError:  # a word, not a number
            hints[name] = text
    return hints


def load_classifier(
    source: str,
    label_names: list[str],
    *,
    from_scratch: bool = False,
    trust_remote_code: bool = False,
    hints: Mapping[str, Any] | None = None,
    image_size: tuple[int, int] | None = None,
    **changes: Any,
) -> tuple[PreTrainedModel, Any]:
    """Open any image classifier and give it a new head, whose first logits are all zero (paper, section 3.2).

    Args:
        source: a transformers folder or Hub id; a checkpoint of another library (see `from_checkpoint`); or, from
            scratch, a preset such as `vit-base-patch16-224`.
        label_names: the classes, in the order of their numbers.
        from_scratch: keep the architecture and the image processor, and draw all weights anew.
        trust_remote_code: run code that comes with the checkpoint.
        hints: what another library's checkpoint does not say, as arguments of `from_checkpoint`.
        image_size: (height, width) in pixels to train at, where it is not the model's own.
        **changes: fields of its config that training may change, such as `drop_path_rate`; None leaves one as it is.

    Returns:
        The model, in float32, and its image processor.

    Raises:
        TrainingError: The source is a preset but not trained from scratch, lacks weights besides those of a head, has
            no such field, or cannot take the size.
    """
    model, processor = _open(
        source,
        label_names,
        from_scratch=from_scratch,
        trust_remote_code=trust_remote_code,
        hints=hints or {},
    )
    config = copy.deepcopy(model.config)
    for field, value in changes.items():
        if value is not None and not hasattr(config, field):
            raise TrainingError(f"{type(config).__name__} has no field {field}: leave out the option.")
        if value is not None:
            setattr(config, field, value)
    if image_size is not None:
        processor = with_processed_size(processor, image_size)
        if hasattr(config, "image_size"):
            if not isinstance(config, PlainViTConfig):
                raise TrainingError(
                    f"The positions of {type(model).__name__} cannot be fitted to {image_size} pixels: make it a plain "
                    "ViT with `plain-vit convert` first."
                )
            config.image_size = image_size
    if config.to_dict() != model.config.to_dict():
        model = _rebuilt(model, config)
    return model, processor


def _rebuilt(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the same weights in a model of a changed config; positions are resampled where its grid changed."""
    try:
        config = type(config)(**config.to_dict())  # checked as a whole
        state = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, PlainViTPositionEmbedding):
                state[f"{name}.weight"] = module(config.grid_size, module.weight).detach()
    except ValueError as error:  # a size that the patches do not divide, positions that cannot be stretched
        raise TrainingError(str(error)) from error
    new = type(model)._from_config(config, dtype=torch.float32)
    new.load_state_dict(state)
    return new


def with_processed_size(processor: Any, image_size: tuple[int, int]) -> Any:
    """Return an image processor that makes images of another size and leaves out the same share of their borders.

    Args:
        processor: of transformers.
        image_size: (height, width), in pixels.

    Raises:
        TrainingError: The processor keeps the shape of images, and another shape is asked for.
    """
    height, width = image_size
    old_height, old_width = input_size(processor)
    values = processor.to_dict()
    size = {side: length for side, length in dict(processor.size).items() if length}
    if set(size) == {"height", "width"}:
        values["size"] = {"height": round(size["height"] * height / old_height),
                          "width": round(size["width"] * width / old_width)}  # fmt: skip
    elif height * old_width == width * old_height:
        values["size"] = {"shortest_edge": round(size["shortest_edge"] * height / old_height)}
    else:
        raise TrainingError(
            f"The image processor scales the shorter edge to {size['shortest_edge']}: give an image_size of the shape "
            f"{old_height} x {old_width}, or one number."
        )
    if getattr(processor, "do_center_crop", False):
        values["crop_size"] = {"height": height, "width": width}
    return type(processor)(**{name: value for name, value in values.items() if not name.endswith("_type")})


def _open(
    source: str,
    label_names: list[str],
    *,
    from_scratch: bool,
    trust_remote_code: bool,
    hints: Mapping[str, Any],
) -> tuple[PreTrainedModel, Any]:
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
    if from_scratch and not hints and is_transformers_checkpoint(source):
        stored = _with_labels(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code), label_names)
        model = AutoModelForImageClassification.from_config(
            stored, trust_remote_code=trust_remote_code, dtype=torch.float32
        )
        return model, AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    model, processor, missing = _stored(source, trust_remote_code=trust_remote_code, hints=hints)
    if processor is None:
        raise TrainingError(f"{source} does not say how its images were prepared: convert it first, with these said.")
    if missing == ["classifier"]:
        body, model = model, _fresh(PlainViTForImageClassification, model.config, label_names)
        model.get_submodule("vit").load_state_dict(body.state_dict())
    elif missing := sorted(set(missing) - head_of(model)):
        raise TrainingError(f"{source} lacks weights of its model: {', '.join(missing[:5])}.")
    if from_scratch:
        return _fresh(type(model), model.config, label_names), processor
    return with_new_head(model, label_names), processor


def _stored(
    source: str, *, trust_remote_code: bool, hints: Mapping[str, Any]
) -> tuple[PreTrainedModel, Any, list[str]]:
    """Open the model of a checkpoint in float32, its image processor or None, and the names of the weights it lacks."""
    if not is_transformers_checkpoint(source):
        converted = from_checkpoint(source, **hints)
        missing = [] if isinstance(converted.model, PlainViTForImageClassification) else ["classifier"]
        return converted.model, converted.image_processor, missing
    if hints:
        raise TrainingError(f"The config of {source} says what it is: leave out {', '.join(hints)}.")
    processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    model, loading = AutoModelForImageClassification.from_pretrained(
        source, trust_remote_code=trust_remote_code, dtype=torch.float32, output_loading_info=True
    )
    return model, processor, sorted(loading["missing_keys"])


def is_transformers_checkpoint(source: str) -> bool:
    """Return whether this is a transformers folder or Hub id, not a checkpoint of another library."""
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
    if getattr(config, "use_mask_token", False):
        config.use_mask_token = False  # only pre-training reads it, and processes would wait for its gradient
    return config


def with_lora(
    model: PreTrainedModel, *, rank: int, alpha: int, targets: Sequence[str] | None, head: set[str]
) -> nn.Module:
    """Freeze a classifier but for its head, and put trainable low-rank additions on some of its layers.

    Args:
        model: any transformers image classifier; it is changed.
        rank: of the additions.
        alpha: they are scaled by `alpha / rank`.
        targets: last parts of the names of the layers; the queries and values if not given.
        head: names of the tensors of the head, which is trained wholly.

    Raises:
        TrainingError: There are no such layers.
        MissingPackageError: peft is not installed.
    """
    with needs("plain-vit[train]"):
        from peft import LoraConfig, get_peft_model
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = list(targets or leaves & QUERY_AND_VALUE)
    missing = sorted(set(wanted) - leaves)
    if missing or not wanted:
        raise TrainingError(
            f"The model has no layers {', '.join(missing) or ' or '.join(sorted(QUERY_AND_VALUE))}: name some of "
            f"{', '.join(sorted(leaves))} with --lora_targets."
        )
    heads = sorted({name.rpartition(".")[0] for name in head})
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=wanted, modules_to_save=heads))


def as_saved(model: nn.Module) -> PreTrainedModel:
    """Return the classifier that is saved: with low-rank additions added into a copy of it, else the model itself."""
    if not hasattr(model, "merge_and_unload"):
        return cast(PreTrainedModel, model)
    return cast(Any, copy.deepcopy(model)).merge_and_unload()


def merged(model: nn.Module, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return the classifier that `as_saved` would, of one with low-rank additions that no process holds whole.

    Args:
        model: from `with_lora`, divided among processes since; only its structure is read.
        state: its whole weights, which are taken over.
    """
    with needs("plain-vit[train]"):
        from peft import get_peft_model
    base = cast(Any, model).get_base_model()
    with torch.device("meta"):
        whole: Any = get_peft_model(type(base)._from_config(base.config), cast(Any, model).peft_config["default"])
    whole.load_state_dict(state, assign=True)
    return whole.merge_and_unload()


def open_classifier(
    source: str, *, trust_remote_code: bool = False, hints: Mapping[str, Any] | None = None
) -> tuple[PreTrainedModel, Any]:
    """Open a classifier as it is, head and all.

    Args:
        source: a transformers folder or Hub id, or another library's checkpoint.
        trust_remote_code: run code that comes with the checkpoint.
        hints: what another library's checkpoint does not say, as arguments of `from_checkpoint`.

    Returns:
        The model, in float32, and its image processor.

    Raises:
        TrainingError: It has no head or no image processor, or says itself what the hints say.
    """
    model, processor, missing = _stored(source, trust_remote_code=trust_remote_code, hints=hints or {})
    if missing or processor is None:
        lacking = ", ".join(missing[:5]) or "an image processor"
        raise TrainingError(f"{source} lacks {lacking}: name a fine-tuned classifier.")
    return model, processor


class Teacher(nn.Module):
    """A classifier that answers for the pixels and the classes of another one.

    Args:
        model: any transformers image classifier; it is frozen.
        processor: its image processor.
        student_processor: the image processor whose pixels come.
        label_names: the classes of the answers, in their order.

    Raises:
        TrainingError: The teacher does not know one of the classes.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    order: torch.Tensor

    def __init__(self, model: PreTrainedModel, processor: Any, student_processor: Any, label_names: list[str]) -> None:
        super().__init__()
        numbers = {name: number for number, name in (model.config.id2label or {}).items()}
        unknown = [name for name in label_names if name not in numbers]
        if unknown:
            raise TrainingError(f"The teacher does not know the classes {', '.join(unknown[:5])}: name one that does.")
        self.model = model.eval().requires_grad_(False)
        self.size = input_size(processor)
        (mean, std), (own_mean, own_std) = pixel_levels(student_processor), pixel_levels(processor)
        # Ours to levels of 0 to 255, then to the teacher's.
        self.register_buffer("scale", (std / own_std).float()[:, None, None])
        self.register_buffer("shift", ((mean - own_mean) / own_std).float()[:, None, None])
        self.register_buffer("order", torch.tensor([numbers[name] for name in label_names]))

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits [B, classes] for the student's pixels [B, C, H, W]."""
        pixels = pixel_values * self.scale + self.shift
        if pixels.shape[-2:] != self.size:
            pixels = F.interpolate(pixels, self.size, mode="bilinear", antialias=True, align_corners=False)
        return self.model(pixel_values=pixels).logits.float()[:, self.order]


def load_teacher(source: str, student_processor: Any, label_names: list[str], *, trust_remote_code: bool) -> Teacher:
    """Open a classifier to learn from, head and all; see `Teacher`.

    Args:
        source: a transformers folder or Hub id, or another library's checkpoint that says everything.
        student_processor: the image processor whose pixels come.
        label_names: the classes of the answers, in their order.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        TrainingError: It has no head or no image processor, or does not know one of the classes.
    """
    model, processor = open_classifier(source, trust_remote_code=trust_remote_code)
    return Teacher(model, processor, student_processor, label_names)
