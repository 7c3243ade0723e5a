"""Any plain ViT in, ours out, and back: live modules and checkpoints of every source, through one engine."""

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoImageProcessor, PreTrainedModel

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    OutputError,
    UnknownFormatError,
    VerificationError,
)
from .containers import LazyTensors
from .engine import Row, convert, ignored_names, revert
from .format import Description, Format, Hints, Inference, Size
from .google import GOOGLE
from .parity import StageDifference, compare_models, probe_images
from .reading import Checkpoint, read_checkpoint, strip_wrappers
from .timm import TIMM
from .torchvision import TORCHVISION
from .vit_pytorch import VIT_PYTORCH
from .writing import staged_file, staged_folder

FORMATS: dict[str, Format] = {format.name: format for format in (TIMM, VIT_PYTORCH, TORCHVISION, GOOGLE)}

# Against the same numbers in another order of operations, in float32; the project's one tolerance.
TOLERANCE = 1e-5
# Against logits that somebody else computed, perhaps on another machine. Wrong heads or poolings are far beyond.
REFERENCE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Report:
    """What a conversion did, in words.

    Args:
        source: File, folder or Hub id.
        format: The format that it was read as.
        layout: Which of the format's layouts.
        config: What was made of it.
        inferences: What was read off what.
        told: What the caller said.
        used: Count of the tensors that the model is made of.
        ignored: Tensors of the source that our model has no use for, each with the reason.
        notes: What was chosen, passed over or assumed on the way.
        differences: The largest difference to the source's own model at each stage; None where it was not run.
    """

    source: str
    format: str
    layout: str | None
    config: PlainViTConfig
    inferences: Sequence[Inference]
    told: Mapping[str, object]
    used: int
    ignored: Mapping[str, str]
    notes: Sequence[str]
    differences: Sequence[StageDifference] | None = None

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"{self.source}: {self.format}" + (f", layout {self.layout}" if self.layout else ""),
            f"  {config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
            f"patches of {config.patch_size}, images of {config.image_size}, {config.num_labels} labels",
            *(f"  inferred: {inference}" for inference in self.inferences),
            *(f"  told: {field} = {value!r}" for field, value in self.told.items()),
            f"  tensors: {self.used} used, {len(self.ignored)} ignored",
            *(f"    ignored {name}: {reason}" for name, reason in self.ignored.items()),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.differences is not None:
            lines.append("  largest difference to the source's own model, as a share of the largest value:")
            lines += [f"    {stage.stage}: {stage.relative:.1e}" for stage in self.differences]
        return "\n".join(lines)


@dataclass(frozen=True)
class Converted:
    """A checkpoint that became ours.

    Args:
        model: With a classifier where the source has one.
        image_processor: Prepares pixels as the source did; None where nothing is known.
        report: What was done.
    """

    model: PreTrainedModel
    image_processor: Any | None
    report: Report


# Live modules


def from_module(module: nn.Module, *, format: str | None = None, **hints: Any) -> PreTrainedModel:
    """Turn a live ViT of another package into ours, with the same numbers.

    What is around it (DDP, a compiled or Lightning module, MAE, DINO, an extractor) is seen through.

    Args:
        module: The model, or something that holds it. It stays as it is.
        format: One of `FORMATS`, for a class that does not come from its package, such as a copy of its source.
        **hints: Fields of `Hints`, for what even a live module does not say.

    Returns:
        Our model, of the source's dtype, device and training mode; it shares no memory with the source. Without a
        classifier it is a `PlainViTModel`.

    Raises:
        UnknownFormatError: There is no ViT of a known package in the module.
        AmbiguousCheckpointError: There are several, or the module does not say everything.
        ExportError: It has parts that plain-vit does not know.
    """
    known = Hints(**hints)
    found, source = _find_module(module, format, known.key)
    description = source.describe_module(found, known)
    return _model(source, description, found.state_dict()).train(found.training)


