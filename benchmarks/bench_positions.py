"""Benchmark of models with positions in the attention (DINOv3-S, EVA-02-Ti, BEiT-B): forward pass and training step.

python -m benchmarks.bench_positions --write
"""

from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers

from benchmarks.harness import Case, Result, compare, name_of_run, parser, rates, report
from benchmarks.models import TOLERANCE, name_of, require_equal
from plain_vit.conversion import from_module

# timm's entrypoint, image side in pixels, number of images, and transformers' class with its settings, if there is one.
MODELS: dict[str, tuple[str, int, int, str | None, dict[str, Any]]] = {
    "DINOv3-S": (
        "vit_small_patch16_dinov3_qkvb", 256, 8, "DINOv3ViTModel",
        {"num_register_tokens": 4, "image_size": 256, "layerscale_value": 1e-5},
    ),
    "EVA-02-Ti": ("eva02_tiny_patch14_224", 224, 16, None, {}),
    "BEiT-B": (
        "beit_base_patch16_224", 224, 4, "BeitModel", {"use_relative_position_bias": True, "layer_norm_eps": 1e-6},
    ),
}  # fmt: skip

NOTES = """DINOv3-S has rotated queries and keys, four registers and LayerScale; EVA-02-Ti rotations beside a table of
positions and a gated MLP; BEiT-B a learned bias on the scores of each block. timm's model is ours, converted: the
pooled features were found equal before anything was timed. transformers' has the same sizes and random weights. A
training step is the forward pass, the mean square of the features as the loss, backward and a step of fused AdamW;
there "bfloat16" is autocast, in the forward pass bfloat16 weights. No model has a classifier. Every process keeps what
a turn frees for the next one.

{rates}"""


def build(model: str, package: str) -> Any:
    """Return a model without a classifier.

    Raises:
        RuntimeError: Our features differ from timm's.
    """
    torch.manual_seed(0)
    name, side, _, kind, settings = MODELS[model]
    if package == "transformers":
        stock: Any = getattr(transformers, str(kind))
        return stock(stock.config_class(**settings))
    module = timm.create_model(name, num_classes=0)
    if package == "timm":
        return module
    ours = from_module(module)
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        require_equal(features_of(ours.eval()(images)), module.eval()(images), TOLERANCE, model)
    return ours


def features_of(outputs: Any) -> torch.Tensor:
    """Return the pooled features."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs.pooler_output


def forward(model: str, package: str, dtype: torch.dtype) -> Callable[[], object]:
    """Return a forward pass in evaluation."""
    _, side, count, _, _ = MODELS[model]
    module = build(model, package).eval().to(dtype)
    images = torch.randn(count, 3, side, side, dtype=dtype)
    return torch.no_grad()(lambda: module(images))


def step(model: str, package: str, dtype: torch.dtype) -> Callable[[], object]:
    """Return a training step."""
    _, side, count, _, _ = MODELS[model]
    module = build(model, package).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    images = torch.randn(count, 3, side, side)

    def train() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = features_of(module(images)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=tuple(MODELS), default=[*MODELS])
    chosen = options.parse_args()
    results: list[Result] = []
    for model in chosen.models:
        for work, prepare in (("forward", forward), ("training step", step)):
            for dtype in (torch.float32, torch.bfloat16):
                cases = [
                    Case(
                        f"{model} {work} {name_of(dtype)}: {package}",
                        prepare,
                        {"model": model, "package": package, "dtype": dtype},
                        images=MODELS[model][2],
                    )
                    for package in ("plain_vit", "timm", "transformers")
                    if package != "transformers" or MODELS[model][3] is not None
                ]
                results += compare(cases, chosen.turns, keep_memory=True)
    notes = NOTES.format(rates=rates(results, "plain_vit"))
    name = name_of_run("positions", options, chosen)
    report(name, "Positions inside the attention", notes, results, chosen.write)


if __name__ == "__main__":
    main()
