"""Any plain ViT in, ours out, and back: live modules and checkpoints of every source, through one engine."""

import copy
import hashlib
import itertools
import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.initialization import no_init_weights

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    OutputError,
    PlainViTError,
    UnknownFormatError,
    VerificationError,
    in_bytes,
    printable,
)
from ..files.containers import LazyTensors
from ..files.reading import Checkpoint, check_layer_numbers, read_checkpoint, strip_wrappers
from ..files.writing import save_state_dict, staged_file, staged_folder
from .compare_modules import MASKED, class_path, empty_model
from .engine import Row, convert, ignored_names, revert, sources_of, stream
from .format import EXPECTED, UNPROVEN, UNSEEN, Description, Format, Hints, Inference, unheeded
from .google import GOOGLE
from .live_modules import find_model, unknown_hints
from .parity import StageDifference, compare_models, memory_of_probing, probe_images
from .preprocessing import processor_from_transformers
from .recognition import recognise, require
from .reference import Reference
from .timm.source import TIMM
from .torchvision.source import TORCHVISION
from .transformers.source import TRANSFORMERS
from .vit_pytorch.source import VIT_PYTORCH

FORMATS: dict[str, Format] = {format.name: format for format in (TIMM, VIT_PYTORCH, TORCHVISION, TRANSFORMERS, GOOGLE)}

