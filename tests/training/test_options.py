"""The options of a training run by topic: recipes, losses, teachers, freezing, LoRA, sizes, memory."""

import copy
import dataclasses
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import PIL.Image
import pytest
import timm.loss
import torch
import yaml
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import (
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    get_scheduler,
)

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.errors import DataError, TrainingError
from plain_vit.initialization_plain_vit import INITIALIZATIONS
from plain_vit.training import optimization
from plain_vit.training.arguments import ClassifierOptions, Initialization, as_yaml, check_options, parse_arguments
from plain_vit.training.data.augmentation import input_size, training_transform
from plain_vit.training.hardware.memory import fitting_accumulation, training_trial
from plain_vit.training.learner import Learner
from plain_vit.training.losses import balancing_weights, classification_loss, distillation_loss
from plain_vit.training.models import (
    as_saved,
    head_of,
    load_classifier,
    load_teacher,
    set_head_bias,
    with_lora,
    with_processed_size,
)
from plain_vit.training.optimization import (
    OPTIMIZERS,
    freeze,
    freeze_unused,
    learning_rate_factor,
    make_optimizer,
    orthogonalised,
    scheduled_rate,
    train_mode,
)
from plain_vit.training.recipes import RECIPES, describe_recipes
from tests.conftest import randomize_
from tests.processes import run_forked
from tests.tiny import VARIATIONS, pixels, tiny_config
from tests.training.runs import RESNET, SMALL, open_script, small_vit

AllOptions = open_script("finetune_image_classification").FinetuneArguments
NEEDED = ["--model", "m", "--dataset", "d", "--output_dir", "o"]


def parse(*words: object) -> Any:
    return parse_arguments(AllOptions, [str(word) for word in words], description=None)


def save(model: nn.Module, folder: Path, **size: int) -> str:
    model.save_pretrained(folder)
    PlainViTImageProcessor(size=size or {"height": 24, "width": 16}).save_pretrained(folder)
    return str(folder)


# Recipes and layers of options


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_sets_options_that_exist_to_values_they_take(name):
    recipe = RECIPES[name]
    if recipe.script != "finetune_image_classification.py":
        with pytest.raises(TrainingError, match=f"is for examples/{recipe.script}"):
            parse(*NEEDED, "--recipe", name)
        return
    teacher = ["--teacher", "t"] if "distillation" in recipe.options else []
    arguments = parse(*NEEDED, *teacher, "--recipe", name)
    for option, value in recipe.options.items():
        assert getattr(arguments, option) == value
    check_options(arguments)


def test_recipe_is_overridden_by_what_is_given_wherever_it_is():
    arguments = parse("--learning_rate", 0.03, *NEEDED, "--recipe", "vit-cifar10", "--batch-size=64")
    assert (arguments.learning_rate, arguments.batch_size, arguments.momentum) == (0.03, 64, 0.9)
    assert arguments.recipe == ["vit-cifar10"]


def test_later_recipe_overrides_an_earlier_one():
    arguments = parse(*NEEDED, "--recipe", "vit-pretrain-imagenet", "augreg-strong1")
    assert (arguments.mixup, arguments.magnitude, arguments.weight_decay) == (0.5, 20, 0.3)


def test_epochs_take_the_place_of_the_steps_of_a_recipe_and_the_other_way_round():
    arguments = parse(*NEEDED, "--recipe", "vit-cifar10", "--epochs", 3, "--warmup_fraction", 0.5)
    assert (arguments.steps, arguments.epochs) == (None, 3)
    assert (arguments.warmup_steps, arguments.warmup_fraction) == (None, 0.5)
    assert parse(*NEEDED, "--recipe", "simplevit", "--steps", 9).epochs is None
    with pytest.raises(TrainingError, match="Both steps .9. and epochs .3."):
        check_options(parse(*NEEDED, "--steps", 9, "--epochs", 3))


