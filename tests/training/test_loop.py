"""The training loop with a new task: a regression defined only in this file."""

import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from plain_vit import PlainViTModel
from plain_vit.errors import OutputError, TrainingError
from plain_vit.files.manifest import manifest_problem, write_manifest
from plain_vit.files.staging import hold_folder
from plain_vit.training.arguments import LoopOptions
from plain_vit.training.data.sampling import ShuffledStream
from plain_vit.training.learner import Learner
from plain_vit.training.loop import Batch, Loop, Means, Task, make_schedule, start_run
from plain_vit.training.run.folder import RunFolder, deciding_options, default_options, read_log
from tests.processes import LIMIT, processes
from tests.tiny import tiny_config
from tests.training.runs import assert_same_bits

IMAGES = 41


class BrightnessOf(Dataset):
    """Noise images with their brightness; indexed like `ShuffledStream` does, or by number."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.brightness = torch.rand(IMAGES, generator=generator)
        self.pixels = torch.randn(IMAGES, 3, 24, 56, generator=generator) * 0.1 + self.brightness[:, None, None, None]

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, place: int | tuple[int, ...]) -> dict[str, torch.Tensor]:
        row = place if isinstance(place, int) else place[1]
        return {"pixel_values": self.pixels[row], "brightness": self.brightness[row]}


class Regressor(nn.Module):
    """A plain ViT that outputs one number instead of classes."""

    def __init__(self) -> None:
        super().__init__()
        config = tiny_config()
        self.vit = PlainViTModel(config)
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.head(self.vit(pixel_values).pooler_output)[:, 0]


class Regression(Task[Means]):
    """The task of predicting the brightness of an image."""

    measures = {"absolute_error": 1}
    score = "closeness"

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        answers = model(pixel_values=batch["pixel_values"])
        errors = (answers - batch["brightness"]).abs().sum()
        return F.mse_loss(answers, batch["brightness"]), {"absolute_error": errors.detach()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch], accelerator: Accelerator, *, size: int) -> Means:
        model.eval()
        both = []
        for batch in batches:
            answers = model(pixel_values=batch["pixel_values"])
            both.append(accelerator.gather_for_metrics((answers, batch["brightness"])))
        answers, truth = (torch.cat(parts) for parts in zip(*both, strict=True))
        assert len(answers) == size
        loss = F.mse_loss(answers, truth).item()
        return Means({"loss": loss, "closeness": -loss}, len(answers))

    def save(self, folder: Path, model: nn.Module, accelerator: Accelerator) -> None:
        if accelerator.is_main_process:
            save_file(accelerator.unwrap_model(model).state_dict(), folder / "model.safetensors")

    def reopen(self, folder: Path) -> nn.Module:
        model = Regressor()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model


def regress(folder: Path, *, stop_after: int | None = None, **changes: object) -> Means:
    """Train a regression for 9 steps with batches of 12 in two micro-batches."""
    options = LoopOptions(**{
        "output_dir": str(folder), "steps": 9, "batch_size": 12, "gradient_accumulation_steps": 2, "log_every": 2,
        "evaluations": 3, "checkpoint_every": 2, "learning_rate": 0.003, **changes,
    })  # fmt: skip
    accelerator, loading = start_run(options)
    learner = Learner(Regressor(), options, accelerator, ema_decay=0.5)
    decides, defaults = deciding_options(options), default_options(options)
    run = RunFolder(folder, accelerator, decides, resume=options.resume, defaults=defaults)
    loop = Loop(Regression(), learner, make_schedule(options, IMAGES, accelerator.num_processes), run, options)
    loop.begin()
    total = loop.schedule.total_steps * options.batch_size
    order = ShuffledStream(IMAGES, length=total, seed=options.seed, start=loop.step * options.batch_size)
    batches, watched = accelerator.prepare(
        DataLoader(BrightnessOf(seed=0), batch_size=loop.micro_batch, sampler=order, **loading),
        DataLoader(BrightnessOf(seed=1), batch_size=7, **loading),
    )

    def stop(step: int, model: nn.Module) -> None:
        if step == stop_after:
            raise KeyboardInterrupt

    loop.train(batches, watched, on_step=stop)
    final = loop.final_model()
    result = loop.judge(final, watched)
    loop.finish(final, {**result.values, **loop.figures(since=0.0)})
    accelerator.free_memory()
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns the folder of a whole run, made once per set of options."""

    @functools.cache
    def run(**options: object) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        regress(folder, **options)
        return folder

    return run


