"""Linear probes and few-shot ridge regression: compared with scikit-learn, and in the script."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from sklearn.linear_model import Ridge
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    ResNetConfig,
    ResNetForImageClassification,
)

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.errors import DataError, OutputExistsError, TrainingError
from plain_vit.training.arguments import parse_arguments
from plain_vit.training.data.splits import choose_shots
from plain_vit.training.probing import (
    BIAS,
    EPSILON,
    Features,
    extract_features,
    few_shot_accuracies,
    fit_ridge,
    head_layer,
    train_probes,
)
from tests.conftest import randomize_
from tests.training.runs import open_script, save_plain_vit, weights_of

script = open_script("linear_probe")


def clusters(images: int, width: int, classes: int, seed: int = 0) -> Features:
    """Return features in one cluster per class, with very different scales."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    values = centres[labels] + 0.7 * torch.randn(images, width, generator=generator)
    return Features(values * torch.logspace(-2, 2, width) + 5, labels)


# Ridge regression


@pytest.mark.parametrize("images, width", [(41, 7), (13, 29)], ids=["more images", "more features"])
def test_ridge_is_that_of_scikit_learn_on_whitened_features_and_a_constant(images, width):
    features = clusters(images, width, 3)
    values = features.values.double().numpy()
    white = (values - values.mean(0)) / (values.std(0) + EPSILON)
    inputs = np.concatenate([white, np.full((images, 1), BIAS)], axis=1)
    targets = np.eye(3)[features.labels.numpy()] * 2 - 1
    theirs = Ridge(alpha=64.0, fit_intercept=False, solver="svd").fit(inputs, targets).predict(inputs)
    weight, bias = fit_ridge(features, 3, l2=64.0)
    ours = F.linear(features.values.double(), weight, bias).numpy()
    assert np.abs(ours - theirs).max() < 1e-9 * np.abs(theirs).max()


def test_shots_are_as_many_of_each_class_and_seeded():
    labels, names = np.arange(30) % 3, ["ant", "bee", "cat"]
    rows = choose_shots(labels, names, 4, seed=1)
    assert np.bincount(labels[rows]).tolist() == [4, 4, 4]
    assert np.array_equal(rows, choose_shots(labels, names, 4, seed=1))
    assert not np.array_equal(rows, choose_shots(labels, names, 4, seed=2))
    with pytest.raises(DataError, match="class 'bee' has 10 training images, fewer than the 11 requested"):
        choose_shots(np.append(labels, [0, 2]), names, 11, seed=0)
    with pytest.raises(DataError, match="1 or more images per class: got 0"):
        choose_shots(labels, names, 0, seed=0)


def test_more_shots_tell_more_and_each_seed_is_one_answer():
    train, held_out = clusters(300, 11, 5), clusters(997, 11, 5, seed=1)
    few = few_shot_accuracies(train, held_out, 5, shots=1, seeds=(0, 1, 2))
    many = few_shot_accuracies(train, held_out, 5, shots=50, seeds=(0, 1, 2))
    assert len(few) == len(set(few)) == 3
    assert np.mean(many) > np.mean(few) + 0.05


# Linear probes


def test_each_probe_is_the_one_that_would_be_trained_alone():
    features = clusters(97, 6, 4)
    options: dict[str, Any] = {"epochs": 3.0, "batch_size": 16, "weight_decay": 0.01, "seed": 3}
    together = train_probes(features, 4, learning_rates=(0.1, 3.0, 0.01), **options)
    for probe in together:
        (alone,) = train_probes(features, 4, learning_rates=(probe.learning_rate,), **options)
        torch.testing.assert_close(probe.weight, alone.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(probe.bias, alone.bias, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0].weight, together[1].weight)
    assert max(probe.accuracy(clusters(50, 6, 4, seed=1)) for probe in together) > 0.8


def test_first_step_of_a_probe_is_that_of_a_linear_layer_on_standardised_features():
    features = clusters(32, 6, 4)
    (probe,) = train_probes(features, 4, learning_rates=(0.5,), epochs=1.0, batch_size=32)
    std, mean = features.values.std(0, correction=0) + EPSILON, features.values.mean(0)
    layer = nn.Linear(6, 4)
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    F.cross_entropy(layer((features.values - mean) / std), features.labels).backward()
    weight = -0.5 * 32 / 256 * layer.weight.grad / std
    torch.testing.assert_close(probe.weight, weight, rtol=1e-4, atol=1e-7)


