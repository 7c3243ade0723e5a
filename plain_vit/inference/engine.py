"""What every inference engine is to plain-vit: a way to store a graph and to run a stored one."""

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
    """An inference engine: how a graph is stored for it, and how it runs a stored one."""

    name: str
    runtime: str  # in prose
    graph: str  # its path in the folder

    @abstractmethod
    def check_installed(self, precision: str) -> None:
        """Raise MissingPackageError if a package that this precision needs is missing."""

    @abstractmethod
    def write(self, program: Any, folder: Path, precision: str, batches: Iterable[np.ndarray]) -> None:
        """Write a program of torch.onnx; in int8, with the ranges that these inputs lead to."""

    @abstractmethod
    def load(self, folder: Path, *, dtype: torch.dtype = torch.float32, expected: Sequence[int] | None = None) -> Run:
        """Return a function from pixels to the outputs of the stored graph, with as many threads as torch has now.

        Threads of the process may call it at the same time.

        Args:
            folder: The exported folder.
            dtype: Of the arithmetic.
            expected: The shape (B, C, H, W) that it is to be fast for; others work too (default: none).

        Raises:
            PreparedModelError: The engine does not compute in this dtype here.
        """

    @abstractmethod
    def version(self) -> str:
        """Return the release of the engine that is installed."""

    def settings(self) -> dict[str, Any]:
        """Return the settings with which the graph was run."""
        return {}
