"""Benchmark of image processors: from opened images to pixels, in images per second of one core.

python -m benchmarks.bench_image_processor --write
"""

from collections.abc import Callable
from typing import Any

import PIL.Image
import torch
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from transformers import ViTImageProcessor, ViTImageProcessorPil

from benchmarks.bench_data import MEAN, STD
from benchmarks.harness import Case, Result, compare, parser, rates, report
from plain_vit import PlainViTImageProcessor, PlainViTImageProcessorPil

SIZES = {(500, 375): 16, (3000, 2000): 2}  # (width, height) of the images: number of images per batch
SIDE = {"height": 224, "width": 224}

NOTES = """A list of opened, decoded images becomes a batch of 224 x 224 pixels: the shorter side resized to 256 by a
bicubic filter, the centre cut out, normalised with ImageNet's mean and deviation. One process, one thread. "timm" is
`create_transform` with `crop_pct=0.875`, its images stacked; "plain-vit" is `PlainViTImageProcessor` with nothing asked
for, which makes the same pixels bit for bit; "pil" is the class of `backend="pil"`, which makes them too; "torch" is
`resize_with="torch"`, up to 7 levels of 255 away. "transformers" is its `ViTImageProcessor`, "transformers pil" is its
class of `backend="pil"`. The images are scikit-learn's two photographs in either size.

{rates}"""

SETTINGS: dict[str, Any] = {
    "size": {"shortest_edge": 256}, "crop_size": SIDE, "do_center_crop": True, "resample": 3, "image_mean": MEAN,
    "image_std": STD,
}  # fmt: skip
PROCESSORS: dict[str, Callable[[], Any]] = {
    "plain-vit": lambda: PlainViTImageProcessor(**SETTINGS),
    "plain-vit pil": lambda: PlainViTImageProcessorPil(**SETTINGS),
    "plain-vit torch": lambda: PlainViTImageProcessor(**SETTINGS, resize_with="torch"),
    "transformers": lambda: ViTImageProcessor(**SETTINGS),
    "transformers pil": lambda: ViTImageProcessorPil(**SETTINGS),
}


def opened(size: tuple[int, int]) -> list[PIL.Image.Image]:
    """Return scikit-learn's two photographs, alternating, resized to one size."""
    photographs = [PIL.Image.fromarray(levels).resize(size) for levels in load_sample_images().images]
    return [photographs[number % 2] for number in range(SIZES[size])]


def batches(size: tuple[int, int], kind: str) -> Callable[[], object]:
    """Return a function that prepares one batch."""
    torch.set_num_threads(1)
    images = opened(size)
    if kind == "timm":
        transform: Any = create_transform(224, interpolation="bicubic", mean=MEAN, std=STD, crop_pct=0.875)
        return lambda: torch.stack([transform(image) for image in images])
    processor = PROCESSORS[kind]()
    return lambda: processor(images, return_tensors="pt")["pixel_values"]


def resizing(size: tuple[int, int]) -> Callable[[], object]:
    """Return a function that only resizes a batch with Pillow."""
    images = opened(size)
    width, height = size
    short = (256 * width // height, 256)
    return lambda: [image.resize(short, PIL.Image.Resampling.BICUBIC) for image in images]


def main() -> None:
    options = parser(__doc__).parse_args()
    results: list[Result] = []
    for size, count in SIZES.items():
        label = f"{size[0]} x {size[1]}"
        cases = [
            Case(f"{label}: {kind}", batches, {"size": size, "kind": kind}, images=count)
            for kind in ("timm", *PROCESSORS)
        ]
        cases.append(Case(f"{label}: Pillow's resizing alone", resizing, {"size": size}, images=count))
        results += compare(cases, options.turns)
    notes = NOTES.format(rates=rates(results, "timm"))
    report("image-processor", "Opened images to pixels", notes, results, options.write)


if __name__ == "__main__":
    main()
