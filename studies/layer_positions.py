"""A ViT that adds positions before every layer and not only before the first, for the study of positions [Table 8]."""

from functools import partial
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from plain_vit import (
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTImageProcessor,
    PlainViTImageProcessorPil,
)
from plain_vit.modeling_plain_vit import PlainViTPositionEmbedding


@strict
class LayerPositionsConfig(PlainViTConfig):
    """Config of a ViT with learned positions in every layer.

    Args:
        layer_positions: "own" for a table per layer, or "shared" for the table of the embeddings.
    """

    model_type = "plain_vit_layer_positions"

    layer_positions: Literal["own", "shared"] = "own"


class LayerPositionsForImageClassification(PlainViTForImageClassification):
    """A classifier that adds positions before each block; before the first block, the embeddings add them."""

    config_class = LayerPositionsConfig

    def __init__(self, config: LayerPositionsConfig):
        super().__init__(config)
        later = self.vit.layers[1:]
        if config.layer_positions == "own":
            self.layer_positions = nn.ModuleList(PlainViTPositionEmbedding(config) for _ in later)
        for place, layer in enumerate(later):
            layer.register_forward_pre_hook(partial(self._add_positions, place))
        self.post_init()

    def _add_positions(self, place: int, layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, *others = given
        own = self.config.layer_positions == "own"
        positions: Any = self.layer_positions[place] if own else self.vit.embeddings.position_embeddings
        return hidden_states + positions(self.config.grid_size, hidden_states), *others


if __name__ == "studies.layer_positions":  # not when loaded as code that was saved with a model
    AutoConfig.register(LayerPositionsConfig.model_type, LayerPositionsConfig)
    AutoModelForImageClassification.register(LayerPositionsConfig, LayerPositionsForImageClassification)
    AutoImageProcessor.register(
        LayerPositionsConfig,
        image_processor_classes={"torchvision": PlainViTImageProcessor, "pil": PlainViTImageProcessorPil},
    )
    LayerPositionsConfig.register_for_auto_class()
    LayerPositionsForImageClassification.register_for_auto_class("AutoModelForImageClassification")