@pytest.mark.parametrize(
    "words, message",
    [
        (("--steps", 0), "steps is 0: expected 1 or more"),
        (("--label_smoothing", 1.5), "label_smoothing is 1.5: expected 0 to 1"),
        (("--crop_scale", 0), "crop_scale is 0.0: expected a positive|crop_scale is 0: expected a positive"),
        (("--distillation", "hard"), "Without teacher, distillation has no effect"),
        (("--lora_targets", "fc1"), "Without lora_rank, lora_targets has no effect"),
        (("--repeated_augmentation", 0), "repeated_augmentation is 0: expected 1 or more"),
        (("--stream_images", 3), "Without streaming, stream_images has no effect"),
        (("--base_batch_size", 0), "base_batch_size is 0: expected 1 or more"),
        (("--min_learning_rate", 0.1), "min_learning_rate is 0.1, above the peak of 0.001"),
        (
            ("--min_learning_rate", 1e-5, "--schedule", "constant"),
            "With the schedule constant, min_learning_rate has no effect",
        ),
        (
            ("--min_learning_rate", 1e-5, "--schedule", "inverse_sqrt"),
            "With the schedule inverse_sqrt, min_learning_rate has no effect",
        ),
        (("--betas", 0.9), r"betas is \[0.9\]: expected two numbers from 0 to less than 1"),
        (("--betas", 0.9, 1.0), r"betas is \[0.9, 1.0\]: expected at least 0 and less than 1"),
        (("--epsilon", -0.5), "epsilon is -0.5: expected 0 or more"),
        (("--bce_target_threshold", 0.1), "With the loss cross_entropy, bce_target_threshold has no effect"),
        (("--mixup_probability", 0.5), "Without mixup or cutmix, mixup_probability has no effect"),
        (("--mixup", 0.2, "--switch_probability", 0.9), "Without both mixup and cutmix, switch_probability has no"),
        (("--mixup", 0.2, "--mixup_probability", 1.5), "mixup_probability is 1.5: expected 0 to 1"),
        (("--mixup_off_epoch", 3), "Without mixup or cutmix, mixup_off_epoch has no effect"),
        (("--test_crop", 0), "test_crop is 0.0: expected a positive"),
        (("--test_crop", 1.1), "test_crop is 1.1: expected a positive number up to 1"),
    ],
)
def test_numbers_that_cannot_be_and_options_without_effect_are_refused(words, message):
    check_options(parse(*NEEDED))
    with pytest.raises(TrainingError, match=message):
        check_options(parse(*NEEDED, *words))


def test_options_written_to_a_file_are_read_back_and_overridden(tmp_path):
    words = ["--image_size", 32, 48, "--recipe", "lora", "--resume", "--no_report", "--freeze", "2", "a.*"]
    first = parse(*NEEDED, *words)
    (tmp_path / "arguments.yaml").write_text(as_yaml(first))
    again = parse(tmp_path / "arguments.yaml")
    assert again == dataclasses.replace(first, resume=False)
    assert again.image_size == [32, 48]
    assert again.report is False
    changed = parse(tmp_path / "arguments.yaml", "--lora_rank", 3, "--recipe", "linear-probe", "--report")
    assert (changed.lora_rank, changed.optimizer, changed.freeze, changed.report) == (3, "sgd", ["backbone"], True)
    assert "resume" not in yaml.safe_load((tmp_path / "arguments.yaml").read_text())


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(TrainingError, match="no recipe 'vit-cifar': did you mean vit-cifar10 or vit-cifar100"):
        parse(*NEEDED, "--recipe", "vit-cifar")
    with pytest.raises(TrainingError, match="there are vit-imagenet, "):
        parse(*NEEDED, "--recipe", "zzz")


