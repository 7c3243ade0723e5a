"""Adapters for other tools: logits (captum, pytorch-grad-cam), LoRA target modules (peft)."""

from typing import Any

import torch
from torch import nn

from ..configuration_plain_vit import PlainViTConfig
from ..modeling_plain_vit import PlainViTForImageClassification
from ..system.extras import needs


class LogitsOnly(nn.Module):
    """A classifier that returns its logits as a tensor, not in a `ModelOutput`.

    Args:
        model: The classifier; its parameters are shared, and its training mode is kept.
    """

    def __init__(self, model: PlainViTForImageClassification):
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, num_labels) of normalised pixels (B, C, H, W)."""
        outputs: Any = self.model(pixel_values)
        return outputs.logits


def register_lora_targets() -> list[str]:
    """Register the default layers that peft adapts in a plain ViT: the query and value projections.

    peft has one table per method, keyed by model type, and requires `target_modules` if there is no entry. An entry is
    added for every method whose table maps llama to `q_proj` and `v_proj` (LoRA, LoHa, LoKr, OFT, ...); existing
    entries are kept.

    Returns:
        The names of the layers.

    Raises:
        MissingPackageError: peft is not installed.

    Source: Hu et al. 2022, section 4.2.
    """
    with needs("plain-vit[train]"):
        from peft.utils import constants
    targets = ["q_proj", "v_proj"]
    for name, table in vars(constants).items():
        if name.endswith("_TARGET_MODULES_MAPPING") and table.get("llama") == targets:
            table.setdefault(PlainViTConfig.model_type, targets)
    return targets


__all__ = ["LogitsOnly", "register_lora_targets"]
