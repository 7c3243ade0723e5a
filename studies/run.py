"""Run a study, or show what it would run.

    python -m studies.run                             # lists the studies and their progress
    python -m studies.run positions                   # desk size: does the runs that are left
    python -m studies.run positions --size smoke      # minutes: checks that everything works
    python -m studies.run positions --size paper      # prints commands for GPUs, with hours; runs nothing

A run that has a result is not repeated. You can stop at any time with Ctrl-C or `kill`: the same command continues.
Start the same command on other machines that share this folder, and they share the queue. README.md says more.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from studies.paper import print_commands
from studies.results import count_runs, planned_runs, read_results, results_file, runs_of
from studies.study import HERE, ROOT, SIZES, Study, open_study, study_names
from studies.work import Queue

OPTIONS_OF_RUNS = {"model", "from_scratch", "learning_rate", "seed", "output_dir", "resume"}
RUNS, RESULTS = Path("runs/studies"), HERE.relative_to(ROOT) / "results"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0 if the study is done."""
    try:
        code = run(parser().parse_args(words))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, like `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command, and return its exit code."""
    os.chdir(ROOT)  # so that the printed commands work in the checkout
    if arguments.study is None:
        for name in study_names():
            print(status(open_study(name, arguments.size), arguments.results))
        return 0
    try:
        study = open_study(arguments.study, arguments.size)
        study = study.only(arguments.only) if arguments.only else study
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if study.size == "paper":
        print_commands(study, arguments.runs)
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = arguments.jobs or max(1, cores // arguments.threads)
    try:
        more = options_of_machine(arguments.more, study)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    queue = Queue(study, arguments.runs, arguments.results, jobs, arguments.threads, most=arguments.most, more=more)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopping(queue))
    print(status(study, arguments.results))
    complete = queue.work()
    print(status(study, arguments.results))
    return 128 + signal.SIGTERM if queue.stopped else 0 if complete else 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("study", nargs="?", help="name of a study (default: list them)")
    made.add_argument("--size", choices=SIZES, default="desk")
    made.add_argument("--only", nargs="+", help="names of some of its contenders")
    made.add_argument("--jobs", type=int, help="runs at a time (default: as many as the cores have room for)")
    made.add_argument("--threads", type=int, default=1, help="of each run")
    made.add_argument("--most", type=int, help="stop after this many runs")
    made.add_argument(
        "--more", nargs="+", default=[], metavar="NAME=VALUE",
        help="options of every run that say how it is computed, not what: num_workers=4 and compile=True with a GPU",
    )  # fmt: skip
    made.add_argument("--runs", type=Path, default=RUNS, help="folder of models, logs and claims")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return made


def options_of_machine(words: Sequence[str], study: Study) -> dict[str, str]:
    """Return the options of `--more` by name.

    Raises:
        ValueError: An option has no value, or is set by the study.
    """
    if wrong := [word for word in words if "=" not in word]:
        raise ValueError(f"--more has {wrong[0]!r}: expected NAME=VALUE, such as num_workers=4.")
    more = dict(word.split("=", 1) for word in words)
    theirs = {name for each in runs_of(study) for name in each.options} | OPTIONS_OF_RUNS
    if taken := sorted(theirs & more.keys()):
        raise ValueError(f"--more has {taken[0]}, which the study decides: change {study.name}.yaml, or omit it.")
    return more


def queue_of_models(words: Sequence[str] | None, description: str | None) -> Queue:
    """Parse the command line of a command that analyses the models of a study, and return the study's queue.

    Args:
        words: words of the command line (default: the arguments of the process).
        description: description of the command.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("study", choices=study_names())
    made.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = made.parse_args(words)
    os.chdir(ROOT)
    return Queue(open_study(arguments.study, "desk"), arguments.runs, arguments.results, jobs=1, threads=1)


def stopping(queue: Queue) -> signal.Handlers:
    """Return a signal handler that stops a queue."""

    def stop(number: int, frame: FrameType | None) -> None:
        print("stopping: runs in progress write a checkpoint")
        queue.stop()

    return stop  # type: ignore[return-value]


def status(study: Study, results: Path) -> str:
    """Return a line about the progress of a study."""
    done = read_results(results_file(results, study))
    planned = planned_runs(study, done)
    count = sum(run.key in done for run in planned)
    return f"{study.name} ({study.size}): {count} of {count_runs(study, done)} runs done. {study.description['title']}"


if __name__ == "__main__":
    sys.exit(main())
