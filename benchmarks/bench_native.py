"""Benchmark of fine-tuning on images of many aspect ratios: resized to squares, or with their aspect ratio kept.

    python -m benchmarks.bench_native --task characters        # or proportions

Accuracies are from three seeds; images/s is training images per CPU second of the whole run, including evaluations.
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

from plain_vit.conversion import from_checkpoint
from plain_vit.training.data.glyphs import CHARACTERS, IMAGE_SIZE, render_glyphs

EXAMPLES = Path(__file__).parent.parent / "examples"
IMAGES = {"train": 60 * len(CHARACTERS), "test": 30 * len(CHARACTERS)}
LONGEST = 4  # largest ratio of the sides
PATCHES = 36  # of 4 x 4 pixels: as many as in the model's image size, 24 x 24
RATIOS = (0.5, 0.7, 1, 1.4, 2)  # width of an ellipse over its height
SEEDS = (0, 1, 2)
COMMON: dict[str, Any] = {"epochs": 4, "batch_size": 64, "evaluations": 1, "checkpoints_kept": 0, "report": False,
                          "position_resampling": "bicubic_antialias"}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "squares": {},
    "aspect ratio kept": {"native_aspect_ratio": True, "max_num_patches": PATCHES},
}
NOTES = f"""Characters: each image is a canvas of {IMAGE_SIZE} pixels by {IMAGE_SIZE} to {LONGEST * IMAGE_SIZE}, upright
or lying, with one rendered character of {IMAGE_SIZE} x {IMAGE_SIZE} pixels somewhere in it, of {len(CHARACTERS)}
classes. Proportions: such a canvas with a filled ellipse, whose width is 1/2, 0.7, 1, 1.4 or 2 times its height: the
class. {IMAGES["train"]:,} images to train on and {IMAGES["test"]:,} to test on. The model is the shipped glyph
checkpoint, fine-tuned for {COMMON["epochs"]} epochs, its positions resampled. Both ways give it at most {PATCHES}
patches of 4 x 4 pixels: a square of 24 x 24 pixels, or as large a grid of the image's shape."""


def canvas(draw: np.random.Generator, level: int) -> PIL.Image.Image:
    """Return a blank image of random shape."""
    sides = IMAGE_SIZE, int(IMAGE_SIZE * LONGEST ** draw.random())
    return PIL.Image.new("L", sides if draw.random() < 0.5 else sides[::-1], level)


def place(draw: np.random.Generator, free: PIL.Image.Image, width: int, height: int) -> tuple[int, int]:
    """Return a random position (left, top) at which something of this size fits into an image."""
    return int(draw.integers(free.width - width + 1)), int(draw.integers(free.height - height + 1))


def characters(split: str, seed: int) -> Dataset:
    """Return characters on canvases of many shapes."""
    glyphs, labels = render_glyphs(IMAGES[split], seed=(seed, 7))
    draw = np.random.default_rng((seed, 8))
    images = []
    for glyph in glyphs:
        image = canvas(draw, int(np.median(glyph)))
        image.paste(PIL.Image.fromarray(glyph), place(draw, image, IMAGE_SIZE, IMAGE_SIZE))
        images.append(image)
    return labelled(images, labels, list(CHARACTERS))


def proportions(split: str, seed: int) -> Dataset:
    """Return ellipses on canvases of many shapes."""
    draw = np.random.default_rng((seed, 9))
    labels, images = draw.integers(len(RATIOS), size=IMAGES[split]), []
    for label in labels:
        image, longer = canvas(draw, int(draw.integers(0, 60))), int(draw.integers(12, IMAGE_SIZE))
        width, height = round(longer * min(1, RATIOS[label])), round(longer * min(1, 1 / RATIOS[label]))
        left, top = place(draw, image, width, height)
        PIL.ImageDraw.Draw(image).ellipse((left, top, left + width, top + height), fill=int(draw.integers(160, 256)))
        images.append(image)
    return labelled(images, labels, [f"{ratio:g}" for ratio in RATIOS])


def labelled(images: list[PIL.Image.Image], labels: np.ndarray, names: list[str]) -> Dataset:
    """Return a labelled split."""
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features)


TASKS = {"characters": characters, "proportions": proportions}


def measure(task: str, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the accuracy and the CPU seconds of each run, by method."""
    sys.path.insert(0, str(EXAMPLES))
    from finetune_image_classification import FinetuneArguments, finetune

    DatasetDict({split: TASKS[task](split, seed) for seed, split in enumerate(IMAGES)}).save_to_disk(folder / "data")
    shipped = EXAMPLES / "checkpoints"
    converted = from_checkpoint(
        shipped / "glyphs_vit.pt", num_attention_heads=4, image_size=24, patch_size=4,
        id2label=dict(enumerate((shipped / "glyphs_labels.txt").read_text().splitlines())),
    )  # fmt: skip
    converted.model.save_pretrained(folder / "model")
    processor: Any = converted.image_processor
    processor.save_pretrained(folder / "model")
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    for seed in SEEDS:
        for number, (name, options) in enumerate(RUNS.items()):
            before = time.process_time()
            arguments = FinetuneArguments(
                model=str(folder / "model"), dataset=str(folder / "data"), seed=seed,
                output_dir=str(folder / f"{number}-{seed}"), **COMMON, **options,
            )  # fmt: skip
            accuracy = finetune(arguments).values["accuracy"]
            results[name].append((accuracy, time.process_time() - before))
    return results


def table(results: dict[str, list[tuple[float, float]]]) -> str:
    """Return the results as Markdown."""
    lines = ["| images | test accuracy, mean of 3 seeds | lowest to highest | images/s |", "|---|---:|---:|---:|"]
    trained = COMMON["epochs"] * IMAGES["train"]
    for name, runs in results.items():
        accuracies, seconds = zip(*runs, strict=True)
        rate = trained / statistics.median(seconds)
        spread = f"{min(accuracies):.1%} to {max(accuracies):.1%}"
        lines.append(f"| {name} | {statistics.mean(accuracies):.1%} | {spread} | {rate:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="characters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, today = os.getloadavg()[0], datetime.datetime.now(datetime.UTC).date()
    with tempfile.TemporaryDirectory() as folder:
        shown = table(measure(options.task, Path(folder)))
    machine = f"{platform.machine()}, 1 thread, torch {torch.__version__}, load {load:.1f} before the runs, {today}"
    text = f"# Aspect ratio kept: {options.task}\n\n{NOTES}\n\n{shown}\n\n{machine}\n"
    print(text)


if __name__ == "__main__":
    main()
