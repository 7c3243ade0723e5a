"""Models to fine-tune, with a head for the given classes; teachers; LoRA adapters."""

import copy
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import PIL.Image
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
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from ..configuration_plain_vit import PRESET_NAME, PlainViTConfig
from ..conversion import from_checkpoint
from ..conversion.catalogue import HUB, named_by
from ..conversion.create import config_named, create_image_processor, resampled_tables
from ..conversion.registry import located
from ..conversion.tables.format import HINTS
from ..errors import CheckpointError, DataError, PlainViTError, TrainingError, few, listed
from ..files.other_files import is_exported
from ..image_processing_plain_vit import PlainViTImageProcessor, SourcePreprocessing
from ..modeling_plain_vit import PlainViTForImageClassification
from ..packed_plain_vit import tokens_of
from ..system.extras import needs
from .arguments import ProblemType
from .data.augmentation import input_size, pixel_levels
from .data.inputs import max_num_patches_of

# Layers that get LoRA adapters by default (Hu et al. 2022, section 4.2); names vary between model classes.
QUERY_AND_VALUE = {"q_proj", "v_proj", "query", "value", "q", "v"}
# Settings of an image processor that do not depend on the image size.
NORMALIZATION = (
    "resample", "image_mean", "image_std", "do_rescale", "rescale_factor", "do_normalize", "do_convert_rgb",
)  # fmt: skip
# Config fields about a model's origin, which do not change its outputs.
NOT_COMPUTED = ("_name_or_path", "architectures", "auto_map", "dtype", "plain_vit_version", "transformers_version")


def checkpoint_hints(words: Sequence[str] | None) -> dict[str, Any]:
    """Parse hints about a checkpoint from the command line.

    Args:
        words: hints such as `["num_attention_heads=4", "image_size=32x24"]`.

    Returns:
        Arguments of `from_checkpoint`.

    Raises:
        TrainingError: A word is not of the form `name=value` or names an unknown hint.
    """
    hints: dict[str, Any] = {}
    for word in words or []:
        name, _, text = word.partition("=")
        if name not in HINTS or not text:
            raise TrainingError(f"{word!r} is not a hint: expected name=value, the name one of {', '.join(HINTS)}.")
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
    problem_type: ProblemType = "single_label_classification",
    keep_head: bool = False,
    **changes: Any,
) -> tuple[PreTrainedModel, Any]:
    """Open any image classifier and give it a new head, initialised to zero (paper, section 3.2), or keep its own.

    Args:
        source: a transformers folder or Hub id; a checkpoint of another library (see `from_checkpoint`); or, from
            scratch, a preset such as `vit-base-patch16-224`.
        label_names: the classes, in the order of their numbers.
        from_scratch: initialise new weights; keep the architecture and the image processor.
        trust_remote_code: run code that comes with the checkpoint.
        hints: settings that another library's checkpoint lacks, as arguments of `from_checkpoint`.
        image_size: training size (height, width) in pixels (default: the model's own).
        problem_type: the `problem_type` of a transformers config.
        keep_head: keep the head, which must have exactly these classes, in any order.
        **changes: config fields to change for training, such as `drop_path_rate`; None leaves a field as it is.

    Returns:
        The model, in float32, and its image processor.

    Raises:
        TrainingError: The source is a preset without `from_scratch`, lacks weights other than the head's, has no such
            config field, does not support the size, or has no head for these classes to keep.
    """
    model, processor = _open(
        source,
        label_names,
        from_scratch=from_scratch,
        trust_remote_code=trust_remote_code,
        hints=hints or {},
        keep_head=keep_head,
    )
    model.config.problem_type = problem_type
    config, resized = copy.deepcopy(model.config), False
    redrawn = changes.get("initialization") is not None
    for field, value in changes.items():
        if value is not None and not hasattr(config, field):
            raise TrainingError(f"{type(config).__name__} has no field {field}: omit the option.")
        if value is not None:
            setattr(config, field, value)
    if image_size is not None:
        processor = with_processed_size(processor, image_size)
        if hasattr(config, "image_size"):
            if not isinstance(config, PlainViTConfig):
                raise TrainingError(
                    f"The positions of {type(model).__name__} cannot be resampled to {image_size} pixels: convert "
                    "it to a plain ViT with `plain-vit convert` first."
                )
            resized = config.image_shape != image_size
            if resized and not from_scratch:
                check_positions(config, "--image_size")
            config.image_size = image_size
    if config.to_dict() != model.config.to_dict():
        model = _rebuilt(model, config, fresh=from_scratch and (resized or redrawn))
    return model, processor


