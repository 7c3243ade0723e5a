"""Training loop for any task: steps, evaluations, the log, checkpoints, resuming, and stopping on request."""

import dataclasses
import math
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..errors import TrainingError, counted, in_bytes
from ..files.manifest import manifest_problem, write_manifest
from ..files.staging import staged_folder
from ..system.extras import needs
from .arguments import LoopOptions, as_yaml, check_options
from .data.decoding import UnreadableImages
from .data.inputs import count_images
from .data.mixing import collate_followed
from .data.sampling import MicroBatches, ShuffledStream, randomness
from .data.streaming import Position, StreamedBatches
from .hardware.fast_steps import fast_steps
from .hardware.memory import explain_out_of_memory
from .hardware.precision import tf32
from .hardware.processes import StepExchange, StopRequest, generator_states, start_processes
from .hardware.products import products
from .hardware.throughput import memory_of, peak_flops
from .learner import Learner
from .metrics import metric_text
from .optimization import scheduled_rate, train_mode
from .run.folder import (
    LENGTH_OPTIONS,
    PROGRESS,
    RunFolder,
    as_json,
    checkpoint_bytes,
    move_into,
    read_json,
    shared_staging,
    write_file,
)
from .run.profile import OTHER, WAITING, StepProfile
from .run.progress import Progress, rates_of
from .run.trackers import start_trackers, tracker_names

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import gather_object, send_to_device, set_seed

Batch = dict[str, Any]
BEST = "best"  # folder of the selected weights
BEST_MODELS = "best_models"  # folder of the models with the best scores, by step, if more than one is kept
DELETED = ".deleted-"  # prefix of a model's folder while it is being deleted


class Result(Protocol):
    """Result of an evaluation: values by name, including `loss`, and the number of images."""

    @property
    def values(self) -> Mapping[str, float]: ...

    @property
    def count(self) -> int: ...


ResultT = TypeVar("ResultT", bound=Result)


@dataclass(frozen=True)
class Means:
    """Mean values over a split, the same in every process; see `Result`."""

    values: Mapping[str, float]
    count: int


