"""Attentive probes and nearest neighbours: compared with direct implementations, and in the script.

Legend: `N` images, `L` patches, `D` features, `K` classes, `P` probes.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModelForImageClassification

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.errors import DataError, TrainingError
from plain_vit.training import probing
from plain_vit.training.arguments import parse_arguments
from plain_vit.training.data import load_digits
from plain_vit.training.probing import (
    BETAS,
    DEVIATIONS,
    EPSILON,
    Features,
    attentive_classifier,
    attentive_heads,
    classify_by_neighbors,
    nearest_neighbors,
    open_tokens,
    pool_by_query,
    train_probes,
    use_probe,
    write_tokens,
)
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, pixels, tiny_config
from tests.training.runs import open_script

script = open_script("linear_probe")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels_of(count: int, classes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


# Nearest neighbours


@pytest.mark.parametrize("chunks", [(7, 11), (1000, 1000)])
def test_votes_of_neighbours_are_those_of_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, int]
) -> None:
    monkeypatch.setattr(probing, "QUERIES", chunks[0])
    monkeypatch.setattr(probing, "NEIGHBORS", chunks[1])
    train, queries = Features(random(97, 6), labels_of(97, 5)), random(31, 6, seed=1)
    predictions = classify_by_neighbors(train, queries, 5, counts=[1, 3, 20, 97])
    for count, predicted in predictions.items():
        reference = KNeighborsClassifier(
            count, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / 0.07)
        ).fit(train.values.double(), train.labels)
        assert predicted.tolist() == reference.predict(queries.double()).tolist()
    assert len({tuple(each.tolist()) for each in predictions.values()}) > 2


def test_the_temperature_decides_between_one_near_and_many_far_neighbours() -> None:
    near, far = torch.tensor([1.0, 0.1]), torch.tensor([1.0, 0.6])
    train = Features(torch.stack([near, far, far * 2]), torch.tensor([1, 0, 0]))
    query = torch.tensor([[3.0, 0.0]])
    for temperature, expected in ((0.07, 1), (10.0, 0), (1e-4, 1)):  # exp(1 / 1e-4) overflows
        predictions = classify_by_neighbors(train, query, 2, counts=[3], temperature=temperature)
        assert predictions[3].tolist() == [expected]


def test_neighbours_need_memory_for_one_chunk_of_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "NEIGHBORS", 8)
    largest: list[int] = []
    product = torch.Tensor.__matmul__

    def watched(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        result = product(first, second)
        largest.append(result.numel())
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    similarity, rows = nearest_neighbors(random(100, 4), random(3, 4, seed=1), 20)
    assert max(largest) == 3 * 8
    assert (similarity.diff(dim=1) <= 0).all()
    assert all(len(set(row.tolist())) == 20 for row in rows)


def test_more_neighbours_than_images_are_refused() -> None:
    train = Features(random(5, 3), labels_of(5, 2))
    with pytest.raises(DataError, match="There are 5 training images, fewer than 20 neighbours: set --neighbors"):
        classify_by_neighbors(train, random(2, 3), 2, counts=[1, 20])
    for counts, temperature in (([0], 0.07), ([], 0.07), ([1], 0.0)):
        with pytest.raises(TrainingError, match="Expected neighbours from 1 and a temperature above 0"):
            classify_by_neighbors(train, random(2, 3), 2, counts=counts, temperature=temperature)


# Attentive probes


class Reference(nn.Module):
    """The probe with torch's own attention over all tokens, after a batch norm without gain."""

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.empty(width))
        self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.linear = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query.expand(len(tokens), 1, -1), self.key(tokens), self.value(tokens))
        )
        return self.linear(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(1))


def test_pooling_by_a_query_is_torch_s_attention_with_its_gradients() -> None:
    tokens = random(3, 7, 12)
    query, key, value = random(2, 12, seed=1), random(2, 12, 12, seed=2), random(2, 12, 12, seed=3)
    parameters = [each.clone().requires_grad_() for each in (query, key, value)]
    pooled = pool_by_query(tokens, *parameters, heads=4)
    gradients = torch.autograd.grad(pooled.square().sum(), parameters)
    for p in range(2):
        model = Reference(12, 4, 5)
        model.linear = nn.Identity()  # type: ignore[assignment]
        with torch.no_grad():
            model.query.copy_(query[p]), model.key.weight.copy_(key[p]), model.value.weight.copy_(value[p])
        expected = model(tokens)
        torch.testing.assert_close(pooled[p], expected, rtol=1e-4, atol=1e-5)
        own = torch.autograd.grad(expected.square().sum(), [model.query, model.key.weight, model.value.weight])
        for ours, theirs in zip(gradients, own, strict=True):
            torch.testing.assert_close(ours[p], theirs, rtol=1e-3, atol=1e-3)


