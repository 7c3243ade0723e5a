"""Time of GPU kernels in a forward pass and a training step of each package's ViT with the same weights.

In short steps a GPU waits for Python. The time of the kernels is what remains when it does not have to wait.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.bench_forward import forward
from benchmarks.bench_train_step import step
from benchmarks.harness import name_of_run, publish
from benchmarks.harness import parser as common_parser
from benchmarks.models import PEERS, Setting

WARM_UP = 5
TRAINING = ("tiny:32", "base:64")
FORWARD = ("tiny:32", "base:1")
OURS = ("tiny:64", "small:64", "large:64")  # steps of docs/notes/scaling.md

NOTES = f"""One set of weights in every package, as for `bench_train_step.py` and `bench_forward.py`; training under
autocast. One pass or step, after {WARM_UP} others, was recorded by torch's profiler: "kernels" are all activities of
the GPU, copies included, "launches" the calls that start kernels, and "time" is the sum of the durations of all.
The pauses between them, in which the GPU waits for Python, are not in it."""


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one pass or step.

    Args:
        name: Name of the case.
        kernels: Number of GPU activities.
        launches: Number of calls that started kernels.
        seconds: Total duration of the kernels.
    """

    name: str
    kernels: int
    launches: int
    seconds: float


def measure(name: str, take: Callable[[], object]) -> KernelTime:
    """Profile one turn."""
    for _ in range(WARM_UP):
        take()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        take()
        torch.cuda.synchronize()
    on_gpu = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    launches = sum("LaunchKernel" in event.name for event in recorded.events())
    return KernelTime(name, len(on_gpu), launches, sum(event.device_time_total for event in on_gpu) / 1e6)


def cases() -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Yield the name of each case and the function that prepares it."""
    packages = ("plain_vit", *PEERS)
    for kind, sizes, names in (
        ("step", TRAINING, packages),
        ("forward", FORWARD, packages),
        ("step", OURS, packages[:1]),
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
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here: this benchmark needs one.")
    found = []
    for name, prepare in tqdm(list(cases()), unit="case", disable=None):
        found.append(measure(name, prepare()))
        torch.cuda.empty_cache()
    publish(
        name_of_run("gpu-kernels", options, chosen), "Kernels on a GPU", f"{NOTES}\n\n{table(found)}",
        [asdict(one) for one in found], chosen.write,
    )  # fmt: skip


def table(found: list[KernelTime]) -> str:
    """Return a Markdown table with a row for each case."""
    lines = ["| case | kernels | launches | time |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {one.name} | {one.kernels} | {one.launches} | {1000 * one.seconds:.2f} ms |" for one in found]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
