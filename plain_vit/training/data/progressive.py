"""Progressive resizing: training images start small and grow to the model's size."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ProgressiveResizing:
    """Training image sizes by step.

    The shorter edge grows linearly, and each side is a multiple of the patch side. Batches are scaled on the device, so
    the random augmentation of an image does not depend on its size.

    Args:
        image_size: full (height, width), in pixels.
        patch_size: (height, width) of a patch, in pixels.
        initial: shorter edge in the first step, in pixels.
        steps: number of steps until images have the full size.
    """

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    initial: int
    steps: float

    def size(self, step: int) -> tuple[int, int]:
        """Return (height, width) of the images of a step."""
        if step >= self.steps:
            return self.image_size
        shorter = min(self.image_size)
        scale = (self.initial + (shorter - self.initial) * step / self.steps) / shorter
        height, width = (
            max(1, round(side * scale / patch)) * patch
            for side, patch in zip(self.image_size, self.patch_size, strict=True)
        )
        return height, width

    def __call__(self, pixels: torch.Tensor, step: int) -> torch.Tensor:
        """Scale images (batch, channels, height, width) to the size of a step."""
        size = self.size(step)
        if tuple(pixels.shape[-2:]) == size:
            return pixels
        return F.interpolate(pixels, size, mode="bilinear", antialias=True)
