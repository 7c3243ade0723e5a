"""What tools for looking inside a model (captum, pytorch-grad-cam, ...) ask of it: plain logits, and maps of tokens."""

from collections.abc import Callable

import torch
from torch import nn

from .modeling_plain_vit import PlainViTForImageClassification, PlainViTPreTrainedModel


class LogitsOnly(nn.Module):
    """A classifier that returns its logits as a tensor, not in a `ModelOutput`.

    Args:
        model: The classifier; its parameters are shared, and its mode (training or not) is taken over.
    """

    def __init__(self, model: PlainViTForImageClassification):
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, num_labels) of normalised pixels (B, C, H, W)."""
        return self.model(pixel_values).logits


def token_reshaper(model: PlainViTPreTrainedModel, height: int, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that lays tokens (B, L, D) out as a map (B, D, h, w): grad-cam's `reshape_transform`.

    Args:
        model: Whose tokens they are; it says which of them are no patches.
        height: Of the images, in pixels.
        width: Of the images, in pixels.

    Raises:
        ValueError: when the patch size does not divide the image.
    """
    model.grid_size(height, width)
    return lambda hidden_states: model.tokens_to_map(hidden_states, height, width)


__all__ = ["LogitsOnly", "token_reshaper"]
