"""What the installed release of transformers has: each of the classes came with another."""

from typing import Any

import transformers
from transformers import AutoConfig

from ...errors import MissingPackageError

NEWEST = ("'transformers>=5.23'",)  # has all classes


def class_named(name: str) -> Any:
    """Return a class of transformers.

    Raises:
        MissingPackageError: The installed release lacks it.
    """
    try:
        return getattr(transformers, name)
    except AttributeError as error:
        raise MissingPackageError(f"transformers {transformers.__version__} has no {name}", NEWEST) from error


def config_class(name: str, model_type: str) -> Any:
    """Return the class of a configuration: that of the model `name`, or of another type that it takes too.

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
        raise MissingPackageError(missing, NEWEST) from error
