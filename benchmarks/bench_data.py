"""Benchmark of training data: from JPEG files to normalised batches, in images per second of one core.

python -m benchmarks.bench_data --write
"""

import io
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.transforms import v2
from transformers import ViTImageProcessor

from benchmarks.harness import Case, compare, parser, rates, report
from plain_vit.training.data.augmentation import AugmentedImages, training_transform
from plain_vit.training.data.sampling import ShuffledStream

SIZES = {(500, 375): 64, (3000, 2000): 16}  # (width, height) of the files: number of files per turn
BATCH = 16
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

NOTES = """Files of a data set of `datasets` become batches of 16, 224 pixels wide: a random part of 0.08 to 1 of the
area, mirrored half the time, normalised. One process, one thread, no workers. "transformers' example" has the
transforms of `run_image_classification.py`, "torchvision v2" those of torchvision's documentation, on Pillow's images;
"timm" is `create_transform(is_training=True)` without colour jitter. transformers' processor neither crops nor mirrors:
it resizes the whole image. "Decoding alone" is what Pillow needs for the whole files and nothing else. The files
(quality 90) are scikit-learn's two photographs in either size, with the noise of a camera (a deviation of 3 levels):
{sizes}."""


def photographs(size: tuple[int, int]) -> datasets.Dataset:
    """Return JPEG files of one size, each with different noise."""
    rng = np.random.default_rng(0)
    files = []
    for number in range(SIZES[size]):
        photograph = PIL.Image.fromarray(load_sample_images().images[number % 2])
        levels = np.asarray(photograph.resize(size, PIL.Image.Resampling.LANCZOS), dtype=np.float32)
        noisy = (levels + rng.normal(0, 3, levels.shape)).round().clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        PIL.Image.fromarray(noisy).save(file, "JPEG", quality=90)
        files.append({"bytes": file.getvalue(), "path": None})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": files, "label": [0] * len(files)}, features=features)


def passes(loader: DataLoader, finish: Callable[[torch.Tensor], torch.Tensor] = lambda pixels: pixels) -> Callable:
    """Return a function that iterates over a loader once."""
    torch.set_num_threads(1)

    def turn() -> None:
        for batch in loader:
            pixels = finish(batch["pixel_values"])
            assert pixels.shape == (BATCH, 3, 224, 224)
            assert pixels.dtype == torch.float32

    return turn


def ours(size: tuple[int, int]) -> Callable[[], object]:
    """Return a function that prepares images like `examples/finetune_image_classification.py`."""
    images = photographs(size)
    processor = ViTImageProcessor(image_mean=MEAN, image_std=STD)
    transform = training_transform(processor, crop_scale=0.08, horizontal_flip=0.5)
    sampler = ShuffledStream(len(images), length=len(images), seed=0)
    loader = DataLoader(AugmentedImages(images, transform, seed=0), batch_size=BATCH, sampler=sampler)
    return passes(loader, transform.normalize)


def one_by_one(size: tuple[int, int], kind: str) -> Callable[[], object]:
    """Return a function that prepares images one by one with the transforms of another package."""
    steps: dict[str, Callable[[], Callable[[PIL.Image.Image], torch.Tensor]]] = {
        "transformers' example": lambda: v1.Compose(
            [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        ),
        "torchvision v2": lambda: v2.Compose(
            [
                v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
            ]
        ),
        "timm": lambda: create_transform(
            224, is_training=True, color_jitter=0.0, interpolation="bilinear", mean=MEAN, std=STD
        ),
    }  # fmt: skip
    transform = steps[kind]()
    return passes(loader_of(size, lambda images: torch.stack([transform(image) for image in images])))


def processor(size: tuple[int, int]) -> Callable[[], object]:
    """Return a function that prepares batches with transformers' processor."""
    made = ViTImageProcessor(image_mean=MEAN, image_std=STD)
    return passes(loader_of(size, lambda images: made(images, return_tensors="pt")["pixel_values"]))


def loader_of(size: tuple[int, int], prepare: Callable[[list[PIL.Image.Image]], torch.Tensor]) -> DataLoader:
    """Return a loader as in transformers' example, with `with_transform`."""

    def pixels(rows: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": list(prepare([image.convert("RGB") for image in rows["image"]]))}

    images: Any = photographs(size).with_transform(pixels)
    return DataLoader(images, batch_size=BATCH, shuffle=True)


def decoding(size: tuple[int, int]) -> Callable[[], object]:
    """Return a function that decodes the files."""
    files = [row["bytes"] for row in photographs(size).cast_column("image", datasets.Image(decode=False))["image"]]
    return lambda: [PIL.Image.open(io.BytesIO(file)).load() for file in files]


def main() -> None:
    options = parser(__doc__).parse_args()
    results, weights = [], []
    for size, count in SIZES.items():
        label = f"{size[0]} x {size[1]}"
        stored = photographs(size).cast_column("image", datasets.Image(decode=False))["image"]
        weights.append(f"{sum(len(row['bytes']) for row in stored) / count / 1000:.0f} kB at {label}")
        peers = ("transformers' example", "torchvision v2", "timm")
        cases = [Case(f"{label}: {kind}", one_by_one, {"size": size, "kind": kind}, images=count) for kind in peers]
        cases.append(Case(f"{label}: transformers' processor", processor, {"size": size}, images=count))
        cases.append(Case(f"{label}: plain-vit", ours, {"size": size}, images=count))
        cases.append(Case(f"{label}: decoding alone", decoding, {"size": size}, images=count))
        results += compare(cases, options.turns)
    notes = f"{NOTES.format(sizes=', '.join(weights))}\n\n{rates(results, 'the first')}"
    report("data", "Training images from JPEG files", notes, results, options.write)


if __name__ == "__main__":
    main()
