"""Scripts killed while writing a file, at each file in turn: the same command, or `--resume`, completes them."""

import os
import random
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from plain_vit.errors import OutputExistsError
from plain_vit.files import staging
from tests.processes import LIMIT, server
from tests.sizes import draws
from tests.training.runs import call, save_mixed_sizes

DATA: dict[str, Any] = {"batch_size": 50}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "features": ("extract_features", {**DATA, "split": "test", "shard_size": 20}),
    "probes": (
        "linear_probe",
        {**DATA, "mode": "linear", "epochs": 1, "learning_rates": [0.1], "probe_batch_size": 50},
    ),
    "attentive probes": (
        "linear_probe",
        {**DATA, "mode": "attentive", "epochs": 1, "learning_rates": [0.1], "probe_batch_size": 50},
    ),
    "training": (
        "finetune_image_classification",
        {"batch_size": 20, "steps": 2, "evaluations": 1, "report": False},
    ),
}  # fmt: skip


def run_again(script: str, options: dict[str, Any]) -> None:
    """Run a script again in the folder of a killed run, with `--resume` if the error says so."""
    try:
        call(script, **options)
    except OutputExistsError as error:
        if "--resume" not in str(error):
            raise
        call(script, **options, resume=True)


def kill_at(write: int, name: str, script: str, options: dict[str, Any]) -> None:
    """Run a script in another process that is killed at a call of a function in `staging`."""
    process = server.Process(target=be_killed_at, args=(write, name, script, options))
    process.start()
    process.join(LIMIT)
    exitcode = process.exitcode
    process.kill()  # otherwise pytest would wait at its end for a process that hangs
    assert exitcode == -signal.SIGKILL


def be_killed_at(write: int, name: str, script: str, options: dict[str, Any]) -> None:
    calls, original = iter(range(10_000)), getattr(staging, name)

    def counted(*arguments: Any) -> Any:
        if next(calls) == write:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    with mock.patch.object(staging, name, counted):
        call(script, **options)


def results_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of a run's files without timestamps; hidden files are empty locks."""
    files = (file for file in folder.rglob("[!.]*") if file.suffix in (".safetensors", ".npy", ".parquet"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if "checkpoints" not in file.parts}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_any_of_its_writes_can_be_run_again(name: str, model_folder: Path, tmp_path: Path) -> None:
    script, options = RUNS[name]
    options = {**options, "model": str(model_folder), "dataset": str(save_mixed_sizes(tmp_path / "data"))}
    writes = []
    with (  # before a file is moved into place, and around the write
        mock.patch.object(staging, "_put_in_place", wraps=staging._put_in_place) as put_in_place,
        mock.patch.object(staging, "_clear", wraps=staging._clear) as clear,
    ):
        call(script, **options, output_dir=tmp_path / "whole")
        for at, calls in (("_put_in_place", put_in_place), ("_clear", clear)):
            writes += [(at, write) for write in range(calls.call_count)]
    expected = results_of(tmp_path / "whole")
    assert expected
    assert len(writes) >= 6
    for at, write in random.Random(name).sample(writes, draws(2, nightly=len(writes))):
        given = {**options, "output_dir": str(tmp_path / f"{at}-{write}")}
        kill_at(write, at, script, given)
        run_again(script, given)
        assert results_of(Path(given["output_dir"])) == expected, (at, write)