def test_list_of_recipes_says_what_each_is_with_its_published_result(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--list_recipes")
    assert not left.value.code
    printed = capsys.readouterr().out
    assert printed.strip() == describe_recipes()


def test_help_shows_the_groups_and_the_recipes(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    printed = capsys.readouterr().out
    for title in ("model:", "data:", "optimisation:", "augmentation:", "run:", "--list_recipes"):
        assert title in printed


# Losses


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_binary_loss_is_that_of_timm(smoothing):
    logits, labels = torch.randn(7, 5), torch.randint(5, (7,))
    theirs = timm.loss.BinaryCrossEntropy(smoothing=smoothing)(logits, labels)
    ours = classification_loss(logits, labels, kind="bce", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    soft = F.one_hot(labels, 5).float()
    torch.testing.assert_close(classification_loss(logits, soft, kind="bce", label_smoothing=smoothing), ours)


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
def test_targets_by_threshold_and_the_sum_over_classes_are_those_of_timm(threshold):
    logits, shares = torch.randn(7, 5), torch.eye(5)[torch.randint(5, (7,))].lerp(torch.eye(5)[:1].expand(7, 5), 0.3)
    assert ((shares > 0) & (shares < 1)).any()
    options = {"smoothing": 0.0, "target_threshold": threshold}
    for kind, sums in (("bce", False), ("bce_sum", True)):
        theirs = timm.loss.BinaryCrossEntropy(**options, sum_classes=sums)(logits, shares)
        ours = classification_loss(logits, shares, kind=kind, target_threshold=threshold)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    kept = timm.loss.BinaryCrossEntropy(smoothing=0.0)(logits, shares)
    assert (kept - classification_loss(logits, shares, kind="bce", target_threshold=threshold)).abs() > 1e-3


def test_soft_targets_weigh_the_losses_of_their_classes():
    logits, shares = torch.randn(7, 5), torch.rand(7, 5).softmax(dim=1)
    expected = sum(shares[:, k] @ F.cross_entropy(logits, torch.full((7,), k), reduction="none") for k in range(5)) / 7
    torch.testing.assert_close(classification_loss(logits, shares), expected)


@pytest.mark.parametrize("kind", ["cross_entropy", "bce"])
def test_balanced_loss_counts_every_class_equally_and_splits_into_parts(kind):
    labels = torch.tensor([0, 0, 0, 0, 0, 2, 2, 3])
    weights = balancing_weights(labels.tolist(), 4)
    assert weights[1] == 0
    by_class = torch.zeros(4).index_add_(0, labels, weights[labels])
    torch.testing.assert_close(by_class, torch.tensor([8 / 3, 0, 8 / 3, 8 / 3]))
    logits = torch.randn(8, 4)
    whole = classification_loss(logits, labels, kind=kind, class_weights=weights)
    means = [classification_loss(logits[labels == k], labels[labels == k], kind=kind) for k in (0, 2, 3)]
    torch.testing.assert_close(whole, torch.stack(means).mean())
    halves = [
        classification_loss(logits[half], labels[half], kind=kind, class_weights=weights)
        for half in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(torch.stack(halves).mean(), whole)
    soft = classification_loss(logits, F.one_hot(labels, 4).float(), kind=kind, class_weights=weights)
    torch.testing.assert_close(soft, whole)


def test_distillation_is_zero_for_the_teacher_itself_and_its_gradient_keeps_its_size():
    logits, teacher = torch.randn(6, 4), torch.randn(6, 4)
    assert distillation_loss(teacher, teacher, temperature=3.0).abs() < 1e-6
    shares = teacher.softmax(1)
    entropy = -(shares * teacher.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(distillation_loss(logits, teacher), F.cross_entropy(logits, shares) - entropy)
    hot = logits.clone().requires_grad_()
    distillation_loss(hot, teacher, temperature=1e3).backward()
    # At high temperature the loss is the squared distance of logits over 2 K^... (Hinton et al. 2015, section 2.1).
    expected = (logits - logits.mean(1, keepdim=True) - teacher + teacher.mean(1, keepdim=True)) / 4 / 6
    torch.testing.assert_close(hot.grad, expected, rtol=0, atol=1e-3)
    assert distillation_loss(logits, teacher, kind="hard") == F.cross_entropy(logits, teacher.argmax(1))


def test_teacher_answers_for_the_pixels_size_and_order_of_classes_of_the_student(tmp_path):
    model = small_vit(num_labels=3, image_size=24, id2label={0: "c", 1: "a", 2: "b"})
    model.save_pretrained(tmp_path)
    own = ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])
    own.save_pretrained(tmp_path)
    student = PlainViTImageProcessor(size={"height": 24, "width": 24}, image_mean=[0.5, 0.4, 0.3])
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))
    teacher = load_teacher(str(tmp_path), student, ["b", "a"], trust_remote_code=False).train()
    answers = teacher(student(image, return_tensors="pt")["pixel_values"])
    expected = model.eval()(own(image, return_tensors="pt")["pixel_values"]).logits[:, [2, 1]]
    torch.testing.assert_close(answers, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert teacher(torch.randn(1, 3, 16, 40)).shape == (1, 2)
    with pytest.raises(TrainingError, match="lacks the classes d"):
        load_teacher(str(tmp_path), student, ["a", "d"], trust_remote_code=False)
    model.config.id2label = {0: "a", 1: "a", 2: "b"}
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="'a' is the name of several classes of the model, 0 and 1"):
        load_teacher(str(tmp_path), student, ["a", "b"], trust_remote_code=False)
    model.vit.save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match="lacks classifier"):
        load_teacher(str(tmp_path), student, ["a", "b"], trust_remote_code=False)


# Optimizers and schedules


@pytest.mark.parametrize("name", [*OPTIMIZERS, "timm:lamb", "timm:lion"])
def test_every_optimizer_keeps_the_groups_and_moves_what_it_is_given(name):
    model = small_vit()
    freeze(model, ["vit.embeddings.*"], set())
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, name, learning_rate=0.01, weight_decay=0.1, layer_decay=0.5)
    assert {group["peak_lr"] for group in optimizer.param_groups} == {0.01 * 0.5**height for height in range(4)}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    for _ in range(2):
        model(torch.randn(2, 3, 24, 16), labels=torch.tensor([0, 3])).loss.backward()
        optimizer.step()
    unmoved = {key for key, tensor in model.state_dict().items() if torch.equal(tensor, before[key])}
    assert {key for key in unmoved if "k_proj.bias" not in key} == {key for key in before if "embeddings" in key}


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_the_logits_of_a_plain_vit_depend_on_every_parameter(name):
    """With an unused parameter, several processes would wait for its gradient."""
    model = randomize_(PlainViTForImageClassification(tiny_config(**{**VARIATIONS[name], "use_mask_token": False})))
    freeze_unused(model, {"pixel_values": pixels()[:1]})
    assert all(parameter.requires_grad for parameter in model.parameters())
    freeze(model, ["*"], head_of(model))
    freeze_unused(model, {"pixel_values": pixels()[:1]})  # the optimizer raises an error about it
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_unknown_optimizers_are_refused():
    with pytest.raises(TrainingError, match="no optimizer 'adan': expected one of adamw"):
        make_optimizer(small_vit(), "adan", learning_rate=0.1)
    with pytest.raises(TrainingError, match="timm has no optimizer 'nothing'"):
        make_optimizer(small_vit(), "timm:nothing", learning_rate=0.1)
    with pytest.raises(TrainingError, match="timm:adahessian needs second derivatives"):
        make_optimizer(small_vit(), "timm:adahessian", learning_rate=0.1)


