"""Failing runs: losses that are not finite, damaged checkpoints, other numbers of processes."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from plain_vit.errors import OutputExistsError, TrainingError
from plain_vit.files.manifest import manifest_problem, write_manifest
from plain_vit.training.arguments import ClassifierOptions, parse_arguments
from plain_vit.training.hardware.processes import StepExchange
from plain_vit.training.loop import Loop, Stopped
from plain_vit.training.run.folder import read_log
from plain_vit.training.tasks.classification import Classification
from tests.processes import run_forked
from tests.sizes import draws
from tests.training.runs import (
    EXAMPLES,
    TORCHRUN,
    assert_same_bits,
    finetune,
    launch,
    open_script,
    save_plain_vit,
    save_resnet,
    weights_of,
)

SCRIPT = "finetune_image_classification"
script = open_script(SCRIPT)
SHORT: dict[str, Any] = {
    "dataset": "digits", "shots_per_class": 3, "steps": 6, "batch_size": 10, "evaluations": 1, "log_every": 2,
    "checkpoint_every": 2, "report": False, "learning_rate": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain_vit(tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, **changes: object) -> None:
    finetune(**{**SHORT, "model": model, "output_dir": folder, **changes})


# Losses and weights that are not finite


@pytest.fixture
def lose_at(monkeypatch):
    """Return a function that replaces the loss of a step by a value."""

    def at(step: int, value: float) -> None:
        begun: list[int] = []
        begin, loss = Classification.begin_step, Classification.loss

        def begin_step(self, step):
            begun.append(step)
            begin(self, step)

        def spoilt(self, model, batch):
            mean, sums = loss(self, model, batch)
            return (mean * value if begun[-1] + 1 == step else mean), sums

        monkeypatch.setattr(Classification, "begin_step", begin_step)
        monkeypatch.setattr(Classification, "loss", spoilt)

    return at


@pytest.mark.slow(quick=["1-nan", "3-inf", "6-nan"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_loss_that_is_not_finite_stops_the_run_at_its_step(value, step, model_folder, lose_at, tmp_path):
    lose_at(step, value)
    with pytest.raises(TrainingError, match=rf"^The loss of step {step} is not finite: ") as failure:
        run(model_folder, tmp_path / "run")
    names = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").glob("*"))
    assert names == [f"step_{good:08d}" for good in range(2, step, 2)]
    assert (names[-1] if names else "there is no checkpoint") in str(failure.value)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    for line in read_log(tmp_path / "run") if step > 2 else []:
        assert all(math.isfinite(value) for value in line.values())


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_failed_before_its_first_checkpoint_begins_again_in_its_folder(
    resume, model_folder, lose_at, tmp_path, monkeypatch, capsys
):
    folder, other = tmp_path / "run", tmp_path / "other"
    with monkeypatch.context():
        lose_at(3, math.nan)
        with pytest.raises(TrainingError, match="there is no checkpoint. Train in this folder again"):
            run(model_folder, folder, checkpoint_every=5, log_every=1, report_to="tensorboard")
    monkeypatch.undo()
    assert len(read_log(folder)) == 2
    (folder / ".plain-vit-lock.folder").touch()  # left by a killed process
    changed = {"learning_rate": 0.003, "report_to": "tensorboard"}
    run(model_folder, folder, **changed, resume=resume)
    assert "had no checkpoint yet: it begins again" in capsys.readouterr().out
    run(model_folder, other, **changed)
    assert_same_bits(folder, other)
    assert len([*(folder / "tensorboard").glob("events*")]) == len([*(other / "tensorboard").glob("events*")])


@pytest.mark.parametrize("kept", ["checkpoints/step_00000001/x", "notes.txt", "best/model.safetensors", "config.json"])
def test_a_folder_that_holds_more_than_a_run_that_has_begun_is_not_taken_for_one(kept, model_folder, tmp_path):
    folder = tmp_path / "run"
    (folder / kept).parent.mkdir(parents=True)
    (folder / kept).write_bytes(b"mine")
    (folder / "run.json").write_text("{}")
    with pytest.raises(OutputExistsError, match="is not empty"):
        run(model_folder, folder)
    with pytest.raises(TrainingError, match="differs in"):
        run(model_folder, folder, resume=True)
    assert (folder / kept).read_bytes() == b"mine"


def test_diverging_run_ends_with_an_error_and_its_last_good_checkpoint_resumes(
    model_folder, tmp_path, capsys, monkeypatch
):
    diverging = {**SHORT, "model": model_folder, "output_dir": tmp_path / "run", "optimizer": "sgd", "steps": 40,
                 "learning_rate": 1e30, "max_grad_norm": 0, "warmup_steps": 20, "checkpoint_every": 1}  # fmt: skip
    words = [word for name, value in diverging.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["finetune", *words])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == TrainingError.exit_code
    assert "not finite" in capsys.readouterr().err
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        assert all(tensor.isfinite().all() for tensor in weights_of(checkpoint).values())


def test_weights_that_are_not_finite_are_not_saved(model_folder, tmp_path, monkeypatch):
    loss = Classification.loss

    def gradient_is_nan(self, model, batch):
        mean, sums = loss(self, model, batch)
        mean.register_hook(lambda gradient: gradient * math.nan)
        return mean, sums

    monkeypatch.setattr(Classification, "loss", gradient_is_nan)
    with pytest.raises(TrainingError, match="^The weights after step 1 are not finite: there is no checkpoint"):
        run(model_folder, tmp_path / "run", checkpoint_every=1)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_processes_exchange_at_steps_that_all_of_them_know(monkeypatch):
    """Simulate two processes, of which the second got a signal and has slower steps."""
    clock = iter([0.0, *[0.25 * number for number in range(1, 100)]])
    monkeypatch.setattr("plain_vit.training.hardware.processes.time.perf_counter", lambda: next(clock))

    class Two:
        num_processes, device, gathers = 2, torch.device("cpu"), 0
        other = [0.0, 0.5, math.inf, 0.0]

        def gather(self, own: torch.Tensor) -> torch.Tensor:
            self.gathers += 1
            return torch.cat([own, torch.tensor([self.other])])

    accelerator = Two()
    exchange = StepExchange(accelerator)
    assert exchange.after(1, 0, due=False) == (0, None, False)
    assert exchange.next_step == 5, "two seconds at the pace of the slower one"
    accelerator.other = [143.0, 0.5, 3.0, 1.0]
    assert [exchange.after(step, 0, due=False) for step in (2, 3, 4)] == [(0, None, False)] * 3
    assert accelerator.gathers == 1
    assert exchange.after(5, 0, due=False) == (143, 3, True)
    assert exchange.after(6, 0, due=True) == (143, 3, True)
    assert accelerator.gathers == 3


def test_processes_stop_an_evaluation_at_the_same_batch_and_at_its_pace(monkeypatch):
    """Simulate two processes, of which the other gets a signal during the third batch of an evaluation."""
    now, other = [0.0], [0.0, 0.0, math.inf, 0.0]
    monkeypatch.setattr("plain_vit.training.hardware.processes.time.perf_counter", lambda: now[0])
    two = SimpleNamespace(
        num_processes=2, device=torch.device("cpu"), gather=lambda own: torch.cat([own, torch.tensor([other])])
    )
    loop: Any = SimpleNamespace(accelerator=two, stop=SimpleNamespace(status=0))
    evaluated: list[Any] = []

    def evaluate() -> None:
        for number in Loop._until_stopped(loop, range(100)):
            evaluated.append(number)
            now[0] += 0.5
            other[0] = 143.0 if number >= 2 else 0.0

    with pytest.raises(Stopped) as stopped:
        evaluate()
    assert stopped.value.status == 143
    assert evaluated == [0, 1, 2, 3, 4], "two seconds after the first batch"


# Steps left out


@pytest.mark.slow
def test_steps_that_are_not_finite_are_left_out_and_logged_also_after_a_resumption(
    model_folder, lose_at, tmp_path, capsys
):
    """The weights are those of a run without an update at that step, and the count goes on in a resumed run."""
    lose_at(3, math.nan)
    for name, changes in {"skipped": {}, "resumed": {"checkpoint_every": 3}}.items():
        run(model_folder, tmp_path / name, optimizer="sgd", momentum=0.0, skip_nonfinite=1, **changes)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_00000006")
    lose_at(4, math.nan)
    with pytest.raises(TrainingError, match="gradients of step 4 are not finite, nor were those of the 1 step before"):
        run(model_folder, tmp_path / "resumed", optimizer="sgd", momentum=0.0, skip_nonfinite=1, checkpoint_every=3,
            resume=True)  # fmt: skip
    assert "left out step 3: its gradients are not finite (1 in a row, up to 1)" in capsys.readouterr().out
    log = read_log(tmp_path / "skipped")
    assert [line["step"] for line in log if "skipped_in_a_row" in line] == [3]
    assert all(math.isfinite(value) for line in log for value in line.values())
    weights = {step: weights_of(tmp_path / "skipped" / "checkpoints" / f"step_{step:08d}") for step in (4, 6)}
    assert all(tensor.isfinite().all() for of_step in weights.values() for tensor in of_step.values())


def test_a_step_that_is_left_out_leaves_the_weights_as_they_were(model_folder, lose_at, tmp_path):
    lose_at(3, math.inf)
    run(model_folder, tmp_path / "run", skip_nonfinite=1, checkpoint_every=1, checkpoints_kept=6, log_every=1,
        evaluations=6, report=True)  # fmt: skip
    (of_step,) = (line for line in read_log(tmp_path / "run") if line["step"] == 3 and "learning_rate" in line)
    assert {name.partition("/")[0] for name in of_step} == {"step", "learning_rate"}
    before, left_out, after = (weights_of(tmp_path / "run" / "checkpoints" / f"step_{step:08d}") for step in (2, 3, 4))
    assert all(torch.equal(before[name], tensor) for name, tensor in left_out.items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.slow
def test_a_run_that_ended_at_such_a_step_is_resumed_without_it(model_folder, lose_at, tmp_path):
    lose_at(3, math.nan)
    with pytest.raises(TrainingError, match="Or add --resume --skip_nonfinite 3: it leaves such steps out"):
        run(model_folder, tmp_path / "ended")
    run(model_folder, tmp_path / "ended", resume=True, skip_nonfinite=3)
    run(model_folder, tmp_path / "whole", skip_nonfinite=1)
    for name, tensor in weights_of(tmp_path / "whole").items():
        assert torch.equal(weights_of(tmp_path / "ended")[name], tensor), name


# A run whose second process alone has a loss that is not finite at the third step.
LOST_IN_ONE = """
import json, os, sys
from plain_vit.training.tasks.classification import Classification
from tests.training.run_cases import run_case
begin, loss, step = Classification.begin_step, Classification.loss, [0]