def to_module(model: PreTrainedModel, format: str, *, layout: str | None = None) -> nn.Module:
    """Turn our model into a live module of another package, with every tensor bit for bit.

    Args:
        model: A `PlainViTForImageClassification`, or a `PlainViTModel`.
        format: One of `FORMATS`; its package must be installed.
        layout: Which of the format's layouts; that of the installed package if not given.

    Returns:
        The module, of the model's dtype, device and training mode; it shares no memory with the model.

    Raises:
        ExportError: lists every part that the target cannot express.
    """
    target, (config, tensors) = _format(format), _our_tensors(model)
    module = target.build_module(config, layout)
    state = revert(target.rows(config, layout), tensors, config)
    for name, tensor in module.state_dict().items():
        if tensor.numel() == 0:  # a class token of no rows
            state.setdefault(name, tensor.to(model.device, model.dtype))
    module.load_state_dict(state, assign=True)
    return module.train(model.training)


def _find_module(module: nn.Module, format: str | None, key: str | None) -> tuple[nn.Module, Format]:
    """Return the one model of a known package in a module."""
    formats = list(FORMATS.values()) if format is None else [_format(format)]
    if key is not None:
        children = dict(module.named_modules(remove_duplicate=False))
        if key not in children:
            raise UnknownFormatError(f"the module has no child {key!r}: it has {', '.join(filter(None, children))}")
        module = children[key]
    found: dict[str, tuple[nn.Module, Format]] = {}
    for path, child in module.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if not inside and (source := next((one for one in formats if one.matches_module(child)), None)) is not None:
            found[path] = child, source
    if len(found) > 1:
        raise AmbiguousCheckpointError("the module holds several models; which one is meant?", {"key": list(found)})
    if found:
        return next(iter(found.values()))
    if format is not None:
        return module, formats[0]
    raise UnknownFormatError(
        f"{type(module).__module__}.{type(module).__qualname__} holds no model of {', '.join(FORMATS)}: "
        "for a class copied out of one of them, say format="
    )


# Checkpoints


def from_checkpoint(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    num_attention_heads: int | None = None,
    head_dim: int | None = None,
    pooling: str | None = None,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    num_channels: int | None = None,
    attention_scale: float | None = None,
    layer_norm_eps: float | None = None,
    hidden_act: str | None = None,
    architecture: str | None = None,
    layout: str | None = None,
    image_mean: Sequence[float] | None = None,
    image_std: Sequence[float] | None = None,
    key: str | None = None,
    revision: str | None = None,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
    verify: bool = False,
) -> Converted:
    """Open a checkpoint of any known source as our model; nothing is guessed and nothing left out in silence.

    Args:
        source: A `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt` or `.npz` file, a folder, or a Hub id. Our own folders
            open too, strictly.
        format: One of `FORMATS`, where the names of the tensors do not tell.
        num_attention_heads: Heads of each attention.
        head_dim: Width of one head.
        pooling: "cls" or "mean".
        image_size: Native input size in pixels, an int or (height, width).
        patch_size: Size of a patch in pixels, likewise.
        num_channels: Channels of the input.
        attention_scale: Factor on the attention scores.
        layer_norm_eps: Epsilon of every norm.
        hidden_act: Activation of the MLP.
        architecture: timm's name of the model.
        layout: Which of the format's layouts, such as the release of vit-pytorch that trained the model ("0.19.6").
        image_mean: Mean of each channel of the training pixels, as values in 0..1.
        image_std: Deviation of each channel, likewise.
        key: Which part of the file is the model, where it holds several.
        revision: Branch, tag or commit of a Hub repository.
        reference: Pixels of shape (B, C, H, W) and the logits (B, num_labels) that the source gives for them, in
            evaluation mode: what the checkpoint does not say is found by trying.
        id2label: Names of the labels.
        verify: Compare with the source's own model, where its package is installed.

    Returns:
        The model in evaluation mode, its image processor and a report.

    Raises:
        CheckpointError: It cannot be read; `UnknownFormatError`: it is of no known source.
        AmbiguousCheckpointError: It does not say everything; lists what is open, with the candidates.
        MappingError: Tensors are missing, left over or of a wrong shape.
        VerificationError: The source's own model, or the reference, gives other numbers.
    """
    checkpoint = read_checkpoint(source, key=key, revision=revision)
    hints = Hints(
        num_attention_heads=num_attention_heads,
        head_dim=head_dim,
        pooling=pooling,
        image_size=image_size,
        patch_size=patch_size,
        num_channels=num_channels,
        attention_scale=attention_scale,
        layer_norm_eps=layer_norm_eps,
        hidden_act=hidden_act,
        architecture=architecture,
        layout=layout,
        key=key,
        image_mean=image_mean,
        image_std=image_std,
    )
    told = {field.name: value for field in fields(hints) if (value := getattr(hints, field.name)) is not None}
    if (checkpoint.config or {}).get("model_type") == PlainViTConfig.model_type:
        if superfluous := [
            *told,
            *(name for name, value in {"format": format, "reference": reference}.items() if value),
        ]:
            raise CheckpointError(
                f"{source} is a folder of plain-vit's own, whose config.json says everything: leave out "
                + ", ".join(superfluous)
            )
        return _open_ours(source, checkpoint, id2label)
    settings = checkpoint.config or {}
    stripped = strip_wrappers(checkpoint.tensors)
    tensors = LazyTensors({short: checkpoint.tensors.entries[name] for name, short in stripped.names.items()})
    origin = _format(format) if format is not None else _recognise(tensors, str(source))
    opening = _Opening(origin, tensors, settings)
    description, model = opening.try_reference(hints, reference) if reference else opening.open(hints)
    config = cast(PlainViTConfig, model.config)
    if id2label is not None:
        _name_labels(config, id2label)
    preprocessor = checkpoint.preprocessor_config or {}
    processor, assumed = origin.image_processor(description.config, settings, preprocessor, hints)
    unused = ignored_names(set(tensors), description.ignored)
    report = Report(
        source=os.fspath(source),
        format=origin.name,
        layout=description.layout,
        config=config,
        inferences=description.inferences,
        told=told,
        used=len(tensors) - len(unused),
        ignored=unused | dict.fromkeys(stripped.counters, "a counter of the training"),
        notes=[*(f"wrapper {name!r} removed" for name in stripped.prefixes), *checkpoint.notes, *assumed],
    )
    if verify:
        report = _verified(report, origin, description, tensors, model)
    return Converted(model, processor, report)


