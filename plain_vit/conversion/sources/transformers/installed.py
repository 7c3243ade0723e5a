"""Classes of the installed transformers; older releases lack some."""

import importlib
from typing import Any

import transformers
from transformers import AutoConfig

from ....errors import MissingPackageError

COMPLETE = ("'transformers>=5.10.1'",)  # the first release with all the classes that open
# Classes that transformers keeps to their modules, with the package.
UNEXPORTED = {
    "Idefics2VisionTransformer": "idefics2", "Kosmos2VisionModel": "kosmos2", "SamVisionEncoder": "sam",
    "SamHQVisionEncoder": "sam_hq", "GotOcr2VisionEncoder": "got_ocr2", "DeepseekOcr2SamVisionEncoder": "deepseek_ocr2",
    "Qwen2VisionTransformerPretrainedModel": "qwen2_vl", "Qwen2_5OmniVisionEncoder": "qwen2_5_omni",
    "Qwen3OmniMoeVisionEncoder": "qwen3_omni_moe",
}  # fmt: skip
# Classes of code in repositories, which is never run, and those of transformers with the same parameters.
STAND_INS = {"InternVisionModel": "QianfanOCRVisionModel"}


def class_named(name: str) -> Any:
    """Return a class of transformers.

    Raises:
        MissingPackageError: The installed release lacks it.
    """
    package = UNEXPORTED.get(name)
    try:
        place = (
            importlib.import_module(f"transformers.models.{package}.modeling_{package}") if package else transformers
        )
        return getattr(place, STAND_INS.get(name, name))
    except (AttributeError, ImportError) as error:
        raise MissingPackageError(f"transformers {transformers.__version__} has no {name}", COMPLETE) from error


def config_class(name: str, model_type: str) -> Any:
    """Return the configuration class for a `model_type`: the class `name`'s own, or its tower's.

    Raises:
        MissingPackageError: The installed release lacks it.
    """
    own = class_named(name).config_class
    if own.model_type == model_type:
        return own
    try:
        return type(AutoConfig.for_model(model_type))
    except ValueError as error:
        missing = f"transformers {transformers.__version__} has no model_type {model_type!r}"
        raise MissingPackageError(missing, COMPLETE) from error