def check_positions(config: PlainViTConfig, option: str) -> None:
    """Refuse images of other sizes if the model does not resample its position embeddings for them.

    Args:
        config: config of the model.
        option: the option that changes the size, such as "--image_size".

    Raises:
        TrainingError: Patches would get the position embeddings of other patches.
    """
    if config.position_embedding_type == "learned" and config.position_resampling == "truncate":
        raise TrainingError(
            f"With {option}, patches would get the positions of other places, because the model uses the first rows of "
            'its position table for images of another size (position_resampling is "truncate", as in vit-pytorch): add '
            "--position_resampling bicubic_antialias."
        )


def one_size_error(kind: type, option: str) -> TrainingError:
    """Return the error for an option that needs images of several sizes, which a model class does not take."""
    return TrainingError(
        f"{kind.__name__} takes images of one size: omit {option}, or convert the model to a plain ViT with `plain-vit "
        "convert` first."
    )


def _rebuilt(model: PreTrainedModel, config: PreTrainedConfig, *, fresh: bool) -> PreTrainedModel:
    """Return a model with a changed config and the same or fresh weights; positions are resampled to its grid."""
    try:
        config = type(config)(**config.to_dict())  # validates all fields together
        if fresh:  # resampled from a smaller grid, new positions would be smooth instead of random
            return type(model)._from_config(config, dtype=torch.float32)
        state = model.state_dict()
        if isinstance(config, PlainViTConfig):
            state |= resampled_tables(model, config)
    except ValueError as error:  # the patch size does not divide the size, or positions cannot be resampled
        raise TrainingError(str(error)) from error
    new = type(model)._from_config(config, dtype=torch.float32)
    new.load_state_dict(state)
    return new