# Against the same numbers in another order of operations, in float32; the project's one tolerance.
TOLERANCE = 1e-5
REFERENCE = "the reference"  # how the source of an inference begins that known logits settled
MAX_SHARD_SIZE = "50GB"  # transformers' own default

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What a conversion did, in words.

    Args:
        source: File, folder or Hub id.
        format: The format that it was read as.
        layout: Which of the format's layouts.
        config: What was made of it.
        inferences: What was read off what.
        given_hints: What the caller said.
        used: Count of the tensors that the model is made of.
        ignored: Tensors of the source that our model has no use for, each with the reason.
        notes: What was chosen, passed over or assumed on the way.
        differences: The largest difference to the source's own model at each stage; None where it was not run.
        is_independent: Whether that model was built by the source's own reading of its configuration, not by ours.
    """

    source: str
    format: str
    layout: str | None
    config: PlainViTConfig
    inferences: Sequence[Inference]
    given_hints: Mapping[str, object]
    used: int
    ignored: Mapping[str, str]
    notes: Sequence[str]
    differences: Sequence[StageDifference] | None = None
    is_independent: bool = False

    @property
    def unproven(self) -> list[Inference]:
        """What logits depend on and the tensors do not show; a comparison with a model built from it proves none."""
        given = [Inference(name, value, "the caller") for name, value in self.given_hints.items()]
        known = [one for one in (*given, *self.inferences) if not one.source.startswith(REFERENCE)]
        proven = {one.field for one in self.inferences} - {one.field for one in known}
        found = {one.field: one for one in reversed(known)}
        return [found[field] for field in UNPROVEN if field in found and field not in proven]

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"{self.source}: {self.format}" + (f", layout {self.layout}" if self.layout else ""),
            f"  {config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
            f"patches of {config.patch_size}, images of {config.image_size}, {config.num_labels} labels",
            *(f"  inferred: {inference}" for inference in self.inferences),
            *(f"  given: {field} = {value!r}" for field, value in self.given_hints.items()),
            f"  tensors: {self.used} used, {len(self.ignored)} ignored",
            *(f"    ignored {name}: {reason}" for name, reason in self.ignored.items()),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.differences is not None:
            lines.append("  largest difference to the source's own model, as a share of the largest value:")
            lines += [f"    {stage.stage}: {stage.relative:.1e}" for stage in self.differences]
            if self.is_independent:
                lines.append("  that model was built by its own package from the source's own configuration")
            else:
                lines.append("  not proven by that, because the model compared with was built from the same readings:")
                lines += [f"    {one}" for one in self.unproven]
        return printable("\n".join(lines))


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


class Droppable(NamedTuple):
    """A part of our model that no output reads, so that it may be left out on the way to another package.

    Args:
        field: The config's, which is then False.
        tensor: The name of its tensor.
        read_by: The class of ours whose outputs do read it.
        reason: For the report.
    """

    field: str
    tensor: str
    read_by: type[PreTrainedModel]
    reason: str


DROPPABLE = {
    "mask_token": Droppable(
        "use_mask_token",
        "vit.embeddings.mask_token",
        modeling.PlainViTForMaskedImageModeling,
        "it replaces hidden patches in pre-training, and no output of this model reads it",
    )
}


@dataclass(frozen=True)
class Export:
    """What was written in another package's layout.

    Args:
        path: The file or folder.
        format: One of `FORMATS`.
        dropped: Parts of the model that were left out, each with the reason.
    """

    path: str
    format: str
    dropped: Mapping[str, str]

    def __str__(self) -> str:
        return "\n".join([f"written: {self.path}", *(f"  dropped {name}: {why}" for name, why in self.dropped.items())])


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
    if unknown := hints.keys() - {field.name for field in fields(Hints)}:
        raise unknown_hints(sorted(unknown), [field.name for field in fields(Hints)])
    known = Hints(**hints)
    if format is not None:
        _format(format)
    found, source = find_model(module, FORMATS, format, known.key)
    with _clear_module_errors(found, source):
        description = source.describe_module(found, known)
    _check_hints(known, description, type(found).__name__)
    model, tensors = empty_model(description.config), _without_prefix(found.state_dict(), description.prefix)
    rows = source.rows(description.config, description.layout)
    state = convert(rows, tensors, model.state_dict(), description.config, description.ignored)
    model.load_state_dict(_of_one_dtype(state), assign=True)
    trained = {name for name, parameter in found.named_parameters() if parameter.requires_grad}
    _freeze(model, sources_of(rows, state), set(_without_prefix(dict.fromkeys(trained), description.prefix)))
    return _without_empty_head(model).train(found.training)


def _freeze(module: nn.Module, sources: Mapping[str, Sequence[str]], trained: Collection[str]) -> None:
    """Freeze the parameters that are made of frozen ones, and those alone.

    Args:
        module: Theirs or ours.
        sources: What each of its parameters is made from.
        trained: Those of the other side that are not frozen.

    Raises:
        ExportError: names the parameters that are made of trained and of frozen ones.
    """
    mixed = []
    for name, parameter in module.named_parameters():
        if name in sources:
            given = [source in trained for source in sources[name]]
            parameter.requires_grad_(any(given))
            mixed += [f"{name} holds {', '.join(sources[name])}"] if len(set(given)) > 1 else []
    if mixed:
        raise ExportError("one parameter cannot be trained in part; freeze all of these, or none:", mixed)


@contextmanager
def _clear_module_errors(module: nn.Module, origin: Format) -> Iterator[None]:
    """Say what a module is not, in whatever way reading it as a model of a format fails."""
    try:
        yield
    except (PlainViTError, ValueError):
        raise
    except (
        *(AttributeError, LookupError, StopIteration, TypeError, ArithmeticError, RuntimeError, AssertionError),
        StrictDataclassError,
    ) as error:
        raise UnknownFormatError(
            f"{class_path(module)} does not have the parts of a plain ViT of {origin.name} "
            f"({type(error).__name__}: {error}): pass the model as its package builds it, or the format that it is of"
        ) from error


def to_module(
    model: PreTrainedModel, format: str, *, layout: str | None = None, drop: Collection[str] = ()
) -> nn.Module:
    """Turn our model into a live module of another package, with every tensor bit for bit.

    Args:
        model: A `PlainViTForImageClassification`, or a `PlainViTModel`.
        format: One of `FORMATS`; its package must be installed.
        layout: Which of the format's layouts; that of the installed package if not given.
        drop: Names in `DROPPABLE` of parts to leave out, where the target has no place for them.

    Returns:
        The module, of the model's dtype, device and training mode; it shares no memory with the model.

    Raises:
        ExportError: lists every part that the target cannot express, and which of them can be dropped.
    """
    target, (config, tensors) = _format(format), _our_tensors(model, drop)
    with _naming_droppable_parts(config):
        module = target.build_module(config, layout)
    _fill(module, target, config, tensors, layout)
    made: dict[str, list[str]] = {}
    for ours, sources in sources_of(target.rows(config, layout), tensors).items():
        for source in sources:
            made.setdefault(source, []).append(ours)
    prefix = "vit." if isinstance(model, modeling.PlainViTModel) else ""
    trained = {prefix + name for name, parameter in model.named_parameters() if parameter.requires_grad}
    _freeze(module, made, trained)
    return module.train(model.training)


def _fill(
    module: nn.Module, target: Format, config: PlainViTConfig, tensors: Mapping[str, torch.Tensor], layout: str | None
) -> None:
    """Give a module of another package our tensors."""
    state = revert(target.rows(config, layout), tensors, config)
    like = next(iter(tensors.values()))
    for name, tensor in module.state_dict().items():
        if tensor.numel() == 0:  # a class token of no rows
            state.setdefault(name, tensor.to(like.device, like.dtype))
    module.load_state_dict(dict(target.for_module(state, config, layout)), assign=True)


# Checkpoints


def from_checkpoint(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    revision: str | None = None,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
    verify: bool = False,
    **hints: Any,
) -> Converted:
    """Open a checkpoint of any known source as our model; nothing is guessed and nothing left out in silence.

    Weights of a safetensors file are mapped, as transformers does it, and copied where they are changed; those of other
    files are read.

    Args:
        source: A `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt` or `.npz` file, a folder, or a Hub id. Our own folders
            open too, strictly.
        format: One of `FORMATS`, where the names of the tensors do not tell.
        revision: Branch, tag or commit of a Hub repository.
        reference: Pixels of shape (B, C, H, W) and the logits (B, num_labels) that the source gives for them, in
            evaluation mode: what the checkpoint does not say is found by trying.
        id2label: Names of the labels.
        verify: Compare with the source's own model, where its package is installed.
        **hints: Fields of `Hints`, for what the checkpoint does not say: `num_attention_heads`, `layer_norm_eps`,
            `architecture` and so on.

    Returns:
        The model in evaluation mode, its image processor and a report.

    Raises:
        CheckpointError: It cannot be read, or a hint contradicts it; `UnknownFormatError`: it is of no known source.
        AmbiguousCheckpointError: It does not say everything; lists what is open, with the candidates.
        MappingError: Tensors are missing, left over or of a wrong shape.
        VerificationError: The source's own model, or the reference, gives other numbers.
    """
    recipe, converted = _understand(source, Hints(**hints), format, revision, reference, id2label)
    theirs = recipe.source_module() if verify else None
    converted = replace(converted, model=recipe.load())
    return converted if theirs is None else _verified(converted, recipe, theirs)


def convert_checkpoint(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], *, verify: bool = True, **options: Any
) -> Converted:
    """Write a checkpoint of any known source as a Hugging Face folder, with a bar that shows the bytes per second.

    Without a comparison the tensors go from file to file, one row of the table at a time.

    Args:
        source: As for `from_checkpoint`.
        folder: Where to write: a folder that is there and empty, such as that of `writing.staged_folder`.
        verify: Compare with the source's own model first, where its package is installed and both fit in memory.
        **options: As for `from_checkpoint`.

    Returns:
        As `from_checkpoint`; without a comparison the model's parameters are on the meta device.

    Raises:
        PlainViTError: As from `from_checkpoint`; what the folder then holds is not whole.
    """
    other = [options.pop(name, None) for name in ("format", "revision", "reference", "id2label")]
    recipe, converted = _understand(source, Hints(**options), *other)
    theirs = recipe.source_module() if verify else None
    if isinstance(theirs, SourceModule):
        converted = _verified(replace(converted, model=recipe.load()), recipe, theirs)
        tensors: Any = converted.model.state_dict()
    else:
        converted = replace(converted, model=recipe.plan())
        converted = converted if theirs is None else _verified(converted, recipe, theirs)
        tensors = recipe.stream()
    model = converted.model
    _save_config(model, Path(folder))
    # Files and metadata as `save_pretrained` makes them: both ways give the same bytes.
    path, metadata = Path(folder, "model.safetensors"), {"format": "pt"}
    save_state_dict(tensors, path, metadata, like=model.state_dict(), max_shard_size=MAX_SHARD_SIZE)
    if converted.image_processor is not None:
        converted.image_processor.save_pretrained(folder)
    return converted


def to_checkpoint(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    format: str,
    image_processor: Any | None = None,
    layout: str | None = None,
    force: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
    drop: Collection[str] = (),
) -> Export:
    """Write our model as another package's own checkpoint, with every tensor bit for bit.

    Args:
        model: A `PlainViTForImageClassification`, or a `PlainViTModel`; for transformers also a
            `PlainViTForMaskedImageModeling`.
        path: A new file or folder, as the format has it: `.pt` or `.safetensors` for vit_pytorch, a folder for timm and
            transformers.
        format: One of `FORMATS`; its package is not needed.
        image_processor: Written beside the model, where the format has a place for it.
        layout: Which of the format's layouts, such as the release of vit-pytorch or the class of transformers; if not
            given today's, or the first class that can hold the model.
        force: Replace what is there.
        sources: Files and folders that the model came from, none of which the output may replace.
        drop: Names in `DROPPABLE` of parts to leave out, where the target has no place for them.

    Returns:
        What was written, and what was dropped.

    Raises:
        ExportError: lists every part that the target cannot express, and which of them can be dropped.
        OutputError: It cannot be written; what was there before still is.
    """
    target, (config, tensors) = _format(format), _our_tensors(model, drop)
    suffix = Path(path).suffix
    if target.suffixes and suffix not in target.suffixes:
        raise OutputError(
            f"{path} ends in {suffix!r}: a checkpoint of {format} is a file, {' or '.join(target.suffixes)}"
        )
    staging = staged_file if target.suffixes else staged_folder
    with staging(path, force=force, sources=sources) as staged, _naming_droppable_parts(config):
        target.write(config, tensors, staged, image_processor, layout)
    return Export(os.fspath(path), format, {name: DROPPABLE[name].reason for name in drop})


@contextmanager
def _naming_droppable_parts(config: PlainViTConfig) -> Iterator[None]:
    """Name the way out where a target has no place for a part that no output reads."""
    try:
        yield
    except ExportError as error:
        masked = MASKED in (config.architectures or [])
        names = [
            name
            for name, part in DROPPABLE.items()
            if not masked and any(line.startswith(part.field) for line in error.parts)
        ]
        if not names:
            raise
        remedy = f"no output of this model reads {', '.join(names)}: leave it out with drop={tuple(names)!r}, or "
        remedy += " ".join(f"--drop {name}" for name in names)
        raise ExportError(f"{error.message} ({remedy})", error.parts) from error


class SourceModule(NamedTuple):
    """A model of the source's own package, which of its layouts the tensors have there, and whose reading built it."""

    module: nn.Module
    layout: str | None
    is_independent: bool = False


