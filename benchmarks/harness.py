"""Side by side: every case in a process of its own (or all in one), all of them taking turns, so that what the machine
does meanwhile (another program, a slow disk, a throttled core) hits them alike.

A case is prepared once, warmed up, and timed in interleaved turns; further turns, which are not timed, tell its memory.
Reported are medians with their spread, the ratio to the first case, a limit of the machine beside each figure, and the
peak of memory. On a GPU each turn is synchronised.
"""

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from plain_vit.system.calls import M_MMAP_THRESHOLD, keep_freed_memory

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "transformers", "safetensors", "timm", "vit-pytorch", "torchvision")
MEGABYTE = 10**6
LONG_ENOUGH = 0.1  # seconds: shorter work is repeated within a turn
SHORT = 1.0  # seconds: memory of shorter work is measured three times instead of once
LOAD_BEFORE = os.getloadavg()[0]  # of the last minute, before this process adds its own

MAPPED_FROM = 65536  # allocations of this many bytes or more are mapped, and returned to the system when freed

# A forked process runs the benchmark's module, imported already, once more, to find its functions under their names.
warnings.filterwarnings("ignore", "'benchmarks", RuntimeWarning, "runpy")


@dataclass(frozen=True)
class Case:
    """One benchmark case.

    Args:
        name: How it is called in the table.
        prepare: A function at the top of a module; called with the arguments in the case's own process, it returns what
            a turn does. What that returns is still alive when memory is looked at, and dropped before the next turn.
        arguments: For `prepare`.
        limit: Seconds below which the machine cannot do it, by what the benchmark says; None for none.
        images: How many a turn goes through, where that is what it does.
    """

    name: str
    prepare: Callable[..., Callable[[], object]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = None
    images: int | None = None


@dataclass(frozen=True)
class Checked:
    """A turn whose output was compared with what is expected, which `prepare` may return.

    Args:
        take: The turn.
        difference: The largest difference, relative to the largest expected value.
    """

    take: Callable[[], object]
    difference: float

    def __call__(self) -> object:
        """Take the turn."""
        return self.take()


@dataclass(frozen=True)
class Memory:
    """Memory of a turn, in bytes on top of the process before it; None if the system does not report it.

    Args:
        peak: Resident memory at its highest, files that are mapped included.
        own: Resident memory that is no file's, at the end, with what the turn made.
        device: Memory of the GPU at its highest, with what the case holds between turns; None without one.
    """

    peak: int | None
    own: int | None
    device: int | None


@dataclass(frozen=True)
class Result:
    """Result of all turns of a case.

    Args:
        name: Of the case.
        seconds: Median of the turns.
        fastest: Of the turns, which is what is left where the machine does other work as well.
        slowest: Of the turns.
        ratio: Of the medians, to the first case.
        interval: Interval of that ratio in 95 of 100 bootstrap draws of the timed turns.
        ratio_of_fastest: Likewise of the fastest turns.
        limit: As the case says.
        images: As the case says.
        peak: Of the median of the turns for the memory, as `own` and `device`.
        difference: Of a `Checked` turn.
    """

    name: str
    seconds: float
    fastest: float
    slowest: float
    ratio: float
    interval: tuple[float, float]
    ratio_of_fastest: float
    limit: float | None
    images: int | None
    peak: int | None
    own: int | None
    device: int | None
    difference: float | None = None


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the common options."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--turns", type=int, default=7, help="timed turns of each case, after one to warm up")
    result.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}/")
    return result