def with_processed_size(processor: Any, image_size: tuple[int, int]) -> Any:
    """Return an image processor for another image size, with the same crop fraction.

    Args:
        processor: image processor of transformers.
        image_size: (height, width), in pixels.

    Raises:
        TrainingError: The processor keeps the aspect ratio of images, and the new size has a different one.
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


def with_test_crop(processor: Any, fraction: float) -> Any:
    """Return an image processor that keeps the aspect ratio and crops the centre of images.

    Args:
        processor: image processor of transformers; its size is kept.
        fraction: side of the crop divided by the shorter edge of the resized image, above 0 and at most 1.

    Raises:
        TrainingError: The processor cannot crop.
    """
    height, width = input_size(processor)
    values = {name: value for name, value in processor.to_dict().items() if not name.endswith("_type")}
    values |= {"do_resize": True, "do_center_crop": True, "crop_size": {"height": height, "width": width}}
    if height == width:
        values |= {"size": {"shortest_edge": int(height / fraction)}}
    else:
        values |= {"size": {"height": int(height / fraction), "width": int(width / fraction)}}
    if isinstance(processor, SourcePreprocessing):
        values |= {"resize_mode": None if height == width else "cover"}
    cropping = type(processor)(**values)
    image = PIL.Image.new("RGB", (3 * width, 5 * height))
    seen = cropping(image, return_tensors="pt")["pixel_values"].shape[-2:]
    if tuple(seen) != (height, width) or getattr(processor, "crop_pct", None):  # ConvNeXt's processor crops by itself
        raise TrainingError(f"{type(processor).__name__} cannot crop to {height} x {width}: omit --test_crop.")
    return cropping


def with_test_size(processor: Any, model: nn.Module, image_size: tuple[int, int]) -> Any:
    """Return the image processor for evaluating a model at another image size than it is trained at.

    Args:
        processor: image processor for training.
        model: the model, with its config.
        image_size: (height, width) of the evaluated images, in pixels.

    Raises:
        TrainingError: The model does not take images of this size, or would not resample its positions.
    """
    config: Any = model.config
    if isinstance(config, PlainViTConfig):
        if config.image_shape != image_size:
            check_positions(config, "--test_size")
        try:
            type(config)(**{**config.to_dict(), "image_size": image_size})
        except ValueError as error:
            raise TrainingError(f"The model cannot be evaluated at --test_size: {error}") from error
    elif hasattr(config, "image_size"):
        raise one_size_error(type(config), "--test_size")
    return with_processed_size(processor, image_size)


def with_native_aspect_ratio(processor: Any, model: nn.Module, max_num_patches: int | None) -> PlainViTImageProcessor:
    """Return an image processor that keeps the aspect ratio of images and returns patches.

    Args:
        processor: image processor of transformers; its normalisation and its filter are kept.
        model: the model, with its config.
        max_num_patches: most patches per image (default: the processor's limit, else the model's native grid).

    Raises:
        TrainingError: The model does not take images of many sizes, or not with so many patches.
    """
    config: Any = model.config
    if not isinstance(config, PlainViTConfig):
        raise one_size_error(type(model), "--native_aspect_ratio")
    check_positions(config, "--native_aspect_ratio")
    (height, width), (rows, columns) = config.patch_shape, config.grid_size
    most = max_num_patches or max_num_patches_of(processor) or rows * columns
    reasons = {
        f"its patches have {height} x {width} pixels, which is not square": height != width,
        "it drops patches in training (patch_dropout_prob)": config.patch_dropout_prob > 0,
        **dict.fromkeys(filter(None, [_refusal_of_patches(model, most)]), True),
    }
    for reason in (reason for reason, applies in reasons.items() if applies):
        raise TrainingError(f"The model cannot be trained with --native_aspect_ratio: {reason}.")
    kept = {name: getattr(processor, name) for name in NORMALIZATION if getattr(processor, name, None) is not None}
    return PlainViTImageProcessor(**kept, patch_size=height, max_num_patches=most)


def _refusal_of_patches(model: Any, count: int) -> str:
    """Return the reason why a plain ViT cannot take images of any shape with this many patches, or ""."""
    config = model.config
    patches = torch.zeros(count, math.prod(config.patch_shape) * config.num_channels)
    try:
        for grid in ((1, count), (count, 1)):
            tokens = tokens_of(config, patches, spatial_shapes=torch.tensor([grid]))
            model.base_model.embeddings(patches, None, tokens)
    except ValueError as error:
        return str(error)
    return ""


def open_preset(name: str) -> tuple[PlainViTConfig, Any]:
    """Return the config and the image processor of a model by name, such as `vit-base-patch16-224`."""
    return config_named(name), create_image_processor(name)


def has_known_config(source: str) -> bool:
    """Return whether a source is the name of a model whose config is known without its weights."""
    named = named_by(source)
    return named is not None and named.prefix != HUB


def _open(
    source: str,
    label_names: list[str],
    *,
    from_scratch: bool,
    trust_remote_code: bool,
    hints: Mapping[str, Any],
    keep_head: bool,
) -> tuple[PreTrainedModel, Any]:
    if PRESET_NAME.fullmatch(source) and not from_scratch:
        raise TrainingError(
            f"{source} names an architecture without weights: add --from_scratch, or give a checkpoint."
        )
    if from_scratch and not hints and has_known_config(source):
        config, processor = open_preset(source)
        return _fresh(PlainViTForImageClassification, config, label_names), processor
    source = str(located(source)[0]) if from_scratch else source
    if from_scratch and not hints and _is_classifier(_model_type(source), trust_remote_code):
        with _explained(source):
            stored = _with_labels(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code), label_names)
            model = AutoModelForImageClassification.from_config(
                stored, trust_remote_code=trust_remote_code, dtype=torch.float32
            )
            return model, AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    model, processor, missing = _stored(source, trust_remote_code=trust_remote_code, hints=hints)
    if processor is None:
        raise TrainingError(f"{source} has no image processor: convert it first, with its mean and standard deviation.")
    if keep_head and missing:
        raise TrainingError(f"{source} has no head to keep: omit --keep_head.")
    if missing == ["classifier"]:
        body, model = model, _fresh(PlainViTForImageClassification, model.config, label_names)
        tensors = body.base_model.state_dict()
        tensors.pop("embeddings.mask_token", None)  # `_fresh` leaves it out
        model.get_submodule("vit").load_state_dict(tensors)
    elif missing := sorted(set(missing) - head_of(model)):
        raise TrainingError(f"{source} lacks weights of its model: {few(missing)}.")
    if from_scratch:
        return _fresh(type(model), model.config, label_names), processor
    return (with_own_head if keep_head else with_new_head)(model, label_names), processor


def _stored(
    source: str, *, trust_remote_code: bool, hints: Mapping[str, Any]
) -> tuple[PreTrainedModel, Any, list[str]]:
    """Return the model of a checkpoint in float32, its image processor or None, and the names of missing weights."""
    place, _ = located(source)
    kind = _model_type(str(place))
    if hints and kind is not None:
        raise TrainingError(f"The config of {source} is complete: omit {', '.join(hints)}.")
    is_ours = kind == PlainViTConfig.model_type and not trust_remote_code
    if is_ours or not _is_classifier(kind, trust_remote_code):
        converted = from_checkpoint(source, **hints)
        missing = [] if isinstance(converted.model, PlainViTForImageClassification) else ["classifier"]
        return converted.model.float(), converted.image_processor, missing
    with _explained(source):
        processor = AutoImageProcessor.from_pretrained(place, trust_remote_code=trust_remote_code)
        model, loading = AutoModelForImageClassification.from_pretrained(
            place, trust_remote_code=trust_remote_code, dtype=torch.float32, output_loading_info=True
        )
    missing = sorted(loading["missing_keys"])
    read = {name: tensor for name, tensor in model.state_dict().items() if name not in missing}
    if spoilt := [name for name, tensor in read.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"{source} holds NaN or infinity in {few(spoilt)}: give a checkpoint of finite numbers.")
    return model, processor, missing


def _is_classifier(kind: str | None, trust_remote_code: bool) -> bool:
    """Return whether transformers has an image classifier of a model type; of others, the encoder may open."""
    known = (*MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, PlainViTConfig.model_type)
    return kind is not None and (kind in known or trust_remote_code)


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Add the source to the error that transformers raises when it cannot open it."""
    try:
        yield
    except PlainViTError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"transformers cannot open {source}: {type(error).__name__}: {reason}. Give a folder or Hub id that "
            "AutoModelForImageClassification and AutoImageProcessor open."
        ) from error