@dataclass
class _Recipe:
    """How a checkpoint becomes ours: all is known but the values of its tensors, none of which has been read.

    Args:
        whole: Our model on the meta device, with the names that the rows have.
        rows: The conversion table.
        tensors: The source's tensors, by the names that the rows have.
        description: What the checkpoint was found to be.
        origin: Its format; None for our own.
        settings: The configuration that lay beside the tensors.
    """

    whole: PreTrainedModel
    rows: Sequence[Row]
    tensors: LazyTensors
    description: Description
    origin: Format | None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel:
        """The model that is handed out: without a classifier only the encoder."""
        return self.whole if self.origin is None else _without_empty_head(self.whole)

    def load(self, converted: dict[tuple[object, ...], dict[str, torch.Tensor]] | None = None) -> PreTrainedModel:
        """Give the model its weights; `converted` remembers them between equal tables, and shares their memory."""
        shapes = ((name, tensor.shape) for name, tensor in self.whole.state_dict().items())
        key = (*map(repr, self.rows), *shapes)
        state = (converted or {}).get(key)
        if state is None:
            state = self._convert(self.tensors.mapped(), owned=True)
            if converted is not None:
                converted[key] = state
        self.whole.load_state_dict(state, assign=True)
        return self.model.eval()

    def plan(self) -> PreTrainedModel:
        """Hold names, shapes and dtypes against the model, which takes the dtype and stays on the meta device."""
        try:
            self.whole.load_state_dict(self._convert(self.tensors.meta()), assign=True)
        except MappingError:
            deque(self.stream(), maxlen=0)  # says what is wrong with the values too
            raise
        return self.model.eval()

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read and convert the tensors, one after the other, by the names in the model that is handed out."""
        prefix = "" if self.model is self.whole else "vit."
        expected, description = self.whole.state_dict(), self.description
        tensors = self.tensors.mapped()
        for name, tensor in stream(self.rows, tensors, expected, description.config, description.ignored):
            yield name.removeprefix(prefix), tensor

    def source_module(self) -> SourceModule | str:
        """Build the source's own model, still with weights of its own, or return the reason why there is none."""
        if self.origin is None:
            return "the source is plain-vit's own"
        # Theirs as it is built and what it is then given, and ours; of another dtype, both again in float32.
        dtypes = {entry.dtype for entry in self.tensors.entries.values()}
        parameters = sum(parameter.numel() for parameter in self.whole.parameters())
        needed = 4 * parameters * (3 if dtypes == {torch.float32} else 5) + memory_of_probing(self.description.config)
        if (free := free_memory()) < needed:
            return f"it takes {in_bytes(needed)} of memory, and {in_bytes(free)} are free"
        # A release that is not installed may differ from the installed one in names and axes of tensors alone.
        reasons = []
        try:
            if (module := self.origin.independent_module(self.description, self.settings)) is not None:
                return SourceModule(module, self.description.layout, is_independent=True)
        except ImportError as error:
            reasons.append(str(error))
        for layout in dict.fromkeys([self.description.layout, None]):
            try:
                return SourceModule(self.origin.build_module(self.description.config, layout), layout)
            except (ExportError, ImportError) as error:
                reasons.append(str(error))
        return reasons[0]

    def fill(self, theirs: SourceModule) -> Sequence[str]:
        """Give the source's own model the source's tensors, and return what has to be said of that."""
        origin, config = cast(Format, self.origin), self.description.config
        if theirs.layout != self.description.layout:
            _fill(theirs.module, origin, config, self.whole.state_dict(), theirs.layout)
            return [
                f"compared with the installed release, where the tensors of {self.description.layout} lie otherwise"
            ]
        tensors = self.tensors.mapped()
        unused = ignored_names(tensors, self.description.ignored)
        used = {name: tensors[name] for name in tensors if name not in unused}
        theirs.module.load_state_dict(dict(origin.for_module(used, config, theirs.layout)), assign=True)
        return []

    def _convert(self, tensors: Mapping[str, torch.Tensor], owned: bool = False) -> dict[str, torch.Tensor]:
        expected, description = self.whole.state_dict(), self.description
        state = convert(self.rows, tensors, expected, description.config, description.ignored, owned=owned)
        return _of_one_dtype(state)


