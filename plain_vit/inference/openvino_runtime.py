"""Graphs for OpenVINO, with the file names of optimum: `openvino_model.xml` and `openvino_model.bin`."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from ..errors import PreparedModelError
from ..system.extras import needs
from .engine import EXTRA, INPUT, Engine
from .engine_checks import Run
from .onnx_runtime import save, unchanged, with_bfloat16_weights

# Without this setting, a CPU with bfloat16 products computes in bfloat16, whatever the precision of the weights.
HINT = "INFERENCE_PRECISION_HINT"
HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Threads share the loops of bfloat16 kernels dynamically, instead of in equal parts.
PARTITIONER = {"TBB_PARTITIONER": "AUTO"}
PIECE = 4  # images of a large batch per stream, so that threads need not wait for each other at every product

P = ParamSpec("P")
R = TypeVar("R")
IN_USE = RLock()
USED_BY: set[int] = set()  # the id of this process, once it has used OpenVINO


def one_thread_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Serialise a function with all others decorated by this, across the threads of the process.

    A compiled graph has one buffer for its inputs and outputs, all graphs share one cache of kernels, and two threads
    that use OpenVINO's bindings for the first time at the same moment can deadlock.
    """

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        if USED_BY and os.getpid() not in USED_BY:
            raise PreparedModelError(
                "OpenVINO cannot compute in a process that was forked from one that used it: start the process by "
                'spawn (multiprocessing.set_start_method("spawn"); for datasets, that of the package multiprocess)'
            )
        with IN_USE:
            return function(*args, **kwargs)

    return alone