def compare(
    cases: Sequence[Case], turns: int, at_once: int = 1, keep_memory: bool = False, one_process: bool = False
) -> list[Result]:
    """Time cases in interleaved turns.

    Args:
        cases: The first is what the others are compared with.
        turns: Of each case, after one that warms up and does not count.
        at_once: How many cases are prepared at a time: more for those that compile, where cores and memory suffice.
        keep_memory: Let every process use again what a turn freed, for what runs over and over in one process: new
            pages cost as much as a tenth of a step or a third, as the machine pleases.
        one_process: Run all cases in this process, which opens a GPU once, not once for each.

    Raises:
        RuntimeError: A case failed; its trace is in the message.
    """
    timed: dict[str, list[float]] = {case.name: [] for case in cases}
    differences, memory = {}, {}
    with ExitStack() as stack:
        if one_process:
            workers: Sequence[_Here | _Elsewhere] = [_Here(case, keep_memory) for case in cases]
        else:
            workers = _processes(cases, keep_memory, at_once, stack)
        bar = stack.enter_context(tqdm(total=len(cases) * (turns + 3), unit="turn", disable=None, leave=False))
        for start in range(0, len(workers), at_once):
            together = workers[start : start + at_once]
            for worker in together:
                worker.begin("prepare")
            for worker in together:
                differences[worker.case.name] = worker.end()
                bar.update()
        for turn in range(turns + 1):
            for worker in workers:
                worker.begin("time")
                seconds = worker.end()
                if turn:
                    timed[worker.case.name].append(seconds)
                bar.update()
        for worker in workers:
            worker.begin("weigh")
            memory[worker.case.name] = worker.end()
            bar.update()
    first = timed[cases[0].name]
    return [_result(case, timed[case.name], first, memory[case.name], differences[case.name]) for case in cases]


def _processes(cases: Sequence[Case], keep_memory: bool, at_once: int, stack: ExitStack) -> "list[_Elsewhere]":
    """Start a process for each case; they end with the stack."""
    # A forked process has all imports for nothing, but no way to a GPU that its parent has looked at.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    os.environ["TQDM_DISABLE"] = "1"  # for the processes, whose progress bars would overlap
    if at_once > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // at_once))  # they would wait for one another
    context.set_forkserver_preload([getattr(sys.modules["__main__"].__spec__, "name", __name__)])
    workers: list[_Elsewhere] = []
    stack.callback(_end, workers)
    for case in cases:
        workers.append(_Elsewhere(case, keep_memory, context))
    return workers


def _end(workers: "Sequence[_Elsewhere]") -> None:
    """End the processes, all within ten seconds."""
    for worker in workers:
        worker.connection.close()  # which ends the process
    deadline = time.monotonic() + 10
    for worker in workers:
        worker.process.join(timeout=max(0, deadline - time.monotonic()))
        worker.process.terminate()


class _Elsewhere:
    """A case in a process of its own."""

    def __init__(self, case: Case, keep_memory: bool, context: Any) -> None:
        self.case = case
        self.connection, there = context.Pipe()
        # No daemon, which could have no workers of its own; it ends when its connection closes.
        self.process = context.Process(target=_serve, args=(there, case, keep_memory), daemon=False)
        self.process.start()
        there.close()

    def begin(self, what: str) -> None:
        """Begin to prepare, time or weigh."""
        self.connection.send(what)

    def end(self) -> Any:
        """Wait for the answer."""
        try:
            answer = self.connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.case.name}: its process ended, perhaps out of memory") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self.case.name} failed:\n{answer}")
        return answer


class _Here:
    """A case in this process."""

    def __init__(self, case: Case, keep_memory: bool) -> None:
        self.case, self.turns = case, _Turns(case, keep_memory)

    def begin(self, what: str) -> None:
        """Prepare, time or weigh."""
        try:
            self.answer = getattr(self.turns, what)()
        except Exception as error:
            raise RuntimeError(f"{self.case.name} failed:\n{traceback.format_exc()}") from error

    def end(self) -> Any:
        """Return the answer."""
        return self.answer


def _result(case: Case, seconds: list[float], first: list[float], memory: Memory, difference: float | None) -> Result:
    median, fastest = statistics.median(seconds), min(seconds)
    return Result(
        name=case.name,
        seconds=median,
        fastest=fastest,
        slowest=max(seconds),
        ratio=median / statistics.median(first),
        interval=ratio_interval(seconds, first),
        ratio_of_fastest=fastest / min(first),
        limit=case.limit,
        images=case.images,
        peak=memory.peak,
        own=memory.own,
        device=memory.device,
        difference=difference,
    )


