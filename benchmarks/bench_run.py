"""Benchmark of whole training runs from JPEG files: images per second, and the share of the time that waits for images.

python -m benchmarks.bench_run --device cuda --write
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.bench_extract import EXAMPLES, SIZE, fork_workers, write_files
from benchmarks.harness import MEGABYTE, name_of_run, parser, publish
from benchmarks.models import timm_model

CLASSES = 10
WARM_UP = 20  # steps that compile and fill the loaders
NOTES = f"""A ViT for 224 pixels learns from a folder of {{images:,}} JPEG files of {SIZE[0]} x {SIZE[1]} pixels
({{weight:.0f}} kB on average), in {{mode}} and steps of {{batch}} images, with {{workers}} loader workers: random crops
of 0.08 to 1 of the area, mirrored half the time, AdamW, gradients clipped at 1. "plain-vit" is
`examples/finetune_image_classification.py`; "timm" is a loop with timm's loader and model, as its `train.py` is not in
its wheel. The first {{warm_up}} steps, which compile, do not count, nor does the last, after which the script
evaluates. "Waits for images" is the part of the time between the end of a step and the begin of the next, on the GPU's
own clock where there is one."""


class Watch:
    """The time of each step of a loop, from the batch that it gets until it asks for the next.

    Args:
        device: "cuda", whose stream is timed with events, or "cpu".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[Any] = []

    def steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches."""
        for batch in batches:
            self._mark()
            yield batch
            self._mark()

    def _mark(self) -> None:
        if self.device == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def figures(self, warm_up: int) -> tuple[int, float, float]:
        """Return how many steps count, all but those to warm up and the last, their seconds, and those of waiting."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            times = [self.marks[0].elapsed_time(mark) / 1000 for mark in self.marks]
        else:
            times = self.marks
        begins, ends = times[::2][warm_up:-1], times[1::2][warm_up - 1 : -1]
        waiting = sum(begin - end for begin, end in zip(begins, ends, strict=False))
        return len(begins), ends[-1] - ends[0], waiting


def ours(folder: str, chosen: Any) -> Watch:
    """Run the script."""
    from plain_vit.training import loop

    sys.path.insert(0, str(EXAMPLES))
    from finetune_image_classification import FinetuneArguments, finetune

    watch = Watch(chosen.device)

    class Watched(loop.Progress):
        def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
            return watch.steps(super().batches(loader))

    loop.Progress = Watched  # type: ignore[misc]
    finetune(
        FinetuneArguments(
            model=f"vit-{chosen.size}-patch16-224", from_scratch=True, dataset=f"{folder}/images", epochs=1,
            batch_size=chosen.batch, num_workers=chosen.workers, mixed_precision="bf16", compile=not chosen.eager,
            crop_scale=0.08, horizontal_flip=0.5, evaluations=1, checkpoints_kept=0, report=False,
            output_dir=f"{folder}/run",
        )
    )  # fmt: skip
    return watch


def timm_loop(folder: str, chosen: Any) -> Watch:
    """Train timm's model with its loader."""
    from timm.data import create_dataset, create_loader

    fork_workers(chosen.workers)
    device, watch = torch.device(chosen.device), Watch(chosen.device)
    loader = create_loader(
        create_dataset("", root=f"{folder}/images/train", is_training=True), (3, 224, 224), chosen.batch,
        is_training=True, scale=(0.08, 1.0), color_jitter=0.0, num_workers=chosen.workers, pin_memory=True,
        device=device, use_prefetcher=chosen.device == "cuda", persistent_workers=False,
    )  # fmt: skip
    module = timm_model(chosen.size, CLASSES).to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    model = module if chosen.eager else torch.compile(module)
    for images, labels in watch.steps(loader):
        with torch.autocast(chosen.device, torch.bfloat16):
            loss = cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return watch


def take(run: Callable[[str, Any], Watch], chosen: Any) -> dict[str, Any]:
    """Run in a folder of its own, quietly, and return the figures."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        steps, seconds, waiting = run(chosen.folder, chosen).figures(chosen.warm_up)
    memory = torch.cuda.max_memory_allocated() if chosen.device == "cuda" else None
    return {"seconds": seconds, "images": steps * chosen.batch, "waiting": waiting / seconds, "device": memory}


def write_classes(images: int, folder: Path) -> float:
    """Write JPEG files of several classes to train on and few to test, and return their mean size in kB."""
    weights = []
    for split, count in (("train", images), ("test", CLASSES)):
        for label in range(CLASSES):
            (folder / split).mkdir(parents=True, exist_ok=True)
            weights.append(write_files(count // CLASSES, folder / split / f"{label}"))
    return weights[0]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--size", default="base", help="tiny, small, base or large")
    options.add_argument("--images", type=int, default=40_000)
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--workers", type=int, default=os.cpu_count())
    options.add_argument("--warm-up", type=int, default=WARM_UP, help="steps that do not count")
    options.add_argument("--eager", action="store_true", help="do not compile")
    chosen = options.parse_args()
    name_of = name_of_run("run", options, chosen)
    lines, results = ["| case | images/s | waits for images | GPU memory |", "| --- | ---: | ---: | ---: |"], []
    with tempfile.TemporaryDirectory() as chosen.folder:
        weight = write_classes(chosen.images, Path(chosen.folder, "images"))
        notes = NOTES.format(**vars(chosen), weight=weight, mode="bf16 autocast" + ", compiled" * (not chosen.eager))
        for name, run in (("plain-vit", ours), ("timm", timm_loop)):
            # In a process of its own, whose memory is free when the next one starts.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found = pool.submit(take, run, chosen).result()
            memory = "-" if found["device"] is None else f"{found['device'] // MEGABYTE:,} MB"
            rate = found["images"] / found["seconds"]
            lines.append(f"| {name} | {rate:,.1f} | {found['waiting']:.0%} | {memory} |")
            results.append({"name": f"{chosen.size} b{chosen.batch} bfloat16: {name}", **found})
            page = "\n".join([notes, "", *lines])
            publish(name_of, "Training from JPEG files", page, results, chosen.write, last=run is timm_loop)


if __name__ == "__main__":
    main()