def _model_type(source: str) -> str | None:
    """Return the model type of a transformers folder or Hub id; None for other libraries' files and exported graphs."""
    if Path(source).is_file() or is_exported(source):
        return None
    try:
        found = PreTrainedConfig.get_config_dict(source)[0].get("model_type")
    except Exception:  # config.json is missing or damaged: `from_checkpoint` explains it
        return None
    return None if found is None else str(found)


def with_new_head(model: PreTrainedModel, label_names: list[str]) -> PreTrainedModel:
    """Copy a classifier with a new head, initialised to zero, with one logit per name.

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


def with_own_head(model: PreTrainedModel, label_names: list[str]) -> PreTrainedModel:
    """Copy a classifier and its head, with the classes reordered.

    Args:
        model: any transformers image classifier.
        label_names: the classes, in the order of their numbers.

    Raises:
        TrainingError: The classifier has other classes, or two with the same name.
    """
    own = names_of_classes(model.config)
    if sorted(own) != sorted(label_names) or len(set(own)) < len(own):
        raise TrainingError(
            f"The head is for {len(own)} classes ({listed(own)}), the data have {len(label_names)} "
            f"({listed(label_names)}), and it can be kept for the same names only, each once: omit --keep_head, "
            "or name the classes alike (--label_names, plain-vit convert --labels)."
        )
    order = [own.index(name) for name in label_names]
    new = _fresh(type(model), model.config, label_names)
    state, head = model.state_dict(), head_of(model)
    new.load_state_dict(
        {name: tensor[order] if name in head else tensor for name, tensor in state.items()}, strict=False
    )
    return new


def head_of(model: PreTrainedModel) -> set[str]:
    """Return the names of the tensors whose shape depends on the number of classes."""
    shapes = []
    for count in (2, 3):
        with torch.device("meta"):
            sized = _fresh(type(model), model.config, [str(number) for number in range(count)])
        shapes.append({name: tensor.shape for name, tensor in sized.state_dict().items()})
    return {name for name, shape in shapes[0].items() if shape != shapes[1][name]}


def weights_hash(model: nn.Module, *, without: Container[str] = ()) -> str:
    """Return a hash of all weights with their names, as 16 hexadecimal digits.

    Args:
        model: a model.
        without: names of tensors to leave out.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name not in without:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def configuration_hash(config: PreTrainedConfig) -> str:
    """Return a hash of the config fields that may change a model's outputs, as 16 hexadecimal digits."""
    settings = {name: value for name, value in config.to_dict().items() if name not in NOT_COMPUTED}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def processor_settings(image_processor: Any) -> dict[str, Any]:
    """Return the settings of an image processor that determine the pixels (ours leaves out where its code is saved)."""
    return getattr(image_processor, "settings", image_processor.to_dict)()


