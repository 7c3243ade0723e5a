"""Graphs for OpenVINO, with the file names of optimum: `openvino_model.xml` and `openvino_model.bin`."""

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ..errors import PreparedModelError
from ..extras import needs
from .engine_checks import Run
from .inference_engines import EXTRA, INPUT, Engine
from .onnx_runtime import save, unchanged, with_bfloat16_weights

# Without this setting, a CPU with bfloat16 products computes in bfloat16, whatever the precision of the weights.
HINT = "INFERENCE_PRECISION_HINT"
HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
PIECE = 4  # images of a large batch that one stream computes: other threads need not wait for it at each product


class OpenVino(Engine):
    """OpenVINO."""

    name, runtime = "openvino", "OpenVINO"
    graph = "openvino_model.xml"

    def check_installed(self, precision: str) -> None:
        """Raise MissingPackageError if a package is missing."""
        with needs(EXTRA):
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
            import openvino

            if precision == "int8":
                import_nncf()
        openvino.Core()

    def write(self, program: Any, folder: Path, precision: str, batches: Iterable[np.ndarray]) -> None:
        """Write the graph, converted from that of ONNX."""
        import openvino

        convert = with_bfloat16_weights if precision == "bfloat16" else unchanged
        with TemporaryDirectory(dir=folder) as temporary:
            path = Path(temporary, "model.onnx")
            save(convert(program.model_proto), path)
            model = openvino.Core().read_model(path)
            if precision == "int8":
                model = in_int8(model, batches)
            openvino.save_model(model, folder / self.graph, compress_to_fp16=precision == "float16")

    def load(self, folder: Path, *, dtype: torch.dtype = torch.float32, batch_size: int = 1) -> Run:
        """Return a function that runs the graph on the CPU."""
        import openvino

        if dtype not in HINTS:
            raise PreparedModelError(f"OpenVINO computes in float32 or bfloat16, not in {dtype}: give another dtype")
        threads = torch.get_num_threads()
        streams = max(1, min(threads, batch_size // PIECE))
        settings = {HINT: HINTS[dtype], "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
        compiled = openvino.Core().compile_model(folder / self.graph, "CPU", settings)
        if (chosen := compiled.get_property(HINT).to_string()) != HINTS[dtype]:
            raise PreparedModelError(f"OpenVINO computes in {chosen} on this processor, not in {HINTS[dtype]}")
        if streams == 1:
            return lambda pixels: arrays_of(compiled(pixels))
        return in_pieces(openvino.AsyncInferQueue(compiled, streams))

    def version(self) -> str:
        """Return the release of OpenVINO."""
        import openvino

        return str(openvino.__version__).partition("-")[0]

    def settings(self) -> dict[str, Any]:
        """Return the settings under which the graph was run."""
        return {HINT: HINTS[torch.float32]}


def arrays_of(outputs: Any) -> dict[str, np.ndarray]:
    """Return copies of the outputs of a graph by name: the next run writes to the same memory."""
    return {output.any_name: values.copy() for output, values in outputs.items()}


def in_pieces(queue: Any) -> Run:
    """Return a function that computes the pieces of a batch side by side."""

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        found: dict[int, dict[str, np.ndarray]] = {}
        queue.set_callback(lambda request, begin: found.update({begin: arrays_of(request.results)}))
        begins = range(0, len(pixels), PIECE)
        for begin in begins:
            queue.start_async({INPUT: pixels[begin : begin + PIECE]}, begin)
        queue.wait_all()
        return {name: np.concatenate([found[begin][name] for begin in begins]) for name in found[0]}

    return run


def in_int8(model: Any, batches: Iterable[np.ndarray]) -> Any:
    """Return a graph with products in int8, by the scheme of nncf for transformers."""
    nncf, inputs = import_nncf(), list(batches)
    return nncf.quantize(model, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs))


def import_nncf() -> Any:
    """Import nncf in the mode in which it does not report its use over the network."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    return nncf
