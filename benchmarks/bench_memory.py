"""Benchmark of memory: the largest batch of a training step that fits into the GPU, with and without checkpointing.

python -m benchmarks.bench_memory --device cuda --sizes base large --write
"""

import gc
from collections.abc import Callable
from itertools import product

import torch

from benchmarks.bench_train_step import AS_TRAINED, trainer
from benchmarks.harness import MEGABYTE, name_of_run, parser, publish
from benchmarks.models import Setting
from plain_vit.training.hardware.memory import is_lack_of_memory

PACKAGES = {"plain_vit": f"eager, {AS_TRAINED}", "timm": "eager"}
FINENESS = 32  # the largest batch is found to a 32nd of it
NOTES = """The largest batch whose step fits into the memory of the GPU, with nothing else on it: forward,
cross-entropy, backward and fused AdamW on float32 weights, 224 pixels, bf16 autocast, eager. It is doubled until a step
does not fit, then found to a 32nd. Peak memory is that of a step with it, as torch allocates it."""


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest batch of at most `most` images that fits, to a 32nd; 0 if not even one image does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // FINENESS):
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= most and fits(middle) else (low, middle)
    return low


def measure(setting: Setting, package: str, mode: str, most: int) -> tuple[int, int | None]:
    """Return the largest batch of a package's step, and the peak bytes of the GPU with it."""
    train = trainer(setting, package, mode)
    peaks: dict[int, int | None] = {0: None}

    def fits(batch: int) -> bool:
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        images, labels = torch.randn(batch, 3, 224, 224, device=setting.device), torch.zeros(batch, dtype=torch.long)
        try:
            train(images, labels.to(setting.device))
        except RuntimeError as error:
            if not is_lack_of_memory(error):
                raise
            return False
        peaks[batch] = torch.cuda.max_memory_allocated() if setting.device == "cuda" else None
        return True

    batch = largest(fits, most)
    return batch, peaks[batch]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--sizes", nargs="+", default=["base", "large"])
    options.add_argument(
        "--most", type=int, default=2**14, help="try no larger batch; on a CPU, which swaps before it is full"
    )
    chosen = options.parse_args()
    lines, results = ["| case | largest batch | peak memory |", "| --- | ---: | ---: |"], []
    cases = list(product(chosen.sizes, ("", ", checkpointed"), PACKAGES.items()))
    for number, (size, checkpointed, (package, mode)) in enumerate(cases):
        setting = Setting(size, 1, torch.bfloat16, chosen.device)
        batch, peak = measure(setting, package, f"{mode}{checkpointed}", chosen.most)
        name = f"{size} bfloat16: {package}, {mode}{checkpointed}"
        lines.append(f"| {name} | {batch:,} | {'-' if peak is None else f'{peak // MEGABYTE:,} MB'} |")
        results.append({"name": name, "batch": batch, "device": peak})
        page = "\n".join([NOTES, "", *lines])
        last = number == len(cases) - 1
        publish(name_of_run("memory", options, chosen), "Memory of a training step", page, results, chosen.write, last)


if __name__ == "__main__":
    main()
