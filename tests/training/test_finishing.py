"""After training: means of models, and calibrated probabilities."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]
from sklearn.metrics import log_loss
from torch import nn
from torchmetrics.functional.classification import multiclass_calibration_error
from transformers import pipeline

from plain_vit import PlainViTForImageClassification
from plain_vit.errors import DataError, TrainingError
from plain_vit.training.data import ImageClassificationData, load_classification_data, load_splits
from plain_vit.training.models import open_classifier
from plain_vit.training.reports.finishing import (
    average_models,
    calibrate_model,
    fit_temperature,
    validation_data,
    validation_logits,
)
from plain_vit_command import main
from tests.training.runs import save_plain_vit, save_resnet, weights_of

DIGITS = {str(number): number for number in range(10)}
OPTIONS: dict[str, Any] = {"num_labels": 10, "id2label": {number: name for name, number in DIGITS.items()}}


@pytest.fixture(scope="module")
def validation() -> ImageClassificationData:
    return validation_data("digits", validation_fraction=0.03, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three models of one architecture."""
    place = tmp_path_factory.mktemp("models")
    return [save_plain_vit(place / name, **OPTIONS) for name in ("a", "b", "c")]


def teach(folder: Path) -> Path:
    """Fit the last linear layer of a model to the digits, and make its probabilities too confident."""
    model, image_processor = open_classifier(str(folder))
    head = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 10][-1]
    features: list[torch.Tensor] = []
    head.register_forward_hook(lambda module, inputs, output: features.append(inputs[0]))
    train = load_splits("digits")["train"].select(range(300))
    with torch.no_grad():
        model.eval()(**image_processor([image.convert("RGB") for image in train["image"][:]], return_tensors="pt"))
        targets = nn.functional.one_hot(torch.tensor(train["label"][:]), 10).float() - 0.1
        head.weight.copy_(50 * torch.linalg.lstsq(features[0] - features[0].mean(dim=0), targets).solution.T)
        head.bias.copy_(-head.weight @ features[0].mean(dim=0))
    model.save_pretrained(folder)
    return folder


def accuracy(weights: list[dict[str, torch.Tensor]], like: Path, validation: ImageClassificationData) -> float:
    """Return the accuracy of a mean, with none of the code under test."""
    model = PlainViTForImageClassification.from_pretrained(like).eval()
    model.load_state_dict({name: torch.stack([each[name] for each in weights]).mean(dim=0) for name in weights[0]})
    split: Any = validation.validation
    pixels = open_classifier(str(like))[1]([image.convert("RGB") for image in split["image"][:]], return_tensors="pt")
    with torch.no_grad():
        return float((model(**pixels).logits.argmax(dim=-1) == torch.tensor(split["label"][:])).double().mean())


# Means


def test_mean_of_all_models_has_the_mean_of_each_weight(folders, tmp_path):
    assert main(["average", *map(str, folders), "--out", str(tmp_path / "soup")]) == 0
    several, mean = [load_file(folder / "model.safetensors") for folder in folders], weights_of(tmp_path / "soup")
    assert mean.keys() == several[0].keys()
    for name, weight in mean.items():
        expected = np.mean([each[name].double().numpy() for each in several], axis=0).astype(np.float32)
        assert np.array_equal(weight.numpy(), expected), name
    card = (tmp_path / "soup" / "README.md").read_text()
    assert "# soup\n" in card
    assert "Mean of the weights of `a`, `b`, `c` (Wortsman et al. 2022)" in card


def test_greedy_mean_takes_models_by_accuracy_and_keeps_those_that_do_not_lower_it(folders, validation):
    result = average_models(folders, validation)
    weights = {folder: load_file(folder / "model.safetensors") for folder in folders}
    alone = {folder: accuracy([weights[folder]], folder, validation) for folder in folders}
    assert {folder: result.accuracies[folder] for folder in folders} == pytest.approx(alone)
    chosen: list[Path] = []
    for folder in sorted(folders, key=lambda each: -alone[each]):
        more = [*chosen, folder]
        scores = [accuracy([weights[each] for each in some], folder, validation) for some in (chosen or [folder], more)]
        chosen = more if scores[1] >= scores[0] else chosen
    assert result.chosen == chosen
    together = accuracy([weights[each] for each in chosen], folders[0], validation)
    assert result.accuracies["mean"] == pytest.approx(together)
    assert together >= max(alone.values())


def test_a_run_stands_for_its_best_models(folders, tmp_path):
    for step, folder in enumerate(folders[:2]):
        shutil.copytree(folder, tmp_path / "best_models" / f"step_{step:08d}")
    assert [folder.name for folder in average_models([tmp_path]).chosen] == ["step_00000000", "step_00000001"]
    with pytest.raises(TrainingError, match="is one model: give several, or a run .* --best_kept 5"):
        average_models(folders[:1])


