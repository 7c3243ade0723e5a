"""Snapshots of a model during training: attention over a few images and position embeddings, every few epochs.

Legend: `B` images, `h w` patch grid.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...analysis import attention_maps, displayable, position_similarity, token_layout
from ...analysis.embeddings import PositionSimilarity
from ...analysis.inspection import plain
from ...conversion import from_module
from ...errors import AnalysisError, DataError, PlainViTError
from ...files.staging import staged_file
from ...system.extras import needs
from ..data.decoding import ProcessedImages, as_files, read_rows
from ..data.inputs import images_in
from ..loop import Loop

with needs("plain-vit[train]"):
    from datasets import Dataset
    from matplotlib.figure import Figure

    from ...analysis.plots import plot_attention_heads, plot_position_similarity, spread
    from ...analysis.words import class_labels

IMAGES = 6  # number of images, of different classes
COLUMNS = 8  # snapshots side by side; of more, evenly spaced ones are drawn
Picture = Figure | str  # a figure, or the reason why there is none


class Snapshots:
    """Attention and position embeddings of a model at some steps, stored as arrays in the run folder.

    Args:
        loop: The started loop; only the main process takes snapshots.
        split: Rows with an `image` and a `label`; the first image of each of some classes is used.
        class_names: Names of the classes, in order.
        image_processor: The model's image processor.
        every: Epochs between snapshots; 0 takes none.
    """

    def __init__(
        self, loop: Loop[Any], split: Dataset, class_names: list[str], image_processor: Any, *, every: float
    ) -> None:
        self.run, self.class_names, self.image_processor = loop.run.path, class_names, image_processor
        self.folder = self.run / "report" / "snapshots"
        self.epochs, self.total_steps = loop.schedule.epochs, loop.schedule.total_steps
        self.asked, self.sharded = every > 0, loop.learner.shard
        marks = np.arange(0, self.epochs, every) if self.asked and not self.sharded else np.array([])
        steps = {round(float(mark) / self.epochs * self.total_steps) for mark in marks}
        self.steps = frozenset(steps | {self.total_steps}) if steps else frozenset()
        self.taking = loop.accelerator.is_main_process
        labels = np.asarray(split["label"][:])
        if labels.ndim == 1:
            present = np.unique(labels)
            chosen = present[spread(len(present), IMAGES)]
            self.rows = [int(np.flatnonzero(labels == label)[0]) for label in chosen]
            names = class_labels(class_names)
            self.names = [names[label] for label in chosen]
        else:
            self.rows = spread(len(labels), IMAGES)
            self.names = [f"row {row}" for row in self.rows]
        self.files = as_files(split)

    def pixels(self) -> list[torch.Tensor]:
        """Return the normalised images (C, H, W), each in its own size.

        Raises:
            DataError: An image cannot be read.
        """
        batch = ProcessedImages(self.image_processor)(read_rows(self.files, self.rows))
        for broken in filter(None, batch["broken"]):
            raise DataError(f"An image cannot be read: {broken}. Repair it, or train with --corrupted skip.")
        return images_in(batch, self.image_processor)

    def take(self, step: int, model: nn.Module) -> None:
        """Take a snapshot after this step if one is due."""
        if step not in self.steps or not self.taking:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: values.astype(np.float16) for name, values in look(model, self.pixels()).items()}
        with staged_file(self.folder / f"step_{step:08d}.npz", force=True) as file, file.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)

    def attention(self, model: nn.Module) -> Picture:
        """Draw the attention over each image, from the first snapshot to the last."""
        taken = self._taken("attention", model)
        if isinstance(taken, str):
            return taken
        maps = np.stack([values.astype(np.float32) for values in taken.values()], axis=1)  # B snapshots h w
        images = self.pixels()
        (h, w), patch_size = maps.shape[-2:], token_layout(_as_plain_vit(model), images[0][None]).patch_size
        shown = [displayable(image[None], self.image_processor)[0] for image in images]
        pictures = _on_one_canvas(shown, (h * patch_size[0], w * patch_size[1]), fill=1)
        columns = [self._when(step) for step in taken]
        return plot_attention_heads(pictures, maps, row_names=self.names, column_names=columns)

    def positions(self, model: nn.Module) -> dict[str, Picture]:
        """Draw the similarity of the position embeddings at the first and the last snapshot."""
        taken = self._taken("positions", model)
        if isinstance(taken, str):
            return {"": taken}
        steps = list(taken)
        pictures: dict[str, Picture] = {}
        for step in dict.fromkeys((steps[0], steps[-1])):
            similarity = PositionSimilarity(taken[step].astype(np.float32), np.empty((0, 0, 0)))
            pictures[self._when(step)] = plot_position_similarity(similarity)
        return pictures

    def _when(self, step: int) -> str:
        return f"epoch {step / self.total_steps * self.epochs:.1f}" if step else "start"

    def _taken(self, name: str, model: nn.Module) -> Mapping[int, np.ndarray] | str:
        """Return evenly spaced stored arrays of a name by step, or the reason why there are none."""
        if not self.asked:
            return "Snapshots were disabled: `--picture_every 1` takes one after each epoch."
        if self.sharded:
            return "The weights were sharded over processes, so no process has the whole model during training."
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


def _attention(model: nn.Module, images: Sequence[torch.Tensor]) -> np.ndarray:
    maps = [attention_maps(model, image[None], layers=-1)[0, 0].mean(axis=0) for image in images]
    return _on_one_canvas(maps, tuple(np.max([each.shape for each in maps], axis=0)), fill=0)


def _on_one_canvas(images: Sequence[np.ndarray], size: tuple[int, ...], *, fill: float) -> np.ndarray:
    """Place images (H, W, ...) at the upper left of canvases of this (height, width)."""
    canvas = np.full((len(images), *size, *images[0].shape[2:]), fill, dtype=images[0].dtype)
    for place, image in zip(canvas, images, strict=True):
        place[: len(image), : image.shape[1]] = image[: size[0], : size[1]]
    return canvas


def _positions(model: nn.Module, images: Sequence[torch.Tensor]) -> np.ndarray:
    return position_similarity(model, token_layout(model, images[0][None].to(plain(model).device)).grid_size).patches


LOOKS = {"attention": _attention, "positions": _positions}


def look(model: nn.Module, images: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
    """Compute the arrays of a snapshot.

    Args:
        model: Any image classifier.
        images: Normalised images (C, H, W), each in its own size.

    Returns:
        `attention`: attention of the last layer from the class token (or all patches), averaged over heads, of shape
        (B, h, w), padded with zeros for smaller images; `positions`: cosine similarity of the position embeddings, of
        shape (h, w, h, w). Arrays that do not apply to the model are omitted.
    """
    seen: dict[str, np.ndarray] = {}
    try:
        vit = _as_plain_vit(model)
    except AnalysisError:
        return seen
    for name, function in LOOKS.items():
        try:
            seen[name] = function(vit, images)
        except AnalysisError:
            continue
    return seen


def _as_plain_vit(model: nn.Module) -> nn.Module:
    """Return the model if it is a plain ViT, or an equivalent plain ViT if it is a ViT of another package.

    Raises:
        AnalysisError: The model is not a supported ViT.
    """
    try:
        return plain(model)
    except AnalysisError:
        pass
    try:
        return from_module(model)
    except PlainViTError as error:
        raise AnalysisError(f"{type(model).__name__} is not a supported ViT") from error
