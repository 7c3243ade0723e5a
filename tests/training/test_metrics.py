"""Results of an evaluation: class averages, calibration, most likely classes, views, and the selected weights."""

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import balanced_accuracy_score, f1_score

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import OutputError, OutputExistsError
from plain_vit.training.data import load_splits
from plain_vit.training.metrics import evaluation_of, judge_logits, metric_text
from plain_vit.training.run.folder import read_log
from plain_vit.training.vector_metrics import METRICS, VectorEvaluation
from plain_vit.training.views import with_views
from tests.conftest import randomize_
from tests.sizes import few
from tests.tiny import tiny_config
from tests.training.runs import open_script, save_plain_vit

finetuning = open_script("finetune_image_classification")
evaluating = open_script("evaluate_image_classification")


def test_likeliest_classes_are_in_order_and_of_equal_ones_the_first_is_the_prediction():
    logits = torch.randn(7, 11)
    classes, values = judge_logits(logits, torch.zeros(7, dtype=torch.long))
    order = logits.argsort(dim=1, descending=True)[:, :5]
    assert torch.equal(classes[:, 2:], order)
    assert torch.equal(values[:, 1:], logits.softmax(1).gather(1, order))
    classes, values = judge_logits(torch.zeros(1, 9), torch.tensor([8]))
    assert classes[0, 2] == 0
    assert len(set(classes[0, 2:].tolist())) == 5
    classes, values = judge_logits(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    assert classes[0].tolist() == [0, 1, 1, 0]
    assert values.shape == (1, 3)


def test_averages_over_classes_are_those_of_scikit_learn_and_calibration_that_of_its_curve():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 300)
    logits = torch.tensor(rng.normal(size=(300, 8)) + 2 * np.eye(8)[labels]).float()
    result = evaluation_of(*judge_logits(logits, torch.tensor(labels)))
    predictions = logits.argmax(1).numpy()
    assert {*predictions} > {*labels}, "some are predicted as classes without images"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns about them
        assert result.values["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predictions))
    assert result.values["macro_f1"] == pytest.approx(f1_score(labels, predictions, average="macro"))
    present = f1_score(labels, predictions, labels=range(6), average="macro")
    assert result.values["macro_f1"] < present - 0.1
    fractions, means = calibration_curve(labels == predictions, result.confidences, n_bins=15)
    bins = result.calibration
    filled = bins.counts > 0
    np.testing.assert_allclose(bins.accuracies[filled], fractions)
    np.testing.assert_allclose(bins.confidences[filled], means, rtol=1e-6)
    assert result.values["calibration_error"] == pytest.approx(
        np.average(abs(fractions - means), weights=bins.counts[filled])
    )
    sure = evaluation_of(*judge_logits(torch.tensor([[9.0, -90.0], [-90.0, 9.0]]), torch.tensor([0, 0])))
    assert sure.calibration.counts.tolist() == [0] * 14 + [2]
    assert sure.calibration.error == pytest.approx(0.5)


@pytest.mark.parametrize("problem", ["single_label_classification", *METRICS])
def test_fractions_are_percentages_in_the_summary_and_every_other_result_a_number(problem):
    if problem == "single_label_classification":
        result: Any = evaluation_of(*judge_logits(torch.randn(9, 3), torch.arange(9) % 3))
    else:
        result = VectorEvaluation(problem, 0.5, np.float32([[0, 1], [1, 0]]), np.float32([[0.5, 1], [2, -3]]))
    words = dict(each.rsplit(" ", 1) for each in result.summary.split(", "))
    for name, value in result.values.items():
        bounded = name not in ("loss", "mean_absolute_error", "r2")
        assert metric_text(name, value) == (f"{value:.2%}" if bounded else f"{value:.4f}")
        shown = words.pop(name.replace("_", " "), None)
        assert shown in (None, metric_text(name, value))
    assert not words


@pytest.mark.parametrize("kind", ["flip", "ten_crop"])
def test_views_average_the_probabilities_and_are_the_crops_of_the_larger_image(kind):
    model = PlainViTForImageClassification(tiny_config(image_size=(16, 24), patch_size=4, num_labels=5)).eval()
    randomize_(model)
    processor = PlainViTImageProcessor(size={"height": 16, "width": 24})
    averaged, larger = with_views(model, processor, kind)
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8))
    pixels = larger(image, return_tensors="pt")["pixel_values"]
    assert tuple(pixels.shape[-2:]) == ((16, 24) if kind == "flip" else (18, 27))
    if kind == "flip":
        views = [pixels, pixels.flip(-1)]
    else:
        corners = [(0, 0), (0, 3), (2, 0), (2, 3), (1, 2)]
        views = [mirrored[..., top : top + 16, left : left + 24]
                 for mirrored in (pixels, pixels.flip(-1)) for top, left in corners]  # fmt: skip
    with torch.no_grad():
        expected = torch.stack([model(view).logits.softmax(-1) for view in views]).mean(dim=0)
        torch.testing.assert_close(averaged(pixel_values=pixels).logits.softmax(-1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("metric", few(["calibration_error", "macro_f1"], 1))
def test_the_weights_of_the_best_evaluation_by_any_metric_are_saved(metric, tmp_path):
    save_plain_vit(tmp_path / "model")
    finetuning.finetune(finetuning.FinetuneArguments(
        model=str(tmp_path / "model"), output_dir=str(tmp_path / "run"), dataset="digits", validation_fraction=0.7,
        steps=6, evaluations=6, batch_size=16, learning_rate=0.05, best_metric=metric, report=False,
        checkpoints_kept=0,
    ))  # fmt: skip
    name = f"validation_{metric}"
    scores = [row[name] for row in read_log(tmp_path / "run") if name in row]
    assert len(scores) == 6
    best = max(scores) if metric == "macro_f1" else min(scores)
    assert scores[-1] != best, "else the last weights would do"
    data = finetuning.open_data(finetuning.FinetuneArguments(
        model="m", output_dir="o", dataset="digits", validation_fraction=0.7
    ))  # fmt: skip
    model = PlainViTForImageClassification.from_pretrained(tmp_path / "run").eval()
    pixels = PlainViTImageProcessor.from_pretrained(tmp_path / "run")(data.validation["image"][:], return_tensors="pt")
    with torch.no_grad():
        result = evaluation_of(*judge_logits(model(**pixels).logits, torch.tensor(data.validation["label"][:])))
    assert result.values[metric] == pytest.approx(best, abs=1e-5)


def test_predictions_are_written_with_path_label_and_the_likeliest_classes(tmp_path):
    for row, digit in enumerate(load_splits("digits")["test"].select(range(40))):
        folder = tmp_path / "set" / ("train" if row < 20 else "test") / f"{digit['label']}, {digit['label'] % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        digit["image"].save(folder / f"{row}.png")
    names = {path.parent.name for path in (tmp_path / "set" / "train").rglob("*.png")}
    for path in (tmp_path / "set" / "test").rglob("*.png"):
        if path.parent.name not in names:
            path.unlink()
    save_plain_vit(tmp_path / "model")
    result = finetuning.finetune(finetuning.FinetuneArguments(
        model=str(tmp_path / "model"), output_dir=str(tmp_path / "run"), dataset=str(tmp_path / "set"), steps=1,
        batch_size=4, report=False, eval_dataset=[f"again={tmp_path / 'set'}", f"trained={tmp_path / 'set'}@train"],
    ))  # fmt: skip
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["again_loss"] == results["test_loss"] != results["trained_loss"]
    with (tmp_path / "run" / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == result.count
    for written, judged in zip(rows, result.top, strict=True):
        assert Path(written["path"]).is_file()
        assert Path(written["path"]).parent.name == written["label"]
        assert [written[f"top{place}"] for place in range(1, 6)] == [sorted(names)[number] for number in judged]
        shares = [float(written[f"probability{place}"]) for place in range(1, 6)]
        assert shares == sorted(shares, reverse=True)
    assert result.accuracy == np.mean([row["top1"] == row["label"] for row in rows])


@pytest.mark.slow
def test_the_evaluation_script_averages_views_and_writes_predictions(tmp_path):
    save_plain_vit(tmp_path / "model", num_labels=10, id2label={number: str(number) for number in range(10)})
    options = {"model": str(tmp_path / "model"), "dataset": "digits", "batch_size": 100}
    results = {
        views: evaluating.evaluate(evaluating.EvaluateArguments(
            **options, views=views, predictions=str(tmp_path / f"{views}.csv"), output=str(tmp_path / f"{views}.json")
        ))
        for views in ("one", "flip", "ten_crop")
    }  # fmt: skip
    assert len({result["loss"] for result in results.values()}) == 3
    for views, result in results.items():
        assert json.loads((tmp_path / f"{views}.json").read_text())["views"] == views
        with (tmp_path / f"{views}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert result["top1_accuracy"] == np.mean([row["top1"] == row["label"] for row in rows])
        assert [row["path"] for row in rows] == [f"row {number}" for number in range(360)]
        assert 0 <= result["calibration_error"] <= 1
    with pytest.raises(OutputExistsError, match=r"one.csv already exists"):
        evaluating.evaluate(evaluating.EvaluateArguments(**options, predictions=str(tmp_path / "one.csv")))
    for name in ("output", "predictions"):
        with pytest.raises(OutputError, match=r"results.txt is not the name of a .(json|csv) file"):
            evaluating.evaluate(evaluating.EvaluateArguments(**options, **{name: str(tmp_path / "results.txt")}))
