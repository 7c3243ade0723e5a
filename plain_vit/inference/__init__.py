"""Use of a trained model: prepared for one call, as a graph of an inference engine, or over any number of images."""

from .engine_models import open_exported
from .engines import EngineExport, EngineOptions, to_engine
from .prepare import prepare_for_inference

__all__ = ["EngineExport", "EngineOptions", "open_exported", "prepare_for_inference", "to_engine"]
