"""How fast each package's ViT takes a training step, with the same weights: forward, loss, backward, AdamW."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy

from benchmarks.bench_forward import rates
from benchmarks.harness import Case, Result, compare, matmul_rate, parser, report
from benchmarks.models import PEERS, build, logits_of, operations, products

NOTES = """One set of weights in every package (vit-pytorch's ViT has two norms more and no biases in query, key and
value; its own weights are checked against their conversion); the logits were found equal before anything was timed.
A turn is forward, cross-entropy, backward and a step of one fused AdamW on float32 weights; "bfloat16" is autocast.
"Limit" is the time of the bare matrix products of that step (three times the forward pass's), in the same shapes and
dtype, by torch's own `mm` and `bmm`, timed in the same turns. Our last block computes only the class token, which the
limit does not know. Peaks of memory are true with --memory alone: without, a process keeps what it had once."""


def step(
    package: str, size: str, batch: int, dtype: torch.dtype, device: str, compiled: bool, checkpointing: bool
) -> Callable[[], object]:
    """Return one training step of a package's model."""
    torch.backends.cuda.matmul.allow_tf32 = False
    module = build(package, size).to(device).train()
    if checkpointing and package == "timm":
        module.set_grad_checkpointing()
    elif checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    model = torch.compile(module) if compiled else module

    def train() -> float:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = cross_entropy(logits_of(model(images)).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    train()
    return train


def compare_setting(
    size: str, batch: int, dtype: torch.dtype, device: str, compiled: bool, checkpointing: bool, turns: int
) -> list[Result]:
    """Time every package, ours first, and the bare products."""
    setting = {"size": size, "batch": batch, "dtype": dtype, "device": device}
    label = f"{size} b{batch} {str(dtype).removeprefix('torch.')}"
    packages: Sequence[str] = ("plain_vit", "timm", "transformers") if checkpointing else ("plain_vit", *PEERS)
    kinds = {"compiled": compiled, "checkpointing": checkpointing}
    how = "checkpointed" if checkpointing else "compiled" if compiled else "eager"
    cases = [Case(f"{label}: {one}, {how}", step, {**setting, **kinds, "package": one}) for one in packages]
    cases.append(Case(f"{label}: bare products", products, {**setting, "backward": True}))
    results = compare(cases, turns)
    return [replace(result, limit=results[-1].seconds) for result in results]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--sizes", nargs="+", help="with batches, as in tiny:32 small:16; on a GPU large:64")
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    options.add_argument("--compile", action="store_true", help="compile every model, which takes minutes")
    options.add_argument("--checkpointing", action="store_true", help="of those packages whose classes offer it")
    options.add_argument("--quick", action="store_true", help="the tiny model in bf16, in three turns")
    options.add_argument(
        "--memory", action="store_true", help="give back what is freed, for true peaks and slower turns"
    )
    chosen = options.parse_args()
    if chosen.memory:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # or the processes, which inherit it, keep what they had once
    on_cpu = chosen.device == "cpu"
    sizes = chosen.sizes or (["tiny:32"] if chosen.quick else ["tiny:32", "small:16"] if on_cpu else ["base:64"])
    dtypes = chosen.dtypes or (["bfloat16"] if chosen.quick or not on_cpu else ["float32", "bfloat16"])
    turns = min(chosen.turns, 3) if chosen.quick else chosen.turns
    results, images, flops, peak = [], {}, {}, {}
    for dtype in (getattr(torch, name) for name in dtypes):
        rate = matmul_rate(chosen.device, dtype, 2048 if on_cpu else 8192)
        for size, batch in ((name, int(count)) for name, count in (one.split(":") for one in sizes)):
            measured = compare_setting(size, batch, dtype, chosen.device, chosen.compile, chosen.checkpointing, turns)
            setting = measured[0].name.partition(":")[0]
            images[setting], flops[setting], peak[setting] = batch, 3 * operations(size, batch), rate
            results += measured
    notes = f"{NOTES}\n\n{rates(results, images, flops, peak)}"
    report(f"train-step-{chosen.device}", "Training step, 224 pixels", notes, results, chosen.write or chosen.quick)


if __name__ == "__main__":
    main()