def ratio_interval(seconds: Sequence[float], first: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval of the ratio of the medians (95%), drawing the same turns for both."""
    drawn = np.random.default_rng(0).integers(len(seconds), size=(2000, len(seconds)))
    ratios = np.median(np.array(seconds)[drawn], axis=1) / np.median(np.array(first)[drawn], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def _serve(connection: Connection, case: Case, keep_memory: bool) -> None:
    """Prepare a case and run its turns on request, until the connection closes."""
    turns = _Turns(case, keep_memory)
    try:
        while True:
            connection.send(getattr(turns, connection.recv())())
    except EOFError:
        pass
    except BaseException:
        connection.send(traceback.format_exc())


class _Turns:
    """The turns of a case, in the process that is running."""

    def __init__(self, case: Case, keep_memory: bool) -> None:
        self.case, self.keep_memory = case, keep_memory
        self.repeats, self.seconds = 1, 0.0

    def prepare(self) -> float | None:
        """Make what a turn does; return the difference of a `Checked` one."""
        if self.keep_memory:
            keep_freed_memory()
        others = _allocated()
        self.take_turn = self.case.prepare(**self.case.arguments)
        _leave_the_gpu_to_others()
        self.held = _allocated() - others
        return self.take_turn.difference if isinstance(self.take_turn, Checked) else None

    def time(self) -> float:
        """Return the seconds of a turn; a short one is repeated from the second time on."""
        self.seconds = _time(self.take_turn, self.repeats)
        self.repeats = max(self.repeats, math.ceil(LONG_ENOUGH / self.seconds))
        return self.seconds

    def weigh(self) -> Memory:
        """Return the memory of a turn, the median of three if it is short."""
        weighed = [_weigh(self.take_turn, self.held) for _ in range(3 if self.seconds < SHORT else 1)]
        return sorted(weighed, key=lambda memory: memory.peak or 0)[len(weighed) // 2]


def _time(take_turn: Callable[[], object], repeats: int) -> float:
    gc.collect()
    if torch.cuda.is_initialized():
        take_turn()  # warm up again: clocks dropped and memory was returned during the other turns
    _synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        take_turn()
    _synchronize()
    seconds = (time.perf_counter() - start) / repeats
    _leave_the_gpu_to_others()
    return seconds


def _weigh(take_turn: Callable[[], object], held: int) -> Memory:
    """Run a turn in which the C library returns freed memory at once: memory it keeps would hide the peak.

    Args:
        take_turn: The turn.
        held: Bytes of the GPU that its case holds between turns.
    """
    gc.collect()
    others = _allocated() - held
    library = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if library:
        library.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
        library.malloc_trim(0)
    before = _memory()
    _forget_peaks()
    made = take_turn()
    _synchronize()
    peak = _memory()
    if library:
        library.malloc_trim(0)
    after = _memory()
    del made
    device = torch.cuda.max_memory_allocated() - others if torch.cuda.is_initialized() else None
    _leave_the_gpu_to_others()
    if before is None or peak is None or after is None:
        return Memory(None, None, device)
    return Memory(peak["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"], device)


def _memory() -> dict[str, int] | None:
    """Return Linux's memory statistics of this process, in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = (line.split() for line in status.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def _forget_peaks() -> None:
    peak = Path("/proc/self/clear_refs")
    if peak.exists():
        peak.write_text("5")  # resets VmHWM
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _allocated() -> int:
    """Return the bytes of the GPU that this process has allocated."""
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


def _leave_the_gpu_to_others() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# Hardware limits


def memory_bandwidth(nbytes: int = 2**28) -> float:
    """Return the memory bandwidth of one copying thread, in bytes per second, the best of ten runs."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return nbytes / min(_seconds(lambda: target.copy_(source)) for _ in range(10))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Reporting


def name_of_run(name: str, options: argparse.ArgumentParser, chosen: argparse.Namespace) -> str:
    """Return a benchmark's name with the given options, so that no page overwrites another."""
    given: list[str] = []
    for option, value in vars(chosen).items():
        if option not in ("turns", "write") and value != options.get_default(option):
            given += [option] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
    return re.sub("[^a-z0-9]+", "-", "-".join([name, *given]).lower())


def rates(results: Sequence[Result], first: str) -> str:
    """Return a Markdown table of images per second, and of the ratio to the first case."""
    lines = [f"| case | images/s | times {first} |", "|---|---:|---:|"]
    for result in results:
        assert result.images is not None
        lines.append(f"| {result.name} | {result.images / result.seconds:.0f} | {1 / result.ratio:.2f} |")
    return "\n".join(lines)


def report(name: str, title: str, notes: str, results: Sequence[Result], write: bool, last: bool = True) -> None:
    """Print a table for people and a line of JSON for programs; with `write`, also to a dated file.

    Args:
        name: Of the run, for the name of the file.
        title: Of the page.
        notes: What is measured and how to read it, in Markdown.
        results: Of `compare`.
        write: Whether to write `results/DATE-NAME-MACHINE.md`.
        last: Whether these are all results; while they are not, the page is written and nothing printed.
    """
    publish(name, title, f"{notes}\n\n{table(results)}", [asdict(one) for one in results], write, last)


def publish(
    name: str, title: str, body: str, results: Sequence[Mapping[str, Any]], write: bool, last: bool = True
) -> None:
    """Print a page, and with `write`, also write it to a dated file.

    Args:
        name: Of the run, for the name of the file.
        title: Of the page.
        body: Text and tables in Markdown.
        results: The figures, for the line of JSON.
        write: As in `report`.
        last: As in `report`.
    """
    environment = machine()
    line = json.dumps({"benchmark": name, "environment": environment, "results": results})
    page = "\n".join(
        [
            f"# {title}\n",
            f"{body}\n",
            *(f"- {what}: {value}" for what, value in environment.items()),
            f"\n```json\n{line}\n```\n",
        ]
    )
    path = RESULTS / f"{environment['date']}-{name}-{slug(environment)}.md"
    if write:
        path.write_text(page, encoding="utf-8")
    if last:
        print(page, f"written: {path}" if write else "", sep="")


def slug(environment: Mapping[str, str]) -> str:
    """Return a short name of a machine, by its GPU or its processor: "amd-epyc"."""
    name = environment["processor"].partition(",")[0] if environment["GPU"] == "none" else environment["GPU"]
    words = re.sub(r"\((R|TM)\)|@.*", " ", name).lower()
    return "-".join(word for word in re.findall("[a-z0-9]+", words) if word not in ("processor", "cpu"))


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with a row for each case."""
    gpu = any(result.device is not None for result in results)
    checked = any(result.difference is not None for result in results)
    columns = ["case", "median", "fastest", "slowest", "ratio (95%)", "of the fastest", "limit", "peak memory"]
    columns += ["of it its own", *["GPU memory"] * gpu, *["off by"] * checked]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    for one in results:
        lines.append(
            [
                one.name,
                *(_duration(seconds) for seconds in (one.seconds, one.fastest, one.slowest)),
                f"{one.ratio:.2f} ({one.interval[0]:.2f} to {one.interval[1]:.2f})",
                f"{one.ratio_of_fastest:.2f}",
                _duration(one.limit),
                _size(one.peak),
                _size(one.own),
                *([_size(one.device)] if gpu else []),
                *([("-" if one.difference is None else f"{one.difference:.1e}")] if checked else []),
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{round(nbytes / MEGABYTE)} MB"


def machine() -> dict[str, str]:
    """Return the environment of the measurement."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    name = f"{model or platform.processor() or platform.machine()} ({instructions()})"
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "processor": f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "threads": str(torch.get_num_threads()),
        "load in the minute before": f"{LOAD_BEFORE:.1f}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES),
    }


def instructions() -> str:
    """Return which vector instructions torch finds: processors of one name differ in them, and in speed."""
    more = {"bf16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name, there in more.items() if there)])
