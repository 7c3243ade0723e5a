"""Google's ViT in numpy, from the published equations: random arrays under its names, and a forward pass.

Written in float64 without torch, from the paper (Dosovitskiy et al. 2021, equations 1 to 4 and section 3.1) and flax's
documentation of its layers (LayerNorm and GroupNorm with epsilon 1e-6, tanh approximation of GELU, SAME padding).

Shapes: `B` batch, `C` channels, `H W` pixels, `L` tokens, `D` width, `d` head width; images are (B, H, W, C).
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

# All dimensions differ, and HEADS * HEAD_DIM is not the width.
WIDTH, HEADS, HEAD_DIM, MLP, DEPTH, CLASSES, REPRESENTATION = 20, 3, 8, 28, 3, 11, 14
PATCH, PATCH_OF_STEM = (5, 7), (1, 2)
SHARING_HEADS = 5  # heads that divide the width evenly
PAPER = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
BIG_VISION = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")


def random_arrays(
    *,
    names: tuple[str, str, str, str] = PAPER,
    positions: str | None = "Transformer/posembed_input/pos_embedding",
    grid: tuple[int, int] = (4, 4),
    class_token: bool = True,
    map_head: bool = False,
    shared_width: bool = False,
    representation: bool = False,
    classes: int = CLASSES,
    stem: tuple[int, ...] | None = None,
    gains_4d: bool = False,
    seed: int = 0,
) -> Arrays:
    """Return the arrays of a small model under the names in its file, without a prefix."""
    random = np.random.default_rng(seed)
    arrays: Arrays = {}

    def dense(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        arrays[f"{name}/kernel"] = random.normal(size=(*inputs, *outputs)) * math.prod(inputs) ** -0.5
        arrays[f"{name}/bias"] = random.normal(size=outputs) * 0.2

    def norm(name: str, width: int, four: bool = False) -> None:
        shape = (1, 1, 1, width) if four else (width,)
        arrays[f"{name}/scale"] = random.uniform(0.5, 1.5, size=shape)
        arrays[f"{name}/bias"] = random.normal(size=shape) * 0.2

    def attention(name: str, heads: int, head_dim: int) -> None:
        for part in ("query", "key", "value"):
            dense(f"{name}/{part}", (WIDTH,), (heads, head_dim))
        dense(f"{name}/out", (heads, head_dim), (WIDTH,))

    def mlp(name: str) -> None:
        dense(f"{name}/Dense_0", (WIDTH,), (MLP,))
        dense(f"{name}/Dense_1", (MLP,), (WIDTH,))

    def standardized(conv: str, gn: str, size: int, inputs: int, outputs: int) -> None:
        # Small kernels, whose deviation is near 1e-5, so that the epsilon has an effect.
        arrays[f"{conv}/kernel"] = random.normal(size=(size, size, inputs, outputs)) * 1e-3 + 2e-3
        norm(gn, outputs, gains_4d)

    channels = 3
    if stem is not None:
        standardized("conv_root", "gn_root", 7, channels, 64)
        channels = 64
        for stage, units in enumerate(stem):
            inner = 64 * 2**stage
            for unit in range(units):
                place = f"block{stage + 1}/unit{unit + 1}"
                if unit == 0:
                    standardized(f"{place}/conv_proj", f"{place}/gn_proj", 1, channels, 4 * inner)
                standardized(f"{place}/conv1", f"{place}/gn1", 1, channels, inner)
                standardized(f"{place}/conv2", f"{place}/gn2", 3, inner, inner)
                standardized(f"{place}/conv3", f"{place}/gn3", 1, inner, 4 * inner)
                channels = 4 * inner
    dense("embedding", (PATCH_OF_STEM if stem is not None else PATCH) + (channels,), (WIDTH,))
    if class_token:
        arrays["cls"] = random.normal(size=(1, 1, WIDTH)) * 0.5
    if positions is not None:
        rows = math.prod(grid) + (class_token and positions.startswith("Transformer/"))
        arrays[positions] = random.normal(size=(1, rows, WIDTH)) * 0.5
    norm1, attend, norm2, block_mlp = names
    sharing = SHARING_HEADS, WIDTH // SHARING_HEADS
    for layer in range(DEPTH):
        block = f"Transformer/encoderblock_{layer}"
        norm(f"{block}/{norm1}", WIDTH)
        # The map head divides the width evenly, so a model with one does too, as do all models of timm.
        attention(f"{block}/{attend}", *(sharing if map_head or shared_width else (HEADS, HEAD_DIM)))
        norm(f"{block}/{norm2}", WIDTH)
        mlp(f"{block}/{block_mlp}")
    norm("Transformer/encoder_norm", WIDTH)
    if map_head:
        arrays["MAPHead_0/probe"] = random.normal(size=(1, 1, WIDTH)) * 0.5
        attention("MAPHead_0/MultiHeadDotProductAttention_0", *sharing)
        norm("MAPHead_0/LayerNorm_0", WIDTH)
        mlp("MAPHead_0/MlpBlock_0")
    if representation:
        dense("pre_logits", (WIDTH,), (REPRESENTATION,))
    if classes:
        dense("head", (REPRESENTATION if representation else WIDTH,), (classes,))
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def stacked(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return the arrays of a model with scanned layers: the arrays of all layers are stacked."""
    start = "Transformer/encoderblock_"
    result = {name: array for name, array in arrays.items() if not name.startswith(start)}
    for name in arrays:
        if name.startswith(f"{start}0/"):
            rest = name.removeprefix(f"{start}0/")
            layers = [arrays[f"{start}{layer}/{rest}"] for layer in range(DEPTH)]
            result[f"Transformer/encoderblock/{rest}"] = np.stack(layers)
    return result