@pytest.mark.parametrize(
    "changes, told", [({"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}}, "id2label"),
                      ({"num_hidden_layers": 1}, "num_hidden_layers"), ({"drop_path_rate": 0.1}, None)],
)  # fmt: skip
def test_models_that_differ_in_more_than_their_weights_are_refused(changes, told, folders, tmp_path):
    other = save_plain_vit(tmp_path / "other", **{**OPTIONS, **changes})
    if told is None:
        assert len(average_models([folders[0], other]).chosen) == 2
        return
    with pytest.raises(TrainingError, match=rf"a and .*other differ in .*{told}: average models of one architecture"):
        average_models([folders[0], other])


# Temperature


def test_temperature_is_that_of_the_lowest_loss_and_undoes_a_factor():
    torch.manual_seed(0)
    logits, labels = 2 * torch.randn(500, 7, dtype=torch.float64), torch.randint(7, (500,))
    logits[torch.arange(500), labels] += 2

    def loss(temperature: float) -> float:
        return log_loss(labels, (logits / temperature).softmax(dim=1).numpy(), labels=range(7))

    found = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert fit_temperature(logits, labels) == pytest.approx(found.x, rel=1e-5)
    assert fit_temperature(7 * logits, labels) == pytest.approx(7 * fit_temperature(logits, labels), rel=1e-9)
    with pytest.raises(DataError, match="On 500 images, no temperature from 0.01 to 100 has the lowest loss"):
        fit_temperature(logits, logits.argmax(dim=1))


@pytest.mark.slow(quick=["plain"])
@pytest.mark.parametrize("kind", ["plain", "distillation", "resnet"])
def test_calibrated_model_has_scaled_probabilities_everywhere(kind, tmp_path, capsys):
    if kind == "resnet":
        model, image_processor = open_classifier(str(save_resnet(tmp_path / "model", num_labels=10)))
        model.config.id2label, model.config.label2id = OPTIONS["id2label"], DIGITS
        model.save_pretrained(tmp_path / "model")
    else:
        save_plain_vit(tmp_path / "model", **OPTIONS, use_distillation_token=kind == "distillation")
    teach(tmp_path / "model")
    command = f"calibrate {tmp_path}/model --out {tmp_path}/new --dataset digits --validation-fraction 0.05 --seed 3"
    assert main(command.split()) == 0
    numbers = re.findall(
        r"(before|after): loss (\S+), calibration error (\S+)%|temperature (\S+), from 72 images",
        capsys.readouterr().out,
    )
    results = {when: (float(loss), float(error)) for when, loss, error, _ in numbers[:2]}
    temperature = float(numbers[2][3])
    split = load_classification_data("digits", validation_fraction=0.05, seed=3).validation
    logits = {}
    for name in ("model", "new"):
        model, image_processor = open_classifier(str(tmp_path / name))
        pixels = image_processor([image.convert("RGB") for image in split["image"][:]], return_tensors="pt")
        with torch.no_grad():
            logits[name] = model.eval()(pixel_values=pixels["pixel_values"]).logits
    torch.testing.assert_close(logits["new"], logits["model"] / temperature, rtol=1e-4, atol=1e-5)
    labels = torch.tensor(split["label"][:])
    for when, name in (("before", "model"), ("after", "new")):
        error = multiclass_calibration_error(logits[name].softmax(dim=1), labels, 10, n_bins=15, norm="l1")
        loss = float(nn.functional.cross_entropy(logits[name], labels))
        assert results[when] == pytest.approx((loss, 100 * float(error)), abs=0.0051)  # as printed
    assert results["after"] < results["before"]
    if kind == "plain":
        classify = pipeline("image-classification", str(tmp_path / "new"), device="cpu")
        scores = {each["label"]: each["score"] for each in classify(split[0]["image"], top_k=10)}
        expected = (logits["model"][0] / temperature).softmax(dim=0)
        assert [scores[label] for label in DIGITS] == pytest.approx(expected.tolist(), rel=1e-3)
        assert f"| temperature | {temperature:.4f} |" in (tmp_path / "new" / "README.md").read_text()


def test_heads_and_data_that_cannot_be_calibrated_are_refused(validation, tmp_path):
    model, image_processor = open_classifier(str(teach(save_plain_vit(tmp_path / "model", **OPTIONS))))
    model.classifier.register_forward_hook(lambda module, inputs, output: output.atan())
    with pytest.raises(TrainingError, match="only a linear head can be calibrated"):
        calibrate_model(model, image_processor, validation)
    with pytest.raises(DataError, match="digits has no validation split: give the --validation-fraction and --seed"):
        validation_data("digits")
    model.config.problem_type = "regression"
    with pytest.raises(DataError, match="is for regression: expected one label per image"):
        validation_logits(model, image_processor, validation)