def set_head_bias(model: PreTrainedModel, value: float | torch.Tensor) -> None:
    """Set the biases of the head, for example to -log(number of classes) for a sigmoid loss.

    Args:
        model: any transformers image classifier.
        value: one bias for all classes, or one per class, [K].

    Raises:
        TrainingError: The head has no bias.
    """
    head = head_of(model)
    biases = [parameter for name, parameter in model.named_parameters() if name in head and parameter.ndim == 1]
    if not biases:
        raise TrainingError(f"The head of {type(model).__name__} has no bias: omit --head_bias.")
    for bias in biases:
        with torch.no_grad():
            bias.copy_(torch.as_tensor(value))


def _fresh(kind: type[PreTrainedModel], config: PreTrainedConfig, label_names: list[str]) -> PreTrainedModel:
    """Build a model with new weights in float32, whatever the dtype of its config."""
    return kind._from_config(_with_labels(config, label_names), dtype=torch.float32)


def _with_labels(config: PreTrainedConfig, label_names: list[str]) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: number for number, name in enumerate(label_names)}
    config.problem_type = "single_label_classification"
    if getattr(config, "use_mask_token", False):
        config.use_mask_token = False  # used only in pre-training; processes would wait for its gradient
    return config


def with_lora(
    model: PreTrainedModel, *, rank: int, alpha: int, targets: Sequence[str] | None, head: set[str]
) -> nn.Module:
    """Freeze a classifier except its head, and add trainable LoRA adapters to some of its layers.

    Args:
        model: any transformers image classifier; it is changed.
        rank: rank of the adapters.
        alpha: the adapters are scaled by `alpha / rank`.
        targets: last parts of the layer names (default: queries and values).
        head: names of the head's tensors, which stay trainable.

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
            f"The model has no layers {', '.join(missing) or ' or '.join(sorted(QUERY_AND_VALUE))}: give some of "
            f"{', '.join(sorted(leaves))} with --lora_targets."
        )
    heads = sorted({name.rpartition(".")[0] for name in head})
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=wanted, modules_to_save=heads))


def as_saved(model: nn.Module) -> PreTrainedModel:
    """Return the classifier to save: a copy with its LoRA adapters merged, or the model itself if it has none."""
    if not hasattr(model, "merge_and_unload"):
        return cast(PreTrainedModel, model)
    return cast(Any, copy.deepcopy(model)).merge_and_unload()


def merged(model: nn.Module, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return the result of `as_saved` for a sharded classifier with LoRA adapters.

    Args:
        model: sharded result of `with_lora`; only its structure is used.
        state: the gathered weights, which are moved into the result.
    """
    with needs("plain-vit[train]"):
        from peft import get_peft_model
    base = cast(Any, model).get_base_model()
    with torch.device("meta"):
        whole: Any = get_peft_model(type(base)._from_config(base.config), cast(Any, model).peft_config["default"])
    whole.load_state_dict(state, assign=True)
    return whole.merge_and_unload()