def as_bfloat16(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return the arrays in the form in which JAX's savez stores bfloat16: two-byte voids, the upper half of float32."""
    halves = {name: np.ascontiguousarray(array).view(np.uint32) >> 16 for name, array in arrays.items()}
    return {name: half.astype(np.uint16).view("V2") for name, half in halves.items()}


def save(path: Path, arrays: Mapping[str, np.ndarray], prefix: str = "", also: Mapping[str, Any] | None = None) -> Path:
    """Write an `.npz` with numpy, with a prefix before each name, along with other arrays."""
    np.savez(path, **{f"{prefix}{name}": array for name, array in arrays.items()}, **(also or {}))
    return path


# The forward pass


def forward(arrays: Mapping[str, np.ndarray], images: np.ndarray, gelu: str = "tanh") -> dict[str, np.ndarray]:
    """Return `tokens` after the last norm, `pooled` and, if there is a head, `logits` for images (B, H, W, C)."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    x = images.astype(np.float64)
    if "conv_root/kernel" in w:
        x = stem(w, x)
    rows, columns = w["embedding/kernel"].shape[:2]
    x = convolve(x, w["embedding/kernel"], (rows, columns)) + w["embedding/bias"]
    h, width = x.shape[1:3]
    x = x.reshape(x.shape[0], h * width, -1)
    cls = [np.repeat(w["cls"], len(x), axis=0)] if "cls" in w else []
    early = next((w[name] for name in w if name.startswith("Transformer/") and name.endswith("pos_embedding")), None)
    if early is not None:
        x = np.concatenate([*cls, x], axis=1) + early
    else:
        x = x + (w["pos_embedding"] if "pos_embedding" in w else sincos(h, width))
        x = np.concatenate([*cls, x], axis=1)
    for layer in range(DEPTH):
        block = f"Transformer/encoderblock_{layer}"
        norm1, attend, norm2, mlp = PAPER if f"{block}/{PAPER[2]}/scale" in w else BIG_VISION
        y = layer_norm(w, f"{block}/{norm1}", x)
        x = x + attention(w, f"{block}/{attend}", y, y)
        x = x + perceptron(w, f"{block}/{mlp}", layer_norm(w, f"{block}/{norm2}", x), gelu)
    x = tokens = layer_norm(w, "Transformer/encoder_norm", x)
    if "MAPHead_0/probe" in w:
        probe = np.repeat(w["MAPHead_0/probe"], len(x), axis=0)
        x = attention(w, "MAPHead_0/MultiHeadDotProductAttention_0", probe, x)
        x = (x + perceptron(w, "MAPHead_0/MlpBlock_0", layer_norm(w, "MAPHead_0/LayerNorm_0", x), gelu))[:, 0]
    else:
        x = x[:, 0] if cls else x.mean(axis=1)
    if "pre_logits/kernel" in w:
        x = np.tanh(x @ w["pre_logits/kernel"] + w["pre_logits/bias"])
    outputs = {"tokens": tokens, "pooled": x}
    return outputs | ({"logits": x @ w["head/kernel"] + w["head/bias"]} if "head/kernel" in w else {})


def layer_norm(w: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """Normalise each token over its channels."""
    centered = x - x.mean(axis=-1, keepdims=True)
    normal = centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-6)
    return normal * w[f"{name}/scale"] + w[f"{name}/bias"]


def attention(w: Mapping[str, np.ndarray], name: str, queries: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Compute multi-head attention from queries to tokens."""
    inputs = {"query": queries, "key": tokens, "value": tokens}
    q, k, v = (
        np.einsum("bld,dhe->bhle", x, w[f"{name}/{part}/kernel"]) + w[f"{name}/{part}/bias"][:, None]
        for part, x in inputs.items()
    )
    scores = np.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = np.einsum("bhqk,bhke->bqhe", weights, v)
    return np.einsum("bqhe,hed->bqd", attended, w[f"{name}/out/kernel"]) + w[f"{name}/out/bias"]


def perceptron(w: Mapping[str, np.ndarray], name: str, x: np.ndarray, gelu: str) -> np.ndarray:
    """Compute two dense layers with an activation between them."""
    x = x @ w[f"{name}/Dense_0/kernel"] + w[f"{name}/Dense_0/bias"]
    if gelu == "tanh":
        x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    else:
        x = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x @ w[f"{name}/Dense_1/kernel"] + w[f"{name}/Dense_1/bias"]


def sincos(h: int, w: int) -> np.ndarray:
    """Return the sine-cosine positions of column and row, of shape (1, h * w, D) (Beyer et al. 2022)."""
    omega = 10_000.0 ** -(np.arange(WIDTH // 4) / (WIDTH // 4 - 1))
    y, x = (axis.reshape(-1, 1) * omega for axis in np.mgrid[:h, :w])
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None]


def stem(w: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Run the ResNet of a hybrid: a root, then stages of bottlenecks, with stride 2 in all except the first."""

    def conv_norm(conv: str, gn: str, x: np.ndarray, stride: int = 1) -> np.ndarray:
        kernel = w[f"{conv}/kernel"]
        kernel = kernel - kernel.mean(axis=(0, 1, 2))
        kernel = kernel / (kernel.std(axis=(0, 1, 2)) + 1e-5)
        x = convolve(same(x, kernel.shape[0], stride, 0.0), kernel, (stride, stride))
        groups = x.reshape(*x.shape[:3], 32, -1)
        centered = groups - groups.mean(axis=(1, 2, 4), keepdims=True)
        normal = centered / np.sqrt((centered**2).mean(axis=(1, 2, 4), keepdims=True) + 1e-6)
        return normal.reshape(x.shape) * w[f"{gn}/scale"].reshape(-1) + w[f"{gn}/bias"].reshape(-1)

    x = np.maximum(conv_norm("conv_root", "gn_root", x, 2), 0)
    x = windows(same(x, 3, 2, -np.inf), (3, 3), (2, 2)).max(axis=(-2, -1))
    for stage in _numbers(w, "block"):
        for unit in _numbers(w, f"block{stage}/unit"):
            place, stride = f"block{stage}/unit{unit}", 2 if stage > 1 and unit == 1 else 1
            residual = conv_norm(f"{place}/conv_proj", f"{place}/gn_proj", x, stride) if unit == 1 else x
            y = np.maximum(conv_norm(f"{place}/conv1", f"{place}/gn1", x), 0)
            y = np.maximum(conv_norm(f"{place}/conv2", f"{place}/gn2", y, stride), 0)
            x = np.maximum(residual + conv_norm(f"{place}/conv3", f"{place}/gn3", y), 0)
    return x


def windows(x: np.ndarray, size: tuple[int, int], stride: tuple[int, int]) -> np.ndarray:
    """Return all windows of (B, H, W, C), of shape (B, h, w, C, rows, columns)."""
    return np.lib.stride_tricks.sliding_window_view(x, size, axis=(1, 2))[:, :: stride[0], :: stride[1]]


def convolve(x: np.ndarray, kernel: np.ndarray, stride: tuple[int, int]) -> np.ndarray:
    """Convolve (B, H, W, C) with (rows, columns, C, D), without padding."""
    rows, columns = kernel.shape[:2]
    return np.einsum("bhwcij,ijcd->bhwd", windows(x, (rows, columns), stride), kernel, optimize=True)


def same(x: np.ndarray, size: int, stride: int, value: float) -> np.ndarray:
    """Pad like TensorFlow's SAME: ceil(pixels / stride) outputs, with the odd pixel at the end."""
    margins = [max(0, (-(-n // stride) - 1) * stride + size - n) for n in x.shape[1:3]]
    return np.pad(x, ((0, 0), *((m // 2, m - m // 2) for m in margins), (0, 0)), constant_values=value)


def _numbers(names: Iterable[str], start: str) -> list[int]:
    rests = (name.removeprefix(start) for name in names if name.startswith(start))
    return sorted({int(rest.split("/")[0]) for rest in rests if rest[0].isdigit()})
