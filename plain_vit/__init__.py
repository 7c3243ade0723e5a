"""A Vision Transformer for the Hugging Face Hub that opens every plain ViT checkpoint with the same outputs."""

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
)

from .configuration_plain_vit import PlainViTConfig
from .image_processing_plain_vit import PlainViTImageProcessor, PlainViTImageProcessorPil
from .inference import prepare_for_inference
from .modeling_plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
)

__version__ = "0.1.0"

AutoConfig.register("plain_vit", PlainViTConfig)
AutoModel.register(PlainViTConfig, PlainViTModel)
AutoModelForImageClassification.register(PlainViTConfig, PlainViTForImageClassification)
AutoModelForMaskedImageModeling.register(PlainViTConfig, PlainViTForMaskedImageModeling)
AutoBackbone.register(PlainViTConfig, PlainViTBackbone)
AutoImageProcessor.register(
    PlainViTConfig,
    image_processor_classes={"torchvision": PlainViTImageProcessor, "pil": PlainViTImageProcessorPil},
)

__all__ = [
    "PlainViTBackbone",
    "PlainViTConfig",
    "PlainViTForImageClassification",
    "PlainViTForMaskedImageModeling",
    "PlainViTImageProcessor",
    "PlainViTImageProcessorPil",
    "PlainViTModel",
    "prepare_for_inference",
]
