"""Gradients between backward pass and optimizer step: adaptive clipping and sharpness-aware steps."""

import copy

import pytest
import torch
from accelerate import Accelerator
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from plain_vit.errors import TrainingError
from plain_vit.training.arguments import LoopOptions
from plain_vit.training.gradients import clip_adaptively
from plain_vit.training.learner import Learner
from tests.training.runs import open_script, runs_in, small_vit, weights_of

script = open_script("finetune_image_classification")
SHORT = {"dataset": "digits", "shots_per_class": 4, "steps": 5, "batch_size": 12, "evaluations": 1, "log_every": 1,
         "optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0}  # fmt: skip


MATRICES = (
    *(f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")), "mlp.fc1", "mlp.fc2"
)  # fmt: skip


@pytest.fixture
def run(model_folder, tmp_path):
    return runs_in(tmp_path, model=model_folder, report=False, **SHORT)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0])
def test_adaptive_clipping_is_timm_s(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Flatten(), nn.Linear(30, 7), nn.LayerNorm(7))
    nn.init.zeros_(model[2].bias)
    model[2].weight.data[3] = 0
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    model[0].weight.grad[1] = 0
    other = copy.deepcopy(model)
    for parameter, same in zip(other.parameters(), model.parameters(), strict=True):
        parameter.grad = same.grad.clone()
    adaptive_clip_grad(other.parameters(), clip_factor=0.03)
    clip_adaptively(model.parameters(), 0.03)
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("clipping", [{"max_grad_norm": 0.3}, {"max_grad_norm": 0.01, "clip_mode": "agc"}], ids=str)
def test_the_norm_after_clipping_is_of_the_gradients_that_are_applied(clipping):
    options = LoopOptions(
        output_dir="run", optimizer="sgd", momentum=0.0, learning_rate=0.1, weight_decay=0.0, **clipping
    )
    model = small_vit(num_hidden_layers=2)
    learner = Learner(model, options, Accelerator(cpu=True))
    learner.prepare()
    before = copy.deepcopy(model)
    learner.measures_update = True
    learner.learn(loss := model(torch.randn(3, 3, 24, 16)).logits.square().sum(), closure=lambda: loss)
    moved = [(old - new).detach() for old, new in zip(before.parameters(), model.parameters(), strict=True)]
    applied = float(torch.cat([each.flatten() for each in moved]).norm()) / 0.1
    assert float(learner.clipped_norm) == pytest.approx(applied, rel=1e-4)
    assert applied < 0.5 * float(learner.grad_norm)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_update_ratios_compare_the_weights_of_each_group_before_and_after(optimizer):
    options = LoopOptions(output_dir="run", optimizer=optimizer, learning_rate=0.01, weight_decay=0.1)
    model = small_vit(num_hidden_layers=2)
    learner = Learner(model, options, Accelerator(cpu=True), layer_decay=0.5)
    learner.prepare()
    before, loss = copy.deepcopy(model.state_dict()), model(torch.randn(3, 3, 24, 16)).logits.square().sum()
    learner.measures_update = True
    learner.learn(loss, closure=lambda: loss)
    described = learner.describe_groups()
    matrices = [f"vit.layers.1.{name}.weight" for name in MATRICES]
    moved = [model.state_dict()[name] - before[name] for name in matrices]
    norms = [torch.cat([tensor.flatten() for tensor in each]).norm() for each in (moved, [before[n] for n in matrices])]
    name = "layer_2_decay_muon" if optimizer == "muon" else "layer_2_decay"
    assert described[f"update_ratio/{name}"] == pytest.approx(float(norms[0] / norms[1]), rel=1e-5)
    assert described[f"learning_rate/{name}"] == 0.01 * 0.5
    assert {"update_ratio/layer_0_no_decay", "update_ratio/layer_3_decay"} < described.keys()
    learner.measures_update = False
    learner.learn(loss := model(torch.randn(3, 3, 24, 16)).logits.sum(), closure=lambda: loss)
    assert not any("ratio" in name for name in learner.describe_groups())


@pytest.mark.slow
def test_adaptive_clipping_spares_the_head(run):
    free, clipped = (weights_of(run(name, steps=1, **options)) for name, options in (
        ("free", {"max_grad_norm": 0.0}), ("agc", {"clip_mode": "agc", "max_grad_norm": 1e-4}),
    ))  # fmt: skip
    assert torch.equal(free["classifier.weight"], clipped["classifier.weight"])
    second = weights_of(run("two", steps=2, clip_mode="agc", max_grad_norm=1e-4))
    moved = {name for name, tensor in second.items() if not torch.equal(tensor, clipped[name])}
    assert "vit.layers.0.mlp.fc1.weight" in moved
    norm = (second["vit.layers.0.mlp.fc1.weight"] - clipped["vit.layers.0.mlp.fc1.weight"]).norm(dim=1)
    assert (norm <= 0.1 * 1e-4 * clipped["vit.layers.0.mlp.fc1.weight"].norm(dim=1) * 1.001).all()


def test_a_sharpness_aware_step_follows_the_gradient_uphill(run):
    radius, rate = 0.3, 0.1
    options = {"steps": 2, "warmup_fraction": 0.0, "schedule": "constant", "max_grad_norm": 0.0, "learning_rate": rate,
               "label_smoothing": 0.0, "batch_size": 40}  # fmt: skip
    first = run("first", **{**options, "steps": 1}, sharpness_radius=radius)
    second = weights_of(run("second", **options, sharpness_radius=radius))
    model = script.load_classifier(str(first), [str(digit) for digit in range(10)])[0]
    model.load_state_dict(weights_of(first))
    data = script.open_data(script.FinetuneArguments(model="m", output_dir="o", dataset="digits", shots_per_class=4))
    processor = script.load_classifier(str(first), [str(digit) for digit in range(10)])[1]
    pixels = processor(data.train["image"][:], return_tensors="pt")["pixel_values"]
    labels = torch.tensor(data.train["label"][:])

    def gradients():
        loss = nn.functional.cross_entropy(model(pixels).logits, labels)
        return torch.autograd.grad(loss, list(model.parameters()))

    there = gradients()
    norm = torch.cat([gradient.flatten() for gradient in there]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), there, strict=True):
            parameter.add_(gradient * radius / norm)
    uphill = gradients()
    start = weights_of(first)
    for (name, _), gradient in zip(model.named_parameters(), uphill, strict=True):
        torch.testing.assert_close(second[name], start[name] - rate * gradient, rtol=1e-3, atol=2e-5)


def test_what_sharded_weights_and_scaled_gradients_do_not_allow_is_refused(run):
    for options, says in (
        ({"sharpness_radius": 0.1, "shard": True}, "sharpness_radius needs the whole weights"),
        ({"clip_mode": "agc", "mixed_precision": "fp16"}, "clip_mode agc does not know the scale"),
        ({"clip_mode": "agc", "max_grad_norm": 0.0}, "clip_mode has no effect"),
    ):
        with pytest.raises(TrainingError, match=says):
            run("refused", **options)
