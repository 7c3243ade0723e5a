"""Look inside the trained plain ViTs of a study: attention distance by layer and head, filters, positions [Figure 7].

    python -m studies.inside positions       # for the models with the first seed, which must be in runs/

The arrays are appended to results/inside-STUDY.jsonl, one line per model, and the picture is drawn from that file.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from transformers import AutoImageProcessor, AutoModelForImageClassification

from plain_vit.analysis import (
    attention_distance,
    average_over_images,
    patch_filters,
    position_similarity,
    relative_position_biases,
)
from plain_vit.analysis.attention import patch_distances
from plain_vit.analysis.plots import LINES
from plain_vit.analysis.streams import pixel_batches
from plain_vit.analysis.words import plain_figure
from plain_vit.errors import AnalysisError
from plain_vit.training.data import load_labelled_split
from studies.draw import PICTURES
from studies.results import append_result, chosen_rate, read_results
from studies.run import queue_of_models
from studies.study import REPORT, ROOT, Run
from studies.work import Queue

IMAGES = 128  # images that the attention distance is averaged over, as in the paper
FILTERS = 8


def main(words: Sequence[str] | None = None) -> int:
    """Analyse the models that have no result yet, draw the picture, and return the exit code."""
    queue = queue_of_models(words, __doc__)
    study, file = queue.study, queue.results / f"inside-{queue.study.name}.jsonl"
    for run in reported(queue):
        if run.key not in read_results(file) and queue.is_kept(run):
            try:
                seen = look(queue.folder(run), run)
            except AnalysisError as error:  # not a plain ViT
                print(f"{run.name}: {error}")
                continue
            append_result(file, {"key": run.key, "contender": run.contender, **seen})
            print(f"looked at {run.name}")
    lines = read_results(file)
    shown = {run.contender: lines[run.key] for run in reported(queue) if run.key in lines}
    if not shown:
        print(f"no model of {study.name} is in {queue.runs}, and {file.name} has none", file=sys.stderr)
        return 1
    picture = PICTURES / f"study_{study.name}_inside.png"
    draw(shown).savefig(picture, dpi=110)
    print(picture.relative_to(ROOT))
    return 0


def reported(queue: Queue) -> list[Run]:
    """Return the run with the first seed of each contender whose learning rate is chosen."""
    study, done = queue.study, read_results(queue.file)
    chosen = {contender: chosen_rate(study, contender, done) for contender in study.contenders}
    return [study.run(name, REPORT, rate, study.seeds[0]) for name, rate in chosen.items() if rate is not None]


def look(folder: Path, run: Run) -> dict[str, Any]:
    """Return attention distances, patch filters and positions of a trained model, rounded.

    Args:
        folder: folder of the run.
        run: the run, on whose test images the model is analysed.

    Returns:
        `distances`: mean attention distance of each head of each layer, in pixels; `uniform`: the distance for uniform
        attention; `filters`: the first principal components of the patch filters, grey; `positions`: cosine similarity
        of the position of the central patch with all others, or the mean of the relative biases around it, or None.
    """
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    images, _ = load_labelled_split(run.options["dataset"])
    batches = pixel_batches(images[:IMAGES]["image"], AutoImageProcessor.from_pretrained(folder))
    distances = average_over_images(attention_distance, model, batches, progress=False)
    config = model.config
    return {
        "distances": np.round(distances, 3).tolist(),
        "uniform": round(float(patch_distances(config.grid_size, config.patch_shape).mean()), 3),
        "filters": np.round(patch_filters(model, FILTERS).components.mean(axis=1), 3).tolist(),
        "positions": _positions(model),
    }


def _positions(model: Any) -> list[list[float]] | None:
    height, width = model.config.grid_size
    try:
        if model.config.relative_position_bias != "none":
            biases = relative_position_biases(model).mean(axis=(0, 1))  # around the central patch
            top, left = (height - 1) // 2, (width - 1) // 2
            return np.round(biases[height - 1 - top :, width - 1 - left :][:height, :width], 3).tolist()
        return np.round(position_similarity(model).patches[height // 2, width // 2], 3).tolist()
    except AnalysisError:  # without positions
        return None


def draw(shown: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw positions, filters and attention distances of each contender, one row each."""
    figure = plain_figure(9.0, 0.5 + 1.55 * len(shown))
    axes = figure.subplots(len(shown), 3, squeeze=False, width_ratios=[1, 3.2, 3])
    longest = max(np.max(line["distances"]) for line in shown.values())
    for (name, line), (left, middle, right) in zip(shown.items(), axes, strict=True):
        left.set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
        if line["positions"] is None:
            left.text(0.5, 0.5, "none to draw", ha="center", va="center", fontsize=8)
        else:
            left.imshow(line["positions"], cmap="viridis")
        middle.imshow(_strip(line["filters"]), cmap="gray")
        for axis in (left, middle):
            axis.set_xticks([])
            axis.set_yticks([])
        for layer, heads in enumerate(line["distances"]):
            right.scatter([layer] * len(heads), heads, s=14, color=LINES[0], linewidths=0)
        right.axhline(line["uniform"], color=LINES[6], linestyle=":", linewidth=1)
        right.set(ylim=(0, 1.1 * longest), xticks=range(len(line["distances"])))
        right.tick_params(labelsize=7)
        right.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_title("positions", fontsize=9)
    axes[0, 1].set_title(f"first {FILTERS} components of the patch filters", fontsize=9)
    axes[0, 2].set_title("attention distance of each head,\nin pixels, by layer", fontsize=9)
    return figure


def _strip(filters: Sequence[Any]) -> np.ndarray:
    """Return filters side by side, each scaled to its largest value, with gaps."""
    parts = []
    for each in np.asarray(filters):
        parts += [each / np.abs(each).max(), np.full((len(each), 1), np.nan)]
    return np.concatenate(parts[:-1], axis=1)


if __name__ == "__main__":
    sys.exit(main())
