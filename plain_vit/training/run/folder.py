"""Run folder: options, log, and checkpoints that are either complete or absent."""

import dataclasses
import json
import os
import shutil
import time
import weakref
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from ...errors import OutputError, OutputExistsError, TrainingError, in_bytes
from ...files.manifest import manifest_problem, write_manifest
from ...files.staging import (
    STAGED,
    full_disk,
    hold_folder,
    is_vacant,
    release_folder,
    remains,
    staged_file,
    staged_folder,
)
from ...system.extras import needs
from ..hardware.sharding import ShardedState
from .remote import CHECKPOINTS, OPTIONS, RemoteFolder, working_folder

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

LOG = "log.jsonl"
VISIBLE_AFTER = 60.0  # seconds after which a file on a network disk is seen by all machines
WRITTEN, DELETED = ".written", ".deleted"  # folders of a checkpoint being written, and of one being deleted
PROGRESS, AVERAGE = "progress.json", "average.safetensors"  # in a checkpoint, in addition to Accelerate's files


# Files that a run writes before its first checkpoint: removed if it starts again, or left to its tracker.
BEGUN = (OPTIONS, "arguments.yaml", LOG, "trackers.json", "tensorboard", "report", "profile", CHECKPOINTS)
OF_TRACKERS = ("wandb", "mlruns", "mlflow.db")

# Options that may change when a run is resumed because they do not affect the steps that were taken.
FREE_ON_RESUME = (
    "output_dir", "resume", "num_workers", "num_processes", "checkpoints_kept", "best_kept",
    "eval_batch_size", "eval_dataset", "checkpoint_minutes", "max_time", "skip_nonfinite", "profile",
    "report_to", "report", "picture_every", "dry_run",
    "license", "push_to_hub", "hub_private",
)  # fmt: skip

# Options that may change when a run is resumed, if the learning rates of the steps already taken stay the same.
LENGTH_OPTIONS = (
    "steps", "epochs", "schedule", "warmup_steps", "warmup_fraction", "cooldown_steps", "evaluations",
    "checkpoint_every",
)  # fmt: skip


def deciding_options(options: Any, **others: Any) -> dict[str, Any]:
    """Return the settings that determine the result of a run: options, and additional facts from its script."""
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in FREE_ON_RESUME}
    return {**values, **{name.replace("_", " "): value for name, value in others.items()}}


def default_options(options: Any) -> dict[str, Any]:
    """Return the defaults of options, for resumed runs that are older than an option."""
    fields = dataclasses.fields(options)
    made = {each.name: each.default_factory() for each in fields if each.default_factory is not dataclasses.MISSING}
    return made | {each.name: each.default for each in fields if each.default is not dataclasses.MISSING}