def open_classifier(
    source: str,
    *,
    trust_remote_code: bool = False,
    hints: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Open a classifier with its head.

    Args:
        source: a transformers folder or Hub id, or another library's checkpoint.
        trust_remote_code: run code that comes with the checkpoint.
        hints: settings that another library's checkpoint lacks, as arguments of `from_checkpoint`.

    Returns:
        The model in float32, and its image processor.

    Raises:
        CheckpointError: The source was exported to an inference engine.
        TrainingError: The source has no head or no image processor, or its config is complete without the hints.
    """
    model, processor, missing = _stored(source, trust_remote_code=trust_remote_code, hints=hints or {})
    if missing or processor is None:
        lacking = few(missing) or "an image processor"
        raise TrainingError(f"{source} lacks {lacking}: give a fine-tuned classifier.")
    return model, processor


def names_of_classes(config: PreTrainedConfig) -> list[str]:
    """Return the names of a model's classes, in the order of their numbers."""
    return [str(name) for _, name in sorted((config.id2label or {}).items())]


def numbers_by_name(names: Sequence[str], wanted: Sequence[str]) -> dict[str, int]:
    """Return the numbers of a model's classes by their names.

    Args:
        names: the names of the classes, in order.
        wanted: names that will be looked up; some may be missing.

    Raises:
        DataError: A wanted name belongs to several classes; ImageNet, for example, has two classes `crane`.
    """
    counts = Counter(names)
    for name in wanted:
        if counts[name] > 1:
            places = " and ".join(str(number) for number, each in enumerate(names) if each == name)
            raise DataError(
                f"{name!r} is the name of several classes of the model, {places}: match them by number, or give them "
                "names of their own in its config.json."
            )
    return {name: number for number, name in enumerate(names)}


def matching_classes(class_names: list[str], data_classes: list[str], *, labels_by: str) -> list[int]:
    """Return the model class of each class of the data.

    Args:
        class_names: the model's classes, in order.
        data_classes: the data's classes, in order.
        labels_by: how classes are matched, by `name` or by `number`.

    Raises:
        DataError: The model lacks a class of the data, or has a different number of classes.
    """
    if labels_by == "number":
        if len(data_classes) != len(class_names):
            raise DataError(
                f"The data has {len(data_classes)} classes, the model {len(class_names)}: their numbers do not match. "
                "Omit --labels_by if their names do, or give data with all of the model's classes, or with labels that "
                "are numbers."
            )
        return list(range(len(data_classes)))
    numbers = numbers_by_name(class_names, data_classes)
    unknown = [name for name in data_classes if name not in numbers]
    if unknown:
        what = "does not know {} of" if len(unknown) < len(data_classes) else "knows none of"
        raise DataError(
            f"The model {what.format(len(unknown))} the {len(data_classes)} classes of the data: "
            f"{few(unknown)}. The model's are {few(class_names)}. If both have the same order, add --labels_by number."
        )
    return [numbers[name] for name in data_classes]


class Teacher(nn.Module):
    """A classifier that predicts the classes of a student from the student's pixels.

    Args:
        model: any transformers image classifier; it is frozen.
        processor: its image processor.
        student_processor: the image processor of the incoming pixels.
        label_names: the classes of the predictions, in order.

    Raises:
        TrainingError: The teacher lacks a class.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    order: torch.Tensor

    def __init__(self, model: PreTrainedModel, processor: Any, student_processor: Any, label_names: list[str]) -> None:
        super().__init__()
        numbers = numbers_by_name(names_of_classes(model.config), label_names)
        unknown = [name for name in label_names if name not in numbers]
        if unknown:
            raise TrainingError(f"The teacher lacks the classes {few(unknown)}: give another teacher.")
        self.model = model.eval().requires_grad_(False)
        self.size = input_size(processor)
        (mean, std), (own_mean, own_std) = pixel_levels(student_processor), pixel_levels(processor)
        # From the student's normalisation to [0, 255], then to the teacher's.
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
    """Open a classifier with its head as a teacher; see `Teacher`.

    Args:
        source: a transformers folder or Hub id, or another library's checkpoint that needs no hints.
        student_processor: the image processor of the incoming pixels.
        label_names: the classes of the predictions, in order.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        TrainingError: The source has no head or no image processor, or lacks a class.
    """
    model, processor = open_classifier(source, trust_remote_code=trust_remote_code)
    return Teacher(model, processor, student_processor, label_names)
