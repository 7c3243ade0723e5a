"""Conversion between plain-vit and other implementations of the Vision Transformer."""

from ..errors import AmbiguousCheckpointError
from .engine_models import open_exported
from .export import Export, to_checkpoint
from .inference_engines import EngineExport, EngineOptions
from .modules import from_module, to_module
from .open import convert_checkpoint, from_checkpoint
from .report import Converted, Report

__all__ = [
    "AmbiguousCheckpointError",
    "Converted",
    "EngineExport",
    "EngineOptions",
    "Export",
    "Report",
    "convert_checkpoint",
    "from_checkpoint",
    "from_module",
    "open_exported",
    "to_checkpoint",
    "to_module",
]