def losses_of(folder: Path) -> dict[int, float]:
    return {line["step"]: line["validation_loss"] for line in read_log(folder) if "validation_loss" in line}


@pytest.mark.slow
def test_third_task_learns_chooses_and_saves(tmp_path):
    result = regress(tmp_path / "run")
    lines, losses = read_log(tmp_path / "run"), losses_of(tmp_path / "run")
    assert [line["step"] for line in lines if "train_absolute_error" in line] == [2, 4, 6, 8, 9]
    assert losses.keys() == {3, 6, 9}
    assert result.values["loss"] == min(losses.values()) < losses[9]
    learnt = [line["train_loss"] for line in lines if "train_loss" in line]
    assert learnt[-1] < 0.1 * learnt[0]
    assert result.count == IMAGES
    # The best weights were replaced once, and the earlier ones are deleted.
    left = "arguments.yaml best checkpoints log.jsonl model.safetensors results.json run.json"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*left.split()}


@pytest.mark.slow
def test_third_task_resumes_to_the_same_bits_and_best_models(trained, tmp_path):
    options = {"best_kept": 3, "evaluations": 9}
    with pytest.raises(KeyboardInterrupt):
        regress(tmp_path / "run", stop_after=7, **options)
    regress(tmp_path / "run", resume=True, **options)
    whole = results_in(trained(**options))
    assert results_in(tmp_path / "run") == whole
    assert len({file.parent for file in whole if file.parts[0].startswith("best")}) == 4


@pytest.mark.slow
def test_the_best_models_are_kept_by_step(trained):
    run = trained(best_kept=3, evaluations=9)
    losses, folder = losses_of(run), run / "best_models"
    best = sorted(losses, key=losses.__getitem__)[:3]
    assert {path.name for path in folder.iterdir()} == {f"step_{step:08d}" for step in best}
    judged, images = {}, BrightnessOf(seed=1)
    for step in best:
        assert manifest_problem(folder / f"step_{step:08d}") == ""
        with torch.no_grad():
            answers = Regression().reopen(folder / f"step_{step:08d}").eval()(images.pixels)
        judged[step] = F.mse_loss(answers, images.brightness).item()
    assert judged == pytest.approx({step: losses[step] for step in judged}, rel=1e-4)
    files = [run / "best", folder / f"step_{best[0]:08d}"]
    first, kept = (load_file(file / "model.safetensors") for file in files)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in first.items())