def test_optimizer_of_timm_without_timm_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(TrainingError, match="needs timm: install it"):
        make_optimizer(small_vit(), "timm:lamb", learning_rate=0.1)


def test_muon_makes_the_steps_of_its_formulas_and_of_adamw_and_goes_on_from_its_state(monkeypatch):
    monkeypatch.setattr(optimization, "TOGETHER", 5)
    model, other = small_vit(pooling="map"), small_vit(pooling="map")
    other.load_state_dict(model.state_dict())
    kernels = {name for name in other.state_dict() if re.search(r"\.layers\..*(_proj|fc.)\.weight$", name)}
    assert len(kernels) == 3 * 6
    rest = {name: parameter for name, parameter in other.named_parameters() if name not in kernels}
    decays = [name.endswith("weight") and rest[name].ndim >= 2 and "position" not in name for name in rest]
    groups = [
        {"params": [each], "weight_decay": 0.3 * decay} for each, decay in zip(rest.values(), decays, strict=True)
    ]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.97), eps=1e-6, fused=True)
    momenta = {name: torch.zeros(other.state_dict()[name].shape, dtype=torch.float64) for name in kernels}
    weights = {name: other.state_dict()[name].double() for name in kernels}
    optimizer = make_optimizer(model, "muon", learning_rate=0.02, weight_decay=0.3, betas=[0.8, 0.97], epsilon=1e-6)
    for step in range(5):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            if name not in kernels:
                rest[name].grad = parameter.grad.clone()
                continue
            gradient = parameter.grad.double()
            momenta[name] = 0.9 * momenta[name] + 0.1 * gradient
            left, values, right = torch.linalg.svd(0.9 * momenta[name] + 0.1 * gradient, full_matrices=False)
            values = values / values.norm()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            moved = 0.02 * 0.2 * max(gradient.shape) ** 0.5 * (left * values @ right)
            weights[name] = weights[name] * (1 - 0.02 * 0.3) - moved
        optimizer.step()
        adamw.step()
        for name, parameter in model.named_parameters():
            if name in kernels:
                assert (parameter - weights[name]).abs().max() < 1e-6 * (step + 1), name  # steps have a size of 0.005
            else:
                assert torch.equal(parameter, rest[name]), name
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make_optimizer(model, "muon", learning_rate=1.0, weight_decay=0.7)
            optimizer.load_state_dict(state)


def test_steps_of_muon_do_not_enlarge_the_rounding_of_gradients():
    torch.manual_seed(0)
    for shape in ((3, 24, 40), (2, 60, 36)):
        matrices = torch.randn(shape) @ torch.diag_embed(torch.logspace(0, -1, shape[-1]))
        rounded = matrices + 1e-7 * matrices.abs().max() * torch.randn(shape)  # like sums in a different order
        steps, others = map(orthogonalised, (matrices, rounded))
        assert steps.dtype == torch.float32
        assert (steps - others).abs().max() < 1e-5 * steps.abs().max()


