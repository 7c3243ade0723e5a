"""Results as JSON lines, one per finished run, appended under a lock, and statistics of these results."""

import functools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import filelock
from scipy import stats  # type: ignore[import-untyped]

from studies.compute import training_operations
from studies.study import CHOOSE, CHOOSING_SEED, COMPUTE, FIRST, REPORT, Run, Study

LAST = 0.2  # share of a curve that is compared with the equally long part before it
FLAT = 0.003  # largest rise of the accuracy that counts as flat


def results_file(folder: Path, study: Study) -> Path:
    """Return the file of a study's results."""
    return folder / f"{study.name}-{study.size}.jsonl"


def append_result(file: Path, line: Mapping[str, Any]) -> None:
    """Append a line atomically, even if several machines do so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(file.with_name(f".{file.name}.lock")), file.open("ab+") as stream:
        stream.seek(0, os.SEEK_END)
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":  # a writer was killed: start a new line, so that only its line is damaged
                stream.write(b"\n")
        stream.write(json.dumps(line).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file by the key of their run; the last line of a run wins.

    A line that is not JSON, as a killed writer leaves behind, is ignored: its run has no result.
    """
    found = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in lines:
        try:
            result = json.loads(line)
            found[result["key"]] = result
        except (ValueError, KeyError, TypeError):
            _say_once(f"{file.name} has a damaged line, {line[:40]!r}...: its run counts as not done")
    return found


_say_once = functools.cache(print)  # because a queue reads its results every few seconds


def is_flat(curve: Sequence[float]) -> bool:
    """Return whether a validation curve has stopped rising at its end.

    Args:
        curve: accuracies from 0 to 1, one per evaluation.
    """
    count = max(2, round(LAST * len(curve)))
    if len(curve) < 2 * count:
        return False
    return statistics.mean(curve[-count:]) - statistics.mean(curve[-2 * count : -count]) < FLAT


def chosen_rate(study: Study, contender: str, results: Mapping[str, Any]) -> float | None:
    """Return the learning rate with the best validation accuracy, or None while results are missing."""
    rates = study.learning_rates(contender)
    if len(rates) == 1:
        return rates[0]
    runs = {rate: study.run(contender, CHOOSE, rate, CHOOSING_SEED) for rate in rates}
    if any(run.key not in results for run in runs.values()):
        return None
    return max(rates, key=lambda rate: max(results[runs[rate].key]["validation"]))


def planned_runs(study: Study, results: Mapping[str, Any]) -> list[Run]:
    """Return the runs known so far in the order of execution: all choices of learning rates, then seed by seed.

    Reported runs are known once their learning rate is chosen. Stages shared by several runs occur once.
    """
    runs = [
        study.run(contender, CHOOSE, rate, CHOOSING_SEED)
        for contender in study.contenders
        if len(study.learning_rates(contender)) > 1
        for rate in study.learning_rates(contender)
    ]
    chosen = {contender: chosen_rate(study, contender, results) for contender in study.contenders}
    runs += [
        study.run(contender, REPORT, rate, seed)
        for seed in study.seeds
        for contender, rate in chosen.items()
        if rate is not None
    ]
    return [*{stage.key: stage for run in runs for stage in run.stages()}.values()]


def runs_of(study: Study, results: Mapping[str, Any] = MappingProxyType({})) -> list[Run]:
    """Return the runs of a whole study; contenders that are identical in this size share their runs.

    A learning rate that is not chosen yet is a negative placeholder, equal for contenders with the same candidates.
    """
    rates = {contender: study.learning_rates(contender) for contender in study.contenders}
    runs = [
        study.run(contender, CHOOSE, rate, CHOOSING_SEED)
        for contender, tried in rates.items()
        if len(tried) > 1
        for rate in tried
    ]
    choices = list(rates.values())
    for contender, tried in rates.items():
        chosen = chosen_rate(study, contender, results)
        rate = -1.0 - choices.index(tried) if chosen is None else chosen
        runs += [study.run(contender, REPORT, rate, seed) for seed in study.seeds]
    return [*{stage.key: stage for run in runs for stage in run.stages()}.values()]


