"""Test-time augmentation: the mean prediction over several views of each image.

Legend: `B` batch, `C` channels, `H W` pixels, `K` classes.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchvision.transforms.v2 import functional as transforms

from .data.augmentation import input_size
from .models import with_processed_size

ENLARGED = 8 / 7  # side of the image that ten crops are taken from, relative to the crop: 256 for 224


class AveragedViews(nn.Module):
    """A classifier that averages the probabilities of several views of each image.

    Args:
        model: maps `pixel_values` to an output with `logits`.
        kind: `flip`: the image and its mirror image; `ten_crop`: centre and corners, and their mirror images.
        crop_size: (height, width) of the crops, in pixels.
    """

    def __init__(self, model: nn.Module, kind: str, crop_size: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.kind, self.crop_size = model, kind, crop_size

    def views(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of images [B, C, H, W]."""
        if self.kind == "flip":
            return [pixel_values, pixel_values.flip(-1)]
        return list(transforms.ten_crop(pixel_values, list(self.crop_size)))

    def forward(self, pixel_values: torch.Tensor) -> Any:
        """Return an output whose `logits` [B, K] are logarithms of the mean probabilities."""
        views = [self.model(pixel_values=view).logits.float().log_softmax(dim=-1) for view in self.views(pixel_values)]
        shares = torch.stack(views).logsumexp(dim=0)  # log of the sum; `log_softmax` turns it into the mean
        return SimpleNamespace(logits=shares.log_softmax(dim=-1))


def with_views(model: nn.Module, image_processor: Any, kind: str) -> tuple[nn.Module, Any]:
    """Return a model that averages views, and the image processor for the images that the views are taken from.

    Args:
        model: maps `pixel_values` to an output with `logits`.
        image_processor: the model's image processor.
        kind: "one", "flip" or "ten_crop".
    """
    if kind == "one":
        return model, image_processor
    height, width = input_size(image_processor)
    averaged = AveragedViews(model, kind, (height, width))
    if kind == "ten_crop":
        larger = (round(height * ENLARGED), round(width * ENLARGED))
        image_processor = with_processed_size(image_processor, larger)
    return averaged, image_processor
