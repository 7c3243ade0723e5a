"""Open checkpoints of every source: `from_checkpoint` and `convert_checkpoint`."""

import copy
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    MappingError,
    PlainViTError,
    VerificationError,
    counted,
    option_words,
)
from ..files.other_files import is_exported
from ..files.reading import (
    ADAPTER_CONFIG,
    Checkpoint,
    check_layer_numbers,
    losses_and_metrics,
    read_checkpoint,
    strip_wrappers,
)
from ..files.safetensors import save_state_dict
from ..files.tensors import LazyTensors
from .heads import read_heads
from .parity import compare_models, probe_images
from .plan import ConversionPlan, SourceModule
from .recognition import recognise, refuse_adapters, refuse_settings, refuse_unknown_architecture, require
from .reference import ForeignCheckpoint, Reference
from .registry import FORMATS, format_named, located
from .report import REFERENCE, TOLERANCE, Converted, Report
from .sources.transformers.pixels import processor_from_transformers
from .tables.compare_modules import meta_device
from .tables.engine import Row
from .tables.format import HEAD, UNSEEN, Description, Format, Hints, Inference, check_hints, name_labels

NAME_OF_A_TENSOR = re.compile(r"[./]")
MAX_SHARD_SIZE = "50GB"  # the default of transformers


def from_checkpoint(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    revision: str | None = None,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    id2label: Mapping[int, str] | Sequence[str] | None = None,
    verify: bool = False,
    mmap: bool = False,
    **hints: Any,
) -> Converted:
    """Open a checkpoint of any supported source as our model, without guessing or silently dropping anything.

    Weights in safetensors files, and in torch files of the Hub's cache, are memory-mapped, as in transformers, and
    copied where they change. Other files are read into memory.

    Args:
        source: A `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt`, `.npz` or `.gguf` file, a folder, or a Hub id. A
            folder of plain-vit's own must contain exactly the tensors of its model.
        format: One of `FORMATS`, if the names of the tensors do not determine it.
        revision: Branch, tag or commit of a Hub repository.
        reference: Pixels of shape (B, C, H, W) and the source's logits for them (B, num_labels), in evaluation mode.
            Settings that the checkpoint does not contain are found by trying all candidates.
        id2label: Names of the labels.
        verify: Compare with the source's own model, if its package is installed.
        mmap: Memory-map other torch files too, like `torch.load(mmap=True)`: several times as fast, without a copy in
            memory. The file must not change while the model or a part of it is in use: `torch.save` to the same path,
            for example, truncates the file, which kills the process.
        **hints: Fields of `Hints`, for settings that the checkpoint does not contain: `num_attention_heads`,
            `layer_norm_eps`, `architecture` and so on.

    Returns:
        The model in evaluation mode, its image processor and a report.

    Raises:
        CheckpointError: The checkpoint cannot be read, or a hint contradicts it.
        UnknownFormatError: The checkpoint is of no known source.
        AmbiguousCheckpointError: Settings are missing; lists them with their candidates.
        MappingError: Tensors are missing, left over or of a wrong shape.
        VerificationError: The outputs differ from those of the source's own model, or from the reference.
    """
    plan, converted = inspect_checkpoint(source, Hints(id2label=id2label, **hints), format, revision, reference)
    theirs = plan.source_module() if verify else None
    converted = replace(converted, model=plan.load(mmap=mmap))
    return converted if theirs is None else _verified(converted, plan, theirs)


