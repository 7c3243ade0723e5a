"""Side by side: every case in a process of its own, all of them taking turns, so that what the machine does meanwhile
(another program, a slow disk, a throttled core) hits them alike.

A case is prepared once, warmed up, and timed in interleaved turns. Reported are medians with their spread, the ratio to
the first case, a limit of the machine beside each figure, and the peak of memory. On a GPU each turn is synchronised.
"""

import argparse
import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "transformers", "safetensors", "timm", "vit-pytorch", "torchvision")
MEGABYTE = 10**6


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Args:
        name: How it is called in the table.
        prepare: A function at the top of a module; called with the arguments in the case's own process, it returns what
            a turn does. What that returns is still alive when memory is looked at, and dropped before the next turn.
        arguments: For `prepare`.
        limit: Seconds below which the machine cannot do it, by what the benchmark says; None for none.
    """

    name: str
    prepare: Callable[..., Callable[[], object]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = None


@dataclass(frozen=True)
class Turn:
    """What one turn took; memory in bytes beyond what the process had before it.

    Args:
        seconds: Of wall-clock time.
        peak: Resident memory at its highest, files that are mapped included; None where the system does not tell.
        own: Resident memory that is no file's, at the end.
        device: Memory of the GPU at its highest; None without one.
    """

    seconds: float
    peak: int | None
    own: int | None
    device: int | None


@dataclass(frozen=True)
class Result:
    """What all turns of a case come to.

    Args:
        name: Of the case.
        seconds: Median of the turns.
        fastest: Of the turns, which is what is left where the machine does other work as well.
        slowest: Of the turns.
        ratio: Of the medians, to the first case.
        ratio_of_fastest: Likewise of the fastest turns.
        limit: As the case says.
        peak: The largest of any turn, as `own` and `device`.
    """

    name: str
    seconds: float
    fastest: float
    slowest: float
    ratio: float
    ratio_of_fastest: float
    limit: float | None
    peak: int | None
    own: int | None
    device: int | None


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--turns", type=int, default=7, help="timed turns of each case, after one to warm up")
    result.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}/")
    return result


def compare(cases: Sequence[Case], turns: int) -> list[Result]:
    """Time cases in interleaved turns.

    Args:
        cases: The first is what the others are compared with.
        turns: Of each case, after one that warms up and does not count.

    Raises:
        RuntimeError: A case failed; its trace is in the message.
    """
    context = multiprocessing.get_context("spawn")
    taken: dict[str, list[Turn]] = {case.name: [] for case in cases}
    workers = []
    try:
        for case in cases:
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there, case.prepare, dict(case.arguments)), daemon=True)
            worker.start()
            there.close()
            workers.append((case, worker, here))
            _ask(case, here)  # prepared, before the next one is
        for turn in range(turns + 1):
            for case, _, here in workers:
                here.send(True)
                measured = _ask(case, here)
                if turn:
                    taken[case.name].append(measured)
    finally:
        for _, worker, here in workers:
            here.close()
            worker.join(timeout=10)
            worker.terminate()
    first = [turn.seconds for turn in taken[cases[0].name]]
    return [_result(case, taken[case.name], statistics.median(first), min(first)) for case in cases]


def _result(case: Case, turns: Sequence[Turn], median_of_first: float, fastest_of_first: float) -> Result:
    def largest(name: str) -> int | None:
        return max((value for turn in turns if (value := getattr(turn, name)) is not None), default=None)

    seconds = [turn.seconds for turn in turns]
    median, fastest = statistics.median(seconds), min(seconds)
    ratios = (median / median_of_first, fastest / fastest_of_first)
    memory = (largest("peak"), largest("own"), largest("device"))
    return Result(case.name, median, fastest, max(seconds), *ratios, case.limit, *memory)


def _ask(case: Case, connection: Connection) -> Any:
    try:
        answer = connection.recv()
    except EOFError:
        raise RuntimeError(f"{case.name}: its process ended, perhaps for want of memory") from None
    if isinstance(answer, str):
        raise RuntimeError(f"{case.name} failed:\n{answer}")
    return answer


def _serve(connection: Connection, prepare: Callable[..., Callable[[], object]], arguments: dict[str, Any]) -> None:
    """Prepare a case, then take a turn whenever told to, until the other end closes."""
    try:
        take_turn = prepare(**arguments)
        connection.send(None)
        while connection.recv():
            connection.send(_timed(take_turn))
    except EOFError:
        pass
    except BaseException:
        connection.send(traceback.format_exc())


def _timed(take_turn: Callable[[], object]) -> Turn:
    gc.collect()
    before = _memory()
    _forget_peaks()
    _synchronize()
    start = time.perf_counter()
    made = take_turn()
    _synchronize()
    seconds = time.perf_counter() - start
    after = _memory()
    del made
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    if before is None or after is None:
        return Turn(seconds, None, None, device)
    return Turn(seconds, after["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"], device)


def _memory() -> dict[str, int] | None:
    """Return what Linux says of this process's memory, in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = (line.split() for line in status.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def _forget_peaks() -> None:
    peak = Path("/proc/self/clear_refs")
    if peak.exists():
        peak.write_text("5")  # VmHWM begins anew
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# Limits of the machine


def memory_bandwidth(nbytes: int = 2**28) -> float:
    """Return the bytes per second that one thread copies, the best of ten times."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return nbytes / min(_seconds(lambda: target.copy_(source)) for _ in range(10))


def matmul_rate(device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 2048) -> float:
    """Return the floating-point operations per second of a large product of matrices, the best of ten times."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(_seconds(lambda: a @ b) for _ in range(10))


def _seconds(work: Callable[[], object]) -> float:
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - start


# Reporting


def report(name: str, title: str, notes: str, results: Sequence[Result], write: bool) -> None:
    """Print a table for people and a line of JSON for programs; write the same to a dated file where asked for.

    Args:
        name: Of the benchmark, for the name of the file.
        title: Of the page.
        notes: What is measured and how to read it, in Markdown.
        results: Of `compare`.
        write: Whether to write `results/DATE-NAME.md`.
    """
    environment = machine()
    line = json.dumps({"benchmark": name, "environment": environment, "results": [asdict(one) for one in results]})
    page = "\n".join(
        [
            f"# {title}\n",
            f"{notes}\n",
            table(results),
            "",
            *(f"- {what}: {value}" for what, value in environment.items()),
            f"\n```json\n{line}\n```\n",
        ]
    )
    print(page)
    if write:
        path = RESULTS / f"{environment['date']}-{name}.md"
        path.write_text(page, encoding="utf-8")
        print(f"written: {path}")


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with a line for each case."""
    gpu = any(result.device is not None for result in results)
    columns = ["case", "median", "ratio", "fastest", "ratio", "slowest", "limit", "peak memory", "of it its own"]
    columns += ["GPU memory"] * gpu
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    for one in results:
        cells = [one.name, _time(one.seconds), f"{one.ratio:.2f}", _time(one.fastest), f"{one.ratio_of_fastest:.2f}"]
        lines.append(
            [
                *cells,
                _time(one.slowest),
                _time(one.limit),
                _size(one.peak),
                _size(one.own),
                *([_size(one.device)] if gpu else []),
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2f} ms"


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MEGABYTE:.0f} MB"


def machine() -> dict[str, str]:
    """Say where and with what a figure was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "threads": str(torch.get_num_threads()),
        "load of the last minute": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES),
    }
