"""Classes of the installed transformers; older releases lack some."""

from typing import Any

import transformers
from transformers import AutoConfig

from ....errors import MissingPackageError

COMPLETE = ("'transformers>=5.10.1'",)  # the first release with all the classes that open


def class_named(name: str) -> Any:
    """Return a class of transformers.

    Raises:
        MissingPackageError: The installed release lacks it.
    """
    try:
        return getattr(transformers, name)
    except AttributeError as error:
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