def convert_checkpoint(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], *, verify: bool = True, **options: Any
) -> Converted:
    """Convert a checkpoint of any supported source to a Hugging Face folder, with a progress bar in bytes per second.

    If the models are not compared, the tensors are streamed from file to file, one row of the table at a time.

    Args:
        source: As for `from_checkpoint`.
        folder: An existing empty folder to write to, such as the folder from `staging.staged_folder`.
        verify: Compare with the source's own model first, if its package is installed and both fit in memory.
        **options: As for `from_checkpoint`, except `mmap`.

    Returns:
        As `from_checkpoint`. If the models are not compared, the model's parameters are on the meta device.

    Raises:
        PlainViTError: As from `from_checkpoint`. The folder is then incomplete.
    """
    other = [options.pop(name, None) for name in ("format", "revision", "reference")]
    plan, converted = inspect_checkpoint(source, Hints(**options), *other)
    theirs = plan.source_module() if verify else None
    if isinstance(theirs, SourceModule):
        converted = _verified(replace(converted, model=plan.load()), plan, theirs)
        tensors: Any = converted.model.state_dict()
    else:
        converted = replace(converted, model=plan.check())
        converted = converted if theirs is None else _verified(converted, plan, theirs)
        tensors = plan.stream()
    model = converted.model
    _save_config(model, Path(folder))
    # The same files and metadata as from `save_pretrained`, byte for byte.
    path, metadata = Path(folder, "model.safetensors"), {"format": "pt"}
    save_state_dict(tensors, path, metadata, like=model.state_dict(), max_shard_size=MAX_SHARD_SIZE)
    if converted.image_processor is not None:
        converted.image_processor.save_pretrained(folder)
    return converted


def inspect_checkpoint(
    source: str | os.PathLike[str],
    hints: Hints,
    format: str | None = None,
    revision: str | None = None,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    beside_adapter: bool = False,
) -> tuple[ConversionPlan, Converted]:
    """Inspect a checkpoint and plan its conversion; the model stays on the meta device.

    An adapter in the folder, which transformers would apply, is an error unless `beside_adapter` is True: then only
    the weights beside it are read.
    """
    named, (source, own_format) = source, located(source)
    format = own_format if format is None else format
    if is_exported(source):
        raise CheckpointError(
            f"{source} was exported to an engine, and is no checkpoint: open it with "
            "plain_vit.inference.open_exported, or give the model that it was exported from"
        )
    given = {name: value for name, value in hints.given().items() if name != "id2label"}  # too long for a command
    options = {"format": format, "revision": revision, **given}
    with _printing_commands(named, options, printed=reference is None):
        prefer = "open_clip" if format == "open_clip" else ""
        checkpoint = read_checkpoint(source, key=hints.key, revision=revision, prefer=prefer)
        if checkpoint.has_adapter and not beside_adapter:
            raise CheckpointError(
                f"{source} has an adapter of peft beside its weights ({ADAPTER_CONFIG}), which transformers applies: "
                "merge it (PeftModel.from_pretrained(model, folder).merge_and_unload()) and save the result, or copy "
                "the other files to a folder of their own to convert the model without it"
            )
        if (checkpoint.config or {}).get("model_type") == PlainViTConfig.model_type:
            others = {"format": format, "reference": reference}
            if superfluous := [*given, *(name for name, value in others.items() if value is not None)]:
                raise CheckpointError(
                    f"{source} is a folder of plain-vit's own, whose config.json contains everything: omit "
                    + ", ".join(superfluous)
                )
            found = _inspect_ours(source, checkpoint)
        else:
            found = _inspect_foreign(source, checkpoint, hints, format, reference)
        plan = found.plan
        config = cast(PlainViTConfig, plan.whole.config)
        _check_channels(found.image_processor, config.num_channels, source)
        if hints.id2label is not None:
            name_labels(config, hints.id2label)
        unused = plan.ignored
        report = Report(
            source=os.fspath(source),
            format=PlainViTConfig.model_type if plan.origin is None else plan.origin.name,
            layout=plan.description.layout,
            config=config,
            inferences=plan.description.inferences,
            given_hints=given,
            used=len(plan.tensors) - len(unused),
            ignored={**unused, **found.beside},
            notes=[*checkpoint.notes, *found.notes, *plan.notes, *_other_dtype(checkpoint, plan)],
            stated_by=plan.description.stated_by,
            fits_reference=reference is not None,
        )
        return plan, Converted(plan.model, found.image_processor, report)


