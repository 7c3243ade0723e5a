"""Experiment trackers, which receive every logged value."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import TrainingError
from ...system.extras import needs
from .folder import as_json, read_json, write_file

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.tracking import (
        ClearMLTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        TrackioTracker,
        WandBTracker,
    )

PROJECT = "plain-vit"
IDS = "trackers.json"  # file in the run folder with the run's id in each tracker

# How to get the id of the run from a started tracker.
ID_OF: dict[str, Callable[[Any], Any]] = {
    "tensorboard": lambda tracker: tracker.run_name,
    "trackio": lambda tracker: tracker.run.name,
    "wandb": lambda tracker: tracker.run.id,
    "mlflow": lambda tracker: tracker.active_run.info.run_id,
    "comet_ml": lambda tracker: tracker.writer.get_key(),
    "clearml": lambda tracker: tracker.task.id,
}
TRACKERS = tuple(ID_OF)  # also the names of their packages


def tracker_names(report_to: str) -> list[str]:
    """Parse the names of trackers, and check that they are installed.

    Args:
        report_to: Names separated by commas, or `none`.

    Raises:
        TrainingError: A tracker is unknown or not installed.
    """
    names = list(dict.fromkeys(name.strip() for name in report_to.split(",")))
    if names == ["none"]:
        return []
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise TrainingError(
            f"report_to is {report_to!r}: expected none, or some of {', '.join(TRACKERS)}, separated by commas."
        )
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainingError(
            f"--report_to names {' and '.join(missing)}, not installed here: `pip install {' '.join(missing)}`, or "
            "omit it."
        )
    return names


def start_trackers(
    accelerator: Accelerator, names: list[str], folder: Path, arguments: dict[str, Any], *, step: int
) -> None:
    """Start the trackers that `accelerator.log` writes to, and store their ids in the run folder.

    A tracker with a stored id continues its run; any other starts a new run and gets the arguments.

    Args:
        accelerator: Accelerator whose main process reports.
        names: Names from `tracker_names`.
        folder: Run folder, which also names the run. TensorBoard's files go to its subfolder `tensorboard`.
        arguments: Arguments of the run.
        step: Step at which the run is resumed, or 0; TensorBoard drops the values of later steps.
    """
    ids: dict[str, str] = read_json(folder / IDS) if (folder / IDS).exists() else {}
    accelerator.wait_for_everyone()  # all processes have read the ids before one writes them
    run = folder.resolve().name
    makers: dict[str, Any] = {
        "tensorboard": lambda _: TensorBoardTracker(
            "tensorboard", logging_dir=str(folder), purge_step=step + 1 if step else None
        ),
        "trackio": lambda known: TrackioTracker(PROJECT, name=known or run, resume="allow" if known else "never"),
        "wandb": lambda known: WandBTracker(PROJECT, name=run, dir=str(folder), id=known, resume="allow"),
        "mlflow": lambda known: MLflowTracker(PROJECT, run_name=run, run_id=known),
        "comet_ml": lambda known: CometMLTracker(PROJECT, experiment_key=known),
        # 0: log steps as given, instead of continuing from the last one.
        "clearml": lambda known: ClearMLTracker(
            PROJECT, task_name=run, reuse_last_task_id=known or False, continue_last_task=0 if known else False
        ),
    }
    trackers: dict[str, Any] = {name: makers[name](ids.get(name)) for name in names}
    accelerator.log_with = list(trackers.values())
    accelerator.init_trackers(PROJECT)
    if not accelerator.is_main_process:
        return
    plain = {name: value for name, value in arguments.items() if isinstance(value, (bool, int, float, str))}
    for name in trackers.keys() - ids.keys():
        trackers[name].store_init_configuration(plain)
        ids[name] = str(ID_OF[name](trackers[name]))
    if ids:
        write_file(folder / IDS, as_json(ids) + "\n")
