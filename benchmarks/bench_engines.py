"""Benchmark of the forward pass in inference engines, compared with the model prepared for inference."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.bench_forward import TOLERANCES, forward
from benchmarks.harness import Case, Checked, name_of_run
from benchmarks.models import Setting, build, logits_of, require_equal
from benchmarks.sweep import parser, sweep
from plain_vit import prepare_for_inference
from plain_vit.inference.engines import INPUT, trace
from plain_vit.inference.onnx_runtime import OnnxRuntime
from plain_vit.inference.openvino_runtime import OpenVino

SIZES = {"cpu": ["base:8", "base:1", "tiny:32", "tiny:1"]}
NOTES = """One set of weights. Engines run the graph that `plain-vit export` writes, with as many threads as torch, and
OpenVINO reshapes it to the batch, which is faster than any number of images. "Prepared for OpenVINO" is
`prepare_for_inference(engine="openvino")`, which divides large batches between threads. In bfloat16, OpenVINO computes
with its hint "bf16"; ONNX Runtime has no bfloat16 products on a CPU. In int8, products with weights are in 8 bits, with
ranges set by random images. "Off by" is the largest difference of the logits from the eager ones in float32, relative
to the largest; it is limited as in `bench_forward`, but not of int8, whose weights here are random too: `plain-vit
export` measures the accuracy of a trained model. "Limit" is the time of the bare matrix products, in float32 for
int8."""
UNCHECKED = float("inf")


def run_graph(setting: Setting, runtime: str, precision: str) -> Callable[[], object]:
    """Return a forward pass of our exported model in an engine."""
    model, images = build("plain_vit", setting.size), setting.images()
    with torch.inference_mode():
        expected = logits_of(model(images))
    classify = ENGINES[runtime](model, images.numpy(), precision)
    tolerance = UNCHECKED if precision == "int8" else TOLERANCES[setting.dtype]
    difference = require_equal(torch.from_numpy(classify()), expected, tolerance, f"{runtime}, {precision}")
    return Checked(classify, difference)


def prepared_for_an_engine(setting: Setting, engine: str) -> Callable[[], object]:
    """Return a forward pass of our model after `prepare_for_inference` with an engine."""
    model, images = build("plain_vit", setting.size), setting.images()
    with torch.inference_mode():
        expected = logits_of(model(images))
    prepared = prepare_for_inference(model, dtype=setting.dtype, batch_size=setting.batch, engine=engine)
    difference = require_equal(prepared(images).logits, expected, TOLERANCES[setting.dtype], f"prepared, {engine}")
    return Checked(lambda: prepared(images).logits, difference)


def in_onnx_runtime(model: Any, images: np.ndarray, precision: str) -> Callable[[], np.ndarray]:
    """Return a forward pass in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with TemporaryDirectory() as folder:
        OnnxRuntime().write(trace(model, False), Path(folder), precision, [images])
        path = Path(folder, OnnxRuntime.graph)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {INPUT: images})[0]


def in_openvino(model: Any, images: np.ndarray, precision: str) -> Callable[[], np.ndarray]:
    """Return a forward pass in OpenVINO; bfloat16 is the precision of its arithmetic, not of the weights."""
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    with TemporaryDirectory() as folder:
        stored = "int8" if precision == "int8" else "float32"
        OpenVino().write(trace(model, False), Path(folder), stored, [images])
        graph = openvino.Core().read_model(Path(folder, OpenVino.graph))
        graph.reshape({INPUT: list(images.shape)})
        compiled = openvino.Core().compile_model(graph, "CPU", settings)
    return lambda: compiled(images)[0]


ENGINES = {"ONNX Runtime": in_onnx_runtime, "OpenVINO": in_openvino}


def cases(setting: Setting) -> list[Case]:
    """Return our model, timm's, and the engines."""
    torch_cases = (("plain_vit", "prepared"), ("plain_vit", "eager"), ("timm", "eager"))
    if setting.dtype == torch.float32:
        graphs = [(name, precision) for precision in ("float32", "int8") for name in ENGINES]
    else:
        graphs = [("OpenVINO", "bfloat16")]
    return [
        *(setting.case(f"{package}, {mode}", forward, package=package, mode=mode) for package, mode in torch_cases),
        setting.case("plain_vit, prepared for OpenVINO", prepared_for_an_engine, engine="openvino"),
        *(
            setting.case(f"{name}, {precision}", run_graph, runtime=name, precision=precision)
            for name, precision in graphs
        ),
    ]


def main() -> None:
    options = parser(__doc__)
    chosen = options.parse_args()
    sweep(
        name_of_run("engines", options, chosen), "Inference engines, 224 pixels", NOTES, cases, SIZES, training=False,
        chosen=chosen,
    )  # fmt: skip


if __name__ == "__main__":
    main()
