"""Effects of the fine-tuning options on the output of a run."""

import dataclasses
import itertools
import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.analysis import displayable
from plain_vit.analysis.plots import plot_learning_rates
from plain_vit.errors import DataError, TrainingError
from plain_vit.positions_plain_vit import resample_positions
from plain_vit.training.arguments import check_options, parse_arguments
from plain_vit.training.data import load_classification_data, load_splits, without_unreadable
from plain_vit.training.metrics import evaluate_classifier
from plain_vit.training.models import load_classifier
from plain_vit.training.reports import show_batch as show_batch_module
from plain_vit.training.reports.trials import find_learning_rate, overfit, read_rates
from plain_vit.training.run.folder import read_log
from plain_vit.training.tasks import classification
from tests.sizes import few
from tests.training.runs import (
    TORCHRUN,
    assert_same_bits,
    finetune,
    launch,
    open_script,
    pretrain,
    runs_in,
    save_digits,
    save_plain_vit,
    save_stock_vit,
    weights_of,
)

script = open_script("finetune_image_classification")
SHORT = {
    "dataset": "digits", "shots_per_class": 7, "steps": 5, "batch_size": 12, "evaluations": 2, "log_every": 1,
    "report": False, "checkpoints_kept": 0,
}  # fmt: skip
MODES = few(["reduce-overhead", "default"], 1)  # of torch.compile; test_processes.py uses the other one


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Any:
    """Return a function that does a short run and returns its folder."""
    return runs_in(tmp_path, model=model_folder, **SHORT)


def losses(folder: Path) -> list[float]:
    return [line["train_loss"] for line in read_log(folder) if "train_loss" in line]


