"""CUDA graphs of a forward pass: all its kernels are launched at once, without Python in between."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers.utils import logging

from ..layers_plain_vit import is_eager
from .hooks import has_hooks, hooks_of

logger = logging.get_logger(__name__)

MAX_GRAPHS = 4  # per model, each for one shape of images; they share memory except for their outputs
WARM_UP = 3  # passes before recording, in which libraries choose their kernels


class Recording(NamedTuple):
    """A recorded pass, its input tensor and its outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    outputs: Any


def is_unseen() -> bool:
    """Return whether nothing observes or changes operations: no compiler, tracer, mode, transform or autocast."""
    return is_eager() and not torch.is_autocast_enabled("cuda")


class CudaGraphs:
    """Records the forward pass of a model for a shape of pixels, and replays it for other pixels of that shape.

    Copies start without recordings.
    """

    def __init__(self) -> None:
        self.recorded: dict[Any, Recording | None] = {}  # None: cannot be recorded
        self.modules: list[nn.Module] = []  # modules of the model whose kernels are recorded
        self.lock = threading.Lock()
        self.done: torch.cuda.Event | None = None  # end of the previous pass, on any stream

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaGraphs, ()

    def can_replay(self, model: Any, pixel_values: object) -> bool:
        """Return whether a pass with these pixels may be recorded: Python would run the same kernels each time."""
        return (
            is_unseen()
            and type(pixel_values) is torch.Tensor
            and pixel_values.is_cuda
            and pixel_values.device == model.device
            and pixel_values.numel() > 0
            and not torch.cuda.is_current_stream_capturing()
            and self.is_unchanged(model)
        )

    def is_unchanged(self, model: nn.Module) -> bool:
        """Return whether a model has the modules of the first pass, without hooks and with their types' `forward`.

        A recording would leave out what a new module, such as an adapter, computes.
        """
        modules = list(model.modules())
        self.modules = self.modules or modules
        watched = filter(has_hooks, modules)
        return modules == self.modules and not any(hooks_of(module) or "forward" in vars(module) for module in watched)

    def __call__(self, model: nn.Module, compute: Callable[[torch.Tensor], Any], pixel_values: torch.Tensor) -> Any:
        """Return the result of `compute` for these pixels, replayed if possible.

        Args:
            model: The model.
            compute: Runs its forward pass.
            pixel_values: Pixels for which `can_replay` is true.
        """
        config = cast(Any, model.config)
        key = (pixel_values.shape, pixel_values.dtype, config._attn_implementation)
        with self.lock, torch.cuda.device(pixel_values.device), torch.inference_mode(False), torch.no_grad():
            if key not in self.recorded and len(self.recorded) == MAX_GRAPHS:
                return compute(pixel_values)
            stream = torch.cuda.current_stream()
            if self.done is not None:
                stream.wait_event(self.done)
            if key not in self.recorded:
                self.recorded[key] = self._record(compute, pixel_values)
            recording = self.recorded[key]
            if recording is None:
                return compute(pixel_values)
            graph, inputs, outputs = recording
            inputs.copy_(pixel_values, non_blocking=True)
            graph.replay()
            result = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, outputs)
            self.done = stream.record_event()
            return result

    def _record(self, compute: Callable[[torch.Tensor], Any], pixel_values: torch.Tensor) -> "Recording | None":
        inputs = pixel_values.clone(memory_format=torch.contiguous_format)
        aside, stream = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(stream)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                compute(inputs)
        stream.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        earlier = [recording for recording in self.recorded.values() if recording is not None]
        pool = earlier[0].graph.pool() if earlier else None
        try:
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # other threads may allocate
                outputs = compute(inputs)
        except RuntimeError as error:  # for example, an operation waits for the GPU
            logger.warning_once(f"The kernels of this model cannot be recorded, and start one by one: {error}")
            return None
        return Recording(graph, inputs, outputs)