def _understand(
    source: str | os.PathLike[str],
    hints: Hints,
    format: str | None,
    revision: str | None,
    reference: tuple[torch.Tensor, torch.Tensor] | None,
    id2label: Mapping[int, str] | Sequence[str] | None,
) -> tuple[_Recipe, Converted]:
    """Find out what a checkpoint is; what it becomes is still on the meta device."""
    checkpoint = read_checkpoint(source, key=hints.key, revision=revision)
    given = hints.given()
    settings, preprocessor = checkpoint.config or {}, checkpoint.preprocessor_config or {}
    if settings.get("model_type") == PlainViTConfig.model_type:
        said = {**given, "format": format, "reference": reference}
        if superfluous := [name for name, value in said.items() if value is not None]:
            raise CheckpointError(
                f"{source} is a folder of plain-vit's own, whose config.json says everything: leave out "
                + ", ".join(superfluous)
            )
        with _clear_errors(source):
            recipe = _recipe_of_ours(source, checkpoint)
            processor = processor_from_transformers(preprocessor, settings) if preprocessor else None
        notes: list[str] = []
        counters: tuple[str, ...] = ()
    else:
        check_layer_numbers(checkpoint.tensors, os.fspath(source))
        stripped = strip_wrappers(checkpoint.tensors)
        tensors = LazyTensors({short: checkpoint.tensors.entries[name] for name, short in stripped.names.items()})
        names = (tensors, FORMATS, str(source), checkpoint.tensors, checkpoint.wrappers)
        origin = recognise(*names) if format is None else _format(format)
        require(origin, *names)
        opening = _Opening(origin, tensors, settings)
        with _clear_errors(source):
            published = None if hints.architecture else _published_architecture(Path(source), origin)
            if published is not None:
                hints = replace(hints, architecture=str(published.value))
            known = None if reference is None else Reference.read(reference)
            description = opening.describe(hints) if known is None else opening.try_reference(hints, known)
            _check_hints(hints, description, str(source))
            if published is not None:
                others = [inference for inference in description.inferences if inference.field != published.field]
                description = replace(description, inferences=[published, *others])
            _check_settled(description, hints, origin)
            recipe = opening.recipe(description)
            processor, assumed = origin.image_processor(description.config, settings, preprocessor, hints)
            _check_pixels(hints, processor)
        notes = [*(f"wrapper {name!r} removed" for name in stripped.prefixes), *opening.notes, *assumed]
        counters = stripped.counters
    config = cast(PlainViTConfig, recipe.whole.config)
    if id2label is not None:
        _name_labels(config, id2label)
    unused = ignored_names(recipe.tensors, recipe.description.ignored)
    report = Report(
        source=os.fspath(source),
        format=PlainViTConfig.model_type if recipe.origin is None else recipe.origin.name,
        layout=recipe.description.layout,
        config=config,
        inferences=recipe.description.inferences,
        given_hints=given,
        used=len(recipe.tensors) - len(unused),
        ignored=unused | dict.fromkeys(counters, "a counter of the training"),
        notes=[*checkpoint.notes, *notes],
    )
    return recipe, Converted(recipe.model, processor, report)


