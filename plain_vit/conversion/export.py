"""Export to checkpoints of other packages: `to_checkpoint`, and the parts that can be dropped."""

import copy
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import AmbiguousCheckpointError, ExportError, OutputError, PlainViTError, printable
from ..files.staging import staged_file, staged_folder
from ..files.tensors import Place
from .open import inspect_checkpoint
from .plan import ConversionPlan
from .registry import format_named
from .report import Converted
from .tables.compare_modules import MASKED, RATES, lost_fields
from .tables.engine import revert
from .tables.format import Format, Hints, StateDict
from .unseen import Described, class_names, unseen_differences

# Parts of our model that an export may drop, each with the reason. Only the masked-image model depends on them.
DROPPABLE = {"mask_token": "it replaces hidden patches in pre-training, and no output of this model reads it"}


@dataclass(frozen=True)
class Export:
    """The result of an export.

    Args:
        path: The file or folder written.
        format: One of `FORMATS`.
        dropped: Parts of the model that were dropped, each with the reason.
        changed: What differs from the model when the export is opened again: settings for other image sizes and for
            training, other settings for the same outputs, class names, image processing.
    """

    path: str
    format: str
    dropped: Mapping[str, str]
    changed: Sequence[str] = ()

    def __str__(self) -> str:
        dropped = [f"  dropped {name}: {why}" for name, why in self.dropped.items()]
        changed = [f"  opened again: {what}" for what in self.changed]
        return printable("\n".join([f"written: {self.path}", *dropped, *changed]))


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
    into: str | os.PathLike[str] | None = None,
    into_key: str | None = None,
) -> Export:
    """Write our model as a checkpoint of another package; every tensor is copied bit for bit.

    Args:
        model: A `PlainViTForImageClassification`, or a `PlainViTModel`; for transformers also a
            `PlainViTForMaskedImageModeling`.
        path: A new file or folder, depending on the format: `.pt` or `.safetensors` for vit_pytorch, a folder for timm
            and transformers.
        format: One of `FORMATS`; its package need not be installed.
        image_processor: The processor to write with the model, if the format supports it.
        layout: The layout of the format, such as the release of vit-pytorch or the class of transformers (default: the
            latest, or the first class that can represent the model).
        force: Replace an existing output.
        sources: Files and folders that the model came from, which the output must not replace.
        drop: Parts to drop if the target cannot represent them, as named in `DROPPABLE`.
        into: The checkpoint of a larger model, a folder or file of safetensors or a GGUF file, that contains such a
            model: a copy of it is written, with this model in place of its own and everything else byte for byte. A
            classifier that was added is left out.
        into_key: The place in that checkpoint, such as "model.vision_tower", if it contains several models.

    Returns:
        The path written, the dropped parts, and what differs from the model when the export is opened again.

    Raises:
        ExportError: lists every part that the target cannot represent, and which of them can be dropped; what differs
            from the model in `into`; or the tensors that its dtypes cannot hold exactly.
        OutputError: The output cannot be written; the previous content is unchanged.
    """
    target, (config, tensors) = format_named(format), our_tensors(model, drop)
    suffix = Path(path).suffix
    if into is None and into_key is not None:
        raise ExportError(f"into_key={into_key!r} is a place in another checkpoint: give into, or omit it")
    if into is not None and not Path(into).exists():
        raise ExportError(f"into={os.fspath(into)!r} does not exist: give the folder or the file of the larger model")
    is_file = bool(target.suffixes) if into is None else Path(into).is_file()
    suffixes = target.suffixes if into is None else (Path(into).suffix,)
    if is_file and suffix not in suffixes:
        what = f"a checkpoint of {format}" if into is None else "the copy of into"
        raise OutputError(f"{path} ends in {suffix!r}: {what} is a file, {' or '.join(suffixes)}")
    if config.num_hidden_layers == 0 and format != "transformers":
        raise ExportError(f"the model has no layers (num_hidden_layers=0), whose names tell a checkpoint of {format}")
    ours = Described(config, image_processor)
    staging = staged_file if is_file else staged_folder
    kept = () if into is None else (into,)
    dropped = {name: DROPPABLE[name] for name in drop}
    with staging(path, force=force, sources=(*sources, *kept)) as staged, naming_droppable_parts(config):
        if into is None:
            written = target.write(config, tensors, staged, image_processor, layout)
        else:
            written, has_classifier = _write_into_copy(target, ours, tensors, staged, Path(into), layout, into_key)
            dropped |= {"classifier": "the larger model has no such part"} if has_classifier else {}
        has_processor = not target.suffixes
        changed = changed_by_writing(staged, ours, layout=written or layout, has_processor=has_processor, key=into_key)
    return Export(os.fspath(path), format, dropped, changed)


