"""The same Vision Transformer in every package, with the same weights, and the bare matrix products that it needs.

Shapes: `B` batch, `L` tokens, `N` patches, `D` hidden size, `d` head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from benchmarks.harness import Case
from plain_vit.configuration_plain_vit import PRESETS
from plain_vit.conversion import from_module, to_module
from plain_vit.training.hardware.throughput import peak_flops

PATCHES = {"tiny": 16, "small": 16, "base": 16, "large": 16, "huge": 14}
PEERS = ("timm", "transformers", "torchvision", "vit_pytorch")
LARGE = {"cpu": 2048, "cuda": 8192}  # side of the square matrices whose product measures the peak rate
TOLERANCE = 1e-5  # relative to the largest logit, in float32


@dataclass(frozen=True)
class Setting:
    """Setting of a measurement: model size (one of `PATCHES`), batch size, dtype, device."""

    size: str
    batch: int
    dtype: torch.dtype
    device: str

    def case(self, name: str, prepare: Callable[..., Callable[[], object]], **arguments: object) -> Case:
        """Return a case of this setting."""
        label = f"{self.size} b{self.batch} {name_of(self.dtype)}"
        return Case(f"{label}: {name}", prepare, {"setting": self, **arguments}, images=self.batch)

    def images(self) -> torch.Tensor:
        """Return random images, B 3 224 224, in float32."""
        return torch.randn(self.batch, 3, 224, 224, device=self.device)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def build(package: str, size: str) -> Any:
    """Return a ViT for 224 pixels and 1000 classes, after checking that its logits equal ours.

    timm, transformers, torchvision and plain-vit share one set of weights. vit-pytorch's ViT has no biases in query,
    key and value, and two additional norms; its own weights are converted to plain-vit for the check.

    Args:
        package: "plain_vit" or one of `PEERS`.
        size: One of `PATCHES`.

    Raises:
        RuntimeError: The logits differ.
    """
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # as is the default for matrix products: float32 means float32
    if package == "vit_pytorch":
        import vit_pytorch  # which the other packages do without

        width, depth, heads, inner = PRESETS[size].values()
        module: Any = vit_pytorch.ViT(
            image_size=224, patch_size=PATCHES[size], num_classes=1000, dim=width, depth=depth, heads=heads,
            mlp_dim=inner, dim_head=width // heads,
        )  # fmt: skip
        ours = from_module(module)
    else:
        module = timm_model(size)
        ours = from_module(module)
        if package == "plain_vit":
            module, ours = ours, module
        elif package != "timm":
            module = to_module(ours, package)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        theirs, expected = logits_of(module.eval()(images)), logits_of(ours.eval()(images))
    require_equal(theirs, expected, TOLERANCE, package)
    return module


def timm_model(size: str, num_classes: int = 1000) -> Any:
    """Return timm's ViT for 224 pixels with random weights."""
    width, depth, heads, inner = PRESETS[size].values()
    return VisionTransformer(
        patch_size=PATCHES[size], embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=inner / width,
        num_classes=num_classes,
    )  # fmt: skip


def require_equal(logits: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> float:
    """Return the largest difference from the expected logits, as a fraction of the largest logit.

    Raises:
        RuntimeError: The difference exceeds the tolerance.
    """
    difference = ((logits.float() - expected).abs().max() / expected.abs().max()).item()
    if not difference <= tolerance:
        raise RuntimeError(
            f"the logits of {name} differ by {difference:.1e} of the largest: at most {tolerance} expected"
        )
    return difference


def logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits, unwrapping the output if necessary."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def products(setting: Setting, training: bool) -> Callable[[], None]:
    """Return a function that runs only the matrix products of a forward pass, or of a training step."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=setting.device, dtype=setting.dtype)

    # Weights are transposed, as in a linear layer.
    operands = [
        (random(b, m, k), random(b, n, k).mT, random(b, m, n), count)
        for count, b, m, k, n in matrix_shapes(setting.size, setting.batch)
    ]

    @torch.no_grad()
    def multiply() -> None:
        for left, right, gradient, count in operands:
            for _ in range(count):
                torch.bmm(left, right) if left.shape[0] > 1 else torch.mm(left[0], right[0])
                if training and left.shape[0] > 1:
                    torch.bmm(gradient, right.mT), torch.bmm(left.mT, gradient)
                elif training:
                    torch.mm(gradient[0], right[0].T), torch.mm(left[0].T, gradient[0])

    return multiply


def large_product(setting: Setting) -> Callable[[], torch.Tensor]:
    """Return a function that multiplies two large square matrices."""
    side = LARGE[setting.device]
    left, right = (torch.randn(side, side, device=setting.device, dtype=setting.dtype) for _ in range(2))
    return lambda: left @ right


def matrix_shapes(
    size: str, batch: int, side: int = 224, blocks: int | None = None
) -> list[tuple[int, int, int, int, int]]:
    """Return (count, batch, rows, inner, columns) of every matrix product of a forward pass.

    Args:
        size: One of `PATCHES`.
        batch: Number of images.
        side: Side of an image, in pixels.
        blocks: Number of blocks (default: as many as the model size has).
    """
    width, depth, heads, inner = PRESETS[size].values()
    depth = blocks or depth
    patches = (side // PATCHES[size]) ** 2
    tokens, head = patches + 1, width // heads
    return [
        (1, 1, batch * patches, 3 * PATCHES[size] ** 2, width),
        (depth, 1, batch * tokens, width, 3 * width),
        (depth, batch * heads, tokens, head, tokens),
        (depth, batch * heads, tokens, tokens, head),
        (depth, 1, batch * tokens, width, width),
        (depth, 1, batch * tokens, width, inner),
        (depth, 1, batch * tokens, inner, width),
        (1, 1, batch, width, 1000),
    ]


def operations(shapes: list[tuple[int, int, int, int, int]], training: bool) -> int:
    """Return the floating-point operations that count for the MFU.

    They are those of a forward pass's matrix products, 2 m k n each: patch embedding, query, key and value, both
    products of attention, its projection, both layers of the MLP, and the head. A training step has three times as
    many: one forward, two backward. What is recomputed does not count, and what is left out (the gradient of the
    images; in our steps the last block's other tokens) is not subtracted.
    """
    forward = sum(2 * count * b * m * k * n for count, b, m, k, n in shapes)
    return 3 * forward if training else forward


def peak_rate(setting: Setting) -> float | None:
    """Return the operations per second that the GPU of a setting can do at most, or None if this is not known here."""
    return peak_flops(torch.device(setting.device)) if setting.dtype == torch.bfloat16 else None