@pytest.mark.slow
def test_integers_are_given_names(run, tmp_path):
    data, names = save_digits(tmp_path / "data", "label", Value("int64"), lambda d: d % 3), ["red", "green", "blue"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    options = {"dataset": data, "shots_per_class": None, "steps": 1, "evaluations": 1, "report": True}
    out = run("out", label_names=tmp_path / "names.txt", **options)
    assert AutoModelForImageClassification.from_pretrained(out).config.id2label == dict(enumerate(names))
    lines = [line.split(",")[:2] for line in (out / "predictions.csv").read_text().splitlines()[1:]]
    labels = load_splits(data)["test"]["label"][:]
    assert lines == [[f"row {row}", names[label]] for row, label in enumerate(labels)]


@pytest.mark.slow
def test_each_option_of_the_loss_changes_it(run, model_folder):
    common = {"learning_rate": 0.01, "steps": 2, "evaluations": 1}
    plain = losses(run("plain", **common))
    teacher = str(run("teacher", **common))
    for name, options in {
        "bce": {"loss": "bce"},
        "drawn": {"class_balance": "sampler"},
        "balanced": {"class_balance": "loss", "shots_per_class": None},
        "soft": {"teacher": teacher},
        "hard": {"teacher": teacher, "distillation": "hard"},
        "warm": {"teacher": teacher, "distillation_temperature": 4.0},
        "mostly": {"teacher": teacher, "distillation_weight": 0.9},
    }.items():
        assert losses(run(name, **common, **options)) != plain, name
    alone = losses(run("alone", **common, teacher=teacher, distillation_weight=0.0))
    assert alone == pytest.approx(plain)


@pytest.mark.slow
def test_frozen_backbone_is_saved_as_it_was_opened(run, model_folder):
    folder = run("probe", freeze=["backbone"], learning_rate=0.1)
    assert changed(model_folder, folder) == {"classifier.weight", "classifier.bias"}
    assert weights_of(folder)["classifier.weight"].any()


def changed(source: Path, folder: Path) -> set[str]:
    """Return the names of weights that differ between two models."""
    weights = weights_of(source)
    return {
        name for name, tensor in weights_of(folder).items() if not torch.equal(tensor, weights.get(name, tensor[:0]))
    }


@pytest.mark.slow
def test_low_rank_run_saves_a_plain_model_that_gives_the_accuracy_it_reports(run, model_folder):
    folder = run("lora", lora_rank=2, learning_rate=0.05, validation_fraction=0.2, ema_decay=0.5)
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert type(model) is PlainViTForImageClassification
    names = {name.rpartition(".")[0].rpartition(".")[2] for name in changed(model_folder, folder)}
    assert names == {"q_proj", "v_proj", "classifier"}


@pytest.mark.slow
def test_other_size_is_trained_at_and_saved(run):
    model = AutoModelForImageClassification.from_pretrained(run("large", image_size=[32, 40]))
    assert model.config.image_size == (32, 40)
    assert model.vit.embeddings.position_embeddings.weight.shape == (1 + 4 * 5, 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        {"image_size": [16]},
        {"image_size": [32, 40]},
        {"test_size": [40]},
        {"initial_image_size": 16, "growth_epochs": 1.0},
        {"native_aspect_ratio": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_patches_get_no_positions_of_other_places(run, tmp_path, option):
    model = tmp_path / "model"
    save_plain_vit(model, position_resampling="truncate")
    with pytest.raises(TrainingError, match=f"With --{next(iter(option))}, .* add --position_resampling bicubic"):
        run("refused", model=str(model), **option)
    short = {"steps": 2, "evaluations": 1, **option}
    folder = run("resampled", model=str(model), **short, position_resampling="bilinear")
    assert json.loads((folder / "config.json").read_text())["position_resampling"] == "bilinear"


def test_positions_are_resampled_as_requested(tmp_path):
    folder = save_plain_vit(tmp_path / "model", position_resampling="truncate")
    table = weights_of(folder)["vit.embeddings.position_embeddings.weight"]
    for mode in ("bilinear", "bicubic_antialias"):
        model, _ = load_classifier(str(folder), ["a", "b", "c"], image_size=(32, 40), position_resampling=mode)
        resampled = model.vit.embeddings.position_embeddings.weight
        assert torch.equal(resampled[1:], resample_positions(table[1:], (4, 3), (4, 5), mode))


@pytest.mark.slow
def test_fixres_run_is_saved_for_the_size_that_it_was_evaluated_at(run, capsys):
    sizes = {"image_size": [24, 24], "test_size": [40, 32], "test_crop": None}
    folder = run("larger", **sizes, crop_scale=0.5)
    processor = AutoImageProcessor.from_pretrained(folder)
    assert dict(processor.size) == {"height": 40, "width": 32}
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.image_size == 24
    test = load_splits("digits")["test"]
    with torch.no_grad():
        pixels = processor([image.convert("RGB") for image in test["image"][:]], return_tensors="pt")
        right = model.eval()(**pixels).logits.argmax(dim=-1) == torch.tensor(test["label"][:])
    results = json.loads((folder / "results.json").read_text())
    assert results["test_accuracy"] == right.double().mean().item()
    cropped = AutoImageProcessor.from_pretrained(run("cropped", image_size=[24], test_crop=0.75))
    assert dict(cropped.size) == {"shortest_edge": 32}
    assert dict(cropped.crop_size) == {"height": 24, "width": 24}
    with pytest.raises(TrainingError, match=r"test_size is \[1, 2, 3\]: expected one number"):
        run("refused", test_size=[1, 2, 3])


@pytest.mark.slow
def test_first_batch_is_drawn_as_the_model_gets_it(run, tmp_path, monkeypatch, capsys):
    seen: dict[str, Any] = {}
    drawn = show_batch_module.plot_training_batch

    def record(images: np.ndarray, shares: np.ndarray, names: list[str]) -> Any:
        seen.update(images=images, shares=shares, names=names)
        return drawn(images, shares, names)

    monkeypatch.setattr(show_batch_module, "plot_training_batch", record)
    options = {"mixup": 0.8, "crop_scale": 0.5, "augmentation": "randaugment", "random_erasing": 0.5}
    picture = tmp_path / "batch.png"
    with pytest.raises(SystemExit) as left:
        run("dry", dry_run=True, show_batch=str(picture), **options)
    assert not left.value.code
    assert not (tmp_path / "dry").exists()
    assert f"the first batch is drawn in {picture}" in capsys.readouterr().out
    with PIL.Image.open(picture) as image:
        assert image.size[0] > 800
    given: list[torch.Tensor] = []
    learnt = classification.Classification.loss

    def watch(task: Any, model: Any, batch: Any) -> Any:
        given.extend(task.inputs({**batch, "pixel_values": batch["pixel_values"].clone()}))
        return learnt(task, model, batch)

    monkeypatch.setattr(classification.Classification, "loss", watch)
    trained = run("trained", **options)
    pixels = displayable(given[0]["pixel_values"], AutoImageProcessor.from_pretrained(trained))
    assert np.array_equal(seen["images"], pixels)
    assert np.array_equal(seen["shares"], given[1].numpy())
    assert ((seen["shares"] > 0).sum(axis=1) == 2).any()
    for path in ("batch.jpg", "nowhere/batch.png"):
        with pytest.raises(TrainingError, match=r"expected a .png file in an existing folder"):
            run("refused", dry_run=True, show_batch=str(tmp_path / path))
    with pytest.raises(TrainingError, match="Without dry_run, show_batch has no effect"):
        run("refused", show_batch=str(picture))


@pytest.fixture
def trial(model_folder: Path, tmp_path: Path) -> Any:
    """Return a function that starts the script like its command line."""

    def start(**options: Any) -> None:
        values = {"model": str(model_folder), **SHORT, "output_dir": str(tmp_path / "kept"), **options}
        script.start(script.FinetuneArguments(**values))
        assert not (tmp_path / "kept").exists()

    return start


def check_words_of_trial(printed: str) -> None:
    """Check that a trial names no file that it deletes, and does not call its training images a test."""
    printed = re.sub(r"drawn in \S+", "", printed)
    assert "the model is in" not in printed
    assert tempfile.gettempdir() not in printed
    assert "training images acc" in printed
    assert not re.search(r"\btest\b", printed)


@pytest.mark.slow
def test_one_batch_is_learnt_and_nothing_is_written(trial, capsys):
    trial(overfit_batch=60, learning_rate=0.003, label_smoothing=0.0, batch_size=10)
    printed = capsys.readouterr().out
    found = re.search(r"After 60 steps on the same 10 images, .* accuracy (.*)%, loss (.*)\. A", printed)
    assert found
    check_words_of_trial(printed)
    assert float(found[1]) == 100
    assert float(found[2]) < 0.5  # log(10) at the start
    with pytest.raises(TrainingError, match="Both dry_run and overfit_batch are given"):
        trial(overfit_batch=3, dry_run=True)
    with pytest.raises(TrainingError, match="--overfit_batch is for stored images and one process"):
        trial(overfit_batch=3, streaming=True, shots_per_class=None)


@pytest.mark.slow
def test_losses_at_rising_learning_rates_are_drawn_and_nothing_else_is_written(trial, tmp_path, capsys):
    trial(lr_find=str(tmp_path / "rates.png"), label_smoothing=0.0)
    printed = capsys.readouterr().out
    found = re.search(r"falls fastest at a learning rate of (\S+) and is lowest at (\S+); a tenth", printed)
    assert found
    check_words_of_trial(printed)
    assert 1e-6 < float(found[1]) <= float(found[2]) <= 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rates.png"]
    with pytest.raises(TrainingError, match="lr_find is rates.jpg: expected a .png file"):
        trial(lr_find="rates.jpg")


@pytest.mark.slow
def test_automatic_rate_is_recorded_and_the_same_in_two_processes_and_on_resuming(model_folder, tmp_path, capsys):
    options = {**SHORT, "model": str(model_folder), "learning_rate": "auto", "batch_size": 12, "steps": 4,
               "warmup_steps": 0, "label_smoothing": 0.0, "checkpoint_every": 2, "checkpoints_kept": 1}  # fmt: skip
    finetune(**options, output_dir=tmp_path / "one")
    said = re.search(r"learning rate (\S+): a tenth of that with the lowest loss in 100 steps", capsys.readouterr().out)
    rate = json.loads((tmp_path / "one" / "run.json").read_text())["learning_rate"]
    assert said
    assert said[1] == f"{rate:.1e}"
    assert 1e-8 < rate < 0.1
    finetune(**options, output_dir=tmp_path / "one", resume=True)
    assert "lowest loss" not in capsys.readouterr().out
    finetune(**{**options, "learning_rate": rate}, output_dir=tmp_path / "given")
    assert_same_bits(tmp_path / "one", tmp_path / "given")
    finetune(**{**options, "steps": 1}, base_batch_size=24, output_dir=tmp_path / "scaled")
    assert json.loads((tmp_path / "scaled" / "run.json").read_text())["learning_rate"] == pytest.approx(2 * rate)
    launch("finetune_image_classification", TORCHRUN, **options, output_dir=tmp_path / "two")
    assert json.loads((tmp_path / "two" / "run.json").read_text())["learning_rate"] == rate
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "one", "scaled", "two"]


def test_automatic_rate_is_for_fine_tuning_on_stored_images(model_folder, tmp_path):
    options = {"dataset": "digits", "output_dir": tmp_path / "run", "learning_rate": "auto"}
    with pytest.raises(TrainingError, match="learning_rate auto is for stored images"):
        finetune(model=model_folder, streaming=True, stream_images=40, steps=3, **options)
    with pytest.raises(TrainingError, match="learning_rate is auto: give a number"):
        pretrain(model=model_folder, **options)


@pytest.mark.parametrize("options", [
    {"schedule": "plateau", "plateau_patience": 2, "plateau_factor": 0.5, "min_learning_rate": 1e-5,
     "validation_fraction": 0.2, "early_stopping": 3, "best_kept": 2},
    {"restarts": 2, "warmup_steps": 50, "steps": 500}, {"schedule": "constant", "cooldown_steps": 200, "steps": 500},
    {"report": True, "picture_every": 1.0, "push_to_hub": "user/name", "hub_private": True, "checkpoint_every": 3},
])  # fmt: skip
def test_a_trial_is_of_the_model_the_data_and_the_steps_of_a_run(options, model_folder, tmp_path):
    """Each of these options concerns the whole run, or depends on an option that a trial lacks."""
    given: list[Any] = []

    def train(trial, data):
        check_options(trial)
        given.append((trial, script.make_plan(trial, data, 1)))
        raise TrainingError("far enough")

    values = {**SHORT, "report": True, "batch_size": 12, "checkpoints_kept": 2, **options}
    whole = script.FinetuneArguments(model=str(model_folder), output_dir="kept", **values)
    check_options(whole)
    data = script.open_data(whole)
    for name, value, start in (
        ("overfit_batch", 20, overfit),
        ("lr_find", str(tmp_path / "r.png"), find_learning_rate),
    ):
        with pytest.raises(TrainingError, match="far enough"):
            start(dataclasses.replace(whole, **{name: value}), data, train)
    assert [plan.total_steps for _, plan in given] == [20, 100]
    assert [trial.schedule for trial, _ in given] == ["cosine", "rising"]
    for trial, _ in given:
        assert (trial.batch_size, trial.weight_decay, trial.seed) == (12, whole.weight_decay, whole.seed)
        assert (trial.push_to_hub, trial.report, trial.checkpoints_kept) == (None, False, 0)


def test_a_curve_of_losses_says_where_it_falls_and_where_it_is_lowest():
    rates = np.logspace(-7, 0, 200)
    place = np.log10(rates)
    losses = 2.3 - 1.5 / (1 + np.exp(-6 * (place + 4))) + np.exp(8 * (place + 1.5))  # falls at 1e-4, rises at 0.03
    found = read_rates(rates.tolist(), losses.tolist())
    assert 5e-5 < found.steepest < 5e-4  # the average lags behind
    assert 1e-3 < found.lowest < 3e-2
    cut = read_rates(rates.tolist(), [*losses[:150].tolist(), math.nan, *losses[151:].tolist()])
    assert len(cut.rates) == 150
    figure = plot_learning_rates(found.rates, found.losses, found.smooth)
    figure.draw_without_rendering()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert "1e-04" in labels
    with pytest.raises(TrainingError, match="Only 3 losses are finite"):
        read_rates(rates.tolist(), [*losses[:3].tolist(), math.inf])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, *({"compile": True, "compile_mode": mode} for mode in MODES)], ids=str
)
def test_checkpointed_and_compiled_runs_give_the_losses_of_a_plain_one(run, options, tmp_path):
    model = save_plain_vit(tmp_path / "model", num_hidden_layers=1)  # compiling takes long
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    folder = run("changed", model=model, **options)
    if not torch.cuda.is_available():  # the compiler warns that it cannot record CUDA graphs
        recorded = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] > skipped
        assert recorded == (options.get("compile_mode") == "reduce-overhead")
    # Fused kernels sum in a different order.
    assert losses(folder) == pytest.approx(losses(run("plain", model=model)), rel=1e-5)
    AutoModelForImageClassification.from_pretrained(folder)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "Without compile, compile_mode has no effect"),
        ({"compile": True, "gradient_accumulation_steps": 2}, "overwrites the gradients of a micro-batch"),
        ({"compile": True, "auto_micro_batch": True}, "overwrites the gradients of a micro-batch"),
        ({"compile": True, "shard": True}, "may read weights that --shard has moved"),
    ],
)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_recorded_kernels_are_refused_where_others_write_to_their_memory(run, options, message, mode, tmp_path):
    with pytest.raises(TrainingError, match=message):
        run("refused", compile_mode=mode, **options)
    assert not (tmp_path / "refused").exists()


