"""Interface of an inference engine: store a graph, and run a stored graph."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .engine_checks import Run

INPUT = "pixel_values"
EXTRA = "plain-vit[engines]"


class Engine(ABC):
    """Base class of inference engines: how to store a graph, and how to run a stored graph."""

    name: str
    runtime: str  # in prose
    graph: str  # its path in the folder

    @abstractmethod
    def check_installed(self, precision: str) -> None:
        """Raise MissingPackageError if a package that this precision needs is missing."""

    @abstractmethod
    def write(self, program: Any, folder: Path, precision: str, batches: Iterable[np.ndarray]) -> None:
        """Write a program of torch.onnx; in int8, with ranges calibrated on these inputs."""

    @abstractmethod
    def load(self, folder: Path, *, dtype: torch.dtype = torch.float32, expected: Sequence[int] | None = None) -> Run:
        """Return a function from pixels to the outputs of the stored graph, with as many threads as torch uses now.

        The function is thread-safe.

        Args:
            folder: The exported folder.
            dtype: Dtype of the arithmetic.
            expected: The shape (B, C, H, W) to optimise for; others work too (default: none).

        Raises:
            PreparedModelError: The engine does not compute in this dtype here.
        """

    @abstractmethod
    def version(self) -> str:
        """Return the installed release of the engine."""

    def settings(self) -> dict[str, Any]:
        """Return the settings with which the graph was run."""
        return {}