@contextmanager
def _clear_errors(source: str | os.PathLike[str]) -> Iterator[None]:
    """Say that it is the settings that make no sense, in whatever way building a model of them fails."""
    try:
        yield
    except AmbiguousCheckpointError as error:
        raise AmbiguousCheckpointError(error.message, error.candidates, error.otherwise, str(source)) from error
    except PlainViTError:
        raise
    except (
        *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError),
        StrictDataclassError,
    ) as error:
        raise CheckpointError(f"{source}: its settings and the hints describe no model: {error}") from error


def _recipe_of_ours(source: str | os.PathLike[str], checkpoint: Checkpoint) -> _Recipe:
    """Read a folder of our own, in which every tensor of the model has to be there and nothing else."""
    # The code that travels with what is made of it is ours, whatever the folder names.
    config = PlainViTConfig.from_dict(
        {name: value for name, value in (checkpoint.config or {}).items() if name != "auto_map"}
    )
    named = config.architectures or ["PlainViTForImageClassification"]
    if len(named) != 1 or named[0] not in modeling.__all__:
        raise CheckpointError(f"{source} is of {named}: expected one of {', '.join(modeling.__all__)}")
    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = getattr(modeling, named[0])(config)
    rows = [Row(name, name) for name in model.state_dict()]
    return _Recipe(model, rows, checkpoint.tensors, Description(config), None)


