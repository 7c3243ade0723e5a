"""Multi-label classification and regression: data, training, results, report, model card."""

import csv
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from datasets import ClassLabel, DatasetDict, List, Value
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from plain_vit.errors import DataError, TrainingError
from plain_vit.training.data import load_classification_data, load_splits
from plain_vit.training.data.mixing import Blend
from plain_vit.training.run.folder import read_log
from plain_vit.training.vector_metrics import VectorEvaluation, vector_table
from tests.training.runs import evaluate, finetune, open_script, save_digits, save_plain_vit, weights_of

script = open_script("finetune_image_classification")
NAMES = ["even", "round", "small"]
MULTI_LABEL, REGRESSION = "multi_label_classification", "regression"


def labels_of(digit):
    return [
        name for name, shown in zip(NAMES, (digit % 2 == 0, digit in (0, 6, 8, 9), digit < 5), strict=True) if shown
    ]


def save(folder, column, kind, label_of):
    return save_digits(folder, column, kind, label_of, train=60, test=60)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    return {
        MULTI_LABEL: save(folder / "labels", "labels", List(Value("string")), labels_of),
        REGRESSION: save(folder / "numbers", "target", List(Value("float64")), lambda digit: [digit / 3, 7.0 - digit]),
    }


@pytest.fixture
def run(tmp_path, sets):
    save_plain_vit(tmp_path / "model")

    def train(name, problem, **options):
        values = {"model": tmp_path / "model", "dataset": sets.get(problem, "digits"), "steps": 8, "batch_size": 12,
                  "evaluations": 4, "learning_rate": 0.01, "validation_fraction": 0.3, "report": False}  # fmt: skip
        finetune(output_dir=tmp_path / name, problem_type=problem, **{**values, **options})
        return tmp_path / name

    return train


def outputs_of(folder, rows):
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    pixels = AutoImageProcessor.from_pretrained(folder)(
        [image.convert("RGB") for image in rows["image"][:]], return_tensors="pt"
    )
    with torch.no_grad():
        return model(**pixels).logits.numpy(), model.config


# Data


@pytest.mark.parametrize(("kind", "label_of", "names"), [
    (List(Value("string")), labels_of, None),
    (List(ClassLabel(names=NAMES)), labels_of, None),
    (List(Value("int32")), lambda digit: [NAMES.index(name) for name in labels_of(digit)], NAMES),
    (List(Value("float64")), lambda digit: [float(NAMES.index(name)) for name in labels_of(digit)], NAMES),
])  # fmt: skip
def test_lists_of_labels_become_one_for_each_label_of_an_image(kind, label_of, names, tmp_path):
    folder = save(tmp_path / "set", "Labels", kind, label_of)
    file = None
    if names:
        file = tmp_path / "names.txt"
        file.write_text("\n".join(names))
    data = load_classification_data(folder, problem_type=MULTI_LABEL, label_names=file and str(file))
    assert data.label_names == NAMES
    digits = load_splits("digits")["train"]["label"][:60]
    expected = [[float(name in labels_of(digit)) for name in NAMES] for digit in digits]
    assert data.train["label"][:] == expected


def test_a_trial_of_images_without_labels_is_refused(tmp_path):
    save_plain_vit(tmp_path / "model")
    labels: Iterator[list[str]] = iter([[]] * 50 + [NAMES] * 70)
    folder = save(tmp_path / "late", "labels", List(Value("string")), lambda _: next(labels))
    arguments = script.FinetuneArguments(
        model=str(tmp_path / "model"), output_dir=str(tmp_path / "out"), dataset=folder, problem_type=MULTI_LABEL,
        batch_size=12, lr_find=str(tmp_path / "rates.png"),
    )  # fmt: skip
    with pytest.raises(DataError, match="None of the 12 images of the trial's split has a label.*fraction or batch"):
        script.start(arguments)


def test_numbers_are_vectors_with_names(tmp_path):
    one = load_classification_data(
        save(tmp_path / "one", "target", Value("int16"), lambda d: 3 * d), problem_type=REGRESSION
    )
    assert one.label_names == ["target"]
    assert one.train["label"][0] == [3.0 * load_splits("digits")["train"]["label"][0]]
    two = save(tmp_path / "two", "where", List(Value("float32")), lambda d: [d, -d])
    named = load_classification_data(two, problem_type=REGRESSION, label_column="where", validation_fraction=0.25)
    assert named.label_names == ["where 0", "where 1"]
    assert (len(named.train), len(named.validation)) == (45, 15)


