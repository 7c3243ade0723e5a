"""Graphs for ONNX Runtime, in the layout of transformers.js: `onnx/model.onnx`."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ..errors import PreparedModelError
from ..system.extras import needs
from .engine import EXTRA, INPUT, Engine
from .engine_checks import Run

# A protobuf has at most 2 GiB; larger weights go to a file of their own, named as transformers.js expects.
LARGEST_FILE = 2**31 - 2**24
WEIGHTS_SUFFIX = "_data"


class OnnxRuntime(Engine):
    """ONNX Runtime."""

    name, runtime = "onnx", "ONNX Runtime"
    graph = "onnx/model.onnx"

    def check_installed(self, precision: str) -> None:
        """Raise MissingPackageError if a package is missing."""
        with needs(EXTRA):
            import onnx  # noqa: F401
            import onnxruntime.quantization  # noqa: F401
            import onnxscript  # noqa: F401

    def write(self, program: Any, folder: Path, precision: str, batches: Iterable[np.ndarray]) -> None:
        """Write `onnx/model.onnx`, with weights of more than 2 GiB in a file next to it."""
        import onnx

        path = folder / self.graph
        path.parent.mkdir()
        if precision == "int8":
            write_int8(program.model_proto, path, batches)
        else:
            save(CONVERSIONS[precision](program.model_proto), path)
        onnx.checker.check_model(str(path))

    def load(self, folder: Path, *, dtype: torch.dtype = torch.float32, expected: Sequence[int] | None = None) -> Run:
        """Return a function that runs the graph on the CPU."""
        import onnxruntime

        if dtype != torch.float32:
            raise PreparedModelError(f"ONNX Runtime does not compute in {dtype} on a CPU: expected torch.float32")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(folder / self.graph, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]

        def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
            return dict(zip(names, session.run(names, {INPUT: pixels}), strict=True))

        return run

    def version(self) -> str:
        """Return the release of ONNX Runtime."""
        import onnxruntime

        return str(onnxruntime.__version__)


def save(model: Any, path: Path) -> None:
    """Write a graph, with its weights in a second file if they are too large for one."""
    import onnx

    if is_large(model):
        onnx.save_model(model, path, save_as_external_data=True, location=path.name + WEIGHTS_SUFFIX)
    else:
        onnx.save_model(model, path)


def is_large(model: Any) -> bool:
    """Return whether the weights of a graph are too large for one file."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST_FILE


def unchanged(model: Any) -> Any:
    """Return the graph unchanged."""
    return model


def in_float16(model: Any) -> Any:
    """Return a graph that computes in float16, with float32 inputs and outputs."""
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    halved = OnnxModel(convert_float_to_float16(model, keep_io_types=True, disable_shape_infer=True))
    halved.topological_sort()  # the conversion appends the casts at the end
    return halved.model


def with_bfloat16_weights(model: Any) -> Any:
    """Return a graph with its matrices stored in bfloat16 and cast to float32: few engines compute in bfloat16."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1:
            rounded = torch.tensor(numpy_helper.to_array(tensor)).bfloat16().view(torch.int16).numpy()
            stored = f"{tensor.name}.bfloat16"
            casts.append(helper.make_node("Cast", [stored], [tensor.name], to=TensorProto.FLOAT))
            tensor.CopyFrom(
                onnx.TensorProto(
                    name=stored, data_type=TensorProto.BFLOAT16, dims=tensor.dims, raw_data=rounded.tobytes()
                )
            )
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


CONVERSIONS = {"float32": unchanged, "float16": in_float16, "bfloat16": with_bfloat16_weights}


def write_int8(model: Any, path: Path, batches: Iterable[np.ndarray]) -> None:
    """Write a graph with int8 products with weights: per-channel scales for weights, calibrated ranges for inputs.

    Attention stays in float32. The quantiser's own option for that, `MatMulConstBOnly`, has no effect in this format
    (onnxruntime 1.32).
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.remaining: Iterator[np.ndarray] = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            pixels = next(self.remaining, None)
            return None if pixels is None else {INPUT: pixels}

    weights = {tensor.name for tensor in model.graph.initializer}
    attention = [node.name for node in model.graph.node if node.op_type == "MatMul" and node.input[1] not in weights]
    with TemporaryDirectory(dir=path.parent) as temporary:
        floats, with_shapes = Path(temporary, "floats.onnx"), Path(temporary, "with_shapes.onnx")
        save(model, floats)
        quant_pre_process(
            floats, with_shapes, skip_optimization=True, skip_symbolic_shape=True, save_as_external_data=is_large(model)
        )
        quantize_static(
            with_shapes, path, Reader(), per_channel=True, op_types_to_quantize=["MatMul", "Gemm", "Conv"],
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, use_external_data_format=is_large(model),
            nodes_to_exclude=attention,
        )  # fmt: skip