def _check_hints(hints: Hints, description: Description, source: str) -> None:
    """Refuse hints that the source contradicts or that nothing was read from."""
    if faults := unheeded(hints, description):
        raise CheckpointError(f"the hints contradict {source}: {'; '.join(faults)}. Correct these, or leave them out")


def _check_settled(description: Description, hints: Hints, origin: Format) -> None:
    """Hold a format to its duty: what no tensor shows is said by the caller or by a source that it names."""
    named = {inference.field for inference in description.inferences} | hints.given().keys()
    if unsettled := [field for field in UNSEEN if field not in named]:
        raise RuntimeError(f"the format {origin.name} names no source of {', '.join(unsettled)}: that is a fault in it")


def _check_pixels(hints: Hints, processor: Any) -> None:
    """Refuse a mean or deviation that the image processor does not have."""
    for name in ("image_mean", "image_std"):
        said, found = getattr(hints, name), getattr(processor, name, None)
        if said is not None and (found is None or tuple(said) != tuple(found)):
            raise CheckpointError(f"{name} is {tuple(said)}, and the source prepares pixels with {found}: leave it out")


def _published_architecture(path: Path, origin: Format) -> Inference | None:
    """Return the architecture of a published file, known by its name, which carries the beginning of its own hash.

    Raises:
        CheckpointError: The file has the name of a published one, and other bytes.
    """
    name = path.name.partition(".")[0]
    if name not in origin.published_files or not path.is_file():
        return None
    expected = name.rpartition("-")[2]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()[: len(expected)]
    architecture = origin.published_files[name]
    if found != expected:
        raise CheckpointError(
            f"{path} has the name of a published file, whose SHA-256 begins with {expected}; its own begins with "
            f"{found}. Download it again, or, if it holds other weights of that model, give architecture={architecture}"
        )
    return Inference("architecture", architecture, f"the SHA-256 of the published file {name}")


Way = tuple[Hints, Description]
SHOW_PROGRESS_FROM = 20  # ways to read a checkpoint
MAX_WAYS = 1000  # of a ViT-B each takes a tenth of a second and more for one image


