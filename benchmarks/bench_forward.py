"""How fast each package's ViT classifies images, with the same weights: eager, and prepared for inference."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.harness import Case, Result, compare, matmul_rate, parser, report
from benchmarks.models import PEERS, build, logits_of, operations, products
from plain_vit import prepare_for_inference

NOTES = """One set of weights in every package (vit-pytorch's ViT has two norms more and no biases in query, key and
value; its own weights are checked against their conversion); the logits were found equal before anything was timed.
"Limit" is the time of the bare matrix products of the same forward pass, in the same shapes and dtype, by torch's own
`mm` and `bmm`, timed in the same turns. Weights that are packed beforehand can beat it.
"Prepared" is `plain_vit.prepare_for_inference`; "compiled" is torch.compile, on a CPU with the weights frozen."""

Turn = Callable[[], object]


def forward(package: str, size: str, batch: int, dtype: torch.dtype, device: str, mode: str) -> Turn:
    """Return one forward pass of a package's model in a mode: "eager", "prepared" or "compiled"."""
    torch.backends.cuda.matmul.allow_tf32 = False
    module = build(package, size).to(device)
    if mode == "prepared":
        module = prepare_for_inference(module, dtype=dtype, batch_size=batch)
    else:
        module = module.to(dtype)
    if mode == "compiled":
        module = torch.compile(module, options={"freezing": True} if device == "cpu" else None)
    images = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)

    @torch.inference_mode()
    def classify() -> torch.Tensor:
        return logits_of(module(images))

    classify()
    return classify


def compare_setting(
    size: str, batch: int, dtype: torch.dtype, device: str, modes: Sequence[str], turns: int
) -> list[Result]:
    """Time every package, ours first, and the bare products."""
    setting = {"size": size, "batch": batch, "dtype": dtype, "device": device}
    label = f"{size} b{batch} {str(dtype).removeprefix('torch.')}"
    cases = []
    for mode in modes:
        for package in ("plain_vit",) if mode == "prepared" else ("plain_vit", *PEERS):
            cases.append(Case(f"{label}: {package}, {mode}", forward, {**setting, "package": package, "mode": mode}))
    cases.append(Case(f"{label}: bare products", products, {**setting, "backward": False}))
    results = compare(cases, turns)
    return [replace(result, limit=results[-1].seconds) for result in results]


def rates(
    results: Sequence[Result], images: Mapping[str, int], flops: Mapping[str, float], peak: Mapping[str, float]
) -> str:
    """Return a table of images per second, and of shares of the limit and of the machine's matrix rate.

    Args:
        results: Named "setting: case".
        images: Of one turn, for each setting.
        flops: Of one turn, for each setting.
        peak: Floating-point operations per second of a large product, for each setting.
    """
    lines = ["| case | images/s | share of the limit | share of the matrix rate |", "| --- | ---: | ---: | ---: |"]
    for one in results:
        setting = one.name.partition(":")[0]
        share = math.nan if one.limit is None else one.limit / one.seconds
        used = flops[setting] / one.seconds / peak[setting]
        lines.append(f"| {one.name} | {images[setting] / one.seconds:.1f} | {share:.2f} | {used:.2f} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--sizes", nargs="+", help="with batches, as in base:8 tiny:32; on a GPU large:64")
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    options.add_argument("--compile", action="store_true", help="time the compiled models too, which takes minutes")
    options.add_argument("--quick", action="store_true", help="the tiny model in bf16, in three turns")
    chosen = options.parse_args()
    on_cpu = chosen.device == "cpu"
    sizes = chosen.sizes or (["tiny:32"] if chosen.quick else ["base:8", "tiny:32"] if on_cpu else ["base:64"])
    dtypes = chosen.dtypes or (["bfloat16"] if chosen.quick or not on_cpu else ["float32", "bfloat16"])
    modes = ["eager", "prepared", *(["compiled"] if chosen.compile else [])]
    turns = min(chosen.turns, 3) if chosen.quick else chosen.turns
    results, images, flops, peak = [], {}, {}, {}
    for dtype in (getattr(torch, name) for name in dtypes):
        rate = matmul_rate(chosen.device, dtype, 2048 if on_cpu else 8192)
        for size, batch in ((name, int(count)) for name, count in (one.split(":") for one in sizes)):
            measured = compare_setting(size, batch, dtype, chosen.device, modes, turns)
            setting = measured[0].name.partition(":")[0]
            images[setting], flops[setting], peak[setting] = batch, operations(size, batch), rate
            results += measured
    notes = f"{NOTES}\n\n{rates(results, images, flops, peak)}"
    report(f"forward-{chosen.device}", "Forward pass, 224 pixels", notes, results, chosen.write or chosen.quick)


if __name__ == "__main__":
    main()