@pytest.mark.parametrize(("problem", "kind", "label_of", "says"), [
    (MULTI_LABEL, Value("string"), str, "expected a list of labels for each image"),
    (MULTI_LABEL, List(Value("float32")), lambda d: [d / 2], "expected lists of classes, integers or strings"),
    (MULTI_LABEL, List(Value("string")), lambda d: [str(d)] if d != 4 else None, "has no label: remove the row"),
    (MULTI_LABEL, List(ClassLabel(names=[*NAMES, "blue"])), labels_of, "1 of the 4 labels have no .*: 'blue'"),
    (MULTI_LABEL, List(Value("int64")), lambda d: [int(d == n) for n in range(3)], "60 lists .* are all 3 long"),
    (MULTI_LABEL, List(Value("int8")), lambda d: [d % 2, 1 - d % 2], r"write \[2, 5\] for \[0, 0, 1, 0, 0, 1\]"),
    (MULTI_LABEL, List(Value("int64")), lambda d: [d % 2], "are all 1 long, .* name them with --label_names"),
    (MULTI_LABEL, List(Value("string")), lambda d: [str(int(d < n)) for n in (3, 6)], "ones and zeros"),
    (MULTI_LABEL, List(ClassLabel(names=["a", "b"])), lambda d: [d % 2, 1], "ones and zeros"),
    (MULTI_LABEL, List(Value("bool")), lambda d: [d % 2 == 0, d < 5], r"write \[2, 5\] for"),
    (MULTI_LABEL, List(ClassLabel(names=NAMES)), lambda d: [-1] if d == 2 else [d % 3, 1], "'-1', first at row"),
    (REGRESSION, Value("string"), str, "are no numbers"),
    (REGRESSION, List(Value("float32")), lambda d: [1.0] * (1 + d % 2), "lists of different lengths"),
    (REGRESSION, Value("float32"), lambda d: math.nan if d == 3 else d, "has the label nan"),
])  # fmt: skip
def test_labels_that_do_not_fit_are_refused(problem, kind, label_of, says, tmp_path):
    folder = save(tmp_path / "set", "label", kind, label_of)
    with pytest.raises(DataError, match=says):
        load_classification_data(folder, problem_type=problem)


@pytest.mark.parametrize(
    ("problem", "kind", "label_of", "options", "says"),
    [
        (REGRESSION, Value("float32"), float, {"max_images": 1}, "test split has one image, but R2 needs at least two"),
        (MULTI_LABEL, List(ClassLabel(names=["odd", "even"])), lambda digit: [0, 1] * (digit == 9), {},
         "None of the 4 images of the test split has a label"),
    ],
)  # fmt: skip
def test_splits_without_a_defined_result_are_refused_before_the_training(
    problem, kind, label_of, options, says, run, tmp_path
):
    """Otherwise training would stop at its first evaluation."""
    data = save(tmp_path / "data", "label", kind, label_of)
    if problem == MULTI_LABEL:
        splits = DatasetDict.load_from_disk(data)
        unlabelled = splits["test"].filter(lambda row: not row["label"]).select(range(4))
        DatasetDict(train=splits["train"], test=unlabelled).save_to_disk(tmp_path / "unlabelled")
        data = str(tmp_path / "unlabelled")
    with pytest.raises(DataError, match=says):
        run("out", problem, dataset=data, **options)
    assert not (tmp_path / "out").exists()
    if problem == MULTI_LABEL:
        model = save_plain_vit(tmp_path / "model", num_labels=2, id2label={0: "odd", 1: "even"}, problem_type=problem)
        with pytest.raises(DataError, match=says.replace("test", "evaluated")):
            evaluate(model=model, dataset=data)


@pytest.mark.parametrize(("kind", "label_of"), [
    (List(ClassLabel(names=["even", "odd"])), lambda digit: [digit % 2]),
    (List(Value("string")), lambda digit: [str(digit % 2)]),
])  # fmt: skip
def test_lists_of_one_of_two_labels_that_have_names_are_no_ones_and_zeros(kind, label_of, tmp_path):
    data = load_classification_data(save(tmp_path / "set", "label", kind, label_of), problem_type=MULTI_LABEL)
    digits = load_splits("digits")["train"]["label"][:60]
    assert data.train["label"][:] == [[float(digit % 2 == 0), float(digit % 2)] for digit in digits]