def test_muon_makes_the_steps_of_torch():
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Sequential(nn.Linear(20, 12, bias=False), nn.Linear(12, 20, bias=False)))
    other = copy.deepcopy(stack)
    model = nn.Module()
    model.blocks = stack
    matrices = [*other.parameters()]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    optimizer = make_optimizer(model, "muon", learning_rate=0.02, weight_decay=0.3)
    for _ in range(5):
        for ours, theirs in zip(stack.parameters(), matrices, strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        optimizer.step()
        muon.step()
    for ours, theirs in zip(stack.parameters(), matrices, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.002)  # bfloat16; five steps of 0.02


@pytest.mark.slow
def test_optimizers_of_sharded_weights_make_the_steps_of_whole_ones_or_are_refused(tmp_path):
    names = [*OPTIMIZERS, "timm:lamb", "timm:lion", "timm:muon", "timm:mars", "timm:novograd"]
    printed = run_forked(["-m", "tests.training.sharded_optimizers", str(tmp_path), *names], 2)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    results = {line.pop("optimizer"): line for line in lines}
    assert results.keys() == set(names)
    for name, result in results.items():
        if "refused" in result:  # later releases may have fixed these
            assert name in ("adafactor", "timm:mars", "timm:novograd")
            assert "does not work with sharded weights" in result["refused"]
        else:
            # timm's version multiplies in bfloat16, and splits tall matrices.
            assert result["difference"] < (0.05 if name == "timm:muon" else 1e-5), name


def test_muon_without_matrices_is_refused():
    model = small_vit()
    freeze(model, ["backbone"], set(head_of(model)))
    with pytest.raises(TrainingError, match="none of them is trained: use adamw"):
        make_optimizer(model, "muon", learning_rate=0.1)


def test_learning_rate_scales_with_the_batch_and_ends_at_its_minimum():
    words = [*NEEDED, "--batch_size", 96, "--base_batch_size", 256, "--learning_rate", 0.01]
    least = 1e-4 * 96 / 256
    options = parse(*words, "--min_learning_rate", 1e-4)
    assert options.lowest_learning_rate == pytest.approx(least)
    assert parse(*NEEDED, "--batch_size", 96, "--min_learning_rate", 1e-4).lowest_learning_rate == 1e-4
    assert options.peak_learning_rate == pytest.approx(0.01 * 96 / 256)
    assert parse(*NEEDED, "--batch_size", 96, "--learning_rate", 0.01).peak_learning_rate == 0.01
    learner = Learner(small_vit(), options, Accelerator(cpu=True), layer_decay=0.5)
    assert max(group["peak_lr"] for group in learner.optimizer.param_groups) == options.peak_learning_rate
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=options.peak_learning_rate), 20, eta_min=least
    )
    for step in range(3, 24):
        rate = scheduled_rate(options, step, total=23, warmup=3) * options.peak_learning_rate
        assert rate == pytest.approx(reference.get_last_lr()[0], rel=1e-6)
        reference.optimizer.step()
        reference.step()
    assert scheduled_rate(options, 1, total=23, warmup=3) == 2 / 3
    linear = parse(*words, "--min_learning_rate", 1e-4, "--schedule", "linear")
    halfway = scheduled_rate(linear, 13, total=23, warmup=3) * options.peak_learning_rate
    assert halfway == pytest.approx((least + options.peak_learning_rate) / 2)


@pytest.mark.parametrize("name", ["adamw", "adam", "nadam", "radam", "adamax", "timm:lamb", "timm:adamp"])
def test_betas_and_epsilon_reach_the_optimizer(name):
    optimizer = make_optimizer(small_vit(), name, learning_rate=0.01, betas=[0.8, 0.97], epsilon=3e-5)
    for group in optimizer.param_groups:
        assert tuple(group["betas"]) == (0.8, 0.97)
        assert group["eps"] == 3e-5


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("sgd", {"betas": [0.9, 0.99]}, "optimizer sgd does not take the option betas"),
        ("sgd", {"epsilon": 1e-8}, "optimizer sgd does not take the option epsilon"),
        ("adafactor", {"epsilon": 1e-8}, "optimizer adafactor does not take the option epsilon"),
        ("rmsprop", {"betas": [0.9, 0.99]}, "optimizer rmsprop does not take the option betas"),
        ("timm:sgd", {"betas": [0.9, 0.99]}, "optimizer timm:sgd does not take the option betas"),
        ("timm:lion", {"epsilon": 1e-8}, "optimizer timm:lion does not take"),
    ],
)
def test_optimizers_without_betas_or_epsilon_refuse_them(name, options, message):
    with pytest.raises(TrainingError, match=message):
        make_optimizer(small_vit(), name, learning_rate=0.01, **options)
    assert make_optimizer(small_vit(), "rmsprop", learning_rate=0.01, epsilon=1e-3).defaults["eps"] == 1e-3


def test_new_weights_are_drawn_as_asked(tmp_path):
    config = small_vit(num_hidden_layers=1).config
    folder = save(PlainViTForImageClassification(config), tmp_path / "plain")
    deviation = {}
    for name in (None, *get_args(Initialization)):
        model, _ = load_classifier(folder, ["a", "b"], from_scratch=True, initialization=name)
        assert model.config.initialization == (name or "transformers")
        deviation[name] = model.vit.embeddings.position_embeddings.weight.std().item()
    assert deviation == pytest.approx(
        {None: 0.02, "transformers": 0.02, "timm": 0.02, "google": 0.02, "vit_pytorch": 1.0}, rel=0.3
    )
    masked = open_script("pretrain")
    words = [*NEEDED, "--model", folder, "--from_scratch", "--initialization", "vit_pytorch"]
    options = parse_arguments(masked.PretrainArguments, words, description=None)
    model = masked.METHODS["masked_patches"](options, masked.open_encoder(options)).module.model
    assert model.vit.embeddings.position_embeddings.weight.std() > 0.7
    google, _ = load_classifier(folder, ["a", "b"], from_scratch=True, initialization="google")
    assert not google.vit.embeddings.cls_token.any()
    stock = ViTForImageClassification(ViTConfig(**SMALL, image_size=(24, 16), patch_size=8))
    with pytest.raises(TrainingError, match="ViTConfig has no field initialization: omit the option"):
        load_classifier(save(stock, tmp_path / "stock"), ["a"], from_scratch=True, initialization="google")
    with pytest.raises(TrainingError, match="Without from_scratch, initialization has no effect"):
        check_options(parse(*NEEDED, "--initialization", "google"))