def test_lars_takes_the_steps_of_the_formula_of_mae():
    features = clusters(32, 6, 4)
    options: dict[str, Any] = {"batch_size": 32, "weight_decay": 0.03, "optimizer": "lars", "seed": 5}
    (probe,) = train_probes(features, 4, learning_rates=(0.5,), epochs=6.0, warmup_epochs=2.0, **options)
    std, mean = features.values.std(0, correction=0) + EPSILON, features.values.mean(0)
    inputs = (features.values - mean) / std
    weight = nn.init.trunc_normal_(torch.zeros(4, 6), std=0.01, generator=torch.Generator().manual_seed(5))
    parameters = [weight.requires_grad_(), torch.zeros(4, requires_grad=True)]
    moments = [torch.zeros(4, 6), torch.zeros(4)]
    for step in range(6):
        factor = (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 4))
        loss = F.cross_entropy(F.linear(inputs, *parameters), features.labels)
        for place, gradient in enumerate(torch.autograd.grad(loss, parameters)):
            parameter = parameters[place].detach()
            if parameter.ndim > 1:
                gradient = gradient + 0.03 * parameter
                gradient = gradient * 0.001 * parameter.norm() / gradient.norm()
            moments[place] = 0.9 * moments[place] + gradient
            parameters[place] = (parameter - 0.5 * 32 / 256 * factor * moments[place]).requires_grad_()
    torch.testing.assert_close(probe.weight * std, parameters[0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(probe.bias + probe.weight @ mean, parameters[1], rtol=1e-4, atol=1e-6)


def test_lars_learns():
    features = clusters(200, 6, 4)
    rates = (0.5, 2.0, 8.0)
    probes = train_probes(features, 4, learning_rates=rates, epochs=60.0, batch_size=50, optimizer="lars")
    assert max(probe.accuracy(clusters(50, 6, 4, seed=1)) for probe in probes) > 0.8


# Features


@pytest.mark.parametrize("kind", ["plain", "resnet"])
def test_features_are_what_the_head_reads(kind):
    model: Any
    if kind == "plain":
        config = PlainViTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                image_size=16, patch_size=8, num_labels=5, pooling="mean")  # fmt: skip
        model = PlainViTForImageClassification(config)
    else:
        model = ResNetForImageClassification(
            ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=5)
        )
    randomize_(model).eval()
    rows: list[dict[str, Any]] = [{"pixel_values": torch.randn(3, 16, 16), "labels": number % 5} for number in range(7)]
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(rows, batch_size=3))
    features = extract_features(model, loader, accelerator, size=7)
    assert features.labels.tolist() == [0, 1, 2, 3, 4, 0, 1]
    logits = model(torch.stack([row["pixel_values"] for row in rows])).logits
    torch.testing.assert_close(head_layer(model)[1](features.values), logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(TrainingError, match="7 images were processed, but the split has 8"):
        extract_features(model, loader, accelerator, size=8)


def test_model_of_two_heads_is_refused():
    config = DeiTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=5)
    with pytest.raises(TrainingError, match="one linear head: DeiTForImageClassificationWithTeacher has 2"):
        head_layer(DeiTForImageClassificationWithTeacher(config))


# The script


def arguments_of(model: Path, out: Path, *words: object) -> Any:
    needed = ["--model", model, "--dataset", "digits", "--output_dir", out, "--epochs", 3]
    return parse_arguments(script.ProbeArguments, [str(word) for word in (*needed, *words)], description=None)