def test_options_of_single_labels_are_refused(run):
    for problem, options, says in (
        (MULTI_LABEL, {"loss": "cross_entropy"}, "expected bce or bce_sum"),
        (REGRESSION, {"loss": "bce"}, "expected mse or l1 or smooth_l1"),
        (REGRESSION, {"mixup": 0.2}, "mixup or cutmix is for single labels"),
        (MULTI_LABEL, {"label_smoothing": 0.2}, "label_smoothing is for single labels"),
        (MULTI_LABEL, {"streaming": True, "validation_fraction": 0.0}, "streaming is for single labels"),
        (MULTI_LABEL, {"best_metric": "r2"}, "best_metric is r2: expected mean_average_precision"),
        ("single_label_classification", {"loss": "mse"}, "With one label per image, loss is mse"),
        (
            "single_label_classification",
            {"best_metric": "r2", "dataset": "digits"},
            "best_metric is r2: expected accuracy",
        ),
    ):
        with pytest.raises(TrainingError, match=says):
            run("refused", problem, **options)


def test_several_labels_are_blended_by_their_shares():
    targets, following = torch.tensor([[1.0, 0, 1], [0, 1, 1]]), torch.tensor([[0.0, 0, 0]])
    pixels = torch.rand(2, 3, 4, 5)
    _, blended = Blend(0.75)(pixels, targets, {"pixel_values": torch.rand(1, 3, 4, 5), "labels": following}, 3)
    torch.testing.assert_close(blended, torch.tensor([[0.75, 0.25, 1], [0, 0.75, 0.75]]))


# Results


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("present", [1, 2, 3])
def test_results_are_of_labels_however_many_there_are(present, absent):
    """A single label is not two classes: F1 does not count images without the label."""
    draw = np.random.default_rng(present)
    targets = np.pad(draw.random((40, present)) < 0.4, ((0, 0), (0, absent))).astype(np.float32)
    outputs = draw.normal(size=targets.shape).astype(np.float32)
    values = VectorEvaluation(MULTI_LABEL, 0.0, targets, outputs).values
    each = [average_precision_score(targets[:, place], outputs[:, place]) for place in range(present)]
    assert values["mean_average_precision"] == pytest.approx(np.mean(each))
    each = [f1_score(targets[:, place], outputs[:, place] > 0) for place in range(present + absent)]
    assert values["macro_f1"] == pytest.approx(np.mean(each)), "of a label that no image has, 0"
    if present + absent > 1:
        theirs = f1_score(targets, outputs > 0, average="macro", zero_division=np.nan)
        assert values["macro_f1"] == pytest.approx(theirs)
    unshown = VectorEvaluation(MULTI_LABEL, 0.0, targets, np.where(targets.any(axis=0), outputs, -1)).values
    assert unshown["macro_f1"] == pytest.approx(np.mean(each[:present])), "nor predicted: it does not count"
    assert values["micro_f1"] == pytest.approx(f1_score(targets.ravel(), outputs.ravel() > 0))
    nothing = VectorEvaluation(MULTI_LABEL, 0.0, targets, -np.ones_like(targets)).values
    assert (nothing["macro_f1"], nothing["micro_f1"]) == (0, 0)


def test_a_table_of_predictions_keeps_every_digit():
    targets = np.array([[1234567, 1], [1234566, 0.1]], dtype=np.float32)
    table = vector_table(VectorEvaluation(REGRESSION, 0.0, targets, targets / 3), "ab", "xy")
    rows = [line.split(",") for line in table.splitlines()[1:]]
    assert [row[1::2] for row in rows] == [["1234567", "1"], ["1234566", "0.1"]]
    assert np.array_equal(np.array([row[2::2] for row in rows], dtype=np.float32), targets / 3)


# Runs


def calibration_of(shares, right):
    """Return the expected calibration error over scikit-learn's bins."""
    fractions, means = calibration_curve(right, shares, n_bins=15)
    bins = np.digitize(shares, np.linspace(0, 1, 16)[1:-1], right=True)
    counts = np.bincount(bins, minlength=15)
    return np.average(abs(fractions - means), weights=counts[counts > 0])


