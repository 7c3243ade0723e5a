"""Folder of a run: its options, its log, and checkpoints that are complete or absent."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from ...errors import OutputError, OutputExistsError, TrainingError, in_bytes
from ...extras import needs
from ...files.staging import staged_file, staged_folder
from ..hardware.sharding import ShardedState

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

OPTIONS, LOG, CHECKPOINTS = "run.json", "log.jsonl", "checkpoints"
PROGRESS, AVERAGE = "progress.json", "average.safetensors"  # in a checkpoint, beside what Accelerate writes


# What may change when a run is resumed, because it does not decide the result.
FREE_ON_RESUME = (
    "output_dir", "resume", "num_workers", "num_processes", "checkpoints_kept", "eval_batch_size",
    "report_to", "report", "picture_every", "dry_run",
    "license", "push_to_hub", "hub_private",
)  # fmt: skip


def deciding_options(options: Any, **others: Any) -> dict[str, Any]:
    """Return what decides the result of a run: the options that do, and what else its script names."""
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in FREE_ON_RESUME}
    return {**values, **{name.replace("_", " "): value for name, value in others.items()}}


class RunFolder:
    """What a training run keeps on disk.

    Nothing is written before `begin`.

    Args:
        path: the folder.
        accelerator: one process writes what is common, all write their parts of a checkpoint.
        options: what decides the result of the run: a resumed one must have the same.
        resume: go on from the newest checkpoint.

    Raises:
        OutputExistsError: The folder is not empty and `resume` was not asked for.
        TrainingError: The folder holds no run, or a run with other options.
    """

    def __init__(self, path: str | Path, accelerator: Accelerator, options: dict[str, Any], *, resume: bool) -> None:
        self.path, self.accelerator, self.resume = Path(path), accelerator, resume
        self.options = json.loads(json.dumps(options))  # as it will be read back
        self.checkpoints = self.path / CHECKPOINTS
        self._check()

    def _check(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise OutputExistsError(f"{self.path} is a file: name a folder.")
        if not self.resume:
            if self.path.exists() and any(self.path.iterdir()):
                raise OutputExistsError(f"{self.path} is not empty: name another folder, or go on with --resume.")
            return
        if not (self.path / OPTIONS).exists():
            raise TrainingError(f"{self.path} holds no run that could go on: leave out --resume.")
        before = json.loads((self.path / OPTIONS).read_text(encoding="utf-8"))
        changed = [
            f"{name} (was {before.get(name)!r}, is {self.options.get(name)!r})"
            for name in sorted({*before, *self.options})
            if before.get(name) != self.options.get(name)
        ]
        if changed:
            raise TrainingError(f"The run in {self.path} differs in {', '.join(changed)}: resume it with the same.")

    def begin(self, average: nn.Module | None = None, sharded: ShardedState | None = None) -> dict[str, Any] | None:
        """Claim the folder, or load its newest checkpoint into what the accelerator prepared.

        Args:
            average: moving average of the weights, which belongs to a checkpoint too.
            sharded: what is divided among the processes, the average too, in place of `average`.

        Returns:
            The progress that was saved last, or None at the start. The log is cut back to its step.
        """
        self.accelerator.wait_for_everyone()  # all have looked into the folder before one writes
        if not self.resume and self.accelerator.is_main_process:
            self.path.mkdir(parents=True, exist_ok=True)
            write_file(self.path / OPTIONS, json.dumps(self.options, indent=2) + "\n")
        progress = None
        checkpoint = max(self.checkpoints.glob("step_*"), default=None)
        if checkpoint is not None:
            self.accelerator.load_state(str(checkpoint))
            if sharded is not None:
                sharded.load(checkpoint)
            elif average is not None:
                load_model(average, checkpoint / AVERAGE)
            progress = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
        if self.accelerator.is_main_process and (self.path / LOG).exists():
            step = progress["step"] if progress else 0
            lines = (self.path / LOG).read_text(encoding="utf-8").splitlines(keepends=True)
            write_file(
                self.path / LOG,
                "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step),
            )
        self.accelerator.wait_for_everyone()
        return progress

    def save(
        self,
        progress: dict[str, Any],
        *,
        keep: int,
        average: nn.Module | None = None,
        sharded: ShardedState | None = None,
    ) -> None:
        """Write a checkpoint, then drop old ones.

        Args:
            progress: plain values, with `step`, the optimizer steps done.
            keep: how many checkpoints stay.
            average: moving average of the weights.
            sharded: see `begin`.
        """
        target = self.checkpoints / f"step_{progress['step']:08d}"
        with shared_staging(target, self.accelerator) as folder:
            self.accelerator.save_state(str(folder))
            if sharded is not None:
                sharded.save(folder)
            if self.accelerator.is_main_process:
                if average is not None and sharded is None:
                    save_model(average, str(folder / AVERAGE))
                (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        if self.accelerator.is_main_process:
            for old in sorted(self.checkpoints.glob("step_*"))[:-keep]:
                shutil.rmtree(old)

    def require_space(self, needed: int, what: str) -> None:
        """Make sure that something can be written.

        Args:
            needed: its size, in bytes.
            what: the name of it, for the message.

        Raises:
            OutputError: The disk is too full, in the eyes of one of the processes.
        """
        place = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if self.accelerator.reduce(torch.tensor(float(free < needed), device=self.accelerator.device)) > 0:
            raise OutputError(
                f"The disk of {self.path} has {in_bytes(free)} left, {what} needs {in_bytes(needed)}: free some, "
                "or keep fewer with --checkpoints_kept. What has been saved is whole; --resume continues from it."
            )

    def log(self, **values: Any) -> None:
        """Add one line of values, `step` among them, to the log and to the trackers, from the main process."""
        if self.accelerator.is_main_process:
            with (self.path / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        self.accelerator.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return what a run logged, one dictionary per line.

    Args:
        path: the folder of the run.
    """
    return [json.loads(line) for line in (Path(path) / LOG).read_text(encoding="utf-8").splitlines()]


def checkpoint_bytes(model: nn.Module, average: nn.Module | None = None) -> int:
    """Return how large a checkpoint is at most: weights, an average, two optimizer states for what is trained."""
    states = [each for each in model.parameters() if each.requires_grad] * 2
    averaged = [] if average is None else list(average.parameters())
    return sum(each.nbytes for each in (*model.parameters(), *averaged, *states))


@contextmanager
def shared_staging(target: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Give all processes one folder to write into, which replaces the target when all have written.

    Args:
        target: the folder to make.
        accelerator: its processes all come here.
    """
    with ExitStack() as main_process:
        place: list[str | None] = [None]
        if accelerator.is_main_process:
            place = [str(main_process.enter_context(staged_folder(target, force=True, keep=False)))]
        broadcast_object_list(place)
        yield Path(str(place[0]))
        accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()


def move_into(folder: Path, target: Path) -> None:
    """Move the files of a saved model into a folder that holds other things; `config.json` last, so that it is whole.

    Args:
        folder: the saved model, which goes.
        target: where its files go; files of the same names are replaced.
    """
    for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, target / file.name)
    folder.rmdir()


def write_file(target: Path, text: str) -> None:
    """Write a file that is there with all its text or as it was before."""
    with staged_file(target, force=True) as new:
        new.write_text(text, encoding="utf-8")