@pytest.mark.usefixtures("fresh_accelerator")
def test_recorded_kernels_of_accelerate_are_refused_too(run, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    with pytest.raises(TrainingError, match="reduce-overhead, which overwrites the gradients of a micro-batch"):
        run("refused", gradient_accumulation_steps=2)
    assert not (tmp_path / "refused" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_half_precision_saves_whole_weights(run):
    folder = run("half", mixed_precision="bf16", learning_rate=0.01)
    assert {tensor.dtype for tensor in weights_of(folder).values()} == {torch.float32}
    AcceleratorState._reset_state(reset_partial_state=True)
    full = losses(run("full", learning_rate=0.01))
    assert losses(folder) != full
    assert losses(folder) == pytest.approx(full, rel=0.05)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="computes in fp16")
def test_fp16_that_would_be_float32_is_refused(run, tmp_path):
    with pytest.raises(TrainingError, match="On CPUs .* use --mixed_precision bf16"):
        run("half", mixed_precision="fp16")
    assert not (tmp_path / "half").exists()


@pytest.mark.slow
@pytest.mark.parametrize("validation_fraction, evaluations", [(0.0, 2), (0.2, 3)])
def test_the_last_weights_are_evaluated_once(run, monkeypatch, validation_fraction, evaluations):
    sizes = []

    def evaluate(*arguments, size):
        sizes.append(size)
        return evaluate_classifier(*arguments, size=size)

    monkeypatch.setattr(classification, "evaluate_classifier", evaluate)
    folder = run("once", evaluations=2, validation_fraction=validation_fraction, dataset="digits")
    assert len(sizes) == evaluations
    assert sizes[-1] == 360
    results = json.loads((folder / "results.json").read_text())
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    test = load_splits("digits")["test"]
    pixels = AutoImageProcessor.from_pretrained(folder)(test["image"][:], return_tensors="pt")
    with torch.no_grad():
        right = (model(**pixels).logits.argmax(-1) == torch.tensor(test["label"][:])).float().mean().item()
    assert results["test_accuracy"] == pytest.approx(right, abs=1e-6)


@pytest.mark.slow
def test_run_that_is_short_of_memory_makes_smaller_micro_batches_of_the_same_steps(run, monkeypatch):
    seen = []

    def limited(*arguments: Any, **keywords: Any) -> Any:
        model, processor = load_classifier(*arguments, **keywords)

        def remember(module: object, given: object, named: dict[str, torch.Tensor]) -> None:
            if model.training:
                seen.append(len(named["pixel_values"]))
                if seen[-1] > 5:
                    raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_pre_hook(remember, with_kwargs=True)
        return model, processor

    asked = run("asked", gradient_accumulation_steps=3)
    monkeypatch.setattr(script, "load_classifier", limited)
    found = run("found", auto_micro_batch=True)
    assert seen[:3] == [12, 6, 4]
    assert set(seen[3:]) == {4}
    assert len(seen[3:]) == 5 * 3
    assert read_log(found) == read_log(asked)
    with pytest.raises(TrainingError, match="--auto_micro_batch"):
        run("refused")


@pytest.mark.slow
def test_early_stopping_ends_a_run_that_no_longer_improves_and_stays_ended(run, capsys):
    options = {
        "early_stopping": 2, "steps": 40, "evaluations": 20, "validation_fraction": 0.2, "learning_rate": 0.0,
        "checkpoints_kept": 2,
    }  # fmt: skip
    folder = run("early", **options)
    lines = read_log(folder)
    accuracies = [line["validation_accuracy"] for line in lines if "validation_accuracy" in line]
    assert len(accuracies) == 3, "one that is best, two that are not better"
    assert lines[-1]["step"] == 6
    run("early", resume=True, **options)
    assert read_log(folder) == lines
    assert "Stopped early after step 6: 2 evaluations without a better accuracy." in capsys.readouterr().out
    run("at once", **{**options, "early_stopping": 1})
    assert "Stopped early after step 4: 1 evaluation without a better accuracy." in capsys.readouterr().out
    with pytest.raises(TrainingError, match="early_stopping needs a validation split"):
        run("refused", early_stopping=2)


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """Return digits as parquet files: 60 training images in 4 files and 30 test images, with one broken image each."""
    for split, parts, count in (("train", 4, 15), ("test", 1, 30)):
        digits = load_splits("digits")[split].cast_column("image", Image(decode=False))
        for part in range(parts):
            rows = digits.select(range(part * count, part * count + count)).to_list()
            if part == 0:
                rows[2]["image"] = {"bytes": b"nothing", "path": f"{split}.png"}
            folder = tmp_path / "parquet"
            folder.mkdir(exist_ok=True)
            file = folder / f"{split}-{part:05}-of-{parts:05}.parquet"
            Dataset.from_list(rows, features=digits.features).to_parquet(file)
    return str(tmp_path / "parquet")


@pytest.mark.slow
@pytest.mark.parametrize("streaming, num_workers", few([(False, 2), (False, 0), (True, 0), (True, 2)], 2))
def test_run_with_unreadable_images_resumes_to_the_same_bits(streaming, num_workers, run, parquet, monkeypatch, capsys):
    options = {
        "dataset": parquet, "shots_per_class": None, "corrupted": "skip", "steps": 12, "checkpoints_kept": 9,
        "checkpoint_every": 5, "gradient_accumulation_steps": 2, "num_workers": num_workers, "mixup": 0.4,
        "crop_scale": 0.7, "ema_decay": 0.5,
    }  # fmt: skip
    if streaming:
        options |= {"streaming": True, "stream_images": 60, "stream_buffer": 7}
    whole = run("whole", **options)
    assert "skipped an image that cannot be read: train.png" in capsys.readouterr().out
    results = json.loads((whole / "results.json").read_text())
    assert results["images_evaluated"] == 29
    assert results["unreadable_images_left_out"] == 1
    assert results["unreadable_images_replaced"] in ((2, 3) if not streaming else range(1, 5))
    monkeypatch.setattr(classification, "evaluate_classifier", evaluate_but_stop_at(2))
    with pytest.raises(KeyboardInterrupt):
        run("half", **options)
    monkeypatch.undo()
    half = run("half", resume=True, **options)
    assert_same_bits(half, whole)
    again = json.loads((half / "results.json").read_text())
    assert again["unreadable_images_replaced"] == results["unreadable_images_replaced"]


def evaluate_but_stop_at(number: int) -> Any:
    """Return the script's evaluation, interrupted at the call with this number."""
    original, calls = classification.evaluate_classifier, itertools.count(1)

    def evaluate(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    return evaluate


def test_unreadable_image_ends_the_run_that_does_not_skip_and_is_named(run, parquet):
    with pytest.raises(DataError, match=r"cannot be read: train.png \(not an image of a known format\)"):
        run("stopped", dataset=parquet, shots_per_class=None, steps=12)


@pytest.fixture
def contain(tmp_path: Path) -> Path:
    """Return a model whose image processor scales a side of a 1 x 5000 image to zero pixels."""
    folder = save_plain_vit(tmp_path / "contain")
    PlainViTImageProcessor(size={"height": 32, "width": 24}, resize_mode="contain").save_pretrained(folder)
    return folder


def save_with_thin(folder: Path, labels: Sequence[Any], kind: Any) -> str:
    """Save images with these labels as a train and a test split; row 1 of each split has 1 x 5000 pixels."""
    draw = np.random.default_rng(0)
    images = [PIL.Image.fromarray(draw.integers(0, 256, (8, 6, 3), dtype=np.uint8)) for _ in labels]
    images[1] = PIL.Image.new("RGB", (5000, 1), "red")
    rows = Dataset.from_dict(
        {"image": images, "label": list(labels)}, features=Features({"image": Image(), "label": kind})
    )
    DatasetDict({"train": rows, "test": rows}).save_to_disk(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem, kind, label_of",
    [
        ("single_label_classification", ClassLabel(names=["a", "b"]), lambda place: place % 2),
        ("multi_label_classification", List(Value("string")), lambda place: ["a", "b"][: 1 + place % 2]),
        ("regression", Value("float32"), float),
    ],
    ids=["one label", "several labels", "regression"],
)
def test_images_that_the_image_processor_refuses_are_left_out_like_unreadable_ones(
    problem, kind, label_of, contain, run, tmp_path, capsys
):
    options = {
        "dataset": save_with_thin(tmp_path / "data", [label_of(place) for place in range(17)], kind),
        "model": str(contain), "problem_type": problem, "shots_per_class": None, "report": True, "checkpoints_kept": 2,
        "batch_size": 17,
    }  # fmt: skip
    with pytest.raises(DataError, match=r"cannot be read: row 1 \(an image of 1x5000 pixels has no pixel left"):
        run("stopped", **options)
    options["corrupted"] = "skip"
    folder = run("whole", **options)
    said = capsys.readouterr().out
    assert said.count("omitted from the evaluation, because it cannot be read: row 1 (an image of 1x5000 pixels") == 1
    assert "16 of 16" in said
    results = json.loads((folder / "results.json").read_text())
    assert (results["images_evaluated"], results["unreadable_images_left_out"]) == (16, 1)
    assert results["unreadable_images_replaced"] == 5, "once per epoch of training"
    assert len((folder / "predictions.csv").read_text().splitlines()) == 1 + 16
    assert "test 16" in (folder / "report" / "index.html").read_text()
    again = json.loads((run("whole", resume=True, **options) / "results.json").read_text())
    assert {name: again[name] for name in again if "images" in name and "second" not in name} == {
        name: results[name] for name in results if "images" in name and "second" not in name
    }


@pytest.mark.slow
def test_two_processes_leave_out_the_images_that_the_image_processor_refuses(contain, tmp_path):
    data = save_with_thin(tmp_path / "data", [place % 2 for place in range(17)], ClassLabel(names=["a", "b"]))
    options = {**SHORT, "dataset": data, "report": True, "corrupted": "skip"}
    del options["shots_per_class"]
    said = launch("finetune_image_classification", TORCHRUN, model=contain, output_dir=tmp_path / "run", **options)
    assert said.count("omitted from the evaluation, because it cannot be read: row 1 (an image of 1x5000 pixels") == 1
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["images_evaluated"], results["unreadable_images_left_out"]) == (16, 1)


def test_refused_images_are_found_whatever_the_image_processor_goes_by(tmp_path):
    class Picky(ViTImageProcessor):
        """Refuse images by their pixels, not by their size."""

        def __call__(self, images: Any, *arguments: Any, **options: Any) -> Any:
            if any(np.asarray(image).max() == 0 for image in images):
                raise TypeError("black")
            return super().__call__(images, *arguments, **options)

    images = [PIL.Image.new("RGB", (9, 7), color) for color in ("red", "black", "red", "black", "green", "blue")]
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": images, "label": [0, 1] * 3}, features=features)
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "data")
    data = load_classification_data(str(tmp_path / "data"))
    kept = without_unreadable(data, Picky(size={"height": 8, "width": 8}))
    assert list(kept.unreadable) == ["row 1 (TypeError: black)", "row 3 (TypeError: black)"]
    assert kept.test["label"][:] == [0, 0, 0, 1]
    assert len(kept.train) == 6
    with pytest.raises(DataError, match="None of the 2 images of the test split can be read, the first one is row 0"):
        without_unreadable(dataclasses.replace(data, test=data.test.select([1, 3])), Picky())