class Inspected(NamedTuple):
    """An inspected checkpoint.

    Args:
        plan: The plan of its conversion.
        image_processor: Processor with the preprocessing of the source; None if unknown.
        notes: Notes for the report.
        beside: Tensors that are not part of the model and affect none of its outputs, each with the reason.
    """

    plan: ConversionPlan
    image_processor: Any | None
    notes: Sequence[str] = ()
    beside: Mapping[str, str] = MappingProxyType({})


def _inspect_ours(source: str | os.PathLike[str], checkpoint: Checkpoint) -> Inspected:
    """Inspect a folder of plain-vit's own."""
    settings, preprocessor = checkpoint.config or {}, checkpoint.preprocessor_config
    with explain_errors(source):
        plan = _plan_of_ours(source, checkpoint)
        return Inspected(plan, processor_from_transformers(preprocessor, settings) if preprocessor else None)


def _inspect_foreign(
    source: str | os.PathLike[str],
    checkpoint: Checkpoint,
    hints: Hints,
    format: str | None,
    reference: tuple[torch.Tensor, torch.Tensor] | None,
) -> Inspected:
    """Inspect a checkpoint of another package."""
    settings, preprocessor = checkpoint.config or {}, checkpoint.preprocessor_config or {}
    check_layer_numbers(checkpoint.tensors, os.fspath(source))
    losses = losses_and_metrics(checkpoint.tensors)
    stripped = strip_wrappers(name for name in checkpoint.tensors if name not in losses)
    tensors = LazyTensors({short: checkpoint.tensors.entries[name] for name, short in stripped.names.items()})
    refuse_adapters(tensors, str(source))
    inner, tensors, around = _model_inside(source, settings, tensors)
    names = (tensors, FORMATS, str(source), checkpoint.tensors, checkpoint.wrappers)
    if format is None:
        refuse_settings(inner, FORMATS, str(source))
    origin = recognise(*names) if format is None else format_named(format)
    owner = next((one for one in FORMATS.values() if one.owns(inner)), origin) if format is None else origin
    if owner is origin:  # else config.json names another source's model, whose files have these names too
        require(origin, *names)
    origin = owner
    refuse_unknown_architecture(hints, origin, FORMATS, str(source))
    unread = origin.unread(tensors.meta())
    tensors = LazyTensors({name: entry for name, entry in tensors.entries.items() if name not in unread})
    heads = read_heads(origin, tensors, hints, checkpoint.wrappers)
    foreign = ForeignCheckpoint(origin, heads.tensors, inner)
    if heads.dropped:
        hints = replace(hints, drop=(HEAD,))
    with explain_errors(source, bare=not settings):
        published = None if hints.architecture else _published_architecture(Path(source), origin)
        if published is not None:
            hints = replace(hints, architecture=str(published.value))
        known = None if reference is None else Reference.read(reference)
        if heads.fault is not None:
            with suppress(AmbiguousCheckpointError):  # other errors take precedence over the head's
                foreign.describe(hints)
            raise heads.fault
        description = foreign.describe(hints) if known is None else foreign.try_reference(hints, known)
        check_hints(hints, description, str(source))
        settled = heads.inferences if known is None else [replace(one, source=REFERENCE) for one in heads.inferences]
        description = replace(description, inferences=[*description.inferences, *settled])
        if published is not None:
            others = [inference for inference in description.inferences if inference.field != published.field]
            description = replace(description, inferences=[published, *others], stated_by=published.source)
        _check_settled(description, hints, origin)
        plan = foreign.plan(description)
        processor, assumed = origin.image_processor(description.config, settings, preprocessor, hints)
        _check_pixels(hints, processor)
    notes = [*(f"wrapper {name!r} removed" for name in stripped.prefixes), *foreign.notes, *assumed]
    beside = dict.fromkeys(stripped.counters, "a step counter of the training")
    beside |= dict.fromkeys(losses, "of a loss or a metric of the training")
    beside |= around
    return Inspected(plan, processor, notes, {**beside, **unread, **heads.dropped})