class RunFolder:
    """The files of a training run.

    Nothing is written before `begin`.

    Args:
        path: the folder, or a URL of fsspec, whose copy the local folder `path` then is.
        accelerator: accelerator of the run; one process writes common files, all write their parts of a checkpoint.
        options: settings that determine the result; a resumed run must have the same.
        resume: resume from the newest checkpoint.
        defaults: values of settings that a run to resume does not have because an earlier version started it.

    Raises:
        OutputExistsError: The folder is not empty and `resume` is False; a run without a checkpoint counts as empty.
        TrainingError: The folder contains no run, or a run that has a checkpoint and other options.
    """

    def __init__(
        self,
        path: str | Path,
        accelerator: Accelerator,
        options: dict[str, Any],
        *,
        resume: bool,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.accelerator, self.resume, self.place = accelerator, resume, str(path)
        self.path, self.remote = working_folder(path), RemoteFolder(self.place) if "://" in self.place else None
        self.defaults = {name: value for name, value in (defaults or {}).items() if name in options}
        self.options = json.loads(json.dumps(options))  # as JSON reads them back
        self.checkpoints = self.path / CHECKPOINTS
        self.before: dict[str, Any] = {}  # settings with which the run was started or last resumed
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.saving: Future[None] | None = None  # only in the main process
        self.held: weakref.finalize[..., RunFolder] | None = None  # only in the main process, from `begin` on
        if self.remote is not None:
            self._fetch(self.remote)
        self._check()

    def _fetch(self, remote: RemoteFolder) -> None:
        """Download the run from a store of objects; all processes get the same error."""
        refused: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                remote.fetch(self.accelerator.print, resume=self.resume)
            except OutputError as error:
                refused = [error]
        broadcast_object_list(refused)
        if refused[0] is not None:
            raise refused[0]

    def _check(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise OutputExistsError(f"{self.path} is a file: give a folder.")
        if not self.resume:
            self._refuse_contents()
            return
        if not (self.path / OPTIONS).exists():
            if not self.accelerator.is_main_process:
                return  # `begin` says that it sees another folder
            raise TrainingError(f"{self.place} contains no run to resume: omit --resume.")
        before = self.before = {**json.loads(json.dumps(self.defaults)), **read_json(self.path / OPTIONS)}
        changed = changed_settings(before, self.options, free=LENGTH_OPTIONS)
        if changed and self._has_only_begun():
            self.resume, self.before = False, {}
        elif changed:
            raise TrainingError(f"The run in {self.place} differs in {changed}: resume it with the same options.")

    def _has_only_begun(self) -> bool:
        """Return whether the folder holds a run without a checkpoint or weights, which can be removed without loss."""
        names = {name for name in os.listdir(self.path) if not name.startswith(STAGED)} if self.path.is_dir() else set()
        left = set(os.listdir(self.checkpoints)) if self.checkpoints.is_dir() else set()
        incomplete = {WRITTEN, DELETED, *(path.name for path in remains(self.checkpoints))}
        return OPTIONS in names and names <= {*BEGUN, *OF_TRACKERS} and left <= incomplete

    def _refuse_contents(self) -> None:
        if not is_vacant(self.path) and not self._has_only_begun():
            raise OutputExistsError(f"{self.place} is not empty: give another folder, or continue with --resume.")

    def _begin_anew(self) -> None:
        """Remove the files of a run without a checkpoint, and write the settings; requires the lock on the folder."""
        self._refuse_contents()
        if self._has_only_begun():
            self.accelerator.print(f"The run in {self.path} had no checkpoint yet: it begins again.")
        for path in (self.path / name for name in BEGUN):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.write_options()

    def begin(self, average: nn.Module | None = None, sharded: ShardedState | None = None) -> dict[str, Any] | None:
        """Create the folder, or load its newest checkpoint into the prepared objects.

        Args:
            average: moving average of the weights, also stored in checkpoints.
            sharded: sharded state, including the average; replaces `average`.

        Returns:
            The last saved progress, to whose step the log is truncated, or None at the start.

        Raises:
            OutputError: Another run is writing to the folder, or not all machines have it.
        """
        self.accelerator.wait_for_everyone()  # all processes have read the folder before one writes
        progress = None
        if self.accelerator.is_main_process:
            self.path.mkdir(parents=True, exist_ok=True)
            self.held = weakref.finalize(self, release_folder, hold_folder(self.path))
            if not self.resume:
                self._begin_anew()
            for left in (self.checkpoints / WRITTEN, self.checkpoints / DELETED, *remains(self.checkpoints)):
                if left.is_file():
                    left.unlink()
                shutil.rmtree(left, ignore_errors=True)
        checkpoint = self._undamaged_checkpoint()
        require_seen(self.path / OPTIONS, self.accelerator)
        if checkpoint is not None:
            progress = read_json(checkpoint / PROGRESS)
            self._check_processes(progress)
            self.accelerator.load_state(str(checkpoint))
            if sharded is not None:
                sharded.load(checkpoint)
            elif average is not None:
                load_model(average, checkpoint / AVERAGE)
        if self.accelerator.is_main_process and (self.path / LOG).exists():
            self._cut_log(progress or {"step": 0})
        self.accelerator.wait_for_everyone()
        return progress

    def release(self) -> None:
        """Let other runs write to the folder; the end of the process does so too."""
        if self.held is not None:
            self.held()

    def write_options(self) -> None:
        """Write the settings of the run."""
        write_file(self.path / OPTIONS, json.dumps(self.options, indent=2) + "\n")
        self.upload()

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint of the latest step, or None."""
        return max(self.checkpoints.glob("step_*"), default=None)

    def _undamaged_checkpoint(self) -> Path | None:
        """Return the newest checkpoint whose files are as they were written; all processes get the same.

        Damaged checkpoints are renamed if there is an older one, and then do not count as kept.

        Raises:
            TrainingError: All checkpoints are damaged.
        """
        found: list[Any] = [None, []]
        if self.accelerator.is_main_process:
            found = self._find_undamaged()
        broadcast_object_list(found)
        checkpoint, damage = found
        if checkpoint is None and damage:
            raise TrainingError(
                f"{' '.join(damage)} No other checkpoint is left: start the run anew in another folder."
            )
        return None if checkpoint is None else Path(checkpoint)

    def _find_undamaged(self) -> list[Any]:
        """Return the newest undamaged checkpoint, or None, and the problems of later checkpoints."""
        damaged: dict[Path, str] = {}
        for checkpoint in sorted(self.checkpoints.glob("step_*"), reverse=True):
            problem = manifest_problem(checkpoint)
            if not problem:
                for each, reason in damaged.items():
                    aside = each.with_name(f"damaged_{each.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    each.rename(aside)
                    self.accelerator.print(
                        f"The checkpoint {each} is damaged: {reason}. It is now called {aside.name}. Resuming from "
                        f"{checkpoint.name}."
                    )
                return [str(checkpoint), []]
            damaged[checkpoint] = problem
        return [None, [f"The checkpoint {each} is damaged: {reason}." for each, reason in damaged.items()]]

    def _check_processes(self, progress: dict[str, Any]) -> None:
        before, now, tied = progress.get("processes"), self.accelerator.num_processes, progress.get("tied_to_processes")
        if tied and before != now:
            raise TrainingError(
                f"The run in {self.path} was trained by {before} processes, now there are {now}: its result depends on "
                f"their number because of {tied}. Resume it with {before} processes."
            )

    def _cut_log(self, progress: dict[str, Any]) -> None:
        """Drop log entries after this progress, and an unfinished last line."""
        kept, step, is_due = [], progress["step"], progress.get("evaluation_due", False)
        for number, line in enumerate((self.path / LOG).read_text(encoding="utf-8").splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                continue
            try:
                entry = json.loads(line)
                is_kept = entry["step"] <= step and not (is_due and entry["step"] == step and "epoch" in entry)
            except (ValueError, KeyError, TypeError) as error:
                raise TrainingError(
                    f"Line {number} of {self.path / LOG} is damaged: remove it, then resume. ({error})"
                ) from error
            if is_kept:
                kept.append(line)
        write_file(self.path / LOG, "".join(kept))

    def save(
        self,
        progress: dict[str, Any],
        *,
        keep: int,
        average: nn.Module | None = None,
        sharded: ShardedState | None = None,
    ) -> None:
        """Write the files of a checkpoint; while training continues, a thread completes it and deletes old ones.

        Args:
            progress: values for JSON, including `step`, the number of optimizer steps.
            keep: number of checkpoints to keep.
            average: moving average of the weights.
            sharded: see `begin`.
        """
        self.finish_saving()
        written, name = self.checkpoints / WRITTEN, f"step_{progress['step']:08d}"
        is_main = self.accelerator.is_main_process
        self.upload()
        if is_main:
            written.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(written))
            if sharded is not None:
                sharded.save(written)
            if is_main and average is not None and sharded is None:
                save_model(average, str(written / AVERAGE))
            if is_main:
                (written / PROGRESS).write_text(as_json(progress), encoding="utf-8")
        except Exception as error:
            shutil.rmtree(written, ignore_errors=True)
            if (full := full_disk(self.checkpoints / name, error)) is None:
                raise
            raise full from error
        self.accelerator.wait_for_everyone()  # all have written
        if is_main:
            self.saving = self.thread.submit(self._complete, written, name, keep)

    def _complete(self, written: Path, name: str, keep: int) -> None:
        """Complete a checkpoint: hash its files, sync them to disk, rename the folder, and delete old checkpoints."""
        with staged_folder(self.checkpoints / name, force=True, keep=False) as folder:
            for file in written.iterdir():
                file.rename(folder / file.name)
            written.rmdir()
            write_manifest(folder)
        for old in sorted(self.checkpoints.glob("step_*"))[:-keep]:
            old.rename(self.checkpoints / DELETED)  # so that no partial checkpoint keeps its name
            shutil.rmtree(self.checkpoints / DELETED)
        if self.remote is not None:
            self.remote.upload_checkpoint(name)

    def upload(self) -> None:
        """Upload the files beside the checkpoints, if the run is in a store of objects."""
        if self.remote is not None and self.accelerator.is_main_process:
            self.remote.upload()

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete; all processes must call this.

        Raises:
            OutputError: The checkpoint could not be written.
        """
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.result()
        self.accelerator.wait_for_everyone()

    def require_space(self, needed: int, what: str) -> None:
        """Check that there is enough disk space.

        Args:
            needed: size in bytes.
            what: what needs the space, for the message.

        Raises:
            OutputError: One of the processes has too little space.
        """
        place = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if self.accelerator.reduce(torch.tensor(float(free < needed), device=self.accelerator.device)) > 0:
            raise OutputError(
                f"The disk of {self.path} has {in_bytes(free)} left, {what} needs {in_bytes(needed)}: free some "
                "space, or keep fewer with --checkpoints_kept. Saved checkpoints are complete; --resume continues."
            )

    def log(self, **values: Any) -> None:
        """Write values, including `step`, to the log and the trackers, from the main process."""
        if self.accelerator.is_main_process:
            append_line(self.path / LOG, as_json(values))
        self.track(**values)

    def track(self, *, step: int, **values: Any) -> None:
        """Send values to the trackers, grouped as by transformers' Trainer: `train/loss`, `eval/accuracy`."""
        self.accelerator.log({_tag(name): value for name, value in values.items()}, step=step)


def require_seen(file: Path, accelerator: Accelerator) -> None:
    """Check that all processes see a file that the main process has written; a network disk may take a while.

    Raises:
        OutputError: Some do not, as on machines that do not share the disk.
    """
    until = time.monotonic() + VISIBLE_AFTER
    while not (seen := file.exists()) and time.monotonic() < until:
        time.sleep(0.5)
    blind = accelerator.reduce(torch.tensor(float(not seen), device=accelerator.device))
    if blind > 0:
        raise OutputError(
            f"{int(blind)} of {accelerator.num_processes} processes do not see {file}, which the first one has "
            "written: give all machines the same folder, on a disk that they share."
        )


def _tag(name: str) -> str:
    """Return the tag of a logged value in trackers; values of no split, such as the learning rate, are of training."""
    split, _, value = name.partition("_")
    group = {"train": "train", "validation": "eval", "test": "test"}.get(split)
    return f"train/{name}" if group is None else f"{group}/{value}"


def changed_settings(before: Mapping[str, Any], wanted: Mapping[str, Any], *, free: Container[str] = ()) -> str:
    """Return, as text, the settings that differ from an earlier run; empty if none does.

    Args:
        before: settings of the earlier run, as read from JSON.
        wanted: settings of this run.
        free: names of settings that may differ.
    """
    wanted = json.loads(json.dumps(wanted))
    return ", ".join(
        f"{name} (was {before.get(name)!r}, is {wanted.get(name)!r})"
        for name in dict.fromkeys([*wanted, *before])
        if before.get(name) != wanted.get(name) and name not in free
    )


def as_json(values: Any, indent: int | None = None) -> str:
    """Return values as JSON, which has no NaN or infinity.

    Raises:
        ValueError: A value is not finite.
    """
    return json.dumps(values, indent=indent, allow_nan=False)


def read_json(path: Path) -> Any:
    """Read a JSON file of a run.

    Raises:
        TrainingError: The file is damaged or cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {error}. Start the run anew in another folder.") from error


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the log of a run, one dictionary per entry.

    Args:
        path: the run folder.
    """
    return [json.loads(line) for line in (Path(path) / LOG).read_text(encoding="utf-8").splitlines()]


def checkpoint_bytes(model: nn.Module, average: nn.Module | None = None) -> int:
    """Return the maximum size of a checkpoint in bytes: weights, average, and two states per trained parameter."""
    states = [each for each in model.parameters() if each.requires_grad] * 2
    averaged = [] if average is None else list(average.parameters())
    return sum(each.nbytes for each in (*model.parameters(), *averaged, *states))


@contextmanager
def shared_staging(target: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Context that gives all processes a common folder; it replaces the target after all have written.

    Args:
        target: the folder to create.
        accelerator: accelerator of the run; all processes must call this.
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
    """Move the files of a saved model into a folder with other files; `config.json` comes last, to mark completion.

    Args:
        folder: the saved model, which is removed.
        target: destination; existing files and folders of the same names are replaced.
    """
    for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
        if file.is_dir() and (target / file.name).exists():  # a kill left it
            shutil.rmtree(target / file.name)
        os.replace(file, target / file.name)
    folder.rmdir()


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, completely or not at all.

    Raises:
        OutputError: The line cannot be written; the file is unchanged.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        raise OutputError(f"{path} was not written: {error.strerror}. The lines before are unchanged.") from error


def write_file(target: Path, text: str) -> None:
    """Write a file atomically."""
    with staged_file(target, force=True) as new:
        new.write_text(text, encoding="utf-8")