def to_checkpoint(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    format: str,
    image_processor: Any | None = None,
    layout: str | None = None,
    force: bool = False,
) -> None:
    """Write our model as another package's own checkpoint, with every tensor bit for bit.

    Args:
        model: A `PlainViTForImageClassification`, or a `PlainViTModel`.
        path: A new file or folder, as the format has it: `.pt` or `.safetensors` for vit_pytorch, a folder for timm.
        format: One of `FORMATS`; its package is not needed.
        image_processor: Written beside the model, where the format has a place for it.
        layout: Which of the format's layouts, such as the release of vit-pytorch; today's if not given.
        force: Replace what is there.

    Raises:
        ExportError: lists every part that the target cannot express.
        OutputError: It cannot be written; what was there before still is.
    """
    target, (config, tensors) = _format(format), _our_tensors(model)
    suffix = Path(path).suffix
    if target.suffixes and suffix not in target.suffixes:
        raise OutputError(
            f"{path} ends in {suffix!r}: a checkpoint of {format} is a file, {' or '.join(target.suffixes)}"
        )
    with (staged_file if target.suffixes else staged_folder)(path, force=force) as staged:
        target.write(config, tensors, staged, image_processor, layout)


class _Opening:
    """One checkpoint that is being opened, perhaps in more than one way."""

    def __init__(self, origin: Format, tensors: LazyTensors, settings: Mapping[str, Any]):
        self.origin = origin
        self.tensors = tensors
        self.settings = settings
        self.converted: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}

    def open(self, hints: Hints) -> tuple[Description, PreTrainedModel]:
        """Open it in the one way that it can be understood."""
        description = self.describe(hints)
        return description, _model(self.origin, description, self.tensors)

    def describe(self, hints: Hints) -> Description:
        return self.origin.describe_checkpoint(self.tensors.meta(), self.settings, hints)

    def try_reference(
        self, hints: Hints, reference: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[Description, PreTrainedModel]:
        """Open it in every way that it can be understood, and return the one that gives these logits."""
        pixel_values, logits = reference
        tried = []
        for complete, description in self.possible(hints, pixel_values):
            model = _model(self.origin, description, self.tensors, self.converted)
            tried.append((_distance(model, pixel_values, logits), complete, description, model))
        fitting = [attempt for attempt in tried if attempt[0] <= REFERENCE_TOLERANCE]
        if not fitting:
            nearest = min((attempt[0] for attempt in tried), default=math.inf)
            raise VerificationError(
                f"none of the {len(tried)} ways to read the checkpoint gives the logits of the reference; the nearest "
                f"is off by {nearest:.1e} of the largest. Take pixels as the model saw them, in evaluation mode."
            )
        asked = [field.name for field in fields(hints) if len({str(getattr(one[1], field.name)) for one in tried}) > 1]
        if len(fitting) > 1:
            remaining = {name: list({getattr(one[1], name): None for one in fitting}) for name in asked}
            raise AmbiguousCheckpointError(
                "the reference fits several ways to read the checkpoint; give more images, or:",
                {name: values for name, values in remaining.items() if len(values) > 1},
            )
        ((distance, complete, description, model),) = fitting
        found = f"the reference, off by {distance:.1e} of its largest logit; {len(tried)} ways were tried"
        inferences = [Inference(name, getattr(complete, name), found) for name in asked]
        return replace(description, inferences=[*description.inferences, *inferences]), model

    def possible(self, hints: Hints, pixel_values: torch.Tensor) -> list[tuple[Hints, Description]]:
        """Return every way to complete the hints, with what the checkpoint then is."""
        try:
            return [(hints, self.describe(hints))]
        except AmbiguousCheckpointError as error:
            of_reference: dict[str, Sequence[Any]] = {
                "image_size": [tuple(pixel_values.shape[-2:])],
                "num_channels": [pixel_values.shape[1]],
            }
            name, values = next(iter(error.candidates.items()))
            if name == "key" or not hasattr(hints, name):
                raise
            ways: list[tuple[Hints, Description]] = []
            for value in of_reference.get(name, values):
                try:
                    settled: dict[str, Any] = {name: value}
                    ways += self.possible(replace(hints, **settled), pixel_values)
                except (MappingError, ValueError):
                    if len(values) == 1:
                        raise
            return ways


def _distance(model: PreTrainedModel, pixel_values: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the largest difference to known logits, as a share of the largest of them."""
    with torch.no_grad():
        outputs = model.eval()(pixel_values.to(model.dtype))
    got = outputs.logits if "logits" in outputs else outputs.pooler_output
    if got.shape != logits.shape:
        raise VerificationError(
            f"the reference has logits of shape {tuple(logits.shape)}, the model {tuple(got.shape)}"
        )
    return ((got - logits).abs().max() / logits.abs().max()).item()


def _model(
    origin: Format,
    description: Description,
    tensors: Mapping[str, torch.Tensor],
    converted: dict[tuple[object, ...], dict[str, torch.Tensor]] | None = None,
) -> PreTrainedModel:
    """Build our model of a description and give it the tensors; `converted` remembers them between equal tables."""
    with torch.device("meta"):
        model = modeling.PlainViTForImageClassification(copy.deepcopy(description.config))
    expected = model.state_dict()
    key = (description.layout, *((name, tensor.shape) for name, tensor in expected.items()))
    state = (converted or {}).get(key)
    if state is None:
        source = _Renamed(tensors, description.prefix)
        rows = origin.rows(description.config, description.layout)
        owned = isinstance(tensors, LazyTensors)
        state = convert(rows, source, expected, description.config, description.ignored, owned=owned)
        dtypes = {str(tensor.dtype) for tensor in state.values()}
        if len(dtypes) > 1:
            raise CheckpointError(f"the tensors are of several dtypes, {', '.join(sorted(dtypes))}: save them in one")
        if converted is not None:
            converted[key] = state
    model.load_state_dict(state, assign=True)
    # Without a classifier DeiT's output is still the mean of two tokens, which only the classification model takes.
    headed = description.config.num_labels or description.config.use_distillation_token
    return model.eval() if headed else model.vit.eval()


class _Renamed(Mapping[str, torch.Tensor]):
    """The tensors of a source without the prefix of its model; those that do not have it keep their names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str):
        self.tensors = tensors
        self.names = {name.removeprefix(prefix): name for name in tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self.names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.names


def _our_tensors(model: PreTrainedModel) -> tuple[PlainViTConfig, dict[str, torch.Tensor]]:
    """Return the configuration and the tensors by the names in the tables; without a classifier `num_labels` is 0."""
    config = cast(PlainViTConfig, copy.deepcopy(model.config))
    if isinstance(model, modeling.PlainViTModel):
        config.num_labels = 0
        return config, {f"vit.{name}": tensor for name, tensor in model.state_dict().items()}
    return config, model.state_dict()


def _open_ours(
    source: str | os.PathLike[str], checkpoint: Checkpoint, id2label: Mapping[int, str] | Sequence[str] | None
) -> Converted:
    """Open a folder of our own, in which every tensor of the model has to be there and nothing else."""
    config = PlainViTConfig.from_dict(checkpoint.config or {})
    named = config.architectures or ["PlainViTForImageClassification"]
    if len(named) != 1 or named[0] not in modeling.__all__:
        raise CheckpointError(f"{source} is of {', '.join(named)}: expected one of {', '.join(modeling.__all__)}")
    with torch.device("meta"):
        model: PreTrainedModel = getattr(modeling, named[0])(config)
    expected = model.state_dict()
    rows = [Row(name, name) for name in expected]
    model.load_state_dict(convert(rows, checkpoint.tensors, expected, config, owned=True), assign=True)
    if id2label is not None:
        _name_labels(cast(PlainViTConfig, model.config), id2label)
    processor = AutoImageProcessor.from_pretrained(checkpoint.path) if checkpoint.preprocessor_config else None
    report = Report(os.fspath(source), "plain_vit", None, config, (), {}, len(expected), {}, checkpoint.notes)
    return Converted(model.eval(), processor, report)


def _recognise(tensors: Mapping[str, torch.Tensor], source: str) -> Format:
    """Return the format that has these names."""
    matching = [format for format in FORMATS.values() if format.matches_names(tensors)]
    if len(matching) > 1:
        names = [format.name for format in matching]
        raise AmbiguousCheckpointError(f"{source} has names that several formats have", {"format": names})
    if not matching:
        some = ", ".join(map(repr, list(tensors)[:5]))
        raise UnknownFormatError(
            f"{source} is of none of {', '.join(FORMATS)}: its tensors are {some} and {max(0, len(tensors) - 5)} more"
        )
    return matching[0]


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _name_labels(config: PlainViTConfig, labels: Mapping[int, str] | Sequence[str]) -> None:
    named = dict(labels.items() if isinstance(labels, Mapping) else enumerate(labels))
    if sorted(named) != list(range(config.num_labels or 0)):
        raise ValueError(f"id2label names {len(named)} labels: expected {config.num_labels}, numbered from 0")
    config.id2label = named
    config.label2id = {name: index for index, name in named.items()}


def _verified(
    report: Report,
    origin: Format,
    description: Description,
    tensors: Mapping[str, torch.Tensor],
    model: PreTrainedModel,
) -> Report:
    """Hold our model against the source's own, stage by stage, in float32.

    Raises:
        VerificationError: The largest difference is beyond the tolerance.
    """
    needed = 4 * sum(parameter.numel() for parameter in model.parameters()) * (1 if model.dtype == torch.float32 else 2)
    if needed > _free_memory():
        return replace(report, notes=[*report.notes, f"not verified: {needed / 1e9:.1f} GB of memory are not free"])
    try:
        theirs = origin.build_module(description.config, description.layout)
    except (ExportError, ImportError) as error:
        return replace(report, notes=[*report.notes, f"not verified: {error}"])
    source = _Renamed(tensors, description.prefix)
    unused = ignored_names(set(source), description.ignored)
    theirs.load_state_dict({name: source[name] for name in source if name not in unused}, assign=True)
    ours = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    differences = compare_models(theirs.float().eval(), ours, probe_images(description.config))
    report = replace(report, differences=differences)
    if any(not stage.relative <= TOLERANCE for stage in differences):
        raise VerificationError(f"our model and the source's own differ by more than {TOLERANCE}:\n{report}")
    return report


def _free_memory() -> int:
    """Return the bytes that a process can still take, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
