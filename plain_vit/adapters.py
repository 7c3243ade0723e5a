"""What other tools ask of a model: logits and maps of tokens (captum, pytorch-grad-cam), layers to adapt (peft)."""

from collections.abc import Callable

import torch
from torch import nn

from .configuration_plain_vit import PlainViTConfig
from .extras import needs
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


def register_lora_targets() -> list[str]:
    """Give peft the layers that it adapts in a plain ViT where a config names none: queries and values.

    peft has a table for each method, by the type of the model, and asks for `target_modules` where it has no entry.
    Every method whose table gives llama its `q_proj` and `v_proj` (LoRA, LoHa, LoKr, OFT, ...) then has an entry of
    ours; one that is there already stays.

    Returns:
        The names of the layers.

    Raises:
        MissingPackageError: peft is not installed.

    Source: Hu et al. 2022, section 4.2, who adapt queries and values.
    """
    with needs("plain-vit[train]"):
        from peft.utils import constants
    targets = ["q_proj", "v_proj"]
    for name, table in vars(constants).items():
        if name.endswith("_TARGET_MODULES_MAPPING") and table.get("llama") == targets:
            table.setdefault(PlainViTConfig.model_type, targets)
    return targets


__all__ = ["LogitsOnly", "register_lora_targets", "token_reshaper"]
