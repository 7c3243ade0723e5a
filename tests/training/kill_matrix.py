"""Kill training runs at random moments and resume them until they end.

    python -m tests.training.kill_matrix --kills 100

Every run must end with the same weights, log and results, bit for bit, as a run that was not killed. After each kill,
all checkpoints and the selected weights must be complete. Processes are forked from this one, with everything imported.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from plain_vit.files.manifest import manifest_problem
from plain_vit.training.loop import Loop
from plain_vit.training.run.folder import RunFolder
from tests.training.runs import LIMIT, assert_same_bits, children_of, open_script, save_plain_vit

processes = multiprocessing.get_context("fork")
COMMON: dict[str, Any] = {
    "dataset": "digits", "shots_per_class": 7, "steps": 24, "batch_size": 12, "checkpoint_every": 2, "evaluations": 6,
    "log_every": 3, "learning_rate": 0.01, "report": False,
}  # fmt: skip
MIXED = {"mixup": 0.8, "cutmix": 1.0, "repeated_augmentation": 2, "horizontal_flip": 0.5}
STREAM = {"streaming": True, "stream_images": 70, "shots_per_class": None, "stream_buffer": 20}
SELECTED = {"validation_fraction": 0.2, "ema_decay": 0.9, "best_kept": 2}
LORA = {"lora_rank": 2, "gradient_accumulation_steps": 2}
GROWING = {"initial_image_size": 8, "growth_epochs": 2}
NATIVE = {"native_aspect_ratio": True, "crop_scale": 0.3, "num_workers": 1}
RANDOM = {"drop_path_rate": 0.3, "hidden_dropout_prob": 0.1}  # of the model

# Processes, options and changes of the model. By default the tests use every eighth.
SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "2 processes, sharded, LoRA, selected": (2, {"shard": True, "lora_rank": 2, "validation_fraction": 0.2}, {}),
    "plain": (1, {}, {}),
    "mixing, dropout": (1, MIXED, RANDOM),
    "selected weights, average": (1, SELECTED, {}),
    "stream": (1, STREAM, {}),
    "LoRA, accumulation": (1, LORA, {}),
    "stream, mixing, workers": (1, {**STREAM, "mixup": 0.8, "num_workers": 2}, {}),
    "2 processes, workers": (2, {"num_workers": 1}, {}),
    "workers, mixing": (1, {**MIXED, "num_workers": 2}, RANDOM),
    "many sizes, workers": (1, NATIVE, {}),
    "2 processes, mixing, dropout": (2, MIXED, RANDOM),
    "2 processes, stream, mixing": (2, {**STREAM, "cutmix": 1.0}, {}),
    "growing images": (1, GROWING, {}),
    "2 processes, selected weights, average": (2, SELECTED, {}),
    "2 processes, LoRA, accumulation": (2, LORA, {}),
    "2 processes, sharded, average": (2, {"shard": True, "ema_decay": 0.9}, RANDOM),
}
PHASES = ("starting", "training", "evaluating", "writing a checkpoint", "completing a checkpoint", "ending")


@dataclass
class Outcome:
    """Outcomes of the runs of a setting."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    differences: list[str] = field(default_factory=list)


class Run:
    """The processes of a training run.

    Args:
        count: number of processes.
        options: options of the script.
        output: file for their output.
    """

    def __init__(self, count: int, options: dict[str, Any], output: Path) -> None:
        self.phases = processes.Array("i", len(PHASES), lock=False)
        self.has_begun = processes.Value("i", 0, lock=False)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.members = [
            processes.Process(target=_train, args=(rank, count, port, options, output, self.phases, self.has_begun))
            for rank in range(count)
        ]
        for member in self.members:
            member.start()

    def wait_for_training(self) -> float:
        """Wait until training begins or the processes have ended, and return the seconds this took."""
        start = time.monotonic()
        while not self.has_begun.value and any(member.is_alive() for member in self.members):
            time.sleep(0.005)
        return time.monotonic() - start

    def wait(self, seconds: float) -> bool:
        """Wait at most this time, and return whether all processes have ended."""
        end = time.monotonic() + seconds
        for member in self.members:
            member.join(max(0.0, end - time.monotonic()))
        return not any(member.is_alive() for member in self.members)

    def kill(self) -> str:
        """Kill the processes and their workers, and return what the first process was doing."""
        everyone = [each.pid for each in self.members if each.pid] + [
            child for each in self.members if each.pid for child in children_of(each.pid)
        ]
        otherwise = len(PHASES) - 1 if self.has_begun.value else 0
        phase = max((number for number, entered in enumerate(self.phases) if entered), default=otherwise)
        for pid in everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for member in self.members:
            member.join()
        return PHASES[phase]

    @property
    def exit_codes(self) -> list[int | None]:
        return [member.exitcode for member in self.members]


def _train(rank: int, count: int, port: int, options: dict[str, Any], output: Path, phases: Any, begun: Any) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)  # replaces the parent's thread pool before threads of autograd find it half replaced
    if count > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(value) for name, value in places.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if rank == 0:
        _note_phases(phases, begun)
    script = open_script("finetune_image_classification")
    try:
        script.finetune(script.FinetuneArguments(**options))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)  # skips the finalizers inherited from the parent process