def begin_step(task, now):
    step[0] = now
    begin(task, now)

def spoilt(task, model, batch):
    mean, sums = loss(task, model, batch)
    return mean * (float("nan") if step[0] == 2 and os.environ["RANK"] == "1" else 1), sums

Classification.begin_step, Classification.loss = begin_step, spoilt
run_case("finetune_image_classification", json.loads(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_processes_leave_out_a_step_that_is_not_finite_in_one_of_them(shard, model_folder, tmp_path):
    options = {**SHORT, "model": str(model_folder), "output_dir": str(tmp_path / "run"), "skip_nonfinite": 1,
               "checkpoints_kept": 0, "log_every": 1, "shard": shard}  # fmt: skip
    output = run_forked(["-c", LOST_IN_ONE, json.dumps(options)], 2)
    assert output.count("left out step 3") == 1
    log = read_log(tmp_path / "run")
    assert [line["step"] for line in log if "skipped_in_a_row" in line] == [3]
    assert all(tensor.isfinite().all() for tensor in weights_of(tmp_path / "run").values())


@pytest.mark.slow
def test_loss_of_one_process_that_is_not_finite_stops_all(model_folder, tmp_path):
    options = {**SHORT, "optimizer": "sgd", "learning_rate": 1e30, "max_grad_norm": 0, "warmup_steps": 3, "steps": 40}
    with pytest.raises(AssertionError, match="(is|are) not finite: "):
        launch(SCRIPT, TORCHRUN, model=model_folder, output_dir=tmp_path / "run", **options)


# Damaged checkpoints


@pytest.fixture(scope="module")
def finished(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(model_folder, folder, ema_decay=0.9)
    return folder


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.slow
def test_damaged_newest_checkpoint_is_named_and_the_one_before_is_taken(finished, model_folder, tmp_path, capsys):
    again = shutil.copytree(finished, tmp_path / "run")
    flip(again / "checkpoints" / "step_00000006" / "model.safetensors", 3000, 2)
    run(model_folder, again, ema_decay=0.9, resume=True)
    said = capsys.readouterr().out
    assert "step_00000006 is damaged: the content of model.safetensors has changed. It is now called" in said
    assert "from step 4 on" in said
    assert_same_bits(again, finished)
    names = sorted(folder.name for folder in (again / "checkpoints").iterdir())
    assert names == ["damaged_step_00000006", "step_00000004", "step_00000006"]


def test_only_damaged_checkpoints_are_one_error_that_names_them(finished, model_folder, tmp_path):
    again = shutil.copytree(finished, tmp_path / "run")
    (again / "checkpoints" / "step_00000006" / "optimizer.bin").unlink()
    with (again / "checkpoints" / "step_00000004" / "progress.json").open("a") as file:
        file.write(" ")
    before = {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}
    with pytest.raises(
        TrainingError, match=r"6 is damaged: optimizer\.bin is missing\..*4 is damaged: progress\.json ha"
    ):
        run(model_folder, again, ema_decay=0.9, resume=True)
    assert before == {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["run.json", "log.jsonl"])
def test_damaged_files_of_a_run_are_an_error_that_names_them(name, finished, model_folder, tmp_path):
    again = shutil.copytree(finished, tmp_path / "run")
    (again / name).write_text((again / name).read_text().replace('"', "'", 1))
    with pytest.raises(TrainingError, match=rf"{name.replace('.', '[.]')}.*(cannot be read|is damaged)"):
        run(model_folder, again, ema_decay=0.9, resume=True)


@pytest.mark.slow
def test_damaged_selected_weights_are_an_error_that_names_them(model_folder, tmp_path, monkeypatch):
    options = {"validation_fraction": 0.5, "shots_per_class": 4, "steps": 4, "evaluations": 2}
    run(model_folder, tmp_path / "run", **options)
    assert manifest_problem(tmp_path / "run" / "best") == ""
    flip(tmp_path / "run" / "best" / "model.safetensors", 2000, 1)
    message = r"The selected weights in .*best are damaged: the content of model\.safetensors has changed"
    with pytest.raises(TrainingError, match=message):
        run(model_folder, tmp_path / "run", **options, resume=True)
    monkeypatch.setattr(Classification, "reopen", lambda *args: pytest.fail("opened"))
    save_best = script.Loop._save_best

    def spoil(loop):
        save_best(loop)
        flip(tmp_path / "again" / "best" / "model.safetensors", 2000, 1)

    monkeypatch.setattr(script.Loop, "_save_best", spoil)
    with pytest.raises(TrainingError, match=message):
        run(model_folder, tmp_path / "again", **options)


def test_flipped_bits_are_noticed_in_every_file(finished, tmp_path):
    checkpoint, rng = shutil.copytree(finished / "checkpoints" / "step_00000006", tmp_path / "copy"), random.Random(5)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    assert manifest_problem(checkpoint) == ""
    for number in range(draws(24, nightly=400)):
        path = files[number % len(files)]
        content = path.read_bytes()
        flip(path, rng.randrange(len(content)), rng.randrange(8))
        assert manifest_problem(checkpoint), path
        path.write_bytes(content)
    assert manifest_problem(checkpoint) == ""


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"some bytes")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.json").write_text("{}")
    write_manifest(tmp_path)
    assert manifest_problem(tmp_path) == ""
    manifest = tmp_path / "manifest.json"
    content = manifest.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            flip(manifest, position, bit)
            assert manifest_problem(tmp_path), (position, bit)
            manifest.write_bytes(content)


# Another number of processes


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dropout", "batch normalization"])
def test_resume_on_another_number_of_processes_is_refused_where_it_would_change_the_result(what, tmp_path, monkeypatch):
    changed = {"hidden_dropout_prob": 0.1} if what == "dropout" else {}
    model = save_resnet(tmp_path / "model") if what != "dropout" else save_plain_vit(tmp_path / "model", **changed)
    run(model, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 2))
    with pytest.raises(TrainingError, match=f"by 1 processes, now there are 2: .* because of {what}. Resume it with 1"):
        run(model, tmp_path / "run", resume=True, num_processes=2)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_run_without_dropout_says_that_it_depends_on_nothing(tmp_path):
    model = save_plain_vit(tmp_path / "model", drop_path_rate=0.3, patch_dropout_prob=0.3)
    run(model, tmp_path / "run", mixup=0.3, cutmix=0.4, augmentation="randaugment", horizontal_flip=0.5)
    progress = json.loads((tmp_path / "run" / "checkpoints" / "step_00000006" / "progress.json").read_text())
    assert (progress["processes"], progress["tied_to_processes"]) == (1, None)


# Signals


def test_a_run_out_of_time_saves_and_ends_to_be_resumed(finished, model_folder, tmp_path, monkeypatch, capsys):
    begin = Classification.begin_step

    def begin_step(task, step):
        if step == 2:  # an hour passes
            clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600)
            monkeypatch.setattr("plain_vit.training.hardware.processes.time", clock)
        begin(task, step)

    monkeypatch.setattr(Classification, "begin_step", begin_step)
    with pytest.raises(SystemExit) as stopped:
        run(model_folder, tmp_path / "run", ema_decay=0.9, max_time="0:59:00")
    assert stopped.value.code == 75
    assert "Stopped after step 3 of 6: continue with --resume" in capsys.readouterr().out
    monkeypatch.undo()
    run(model_folder, tmp_path / "run", ema_decay=0.9, resume=True, max_time="11:45:00")
    assert_same_bits(tmp_path / "run", finished)