class _Opening:
    """A checkpoint of another package that is being opened, perhaps in more than one way."""

    def __init__(self, origin: Format, tensors: LazyTensors, settings: Mapping[str, Any]):
        self.origin = origin
        self.tensors = tensors
        self.settings = settings
        self.notes: list[str] = []

    def describe(self, hints: Hints) -> Description:
        """Describe it in the one way that it can be understood."""
        return self.origin.describe_checkpoint(self.tensors.meta(), self.settings, hints)

    def recipe(self, description: Description) -> _Recipe:
        """Return how the checkpoint becomes ours if it is this."""
        tensors = LazyTensors(_without_prefix(self.tensors.entries, description.prefix))
        rows = self.origin.rows(description.config, description.layout)
        return _Recipe(empty_model(description.config), rows, tensors, description, self.origin, self.settings)

    def try_reference(self, hints: Hints, reference: Reference) -> Description:
        """Describe it in every way that it can be understood, and return the one that gives these logits.

        Raises:
            VerificationError: None does.
            AmbiguousCheckpointError: Several do, or there are too many to try.
        """
        tolerance = reference.tolerance(entry.dtype for entry in self.tensors.entries.values())
        tried: list[tuple[float, Hints, Description]] = []
        impossible: list[Exception] = []
        faults: list[Exception] = []
        nearest = math.inf
        for ways in self.possible(hints, reference, impossible):
            tried += self.distances(ways, reference, faults)
            nearest = min((attempt[0] for attempt in tried), default=math.inf)
            if nearest <= tolerance:
                break
        if not tried:
            fault = next(iter([*faults, *impossible]))
            if isinstance(fault, PlainViTError):
                raise fault
            raise VerificationError(f"the reference cannot be of this checkpoint: {fault}") from fault
        if not nearest <= tolerance:
            raise VerificationError(
                f"none of the {len(tried)} ways to read the checkpoint gives the logits of the reference; the nearest "
                f"is off by {nearest:.1e} of the largest ({tolerance:.0e} are allowed). Take pixels as the model saw "
                "them, and logits of the same dtype as they were computed in, in evaluation mode."
            )
        asked = [field.name for field in fields(Hints)
                 if any(getattr(one[1], field.name) != getattr(hints, field.name) for one in tried)]  # fmt: skip
        # A second way is as good where rounding explains what sets it apart from the reference or from the first.
        fitting = [attempt for attempt in tried if attempt[0] <= max(TOLERANCE, 10 * nearest)]
        # Several hints may describe one and the same model.
        fitting = list({str(attempt[2].config): attempt for attempt in reversed(fitting)}.values())[::-1]
        if len(fitting) > 1:
            remaining = {name: list({getattr(one[1], name): None for one in fitting}) for name in asked}
            raise AmbiguousCheckpointError(
                f"the reference fits {len(fitting)} of {len(tried)} ways to read the checkpoint; take more images, of "
                "several kinds, or give:",
                {name: values for name, values in remaining.items() if len(values) > 1},
            )
        ((distance, complete, description),) = fitting
        found = f"{REFERENCE}, off by {distance:.1e} of its largest logit; {len(tried)} ways were tried"
        inferences = [Inference(name, getattr(complete, name), found) for name in asked]
        if distance > TOLERANCE:
            self.notes.append(
                f"the reference is off by {distance:.1e} of its largest logit, more than float32 in another order of "
                f"operations explains ({TOLERANCE}): if it is of the same dtype, try layer_norm_eps= or hidden_act="
            )
        others = [inference for inference in description.inferences if inference.field not in asked]
        return replace(description, inferences=[*others, *inferences])

    def possible(self, hints: Hints, reference: Reference, impossible: list[Exception]) -> Iterator[list[Way]]:
        """Yield the ways to complete the hints: first by what is asked for, then by what settles it otherwise.

        What cannot be is added to the impossible.
        """
        try:
            yield [(hints, self.describe(hints))]
        except AmbiguousCheckpointError as error:
            if not error.candidates or not error.candidates.keys() <= EXPECTED.keys() - {"key"}:
                raise
            if "patch_size" in error.candidates and hints.num_channels is None:  # they settle each other
                hints = replace(hints, num_channels=reference.pixel_values.shape[1])
                yield from self.possible(hints, reference, impossible)
                return
            for candidates in filter(None, (error.candidates, error.otherwise)):
                yield self.completed(hints, candidates, reference, impossible)

    def completed(
        self, hints: Hints, candidates: Mapping[str, Sequence[Any]], reference: Reference, impossible: list[Exception]
    ) -> list[Way]:
        """Return every way to give all of these arguments and those that are then asked for; none that is impossible.

        Raises:
            AmbiguousCheckpointError: There are too many, or an argument has no candidates.
        """
        height, width = reference.pixel_values.shape[-2:]
        if "image_size" in candidates and hints.image_size is None:
            others = {name: values for name, values in candidates.items() if name != "image_size"}
            ways = self.completed(replace(hints, image_size=(height, width)), others, reference, impossible)
            if ways or not candidates["image_size"]:
                return ways
        count = math.prod(map(len, candidates.values()))
        if not 0 < count <= MAX_WAYS:
            raise AmbiguousCheckpointError(
                f"there are {count} ways to read the checkpoint, and a reference tells apart up to {MAX_WAYS}: give "
                "some of these, as the model was built:",
                candidates,
            )
        ways = []
        for values in itertools.product(*candidates.values()):
            settled: dict[str, Any] = dict(zip(candidates, values, strict=True))
            complete = replace(hints, **settled)
            try:
                ways.append((complete, self.describe(complete)))
            except AmbiguousCheckpointError as error:
                further = {name: value for name, value in error.candidates.items() if name not in settled}
                if not further:
                    raise
                ways += self.completed(complete, further, reference, impossible)
            except (PlainViTError, ValueError) as error:
                impossible.append(error)
        return ways

    def distances(
        self, ways: Sequence[Way], reference: Reference, faults: list[Exception]
    ) -> list[tuple[float, Hints, Description]]:
        """Return how far each way is from the logits.

        A way in which the weights do not load, or the pixels do not fit, adds to the faults.
        """
        converted: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}
        known: dict[str, float | None] = {}  # of models that compute the same
        distances = []
        for complete, description in tqdm(ways, desc="trying", unit="way", disable=len(ways) < SHOW_PROGRESS_FROM):
            computed = description.config.to_dict()
            if description.config.position_resampling == "truncate":  # the grid of the table is not looked at
                del computed["image_size"]
            key = str(computed)
            if key not in known:
                known[key] = None
                try:
                    known[key] = reference.distance(self.recipe(description).load(converted))
                except (PlainViTError, ValueError) as error:
                    faults.append(error)
            if (distance := known[key]) is not None:
                distances.append((distance, complete, description))
        return distances


