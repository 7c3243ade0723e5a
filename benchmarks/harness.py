"""Run benchmark cases side by side: each in a process of its own (or all in one), in alternating turns, so that
disturbances of the machine (another program, a slow disk, a throttled core) affect all cases alike.

A case is prepared once, warmed up, and timed in interleaved turns; its memory is measured in further, untimed turns.
The report gives medians with their spread, the ratio to the first case, a limit of the machine beside each figure, and
the peak memory. On a GPU each turn is synchronised.
"""

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import importlib.util
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

RESULTS = Path(os.environ.get("PLAIN_VIT_RESULTS", Path(__file__).with_name("results")))
PACKAGES = ("torch", "transformers", "safetensors", "timm", "vit-pytorch", "torchvision")
MEGABYTE = 10**6
LONG_ENOUGH = 0.1  # seconds: shorter work is repeated within a turn
SHORT = 1.0  # seconds: memory of shorter work is measured three times instead of once
LOAD_BEFORE = os.getloadavg()[0]  # of the last minute, before this process adds its own

MAPPED_FROM = 65536  # allocations of at least this many bytes are mapped, and returned to the system when freed

# A forked process runs the already imported module of the benchmark again, to find its functions by name.
warnings.filterwarnings("ignore", "'benchmarks", RuntimeWarning, "runpy")