@pytest.mark.parametrize("stock", [False, True], ids=["plain-vit", "stock ViT"])
def test_head_is_kept_for_the_same_classes_in_any_order(stock, tmp_path):
    sizes: dict[str, Any] = {"image_size": (24, 16), "patch_size": 8, "num_labels": 3}
    model: Any = ViTForImageClassification(ViTConfig(**SMALL, **sizes)) if stock else small_vit(**sizes)
    model.config.id2label = {0: "cat", 1: "dog", 2: "emu"}
    folder = save(randomize_(model), tmp_path / "model")
    images = torch.randn(2, 3, 24, 16)
    kept, _ = load_classifier(folder, ["emu", "cat", "dog"], keep_head=True)
    assert torch.equal(kept.eval()(images).logits, model.eval()(images).logits[:, [2, 0, 1]])
    assert kept.config.id2label == {0: "emu", 1: "cat", 2: "dog"}
    new, _ = load_classifier(folder, ["emu", "cat", "dog"])
    assert not new.eval()(images).logits.any()
    for names in (["emu", "cat"], ["emu", "cat", "cow"]):
        with pytest.raises(TrainingError, match=r"The head is for 3 classes \('cat', 'dog', 'emu'\), the data have"):
            load_classifier(folder, names, keep_head=True)
    for options in (["--from_scratch"], ["--head_bias", "-3"]):
        with pytest.raises(TrainingError, match="is for a new head: omit it, or keep_head"):
            check_options(parse(*NEEDED, "--keep_head", *options))


def test_initializations_are_those_of_the_config():
    assert set(get_args(Initialization)) == set(INITIALIZATIONS)


@pytest.mark.parametrize("kind", ["plain", "resnet", "two heads"])
def test_head_starts_with_the_bias_that_is_given(kind, tmp_path):
    model = {
        "plain": small_vit,
        "resnet": lambda: ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=5)),
        "two heads": lambda: DeiTForImageClassificationWithTeacher(
            DeiTConfig(**SMALL, image_size=24, patch_size=8, num_labels=5)
        ),
    }[kind]()
    before = copy.deepcopy(model.state_dict())
    set_head_bias(model, -6.9)
    head = head_of(model)
    for name, tensor in model.state_dict().items():
        biased = name in head and tensor.ndim == 1
        assert torch.equal(tensor, torch.full_like(tensor, -6.9) if biased else before[name])
    assert [name for name in head if model.state_dict()[name].ndim == 1]


@pytest.mark.parametrize("warmup", [5, 0])
def test_inverse_root_schedule_is_that_of_transformers_after_the_warmup(warmup):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = get_scheduler(
        "inverse_sqrt", optimizer, num_warmup_steps=warmup, scheduler_specific_kwargs={"timescale": warmup or 10_000}
    )
    for step in range(23):
        if step >= warmup:
            factor = learning_rate_factor(step, total=23, warmup=warmup, schedule="inverse_sqrt")
            assert factor == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()
    assert learning_rate_factor(20, total=99, warmup=5, schedule="inverse_sqrt") == 0.5


# Freezing


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_freezing_leaves_the_head_or_the_upper_blocks_or_what_no_pattern_names():
    model = small_vit()
    names = trained(model)
    freeze(model, ["backbone"], head_of(model))
    assert trained(model) == {"classifier.weight", "classifier.bias"}

    model = small_vit()
    freeze(model, ["2"], head_of(model))
    left = {name for name in names if "embeddings" not in name and ".0." not in name and ".1." not in name}
    assert trained(model) == left
    assert any(".2." in name for name in left)

    model = small_vit()
    freeze(model, ["*.mlp.*", "vit.embeddings.cls_token"], head_of(model))
    assert trained(model) == {name for name in names if ".mlp." not in name and "cls_token" not in name}


def test_impossible_freezing_is_refused():
    with pytest.raises(TrainingError, match="4 blocks cannot be frozen: the model has 3"):
        freeze(small_vit(), ["4"], set())
    with pytest.raises(TrainingError, match="No parameter matches --freeze vit.blocks"):
        freeze(small_vit(), ["vit.blocks"], set())
    model = small_vit()
    freeze(model, ["*"], set())
    with pytest.raises(TrainingError, match="Every parameter of the model is frozen"):
        make_optimizer(model, "adamw", learning_rate=0.1)


