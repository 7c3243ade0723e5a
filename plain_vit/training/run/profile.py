"""Profile of a few steps: what their time goes to, as a trace, a table and a picture."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, schedule

from ...errors import TrainingError
from ...files.staging import staged_folder
from ...system.extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator

FIRST = 3  # steps before the profiled ones: memory is allocated and kernels are chosen in them
WAITING, OTHER = "waiting for data", "all else"
PHASES = (WAITING, "forward", "backward", "optimizer", OTHER)


class StepProfile:
    """Profile of some steps of the main process; training runs in the context of its `profiler`.

    A phase of a step lasts until the next one begins: on a GPU from when it gets there, as it lags behind the process.

    Args:
        folder: the folder to write; if it exists, nothing is profiled.
        steps: number of steps to profile, or 0.
        accelerator: accelerator of the run.
        total_steps: number of steps of the run.

    Raises:
        TrainingError: The run has too few steps.
    """

    def __init__(self, folder: Path, steps: int, accelerator: Accelerator, total_steps: int) -> None:
        if steps and total_steps < FIRST + steps:
            raise TrainingError(
                f"profile is {steps}, after the first {FIRST} steps, but the run has {total_steps}: give fewer."
            )
        self.folder, self.steps = folder, steps if accelerator.is_main_process and not folder.exists() else 0
        self.on_gpu, self.taken = accelerator.device.type == "cuda", 0
        self.span: AbstractContextManager[Any] = nullcontext()  # of the current phase in the trace
        self.marks: list[tuple[int, str, Any]] = []  # step, phase and its begin
        plan = schedule(wait=FIRST - 1, warmup=1, active=steps or 1, repeat=1)
        self.profiler: Any = profile(schedule=plan) if self.steps else nullcontext()

    def phase(self, name: str) -> None:
        """Begin a phase of the step."""
        if FIRST <= self.taken < FIRST + self.steps:
            self.span.__exit__(None, None, None)
            self.span = record_function(name)
            self.span.__enter__()
            self.marks.append((self.taken - FIRST, name, self._now()))

    def step(self, say: Callable[[str], None]) -> None:
        """End a step; after the last profiled one, write the profile."""
        if not self.steps:
            return
        self.span.__exit__(None, None, None)
        self.span, self.taken = nullcontext(), self.taken + 1
        self.profiler.step()
        if self.taken == FIRST + self.steps:
            self.marks.append((self.steps, OTHER, self._now()))
            say(f"the profile is in {self.folder}: {self._write()}")
            self.steps = 0

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self) -> str:
        """Write the files, and return where the time goes."""
        from ...analysis.drawing import png
        from ...analysis.plots import plot_step_times

        seconds = {name: [0.0] * self.steps for name in PHASES}
        if self.on_gpu:
            torch.cuda.synchronize()
        for (step, name, begin), (_, _, end) in zip(self.marks, self.marks[1:], strict=False):
            seconds[name][step] += begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin
        whole = sum(map(sum, seconds.values()))
        shares = ", ".join(f"{name} {sum(each) / whole:.0%}" for name, each in seconds.items())
        order = f"self_{'device' if self.on_gpu else 'cpu'}_time_total"
        with staged_folder(self.folder) as folder:
            self.profiler.export_chrome_trace(str(folder / "trace.json.gz"))
            table = self.profiler.key_averages().table(sort_by=order, row_limit=30)
            (folder / "operations.txt").write_text(f"{shares}\n\n{table}\n", encoding="utf-8")
            (folder / "steps.png").write_bytes(png(plot_step_times(seconds)))
        return shares