@pytest.mark.parametrize("text", ["", "90", "1:60:00", "1:00:60", "-1:00:00", "1:00", "1 h", "1:0:0"])
def test_a_time_in_another_form_is_refused(text, model_folder, tmp_path):
    with pytest.raises(TrainingError, match="expected hours, minutes and seconds, such as 11:45:00"):
        run(model_folder, tmp_path / "run", max_time=text)


@pytest.mark.parametrize(
    ("written", "code", "ends_with", "requeued"),
    [
        ("run.json checkpoints/step_2", 75, 0, True),  # out of time, by way of a launcher that may change the code
        ("run.json checkpoints/step_2", 1, 0, True),
        ("run.json checkpoints/step_1", 1, 1, False),  # nothing new: it would fail again
        ("", 1, 1, False),
        ("run.json checkpoints/step_2", 0, 0, False),
    ],
)
def test_a_job_queues_itself_again_while_it_gets_further(written, code, ends_with, requeued, tmp_path):
    """`srun` and `scontrol` are stand-ins; the words that `srun` gets are read by the script's parser."""
    out = tmp_path / "out"
    (out / "checkpoints" / "step_1").mkdir(parents=True)
    stubs = {
        "srun": f'printf "%s\\n" "$@" >> srun.txt; for each in {written}; do mkdir -p out/$each; done; exit {code}',
        "scontrol": 'echo "$@" >> scontrol.txt',
    }
    for name, code_of_stub in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code_of_stub}\n")
        (tmp_path / name).chmod(0o755)
    job = ["bash", str(EXAMPLES / "finetune.sbatch"), "out", "--model", "a", "--dataset", "b"]
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(job, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == ends_with
    queued = tmp_path / "scontrol.txt"
    assert (queued.read_text() if queued.exists() else "") == "requeue 7\n" * requeued
    subprocess.run(job, cwd=tmp_path, env=environment, check=False)
    calls = (tmp_path / "srun.txt").read_text().split(f"{SCRIPT}.py\n")[1:]
    first, second = (
        parse_arguments(ClassifierOptions, each.partition("accelerate\n")[0].splitlines(), description=None)
        for each in calls
    )
    assert (first.model, first.output_dir, first.resume, first.max_time) == ("a", "out", False, "11:45:00")
    assert second.resume == bool(written)


def test_checkpoints_are_written_by_minutes_too(model_folder, tmp_path, monkeypatch):
    begin = Classification.begin_step

    def begin_step(task, step):
        if step == 4:
            raise KeyboardInterrupt
        begin(task, step)

    monkeypatch.setattr(Classification, "begin_step", begin_step)
    with pytest.raises(KeyboardInterrupt):
        run(model_folder, tmp_path / "run", checkpoint_every=6, checkpoint_minutes=1e-9)
    assert (tmp_path / "run" / "checkpoints" / "step_00000003").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=["INT", "TERM", "USR1"])
def test_signal_saves_and_ends_with_its_own_exit_code(number, finished, model_folder, tmp_path, monkeypatch, capsys):
    begin = Classification.begin_step

    def begin_step(task, step):
        if step == 2:
            os.kill(os.getpid(), number)
        begin(task, step)

    monkeypatch.setattr(Classification, "begin_step", begin_step)
    with pytest.raises(SystemExit) as stopped:
        run(model_folder, tmp_path / "run", ema_decay=0.9)
    assert stopped.value.code == 128 + number
    assert "Stopped after step 3 of 6: continue with --resume" in capsys.readouterr().out
    monkeypatch.undo()
    run(model_folder, tmp_path / "run", ema_decay=0.9, resume=True)
    assert_same_bits(tmp_path / "run", finished)