@pytest.mark.slow
def test_probe_leaves_a_model_with_the_accuracy_it_reports_and_features_that_are_used_again(
    model_folder, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    results = script.probe(arguments_of(model_folder, out, "--shots", 2, 3))
    rates = results["linear"]["validation_accuracies"]
    assert len(rates) == 13
    assert rates[str(results["linear"]["learning_rate"])] == max(rates.values())
    assert json.loads((out / "results.json").read_text()) == results
    assert [len(results["few_shot"][shots]) for shots in ("2", "3")] == [3, 3]
    model = AutoModelForImageClassification.from_pretrained(out)
    assert model.config.num_labels == 10
    source = weights_of(model_folder)
    assert all(
        torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items() if "classif" not in name
    )
    card = (out / "README.md").read_text()
    assert re.search(r"A linear classifier, trained on digits \(.*\) on the frozen features of `\w+`\.", card)
    assert "| optimizer | sgd |\n| momentum | 0.9 |" in card
    assert f"| accuracy | {results['linear']['test_accuracy']:.4f} |" in card
    assert f"| learning_rate | {results['linear']['learning_rate']} |" in card
    stored = load_file(out / "features.safetensors")
    answers = model.classifier(stored["test.values"]).argmax(1)
    assert (answers == stored["test.labels"]).double().mean().item() == results["linear"]["test_accuracy"]

    monkeypatch.setattr(script.probing, "extract_features", None)
    again = script.probe(arguments_of(model_folder, out, "--recipe", "few-shot", "--shots", 2))
    assert again["few_shot"]["2"] == results["few_shot"]["2"]
    assert again["linear"] == results["linear"], "which the later probe did not compute"


@pytest.mark.parametrize(("words", "says"), [
    (["--shots", 1, 500], "fewer than the 500 requested: request fewer"),
    (["--mode", "few_shot", "--shots", 0, 2], "shots is \\[0, 2\\]: expected 1 or more"),
    (["--mode", "knn", "--neighbors", 10, 5000], "fewer than 5000 neighbours: set --neighbors"),
    (["--mode", "knn", "--temperature", 0], "temperature is 0.0: expected a positive number"),
])  # fmt: skip
def test_a_probe_that_the_data_do_not_allow_is_refused_before_anything_is_computed(words, says, model_folder, tmp_path):
    """The error comes before the linear probe is trained, so that no result is lost."""
    with pytest.raises((DataError, TrainingError), match=says):
        script.probe(arguments_of(model_folder, tmp_path / "out", *words))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_results_of_other_settings_are_not_in_one_table_and_each_is_kept_at_once(model_folder, tmp_path, monkeypatch):
    def results_of(mode, *words):
        return script.probe(arguments_of(model_folder, tmp_path / "out", "--mode", mode, *words))

    first = results_of("knn", "--neighbors", 3)
    both = results_of("knn", "--neighbors", 7)
    assert both["knn"].keys() == {"3", "7"}
    assert both["knn"]["3"] == first["knn"]["3"]
    assert both["settings"] == {"knn": {"temperature": 0.07}}
    other = results_of("knn", "--neighbors", 3, "--temperature", 5)
    assert (other["knn"].keys(), other["settings"]) == ({"3"}, {"knn": {"temperature": 5.0}})
    for seeds, shots in (((0, 1), {"1", "2"}), ((4, 5), {"2"})):
        few = [results_of("few_shot", "--shots", count, "--seeds", *seeds) for count in (1, 2)[-len(shots) :]][-1]
        assert few["few_shot"].keys() == shots
        assert few["settings"] == {**other["settings"], "few_shot": {"seeds": [*seeds], "l2": 1024.0}}
    monkeypatch.setattr(script.probing, "few_shot_accuracies", None)
    with pytest.raises(TypeError):
        results_of("both", "--shots", 1)
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    assert kept.keys() >= {"linear", "few_shot", "knn"}


def test_a_folder_of_something_else_is_not_written_into(model_folder):
    before = {path: path.read_bytes() for path in model_folder.iterdir()}
    with pytest.raises(OutputExistsError, match="contains something other than a probe"):
        script.probe(arguments_of(model_folder, model_folder))
    assert before == {path: path.read_bytes() for path in model_folder.iterdir()}


def _other_weights(model: Path, data: Path) -> None:
    changed = PlainViTForImageClassification.from_pretrained(model)
    nn.init.ones_(changed.vit.layernorm.bias)
    changed.save_pretrained(model)


def _edited(file: Path, **settings: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def _other_settings(model: Path, data: Path) -> None:
    _edited(model / "config.json", hidden_act="relu")


def _other_processing(model: Path, data: Path) -> None:
    _edited(model / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])


def _other_images(model: Path, data: Path) -> None:
    shutil.rmtree(data)
    save_two_columns(data, seed=1)


@pytest.mark.slow(quick=["settings"])
@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        (_other_weights, [], "weights"),
        (_other_settings, [], "configuration"),
        (_other_processing, [], "image_processor"),
        (_other_images, [], "train images"),
        (None, ["--image_column", "right"], "image_column"),
        (None, ["--image_size", 16], "image_size"),
    ],
    ids=["weights", "settings", "processing", "images", "column", "size"],
)
def test_features_of_another_model_or_of_other_images_with_the_same_labels_are_not_taken(
    change, options, named, tmp_path
):
    model, data, out = tmp_path / "model", tmp_path / "data", tmp_path / "out"
    save_plain_vit(model)
    save_two_columns(data, seed=0)
    words = ["--dataset", data, "--mode", "few_shot", "--shots", 1, "--image_column", "left"]
    script.probe(arguments_of(model, out, *words))
    before = {path: path.read_bytes() for path in out.iterdir()}
    if change is not None:
        change(model, data)
    with pytest.raises(OutputExistsError, match=rf"differ in {named} \(was "):
        script.probe(arguments_of(model, out, *words, *options))
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def save_two_columns(folder: Path, *, seed: int) -> None:
    """Save two images per label; the labels are the same for all seeds."""
    draw, labels = np.random.default_rng(seed), [number % 3 for number in range(24)]
    images = {
        name: [PIL.Image.fromarray(draw.integers(0, 256, (9, 7, 3), dtype=np.uint8)) for _ in labels]
        for name in ("left", "right")
    }
    features = datasets.Features(
        {"left": datasets.Image(), "right": datasets.Image(), "label": datasets.ClassLabel(names=[*"abc"])}
    )
    rows = datasets.Dataset.from_dict({**images, "label": labels}, features=features)
    datasets.DatasetDict({"train": rows, "test": rows.select(range(9))}).save_to_disk(folder)
