"""Comparison of an engine's graph with the model: on random images of several batches and sizes, or on photographs.

Shapes: `B` batch, `C` channels, `H W` pixels, `h w` patch grid.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..configuration_plain_vit import PlainViTConfig
from ..conversion.parity import probe_images
from ..errors import VerificationError
from .calibration import ImageSets

Run = Callable[[np.ndarray], dict[str, np.ndarray]]  # from pixels to outputs by name


@dataclass(frozen=True)
class Agreement:
    """Agreement of a graph with the model on the classes of images; None without logits or labels.

    Args:
        setting: Number of images that set the ranges.
        compared: Number of other images, on which the shares are measured.
        agreement: Share of images for which graph and model predict the same class.
        accuracy_before: Share of images that the model classifies correctly.
        accuracy_after: Share of images that the graph classifies correctly.
    """

    setting: int
    compared: int
    agreement: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None

    def __str__(self) -> str:
        parts = [f"compared on {self.compared} images, {self.setting} others set the ranges"]
        if self.agreement is not None:
            parts.append(f"{self.agreement:.2%} keep their class")
        if self.accuracy_before is not None and self.accuracy_after is not None:
            parts.append(f"accuracy {self.accuracy_before:.2%} before, {self.accuracy_after:.2%} after")
        elif self.agreement is not None:
            parts.append("no accuracy, because no folder of them is named like a label of the model")
        return "; ".join(parts)


def probes(config: PlainViTConfig, dynamic_size: bool) -> Iterator[torch.Tensor]:
    """Yield random batches of 3, 1 and 5 images, in other sizes too if the graph takes them."""
    probe = probe_images(config)
    yield probe
    yield probe[:1]
    generator = torch.Generator().manual_seed(1)
    height, width = config.grid_size
    grids = [(height, width)]
    if dynamic_size:
        grids += [(height + 1, width + 2), (height + 2, max(1, width - 1)), (max(1, height // 2), width)]
        if config.position_resampling == "truncate":  # which cannot enlarge a table
            grids = [(down, across) for down, across in grids if down * across <= height * width]
    for number, grid in enumerate(grids):
        sides = (count * pixels for count, pixels in zip(grid, config.patch_shape, strict=True))
        yield torch.randn(5 - number, config.num_channels, *sides, generator=generator)


@torch.no_grad()
def compare(
    model: Any, run: Run, batches: Iterable[torch.Tensor]
) -> tuple[dict[str, float], list[tuple[np.ndarray, np.ndarray]]]:
    """Compare a graph with the model.

    Args:
        model: The model.
        run: Runs the graph.
        batches: Pixels of shape (B, C, H, W).

    Returns:
        The largest difference of each output, relative to its largest value in the same batch, and the classes of each
        batch by the model and by the graph, both of shape (B,), if there are logits.
    """
    worst: dict[str, float] = {}
    classes = []
    for pixels in batches:
        outputs = model(pixels)
        for name, found in run(pixels.numpy()).items():
            expected = outputs[name].numpy()
            worst[name] = largest([worst.get(name, 0.0), relative_difference(name, found, expected)])
            if name == "logits":
                classes.append((expected.argmax(-1), found.argmax(-1)))
    return worst, classes


def agreement_on(images: ImageSets, classes: Sequence[tuple[np.ndarray, np.ndarray]]) -> Agreement:
    """Return how the classes of the compared images change, given those by the model and by the graph."""
    counts = len(images.setting), len(images.compared)
    if not classes:
        return Agreement(*counts)
    by_model, by_graph = map(np.concatenate, zip(*classes, strict=True))
    labels = [] if images.labels is None else [np.array(images.labels)]
    shares = [float((by_model == by_graph).mean())]
    shares += [float((found == true).mean()) for true in labels for found in (by_model, by_graph)]
    return Agreement(*counts, *shares)


def largest(values: list[float]) -> float:
    """Return the largest value; NaN if any value is NaN, which `max` could miss."""
    return float(np.max(values))


def relative_difference(name: str, found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest expected value.

    Raises:
        VerificationError: The shapes differ.
    """
    if found.shape != expected.shape:
        raise VerificationError(f"{name} of the graph have shape {found.shape}, of the model {expected.shape}")
    scale = np.abs(expected).max() if expected.size else 0.0
    difference = np.abs(found.astype(np.float64) - expected).max() if expected.size else 0.0
    return float(difference / scale if scale else difference)
