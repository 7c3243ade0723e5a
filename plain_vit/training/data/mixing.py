"""Mixup and CutMix over all images of an optimizer step, independent of processes and micro-batches.

Legend: `B` images of a micro-batch, `C` channels, `H W` pixels, `K` classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from .sampling import randomness

FOLLOWING = "following"  # entry of a batch: the image after its last one


def collate_followed(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate images; the last one only serves as partner of the one before it, see `MicroBatches`."""
    batch, following = default_collate(list(examples[:-1])), default_collate(list(examples[-1:]))
    following.pop("broken", None)  # counted in the batch that trains on the image
    return {**batch, FOLLOWING: following}


@dataclass(frozen=True)
class Blend:
    """The blend of one optimizer step: each image is blended with the one after it.

    Args:
        share: weight of the image itself, 0 to 1.
        center: centre of the CutMix box that the partner fills, as fractions of height and width; None for mixup.
    """

    share: float
    center: tuple[float, float] | None = None

    def __call__(
        self, pixels: torch.Tensor, labels: torch.Tensor, following: Mapping[str, torch.Tensor], num_classes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return blended pixels [B, C, H, W], which may share memory with `pixels`, and labels [B, K].

        Args:
            pixels: pixels of the images, [B, C, H, W].
            labels: class numbers of the images, [B], or 1 for each of an image's labels, [B, K].
            following: `pixel_values` [1, C, H, W] and `labels` [1] or [1, K] of the image after the last one.
            num_classes: number of classes K.
        """
        share = self.share
        if self.center is None:
            partners = torch.cat([pixels[1:], following["pixel_values"]])
            pixels = partners.lerp_(pixels, share)
        else:
            (top, bottom), (left, right) = (
                _span(middle, length, share) for middle, length in zip(self.center, pixels.shape[-2:], strict=True)
            )
            box = (..., slice(top, bottom), slice(left, right))
            pixels[box] = torch.cat([pixels[1:][box], following["pixel_values"][box]])
            share = 1 - (bottom - top) * (right - left) / pixels[0, 0].numel()
        targets = torch.cat([labels, following["labels"]])
        shown = (F.one_hot(targets, num_classes) if targets.ndim == 1 else targets).to(pixels.dtype)
        return pixels, torch.lerp(shown[1:], shown[:-1], share)


def _span(center: float, length: int, share: float) -> tuple[int, int]:
    """Return start and end of the box along one side, clipped to the image.

    Half of the length is rounded down, as in torchvision and in timm 0.3 (DeiT, MAE); timm 1.0 rounds down the whole
    length, so its box may be one pixel longer.
    """
    middle, half = int(center * length), int(0.5 * length * (1 - share) ** 0.5)
    return max(0, middle - half), min(length, middle + half)


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019); each step randomly uses one of them.

    Args:
        mixup: alpha of mixup; 0 disables it.
        cutmix: alpha of CutMix; 0 disables it.
        seed: seed of the run.
        probability: probability that the images of a step are blended.
        switch_probability: probability of CutMix in a blended step, if both are enabled.
        off_step: step from which on images are not blended; None blends to the end.
    """

    mixup: float
    cutmix: float
    seed: int
    probability: float = 1.0
    switch_probability: float = 0.5
    off_step: int | None = None

    @property
    def enabled(self) -> bool:
        """Return whether steps may be blended."""
        return bool(self.mixup or self.cutmix)

    def blend(self, step: int) -> Blend | None:
        """Draw the blend of a step; None if its images are not blended."""
        if not self.enabled or (self.off_step is not None and step >= self.off_step):
            return None
        rng = np.random.default_rng(randomness(self.seed, step, 1))
        if self.probability < 1 and rng.random() >= self.probability:
            return None
        cuts = bool(self.cutmix) and (not self.mixup or rng.random() < self.switch_probability)
        alpha = self.cutmix if cuts else self.mixup
        share = float(rng.beta(alpha, alpha))
        return Blend(share, (float(rng.random()), float(rng.random())) if cuts else None)
