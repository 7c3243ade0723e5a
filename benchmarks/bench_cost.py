"""What more work costs: forward time against tokens, batch and depth; memory of a training step against the batch."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch
from scipy.optimize import nnls  # type: ignore[import-untyped]

from benchmarks.harness import MEGABYTE, Case, Result, compare, parser, report
from plain_vit import PlainViTConfig, PlainViTForImageClassification

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "cost.png"
SIDES = (112, 224, 336, 448, 672)  # pixels: 50, 197, 442, 785 and 1765 tokens
BATCHES = (1, 2, 4, 8, 16, 32)
DEPTHS = (3, 6, 12, 24)
TRAINED = (4, 8, 16, 32)

NOTES = """A ViT-Ti/16 (192 wide, 3 heads, 12 blocks but where the depth varies), float32, on a CPU. Tokens: one image
whose side grows; the quadratic part is fitted as c * tokens^2 beside a + b * tokens. Batch and depth: 224 pixels, of 8
images where the depth varies. Memory: the peak that a training step adds, without and with gradient checkpointing."""


def model(side: int = 224, depth: int = 12) -> Any:
    """Return a ViT-Ti/16 for images of a side."""
    config = PlainViTConfig.from_name(f"vit-tiny-patch16-{side}", num_hidden_layers=depth)
    return PlainViTForImageClassification(config)


def forward(side: int, batch: int, depth: int) -> Callable[[], object]:
    """Return a forward pass."""
    module, images = model(side, depth).eval(), torch.randn(batch, 3, side, side)

    @torch.inference_mode()
    def classify() -> torch.Tensor:
        return module(images).logits

    return classify


def train(batch: int, checkpointing: bool) -> Callable[[], object]:
    """Return a forward and a backward pass."""
    module, images = model().train(), torch.randn(batch, 3, 224, 224)
    if checkpointing:
        module.activation_checkpointing_enable({"use_reentrant": False})
    labels = torch.zeros(batch, dtype=torch.int64)

    def step() -> None:
        module(images, labels=labels).loss.backward()
        module.zero_grad()

    return step


def tokens(side: int) -> int:
    """Return the tokens of an image of that side."""
    return (side // 16) ** 2 + 1


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="three turns of the smaller settings")
    chosen = options.parse_args()
    turns = min(3, chosen.turns) if chosen.quick else chosen.turns
    sides, batches, depths, trained = (
        values[:3] if chosen.quick else values for values in (SIDES, BATCHES, DEPTHS, TRAINED)
    )
    series = {
        "tokens": [(tokens(side), Case(f"{tokens(side)} tokens", forward, _shape(side, 1, 12))) for side in sides],
        "images": [(batch, Case(f"{batch} images", forward, _shape(224, batch, 12))) for batch in batches],
        "blocks": [(depth, Case(f"{depth} blocks", forward, _shape(224, 8, depth))) for depth in depths],
    }
    for checkpointing in (False, True):
        name = "checkpointed" if checkpointing else "all kept"
        series[name] = [
            (batch, Case(f"training {batch} images, {name}", train, {"batch": batch, "checkpointing": checkpointing}))
            for batch in trained
        ]
    measured = {}
    for name, cases in series.items():
        if name in ("all kept", "checkpointed"):
            os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed at once, so that each turn has a peak of its own
        measured[name] = list(zip([x for x, _ in cases], compare([case for _, case in cases], turns), strict=True))
    curve = fit([(x, result.seconds) for x, result in measured["tokens"]])
    share = [
        f"{x}: {curve[2] * x * x / (curve[0] + curve[1] * x + curve[2] * x * x):.0%}" for x, _ in measured["tokens"]
    ]
    draw(measured, curve)
    notes = (
        f"{NOTES}\n\nThe quadratic part's share of the time, by tokens: {', '.join(share)}.\n\nDrawn: {PICTURE.name}"
    )
    results = [result for points in measured.values() for _, result in points]
    report("cost", "What more work costs", notes, results, chosen.write or chosen.quick)


def _shape(side: int, batch: int, depth: int) -> dict[str, int]:
    return {"side": side, "batch": batch, "depth": depth}


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Return a, b, c of the curve seconds = a + b x + c x^2 whose relative errors are least; none is negative."""
    x, seconds = (numpy.array(values, dtype=float) for values in zip(*points, strict=True))
    columns = numpy.stack((x**0, x, x**2), axis=1) / seconds[:, None]
    constant, linear, quadratic = nnls(columns, numpy.ones(len(x)))[0]
    return constant, linear, quadratic


def draw(measured: dict[str, list[tuple[int, Result]]], curve: tuple[float, float, float]) -> None:
    """Draw the four panels to docs/pictures."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(12, 3), layout="constrained")
    for panel, name in zip(panels, ("tokens", "images", "blocks"), strict=False):
        points = [(value, 1000 * result.seconds) for value, result in measured[name]]
        panel.plot(*zip(*points, strict=True), "o-", label="measured")
        panel.set(xlabel=name, ylabel="forward, ms")
    constant, linear, quadratic = curve
    x = numpy.linspace(0, max(value for value, _ in measured["tokens"]))
    below = 1000 * (constant + linear * x)
    panels[0].plot(x, below, "--", label="without the quadratic part")
    panels[0].fill_between(x, below, below + 1000 * quadratic * x**2, alpha=0.3, label="quadratic part")
    panels[0].legend(fontsize=8)
    for name in ("all kept", "checkpointed"):
        memory = [(value, result.peak / MEGABYTE) for value, result in measured[name] if result.peak is not None]
        panels[3].plot(*zip(*memory, strict=True), "o-", label=name)
    panels[3].set(xlabel="images", ylabel="training step, MB")
    panels[3].legend(fontsize=8)
    for panel in panels:
        panel.set(xlim=(0, None), ylim=(0, None))
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    main()