def test_what_is_frozen_keeps_its_statistics_and_drops_nothing():
    model = ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=5))
    randomize_(model)
    freeze(model, ["backbone"], head_of(model))
    before = copy.deepcopy(model.state_dict())
    train_mode(model)
    model(torch.randn(4, 3, 24, 24))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    vit = small_vit(hidden_dropout_prob=0.5)
    freeze(vit, ["1"], head_of(vit))
    train_mode(vit)
    modes = {name: module.training for name, module in vit.named_modules() if isinstance(module, nn.Dropout)}
    assert not any(mode for name, mode in modes.items() if "embeddings" in name or ".0." in name)
    assert all(mode for name, mode in modes.items() if ".1." in name or ".2." in name)
    assert any(".1." in name for name in modes)


# LoRA


@pytest.mark.parametrize("stock", [False, True], ids=["plain-vit", "stock ViT"])
def test_low_rank_additions_are_trained_with_the_head_alone_and_saved_as_plain_weights(stock):
    source = ViTForImageClassification(ViTConfig(**SMALL, image_size=16, patch_size=8)) if stock else small_vit()
    randomize_(source).eval()
    size = (16, 16) if stock else (24, 16)
    original = copy.deepcopy(source)
    model = with_lora(source, rank=2, alpha=3, targets=None, head=head_of(source))
    assert all("lora" in name or "classifier" in name for name in trained(model))
    assert len({name.split(".lora")[0] for name in trained(model) if "lora" in name}) == 2 * 3
    pixels = torch.randn(2, 3, *size)
    assert torch.equal(model(pixels).logits, original(pixels).logits), "fresh additions add nothing"
    optimizer = make_optimizer(model, "adamw", learning_rate=0.1, layer_decay=0.5)
    model(pixels, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    merged = as_saved(model).eval()
    assert type(merged) is type(original)
    assert merged.state_dict().keys() == original.state_dict().keys()
    changed = {
        name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, original.state_dict()[name])
    }
    assert len([name for name in changed if "classifier" not in name]) == 2 * 3
    expected = model.eval()(pixels).logits
    assert (merged(pixels).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert as_saved(original) is original


def test_layers_for_additions_must_be_there():
    with pytest.raises(TrainingError, match="no layers nothing: give some of classifier, fc1, fc2, k_proj"):
        with_lora(small_vit(), rank=2, alpha=1, targets=["nothing"], head={"classifier.weight"})
    resnet = ResNetForImageClassification(ResNetConfig(**RESNET))
    with pytest.raises(TrainingError, match="no layers q or q_proj or query"):
        with_lora(resnet, rank=2, alpha=1, targets=None, head={"classifier.1.weight"})


# Sizes


def test_another_size_resamples_the_positions_once_and_prepares_images_of_it(tmp_path):
    source = save(small_vit(num_register_tokens=2), tmp_path)
    native, _ = load_classifier(source, ["a", "b"])
    model, processor = load_classifier(source, ["a", "b"], image_size=(32, 48))
    assert model.config.image_size == (32, 48)
    assert input_size(processor) == (32, 48)
    pixels = torch.randn(2, 3, 32, 48)
    native.eval(), model.eval()
    assert torch.equal(model.vit(pixels).last_hidden_state, native.vit(pixels).last_hidden_state)
    assert model.vit.embeddings.position_embeddings.weight.shape == (3 + 4 * 6, 12)
    with pytest.raises(TrainingError, match="not a multiple of patch_size"):
        load_classifier(source, ["a", "b"], image_size=(33, 48))


def test_another_size_keeps_the_share_that_a_crop_leaves_out():
    crop = {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
    changed = with_processed_size(PlainViTImageProcessor(size={"shortest_edge": 256}, **crop), (384, 384))
    assert dict(changed.crop_size) == {"height": 384, "width": 384}
    assert changed.size["shortest_edge"] == round(256 * 384 / 224)
    with pytest.raises(TrainingError, match="shorter edge to 256"):
        with_processed_size(PlainViTImageProcessor(size={"shortest_edge": 256}, **crop), (384, 224))


def test_another_size_of_a_network_without_positions_changes_its_images_alone(tmp_path):
    randomize_(ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=5))).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    _, processor = load_classifier(str(tmp_path), ["a", "b"], image_size=(32, 40))
    assert input_size(processor) == (32, 40)


def test_another_size_of_a_stock_vit_asks_for_its_conversion(tmp_path):
    ViTForImageClassification(ViTConfig(**SMALL, image_size=16, patch_size=8)).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match="plain-vit convert"):
        load_classifier(str(tmp_path), ["a", "b"], image_size=(24, 24))


@pytest.mark.parametrize("from_scratch", [False, True])
def test_dropout_and_stochastic_depth_are_set_at_load(from_scratch, tmp_path):
    source = save(small_vit(), tmp_path)
    model, _ = load_classifier(
        source, ["a", "b"], from_scratch=from_scratch, hidden_dropout_prob=0.25, drop_path_rate=0.5
    )
    assert (model.config.hidden_dropout_prob, model.config.drop_path_rate) == (0.25, 0.5)
    assert {module.p for module in model.vit.layers.modules() if isinstance(module, nn.Dropout)} >= {0.25}
    with pytest.raises(TrainingError, match="drop_path_rate is 1.5"):
        load_classifier(source, ["a", "b"], drop_path_rate=1.5)
    ResNetForImageClassification(ResNetConfig(**RESNET)).save_pretrained(tmp_path / "resnet")
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "resnet")
    with pytest.raises(TrainingError, match="ResNetConfig has no field hidden_dropout_prob"):
        load_classifier(str(tmp_path / "resnet"), ["a", "b"], hidden_dropout_prob=0.1)


