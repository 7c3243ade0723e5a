"""Snapshots of a model that learns: its attention over a few images and its position embeddings, every few epochs.

Legend: `B` images, `h w` patch grid.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...analysis import attention_maps, displayable, position_similarity, token_layout
from ...analysis.embeddings import PositionSimilarity
from ...analysis.inspection import plain
from ...conversion import from_module
from ...errors import AnalysisError, DataError, PlainViTError
from ...extras import needs
from ...files.staging import staged_file
from ..data.decoding import as_files, read_rows
from ..loop import Loop

with needs("plain-vit[train]"):
    from accelerate import DistributedType
    from datasets import Dataset
    from matplotlib.figure import Figure

    from ...analysis import descriptions
    from ...analysis.plots import plot_attention_heads, plot_position_similarity, spread
    from ...analysis.words import class_labels

IMAGES = 6  # of different classes
COLUMNS = 8  # snapshots side by side; of more an even choice is drawn


@dataclass(frozen=True)
class OptionalFigure:
    """A picture of a run, or why there is none.

    Args:
        figure: None where there is nothing to draw.
        reason: Why there is nothing.
        seen: What is seen in the figure, in words, for those who cannot see it.
    """

    figure: Figure | None
    reason: str = ""
    seen: str = ""


class Snapshots:
    """What a model attends to at some of its steps, kept as arrays in the folder of the run.

    Args:
        loop: Of the run, begun; the main process alone looks.
        split: Rows with an `image` and a `label`, whose first images of some classes are looked at.
        class_names: In the order of the classes.
        image_processor: The model's.
        every: Epochs between snapshots; 0 takes none.
    """

    def __init__(
        self, loop: Loop[Any], split: Dataset, class_names: list[str], image_processor: Any, *, every: float
    ) -> None:
        self.run, self.class_names, self.image_processor = loop.run.path, class_names, image_processor
        self.folder = self.run / "report" / "snapshots"
        self.epochs, self.total_steps = loop.schedule.epochs, loop.schedule.total_steps
        divided = loop.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        self.asked, self.sharded = every > 0, divided or loop.learner.shard
        marks = np.arange(0, self.epochs, every) if self.asked and not self.sharded else np.array([])
        steps = {round(float(mark) / self.epochs * self.total_steps) for mark in marks}
        self.steps = frozenset(steps | {self.total_steps}) if steps else frozenset()
        self.taking = loop.accelerator.is_main_process
        labels = np.asarray(split["label"][:])
        present = np.unique(labels)
        chosen = present[spread(len(present), IMAGES)]
        self.rows = [int(np.flatnonzero(labels == label)[0]) for label in chosen]
        names = class_labels(class_names)
        self.names = [names[label] for label in chosen]
        self.files = as_files(split)

    def pixels(self) -> torch.Tensor:
        """Return the images that are looked at, normalised, of shape (B, C, H, W).

        Raises:
            DataError: One of them cannot be read.
        """
        rows = read_rows(self.files, self.rows)
        for broken in (row["broken"] for row in rows if row["broken"]):
            raise DataError(f"An image cannot be read: {broken}. Mend it, or train with --corrupted skip.")
        images = [row["image"] for row in rows]
        return self.image_processor(images, return_tensors="pt")["pixel_values"]

    def take(self, step: int, model: nn.Module) -> None:
        """Keep what the model attends to after this step, if it is one of those to look at."""
        if step not in self.steps or not self.taking:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: values.astype(np.float16) for name, values in look(model, self.pixels()).items()}
        with staged_file(self.folder / f"step_{step:08d}.npz", force=True) as file, file.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)

    def attention(self, model: nn.Module) -> OptionalFigure:
        """Draw the attention over each image, from the first snapshot to the last."""
        taken = self._taken("attention", model)
        if isinstance(taken, str):
            return OptionalFigure(None, taken)
        maps = np.stack([values.astype(np.float32) for values in taken.values()], axis=1)  # B snapshots h w
        pixels = self.pixels()
        (h, w), (height, width) = maps.shape[-2:], token_layout(_as_plain_vit(model), pixels).patch_size
        pictures = displayable(pixels[..., : h * height, : w * width], self.image_processor)
        columns = [self._when(step) for step in taken]
        figure = plot_attention_heads(pictures, maps, row_names=self.names, column_names=columns)
        return OptionalFigure(figure, seen=descriptions.of_a_table_of_maps(maps, self.names, columns))

    def positions(self, model: nn.Module) -> dict[str, OptionalFigure]:
        """Draw how alike the position embeddings are, at the first and at the last snapshot."""
        taken = self._taken("positions", model)
        if isinstance(taken, str):
            return {"": OptionalFigure(None, taken)}
        steps = list(taken)
        pictures = {}
        for step in dict.fromkeys((steps[0], steps[-1])):
            similarity = PositionSimilarity(taken[step].astype(np.float32), np.empty((0, 0, 0)))
            seen = descriptions.of_positions(similarity)
            pictures[self._when(step)] = OptionalFigure(plot_position_similarity(similarity), seen=seen)
        return pictures

    def _when(self, step: int) -> str:
        return f"epoch {step / self.total_steps * self.epochs:.1f}" if step else "start"

    def _taken(self, name: str, model: nn.Module) -> Mapping[int, np.ndarray] | str:
        """Return what was kept under a name at each step, an even choice, or why nothing was."""
        if not self.asked:
            return "No snapshots were asked for: `--picture_every 1` takes one after each epoch."
        if self.sharded:
            return "The weights were sharded over processes, and no process sees a whole model while it learns."
        files = {step: self.folder / f"step_{step:08d}.npz" for step in sorted(self.steps)}
        files = {step: file for step, file in files.items() if file.exists()}
        steps = [list(files)[number] for number in spread(len(files), COLUMNS)]
        arrays: dict[int, np.ndarray] = {}
        for step in steps:
            with np.load(files[step], allow_pickle=False) as stored:
                if name in stored:
                    arrays[step] = stored[name]
        if arrays:
            return arrays
        try:
            LOOKS[name](_as_plain_vit(model), self.pixels())
        except AnalysisError as error:
            return f"{error}."
        return "No snapshot was taken."


def _attention(model: nn.Module, pixels: torch.Tensor) -> np.ndarray:
    return attention_maps(model, pixels, layers=-1)[:, 0].mean(axis=1)


def _positions(model: nn.Module, pixels: torch.Tensor) -> np.ndarray:
    return position_similarity(model, token_layout(model, pixels.to(plain(model).device)).grid_size).patches


LOOKS = {"attention": _attention, "positions": _positions}


def look(model: nn.Module, pixels: torch.Tensor) -> dict[str, np.ndarray]:
    """Return what there is to see of a model.

    Args:
        model: Any image classifier.
        pixels: Normalised, of shape (B, C, H, W).

    Returns:
        `attention` of the last layer from the class token (or from all patches), mean of the heads, of shape (B, h, w);
        `positions`, the cosine between the position embeddings, of shape (h, w, h, w). What the model does not have is
        left out.
    """
    seen: dict[str, np.ndarray] = {}
    try:
        vit = _as_plain_vit(model)
    except AnalysisError:
        return seen
    for name, function in LOOKS.items():
        try:
            seen[name] = function(vit, pixels)
        except AnalysisError:
            continue
    return seen


def _as_plain_vit(model: nn.Module) -> nn.Module:
    """Return the plain ViT that the model is, or one of the same numbers where the model is a ViT of another package.

    Raises:
        AnalysisError: It is no ViT that plain-vit knows.
    """
    try:
        return plain(model)
    except AnalysisError:
        pass
    try:
        return from_module(model)
    except PlainViTError as error:
        raise AnalysisError(f"In a {type(model).__name__} there is no ViT to look into") from error
