"""A training checkpoint is either complete or absent, whenever the process is killed."""

import itertools
import os
import random
import signal
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

from plain_vit.errors import OutputError, OutputExistsError
from plain_vit.files.manifest import manifest_problem, write_manifest
from plain_vit.training.hardware.processes import start_accelerator
from plain_vit.training.run import folder as run_folder
from plain_vit.training.run.folder import RunFolder
from tests.processes import LIMIT, run_forked
from tests.sizes import draws, few
from tests.training.kill_matrix import SETTINGS

processes = get_context("fork")  # children inherit all imports
tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared by all processes, and a killed child may hold it


def prepared(folder: Path, *, resume: bool) -> tuple[RunFolder, nn.Module, torch.optim.Optimizer]:
    """Return a run, and a model and optimizer whose values `set_all` sets to the step."""
    accelerator = start_accelerator(num_processes=1, gradient_accumulation_steps=1, mixed_precision="no")
    model = nn.Sequential(*(nn.Linear(31, 31) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    run = RunFolder(folder, accelerator, {"seed": 1}, resume=resume)
    model, optimizer = accelerator.prepare(model, optimizer)
    return run, model, optimizer


def set_all(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set every weight and every moment of the optimizer to the step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            for state in optimizer.state[parameter].values():
                state.fill_(step)


def save_for_ever(folder: Path, resume: bool, saved: Any) -> None:
    run, model, optimizer = prepared(folder, resume=resume)
    step = (run.begin() or {"step": 0})["step"]
    for parameter in model.parameters():  # torch may refuse a backward pass in a forked process
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # creates the moments
    while True:
        step += 1
        set_all(model, optimizer, step)
        run.save({"step": step}, keep=2)  # the previous checkpoint is complete
        saved.value = step - 1


def test_killed_at_random_moments_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    folder, kills = tmp_path / "run", draws(10, nightly=100)
    rng, saved, left = random.Random(7), processes.Value("i", 0, lock=False), 0
    for kill in itertools.count():
        if kill >= kills and left > kills // 5:  # enough kills happened during a write
            return
        assert kill < 5 * kills, "too few kills fell into the writing to say anything"
        before = saved.value
        child = processes.Process(target=save_for_ever, args=(folder, kill > 0, saved), daemon=True)
        child.start()
        while saved.value == before and child.is_alive():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        left += any(path.name.startswith(".plain-vit-new") for path in (folder / "checkpoints").iterdir())

        assert not [path for path in (folder / "checkpoints").glob("step_*") if manifest_problem(path)]
        run, model, optimizer = prepared(folder, resume=True)
        progress = run.begin()
        assert progress is not None
        assert progress["step"] in (saved.value, saved.value + 1, saved.value + 2)
        assert all((parameter == progress["step"]).all() for parameter in model.parameters())
        moments = [state for of in optimizer.state.values() for state in of.values()]
        assert len(moments) == 3 * 40
        assert all((moment == progress["step"]).all() for moment in moments)
        saved.value = progress["step"]
        run.release()


def killed_while_completing(path: Path, step: int) -> None:
    """Save checkpoints up to this step, in the completion of which the process is killed."""

    def killed(folder: Path) -> None:
        if folder.name.endswith(f"step_{step:08d}"):
            os.kill(os.getpid(), signal.SIGKILL)
        write_manifest(folder)

    run_folder.write_manifest = killed
    run, *_ = prepared(path, resume=False)
    run.begin()
    for each in range(1, step + 1):
        run.save({"step": each}, keep=2)
    run.finish_saving()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_what_a_kill_leaves_of_an_incomplete_checkpoint_is_deleted(step: int, resume: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = processes.Process(target=killed_while_completing, args=(folder, step), daemon=True)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert f".plain-vit-new.step_{step:08d}" in names
    if step == 1:  # without a checkpoint, the run counts as none, with any options
        accelerator = start_accelerator(num_processes=1, gradient_accumulation_steps=1, mixed_precision="no")
        run = RunFolder(folder, accelerator, {"seed": 2}, resume=resume)
        assert run.begin() is None
        assert not (folder / "checkpoints").exists()
    elif resume:
        run, *_ = prepared(folder, resume=True)
        assert run.begin() == {"step": 1}
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000001"]
    else:
        with pytest.raises(OutputExistsError, match="is not empty"):
            prepared(folder, resume=False)


def test_checkpoint_is_completed_while_training_goes_on(tmp_path, monkeypatch):
    hashed, may_go_on = [], threading.Semaphore(0)

    def slowly(folder: Path) -> None:
        assert may_go_on.acquire(timeout=60)
        hashed.append(folder.name)
        write_manifest(folder)

    monkeypatch.setattr(run_folder, "write_manifest", slowly)
    run, model, optimizer = prepared(tmp_path / "run", resume=False)
    run.begin()
    for step in (1, 2):
        set_all(model, optimizer, step)
        run.save({"step": step}, keep=2)
        assert len(hashed) == step - 1, "it did not wait for its own"
        assert run.newest_checkpoint() == (tmp_path / "run/checkpoints/step_00000001" if step == 2 else None)
        set_all(model, optimizer, 99)  # the files are written already
        may_go_on.release()
    run.finish_saving()
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_00000001", "step_00000002"]
    again, model, _ = prepared(tmp_path / "run", resume=True)
    assert again.begin() == {"step": 2}
    assert all((parameter == 2).all() for parameter in model.parameters())


def test_checkpoint_that_cannot_be_completed_stops_the_run_at_the_next_one(tmp_path, monkeypatch):
    run, *_ = prepared(tmp_path / "run", resume=False)
    run.begin()
    run.save({"step": 1}, keep=2)
    run.finish_saving()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_manifest", full)
    for finish in (run.finish_saving, lambda: run.save({"step": 3}, keep=2)):
        run.save({"step": 2}, keep=2)
        with pytest.raises(OutputError, match="step_00000002 was not written: No space left on device"):
            finish()
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000001"]
    again, *_ = prepared(tmp_path / "run", resume=True)
    assert again.begin() == {"step": 1}


def test_model_replaces_the_part_of_itself_that_a_kill_left(tmp_path):
    for part in ("decoder/weights", "decoder/old", "other"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_text("before")
    (tmp_path / "model/decoder").mkdir(parents=True)
    for part in ("decoder/weights", "config.json"):
        (tmp_path / "model" / part).write_text("now")
    run_folder.move_into(tmp_path / "model", tmp_path)
    left = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"decoder/weights": "now", "config.json": "now", "other": "before"}


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits():
    names = few(SETTINGS, 2)
    # In a separate process, so that its forks inherit neither threads nor an accelerator.
    words = ["--kills", str(len(names)), "--seed", "1", "--settings", *names]
    printed = run_forked(["-m", "tests.training.kill_matrix", *words], limit=LIMIT * len(names))
    _, *rows = (line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| "))
    assert {name: differences for name, *_, differences in rows} == dict.fromkeys([*names, "all"], "none")
    assert all(int(kills) > 0 for *_, kills, _, _ in rows)
