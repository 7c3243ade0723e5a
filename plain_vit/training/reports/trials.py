"""Trial runs that keep nothing: training on one batch of images, and the loss at rising learning rates."""

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TrainingError
from ...files.staging import staged_file
from ...system.extras import needs
from ..arguments import ClassifierOptions, ProcessOptions, RunOptions, check_options
from ..data import ImageClassificationData
from ..data.folders import file_system_of
from ..data.sampling import ShuffledStream
from ..data.targets import check_evaluated
from ..hardware.processes import start_processes
from ..metrics import Evaluation
from ..run.folder import OPTIONS, default_options, read_log
from ..run.remote import working_folder
from ..vector_metrics import VectorEvaluation
from .show_batch import check_picture

with needs("plain-vit[train]"):
    from accelerate.utils import broadcast_object_list

    from ...analysis.drawing import png
    from ...analysis.plots import plot_learning_rates

RATE_STEPS = 100
HIGHEST_RATE = 1.0
SMOOTHING = 0.9  # decay of the moving average of losses, per step

# Options of the run that its trials use too.
OF_TRIALS = {"seed", "eval_batch_size", *(each.name for each in dataclasses.fields(ProcessOptions))}
# Options that depend on the length of a run.
OF_LENGTH = {
    "epochs", "schedule", "min_learning_rate", "warmup_steps", "warmup_fraction", "restarts", "cooldown_steps",
    "plateau_patience", "plateau_factor",
}  # fmt: skip

Outcome = Evaluation | VectorEvaluation
Train = Callable[[Any, ImageClassificationData], Outcome]


def check_trial(options: ClassifierOptions, name: str) -> None:
    """Refuse a trial on a stream or in several processes.

    Raises:
        TrainingError: The data is streamed, several processes are running, or an option is wrong.
    """
    check_options(options)
    if options.streaming or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError(f"--{name} is for stored images and one process: omit --streaming, start with python.")


def _in(folder: str, options: ClassifierOptions, steps: int, **changes: Any) -> Any:
    """Return the options of a trial in a temporary folder; options that only suit the whole run get their defaults."""
    of_whole_run = {each.name for each in dataclasses.fields(RunOptions)} - OF_TRIALS
    defaults = {name: value for name, value in default_options(options).items() if name in of_whole_run | OF_LENGTH}
    kept_nowhere = {"output_dir": f"{folder}/run", "checkpoints_kept": 0, "report": False}
    return dataclasses.replace(options, **{**defaults, **kept_nowhere, "steps": steps, "evaluations": 1, **changes})


@dataclass(frozen=True)
class TrialData(ImageClassificationData):
    """The data of a trial, which is evaluated on training images."""

    @property
    def splits(self) -> dict[str, Any]:
        """Return the images to train on and the images to evaluate."""
        return {"train": self.train, "training images": self.test}


def _evaluated_on(options: ClassifierOptions, data: ImageClassificationData, train: Any, evaluated: Any) -> TrialData:
    if options.problem_type != "single_label_classification":
        check_evaluated({"trial's": evaluated}, options.problem_type)
    return TrialData(train, None, evaluated, data.label_names, len(train))


def overfit(options: ClassifierOptions, data: ImageClassificationData, train: Train) -> Outcome:
    """Train on the images of a single batch, and evaluate on the same images.

    Args:
        options: options of the run, with `overfit_batch`.
        data: the dataset.
        train: trains with these options and data, without printing the folder.
    """
    steps = options.overfit_batch or 0
    drawn = ShuffledStream(len(data.train), length=min(len(data.train), options.batch_size), seed=options.seed)
    images = data.train.select(sorted(row for _, row, *_ in drawn))
    with tempfile.TemporaryDirectory() as folder:
        result = train(_in(folder, options, steps), _evaluated_on(options, data, images, images))
    print(
        f"After {steps} steps on the same {result.count} images, their results are: {result.summary}. A model that can "
        "learn comes near an accuracy of 100%, or an error of 0. Nothing was kept."
    )
    return result


@dataclass(frozen=True)
class RateTrial:
    """Losses of a trial with rising learning rates.

    Args:
        rates: learning rates of the steps, rising.
        losses: training losses of the steps.
        smooth: moving averages of the losses.
        lowest: learning rate at which the moving average is lowest.
        steepest: learning rate below `lowest` at which the average falls fastest per logarithm of the rate.
    """

    rates: np.ndarray
    losses: np.ndarray
    smooth: np.ndarray
    lowest: float
    steepest: float