# Images


def test_crop_out_of_a_larger_image_shows_a_part_at_its_scale():
    image = PIL.Image.fromarray((np.arange(48 * 48) % 251).astype(np.uint8).reshape(48, 48)).convert("RGB")
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16}, do_normalize=False)
    seen = [training_transform(processor, resize_to=48)(image) for _ in range(5)]
    whole = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    windows = whole.unfold(1, 24, 1).unfold(2, 16, 1)  # C, positions down, positions across, 24, 16
    for crop in seen:
        distance = (windows - crop[:, None, None]).abs().amax(dim=(0, 3, 4))
        assert distance.min() < 1e-6
    assert len({crop.numpy().tobytes() for crop in seen}) > 1


def test_number_of_augmentation_layers_and_three_augment_take_effect():
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 16, 3), dtype=np.uint8))
    processor = PlainViTImageProcessor(size={"height": 24, "width": 16})
    plain = training_transform(processor)(image)
    none = training_transform(processor, augmentation="randaugment", augmentation_layers=0)(image)
    assert torch.equal(none, plain)
    some = [training_transform(processor, augmentation="randaugment", augmentation_layers=3)(image) for _ in range(3)]
    three = [training_transform(processor, augmentation="threeaugment")(image) for _ in range(5)]
    assert not any(torch.equal(pixels, plain) for pixels in (*some, *three))
    assert all(pixels.shape == (3, 24, 16) and pixels.min() >= -1 and pixels.max() <= 1 for pixels in three)


# Memory


class Limited(nn.Module):
    """Run out of memory with more than a number of images, like a GPU."""

    def __init__(self, limit: int, model: nn.Module) -> None:
        super().__init__()
        self.limit, self.model = limit, model
        self.seen: list[int] = []

    def forward(self, pixel_values: torch.Tensor) -> object:
        self.seen.append(len(pixel_values))
        if len(pixel_values) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.model(pixel_values)


PAGES_OF_STEPS = """
import resource, sys, torch
from plain_vit.system.calls import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "kept" else True
def step():
    for size in (20, 10, 30, 5):
        torch.ones(2**20 * size)  # 20 to 120 MiB
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(), step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be set to keep memory")
def test_memory_that_a_step_freed_is_used_again_by_the_next_one(tmp_path):
    (tmp_path / "program.py").write_text(PAGES_OF_STEPS)
    pages = {}
    for how in ("kept", "given back"):
        kept, count = run_forked([str(tmp_path / "program.py"), how]).split()
        assert kept == "True"
        pages[how] = int(count)
    assert pages["kept"] < 0.05 * pages["given back"]
    assert pages["given back"] > 2 * 250 * 2**20 / 2**21  # in pages of 4 kB or of 2 MB


def noise(images):
    return {"pixel_values": torch.randn(images, 3, 24, 16)}


@pytest.mark.slow(quick=["99-1-1-tried0"])
@pytest.mark.parametrize(
    "limit, at_least, parts, tried", [(99, 1, 1, [12]), (5, 1, 3, [12, 6, 4]), (1, 4, 12, [3, 2, 1])]
)
def test_largest_micro_batch_that_fits_is_found_and_nothing_is_changed(limit, at_least, parts, tried):
    resnet = randomize_(ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=5))).train()
    model, accelerator = Limited(limit, resnet), Accelerator(cpu=True)
    before = copy.deepcopy(model.state_dict())
    trial = training_trial(model, accelerator, noise)
    assert fitting_accumulation(trial, accelerator, images=12, at_least=at_least) == parts
    assert model.seen == tried
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_other_errors_than_memory_are_not_taken_for_it_and_no_image_at_all_is_refused():
    accelerator = Accelerator(cpu=True)
    trial = training_trial(Limited(0, small_vit()), accelerator, noise)
    with pytest.raises(TrainingError, match="Not even one image fits"):
        fitting_accumulation(trial, accelerator, images=4)
    wrong = training_trial(small_vit(num_channels=1), accelerator, noise)
    with pytest.raises(ValueError, match="expected .batch, 1, height"):
        fitting_accumulation(wrong, accelerator, images=4)


def test_only_the_learning_rate_may_be_found_automatically():
    where = {"model": "model", "dataset": "digits", "output_dir": "run"}
    assert ClassifierOptions(**where, learning_rate="auto").learning_rate == "auto"
    with pytest.raises(TypeError):
        ClassifierOptions(**where, batch_size="auto")
