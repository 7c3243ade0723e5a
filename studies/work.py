"""The queue of a study: runs commands of the training scripts, each in its own process, several at a time."""

import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageClassification, ViTImageProcessor

from plain_vit import PlainViTImageProcessor
from plain_vit.system.environment import describe_environment
from studies.claims import BEAT, Claims
from studies.layer_positions import LayerPositionsConfig
from studies.results import (
    append_result,
    count_runs,
    is_flat,
    planned_runs,
    read_results,
    results_file,
    seconds_left,
)
from studies.study import FIRST, REPORT, ROOT, SCRIPTS, Run, Study, digest, is_plain_vit

STARTING_POINT = "{model}"  # in an option: the model that the run starts from
WAIT = 2.0  # seconds between checks of runs that other processes have claimed
RECORDED = ("Python", "plain-vit", "torch", "transformers", "datasets", "processor", "accelerator")


@dataclass
class Queue:
    """The runs of a study that have no result yet.

    Args:
        study: the study.
        runs: folder of the runs, the claims and the architectures.
        results: folder of the results.
        jobs: number of runs at a time.
        threads: number of threads of each run.
        most: stop after this many runs.
        more: further options of every run by name, which do not change its result, such as workers or compilation.
        say: function that prints a line.
    """

    study: Study
    runs: Path
    results: Path
    jobs: int
    threads: int
    most: int | None = None
    more: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    @property
    def file(self) -> Path:
        """Return the file of the results."""
        return results_file(self.results, self.study)

    def work(self) -> bool:
        """Do the remaining runs, and return whether the whole study is done."""
        with Claims(self.runs / "claims") as claims, ThreadPoolExecutor(self.jobs) as pool:
            self.claims = claims
            ended = threading.Event()
            threading.Thread(target=_beat, args=(claims, ended), daemon=True).start()
            try:
                self._fill(claims, pool)
            finally:
                ended.set()
        for name, why in self.failed.items():
            self.say(f"failed: {name}: {why}")
        return not self.waiting() and not self.failed

    def _fill(self, claims: Claims, pool: ThreadPoolExecutor) -> None:
        active: dict[Future[None], Run] = {}
        begun, told = 0, False
        while not self.stopped:
            waiting = [run for run in self.waiting() if run.name not in self.failed]
            places = self.jobs - len(active)
            if self.most is not None:
                places = min(places, self.most - begun)
            for run in waiting:
                if places and run.key not in claims.own and self.is_ready(run) and claims.take(run.key):
                    if run.key in read_results(self.file) and self.is_kept(run):  # another process has just done it
                        claims.give_back(run.key)
                        continue
                    active[pool.submit(self._do, run)] = run
                    places, begun = places - 1, begun + 1
            if not active and (not waiting or begun == self.most or not any(map(self.is_ready, waiting))):
                break
            if not active and not told:
                self.say("other processes do what is left: waiting for them, and for what they give back")
                told = True
            finished, _ = wait(active, timeout=WAIT, return_when=FIRST_COMPLETED)
            if not active:
                time.sleep(WAIT)
            for future in finished:
                run = active.pop(future)
                claims.give_back(run.key)
                future.result()
        wait(active)

    def waiting(self) -> list[Run]:
        """Return the runs without a result, and runs whose model is missing but needed by a later run."""
        done = read_results(self.file)
        planned = planned_runs(self.study, done)
        needed = {stage.key for run in planned if run.key not in done for stage in run.stages()}
        return [run for run in planned if run.key not in done or (run.key in needed and not self.is_kept(run))]

    def is_ready(self, run: Run) -> bool:
        """Return whether the model that a run starts from exists and is complete."""
        return run.after is None or (run.after.key in read_results(self.file) and self.is_kept(run.after))

    def is_kept(self, run: Run) -> bool:
        """Return whether the model of a run exists."""
        return (self.folder(run) / "config.json").is_file()

    def folder(self, run: Run) -> Path:
        """Return the folder of a run; earlier stages are shared, so their names contain no contender or study."""
        if run.role == FIRST:
            return self.runs / f"stages-{run.size}" / run.key
        return self.runs / f"{run.study}-{run.size}" / f"{slug(run.contender)}-{run.role}-{run.key}"

    def known_elsewhere(self, run: Run) -> dict[str, Any] | None:
        """Return the result of the same run in another study, if everything needed of it exists.

        An earlier stage needs its model, a choice only the result. The model of a reported run may be analysed later.
        """
        if run.role == REPORT or (run.role == FIRST and not self.is_kept(run)):
            return None
        for file in sorted(self.results.glob(f"*-{run.size}.jsonl")):
            if file != self.file and (line := read_results(file).get(run.key)):
                return line
        return None

    def stop(self) -> None:
        """Stop the runs in progress, which write a checkpoint, and start no others."""
        self.stopped = True
        for process in [*self.processes]:
            process.send_signal(signal.SIGTERM)

    def _do(self, run: Run) -> None:
        if line := self.known_elsewhere(run):
            self.say(f"{run.name}: the study {line['study']} has done it")
            append_result(self.file, {**line, "study": run.study, "contender": run.contender, "role": run.role})
            return
        folder = self.folder(run)
        words = command(run, self.study.launch, model_of(run, self), folder, self.more)
        resumes = (folder / "run.json").is_file() and not self.is_kept(run)
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)
        self.say(f"{run.name}: {shlex.join([*words, *(['--resume'] if resumes else [])])}")
        start, load = time.monotonic(), os.getloadavg()[0]
        code, used = self._run(run.key, [*words, *(["--resume"] if resumes else [])], folder.with_suffix(".txt"))
        if code != 0:
            if not self.stopped:
                self.failed[run.name] = f"exit code {code}, see {folder.with_suffix('.txt')}"
            return
        line = {
            "key": run.key, "study": run.study, "size": run.size, "contender": run.contender, "role": run.role,
            "learning_rate": run.learning_rate, "seed": run.seed, "command": shlex.join(words),
            "date": datetime.now(UTC).date().isoformat(), "seconds": round(time.monotonic() - start, 1),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "threads": self.threads, "resumed": resumes,
            "load": [round(load, 1), round(os.getloadavg()[0], 1)], **outcome(folder), "environment": environment(),
        }  # fmt: skip
        append_result(self.file, line)
        self._report(run, line)

    def _run(self, key: str, words: list[str], log: Path) -> tuple[int, resource.struct_rusage]:
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(self.threads))
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        words = [sys.executable if word == "python" else word for word in words]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**os.environ, **threads, "PYTHONPATH": paths},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self.processes.add(process)
            self.claims.note(key, process.pid)
            if self.stopped:
                process.send_signal(signal.SIGTERM)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.processes.discard(process)
        return process.returncode, used

    def _report(self, run: Run, line: Mapping[str, Any]) -> None:
        results = read_results(self.file)
        total = count_runs(self.study, results)
        known = sum(each.key in results for each in planned_runs(self.study, results))
        minutes = seconds_left(self.study, results) / self.jobs / 60
        left = f"{minutes:.0f} minutes" if minutes < 100 else f"{minutes / 60:.1f} hours"
        curve = line["validation"]
        validation = f"validation {max(curve):.2%}" if curve else "done"
        self.say(f"[{known}/{total}] {run.name}: {validation}, {line['seconds']:.0f} s; about {left} left")


