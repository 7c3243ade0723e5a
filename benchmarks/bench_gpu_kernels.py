"""Time of GPU kernels in a forward pass and a training step of each package's ViT with the same weights.

In short steps a GPU waits for Python. The time of the kernels is what remains when it does not have to wait. With
`--steps`, what the time of training steps goes into: products, attention, the optimizer, each other kernel, and gaps.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.bench_forward import forward
from benchmarks.bench_train_step import AS_TRAINED, MODES, step
from benchmarks.harness import name_of_run, publish
from benchmarks.harness import parser as common_parser
from benchmarks.models import PEERS, Setting

WARM_UP = 5
TRAINING = ("tiny:32", "base:64")
FORWARD = ("tiny:32", "base:1")
OURS = ("tiny:64", "small:64", "large:64")  # steps of docs/notes/scaling.md
# What kernels are for, by their names; the first that matches.
KINDS = {
    "attention": "flash|fmha|sdpa|attention",
    "optimizer": "adam|multi_tensor",
    "products": r"^triton_tem_|gemm|cutlass|cublas|nvjet|xmma|\b(add)?b?mm\b|convol|cudnn",
    "copies": "memcpy|memset|copy_",
}
MOST = 6  # other kernels that are named, those that take longest

NOTES = f"""One set of weights in every package, as for `bench_train_step.py` and `bench_forward.py`; training under
autocast. One pass or step, after {WARM_UP} others, was recorded by torch's profiler: "kernels" are all activities of
the GPU, copies included, "launches" the calls that start kernels, and "time" is the sum of the durations of all.
The pauses between them, in which the GPU waits for Python, are not in it. The other columns are shares of the time from
the first kernel's begin to the last one's end: "gaps" is when none ran, longer than without the profiler, and "others"
are the {MOST} longest of the rest."""


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one pass or step.

    Args:
        name: Name of the case.
        kernels: Number of GPU activities.
        launches: Number of calls that started kernels.
        seconds: Total duration of the kernels.
        shares: Part of the time, by kind of kernel, with the gaps.
    """

    name: str
    kernels: int
    launches: int
    seconds: float
    shares: dict[str, float]


def measure(name: str, take: Callable[[], object], device: str = "cuda") -> KernelTime:
    """Profile one turn."""
    for _ in range(WARM_UP):
        take()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]) as recorded:
        take()
        if device == "cuda":
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    events: list[Any] = [
        event for event in recorded.events() if event.device_type == kind and not event.is_user_annotation
    ]
    launches = sum("LaunchKernel" in event.name for event in recorded.events())
    spent = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return KernelTime(name, len(spent), launches, sum(end - start for _, start, end in spent) / 1e6, shares(spent))


def shares(spent: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Return which part of the time goes into which kind of kernel, and into the gaps between them.

    Args:
        spent: Name, begin and end of each kernel.
    """
    found: dict[str, float] = defaultdict(float)
    until = min(start for _, start, _ in spent)
    whole = max(end for _, _, end in spent) - until
    for name, start, end in sorted(spent, key=lambda kernel: kernel[1]):
        found["gaps"] += max(0.0, start - until)
        # Of kernels that run at the same time, each counts from the end of those before.
        found[kind_of(name)] += max(0.0, end - max(start, until))
        until = max(until, end)
    return {name: time / whole for name, time in sorted(found.items(), key=lambda one: -one[1])}


def kind_of(name: str) -> str:
    """Return what a kernel is for, or the begin of its name; compiled ones are named after all that is fused."""
    if name.startswith("triton_") and not name.startswith("triton_tem_"):
        return name[:60]
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), name[:60])


def cases(chosen: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Yield the name of each case and the function that prepares it."""
    packages = ("plain_vit", *PEERS)
    for size, _, batch in (one.partition(":") for one in chosen.steps or ()):
        setting = Setting(size, int(batch), torch.bfloat16, chosen.device)
        for package, mode in (("plain_vit", f"{chosen.mode}, {AS_TRAINED}"), ("timm", chosen.mode)):
            label = f"step of {size}, {batch} images, bfloat16: {package}, {mode}"
            yield label, partial(step, setting, package, mode)
    for kind, sizes, names in (
        ()
        if chosen.steps
        else (
            ("step", TRAINING, packages),
            ("forward", FORWARD, packages),
            ("step", OURS, packages[:1]),
        )
    ):
        for size, _, batch in (one.partition(":") for one in sizes):
            setting = Setting(size, int(batch), torch.bfloat16, "cuda")
            for package in names:
                modes = ("eager", "prepared") if (kind, package) == ("forward", "plain_vit") else ("eager",)
                for mode in modes:
                    label = f"{kind} of {size}, {batch} images, bfloat16: {package}, {mode}"
                    yield label, partial(step if kind == "step" else forward, setting, package, mode)


def main() -> None:
    options = common_parser(__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that it runs")
    options.add_argument("--steps", nargs="+", help="only steps of ours and timm's, as in base:256, with their shares")
    options.add_argument("--mode", choices=MODES, default="compiled", help="of --steps")
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here: this benchmark needs one.")
    found: list[KernelTime] = []
    listed = list(cases(chosen))
    for name, prepare in tqdm(listed, unit="case", disable=None):
        found.append(measure(name, prepare(), chosen.device))
        torch._dynamo.reset()  # which would keep the model
        if chosen.device == "cuda":
            torch.cuda.empty_cache()
        publish(
            name_of_run("gpu-kernels", options, chosen), "Kernels on a GPU", f"{NOTES}\n\n{table(found)}",
            [asdict(one) for one in found], chosen.write, last=len(found) == len(listed),
        )  # fmt: skip


def table(found: list[KernelTime]) -> str:
    """Return a Markdown table with a row for each case."""
    heads = ["case", "kernels", "launches", "time", "gaps", *KINDS, "others"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 2), "---"]]
    for one in found:
        known = [f"{one.shares.get(kind, 0):.1%}" for kind in ("gaps", *KINDS)]
        others = [f"`{name}` {share:.1%}" for name, share in one.shares.items() if name not in ("gaps", *KINDS)]
        time = f"{1000 * one.seconds:.2f} ms"
        lines.append([one.name, str(one.kernels), str(one.launches), time, *known, ", ".join(others[:MOST])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