def _note_phases(phases: Any, begun: Any) -> None:
    def noting(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **keywords: Any) -> Any:
            phases[PHASES.index(phase)] = 1
            begun.value |= phase == "training"
            try:
                return function(*args, **keywords)
            finally:
                phases[PHASES.index(phase)] = 0

        return noted

    for kind, name, phase in (
        (Loop, "train", "training"),
        (Loop, "_evaluate", "evaluating"),
        (RunFolder, "save", "writing a checkpoint"),
        (RunFolder, "_complete", "completing a checkpoint"),
        (Loop, "final_model", "ending"),
        (Loop, "finish", "ending"),
    ):
        setattr(kind, name, noting(phase, getattr(kind, name)))


def kill_and_resume(name: str, folder: Path, kills: int, rng: random.Random) -> Outcome:
    """Kill the runs of a setting this many times, and let every run end."""
    count, changes, fields = SETTINGS[name]
    folder.mkdir(parents=True)
    options = {**COMMON, **changes, "model": str(save_plain_vit(folder / "model", **fields))}
    reference, outcome = folder / "reference", Outcome()
    whole = Run(count, {**options, "output_dir": str(reference)}, folder / "reference.txt")
    starting, start = whole.wait_for_training(), time.monotonic()
    assert whole.wait(LIMIT), (folder / "reference.txt").read_text()
    assert whole.exit_codes == [0] * count, (folder / "reference.txt").read_text()
    training = time.monotonic() - start
    while outcome.kills.total() < kills:
        run, output, ended = folder / f"run {outcome.runs}", folder / f"run {outcome.runs}.txt", False
        while not ended:
            attempt = _start(count, {**options, "output_dir": str(run)}, output)
            if outcome.kills.total() < kills and not _ends_before(attempt, starting, training, rng):
                outcome.kills[attempt.kill()] += 1
                outcome.differences += _damage(run)
                continue
            ended = attempt.wait(LIMIT)
            assert attempt.exit_codes == [0] * count, output.read_text()
        outcome.runs += 1
        outcome.differences += _difference(run, reference)
        shutil.rmtree(run)
    return outcome


def _start(count: int, options: dict[str, Any], output: Path) -> Run:
    """Start or resume a run."""
    folder = Path(options["output_dir"])
    if not (folder / "run.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # killed before anything was written
    return Run(count, {**options, "resume": folder.exists()}, output)


def _ends_before(run: Run, starting: float, training: float, rng: random.Random) -> bool:
    """Wait for a random moment of startup or training, and return whether the run ended before it."""
    if rng.random() < 0.1:
        return run.wait(rng.uniform(0, starting))
    run.wait_for_training()
    return run.wait(rng.uniform(0, 0.9) * training)


def _damage(run: Path) -> list[str]:
    """Return the files that are incomplete after a kill."""
    folders = [*run.glob("checkpoints/step_*"), *run.glob("best"), *run.glob("best_models/step_*")]
    return [f"{each}: {problem}" for each in folders if (problem := manifest_problem(each))]


def _difference(run: Path, reference: Path) -> list[str]:
    """Return the differences between the results of a run and the run that was not killed."""
    try:
        assert_same_bits(run, reference)
    except AssertionError:
        return [f"{run}: weights or log"]
    times = ("seconds", "images_per_second", "waiting_for_data", "memory_bytes", "tflops")
    results = [json.loads((folder / "results.json").read_text()) for folder in (run, reference)]
    one, other = ({name: value for name, value in each.items() if name not in times} for each in results)
    return [] if one == other else [f"{run}: results.json"]


def run_matrix(names: Sequence[str], folder: Path, kills: int, seed: int) -> dict[str, Outcome]:
    """Kill runs of the settings, `kills` times in total, and print a row for each setting."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared by all processes, and a killed child may hold it
    rng, outcomes = random.Random(seed), dict[str, Outcome]()
    print("| setting |", " | ".join([*PHASES, "kills", "runs", "differences"]), "|")
    for number, name in enumerate(names):
        left = kills - sum(outcome.kills.total() for outcome in outcomes.values())
        share = -(-left // (len(names) - number))
        outcomes[name] = kill_and_resume(name, folder / str(number), max(1, share), rng)
        print(_row(name, [outcomes[name]]), flush=True)
    print(_row("all", [*outcomes.values()]), flush=True)
    return outcomes


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    kills = sum((outcome.kills for outcome in outcomes), Counter())
    differences = [difference for outcome in outcomes for difference in outcome.differences]
    values = [*(kills[phase] for phase in PHASES), kills.total(), sum(outcome.runs for outcome in outcomes)]
    return f"| {name} | {' | '.join(map(str, values))} | {', '.join(differences) or 'none'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=[*SETTINGS])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_matrix(given.settings, Path(folder), given.kills, given.seed)
    sys.exit(any(outcome.differences for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
