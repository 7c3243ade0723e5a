"""Communication in a training step, and time to stop a run of several processes, simulated on one machine without GPUs.

    python -m benchmarks.bench_processes [--processes 8] [--steps 12] [--delay 0.05]

A small model is trained by gloo processes. torch's profiler counts the collectives and their bytes in the first
process, from the third step to the last but one, so that evaluations and checkpoints are left out. In each step, a
different process is late by the delay. All processes are forked from one, so that torch is imported once.
"""

import argparse
import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.training.hardware import processes as hardware
from plain_vit.training.loop import Loop
from tests.training.runs import open_script

MODEL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": 16, "patch_size": 4, "num_labels": 10,
}  # fmt: skip
RUN: dict[str, Any] = {
    "dataset": "digits", "learning_rate": 0.01, "report": False, "evaluations": 1, "log_every": 4, "max_images": 100,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "data parallel, static graph": {"static_graph": True},
    "2 micro-batches": {"gradient_accumulation_steps": 2},
    "sharded": {"shard": True},
}
FIRST = 2  # index of the first measured step


def train(rank: int, count: int, port: int, options: dict[str, Any], delay: float, result: Path) -> None:
    """Train in one process; the first process writes its measurements."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if options.pop("static_graph", False):
        kind: Any = hardware.DistributedDataParallelKwargs
        hardware.DistributedDataParallelKwargs = functools.partial(kind, static_graph=True)
    script = open_script("finetune_image_classification")
    trace = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    begin, started = Loop._begin_step, [0.0, 0.0]

    def begin_step(loop: Loop[Any]) -> None:
        if rank == 0 and loop.step == FIRST:
            (result.parent / "training").touch()
            trace.start()
            started[:] = time.perf_counter(), time.process_time()
        if rank == 0 and loop.step == loop.schedule.total_steps - 1:
            seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
            trace.stop()
            steps = loop.step - FIRST
            result.write_text(json.dumps({"seconds": seconds / steps, "cpu": cpu / steps, "sent": sent(trace, steps)}))
        time.sleep(delay * (loop.step % count == rank))
        begin(loop)

    Loop._begin_step = begin_step  # type: ignore[assignment, method-assign]
    code = 0
    try:
        script.finetune(script.FinetuneArguments(**options))
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    os._exit(code)  # skips the finalizers inherited from the parent process


def sent(trace: Any, steps: int) -> str:
    """Return the number of each collective and the bytes per step; all tensors have four-byte elements."""
    counts: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for event in trace.events():
        if event.name.startswith("gloo:"):
            name = event.name.removeprefix("gloo:")
            counts[name] += 1
            for shape in event.input_shapes:
                shapes = shape if shape and isinstance(shape[0], list) else [shape]
                numbers[name] += sum(torch.Size(each).numel() for each in shapes if each)
    each = [f"{counts[name] / steps:.2f} {name} ({4 * numbers[name] / steps:,.0f} bytes)" for name in sorted(counts)]
    return ", ".join(each)


def launch(options: dict[str, Any], count: int, delay: float, result: Path) -> list[ForkProcess]:
    """Start the processes of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    given = {**RUN, **options, "batch_size": 4 * count, "model": str(result.parent / "model")}
    members = [
        context.Process(target=train, args=(rank, count, port, given, delay, result), daemon=True)
        for rank in range(count)
    ]
    for member in members:
        member.start()
    return members


def measure(number: int, options: dict[str, Any], count: int, delay: float, folder: Path) -> dict[str, Any]:
    """Train with these options, and return the measurements of the first process."""
    result = folder / f"{number}.json"
    members = launch({**options, "output_dir": str(folder / str(number))}, count, delay, result)
    for member in members:
        member.join()
    if any(member.exitcode for member in members):
        sys.exit(f"a process has failed: {[member.exitcode for member in members]}")
    return dict(json.loads(result.read_text()))


def measure_stop(count: int, delay: float, folder: Path) -> float:
    """Signal one process, and return the seconds until all processes have ended and written a checkpoint."""
    (folder / "training").unlink(missing_ok=True)
    options = {"steps": 10**6, "output_dir": str(folder / "stopped")}
    members = launch(options, count, delay, folder / "stopped.json")
    while not (folder / "training").exists() and all(member.is_alive() for member in members):
        time.sleep(0.05)
    time.sleep(5)
    start = time.perf_counter()
    os.kill(members[-1].pid or 0, signal.SIGTERM)
    for member in members:
        member.join()
    if {member.exitcode for member in members} != {128 + signal.SIGTERM}:
        sys.exit(f"the processes ended with {[member.exitcode for member in members]}")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that one process is late in each step")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=[*SETTINGS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = PlainViTForImageClassification(PlainViTConfig(**MODEL))
        model.save_pretrained(folder / "model")
        PlainViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "model")
        size = 4 * model.num_parameters()
        print(f"{given.processes} processes, {size:,} bytes of weights, one process {given.delay} s late in each step")
        print("| setting | seconds per step | of CPU | per step |\n|---|---|---|---|", flush=True)
        for number, name in enumerate(given.settings):
            options = {**SETTINGS[name], "steps": given.steps + FIRST + 1}
            found = measure(number, options, given.processes, given.delay, folder)
            print(f"| {name} | {found['seconds']:.3f} | {found['cpu']:.3f} | {found['sent']} |", flush=True)
        print(
            f"a signal to one process: all had ended after {measure_stop(given.processes, given.delay, folder):.1f} s"
        )


if __name__ == "__main__":
    main()