class OpenVino(Engine):
    """OpenVINO."""

    name, runtime = "openvino", "OpenVINO"
    graph = "openvino_model.xml"

    def check_installed(self, precision: str) -> None:
        """Raise MissingPackageError if a package is missing."""
        with needs(EXTRA):
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
            import openvino  # noqa: F401

            if precision == "int8":
                import_nncf()
        core()

    @one_thread_at_a_time
    def write(self, program: Any, folder: Path, precision: str, batches: Iterable[np.ndarray]) -> None:
        """Write the graph, converted from ONNX."""
        import openvino

        convert = with_bfloat16_weights if precision == "bfloat16" else unchanged
        with TemporaryDirectory(dir=folder) as temporary:
            path = Path(temporary, "model.onnx")
            save(convert(program.model_proto), path)
            model = core().read_model(path)
            if precision == "int8":
                model = in_int8(model, batches)
            openvino.save_model(model, folder / self.graph, compress_to_fp16=precision == "float16")

    @one_thread_at_a_time
    def load(self, folder: Path, *, dtype: torch.dtype = torch.float32, expected: Sequence[int] | None = None) -> Run:
        """Return a function that runs the graph on the CPU."""
        if dtype not in HINTS:
            raise PreparedModelError(f"OpenVINO computes in float32 or bfloat16, not in {dtype}: give another dtype")
        graph, threads = core().read_model(folder / self.graph), torch.get_num_threads()
        any_shape = cache(lambda: compiled(graph, dtype, threads))
        if expected is None:
            return one_thread_at_a_time(any_shape())
        batch, *image = expected
        streams = max(1, min(threads, batch // PIECE))
        of_one_shape = graph.clone()
        of_one_shape.reshape({INPUT: [batch if streams == 1 else PIECE, *image]})
        if streams == 1:
            one_shape = compiled(of_one_shape, dtype, threads)
        else:
            one_shape = compiled_for_streams(of_one_shape, dtype, threads, streams)

        @one_thread_at_a_time
        def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
            count = len(pixels)
            if [*pixels.shape[1:]] != image:
                fitting = 0
            elif streams == 1:
                fitting = count if count == batch else 0
            else:
                fitting = count - count % PIECE
            parts = [one_shape(pixels[:fitting])] if fitting else []
            if fitting < count:
                parts.append(any_shape()(pixels[fitting:]))
            return joined(parts)

        return run

    def version(self) -> str:
        """Return the release of OpenVINO."""
        import openvino

        return str(openvino.__version__).partition("-")[0]

    def settings(self) -> dict[str, Any]:
        """Return the settings under which the graph was run."""
        return {HINT: HINTS[torch.float32]}


@one_thread_at_a_time
@cache
def core() -> Any:
    """Return the process's only `openvino.Core`, which lives as long as the process.

    Each core installs a signal stack for its thread, and restores the previous one when it is destroyed. If two cores
    are destroyed in the order of their creation, the second restores the freed stack of the first, and the next signal,
    such as Ctrl-C, ends the process with a segmentation fault.
    """
    import openvino

    USED_BY.add(os.getpid())
    made = openvino.Core()
    made.get_property("CPU", "FULL_DEVICE_NAME")  # the first use of the CPU installs the stack
    return made


def compiled(graph: Any, dtype: torch.dtype, threads: int) -> Run:
    """Return a function that runs a graph on the CPU, a whole batch at a time."""
    made = compile_model(graph, dtype, threads, 1)
    return lambda pixels: arrays_of(made(pixels, share_inputs=True, share_outputs=True))


def compiled_for_streams(graph: Any, dtype: torch.dtype, threads: int, streams: int) -> Run:
    """Return a function that runs a graph of `PIECE` images on the CPU, with the pieces of a batch in parallel.

    A stream of OpenVINO can give wrong numbers for as long as it lives: two streams that compile the same kernel at the
    same time, for the first time in a process, sometimes corrupt it. So a single stream with as many threads compiles
    all kernels first, and every stream must reproduce its numbers bit for bit.

    Raises:
        PreparedModelError: A stream gives other numbers.
    """
    import openvino

    threads_each = threads // streams
    shape = [int(size) for size in graph.input(INPUT).shape]
    probe = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    expected = compiled(graph, dtype, threads_each)(probe)
    queue = openvino.AsyncInferQueue(compile_model(graph, dtype, threads_each * streams, streams), streams)

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        found: dict[int, dict[str, np.ndarray]] = {}
        queue.set_callback(lambda request, begin: found.update({begin: arrays_of(request.results)}))
        begins = range(0, len(pixels), PIECE)
        for begin in begins:
            queue.start_async({INPUT: pixels[begin : begin + PIECE]}, begin)
        queue.wait_all()
        return joined([found[begin] for begin in begins])

    for name, values in run(np.concatenate([probe] * streams)).items():
        if not all(np.array_equal(piece, expected[name], equal_nan=True) for piece in np.split(values, streams)):
            raise PreparedModelError(
                f"{streams} streams of OpenVINO differ from one stream in {name}: give a batch_size of less than "
                f"{2 * PIECE}, for which one stream computes"
            )
    return run


def compile_model(graph: Any, dtype: torch.dtype, threads: int, streams: int) -> Any:
    """Compile a graph for the CPU.

    Raises:
        PreparedModelError: OpenVINO does not compute in this dtype here.
    """
    settings = {HINT: HINTS[dtype], "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
    if dtype == torch.bfloat16 and set(PARTITIONER) <= set(core().get_property("CPU", "SUPPORTED_PROPERTIES")):
        settings |= PARTITIONER  # OpenVINO 2025.4 lacks this setting
    made = core().compile_model(graph, "CPU", settings)
    if (chosen := made.get_property(HINT).to_string()) != HINTS[dtype]:
        raise PreparedModelError(f"OpenVINO computes in {chosen} on this processor, not in {HINTS[dtype]}")
    return made


def arrays_of(outputs: Any) -> dict[str, np.ndarray]:
    """Return copies of the outputs of a graph by name: the next run writes to the same memory."""
    return {output.any_name: values.copy() for output, values in outputs.items()}


def joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the outputs of the parts of a batch."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


def in_int8(model: Any, batches: Iterable[np.ndarray]) -> Any:
    """Return a graph with int8 products, quantised by nncf's scheme for transformers."""
    nncf, inputs = import_nncf(), list(batches)
    return nncf.quantize(model, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs))


def import_nncf() -> Any:
    """Import nncf with its telemetry disabled."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    return nncf