def _model_inside(
    source: str | os.PathLike[str], settings: Mapping[str, Any], tensors: LazyTensors
) -> tuple[Mapping[str, Any], LazyTensors, dict[str, str]]:
    """Return the model inside a larger one, such as the vision tower of LLaVA; a model that is not, is unchanged.

    Returns:
        The contents of its `config.json`; its tensors, without prefix; and the others, each with the reason.

    Raises:
        AmbiguousCheckpointError: There are several.
    """
    found = {
        place: one
        for format in FORMATS.values()
        for place, one in format.models_inside(settings, tensors.meta()).items()
    }
    if not found:
        return settings, tensors, {}
    if len(found) > 1:
        places = [prefix.removesuffix(".") for prefix in found]
        raise AmbiguousCheckpointError(f"{source} contains several models; which one should be used?", {"key": places})
    ((prefix, inner),) = found.items()
    own = {name.removeprefix(prefix): entry for name, entry in tensors.entries.items() if name.startswith(prefix)}
    others = [name for name in tensors.entries if not name.startswith(prefix)]
    reason = f"of the rest of the {settings['model_type']}"
    return inner, LazyTensors(own), dict.fromkeys(others, reason)


def _other_dtype(checkpoint: Checkpoint, plan: ConversionPlan) -> Iterator[str]:
    """Yield a note if transformers would compute in another dtype than the tensors have."""
    settings = checkpoint.config or {}
    said = settings.get("dtype") or settings.get("torch_dtype")
    unused = plan.ignored
    dtypes = (entry.dtype for name, entry in plan.tensors.entries.items() if name not in unused)
    held = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    if "model_type" in settings and said and held is not None and str(held) != f"torch.{said}":
        stay = "are" if plan.notes else "stay"
        yield (
            f"the weights {stay} {str(held).removeprefix('torch.')}{'' if plan.notes else ', as in the file'}; "
            f"config.json says {said}, in which transformers computes: convert them with model.to(dtype) to have its "
            "numbers"
        )


@contextmanager
def _printing_commands(source: str | os.PathLike[str], options: Mapping[str, Any], printed: bool) -> Iterator[None]:
    """Complete an AmbiguousCheckpointError, so that it prints a command with the source and the options given so far.

    Args:
        source: The checkpoint.
        options: Options of `from_checkpoint`; None if not given.
        printed: Whether to print a command: False if an argument is not available on the command line.
    """
    try:
        yield
    except AmbiguousCheckpointError as error:
        given = [word for name, value in options.items() if value is not None for word in option_words(name, value)]
        command = ["plain-vit", "convert", str(source), "OUT", *given] if printed else []
        asked = error.message, error.candidates, error.otherwise
        raise AmbiguousCheckpointError(*asked, str(source), command) from error


@contextmanager
def explain_errors(source: str | os.PathLike[str], bare: bool = False) -> Iterator[None]:
    """Turn any error from building a model into an error about the settings or about a missing tensor.

    Args:
        source: The checkpoint.
        bare: Whether the checkpoint has only tensors, so that a KeyError is about a tensor and not a setting.
    """
    try:
        yield
    except PlainViTError:
        raise
    except (
        *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError),
        StrictDataclassError,
    ) as error:
        missing = error.args[0] if isinstance(error, KeyError) else None
        if isinstance(missing, str) and (bare or NAME_OF_A_TENSOR.search(missing)):
            faults = [f"missing: {missing!r}"]
            raise MappingError(f"{source} has names of a model that opens, but not all of them:", faults) from error
        raise CheckpointError(f"{source}: its settings and the hints describe no model: {error}") from error