def stored(values: torch.Tensor, labels: torch.Tensor) -> Features:
    return Features(values.half(), labels)


def test_each_probe_is_the_one_that_torch_trains_alone() -> None:
    tokens = stored(3 * random(53, 7, 12) + 2, labels_of(53, 5))
    rates, options = (0.003, 0.03), {"epochs": 2.0, "batch_size": 16, "warmup_epochs": 0.5, "weight_decay": 0.1}
    probes = train_probes(tokens, 5, heads=4, learning_rates=rates, seed=3, **options)
    raw = tokens.values.float()
    mean, std = raw.mean(dim=(0, 1)), raw.std(dim=(0, 1), correction=0) + EPSILON
    order = torch.from_numpy(np.concatenate([np.random.default_rng((3, epoch)).permutation(53) for epoch in range(3)]))
    total, warmup = math.ceil(2 * 53 / 16), round(0.5 * 53 / 16)
    for probe in probes:
        model, generator = Reference(12, 4, 5), torch.Generator().manual_seed(3)
        for weight in (model.query, model.key.weight, model.value.weight, model.linear.weight):
            nn.init.trunc_normal_(weight, std=DEVIATIONS["adamw"], generator=generator)
        nn.init.zeros_(model.linear.bias)
        decayed = [each for name, each in model.named_parameters() if name != "linear.bias"]
        descent = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": [model.linear.bias], "weight_decay": 0.0}],
            betas=BETAS,
        )
        for step in range(total):
            rows = order[16 * step : 16 * step + 16]
            share = (step + 1) / warmup if step < warmup else 0.5 * (
                1 + math.cos(math.pi * (step - warmup) / (total - warmup))
            )  # fmt: skip
            for group in descent.param_groups:
                group["lr"] = share * probe.learning_rate * 16 / 256
            descent.zero_grad()
            F.cross_entropy(model((raw[rows] - mean) / std), tokens.labels[rows]).backward()
            descent.step()
        with torch.no_grad():
            expected = model((raw - mean) / std)
        torch.testing.assert_close(probe.logits(raw), expected, rtol=1e-3, atol=1e-4)
        right = (expected.argmax(1) == tokens.labels).double().mean().item()
        assert probe.accuracy(tokens, batch_size=10) == pytest.approx(right)
    assert not torch.allclose(probes[0].weight, probes[1].weight, atol=1e-3)