def test_our_image_processor_is_shown_one_image_of_each_size(tmp_path, monkeypatch):
    shown: list[tuple[int, int]] = []
    original = PlainViTImageProcessor.__call__

    def note(self: Any, images: Any, **options: Any) -> Any:
        shown.extend(image.size for image in images)
        return original(self, images, **options)

    monkeypatch.setattr(PlainViTImageProcessor, "__call__", note)
    folder = save_with_thin(tmp_path / "data", [place % 2 for place in range(17)], ClassLabel(names=["a", "b"]))
    processor = PlainViTImageProcessor(size={"height": 32, "width": 24}, resize_mode="contain")
    kept = without_unreadable(load_classification_data(folder), processor)
    assert shown == [(6, 8), (5000, 1)]
    assert len(kept.test) == 16


def test_an_image_that_can_no_longer_be_read_ends_an_evaluation_and_is_not_scored(run, tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for split, name, number in itertools.product(("train", "test"), "ab", range(4)):
        file = tmp_path / "data" / split / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(draw.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(file)
    original = classification.evaluate_classifier

    def damage(*arguments: Any, **keywords: Any) -> Any:
        (tmp_path / "data" / "test" / "b" / "2.png").write_bytes(b"")
        return original(*arguments, **keywords)

    monkeypatch.setattr(classification, "evaluate_classifier", damage)
    with pytest.raises(DataError, match=r"b/2\.png \(.*changed since the run began: repair it, and continue with"):
        run("run", dataset=str(tmp_path / "data"), shots_per_class=None, corrupted="skip")


def test_stream_that_is_read_by_other_processes_or_balanced_is_refused(run, parquet):
    options = {"dataset": parquet, "shots_per_class": None, "streaming": True, "stream_images": 60, "corrupted": "skip"}
    folder = run("first", checkpoints_kept=1, **options)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(TrainingError, match="readers of the stream .was '1 processes with 0 workers each', is '1 proc"):
        run("first", checkpoints_kept=1, resume=True, num_workers=2, **options)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(TrainingError, match="omit --class_balance"):
        run("second", class_balance="loss", **options)


@pytest.mark.slow
def test_impossible_or_identical_copies_are_refused(run, parquet, tmp_path):
    varied = {"crop_scale": 0.5, "repeated_augmentation": 3}
    with pytest.raises(TrainingError, match="A stream gives each image once: omit --streaming, or"):
        run("streamed", dataset=parquet, shots_per_class=None, streaming=True, stream_images=60, **varied)
    with pytest.raises(TrainingError, match="batch_size is 2: expected at least the 3 copies"):
        run("small", batch_size=2, **varied)
    with pytest.raises(TrainingError, match="Without augmentation the 3 copies of each image would be identical"):
        run("alike", repeated_augmentation=3, mixup=0.5)
    assert not list(tmp_path.glob("s*")) + list(tmp_path.glob("alike"))


@pytest.mark.slow
def test_repeated_augmentation_changes_what_is_seen(run):
    options = {"crop_scale": 0.5, "learning_rate": 0.01}
    assert losses(run("once", **options)) != losses(run("thrice", repeated_augmentation=3, **options))


def test_recipe_runs_to_the_end_and_prints_a_table(model_folder, tmp_path, capsys):
    words = ["--model", str(model_folder), "--dataset", "digits", "--shots_per_class", "2", "--output_dir",
             str(tmp_path / "r"), "--recipe", "mae-finetune", "augreg-strong1", "--steps", "2", "--batch_size", "8",
             "--image_size", "24", "--no_report"]  # fmt: skip
    script.finetune(parse_arguments(script.FinetuneArguments, words, description=None))
    assert read_log(tmp_path / "r")[-1]["step"] == 2
    printed = capsys.readouterr().out
    assert re.search(r"epoch +step +train loss +train acc +test loss +test acc +evaluated +lr", printed)


def test_stock_vit_without_the_field_that_is_asked_for_is_refused(run, tmp_path):
    stock = str(save_stock_vit(tmp_path / "stock"))
    for option in ({"drop_path_rate": 0.1}, {"position_resampling": "bilinear"}):
        with pytest.raises(TrainingError, match=f"ViTConfig has no field {next(iter(option))}: omit the option"):
            run("refused", model=stock, **option)
    assert not (tmp_path / "refused").exists()
