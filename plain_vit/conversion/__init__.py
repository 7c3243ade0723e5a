"""Conversion between plain-vit and the other homes of the Vision Transformer."""

from ..errors import AmbiguousCheckpointError
from .api import (
    Converted,
    Export,
    Report,
    convert_checkpoint,
    from_checkpoint,
    from_module,
    to_checkpoint,
    to_module,
)

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