def test_a_run_on_several_labels_reports_what_the_saved_model_does(run, sets):
    folder = run("labels", MULTI_LABEL, report=True, mixup=0.2)
    test = load_splits(sets[MULTI_LABEL])["test"]
    outputs, config = outputs_of(folder, test)
    assert (config.problem_type, list(config.id2label.values())) == (MULTI_LABEL, NAMES)
    targets = np.array([[name in labels for name in NAMES] for labels in test["labels"][:]])
    results = json.loads((folder / "results.json").read_text())
    expected = {
        "mean_average_precision": average_precision_score(targets, outputs),
        "macro_f1": f1_score(targets, outputs > 0, average="macro", zero_division=0),
        "micro_f1": f1_score(targets, outputs > 0, average="micro"),
        "calibration_error": calibration_of(1 / (1 + np.exp(-outputs.ravel())), targets.ravel()),
        "loss": F.binary_cross_entropy_with_logits(torch.tensor(outputs), torch.tensor(targets).float()),
    }  # fmt: skip
    for name, value in expected.items():
        assert results[f"test_{name}"] == pytest.approx(float(value), abs=1e-5)
    scores = [row["validation_mean_average_precision"] for row in read_log(folder) if "validation_loss" in row]
    assert len(scores) == 4
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["even"] for row in rows] == [str(int(shown)) for shown in targets[:, 0]]
    shares = np.array([[float(row[f"predicted {name}"]) for name in NAMES] for row in rows])
    np.testing.assert_allclose(shares, 1 / (1 + np.exp(-outputs)), atol=1e-5)
    page = (folder / "report" / "index.html").read_text()
    assert {"curves", "reliability", "attention"} <= {file.stem for file in (folder / "report").glob("*.png")}
    assert "Every label" in page
    assert f"expected calibration error, {results['test_calibration_error']:.1%}, is" in page
    card = (folder / "README.md").read_text()
    assert "mean_average_precision" in card
    assert "micro F1" in card
    assert "expected calibration error" in card
    assert "calibration of the scores is unknown" not in card
    assert "label_smoothing" not in card
    shown = pipeline("image-classification", model=str(folder), top_k=3)(test[0]["image"].convert("RGB"))
    assert {each["label"]: each["score"] for each in shown} == pytest.approx(
        dict(zip(NAMES, shares[0], strict=True)), abs=1e-4
    )


@pytest.mark.slow
def test_a_regression_reports_what_the_saved_model_does(run, sets):
    folder = run("numbers", REGRESSION, report=True, loss="smooth_l1", best_metric="r2")
    test = load_splits(sets[REGRESSION])["test"]
    outputs, config = outputs_of(folder, test)
    assert (config.problem_type, list(config.id2label.values())) == (REGRESSION, ["target 0", "target 1"])
    targets, results = np.array(test["target"][:]), json.loads((folder / "results.json").read_text())
    assert results["test_mean_absolute_error"] == pytest.approx(mean_absolute_error(targets, outputs), abs=1e-5)
    assert results["test_r2"] == pytest.approx(r2_score(targets, outputs), abs=1e-5)
    assert results["test_loss"] == pytest.approx(((targets - outputs) ** 2).mean(), abs=1e-5)
    rows = [row for row in read_log(folder) if "validation_r2" in row]
    data = script.open_data(script.FinetuneArguments(
        model="m", output_dir="o", dataset=sets[REGRESSION], problem_type=REGRESSION, validation_fraction=0.3
    ))  # fmt: skip
    best = r2_score(np.array(data.validation["label"][:]), outputs_of(folder, data.validation)[0])
    assert best == pytest.approx(max(row["validation_r2"] for row in rows), abs=1e-5)
    assert {"curves", "numbers"} <= {file.stem for file in (folder / "report").glob("*.png")}
    with (folder / "predictions.csv").open(newline="") as file:
        assert float(next(csv.DictReader(file))["predicted target 1"]) == pytest.approx(outputs[0, 1], abs=1e-4)
    assert "mean absolute error" in (folder / "README.md").read_text()


def test_a_regression_begins_at_the_mean_of_its_targets(run, sets):
    folder = run("start", REGRESSION, learning_rate=0.0, validation_fraction=0.0, freeze=["backbone"])
    means = np.array(load_splits(sets[REGRESSION])["train"]["target"][:]).mean(axis=0)
    np.testing.assert_allclose(weights_of(folder)["classifier.bias"], means, rtol=1e-5)


