"""Benchmark of model and image sizes: peak speed over batch sizes, and the largest batch that fits in memory.

    python -m benchmarks.bench_batch --write

It reproduces Figure 12 of Dosovitskiy et al. 2021 for the forward pass on this machine. On a GPU, use
`--device cuda --dtype bfloat16 --batches 1 16 256`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import StrMethodFormatter
from transformers import BitConfig, BitForImageClassification, PreTrainedModel

from benchmarks.harness import Case, Result, compare, name_of_run, parser, report
from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.analysis.plots import LINES
from plain_vit.analysis.words import plain_figure

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "batch.png"
SIDES = (64, 128, 224, 384)
BATCHES = (1, 4, 16, 64, 256)
MOST_PIXELS = 16 * 384**2  # of a batch on a CPU, to keep turns short
GIBIBYTE = 2**30
MEMORY = 16 * GIBIBYTE  # of a TPUv3 core, the device of the paper's figure
PARTS = {  # fields of the config, or of transformers' BiT: the ResNet with GroupNorm and standardised weights
    "ViT-Ti/16": ("vit-tiny-patch16-224", {}),
    "ViT-S/16": ("vit-small-patch16-224", {}),
    "ViT-B/32": ("vit-base-patch32-224", {}),
    "ViT-B/16": ("vit-base-patch16-224", {}),
    "R50+ViT-B/16": ("vit-base-patch16-224", {"resnet_stem": {"depths": [3, 4, 9]}}),
    "ResNet-50": (None, {}),
}

NOTES = """Forward passes in evaluation, eager, with random weights; the ResNet is transformers' Bit, with GroupNorm and
standardised weights. "Peak" is the fastest batch. The memory of an image is how much the peak of a pass grows from the
smallest batch to the largest, where that is most of the peak; how many fit beside the weights in 16 GiB, the memory of
a core of the paper's TPUv3, is computed from it and not tried."""


def build(name: str, side: int) -> PreTrainedModel:
    """Return a classifier of ImageNet's 1,000 classes with random weights."""
    known, fields = PARTS[name]
    if known is None:
        return BitForImageClassification(BitConfig(id2label={number: str(number) for number in range(1000)}))
    return PlainViTForImageClassification(PlainViTConfig.from_name(known, **fields, image_size=side, num_labels=1000))


def forward(name: str, side: int, batch: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Return a forward pass in evaluation."""
    model = build(name, side).eval().to(device, dtype)
    images = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
    return torch.inference_mode()(lambda: model(pixel_values=images).logits)


def summary(results: Mapping[tuple[str, int, int], Result], weights: Mapping[str, int]) -> dict[str, dict[int, Any]]:
    """Return the best images per second of each model and image size, the batch size that gives it, and how many fit.

    Args:
        results: Results by model, image size and batch size.
        weights: Bytes of each model's weights.
    """
    found: dict[str, dict[int, Any]] = {}
    for name, side in dict.fromkeys((name, side) for name, side, _ in results):
        own = {batch: result for (other, size, batch), result in results.items() if (other, size) == (name, side)}
        best = max(own, key=lambda batch: batch / own[batch].seconds)
        found.setdefault(name, {})[side] = (best / own[best].seconds, best, _fitting(own, MEMORY - weights[name]))
    return found


def _fitting(by_batch: Mapping[int, Result], room: int) -> int | None:
    """Return how many images fit in `room` bytes, or None if the batch size hardly changes the peak memory."""
    low, high = min(by_batch), max(by_batch)
    first, last = (by_batch[batch].device or by_batch[batch].peak for batch in (low, high))
    if first is None or last is None or last <= 2 * first:
        return None
    return int(room * (high - low) / (last - first))


def table(found: Mapping[str, Mapping[int, Any]]) -> str:
    """Return the summary as a Markdown table."""
    lines = [
        "| model | image size | peak images/s | at batch | images that fit in 16 GiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, sides in found.items():
        for side, (speed, batch, fit) in sides.items():
            lines.append(f"| {name} | {side} | {speed:.3g} | {batch} | {'-' if fit is None else f'{fit:,}'} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Mapping[int, Any]]) -> None:
    """Draw both panels of the paper's figure to docs/pictures."""
    figure = plain_figure(10.0, 3.8)
    axes = figure.subplots(1, 2)
    for place, (label, column) in enumerate((("peak images/s", 0), ("largest batch in 16 GiB", 2))):
        axis = axes[place]
        for (name, sides), color in zip(found.items(), LINES, strict=False):
            line = [(side, values[column]) for side, values in sides.items() if values[column] is not None]
            axis.plot(*zip(*line, strict=True), marker="o", markersize=4, color=color, label=name)
        axis.set(xscale="log", yscale="log", xlabel="image size (pixels)", ylabel=label)
        axis.set_xticks([*next(iter(found.values()))], [f"{side}" for side in next(iter(found.values()))])
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#dddddd", linewidth=0.6)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(PICTURE, dpi=110)


def main(words: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    options.add_argument("--sides", nargs="+", type=int, default=SIDES)
    options.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    chosen = options.parse_args(words)
    results: dict[tuple[str, int, int], Result] = {}
    weights: dict[str, int] = {}
    for name in chosen.models:
        of_all = [tensor.nbytes for tensor in build(name, 224).parameters()]
        weights[name] = sum(of_all) // (1 if chosen.dtype == "float32" else 2)
        for side in chosen.sides:
            settings = [
                (name, side, batch)
                for batch in chosen.batches
                if chosen.device != "cpu" or batch * side**2 <= MOST_PIXELS
            ]
            same = {"dtype": getattr(torch, chosen.dtype), "device": chosen.device}
            cases = [
                Case(
                    f"{name}, {side} pixels, batch {batch}",
                    forward,
                    {"name": name, "side": side, "batch": batch, **same},
                    images=batch,
                )
                for _, _, batch in settings
            ]
            results |= dict(zip(settings, compare(cases, chosen.turns, keep_memory=True), strict=True))
    found = summary(results, weights)
    if chosen.write and set(chosen.models) == set(PARTS):
        draw(found)
    notes = f"{NOTES}\n\n{table(found)}"
    report(name_of_run("batch", options, chosen), "Model and image sizes", notes, [*results.values()], chosen.write)


if __name__ == "__main__":
    main()
