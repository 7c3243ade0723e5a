"""Conversion between plain-vit and other implementations of the Vision Transformer."""

from ..errors import AmbiguousCheckpointError
from .export import Export, to_checkpoint
from .modules import from_module, to_module
from .open import convert_checkpoint, from_checkpoint
from .report import Converted, Report

__all__ = [
    "AmbiguousCheckpointError",
    "Converted",
    "Export",
    "Report",
    "convert_checkpoint",
    "from_checkpoint",
    "from_module",
    "to_checkpoint",
    "to_module",
]
