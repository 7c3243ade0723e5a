"""Export to another package's checkpoint: `to_checkpoint`, and the parts that may be dropped."""

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import ExportError, OutputError
from ..files.staging import staged_file, staged_folder
from .compare_modules import MASKED
from .sources import format_named


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
    target, (config, tensors) = format_named(format), our_tensors(model, drop)
    suffix = Path(path).suffix
    if target.suffixes and suffix not in target.suffixes:
        raise OutputError(
            f"{path} ends in {suffix!r}: a checkpoint of {format} is a file, {' or '.join(target.suffixes)}"
        )
    staging = staged_file if target.suffixes else staged_folder
    with staging(path, force=force, sources=sources) as staged, naming_droppable_parts(config):
        target.write(config, tensors, staged, image_processor, layout)
    return Export(os.fspath(path), format, {name: DROPPABLE[name].reason for name in drop})


@contextmanager
def naming_droppable_parts(config: PlainViTConfig) -> Iterator[None]:
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


def our_tensors(model: PreTrainedModel, drop: Collection[str] = ()) -> tuple[PlainViTConfig, dict[str, torch.Tensor]]:
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
