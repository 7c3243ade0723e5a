"""Random numbers for layers that drop branches or patches, determined by each image's place in the step's batch.

Random numbers that shift the coordinates of rotary embeddings depend on the step alone.

Each number is a hash of the seed, the step, the place of the image among all images of the step, the layer, and the
number's index. It depends neither on the number of processes and micro-batches that share the step nor on the device.

The hash multiplies numbers below 2^32 by constants below 2^31, which does not overflow an int64.
"""

import math
from typing import Any

import torch
from torch import nn

from .data.sampling import randomness

MASK = 2**32 - 1
GAP = 0x3C6EF372  # spacing of the indices of successive numbers, so that no hash equals that of a plain index


def scramble(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of integers in [0, 2^32), in the same range (constants from Chris Wellons' hash-prospector)."""
    numbers = ((numbers ^ (numbers >> 16)) * 0x21F0AAAD) & MASK
    numbers = ((numbers ^ (numbers >> 15)) * 0x735A2D97) & MASK
    return numbers ^ (numbers >> 15)


class Places:
    """The places of the images that a model processes; until they are set, layers draw from torch's generator.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.keys: torch.Tensor | None = None
        self.of_step: int | None = None

    def set(self, step: int, first: int, count: int, device: torch.device) -> None:
        """Set the step, and the places `first` to `first + count - 1` of the images of the next forward pass."""
        self.of_step = drawn = randomness(self.seed, step, 2) & MASK
        self.keys = scramble(scramble(torch.arange(first, first + count, device=device) + GAP) ^ drawn)


class LayerNumbers:
    """Random numbers for one layer.

    Args:
        places: places of the images.
        layer: number of the layer among those that draw numbers.
    """

    def __init__(self, places: Places, layer: int) -> None:
        self.places = places
        self.salt = int(scramble(torch.tensor(layer + GAP)))


class PlacedUniform(LayerNumbers):
    """Uniform numbers in [0, 1) for one layer; called like `torch.rand`, with images as the first dimension."""

    def __call__(self, images: int, *shape: int, device: torch.device) -> torch.Tensor:
        """Return numbers of shape (images, *shape)."""
        keys = self.places.keys
        if keys is None or len(keys) != images:
            return torch.rand(images, *shape, device=device)
        index = torch.arange(math.prod(shape), device=device)
        numbers = scramble(scramble(keys ^ self.salt)[:, None] ^ scramble(index + GAP))
        return ((numbers >> 8) * 2.0**-24).view(images, *shape)


class StepUniform(LayerNumbers):
    """Uniform numbers in [0, 1) for one layer, the same for all images of a step; called like `torch.rand`."""

    def __call__(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the numbers of the step, of shape (count,)."""
        step = self.places.of_step
        if step is None:
            return torch.rand(count, device=device)
        index = torch.arange(count, device=device)
        numbers = scramble(scramble(index + GAP) ^ step ^ self.salt)
        return (numbers >> 8) * 2.0**-24


class DropPath(nn.Module):
    """Drop a residual branch for some images in training, as other libraries do, but with random numbers by place.

    Args:
        rate: drop probability.
        uniform: random numbers of this layer.
    """

    def __init__(self, rate: float, uniform: PlacedUniform) -> None:
        super().__init__()
        self.rate, self.uniform = rate, uniform

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return hidden_states
        numbers = self.uniform(hidden_states.shape[0], *[1] * (hidden_states.ndim - 1), device=hidden_states.device)
        return hidden_states * (numbers >= self.rate).to(hidden_states.dtype) / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def draw_by_place(model: nn.Module, places: Places) -> int:
    """Make layers that drop branches or patches in training draw their random numbers by place.

    These are plain-vit's own layers, which draw with their attribute `uniform` (or `uniform_of_step`, the same for all
    images), and the `DropPath` layers of transformers and timm, which are replaced by an equivalent. Dropout of single
    elements is not changed.

    Args:
        model: any model, changed in place; parameters and their names stay the same.
        places: places of the images of each forward pass.

    Returns:
        The number of such layers.
    """
    count = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if getattr(layer, "uniform", None) is not None:
                layer.uniform = PlacedUniform(places, count)  # type: ignore[assignment]
            elif hasattr(layer, "uniform_of_step"):
                layer.uniform_of_step = StepUniform(places, count)  # type: ignore[assignment]
            elif type(layer).__name__.endswith("DropPath") and hasattr(layer, "drop_prob"):
                replacement: Any = DropPath(float(layer.drop_prob or 0.0), PlacedUniform(places, count))  # type: ignore[arg-type]
                setattr(parent, name, replacement.train(layer.training))
            else:
                continue
            count += 1
    return count
