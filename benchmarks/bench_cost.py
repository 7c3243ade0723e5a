"""Benchmark of cost: forward time by tokens, batch and depth; memory of a training step by batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch
from scipy.optimize import nnls  # type: ignore[import-untyped]

from benchmarks.harness import MEGABYTE, Case, Result, compare, name_of_run, parser, report
from benchmarks.models import LARGE, Setting, large_product, matrix_shapes, operations
from plain_vit import PlainViTConfig, PlainViTForImageClassification

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "cost.png"
SIDES = (112, 224, 336, 448, 672)  # pixels: 50, 197, 442, 785 and 1765 tokens
BATCHES = (1, 2, 4, 8, 16, 32)
DEPTHS = (3, 6, 12, 24)
TRAINED = (4, 8, 16, 32)

NOTES = """A ViT-Ti/16 (192 wide, 3 heads, 12 blocks but where the depth varies), float32, on a CPU. Tokens: one image
whose side grows; the quadratic part is fitted as c * tokens^2 beside a + b * tokens. Batch and depth: 224 pixels, of 8
images where the depth varies. Memory: the peak that a step of training adds, without and with gradient checkpointing.
The limit is what the matrix products need at the rate of one large product, which took turns with the others.
Ratios are to the first of their kind."""

RATE = Setting("tiny", 1, torch.float32, "cpu")


def model(side: int = 224, depth: int = 12) -> Any:
    """Return a ViT-Ti/16 for square images of this side."""
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
    """Return a function that does a forward and a backward pass."""
    module, images = model().train(), torch.randn(batch, 3, 224, 224)
    if checkpointing:
        module.activation_checkpointing_enable({"use_reentrant": False})
    labels = torch.zeros(batch, dtype=torch.int64)

    def step() -> None:
        module(images, labels=labels).loss.backward()
        module.zero_grad()

    return step


def tokens(side: int) -> int:
    """Return the number of tokens of an image of this side."""
    return (side // 16) ** 2 + 1


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="three turns of the smaller settings; no figure")
    chosen = options.parse_args()
    turns = min(3, chosen.turns) if chosen.quick else chosen.turns
    sides, batches, depths, trained = (
        values[:3] if chosen.quick else values for values in (SIDES, BATCHES, DEPTHS, TRAINED)
    )
    forwards = {
        "tokens": [(tokens(side), {"side": side, "batch": 1, "depth": 12}) for side in sides],
        "images": [(batch, {"side": 224, "batch": batch, "depth": 12}) for batch in batches],
        "blocks": [(depth, {"side": 224, "batch": 8, "depth": depth}) for depth in depths],
    }
    cases = {
        name: [(x, Case(f"{x} {name}", forward, shape), operations(_shapes(**shape), False)) for x, shape in settings]
        for name, settings in forwards.items()
    }
    for name in ("all kept", "checkpointed"):
        cases[name] = [
            (
                batch,
                Case(f"training {batch} images, {name}", train, {"batch": batch, "checkpointing": name != "all kept"}),
                operations(_shapes(224, batch, 12), True),
            )
            for batch in trained
        ]
    large = Case("one large product", large_product, {"setting": RATE})
    measured: dict[str, list[tuple[int, Result]]] = {}
    for name, settings in cases.items():
        *timed, of_large = compare([*(case for _, case, _ in settings), large], turns)
        rate = 2 * LARGE["cpu"] ** 3 / of_large.seconds
        measured[name] = [
            (x, replace(one, limit=needed / rate)) for (x, _, needed), one in zip(settings, timed, strict=True)
        ]
    curve = fit([(x, result.seconds) for x, result in measured["tokens"]])
    share = [
        f"{x}: {curve[2] * x * x / (curve[0] + curve[1] * x + curve[2] * x * x):.0%}" for x, _ in measured["tokens"]
    ]
    notes = f"{NOTES}\n\nThe quadratic part's share of the time, by tokens: {', '.join(share)}."
    if chosen.write and not chosen.quick:
        draw(measured, curve)
        notes += f"\n\nDrawn: docs/pictures/{PICTURE.name}"
    results = [result for points in measured.values() for _, result in points]
    report(name_of_run("cost", options, chosen), "What more work costs", notes, results, chosen.write)


def _shapes(side: int, batch: int, depth: int) -> list[tuple[int, int, int, int, int]]:
    return matrix_shapes("tiny", batch, side, depth)


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Fit seconds = a + b x + c x^2 to the points by relative error, and return a, b, c, none of them negative."""
    x, seconds = (numpy.array(values, dtype=float) for values in zip(*points, strict=True))
    columns = numpy.stack((x**0, x, x**2), axis=1) / seconds[:, None]
    constant, linear, quadratic = nnls(columns, numpy.ones(len(x)))[0]
    return constant, linear, quadratic


def draw(measured: dict[str, list[tuple[int, Result]]], curve: tuple[float, float, float]) -> None:
    """Draw the four panels to docs/pictures."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
    titles = {"tokens": "one image, larger", "images": "more images", "blocks": "more blocks, 8 images"}
    for panel, (name, title) in zip(panels, titles.items(), strict=False):
        points = [(value, 1000 * result.seconds) for value, result in measured[name]]
        panel.plot(*zip(*points, strict=True), "o" if name == "tokens" else "o-", label="measured")
        panel.set(title=title, xlabel=name, ylabel="forward pass, ms")
    constant, linear, quadratic = curve
    x = numpy.linspace(0, max(value for value, _ in measured["tokens"]))
    below, parabola = 1000 * (constant + linear * x), 1000 * quadratic * x**2
    panels[0].plot(x, below, "--", label="fit without its square")
    panels[0].plot(x, below + parabola, color="C0", linewidth=1, label="fit")
    panels[0].fill_between(x, below, below + parabola, alpha=0.3)
    for name in ("all kept", "checkpointed"):
        memory = [(value, result.peak / MEGABYTE) for value, result in measured[name] if result.peak is not None]
        panels[3].plot(*zip(*memory, strict=True), "o-", label=name)
    panels[3].set(title="memory of training", xlabel="images", ylabel="peak of a step, MB")
    for panel in panels:
        panel.set(xlim=(0, None), ylim=(0, None))
    for panel in (panels[0], panels[3]):
        panel.legend(fontsize=8, loc="upper left")
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    main()