class Task(ABC, Generic[ResultT]):
    """Task of the loop: its loss, its evaluation, and how the model is saved.

    `measures` names the values, besides the loss, that are summed over the images of a batch, each with its count per
    image. `score` names the evaluation value that selects weights on the validation split; None keeps the last weights.
    `lower_is_better` tells whether lower scores are better. `columns` names the evaluation values shown in the table of
    the run; None shows all.
    """

    measures: Mapping[str, int] = {}
    score: str | None = None
    lower_is_better: bool = False
    columns: Collection[str] | None = None

    def prepare(self, accelerator: Accelerator) -> None:
        """Move the task's own tensors to the device; called once, after the model was moved there."""

    def begin_step(self, step: int) -> None:
        """Draw the random values shared by all micro-batches of a step; they are the same in all processes."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the mean training loss of a batch, and the sum of each measure over its images."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Batch], accelerator: Accelerator, *, size: int) -> ResultT:
        """Evaluate the model once on each image of a split of this size."""

    @abstractmethod
    def save(self, folder: Path, model: nn.Module, accelerator: Accelerator) -> None:
        """Save the model and its image processor; called in all processes."""

    def reopen(self, folder: Path) -> nn.Module:
        """Load a model that `save` wrote; needed to select weights and for sharding."""
        raise TrainingError(
            f"{type(self).__name__} cannot load what it saved: train without selecting weights and without sharding."
        )


@dataclass(frozen=True)
class Schedule:
    """Plan of a run: its optimizer steps, and the steps after which it is evaluated and saved.

    Args:
        total_steps: number of optimizer steps.
        epochs: the same length in passes over the training images.
        warmup_steps: number of steps over which the learning rate rises.
        evaluation_steps: steps after which the watched split is evaluated.
        checkpoint_steps: steps after which a checkpoint is written.
    """

    total_steps: int
    epochs: float
    warmup_steps: int
    evaluation_steps: frozenset[int]
    checkpoint_steps: frozenset[int]

    def epochs_after(self, step: int) -> float:
        """Return the number of passes over the training images up to a step."""
        return step / self.total_steps * self.epochs

    def evaluated_until(self, step: int) -> list[int]:
        """Return the evaluation steps up to and including this step."""
        return sorted(each for each in self.evaluation_steps if each <= step)

    def remark(self, batch_size: int) -> str:
        """Return a note for runs whose step takes more images than the training split has, or ""."""
        images = round(self.total_steps * batch_size / self.epochs)
        if images >= batch_size:
            return ""
        return (
            f"{images} training images are fewer than the {batch_size} of a step: each step uses them "
            f"{batch_size / images:.1f} times, newly augmented, and is that many epochs. A lower --batch_size trains "
            "more steps in as many epochs."
        )


def make_schedule(options: LoopOptions, images: int, processes: int) -> Schedule:
    """Plan the steps of a run.

    Args:
        options: options of the run.
        images: number of training images.
        processes: number of processes that share each step.

    Raises:
        TrainingError: The processes cannot share a step evenly, or the warm-up is longer than the run.
    """
    parts = processes * options.gradient_accumulation_steps
    if options.batch_size % parts:
        raise TrainingError(
            f"batch_size {options.batch_size} is not divisible by {processes} processes x "
            f"{options.gradient_accumulation_steps} micro-batches: use a multiple of {parts}."
        )
    passes = 10.0 if options.epochs is None else options.epochs
    total = options.steps or math.ceil(passes * images / options.batch_size)
    epochs = total * options.batch_size / images
    warmup = round(options.warmup_fraction * total) if options.warmup_steps is None else options.warmup_steps
    if warmup > total:
        raise TrainingError(
            f"The warm-up takes {warmup} steps, the run {total}: give --warmup_steps or --warmup_fraction."
        )
    if warmup + options.cooldown_steps > total:
        raise TrainingError(
            f"The warm-up of {warmup} steps and the cool-down of {options.cooldown_steps} are longer than the run of "
            f"{total}: give fewer --cooldown_steps."
        )
    evaluations = options.evaluations or max(1, round(epochs))
    evaluation_steps = frozenset(math.ceil(total * (count + 1) / evaluations) for count in range(evaluations))
    every = options.checkpoint_every
    return Schedule(
        total_steps=total,
        epochs=epochs,
        warmup_steps=warmup,
        evaluation_steps=evaluation_steps,
        checkpoint_steps=frozenset(range(every, total + 1, every)) if every else evaluation_steps,
    )


def start_run(options: LoopOptions) -> tuple[Accelerator, dict[str, Any]]:
    """Validate the common options, start the processes, and set the seed.

    Returns:
        The accelerator, and keyword arguments for a `DataLoader`.

    Raises:
        TrainingError: An option is out of range, or incompatible with another option or with the number of processes.
    """
    check_options(options)
    tracker_names(options.report_to)
    started = start_processes(options)
    set_seed(options.seed)
    return started


class Stopped(Exception):
    """Raised when a signal or the deadline ends an evaluation; `status` is the exit status of the run."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Loop(Generic[ResultT]):
    """A training run: trains a learner on a task by a schedule, and records the run in a folder.

    All randomness in a step is a function of the seed and the step, so a resumed run repeats the step exactly.

    Args:
        task: the task.
        learner: the model with its optimizer.
        schedule: the steps, evaluations and checkpoints.
        run: the run folder.
        options: options of the run.
        watched_name: name of the split that is evaluated during training.
        early_stopping: stop after this many evaluations without a better score.
        skip_unreadable: skip and count unreadable training images instead of stopping at the first one.
    """

    def __init__(
        self,
        task: Task[ResultT],
        learner: Learner,
        schedule: Schedule,
        run: RunFolder,
        options: LoopOptions,
        *,
        watched_name: str = "validation",
        early_stopping: int | None = None,
        skip_unreadable: bool = False,
    ) -> None:
        self.task, self.learner, self.schedule, self.run, self.options = task, learner, schedule, run, options
        self.watched_name, self.early_stopping = watched_name, early_stopping
        self.chooses_by = task.score if watched_name == "validation" else None
        if options.schedule == "plateau" and self.chooses_by is None:
            raise TrainingError(
                "The schedule plateau needs a validation split whose results it follows: add --validation_fraction 0.1."
            )
        if options.best_kept > 1 and self.chooses_by is None:
            raise TrainingError("best_kept needs a validation split to choose by: add --validation_fraction 0.1.")
        self.accelerator = run.accelerator
        self.trackers = tracker_names(options.report_to)
        self.checkpoint_size = checkpoint_bytes(learner.model, learner.average)
        self.unreadable = UnreadableImages(
            stop=not skip_unreadable, say=tqdm.write, advice="Repair it, or train with --corrupted skip."
        )
        changed = "It has changed since the run began: repair it, and continue with --resume."
        self.in_evaluation = UnreadableImages(  # skipped images were already removed from the evaluated splits
            stop=True, say=tqdm.write, advice=changed if skip_unreadable else self.unreadable.advice
        )
        self.begun = self.saved_at = time.perf_counter()
        self.save_due = False  # after the current step, because of the time
        self.step, self.stale = 0, 0
        self.skipped = 0  # steps in a row up to the current one
        self.step_loss = torch.zeros(())  # summed over the micro-batches of the current step
        self.evaluation_due = False  # after the current step
        self.reductions = 0  # of the learning rate, with the schedule plateau
        self.best: list[tuple[float, int]] = []  # score and step of each model that is kept, best first
        self.result: ResultT | None = None  # on the watched split, with the weights after step `result_step`
        self.result_step = -1
        self.exchange = StepExchange(self.accelerator)
        self.draws: bool | None = None  # whether processes draw random numbers, as dropout does; unknown before step 1
        self.flops: int | None = None  # of one image, forward and backward; see `flops_per_image`
        self.profile = StepProfile(run.path / "profile", options.profile, self.accelerator, schedule.total_steps)
        learner.phase = self.profile.phase
        self.on_score: Callable[[int, float], None] = lambda step, score: None  # higher is better; may end the run

    # Start, or resume from the newest checkpoint.

    def begin(self) -> None:
        """Create the folder or load its newest checkpoint, then start the trackers."""
        options = self.options
        # One more than `checkpoints_kept`, as the next checkpoint is written before an old one is deleted.
        checkpoints = options.checkpoints_kept + 1 if options.checkpoints_kept else 0
        self.run.require_space((checkpoints + folders_of_best(options) + 1) * self.checkpoint_size, "the run")
        self.learner.prepare()
        self.task.prepare(self.accelerator)
        progress = self.run.begin(self.learner.average, self.learner.sharded) or {}
        is_main = self.accelerator.is_main_process
        self.step, self.stale = progress.get("step", 0), progress.get("stale", 0)
        self.reductions, self.skipped = progress.get("reductions", 0), progress.get("skipped", 0)
        self._check_length()
        self.evaluation_due = progress.get("evaluation_due", False) and self.step in self.schedule.evaluation_steps
        self.best = [(score, step) for score, step in progress.get("best", ())]
        if self.best:
            self._check_best(begins=True)
        if is_main:
            write_file(self.run.path / "arguments.yaml", as_yaml(options))
            self.run.write_options()
            self._complete_best_models()
        # Remove models of steps that a crash has discarded.
        self._delete(folder.name for folder in (self.run.path / BEST_MODELS).glob("step_*"))
        self.learning_rate = progress.get("learning_rate", 0.0)
        self.draws = progress.get("tied_to_processes") == "dropout" or None
        self.spent = progress.get("spent", {})  # time spent before the run was resumed
        self.unreadable.count = progress.get("unreadable", 0) * is_main
        self.stream_positions: dict[int, Position] = {part: (*of,) for part, *of in progress.get("stream", ())}
        start_trackers(self.accelerator, self.trackers, self.run.path, dataclasses.asdict(options), step=self.step)
        # Sums of this process since the last log entry, and since the last evaluation: loss, measures, images.
        self.window, self.since_evaluation = (self._sums(progress.get(name)) for name in ("window", "since"))

    def _check_length(self) -> None:
        """Refuse a new length or schedule that would change the learning rates of the steps already taken."""
        before: LoopOptions = dataclasses.replace(self.options, **self._length_before())
        images = round(self.schedule.total_steps * self.options.batch_size / self.schedule.epochs)
        planned = make_schedule(before, images, self.accelerator.num_processes)
        evaluated = planned.evaluated_until(self.step)
        if (
            self._past(before, planned) != self._past(self.options, self.schedule)
            or self.step > self.schedule.total_steps
        ):
            raise TrainingError(
                f"The run in {self.run.path} has taken {self.step} steps, whose learning rates would be others with "
                f"this length and schedule: resume it with {_shown(self._length_before())}, or train its model further "
                "in another folder. A run can be lengthened with the schedules constant and inverse_sqrt, with plateau "
                "if the evaluations so far stay the same, --warmup_steps, and --cooldown_steps that begin after its "
                "last step."
            )
        if self.chooses_by is not None and evaluated != self.schedule.evaluated_until(self.step):
            self.accelerator.print(
                f"The run was evaluated after the steps {', '.join(map(str, evaluated))}, not all of which are those "
                "of a run of this length: they also count in selecting the weights and in --early_stopping."
            )

    def _length_before(self) -> dict[str, Any]:
        """Return the length and schedule options with which the run was started or last resumed."""
        return {name: value for name, value in self.run.before.items() if name in LENGTH_OPTIONS}

    def _past(self, options: LoopOptions, schedule: Schedule) -> tuple[list[float], list[int]]:
        """Return the learning rates of the steps already taken, and the evaluation steps that may have lowered them."""
        rates = [
            scheduled_rate(options, step, total=schedule.total_steps, warmup=schedule.warmup_steps)
            for step in range(self.step)
        ]
        return rates, schedule.evaluated_until(self.step) if options.schedule == "plateau" else []

    def _sums(self, saved: list[list[float]] | None) -> torch.Tensor:
        """Return this process's sums from a checkpoint, or zeros."""
        accelerator = self.accelerator
        own = torch.zeros(len(self.task.measures) + 2, device=accelerator.device)
        if saved is None:
            return own
        of_each = torch.tensor(saved, device=accelerator.device)
        if len(of_each) == accelerator.num_processes:
            return of_each[accelerator.process_index]
        return of_each.sum(dim=0) if accelerator.is_main_process else own  # the number of processes has changed

    @property
    def selected(self) -> int | None:
        """Return the step of the selected weights, or None if none were selected."""
        return self.best[0][1] if self.best else None

    @property
    def micro_batch(self) -> int:
        """Return the number of images per micro-batch of one process."""
        parts = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        return self.options.batch_size // parts

    def batches(
        self,
        images: Any,
        *,
        balanced_by: Sequence[int] | None = None,
        repeats: int = 1,
        followed: bool = False,
        collate: Callable[..., Batch] | None = None,
        **loading: Any,
    ) -> Iterator[Batch]:
        """Return the micro-batches of this process from the current step on, on its device.

        Args:
            images: the training images, indexed by the keys of `ShuffledStream`.
            balanced_by: see `ShuffledStream`.
            repeats: see `ShuffledStream`.
            followed: append to each micro-batch the image that follows it, see `collate_followed`.
            collate: combines images into a micro-batch (default: stacks them); not with `followed`.
            **loading: `num_workers` and other options of the loader.
        """
        accelerator, size = self.accelerator, self.options.batch_size
        order = ShuffledStream(
            len(images),
            length=self.schedule.total_steps * size,
            seed=self.options.seed,
            start=self.step * size,
            balanced_by=balanced_by,
            repeats=repeats,
            batch_size=size,
        )
        own = MicroBatches(
            order,
            self.micro_batch,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
            followed=followed,
        )
        collate = collate_followed if followed else collate
        loader: DataLoader[Any] = DataLoader(images, batch_sampler=own, collate_fn=collate, **loading)
        return (send_to_device(batch, accelerator.device, non_blocking=True) for batch in loader)

    # The run.

    def train(
        self, batches: Iterable[Batch], watched: DataLoader, on_step: Callable[[int, nn.Module], None] | None = None
    ) -> None:
        """Train for the remaining steps, or until early stopping, a signal or the deadline ends the run.

        Args:
            batches: micro-batches of this process, starting at the current step.
            watched: prepared loader of the split that is evaluated during training.
            on_step: called with the number of steps and the model to evaluate, before the first and after each step.
        """
        self.watched, self.on_step = watched, on_step or (lambda step, model: None)
        self.stream = batches if isinstance(batches, StreamedBatches) else None
        total, images = self.schedule.total_steps, self.options.batch_size
        is_main = self.accelerator.is_main_process
        self.bar = Progress(total=total * images, done=self.step * images, shown=is_main, before=self.spent)
        self.bar.say(
            f"{counted(total, 'step')} of {counted(images, 'image')} in "
            f"{counted(self.accelerator.num_processes, 'process', 'processes')}, "
            f"{self.schedule.epochs:.1f} epochs" + (f", from step {self.step} on" if self.step else "")
        )
        if remark := self.schedule.remark(images):
            self.bar.say(remark)
        with self.bar, StopRequest(self.options.until) as self.stop, explain_out_of_memory(), self.profile.profiler:
            if self.step == 0:
                self.on_step(0, self.learner.model)
            if self.evaluation_due:  # the run was stopped before or during it
                self._finish_step(stop=0)
            train_mode(self.learner.model)
            for micro_step, batch in enumerate(self.bar.batches(self.unreadable.watch(batches))):
                part = micro_step % self.accelerator.gradient_accumulation_steps
                if part == 0:
                    if self.stale == self.early_stopping:
                        stale, score = counted(self.stale, "evaluation"), (self.chooses_by or "").replace("_", " ")
                        self.bar.say(f"Stopped early after step {self.step}: {stale} without a better {score}.")
                        break
                    self._begin_step()
                self._learn(batch, part)
                if self.accelerator.sync_gradients:
                    self._end_step()
                self.profile.phase(WAITING)
            if stop := self.exchange.after(self.step, self.stop.status, due=True).stop:
                self._leave(stop)

    def _begin_step(self) -> None:
        # Dropout depends only on the step and the process, so a resumed run repeats it.
        torch.manual_seed(randomness(self.options.seed, self.step, self.accelerator.process_index))
        self.task.begin_step(self.step)
        self.learner.measures_update = self._logs_after(self.step + 1)
        factor = self._rate()
        self.learner.set_learning_rate(factor)
        self.learning_rate = factor * self.options.peak_learning_rate

    def _rate(self) -> float:
        """Return the learning rate of this step as a fraction of its peak."""
        options, schedule = self.options, self.schedule
        factor = scheduled_rate(options, self.step, total=schedule.total_steps, warmup=schedule.warmup_steps)
        return max(factor * options.plateau_factor**self.reductions, min(factor, options.lowest_factor))

    def _learn(self, batch: Batch, part: int) -> None:
        """Accumulate the gradients of one micro-batch; the last micro-batch of a step updates the weights."""
        images = count_images(batch)
        accelerator = self.accelerator
        first = (part * accelerator.num_processes + accelerator.process_index) * self.micro_batch
        states = generator_states(accelerator.device) if self.draws is None else []
        self.profile.phase("forward")
        with (
            accelerator.accumulate(self.learner.model),
            tf32(self.options.tf32),
            products(accelerator.device),
            fast_steps(self.learner.model),
        ):
            loss, sums = self._loss(batch, first)
            self.learner.learn(loss, closure=lambda: self._loss(batch, first)[0])
        if self.draws is None:
            now = generator_states(accelerator.device)
            self.draws = not all(map(torch.equal, states, now))
        loss = loss.detach().float()
        self.step_loss = loss + self.step_loss if part else loss
        measured = [sums[name].detach() for name in self.task.measures]
        seen = torch.stack([loss * images, *measured, torch.full_like(loss, images)])
        seen = torch.where(loss.isfinite(), seen, torch.zeros_like(seen))
        self.window += seen
        self.since_evaluation += seen

    def _loss(self, batch: Batch, first: int) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss and the measures of a micro-batch; `first` is the index of its first image in the step."""
        self.learner.places.set(self.step, first, count_images(batch), self.accelerator.device)
        return self.task.loss(self.learner.model, batch)

    def _logs_after(self, step: int) -> bool:
        return step % self.options.log_every == 0 or step == self.schedule.total_steps

    def _end_step(self) -> None:
        self.profile.phase(OTHER)
        self.step += 1
        self.bar.update(self.options.batch_size)
        if self.learner.skipped:
            self._skip()
        else:
            self.skipped = 0
            self.exchange.watch(self.step_loss, self.step)
        self.learner.update_average()
        logs = self._logs_after(self.step)
        self.evaluation_due = self.step in self.schedule.evaluation_steps
        due = logs or self.evaluation_due or self._saves
        minutes = self.options.checkpoint_minutes or math.inf
        late = time.perf_counter() - self.saved_at >= 60 * minutes
        agreed = self.exchange.after(self.step, self.stop.status, due=due, save=late)
        if agreed.bad_step is not None:
            raise TrainingError(f"The loss of step {agreed.bad_step} is not finite: {self._recovery_hint()}")
        self.save_due = agreed.save
        if logs:
            self._log()
        self._finish_step(agreed.stop)
        with self.bar.pause():
            self.profile.step(self.bar.say)

    def _skip(self) -> None:
        """Record a step that was left out, unless there were too many in a row."""
        most = self.options.skip_nonfinite
        if self.skipped == most:
            raise TrainingError(
                f"The gradients of step {self.step} are not finite, nor were those of the {counted(most, 'step')} "
                f"before it: {self._recovery_hint()}"
            )
        self.skipped += 1
        self.run.log(step=self.step, skipped_in_a_row=self.skipped)
        self.bar.say(f"left out step {self.step}: its gradients are not finite ({self.skipped} in a row, up to {most})")

    @property
    def _saves(self) -> bool:
        scheduled = self.save_due or self.step in self.schedule.checkpoint_steps
        return bool(self.options.checkpoints_kept) and scheduled

    def _finish_step(self, stop: int) -> None:
        """Evaluate and save after the steps scheduled for it; if the run stops here, the resumed one evaluates."""
        if self.evaluation_due and not stop:
            stop = self._evaluate()
        if not self.evaluation_due:
            with self.bar.pause():
                self.on_step(self.step, self.learner.evaluated)
        if stop:
            self._leave(stop)
        if self._saves:
            with self.bar.pause():
                self._save_checkpoint()

    def _leave(self, status: int) -> NoReturn:
        """Save a checkpoint and end the process with this exit status."""
        self._save_checkpoint()
        self.run.finish_saving()
        self.run.release()
        self.accelerator.end_training()
        self.bar.say(f"Stopped after step {self.step} of {self.schedule.total_steps}: continue with --resume.")
        sys.exit(status)

    def _recovery_hint(self) -> str:
        self.run.finish_saving()
        checkpoint = self.run.newest_checkpoint()
        left, where, again = "there is no checkpoint", "in this folder again", ""
        if checkpoint is not None:
            left, where = f"the newest checkpoint, {checkpoint}, is from before", "in another folder"
            again = "--resume "
        skips = self.options.skip_nonfinite or self.options.mixed_precision == "fp16"
        return (
            f"{left}. Train {where}, with a lower --learning_rate, a longer warm-up, a lower --max_grad_norm, or "
            "without --mixed_precision."
            + ("" if skips else f" Or add {again}--skip_nonfinite 3: it leaves such steps out.")
        )

    def _log(self) -> None:
        values = self._means(self.window)
        logged = {f"train_{name}": value for name, value in values.items()}
        logged["grad_norm"] = float(self.learner.grad_norm)  # before clipping
        if self.learner.clipped_norm is not None:
            logged["grad_norm_clipped"] = float(self.learner.clipped_norm)
        logged |= self.learner.describe_groups()
        finite = {name: value for name, value in logged.items() if math.isfinite(value)}
        self.run.log(step=self.step, learning_rate=self.learning_rate, **finite)
        speed = self.speed(self.bar.rates())
        self.run.track(step=self.step, **speed)
        self.bar.show(**{name: metric_text(name, value) for name, value in values.items()}, **speed_text(speed))

    def speed(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return rates with the memory of this process and, of each device, the operations per second and the MFU."""
        accelerator, speed = self.accelerator, {**rates, "memory_bytes": memory_of(self.accelerator.device)}
        if self.flops is not None:
            speed["tflops"] = rates["images_per_second"] * self.flops / accelerator.num_processes / 1e12
            is_half = accelerator.mixed_precision in ("bf16", "fp16")
            peak = peak_flops(accelerator.device, tf32=not is_half) if is_half or self.options.tf32 else None
            speed |= {"mfu": speed["tflops"] * 1e12 / peak} if peak else {}
        return speed

    def _means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the means over the sums of all processes, NaN if all steps were left out, and reset the sums."""
        loss, *others, images = self.accelerator.reduce(sums).tolist()
        images = images or math.nan
        sums.zero_()
        measured = zip(self.task.measures.items(), others, strict=True)
        return {"loss": loss / images, **{name: total / images / of_one for (name, of_one), total in measured}}

    def _evaluate(self) -> int:
        """Evaluate the watched split, and keep the weights if selection is on and they are the best so far.

        Returns:
            0, or the exit status with which the run has to stop, and the evaluation is then still due.
        """
        name = self.watched_name
        self.learner.share_buffers()
        try:
            with self.bar.pause():
                result = self._judge(self.learner.evaluated, self._until_stopped(self.watched), _size(self.watched))
        except Stopped as stopped:
            train_mode(self.learner.model)
            return stopped.status
        self.evaluation_due = False
        learnt = self._means(self.since_evaluation)
        if not all(map(math.isfinite, result.values.values())):
            raise TrainingError(
                f"The {name} results after step {self.step} are not finite ({result.values}): {self._recovery_hint()}"
            )
        self.result, self.result_step = result, self.step
        train_mode(self.learner.model)
        epoch = self.schedule.epochs_after(self.step)
        self.run.log(step=self.step, epoch=epoch, **{f"{name}_{each}": value for each, value in result.values.items()})
        both = {f"train {each}": metric_text(each, value) for each, value in learnt.items()}
        columns = result.values.keys() if self.task.columns is None else self.task.columns
        both |= {f"{name} {each}": metric_text(each, value) for each, value in result.values.items() if each in columns}
        self.bar.row(
            {
                "epoch": f"{epoch:.1f}",
                "step": str(self.step),
                **{each.replace("accuracy", "acc").replace("_", " "): value for each, value in both.items()},
                "evaluated": f"{result.count} of {_size(self.watched)}",
                "lr": f"{self.learning_rate:.2e}",
            }
        )
        self.stale += 1
        if self.chooses_by is not None:
            score = result.values[self.chooses_by] * (-1 if self.task.lower_is_better else 1)
            self._rank(score)
            self.on_score(self.step, score)
        if self.options.schedule == "plateau" and self.stale and self.stale % self.options.plateau_patience == 0:
            self.reductions += 1
        return 0

    def _judge(self, model: nn.Module, batches: Iterable[Batch], size: int) -> ResultT:
        with tf32(enabled=False):
            return self.task.evaluate(model, self.in_evaluation.watch(batches), self.accelerator, size=size)

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches; a signal to one process ends the evaluation in all processes after the same batch.

        Raises:
            Stopped: A process received a signal, or the deadline has passed.
        """
        exchange = StepExchange(self.accelerator)
        for number, batch in enumerate(batches):
            stop = number and exchange.after(number, self.stop.status, due=False).stop
            if stop:
                raise Stopped(stop)
            yield batch

    def _rank(self, score: float) -> None:
        """Keep the weights if they are among the best; of equal scores, the earlier one ranks higher."""
        here = (score, self.step)
        self.best = sorted([*self.best, here], key=lambda each: -each[0])
        dropped = self.best[self.options.best_kept :]
        self.best = self.best[: self.options.best_kept]
        if here == self.best[0]:
            self.stale = 0
            self._save_best()
        if self.options.best_kept > 1 and here in self.best:
            self._save_best(f"{BEST_MODELS}/{_of_step(self.step)}")
        self._delete(_of_step(step) for _, step in dropped)

    def _complete_best_models(self) -> None:
        """Finish interrupted deletions; copy the best model to `BEST_MODELS` if `best_kept` was raised on resuming."""
        folder = self.run.path / BEST_MODELS
        for left in folder.glob(f"{DELETED}*"):
            shutil.rmtree(left)
        if self.options.best_kept == 1 or self.selected is None or (folder / _of_step(self.selected)).exists():
            return
        file = self.run.path / BEST / PROGRESS
        if file.exists() and read_json(file)["step"] == self.selected:  # not from an evaluation that will be repeated
            folder.mkdir(exist_ok=True)
            with staged_folder(folder / _of_step(self.selected)) as copied:
                shutil.copytree(file.parent, copied, dirs_exist_ok=True)

    def _delete(self, names: Iterable[str]) -> None:
        """Delete the models that are not among the best."""
        if self.accelerator.is_main_process:
            kept = {_of_step(step) for _, step in self.best}
            for folder in (self.run.path / BEST_MODELS / name for name in set(names) - kept):
                if folder.exists():  # rename first: if killed here, no partial model keeps the name
                    shutil.rmtree(shutil.move(folder, folder.with_name(f"{DELETED}{folder.name}")))

    def _save_best(self, name: str = BEST) -> None:
        with shared_staging(self.run.path / name, self.accelerator) as folder:
            self.task.save(folder, self.learner.evaluated, self.accelerator)
            self.accelerator.wait_for_everyone()  # all have written
            if self.accelerator.is_main_process:
                (folder / PROGRESS).write_text(as_json({"step": self.step}), encoding="utf-8")
                write_manifest(folder)

    def _check_best(self, *, begins: bool = False) -> None:
        """Refuse selected weights that are damaged or come from a step other than the selected one.

        Args:
            begins: accept weights of a step after the current one: the run crashed after that step, and will repeat
                its evaluation.
        """
        if problem := manifest_problem(self.run.path / BEST):
            raise TrainingError(
                f"The selected weights in {self.run.path / BEST} are damaged: {problem}. They cannot be computed again "
                "without their checkpoint: start the run anew in another folder."
            )
        file = self.run.path / BEST / PROGRESS
        chosen = self.step if self.selected is None else self.selected
        found = read_json(file)["step"] if file.exists() else chosen  # earlier versions did not store it
        is_ahead = found > self.step or (found == self.step and self.evaluation_due)
        if found != chosen and not (begins and is_ahead and found in self.schedule.evaluation_steps):
            raise TrainingError(
                f"The selected weights in {self.run.path / BEST} are of step {found}, but the run selected step "
                f"{chosen}, after whose checkpoint it was stopped: resume it with the evaluations that it had, "
                f"{_shown(self._length_before())}, or start it anew in another folder."
            )

    def _save_checkpoint(self) -> None:
        if not self.learner.is_finite():
            raise TrainingError(f"The weights after step {self.step} are not finite: {self._recovery_hint()}")
        self.run.require_space(self.checkpoint_size, "the next checkpoint")
        self.learner.share_buffers()
        positions = [] if self.stream is None else [[part, *of] for part, of in self.stream.positions.items()]
        progress = {
            "step": self.step,
            "stream": gather_object(positions),
            "processes": self.accelerator.num_processes,
            "tied_to_processes": self._tied_to_processes(),
            "evaluation_due": self.evaluation_due,
            "learning_rate": self.learning_rate,
            "spent": {**self.bar.times(), "seconds": self._seconds(since=self.begun)},
            "best": self.best,
            "stale": self.stale,
            "reductions": self.reductions,
            "skipped": self.skipped,
            # One row per process: from a total, a resumed run would sum in a different order.
            "window": self.accelerator.gather(self.window[None]).tolist(),
            "since": self.accelerator.gather(self.since_evaluation[None]).tolist(),
            "unreadable": self.unreadable.count_everywhere(self.accelerator),
        }
        keep, learner = self.options.checkpoints_kept, self.learner
        self.run.save(progress, keep=keep, average=learner.average, sharded=learner.sharded)
        self.saved_at, self.save_due = time.perf_counter(), False

    def _tied_to_processes(self) -> str | None:
        """Return what makes the result depend on the number of processes, or None."""
        if self.draws:
            return "dropout"
        norms = [layer for layer in self.learner.model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        return "batch normalization" if any(layer.training for layer in norms) else None

    # The end of the run.

    def final_model(self) -> nn.Module:
        """Return the model with the selected weights, or else the last ones, ready to evaluate and save."""
        if self.learner.sharded is None and self.chooses_by is None:
            return self.learner.final().eval()
        if self.chooses_by is None:
            self._save_best()
        self._check_best()
        chosen = self.task.reopen(self.run.path / BEST)
        return self.accelerator.prepare_model(chosen, evaluation_mode=True).eval()

    def judge(self, model: nn.Module, loader: DataLoader) -> ResultT:
        """Evaluate a model, unless the loop has just evaluated it on the same split."""
        current = self.result_step == self.step and model is self.learner.evaluated and loader is self.watched
        if self.result is not None and current:
            return self.result
        return self._judge(model, loader, _size(loader))

    def _seconds(self, *, since: float) -> float:
        """Return the seconds since the start, plus those up to the checkpoint that the run was resumed from."""
        return self.spent.get("seconds", 0.0) + time.perf_counter() - since

    def figures(self, *, since: float) -> dict[str, float]:
        """Return the steps, duration and throughput of the whole run, including the time before it was resumed."""
        seconds = round(self._seconds(since=since), 1)
        work = {} if self.flops is None else {"flops_per_image": self.flops}
        return {"steps": self.step, "seconds": seconds, **work, **self.speed(rates_of(**self.bar.times()))}

    def finish(self, model: nn.Module, results: Mapping[str, Any]) -> None:
        """Write the results, and replace the model in the folder."""
        self.run.finish_saving()
        if self.accelerator.is_main_process:
            write_file(self.run.path / "results.json", as_json(results, indent=2) + "\n")
        with shared_staging(self.run.path / "model", self.accelerator) as folder:
            self.task.save(folder, model, self.accelerator)
        if self.accelerator.is_main_process:
            move_into(self.run.path / "model", self.run.path)
        self.run.release()


def speed_text(speed: Mapping[str, float]) -> dict[str, str]:
    """Return the operations per second, the MFU and the memory of `Loop.speed` as a person reads them."""
    texts = {"TFLOP/s": f"{speed['tflops']:.3g}"} if "tflops" in speed else {}
    texts |= {"MFU": f"{speed['mfu']:.1%}"} if "mfu" in speed else {}
    return {**texts, "memory": in_bytes(int(speed["memory_bytes"]))}


def folders_of_best(options: LoopOptions) -> int:
    """Return the number of folders with best models: one for the best and, if several are kept, one for each."""
    return options.best_kept + (options.best_kept > 1)


def _of_step(step: int) -> str:
    return f"step_{step:08d}"


def _shown(options: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in options.items() if value is not None)


def _size(loader: DataLoader) -> int:
    images: Any = loader.dataset
    return len(images)