@pytest.mark.slow
def test_more_best_models_may_be_kept_from_a_resumption_on(tmp_path):
    options = {
        "evaluations": 9, "checkpoint_every": 1, "learning_rate": 0.3, "optimizer": "sgd", "momentum": 0.0,
        "warmup_steps": 9,
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        regress(tmp_path / "run", stop_after=6, **options)
    (left := tmp_path / "run" / "best_models" / ".deleted-step_00000001").mkdir(parents=True)
    regress(tmp_path / "run", best_kept=3, resume=True, **options)
    assert not left.exists()
    regress(tmp_path / "whole", best_kept=3, **options)
    whole, run = (tmp_path / name / "best_models" for name in ("whole", "run"))
    assert {folder.name for folder in run.iterdir()} == {f"step_{step:08d}" for step in (5, 7, 9)}
    assert files_of(run, "*") == files_of(whole, "*")


def hold(folder: Path, held: Any) -> None:
    _lock = hold_folder(folder)
    held.set()
    time.sleep(LIMIT)


@pytest.mark.slow
def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        regress(tmp_path / "run", stop_after=6)
    assert not list((tmp_path / "run").glob(".*"))
    held = processes.Event()
    other = processes.Process(target=hold, args=(tmp_path / "run", held))
    other.start()
    assert held.wait(LIMIT)
    before = files_of(tmp_path / "run", "*")
    with pytest.raises(OutputError, match="Another process still writes to .*run: wait for it, or end it"):
        regress(tmp_path / "run", resume=True)
    assert files_of(tmp_path / "run", "*") == before
    other.kill()
    other.join()
    regress(tmp_path / "run", resume=True)
    assert not list((tmp_path / "run").glob(".*"))


def test_a_folder_that_another_machine_does_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("plain_vit.training.run.folder.VISIBLE_AFTER", 0.0)
    monkeypatch.setattr(RunFolder, "write_options", lambda run: None)
    with pytest.raises(
        OutputError, match="1 of 1 processes do not see .*run.json, .*: give all machines the same folder"
    ):
        regress(tmp_path / "run")


def files_of(folder: Path, *patterns: str) -> dict[Path, bytes]:
    found = (file for pattern in patterns for file in folder.rglob(pattern) if file.is_file())
    return {file.relative_to(folder): file.read_bytes() for file in found}


def results_in(folder: Path) -> dict[Path, bytes]:
    """Return the log and the models of a run."""
    found = files_of(folder, "log.jsonl", "model.safetensors", "best*/**/*")
    return {file: content for file, content in found.items() if "checkpoints" not in file.parts}


@pytest.mark.slow
def test_selected_weights_are_of_the_step_that_the_checkpoint_selected(tmp_path):
    """The run crashes between step 6, which its evaluation selects, and the next checkpoint; the last is of step 4."""
    options = {"evaluations": 9, "checkpoint_every": 4, "best_kept": 2}
    regress(tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        regress(tmp_path / "run", stop_after=6, **options)
    before = files_of(tmp_path / "run", "run.json", "best*/**/*", "checkpoints/**/*")
    with pytest.raises(
        TrainingError, match=r"best are of step 6, .* selected step 3.*resume it with .*--evaluations 9"
    ):
        regress(tmp_path / "run", resume=True, **{**options, "evaluations": 2})
    assert files_of(tmp_path / "run", "run.json", "best*/**/*", "checkpoints/**/*") == before
    # Earlier versions did not record the step of the weights.
    old = shutil.copytree(tmp_path / "run", tmp_path / "old")
    (old / "best" / "progress.json").unlink()
    (old / "best" / "manifest.json").unlink()
    write_manifest(old / "best")
    regress(old, resume=True, **options)
    regress(tmp_path / "run", resume=True, **options)
    whole, run, again = (results_in(tmp_path / name) for name in ("whole", "run", "old"))
    assert whole == run == again


@pytest.mark.slow
def test_models_of_steps_that_a_crash_discarded_are_not_kept(tmp_path):
    options = {"checkpoint_every": 4, "best_kept": 3}
    with pytest.raises(KeyboardInterrupt):
        regress(tmp_path / "run", stop_after=6, evaluations=3, **options)
    regress(tmp_path / "run", resume=True, evaluations=3, **options)
    shutil.copytree(tmp_path / "run" / "best", tmp_path / "run" / "best_models" / "step_00000099")
    regress(tmp_path / "run", resume=True, evaluations=3, **options)
    kept = {folder.name for folder in (tmp_path / "run" / "best_models").iterdir()}
    assert kept == {f"step_{step:08d}" for step in (3, 6, 9)}


@pytest.mark.slow
def test_figures_are_those_of_all_sessions(tmp_path):
    def figures(name: str) -> dict[str, float]:
        return json.loads((tmp_path / name / "results.json").read_text())

    options = {"checkpoint_every": 3}
    regress(tmp_path / "run", **options)
    first = figures("run")
    regress(tmp_path / "run", resume=True, **options)
    again = figures("run")
    assert again["steps"] == first["steps"] == 9
    assert again["images_per_second"] > 0.3 * first["images_per_second"], "of the first session: there were no others"
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    progress = json.loads((newest / "progress.json").read_text())
    assert progress["spent"]["images"] == 9 * 12
    assert again["seconds"] - first["seconds"] > progress["spent"]["seconds"] > 0.1
    # Checkpoints of earlier versions do not record it.
    del progress["spent"]
    (newest / "progress.json").write_text(json.dumps(progress))
    (newest / "manifest.json").unlink()
    write_manifest(newest)
    regress(tmp_path / "run", resume=True, **options)
    assert figures("run")["images_per_second"] == 0


def signal_in_evaluation(monkeypatch: pytest.MonkeyPatch, number: int, after: int) -> list[int]:
    """Send a signal during an evaluation, after a batch; return the number of batches of each evaluation."""
    counts: list[int] = []
    evaluate = Regression.evaluate

    def watch(batches: Iterable[Batch]) -> Iterable[Batch]:
        counts.append(0)
        for batch in batches:
            counts[-1] += 1
            if (len(counts), counts[-1]) == (number, after):
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    def evaluated(task: Regression, model: nn.Module, batches: Iterable[Batch], *others: object, **size: int) -> Means:
        return evaluate(task, model, watch(batches), *others, **size)

    monkeypatch.setattr(Regression, "evaluate", evaluated)
    return counts


@pytest.mark.slow(quick=["1-3"])
@pytest.mark.parametrize(("number", "step"), [(1, 3), (3, 9)])
def test_signal_in_an_evaluation_ends_it_and_it_is_made_up_for(number, step, trained, tmp_path, monkeypatch, capsys):
    options = {"best_kept": 2}
    whole = results_in(trained(**options))
    counts = signal_in_evaluation(monkeypatch, number, after=2)
    with pytest.raises(SystemExit) as stopped:
        regress(tmp_path / "run", **options)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert counts == [6] * (number - 1) + [2], "of 6 batches"
    assert f"Stopped after step {step} of 9" in capsys.readouterr().out
    assert read_log(tmp_path / "run")[-1].get("step") != step or "epoch" not in read_log(tmp_path / "run")[-1]
    monkeypatch.undo()
    # Killed after the evaluation was repeated, and before the next checkpoint.
    with pytest.raises(KeyboardInterrupt):
        regress(tmp_path / "run", resume=True, stop_after=step, **options)
    regress(tmp_path / "run", resume=True, **options)
    assert results_in(tmp_path / "run") == whole


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the evaluation", "after the last step"])
def test_signal_is_not_forgotten(moment, trained, tmp_path, monkeypatch):
    def send(step: int) -> Callable[..., None]:
        def begin_step(task: Regression, now: int) -> None:
            if now == step - 1:
                os.kill(os.getpid(), signal.SIGUSR1)

        return begin_step

    whole = trained(best_kept=2)
    if moment == "before the evaluation":
        monkeypatch.setattr(Regression, "begin_step", send(3))
    else:
        save = RunFolder.save

        def saved(run: RunFolder, progress: dict[str, object], **options: object) -> None:
            save(run, progress, **options)
            if progress["step"] == 9:
                monkeypatch.undo()
                os.kill(os.getpid(), signal.SIGUSR1)

        monkeypatch.setattr(RunFolder, "save", saved)
    counts = signal_in_evaluation(monkeypatch, 0, after=0)
    with pytest.raises(SystemExit) as stopped:
        regress(tmp_path / "run", checkpoint_every=3)
    assert stopped.value.code == 128 + signal.SIGUSR1
    assert len(counts) == (0 if moment == "before the evaluation" else 3)
    monkeypatch.undo()
    regress(tmp_path / "run", checkpoint_every=3, resume=True)
    assert_same_bits(tmp_path / "run", whole)


def test_task_that_cannot_be_evaluated_is_an_error_when_it_is_made():
    class Half(Task[Means]):
        def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            raise AssertionError

    with pytest.raises(TypeError, match="abstract methods? '?evaluate'?, '?save'?"):
        Half()  # type: ignore[abstract]


def test_step_that_does_not_divide_is_refused(tmp_path):
    options = LoopOptions(output_dir=str(tmp_path), steps=1, batch_size=12, gradient_accumulation_steps=5)
    with pytest.raises(
        TrainingError, match="batch_size 12 is not divisible by 1 processes x 5 micro-batches: use a multiple of 5"
    ):
        make_schedule(options, IMAGES, 1)