@dataclass(frozen=True)
class Case:
    """One benchmark case.

    Args:
        name: Name in the table.
        prepare: A top-level function, called with `arguments` in the case's own process; it returns the function that
            is a turn. The result of a turn is kept until memory is measured, and dropped before the next turn.
        arguments: Arguments of `prepare`.
        limit: Lower bound of the seconds per turn on this machine, as the benchmark computes it, or None.
        images: Number of images per turn, if a turn processes images.
    """

    name: str
    prepare: Callable[..., Callable[[], object]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = None
    images: int | None = None


@dataclass(frozen=True)
class Checked:
    """A turn whose output was compared with the expected output; `prepare` may return one.

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
    """Memory of a turn, in bytes above the process's memory before it; None if the system does not report it.

    Args:
        peak: Peak resident memory, including mapped files.
        own: Resident memory without files at the end of the turn, including its result.
        device: Peak GPU memory, including what the case holds between turns; None without a GPU.
    """

    peak: int | None
    own: int | None
    device: int | None


@dataclass(frozen=True)
class Result:
    """Result of all turns of a case.

    Args:
        name: Name of the case.
        seconds: Median seconds of the turns.
        fastest: Seconds of the fastest turn, the least disturbed by other work of the machine.
        slowest: Seconds of the slowest turn.
        ratio: Ratio of the median to the first case's median.
        interval: 95% bootstrap interval of this ratio.
        ratio_of_fastest: Ratio of the fastest turn to the first case's fastest turn.
        limit: As in `Case`.
        images: As in `Case`.
        peak: As in `Memory`; the median of the turns that measure memory, as for `own` and `device`.
        difference: As in `Checked`.
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
    """Return an argument parser with the common options."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--turns", type=int, default=7, help="timed turns of each case, after one to warm up")
    result.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}/")
    return result


def compare(
    cases: Sequence[Case], turns: int, at_once: int = 1, keep_memory: bool = False, one_process: bool = False
) -> list[Result]:
    """Time cases in interleaved turns.

    Args:
        cases: The cases; all are compared with the first.
        turns: Number of turns of each case, after a warm-up that is not counted.
        at_once: Number of cases to prepare at a time; more than one is useful for cases that compile, if cores and
            memory suffice.
        keep_memory: Let processes reuse memory that a turn freed, as a long-running process does. New pages cost
            between a tenth and a third of a step, depending on the machine.
        one_process: Run all cases in this process, so that a GPU is opened once and not per case.

    Raises:
        RuntimeError: A case failed; the message contains its traceback.
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
    return [result_of(case, timed[case.name], first, memory[case.name], differences[case.name]) for case in cases]


def _processes(cases: Sequence[Case], keep_memory: bool, at_once: int, stack: ExitStack) -> "list[_Elsewhere]":
    """Start a process for each case; they end with the stack."""
    # A forked process has all imports already, but cannot use a GPU that its parent has initialised.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    os.environ["TQDM_DISABLE"] = "1"  # for the processes, whose progress bars would overlap
    if at_once > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // at_once))  # they would compete for cores
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
        # Not a daemon, which could not start workers; the process ends when its connection closes.
        self.process = context.Process(target=_serve, args=(there, case, keep_memory), daemon=False)
        self.process.start()
        there.close()

    def begin(self, what: str) -> None:
        """Start a step: prepare, time or weigh."""
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


def result_of(case: Case, seconds: list[float], first: list[float], memory: Memory, difference: float | None) -> Result:
    """Return what the seconds of a case's turns show, compared with those of the first case."""
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
        """Prepare the turn, and return the difference if it is `Checked`."""
        if self.keep_memory:
            keep_freed_memory()
        others = _allocated()
        self.take_turn = self.case.prepare(**self.case.arguments)
        _leave_the_gpu_to_others()
        self.held = _allocated() - others
        return self.take_turn.difference if isinstance(self.take_turn, Checked) else None

    def time(self) -> float:
        """Return the seconds of a turn; short turns are repeated, except the first time."""
        self.seconds = _time(self.take_turn, self.repeats, again=self.seconds < SHORT)
        self.repeats = max(self.repeats, math.ceil(LONG_ENOUGH / self.seconds))
        return self.seconds

    def weigh(self) -> Memory:
        """Return the memory of a turn, the median of three if it is short."""
        weighed = [_weigh(self.take_turn, self.held) for _ in range(3 if self.seconds < SHORT else 1)]
        return sorted(weighed, key=lambda memory: memory.peak or 0)[len(weighed) // 2]


def _time(take_turn: Callable[[], object], repeats: int, again: bool) -> float:
    gc.collect()
    if torch.cuda.is_initialized() and again:
        take_turn()  # warm up again: during the other cases' turns, clocks dropped and memory was returned
    _synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        take_turn()
    _synchronize()
    seconds = (time.perf_counter() - start) / repeats
    _leave_the_gpu_to_others()
    return seconds


def _weigh(take_turn: Callable[[], object], held: int) -> Memory:
    """Run a turn and measure its memory; the C library returns freed memory at once, since kept memory hides the peak.

    Args:
        take_turn: The turn.
        held: Bytes of GPU memory that the case holds between turns.
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
    """Return the memory bandwidth of one thread that copies, in bytes per second: the best of ten runs."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return nbytes / min(_seconds(lambda: target.copy_(source)) for _ in range(10))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# Reporting


def name_of_run(name: str, options: argparse.ArgumentParser, chosen: argparse.Namespace) -> str:
    """Return the benchmark's name followed by the given options, so that pages do not overwrite each other."""
    given: list[str] = []
    for option, value in vars(chosen).items():
        if option not in ("turns", "write", "packages") and value != options.get_default(option):
            given += [option] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
    return re.sub("[^a-z0-9]+", "-", "-".join([name, *given]).lower())


def rates(results: Sequence[Result], first: str) -> str:
    """Return a Markdown table of images per second and of the ratio to the first case."""
    lines = [f"| case | images/s | times {first} |", "|---|---:|---:|"]
    for result in results:
        assert result.images is not None
        lines.append(f"| {result.name} | {result.images / result.seconds:.0f} | {1 / result.ratio:.2f} |")
    return "\n".join(lines)


def report(name: str, title: str, notes: str, results: Sequence[Result], write: bool, last: bool = True) -> None:
    """Print a table for people and a line of JSON for programs; with `write`, also write them to a dated file.

    Args:
        name: Name of the run, used in the file name.
        title: Title of the page.
        notes: What is measured and how to read it, in Markdown.
        results: Results of `compare`.
        write: Whether to write `results/DATE-NAME-MACHINE.md`.
        last: Whether the results are complete; if not, the page is written, says so, and is not printed.
    """
    publish(name, title, f"{notes}\n\n{table(results)}", [asdict(one) for one in results], write, last)


def publish(
    name: str, title: str, body: str, results: Sequence[Mapping[str, Any]], write: bool, last: bool = True
) -> None:
    """Print a page; with `write`, also write it to a dated file.

    Args:
        name: Name of the run, used in the file name.
        title: Title of the page.
        body: Text and tables in Markdown.
        results: The figures for the line of JSON.
        write: As in `report`.
        last: As in `report`.
    """
    environment = machine()
    line = json.dumps({"benchmark": name, "complete": last, "environment": environment, "results": results})
    page = "\n".join(
        [
            f"# {title}\n",
            *([] if last else ["**Not complete:** the run had not ended when this was written.\n"]),
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


def read_page(path: Path) -> dict[str, Any]:
    """Return the figures of a page that `publish` wrote."""
    return json.loads(path.read_text(encoding="utf-8").split("```json\n")[1].split("\n```")[0])


def slug(environment: Mapping[str, str]) -> str:
    """Return a short name of a machine, from its GPU or processor: "amd-epyc"."""
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
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if is_installed(name)),
    }


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; its name may be that of its distribution."""
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def instructions() -> str:
    """Return the vector instructions that torch detects: processors of the same name differ in them, and in speed."""
    more = {"bf16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name, there in more.items() if there)])