def read_rates(rates: Sequence[float], losses: Sequence[float]) -> RateTrial:
    """Evaluate the losses of a trial, up to the first one that is not finite.

    Raises:
        TrainingError: There are fewer than 10 finite losses.
    """
    count = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if count < 10:
        raise TrainingError(f"Only {count} losses are finite, at learning rates from {rates[0]:g}: check the data.")
    raised, given = np.asarray(rates[:count]), np.asarray(losses[:count])
    smooth, average = np.empty(count), 0.0
    for step, loss in enumerate(given):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smooth[step] = average / (1 - SMOOTHING ** (step + 1))
    lowest = max(1, int(smooth.argmin()))
    slopes = np.diff(smooth[: lowest + 1]) / np.diff(np.log(raised[: lowest + 1]))
    return RateTrial(raised, given, smooth, float(raised[lowest]), float(raised[int(slopes.argmin())]))


def find_learning_rate(options: ClassifierOptions, data: ImageClassificationData, train: Train) -> RateTrial:
    """Train with exponentially rising learning rates, and draw the losses (Smith 2017).

    Args:
        options: options of the run, with `lr_find`.
        data: the dataset.
        train: trains with these options and data, without printing the folder.
    """
    path = options.lr_find or ""
    check_picture(path, "lr_find")
    with tempfile.TemporaryDirectory() as folder:
        trial = _try_rates(options, data, train, folder)
    with staged_file(Path(path), force=True) as new:
        new.write_bytes(png(plot_learning_rates(trial.rates, trial.losses, trial.smooth)))
    print(
        f"The loss falls fastest at a learning rate of {trial.steepest:.1e} and is lowest at {trial.lowest:.1e}; a "
        f"tenth of that, {trial.lowest / 10:.1e}, is a usual choice of --learning_rate for batches of "
        f"{options.batch_size}. The losses are drawn in {path}. Nothing else was kept."
    )
    return trial


def _try_rates(options: ClassifierOptions, data: ImageClassificationData, train: Train, folder: str) -> RateTrial:
    """Train with rising learning rates, in any number of processes that share the folder."""
    few = data.train.select(range(min(len(data.train), options.batch_size)))
    changes = {
        "schedule": "rising", "learning_rate": HIGHEST_RATE, "base_batch_size": None, "warmup_steps": 0, "log_every": 1,
    }  # fmt: skip
    try:
        train(_in(folder, options, RATE_STEPS, **changes), _evaluated_on(options, data, data.train, few))
    except TrainingError:
        if not Path(folder, "run").is_dir():  # the trial did not start
            raise
    rows = [row for row in read_log(f"{folder}/run") if "train_loss" in row]
    return read_rates([row["learning_rate"] for row in rows], [row["train_loss"] for row in rows])


def with_rate(options: ClassifierOptions, data: ImageClassificationData, train: Train) -> Any:
    """Return the options with the learning rate of a resumed run, or with a tenth of the best of a trial.

    Args:
        options: options with the learning rate `auto`.
        data: the dataset.
        train: trains with these options and data, without printing the folder.

    Raises:
        TrainingError: The data is streamed.
    """
    if options.streaming:
        raise TrainingError("learning_rate auto is for stored images: give a number, or omit --streaming.")
    system, root = file_system_of(options.output_dir)
    if options.resume and system.exists(stored := f"{root}/{OPTIONS}"):
        return dataclasses.replace(options, learning_rate=json.loads(system.cat_file(stored))["learning_rate"])
    accelerator, _ = start_processes(options)
    place: list[Any] = [None]
    if accelerator.is_main_process:
        parent = working_folder(options.output_dir).absolute().parent  # which all processes see
        parent.mkdir(parents=True, exist_ok=True)
        place = [tempfile.mkdtemp(prefix=".trial-", dir=parent)]
    broadcast_object_list(place)
    chosen = [_try_rates(options, data, train, place[0]).lowest / 10]
    broadcast_object_list(chosen)  # a log on a network disk may be seen late
    accelerator.wait_for_everyone()
    shutil.rmtree(place[0], ignore_errors=True)
    accelerator.print(f"learning rate {chosen[0]:.1e}: a tenth of that with the lowest loss in {RATE_STEPS} steps")
    share = options.batch_size / (options.base_batch_size or options.batch_size)
    return dataclasses.replace(options, learning_rate=chosen[0] / share)
