"""Run on a GPU what has not been measured yet: each row of `ROWS` within its budget of seconds, all within ten minutes.

    make gpu                        # or: python -m benchmarks.gpu --minutes 10
    python -m benchmarks.gpu --device cpu --results FOLDER        # every row in a tiny size, to see that it runs

The page `results/DATE-gpu-MACHINE.md` is written after each row, and the next start goes on with the rest: first the
rows that have not run, then those that failed or were stopped, these with twice the budget. A row whose budget exceeds
the time left makes way for a shorter one. Nothing is installed; a row whose packages are missing is skipped and names
them.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks import harness

TAIL = 20  # lines that a failed row says
GRACE = 5  # seconds of a budget for a row to end after an interrupt; then it is killed
DONE, STOPPED, FAILED, SKIPPED, WAITING = "done", "stopped at its budget", "failed", "skipped", "not run"
SCRIPTS = ("timm", "accelerate", "datasets", "pyarrow", "sklearn")  # what the scripts and their images need
TESTING = ("pytest", "hypothesis", "vit_pytorch", "torchvision")
TESTS = "pytest -q --tb=line tests/model/test_gpu.py"
SLOW_TESTS = "train or compiled or killed or scripts or micro_batches"


@dataclass(frozen=True)
class Row:
    """A command to run.

    Args:
        name: Name in the table.
        seconds: Budget.
        command: Words after `python -m`.
        small: The same in a tiny size, on a CPU.
        needs: Packages that must be installed.
    """

    name: str
    seconds: int
    command: str
    small: str
    needs: Sequence[str] = ("timm",)


ROWS = (
    Row("tests of numbers on a GPU", 90, f"{TESTS} -k 'not ({SLOW_TESTS})'", TESTS, (*SCRIPTS, *TESTING)),
    *(
        Row(f"compiled steps of {size}", seconds,
            f"benchmarks.bench_train_step --device cuda --sizes {size}:{batch} --modes compiled "
            "--packages plain_vit timm transformers torchvision --write",
            "benchmarks.bench_train_step --sizes tiny:2 --dtypes float32 --turns 1 --packages plain_vit timm --write")
        for size, batch, seconds in (("base", 256, 150), ("large", 128, 200))
    ),
    Row("a whole run", 220, "benchmarks.bench_run --device cuda --write",
        "benchmarks.bench_run --size tiny --images 20 --batch 5 --workers 1 --warm-up 1 --eager --write", SCRIPTS),
    Row("eager passes", 90,
        "benchmarks.bench_forward --device cuda --one-process --sizes tiny:32 base:1 base:64 --modes eager prepared "
        "--turns 9 --packages plain_vit timm transformers torchvision --write",
        "benchmarks.bench_forward --sizes tiny:2 --dtypes float32 --modes eager --turns 1 --packages plain_vit timm "
        "--write"),
    Row("features of files", 200, "benchmarks.bench_extract --bulk base:40000 --turns 2 --write",
        "benchmarks.bench_extract --bulk tiny:12 --batch 4 --workers 1 --precision no --turns 1 --write", SCRIPTS),
    *(
        Row(f"largest batches of {size}", seconds, f"benchmarks.bench_memory --device cuda --sizes {size} --write",
            "benchmarks.bench_memory --sizes tiny --most 1 --write")
        for size, seconds in (("base", 150), ("large", 200))
    ),
    Row("kernels of compiled steps", 150, "benchmarks.bench_gpu_kernels --steps base:256 large:128 --write",
        "benchmarks.bench_gpu_kernels --device cpu --steps tiny:2 --mode eager --write"),
    *(
        Row(f"inference of {size}, {batch} images", 100,
            f"benchmarks.bench_forward --device cuda --one-process --sizes {size}:{batch} "
            "--modes prepared max-autotune --write",
            "benchmarks.bench_forward --sizes tiny:1 --dtypes float32 --modes prepared max-autotune --turns 1 --write")
        for size in ("base", "large")
        for batch in (1, 32, 256)
    ),
    Row("tests of training on a GPU", 300, f"{TESTS} -k '{SLOW_TESTS}'", TESTS, (*SCRIPTS, *TESTING)),
)  # fmt: skip


def run(rows: Sequence[Row], names: Sequence[str], minutes: float, small: bool) -> None:
    """Run the rows that are not done, as far as the time suffices, and publish after each.

    Args:
        rows: All rows, in order.
        names: Names of the rows to run whether they are done or not; without any, all that are not done.
        minutes: Time of all.
        small: Whether to run the tiny sizes.
    """
    end = time.monotonic() + 60 * minutes
    before = [one for page in pages_before()[-1:] for one in harness.read_page(page)["results"]]
    found = {one["name"]: one for one in before if one["ended"] != WAITING}
    state = {row.name: found.get(row.name, {}).get("ended") for row in rows}
    left = [row for row in rows if (row.name in names if names else state[row.name] != DONE)]
    for row in sorted(left, key=lambda row: state[row.name] in (STOPPED, FAILED)):
        budget = row.seconds * (2 if state[row.name] == STOPPED else 1)
        missing = [package for package in row.needs if not harness.is_installed(package)]
        if missing:
            found[row.name] = {"ended": SKIPPED, "said": f"not installed: {', '.join(missing)}"}
        elif budget <= end - time.monotonic():
            print(f"{row.name}: at most {budget} s ...", flush=True)
            found[row.name] = take(row, budget, small)
        else:
            continue
        publish(rows, found)
        print(f"{row.name}: {found[row.name]['ended']}; {found[row.name]['said']}", flush=True)
    if waiting := [row.name for row in rows if row.name not in found]:
        print(f"not run yet, and first in the next start: {', '.join(waiting)}")


def take(row: Row, budget: float, small: bool) -> dict[str, Any]:
    """Run a row within a budget of seconds, and return how it ended, its pages and its last words."""
    words = [sys.executable, "-m", *shlex.split(row.small if small else row.command)]
    since, begun = time.monotonic(), time.time()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(max(budget - GRACE, 0))
            ended = FAILED if code else DONE
        except subprocess.TimeoutExpired:
            ended = STOPPED
            os.killpg(process.pid, signal.SIGINT)  # which lets pytest say what it has found so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = round(time.monotonic() - since, 1)
        printed, errors = (last_lines(file) for file in (out, err))
    pages = sorted(path.name for path in harness.RESULTS.glob("*.md") if path.stat().st_mtime >= begun)
    so_far = " so far" if ended == STOPPED else ""
    said = f"measured{so_far}: {', '.join(pages)}" if pages else "\n".join(printed[-1:] or errors[-1:])
    if ended == FAILED:
        said = "\n".join(printed + errors)
    return {"ended": ended, "seconds": seconds, "pages": pages, "said": said, "command": shlex.join(words[1:])}


def last_lines(file: IO[str]) -> list[str]:
    """Return the last lines of a file that are not empty."""
    file.seek(0)
    return [line for line in file.read().splitlines() if line.strip()][-TAIL:]


def pages_before() -> list[Path]:
    """Return the pages of this machine, the newest last."""
    return sorted(harness.RESULTS.glob(f"????-??-??-gpu-{harness.slug(harness.machine())}.md"))


def publish(rows: Sequence[Row], found: Mapping[str, dict[str, Any]]) -> None:
    """Write the page, in place of an older one."""
    ended = [{"name": row.name, "ended": WAITING, "said": "", **found.get(row.name, {})} for row in rows]
    lines = ["| row | ended | seconds | |", "| --- | --- | ---: | --- |"]
    for one in ended:
        said = one["said"].replace("\n", "<br>").replace("|", "\\|")
        lines.append(f"| {one['name']} | {one['ended']} | {one.get('seconds', '-')} | {said} |")
    complete = all(one["ended"] == DONE for one in ended)
    harness.publish("gpu", "What was run on a GPU", "\n".join(lines), ended, write=True, last=complete)
    for older in pages_before()[:-1]:
        older.unlink()


def main(words: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: every row in a tiny size")
    options.add_argument("--rows", nargs="+", choices=[row.name for row in rows], help="only these, also if done")
    options.add_argument("--results", type=Path, help=f"folder of the pages (default: {harness.RESULTS})")
    chosen = options.parse_args(words)
    small = chosen.device == "cpu"
    if small and chosen.results is None:
        options.error("figures of tiny sizes are no results: give them a folder of their own with --results")
    if chosen.results is not None:
        chosen.results.mkdir(parents=True, exist_ok=True)
        harness.RESULTS = chosen.results.resolve()
        os.environ["PLAIN_VIT_RESULTS"] = str(harness.RESULTS)
    if not small and harness.machine()["GPU"] == "none":
        options.error("there is no GPU here: --device cpu runs every row in a tiny size, to see that it runs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the row that runs is ended too
    run(rows, chosen.rows or (), chosen.minutes, small)


if __name__ == "__main__":
    main()
