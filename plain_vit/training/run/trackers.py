"""Experiment trackers, which receive every logged value."""

import importlib.util
from pathlib import Path
from typing import Any

from ...errors import TrainingError
from ...extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.tracking import (
        ClearMLTracker,
        CometMLTracker,
        GeneralTracker,
        MLflowTracker,
        TensorBoardTracker,
        TrackioTracker,
        WandBTracker,
    )

TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "clearml")  # also the names of their packages
PROJECT = "plain-vit"


def tracker_names(report_to: str) -> list[str]:
    """Parse the names of trackers, and check that they are installed.

    Args:
        report_to: Names, separated by commas, or `none`.

    Raises:
        TrainingError: One is unknown or not installed.
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
    """Start trackers, to which `accelerator.log` then writes.

    Args:
        accelerator: Accelerator whose main process reports.
        names: Names from `tracker_names`.
        folder: Run folder; its name is the name of the run. TensorBoard's files go into its subfolder `tensorboard`.
        arguments: Arguments of the run.
        step: Step at which the run is resumed; values of later steps are dropped if the tracker supports it. 0 starts
            a new run.
    """
    run = folder.resolve().name
    makers: dict[str, Any] = {
        "tensorboard": lambda: TensorBoardTracker(
            "tensorboard", logging_dir=str(folder), purge_step=step + 1 if step else None
        ),
        "trackio": lambda: TrackioTracker(PROJECT, name=run, resume="allow" if step else "never"),
        "wandb": lambda: WandBTracker(PROJECT, name=run, dir=str(folder), resume="auto"),
        "mlflow": lambda: MLflowTracker(PROJECT, run_name=run),
        "comet_ml": lambda: CometMLTracker(PROJECT),
        "clearml": lambda: ClearMLTracker(PROJECT, task_name=run),
    }
    trackers: list[GeneralTracker] = [makers[name]() for name in names]
    accelerator.log_with = trackers
    plain = {name: value for name, value in arguments.items() if isinstance(value, (bool, int, float, str))}
    accelerator.init_trackers(PROJECT, config=None if step else plain)