def _plan_of_ours(source: str | os.PathLike[str], checkpoint: Checkpoint) -> ConversionPlan:
    """Plan the conversion of a folder of plain-vit's own, which must contain exactly the tensors of the model."""
    # The output gets our code, not the code that the folder names.
    config = PlainViTConfig.from_dict(
        {name: value for name, value in (checkpoint.config or {}).items() if name != "auto_map"}
    )
    named = config.architectures or ["PlainViTForImageClassification"]
    if len(named) != 1 or named[0] not in modeling.__all__:
        raise CheckpointError(f"{source} has architectures={named}: expected one of {', '.join(modeling.__all__)}")
    with meta_device():
        model: PreTrainedModel = getattr(modeling, named[0])(config)
    rows = [Row(name, name) for name in model.state_dict()]
    return ConversionPlan(model, rows, checkpoint.tensors, Description(config), None)


def _check_settled(description: Description, hints: Hints, origin: Format) -> None:
    """Raise an error if neither an inference nor a hint of the caller is the origin of a field of `UNSEEN`."""
    named = {inference.field for inference in description.inferences} | hints.given().keys()
    if unsettled := [field for field in UNSEEN if field not in named]:
        raise RuntimeError(
            f"the format {origin.name} gives no origin of {', '.join(unsettled)}: this is a bug in the format"
        )


def _check_pixels(hints: Hints, processor: Any) -> None:
    """Raise an error if a given mean or standard deviation differs from the image processor's."""
    for name in ("image_mean", "image_std"):
        given, found = getattr(hints, name), getattr(processor, name, None)
        if given is not None and (found is None or tuple(given) != tuple(found)):
            raise CheckpointError(f"{name} is {tuple(given)}, but the preprocessing of the source has {found}: omit it")


def _check_channels(processor: Any, channels: int, source: str | os.PathLike[str]) -> None:
    """Raise an error if the image processor is for another number of channels than the model."""
    for name in ("image_mean", "image_std"):
        values = getattr(processor, name, None)
        if isinstance(values, list | tuple) and len(values) != channels:
            raise CheckpointError(
                f"{source}: {name} is {tuple(values)!r:.200}, but the model has {counted(channels, 'channel')}: give "
                f"one number per channel, such as {name}={(0.5,) * channels}, or correct preprocessor_config.json"
            )


def _published_architecture(path: Path, origin: Format) -> Inference | None:
    """Return the architecture of a published file, found by its name and confirmed by its SHA-256.

    Raises:
        CheckpointError: The file has the name of a published file, but other content.
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
            f"{path} has the name of a published file, but its SHA-256 begins with {found} instead of {expected}. "
            f"Download it again, or, if it contains other weights of that model, give architecture={architecture}"
        )
    return Inference("architecture", architecture, f"the SHA-256 of the published file {name}")


def _save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what `save_pretrained` writes beside the weights: config.json and the code."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=cast(Any, model.config))
    model.config.save_pretrained(folder)


def _verified(converted: Converted, plan: ConversionPlan, theirs: SourceModule | str) -> Converted:
    """Compare our model with the source's own, stage by stage, in float32; add a note if this is not possible.

    Raises:
        VerificationError: The largest difference exceeds the tolerance.
    """
    report, model = converted.report, converted.model
    if isinstance(theirs, str):
        return replace(converted, report=replace(report, notes=[*report.notes, f"not verified: {theirs}"]))
    notes = [*report.notes, *plan.fill(theirs)]
    ours = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    differences = compare_models(theirs.module.float().eval(), ours, probe_images(report.config))
    report = replace(report, differences=differences, notes=notes, is_independent=theirs.is_independent)
    if any(not stage.relative <= TOLERANCE for stage in differences):
        raise VerificationError(f"our model and the source's own differ by more than {TOLERANCE}:\n{report}")
    return replace(converted, report=report)