def test_a_kept_head_of_numbers_keeps_its_bias(run, sets, tmp_path):
    save_plain_vit(tmp_path / "model", num_labels=2, id2label={0: "target 0", 1: "target 1"}, problem_type=REGRESSION)
    options = {"learning_rate": 0.0, "validation_fraction": 0.0, "steps": 1, "keep_head": True}
    kept = weights_of(run("kept", REGRESSION, **options))["classifier.bias"]
    assert torch.equal(kept, weights_of(tmp_path / "model")["classifier.bias"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"drop_path_rate": 0.2}, {"dropout": 0.1}, {"image_size": [24, 16]}, {"from_scratch": True, "image_size": [24]},
    {"native_aspect_ratio": True}, {"lora_rank": 2, "test_size": [40]}, {"from_scratch": True},
])  # fmt: skip
def test_one_number_is_learnt_with_every_change_of_the_model(options, run, tmp_path):
    """transformers refuses a config with one label unless its problem type is regression."""
    dataset = save(tmp_path / "one", "target", Value("float32"), float)
    folder = run("one number", REGRESSION, dataset=dataset, **options)
    outputs, config = outputs_of(folder, load_splits(dataset)["test"])
    assert (config.problem_type, config.id2label, outputs.shape) == (REGRESSION, {0: "target"}, (60, 1))
    targets = np.array(load_splits(dataset)["test"]["target"][:])
    results = json.loads((folder / "results.json").read_text())
    assert results["test_mean_absolute_error"] == pytest.approx(np.abs(targets - outputs[:, 0]).mean(), abs=1e-4)


# The evaluation script


def test_the_evaluation_of_several_labels_is_scikit_learns_in_the_order_of_the_model(sets, tmp_path, capsys):
    names = ["small", "never", "even", "round"]
    save_plain_vit(tmp_path / "model", num_labels=4, id2label=dict(enumerate(names)), problem_type=MULTI_LABEL)
    results = evaluate(model=tmp_path / "model", dataset=sets[MULTI_LABEL], predictions=tmp_path / "predictions.csv")
    test = load_splits(sets[MULTI_LABEL])["test"]
    outputs, _ = outputs_of(tmp_path / "model", test)
    targets = np.array([[name in labels for name in names] for labels in test["labels"][:]])
    precisions = [average_precision_score(targets[:, place], outputs[:, place]) for place in (0, 2, 3)]
    assert results["mean_average_precision"] == pytest.approx(np.mean(precisions), abs=1e-5)
    assert [row["name"] for row in results["labels"]] == names
    assert [row["images"] for row in results["labels"]] == targets.sum(axis=0).tolist()
    assert results["labels"][1]["average precision"] is None
    assert [results["labels"][place]["average precision"] for place in (0, 2, 3)] == pytest.approx(precisions, abs=1e-5)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["even"] for row in rows] == [str(int(shown)) for shown in targets[:, 2]]
    assert "mean average precision" in capsys.readouterr().out
    with pytest.raises(DataError, match="views are for single labels"):
        evaluate(model=tmp_path / "model", dataset=sets[MULTI_LABEL], views="flip")
    save_plain_vit(tmp_path / "other", num_labels=2, id2label={0: "even", 1: "odd"}, problem_type=MULTI_LABEL)
    with pytest.raises(DataError, match="does not know 2 of the 3 classes of the data: round, small"):
        evaluate(model=tmp_path / "other", dataset=sets[MULTI_LABEL])


def test_the_evaluation_of_numbers_is_scikit_learns(sets, tmp_path, capsys):
    save_plain_vit(tmp_path / "model", num_labels=2, problem_type=REGRESSION)
    results = evaluate(model=tmp_path / "model", dataset=sets[REGRESSION], output=tmp_path / "results.json")
    test = load_splits(sets[REGRESSION])["test"]
    outputs, _ = outputs_of(tmp_path / "model", test)
    targets = np.array(test["target"][:])
    assert results["r2"] == pytest.approx(r2_score(targets, outputs), abs=1e-5)
    each = [mean_absolute_error(targets[:, place], outputs[:, place]) for place in range(2)]
    assert [row["mean absolute error"] for row in results["labels"]] == pytest.approx(each, abs=1e-5)
    assert json.loads((tmp_path / "results.json").read_text())["images"] == 60
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("LABEL_")]
    assert printed == [
        [row["name"], "60", f"{row['mean absolute error']:.4f}", f"{row['R2']:.4f}"] for row in results["labels"]
    ]
    save_plain_vit(tmp_path / "other", num_labels=3, problem_type=REGRESSION)
    with pytest.raises(DataError, match="Each image has 2 numbers, and the model predicts 3"):
        evaluate(model=tmp_path / "other", dataset=sets[REGRESSION])