def test_statistics_of_tokens_are_those_of_all_patches() -> None:
    tokens = stored(random(20, 7, 12) * 5 + 9, labels_of(20, 2))
    mean, std = tokens.statistics(batch_size=3)
    flat = tokens.values.reshape(-1, 12).double().numpy()
    np.testing.assert_allclose(mean, flat.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(std - EPSILON, flat.std(axis=0), rtol=1e-4)


def in_one_patch(count: int, seed: int) -> tuple[Features, Features]:
    """Return patch tokens, of which only a marked one at a random position shows the class, and their mean."""
    labels, values = labels_of(count, 4, seed), random(count, 9, 16, seed=seed)
    places = labels_of(count, 9, seed + 100)
    signs = 2.0 * (random(count, 9, 4, seed=seed + 200) > 0) - 1
    values[..., :4] = 3 * signs  # every patch shows a class, but their mean shows none
    values[torch.arange(count), places, :4] = 3 * (2.0 * F.one_hot(labels, 4) - 1)
    values[..., 4] = -2.0
    values[torch.arange(count), places, 4] = 2.0  # the mark
    return stored(values, labels), Features(values.mean(dim=1), labels)


@pytest.mark.slow
def test_an_attentive_probe_finds_the_class_in_one_patch_where_a_linear_probe_does_not() -> None:
    (train, train_means), (test, test_means) = in_one_patch(400, 0), in_one_patch(200, 1)
    attentive = train_probes(train, 4, heads=2, learning_rates=(0.03,), epochs=25, batch_size=100)
    linear = train_probes(train_means, 4, learning_rates=(0.01, 0.1, 1.0), epochs=25, batch_size=100)
    assert max(probe.accuracy(test) for probe in attentive) > 0.95
    assert max(probe.accuracy(test_means) for probe in linear) < 0.6


# The model of a probe

REFUSED = {"deit", "class_attention"}
QUICK = {*REFUSED, "registers_last", "clip", "mean_all", "map", "query", "representation"}


@pytest.mark.slow(quick=sorted(QUICK))
@pytest.mark.parametrize("kind", VARIATIONS)
def test_the_model_of_a_probe_computes_its_logits_from_tokens_of_every_kind(kind: str, tmp_path: Path) -> None:
    model: Any = randomize_(PlainViTForImageClassification(tiny_config(**VARIATIONS[kind]))).eval()
    if kind in REFUSED:
        with pytest.raises(TrainingError, match="The model cannot have an attentive probe: "):
            attentive_classifier(model)
        return
    classifier = attentive_classifier(model).eval()
    rows = [{"pixel_values": image} for image in pixels(5, 24, 56)]
    accelerator = Accelerator(cpu=True)
    write_tokens(model, DataLoader(rows, batch_size=2), accelerator, tmp_path / "tokens.npy", size=5)
    tokens = open_tokens(tmp_path / "tokens.npy", labels_of(5, 7))
    (probe,) = train_probes(tokens, 7, heads=attentive_heads(model), learning_rates=(0.5,), epochs=2, batch_size=5)
    use_probe(classifier, probe)
    with torch.no_grad():
        logits = classifier(pixels(5, 24, 56)).logits
        states = model.vit(pixels(5, 24, 56)).last_hidden_state
        exact = model.vit.tokens_to_map(states, 24, 56).flatten(2).transpose(1, 2)
    torch.testing.assert_close(logits, probe.logits(exact), rtol=1e-3, atol=1e-4 * logits.abs().max().item())
    # Batches of another size are summed in a different order, and rounded to 11 bits.
    np.testing.assert_allclose(tokens.values, exact, rtol=2**-10, atol=1e-4)


def test_tokens_that_float16_does_not_hold_and_missing_images_are_refused(tmp_path: Path) -> None:
    model: Any = randomize_(PlainViTForImageClassification(tiny_config(final_norm="after_pooling"))).eval()
    rows: Any = DataLoader([{"pixel_values": image} for image in pixels(3)], batch_size=2)
    accelerator, file = Accelerator(cpu=True), tmp_path / "tokens.npy"
    with pytest.raises(TrainingError, match="3 images were processed, but the split has 4"):
        write_tokens(model, rows, accelerator, file, size=4)
    with torch.no_grad():
        model.vit.layers[-1].mlp.fc2.bias.fill_(1e6)
    with pytest.raises(TrainingError, match="too large for float16"):
        write_tokens(model, rows, accelerator, file, size=3)
    assert not list(tmp_path.iterdir())


def test_models_of_others_have_no_attentive_probe() -> None:
    with pytest.raises(TrainingError, match="PlainViTModel: convert it with `plain-vit convert` first"):
        attentive_classifier(PlainViTModel(tiny_config()))


# The script


def arguments_of(model: Path, out: Path, *words: object) -> Any:
    needed = ["--model", model, "--dataset", "digits", "--output_dir", out, "--epochs", 2]
    return parse_arguments(script.ProbeArguments, [str(word) for word in (*needed, *words)], description=None)


@pytest.mark.slow
def test_the_script_votes_and_leaves_the_model_of_the_attentive_probe(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    rates = ("--learning_rates", 0.003, 0.03)
    first = script.probe(arguments_of(model_folder, out, "--mode", "attentive", *rates))
    monkeypatch.setattr(script.probing, "extract_features", None)
    monkeypatch.setattr(script.probing, "write_tokens", None)
    results = script.probe(arguments_of(model_folder, out, "--mode", "knn", "--neighbors", 1, 7))
    assert results["attentive"] == first["attentive"]
    assert list(results["knn"]) == ["1", "7"]
    assert all(0.3 < accuracy <= 1 for accuracy in results["knn"].values())
    again = script.probe(arguments_of(model_folder, out, "--mode", "attentive", *rates))
    assert again["attentive"] == first["attentive"]
    assert json.loads((out / "results.json").read_text()) == again

    model: Any = AutoModelForImageClassification.from_pretrained(out)
    assert model.config.pooling == "query"
    test = load_digits()["test"]
    inputs = AutoImageProcessor.from_pretrained(out)([image.convert("RGB") for image in test["image"][:]])
    with torch.no_grad():
        predicted = model(torch.stack(list(map(torch.as_tensor, inputs["pixel_values"])))).logits.argmax(dim=1)
    right = (predicted == torch.tensor(test["label"][:])).double().mean().item()
    assert right == pytest.approx(first["attentive"]["test_accuracy"], abs=1 / 360)  # tokens were rounded to float16


def test_the_script_refuses_images_of_many_shapes_before_their_features(model_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    PlainViTImageProcessor(patch_size=8, max_num_patches=12).save_pretrained(model)
    with pytest.raises(TrainingError, match="needs the same number of patches in every image"):
        script.probe(arguments_of(model, tmp_path / "out", "--mode", "attentive"))
    assert not (tmp_path / "out").exists()