def _write_into_copy(
    target: Format,
    model: Described,
    tensors: StateDict,
    staged: Path,
    whole: Path,
    layout: str | None,
    key: str | None,
) -> tuple[str | None, bool]:
    """Write a copy of a larger checkpoint with our model in place of its own.

    Returns:
        The layout there, and whether our model has a classifier that is left out, as the larger model has none.
    """
    whole = Path(os.path.realpath(whole))
    try:
        plan, _ = _inspect_as(model, whole, layout, key, target.name)
    except AmbiguousCheckpointError as error:
        if "key" not in error.candidates:
            raise
        places = " or ".join(f"into_key={place!r}" for place in error.candidates["key"])
        raise ExportError(f"{whole} contains several models: give {places}") from error
    there, config = plan.description.config, copy.deepcopy(model.config)
    vars(config).update({name: getattr(there, name) for name in RATES})
    if drops_classifier := bool(config.num_labels and not there.num_labels):
        config.num_labels = 0
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("classifier.")}
    if lost := lost_fields(config, lambda: there):
        raise ExportError(f"the model in {whole} is another one:", lost)
    plan.check()
    faults, held = [], list[tuple[Place, torch.Tensor]]()
    for name, tensor in revert(plan.rows, tensors, config).items():
        place = plan.tensors.entries[name].place
        if place is None:
            faults.append(f"{name!r} is quantised, or in a file of torch")
        elif torch.equal(tensor.to(place.dtype).to(tensor.dtype), tensor):
            held.append((place, tensor.detach().cpu().contiguous().to(place.dtype)))
        else:
            dtype = str(place.dtype).removeprefix("torch.")
            faults.append(
                f"{name!r} is {dtype} there and has other values: round the model first, model.to(torch.{dtype})"
            )
    if faults:
        expected = "expected safetensors, or F32, F16, BF16 of GGUF"
        raise ExportError(f"{whole} cannot hold this model exactly ({expected}):", faults)
    if whole.is_dir():
        shutil.copytree(whole, staged, copy_function=shutil.copyfile, dirs_exist_ok=True)
    else:
        shutil.copyfile(whole, staged)
    for place, tensor in held:
        with open(staged / place.path.relative_to(whole), "r+b") as file:
            file.seek(place.offset)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return plan.description.layout, drops_classifier


def changed_by_writing(
    path: Path, model: Described, *, layout: str | None, has_processor: bool, key: str | None = None
) -> list[str]:
    """Inspect an exported checkpoint and return how it differs from its model, apart from the outputs.

    Args:
        path: The checkpoint.
        model: The model.
        layout: The layout that was written, if the format has several.
        has_processor: Whether the format stores image processing.
        key: The place of the model in the checkpoint, if it contains several.

    Raises:
        ExportError: The checkpoint does not open, even with the settings of the model.
    """
    try:
        opened = _inspect_as(model, path, layout, key)[1]
    except PlainViTError as error:
        raise ExportError(f"the exported checkpoint cannot be opened again: {error}") from error
    theirs = Described(opened.report.config, opened.image_processor if has_processor else None)
    lines = unseen_differences(model, theirs)
    if class_names(model.config) and not class_names(theirs.config):
        lines.append("the names of the classes are not stored")
    if model.image_processor is not None and theirs.image_processor is None:
        lines.append("the image processing is not stored")
    return lines


def _inspect_as(
    model: Described, path: Path, layout: str | None, key: str | None, format: str | None = None
) -> tuple[ConversionPlan, Converted]:
    """Inspect a checkpoint, and take the settings that it does not contain from a model."""
    answers: dict[str, Any] = {} if key is None else {"key": key}
    while True:
        try:
            return inspect_checkpoint(path, Hints(**answers), format)
        except AmbiguousCheckpointError as error:
            sets = [
                {name: _answer(name, model, layout) for name in asked} for asked in (error.candidates, error.otherwise)
            ]
            said = next((each for each in sets if each and None not in each.values()), {})
            if not said or said.keys() & answers.keys():
                raise
            answers |= said


def _answer(name: str, model: Described, layout: str | None) -> Any:
    """Return the model's value for a setting that its checkpoint does not contain; None if it has none."""
    config = model.config
    head_dim = config.attention_shape[1]
    if name in ("image_mean", "image_std"):  # these affect no output
        return getattr(model.image_processor, name, None) or [0.5] * config.num_channels
    said = {
        "image_size": config.image_shape,
        "patch_size": config.patch_shape,
        "head_dim": head_dim,
        "layout": layout,
        "attention_scale": head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
    }
    return said.get(name, getattr(config, name, None))


@contextmanager
def naming_droppable_parts(config: PlainViTConfig) -> Iterator[None]:
    """Add the remedy to an ExportError about parts that can be dropped."""
    try:
        yield
    except ExportError as error:
        masked = MASKED in (config.architectures or [])
        if masked or not any(line.startswith("use_mask_token") for line in error.parts):
            raise
        remedy = (
            "no output of this model depends on mask_token: drop it with drop=('mask_token',), or --drop mask_token"
        )
        raise ExportError(f"{error.message} ({remedy})", error.parts) from error


def our_tensors(model: PreTrainedModel, drop: Collection[str] = ()) -> tuple[PlainViTConfig, dict[str, torch.Tensor]]:
    """Return a model's config and its tensors, named as in the tables; without a classifier `num_labels` is 0."""
    config = cast(PlainViTConfig, copy.deepcopy(model.config))
    config.architectures = [type(model).__name__]
    tensors: dict[str, torch.Tensor] = model.state_dict()
    if isinstance(model, modeling.PlainViTModel):
        config.num_labels = 0
        tensors = {f"vit.{name}": tensor for name, tensor in tensors.items()}
    for name in drop:
        if name not in DROPPABLE:
            raise ExportError(f"drop has {name!r}: expected one of {list(DROPPABLE)}, which no output depends on")
        if isinstance(model, modeling.PlainViTForMaskedImageModeling):
            raise ExportError(f"{name} cannot be dropped from a {type(model).__name__}: its outputs depend on it")
        if not config.use_mask_token:
            raise ExportError(f"{name} cannot be dropped: the model has none; remove it from drop=")
        config.use_mask_token = False
        tensors = {other: tensor for other, tensor in tensors.items() if other != "vit.embeddings.mask_token"}
    return config, tensors
