"""A Vision Transformer for the Hugging Face Hub that opens every plain ViT checkpoint with the same outputs."""

from typing import TYPE_CHECKING, Any

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
)

from .configuration_plain_vit import OTHER_NAMES, PlainViTConfig
from .image_processing_plain_vit import PlainViTImageProcessor, PlainViTImageProcessorPil
from .inference import prepare_for_inference
from .modeling_plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
)

if TYPE_CHECKING:
    from .conversion.catalogue import list_models
    from .conversion.create import create_image_processor, create_model
    from .inference.callables import FeatureExtractor as FeatureExtractor
    from .inference.callables import Predictor as Predictor

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


def _config_named(name: str, **fields: Any) -> PlainViTConfig:
    from .conversion.create import config_named

    return config_named(name, **fields)


OTHER_NAMES[:] = [_config_named]


def __getattr__(name: str) -> Any:  # on use: they import the conversion, which `import plain_vit` does not
    if name == "list_models":
        from .conversion.catalogue import list_models

        return list_models
    if name in ("create_image_processor", "create_model"):
        from .conversion import create

        return getattr(create, name)
    if name in ("FeatureExtractor", "Predictor"):
        from .inference import callables

        return getattr(callables, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PlainViTBackbone",
    "PlainViTConfig",
    "PlainViTForImageClassification",
    "PlainViTForMaskedImageModeling",
    "PlainViTImageProcessor",
    "PlainViTImageProcessorPil",
    "PlainViTModel",
    "create_image_processor",
    "create_model",
    "list_models",
    "prepare_for_inference",
]