def _beat(claims: Claims, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        claims.beat()


def slug(name: str) -> str:
    """Return a name in a form that is safe in file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def model_of(run: Run, queue: Queue) -> Path | str:
    """Return the starting point of a run: its checkpoint, an earlier run's model, or a newly written architecture."""
    if run.checkpoint is not None:
        return run.checkpoint
    if run.after is not None:
        return queue.folder(run.after)
    assert run.model is not None
    # The masked script opens only checkpoints, and custom code is saved with weights; --from_scratch ignores them.
    with_weights = run.script == "masked" or run.model.get("type") == LayerPositionsConfig.model_type
    folder = queue.runs / "models" / f"{slug(run.contender)}-{digest([run.model, with_weights])[:8]}"
    if not folder.exists():
        write_architecture(dict(run.model), folder, with_weights=with_weights)
    return folder


def write_architecture(fields: dict[str, Any], folder: Path, *, with_weights: bool) -> None:
    """Write the config of a model and its image processor as a folder of transformers.

    Args:
        fields: fields of the config; `type` is its model type in transformers (default: plain_vit), and `image_size`
            applies to its image processor too.
        folder: folder to create; another process may do so at the same time.
        with_weights: whether to write new weights too.
    """
    ours = is_plain_vit(fields)
    kind = fields.pop("type", "plain_vit")
    size = fields["image_size"]
    if not ours:
        fields.pop("image_size")  # convolutional networks have no such field
    config = AutoConfig.for_model(kind, **fields)
    processor = (PlainViTImageProcessor if ours else ViTImageProcessor)(size={"height": size, "width": size})
    staging = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    saved = AutoModelForImageClassification.from_config(config) if with_weights else config
    saved.save_pretrained(staging)
    processor.save_pretrained(staging)
    try:
        staging.rename(folder)
    except OSError:
        shutil.rmtree(staging)
        if not folder.is_dir():  # otherwise another process has written the same
            raise


def command(
    run: Run, launch: str, model: Path | str, folder: Path, more: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return the command of a run as a list of words; `more` is as in `Queue`."""
    words = [*shlex.split(launch), SCRIPTS[run.script], "--model", str(model)]
    words += ["--from_scratch"] if run.after is None and run.checkpoint is None else []
    options = {**run.options, "learning_rate": f"{run.learning_rate:g}", "seed": run.seed, "output_dir": folder, **more}
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(str(value).replace(STARTING_POINT, str(model)) for value in values)]
    return words


def outcome(folder: Path) -> dict[str, Any]:
    """Return the outcome of a finished run: results, validation curve, number of parameters."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [line["validation_accuracy"] for line in lines if "validation_accuracy" in line]
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        parameters = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return {"results": results, "validation": curve, "flat": is_flat(curve), "parameters": parameters}


def environment() -> dict[str, str]:
    """Return the versions of packages and the hardware."""
    known = describe_environment()
    return {name: known[name] for name in RECORDED}
