"""The folder of a run: whose it is, what was logged, and checkpoints that are complete or absent."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import load_model, save_model
from torch import nn

from plain_vit.errors import OutputExistsError, TrainingError

OPTIONS, LOG, CHECKPOINTS = "run.json", "log.jsonl", "checkpoints"
PROGRESS, AVERAGE = "progress.json", "average.safetensors"  # in a checkpoint, beside what Accelerate writes


class RunFolder:
    """What a training run keeps on disk.

    Nothing is written before `begin`.

    Args:
        path: the folder.
        accelerator: one process writes what is common, all write their parts of a checkpoint.
        options: what decides the result of the run: one that goes on must have the same.
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

    def begin(self, average: nn.Module | None = None) -> dict[str, Any] | None:
        """Claim the folder, or load its newest checkpoint into what the accelerator prepared.

        Args:
            average: moving average of the weights, which belongs to a checkpoint too.

        Returns:
            The progress that was saved last, or None at the start. The log is cut back to its step.
        """
        self.accelerator.wait_for_everyone()  # all have looked into the folder before one writes
        if not self.resume and self.accelerator.is_main_process:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / OPTIONS, json.dumps(self.options, indent=2) + "\n")
        progress = None
        checkpoint = max(self.checkpoints.glob("step_*"), default=None)
        if checkpoint is not None:
            self.accelerator.load_state(str(checkpoint))
            if average is not None:
                load_model(average, checkpoint / AVERAGE)
            progress = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
        if self.accelerator.is_main_process and (self.path / LOG).exists():
            step = progress["step"] if progress else 0
            lines = (self.path / LOG).read_text(encoding="utf-8").splitlines(keepends=True)
            write_whole(
                self.path / LOG,
                "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step),
            )
        self.accelerator.wait_for_everyone()
        return progress

    def save(self, progress: dict[str, Any], *, keep: int, average: nn.Module | None = None) -> None:
        """Write a checkpoint, then drop old ones.

        Args:
            progress: plain values, with `step`, the optimizer steps done.
            keep: how many checkpoints stay.
            average: moving average of the weights.
        """
        target = self.checkpoints / f"step_{progress['step']:08d}"
        with whole_folder(target, self.accelerator) as folder:
            self.accelerator.save_state(str(folder))
            if self.accelerator.is_main_process:
                if average is not None:
                    save_model(average, str(folder / AVERAGE))
                (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        if self.accelerator.is_main_process:
            for old in sorted(self.checkpoints.glob("step_*"))[:-keep]:
                shutil.rmtree(old)

    def log(self, **values: Any) -> None:
        """Add one line of values, `step` among them, to the log, from the main process."""
        if self.accelerator.is_main_process:
            with (self.path / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return what a run logged, one dictionary per line.

    Args:
        path: the folder of the run.
    """
    return [json.loads(line) for line in (Path(path) / LOG).read_text(encoding="utf-8").splitlines()]


@contextmanager
def whole_folder(target: Path, accelerator: Accelerator, *, merge: bool = False) -> Iterator[Path]:
    """Give all processes a folder to write a model into, and put it in place when all have written.

    Args:
        target: the place.
        accelerator: its processes all come here.
        merge: leave what else `target` holds, and move the files in; `config.json`, which makes it a model, last.
    """
    staging = target / ".model" if merge else target.with_name(f".{target.name}")
    if accelerator.is_main_process:
        shutil.rmtree(staging, ignore_errors=True)  # left by a run that was killed while it wrote
        staging.mkdir(parents=True)
    accelerator.wait_for_everyone()
    yield staging
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if merge:
            _sync_tree(staging)
            for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
                os.replace(file, target / file.name)
            staging.rmdir()
            _sync(target)
        else:
            if target.exists():
                shutil.rmtree(target)
            _sync_tree(staging)
            os.replace(staging, target)
            _sync(target.parent)
    accelerator.wait_for_everyone()


def write_whole(target: Path, text: str) -> None:
    """Write a file that is there with all its text or as it was before."""
    staging = target.with_name(f".{target.name}")
    staging.write_text(text, encoding="utf-8")
    _sync(staging)
    os.replace(staging, target)
    _sync(target.parent)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