def _without_empty_head(model: PreTrainedModel) -> PreTrainedModel:
    # Without a classifier DeiT's output is still the mean of two tokens, which only the classification model takes.
    headed = model.config.num_labels or model.config.use_distillation_token
    return model if headed or isinstance(model, modeling.PlainViTForMaskedImageModeling) else cast(Any, model).vit


def _of_one_dtype(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dtypes = {str(tensor.dtype) for tensor in state.values()}
    if len(dtypes) > 1:
        raise CheckpointError(f"the tensors are of several dtypes, {', '.join(sorted(dtypes))}: save them in one")
    return state


def _without_prefix(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Name a source's tensors without the prefix of its model; those that do not have it keep their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _our_tensors(model: PreTrainedModel, drop: Collection[str] = ()) -> tuple[PlainViTConfig, dict[str, torch.Tensor]]:
    """Return the configuration and the tensors by the names in the tables; without a classifier `num_labels` is 0."""
    config = cast(PlainViTConfig, copy.deepcopy(model.config))
    config.architectures = [type(model).__name__]
    tensors: dict[str, torch.Tensor] = model.state_dict()
    if isinstance(model, modeling.PlainViTModel):
        config.num_labels = 0
        tensors = {f"vit.{name}": tensor for name, tensor in tensors.items()}
    for name in drop:
        if name not in DROPPABLE:
            raise ExportError(f"drop names {name!r}: what no output reads, and can be left out, is {list(DROPPABLE)}")
        part = DROPPABLE[name]
        if isinstance(model, part.read_by):
            raise ExportError(f"{name} cannot be dropped from a {type(model).__name__}: its outputs read it")
        if not getattr(config, part.field):
            raise ExportError(f"{name} cannot be dropped: the model has none; leave it out of drop=")
        setattr(config, part.field, False)
        tensors = {other: tensor for other, tensor in tensors.items() if other != part.tensor}
    return config, tensors


def _save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what `save_pretrained` writes beside the weights: config.json and the code that travels."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=cast(Any, model.config))
    model.config.save_pretrained(folder)


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _name_labels(config: PlainViTConfig, labels: Mapping[int, str] | Sequence[str]) -> None:
    named = dict(labels.items() if isinstance(labels, Mapping) else enumerate(labels))
    if sorted(named) != list(range(config.num_labels or 0)):
        raise CheckpointError(f"id2label names {len(named)} labels: expected {config.num_labels}, numbered from 0")
    config.id2label = named
    try:
        config.check_labels()
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    config.label2id = {name: index for index, name in named.items()}


def _verified(converted: Converted, recipe: _Recipe, theirs: SourceModule | str) -> Converted:
    """Compare our model with the source's own, stage by stage, in float32, or note why it is not.

    Raises:
        VerificationError: The largest difference is beyond the tolerance.
    """
    report, model = converted.report, converted.model
    if isinstance(theirs, str):
        return replace(converted, report=replace(report, notes=[*report.notes, f"not verified: {theirs}"]))
    notes = [*report.notes, *recipe.fill(theirs)]
    ours = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    differences = compare_models(theirs.module.float().eval(), ours, probe_images(report.config))
    report = replace(report, differences=differences, notes=notes, is_independent=theirs.is_independent)
    if any(not stage.relative <= TOLERANCE for stage in differences):
        raise VerificationError(f"our model and the source's own differ by more than {TOLERANCE}:\n{report}")
    return replace(converted, report=report)


def free_memory() -> int:
    """Return the bytes that a process can still take, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
