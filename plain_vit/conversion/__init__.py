"""Conversion between plain-vit and other implementations of the Vision Transformer."""

from typing import TYPE_CHECKING, Any

from ..errors import AmbiguousCheckpointError

if TYPE_CHECKING:
    from .export import Export, to_checkpoint
    from .modules import from_module, to_module
    from .open import convert_checkpoint, from_checkpoint
    from .report import Converted, Report


def __getattr__(name: str) -> Any:  # on use: `catalogue` finds the names of models without torch
    if name in __all__:
        from . import export, modules, open, report

        return next(getattr(file, name) for file in (export, modules, open, report) if hasattr(file, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
