"""Inference with a trained model: prepared copies, graphs of inference engines, and runs over any number of images."""

from typing import TYPE_CHECKING, Any

from .prepare import prepare_for_inference

if TYPE_CHECKING:
    from .callables import FeatureExtractor, Predictor
    from .engine_models import open_exported
    from .engines import EngineExport, EngineOptions, to_engine


def __getattr__(name: str) -> Any:  # on use: these import the conversion, which `import plain_vit` does not
    if name in ("FeatureExtractor", "Predictor"):
        from . import callables

        return getattr(callables, name)
    if name == "open_exported":
        from .engine_models import open_exported

        return open_exported
    if name in ("EngineExport", "EngineOptions", "to_engine"):
        from . import engines

        return getattr(engines, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EngineExport",
    "EngineOptions",
    "FeatureExtractor",
    "Predictor",
    "open_exported",
    "prepare_for_inference",
    "to_engine",
]