def count_runs(study: Study, results: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Return the number of runs of a whole study; it shrinks if identical contenders choose the same rate."""
    return len(runs_of(study, results))


def seconds_left(study: Study, results: Mapping[str, Any]) -> float:
    """Return the estimated seconds of all runs without a result, done one after the other.

    The time of a run per epoch or step is estimated from the most similar finished runs: earlier stages for an earlier
    stage, then the same contender, then the same role. At least one run must be finished. Processor time is used, since
    finished runs may have shared the processor or been paused.
    """
    planned = planned_runs(study, results)
    done = [(run, results[run.key]) for run in planned if run.key in results]
    done = [pair for pair in done if not pair[1]["resumed"]] or done  # for a resumed run, only the last part was timed
    unknown = [
        run for run in runs_of(study) if run.role != REPORT or chosen_rate(study, run.contender, results) is None
    ]
    left = {run.key: run for run in [*planned, *unknown] if run.key not in results}.values()
    return sum(_length(run) * _seconds_of_one(run, done) for run in left)


def _seconds_of_one(run: Run, done: Sequence[tuple[Run, Mapping[str, Any]]]) -> float:
    likeness = max(_likeness(run, other) for other, _ in done)
    alike = [(other, line) for other, line in done if _likeness(run, other) == likeness]
    return statistics.mean(line["cpu_seconds"] / line["threads"] / _length(other) for other, line in alike)


def _likeness(run: Run, other: Run) -> tuple[bool, ...]:
    same_role, same_data = run.role == other.role, (run.role == FIRST) == (other.role == FIRST)
    return same_data, run.contender == other.contender, same_role


def _length(run: Run) -> float:
    return float(run.options.get("steps") or run.options.get("epochs") or 1)


@dataclass(frozen=True)
class Row:
    """The results of a contender.

    Args:
        contender: name of the contender.
        learning_rate: the chosen learning rate, or None if it is not chosen yet.
        choices: validation accuracies by learning rate, of finished runs.
        accuracies: test accuracies of the reported runs, in the order of the seeds.
        seeds: number of reported runs in the study.
        seconds: processor time of each reported run that was neither interrupted nor on a GPU, without earlier stages;
            for a resumed run only the last part was timed.
        flat: number of reported runs whose validation curve was flat at the end.
        parameters: number of parameters of the model.
        operations: floating-point operations of training, in a study that places its contenders by compute.
    """

    contender: str
    learning_rate: float | None
    choices: Mapping[float, float]
    accuracies: Sequence[float]
    seeds: int
    seconds: Sequence[float]
    flat: int
    parameters: int | None
    operations: float | None = None

    @property
    def mean(self) -> float | None:
        """Return the mean accuracy."""
        return statistics.mean(self.accuracies) if self.accuracies else None

    @property
    def core_seconds(self) -> float | None:
        """Return the mean processor time of a run, or None if every run was interrupted or on a GPU."""
        return statistics.mean(self.seconds) if self.seconds else None

    @property
    def interval(self) -> float | None:
        """Return half the width of the mean's 95% interval by Student's t, or None for fewer than 2 runs."""
        count = len(self.accuracies)
        if count < 2:
            return None
        return float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(self.accuracies) / count**0.5

    @property
    def at_the_edge(self) -> bool:
        """Return whether the best learning rate is the lowest or highest, so that others might be better still."""
        return len(self.choices) > 1 and self.learning_rate in (min(self.choices), max(self.choices))


def rows_of(study: Study, results: Mapping[str, Any]) -> list[Row]:
    """Return the results of all contenders."""
    return [_row(study, contender, results) for contender in study.contenders]


def _row(study: Study, contender: str, results: Mapping[str, Any]) -> Row:
    rate = chosen_rate(study, contender, results)
    choices = {
        each: max(results[run.key]["validation"])
        for each in study.learning_rates(contender)
        if (run := study.run(contender, CHOOSE, each, CHOOSING_SEED)).key in results
    }
    reported = [] if rate is None else [study.run(contender, REPORT, rate, seed) for seed in study.seeds]
    found = [run for run in reported if run.key in results]
    done = [results[run.key] for run in found]
    by_compute = study.description.get("x") == COMPUTE and found
    return Row(
        contender,
        rate,
        choices,
        [line["results"]["test_accuracy"] for line in done],
        len(study.seeds),
        [line["cpu_seconds"] for line in done if not line["resumed"] and line["environment"]["accelerator"] == "none"],
        sum(line["flat"] for line in done),
        done[0]["parameters"] if done else None,
        training_operations(found[0], results) if by_compute else None,
    )
