"""Graphs for OpenVINO, with the file names of optimum: `openvino_model.xml` and `openvino_model.bin`."""

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..extras import needs
from .engine_checks import Run
from .inference_engines import EXTRA, Engine
from .onnx_runtime import save, unchanged, with_bfloat16_weights

# Otherwise a CPU with bfloat16 products computes in bfloat16, whatever the precision of the weights.
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32"}


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

    def load(self, folder: Path) -> Run:
        """Return a function that runs the graph on the CPU."""
        import openvino

        compiled = openvino.Core().compile_model(folder / self.graph, "CPU", SETTINGS)

        def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
            outputs = compiled(pixels)
            return {output.any_name: outputs[output].copy() for output in compiled.outputs}

        return run

    def describe(self, folder: Path) -> dict[str, Any]:
        """Return the version of OpenVINO, and the settings under which the graph was run."""
        import openvino

        return {"engine_version": openvino.__version__.partition("-")[0], "settings": SETTINGS}


def in_int8(model: Any, batches: Iterable[np.ndarray]) -> Any:
    """Return a graph with products in int8, by the scheme of nncf for transformers."""
    nncf, inputs = import_nncf(), list(batches)
    return nncf.quantize(model, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs))


def import_nncf() -> Any:
    """Import nncf in the mode in which it does not report its use over the network."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    return nncf
