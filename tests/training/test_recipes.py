"""Every recipe has the values of its source, which are listed here as in the source."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torchvision.models import VisionTransformer

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.conversion import from_module
from plain_vit.training.arguments import TransformOptions, as_yaml, check_options, keywords, parse_arguments
from plain_vit.training.data.augmentation import training_transform
from plain_vit.training.recipes import RECIPES, describe_recipes
from tests.sizes import NIGHTLY
from tests.training.runs import open_script

FINETUNE = open_script("finetune_image_classification").FinetuneArguments
PROBE = open_script("linear_probe").ProbeArguments
PRETRAIN = open_script("pretrain").PretrainArguments
NEEDED = ["--model", "m", "--dataset", "d", "--output_dir", "o"]

# Values by their names in the sources. `batch` is the product of images per process, processes, nodes and accumulation.
# `lr` is the learning rate passed to the optimizer, after the source's own scaling with the batch size. `wd` is the
# decay as torch's AdamW defines it. `aa` is the augmentation in the notation of timm or big_vision.

# facebookresearch/deit: defaults of main.py, then the commands of README_deit.md.
DEIT = {
    "opt": "adamw", "eps": 1e-8, "clip": 0, "sched": "cosine", "smoothing": 0.1, "drop_path": 0.1, "min_lr": 1e-5,
    "warmup_epochs": 5, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25, "remode": "pixel", "mixup": 0.8, "cutmix": 1.0,
    "repeats": 3, "crop": 0.08, "eval_crop": 0.875, "loss": "cross_entropy", "betas": (0.9, 0.999),
}  # fmt: skip
# README_revenge.md. FusedLAMB of apex clips at 1.
DEIT3 = {
    **DEIT, "opt": "timm:lamb", "clip": 1, "smoothing": 0.0, "aa": "3a", "reprob": 0.0, "loss": "bce .gt(0)",
    "batch": 2048, "epochs": 800, "wd": 0.05, "eval_crop": 1.0,
}  # fmt: skip
DEIT3_FINETUNING = {
    **DEIT, "batch": 64 * 8, "lr": 1e-5, "epochs": 20, "wd": 0.1, "reprob": 0.0, "repeats": 1, "eval_crop": 1.0,
}  # fmt: skip
DEIT3_21K = {
    **DEIT3, "lr": 0.001, "epochs": 240, "wd": 0.02, "smoothing": 0.1, "mixup": 0, "repeats": 1, "crop": "src",
    "loss": "cross_entropy",
}  # fmt: skip
DEIT3_21K_FINETUNING = {**DEIT3_21K, "lr": 0.0003, "epochs": 50, "size": 224}
# facebookresearch/mae: defaults of main_finetune.py, then the commands of FINETUNE.md; lr = blr * batch / 256.
MAE = {
    **DEIT, "min_lr": 1e-6, "repeats": 1, "size": 224, "batch": 32 * 4 * 8, "wd": 0.05,
}  # fmt: skip
# microsoft/unilm: defaults of beit/run_class_finetuning.py, then the commands of its documentation.
BEIT = {**MAE, "batch": 1024}
BEIT_22K = {**BEIT, "batch": 512, "lr": 2e-5, "wd": 1e-8, "epochs": 30, "mixup": 0, "cutmix": 0}
# google-research/vision_transformer: vit_jax/configs/common.py, and Table 4 of the paper.
VIT = {
    "opt": "sgd", "momentum": 0.9, "batch": 512, "lr": 0.01, "wd": 0, "clip": 1, "sched": "cosine", "smoothing": 0,
    "warmup_steps": 500, "size": 384, "crop": 0.05, "aa": "", "mixup": 0, "cutmix": 0, "repeats": 1, "reprob": 0,
    "loss": "cross_entropy", "min_lr": 0,
}  # fmt: skip
# Table 3.
VIT_PRETRAINING = {**VIT, "opt": "adamw", "batch": 4096, "warmup_steps": 10_000, "size": 224, "dropout": 0.1}
# google-research/big_vision: big_vision/configs. wd is config.wd / config.lr.
BIG_VISION = {
    **VIT, "opt": "adamw", "batch": 4096, "lr": 0.001, "wd": 0.0001 / 0.001, "warmup_steps": 10_000, "size": 224,
    "eval_crop": 224 / 256, "epochs": 300, "loss": "sigmoid_xent",
}  # fmt: skip
# google-research/big_vision: big_vision/configs/transfer.py, and the rows of its docstring.
TRANSFER = {**VIT, "eval_crop": 384 / 448}
# pytorch/vision: references/classification/README.md and the defaults of train.py. A decay of .99998 is adjusted by
# batch * 32 steps / epochs; its 32nd root is the decay of one step.
TORCHVISION = {
    "opt": "adamw", "eps": 1e-8, "betas": (0.9, 0.999), "batch": 8 * 512, "epochs": 300, "lr": 0.003, "wd": 0.3,
    "clip": 1, "sched": "cosine", "warmup_epochs": 30, "smoothing": 0.11, "mixup": 0.2, "cutmix": 1.0, "repeats": 3,
    "size": 224, "crop": 0.08, "eval_crop": 224 / 256, "reprob": 0, "loss": "cross_entropy", "min_lr": 0,
    "ema": (1 - (1 - 0.99998) * 8 * 512 * 32 / 300) ** (1 / 32),
}  # fmt: skip

SOURCES: dict[str, dict[str, Any]] = {
    "vit-imagenet": {**VIT, "steps": 20_000},
    "vit-imagenet-512": {**VIT, "steps": 20_000, "size": 512, "ema": 0.9999},
    "vit-imagenet-518": {**VIT, "steps": 20_000, "size": 518, "ema": 0.9999},
    "vit-cifar10": {**VIT, "steps": 10_000},
    "vit-cifar100": {**VIT, "steps": 10_000},
    "vit-pets": {**VIT, "steps": 500, "warmup_steps": 100},
    "vit-flowers": {**VIT, "steps": 500, "warmup_steps": 100},
    "vit-vtab": {**VIT, "steps": 2500, "crop": None, "flip": 0},
    "vit-pretrain-imagenet": {**VIT_PRETRAINING, "epochs": 300, "lr": 3e-3, "wd": 0.3},
    "vit-pretrain-imagenet21k": {
        **VIT_PRETRAINING, "epochs": 90, "lr": 1e-3, "wd": 0.03, "clip": 0, "sched": "linear",
    },
    "augreg-pretrain-imagenet": {**BIG_VISION, "head_bias": -6.9, "aa": "randaug(2,15)", "mixup": 0.5},
    "augreg-pretrain-imagenet21k": {**BIG_VISION, "head_bias": -10.0, "aa": "randaug(2,10)", "mixup": 0.2},
    "augreg-finetune": {**VIT, "steps": 500, "warmup_steps": 100, "lr": 0.03},
    "augreg-finetune-imagenet": {**VIT, "steps": 20_000, "lr": 0.03},
    "augreg-transfer-imagenet": {**TRANSFER, "steps": 20_000, "lr": 0.03},
    "augreg-transfer-cifar10": {**TRANSFER, "steps": 10_000, "lr": 0.003, "crop": 448},
    "augreg-transfer-cifar100": {**TRANSFER, "steps": 10_000, "lr": 0.01, "crop": 448},
    "augreg-transfer-pets": {**TRANSFER, "steps": 500, "warmup_steps": 100, "lr": 0.003},
    "augreg-transfer-flowers": {**TRANSFER, "steps": 500, "warmup_steps": 100, "lr": 0.003},
    "augreg-none": {"aa": "", "mixup": 0},
    "augreg-light1": {"aa": "randaug(2,0)", "mixup": 0},
    "augreg-light2": {"aa": "randaug(2,10)", "mixup": 0.2},
    "augreg-medium1": {"aa": "randaug(2,15)", "mixup": 0.2},
    "augreg-medium2": {"aa": "randaug(2,15)", "mixup": 0.5},
    "augreg-strong1": {"aa": "randaug(2,20)", "mixup": 0.5},
    "augreg-strong2": {"aa": "randaug(2,20)", "mixup": 0.8},
    "simplevit": {
        **BIG_VISION, "batch": 1024, "epochs": 90, "aa": "randaug(2,10)", "mixup": 0.2, "loss": "cross_entropy",
    },
    "deit": {**DEIT, "batch": 64 * 8 * 2, "lr": 5e-4 * 1024 / 512, "wd": 0.05, "epochs": 300, "size": 224},
    "deit-distilled": {
        **DEIT, "batch": 64 * 8 * 2, "lr": 5e-4 * 1024 / 512, "wd": 0.05, "epochs": 300, "size": 224,
        "distillation": ("hard", 0.5, 1.0),
    },
    "deit-384": {
        **DEIT, "batch": 32 * 8 * 2, "lr": 5e-6, "min_lr": 5e-6, "wd": 1e-8, "epochs": 30, "size": 384,
    },
    "deit3-small": {**DEIT3, "lr": 4e-3, "size": 224, "drop_path": 0.05},
    "deit3-base": {**DEIT3, "lr": 3e-3, "size": 192, "drop_path": 0.2},
    "deit3-large": {**DEIT3, "lr": 3e-3, "size": 192, "drop_path": 0.45},
    "deit3-huge": {**DEIT3, "lr": 3e-3, "size": 160, "drop_path": 0.6},
    "deit3-finetune-base-224": {**DEIT3_FINETUNING, "size": 224, "drop_path": 0.2},
    "deit3-finetune-large-224": {**DEIT3_FINETUNING, "size": 224, "drop_path": 0.45},
    "deit3-finetune-huge-224": {**DEIT3_FINETUNING, "size": 224, "drop_path": 0.55},
    "deit3-finetune-small-384": {**DEIT3_FINETUNING, "size": 384, "drop_path": 0.0},
    "deit3-finetune-base-384": {**DEIT3_FINETUNING, "size": 384, "drop_path": 0.15},
    "deit3-finetune-large-384": {**DEIT3_FINETUNING, "size": 384, "drop_path": 0.4},
    "deit3-small-imagenet21k": {**DEIT3_21K, "size": 224, "drop_path": 0.05},
    "deit3-base-imagenet21k": {**DEIT3_21K, "size": 224, "drop_path": 0.1},
    "deit3-large-imagenet21k": {**DEIT3_21K, "size": 224, "drop_path": 0.3},
    "deit3-huge-imagenet21k": {**DEIT3_21K, "size": 128, "epochs": 90, "drop_path": 0.5},
    "deit3-small-imagenet21k-finetune": {**DEIT3_21K_FINETUNING, "drop_path": 0.05},
    "deit3-base-imagenet21k-finetune": {**DEIT3_21K_FINETUNING, "drop_path": 0.15},
    "deit3-large-imagenet21k-finetune": {**DEIT3_21K_FINETUNING, "drop_path": 0.4},
    "deit3-huge-imagenet21k-finetune": {**DEIT3_21K_FINETUNING, "drop_path": 0.45},
    "mae-finetune": {**MAE, "lr": 5e-4 * 4, "epochs": 100, "layer_decay": 0.65, "drop_path": 0.1},
    "mae-finetune-large": {**MAE, "lr": 1e-3 * 4, "epochs": 50, "layer_decay": 0.75, "drop_path": 0.2},
    "mae-finetune-huge": {**MAE, "lr": 1e-3 * 4, "epochs": 50, "layer_decay": 0.75, "drop_path": 0.3},
    "beit-finetune-base": {
        **BEIT, "lr": 4e-3, "epochs": 100, "warmup_epochs": 20, "layer_decay": 0.65, "drop_path": 0.1,
    },
    "beit-finetune-large": {**BEIT, "lr": 1e-3, "epochs": 50, "layer_decay": 0.75, "drop_path": 0.2},
    "beit-finetune-base-imagenet22k": {**BEIT_22K, "layer_decay": 0.85, "drop_path": 0.1},
    "beit-finetune-large-imagenet22k": {**BEIT_22K, "layer_decay": 0.9, "drop_path": 0.4},
    "torchvision-vit-b16": {**TORCHVISION, "aa": "ra 9 of 30"},
    "torchvision-vit-b32": {**TORCHVISION, "aa": "imagenet"},
    "torchvision-vit-l32": {**TORCHVISION, "aa": "ra 9 of 30"},
    "torchvision-vit-l16": {
        **TORCHVISION, "opt": "sgd", "momentum": 0.9, "eps": None, "betas": None, "batch": 8 * 128, "epochs": 600,
        "lr": 0.5, "wd": 2e-5, "warmup_epochs": 5, "smoothing": 0.1, "aa": "ta_wide", "reprob": 0.1, "remode": "mean",
        "eval_crop": 224 / 232, "ema": (1 - (1 - 0.99998) * 8 * 128 * 32 / 600) ** (1 / 32),
    },
}  # fmt: skip

# Options for each augmentation in the notation of the sources.
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "": {"augmentation": "none"},
    "3a": {"augmentation": "threeaugment"},
    "imagenet": {"augmentation": "autoaugment"},
    "ta_wide": {"augmentation": "trivialaugment"},
    "rand-m9-mstd0.5-inc1": {
        "augmentation": "randaugment", "magnitude_scale": "timm_increasing", "magnitude": 9, "magnitude_std": 0.5,
        "augmentation_layers": 2,
    },
    "ra 9 of 30": {
        "augmentation": "randaugment", "magnitude_scale": "torchvision", "magnitude": 9, "augmentation_layers": 2,
    },
    **{
        f"randaug(2,{magnitude})": {
            "augmentation": "randaugment", "magnitude_scale": "big_vision", "magnitude": magnitude,
            "magnitude_std": 0.0, "augmentation_layers": 2,
        }
        for magnitude in (0, 10, 15, 20)
    },
}  # fmt: skip

LOSSES = {"cross_entropy": ("cross_entropy", None), "bce .gt(0)": ("bce", 0.0), "sigmoid_xent": ("bce_sum", None)}


def crop_of(arguments: Any) -> Any:
    """Return the smallest area of a random crop, the resize size before a crop, `src`, or None."""
    if arguments.crop_padding == 4:
        return "src"
    return arguments.resize_to or (arguments.crop_scale if arguments.crop_scale < 1 else None)


def measured(arguments: Any) -> dict[str, Any]:
    """Return the options under the names and in the units of the sources."""
    epochs, betas = arguments.epochs, arguments.betas
    return {
        "opt": arguments.optimizer,
        "momentum": arguments.momentum,
        "betas": None if betas is None else tuple(betas),
        "eps": arguments.epsilon,
        "batch": arguments.batch_size,
        "lr": arguments.peak_learning_rate,
        "min_lr": arguments.lowest_learning_rate,
        "wd": arguments.weight_decay,
        "clip": arguments.max_grad_norm,
        "sched": arguments.schedule,
        "steps": arguments.steps,
        "epochs": epochs,
        "warmup_steps": arguments.warmup_steps,
        "warmup_epochs": None if epochs is None else arguments.warmup_fraction * epochs,
        "layer_decay": arguments.layer_decay,
        "ema": arguments.ema_decay,
        "dropout": arguments.dropout,
        "drop_path": arguments.drop_path_rate,
        "head_bias": arguments.head_bias,
        "loss": (arguments.loss or "cross_entropy", arguments.bce_target_threshold),
        "distillation": (arguments.distillation, arguments.distillation_weight, arguments.distillation_temperature),
        "smoothing": arguments.label_smoothing,
        "size": arguments.image_size and arguments.image_size[0],
        "crop": crop_of(arguments),
        "flip": arguments.horizontal_flip,
        "eval_crop": arguments.test_crop,
        "reprob": arguments.random_erasing,
        "remode": arguments.random_erasing_mode,
        "mixup": arguments.mixup,
        "cutmix": arguments.cutmix,
        "repeats": arguments.repeated_augmentation,
    }


def parsed(name: str) -> Any:
    teacher = ["--teacher", "t"] if "distillation" in RECIPES[name].options else []
    return parse_arguments(FINETUNE, [*NEEDED, *teacher, "--recipe", name], description=None)


@pytest.mark.parametrize("name", SOURCES)
def test_recipe_has_the_numbers_of_its_source(name):
    arguments = parsed(name)
    check_options(arguments)
    source = {"flip": 0.5, **SOURCES[name]} if "crop" in SOURCES[name] else SOURCES[name]
    found = measured(arguments)
    for key, value in source.items():
        if key == "aa":
            assert {option: getattr(arguments, option) for option in AUGMENTATIONS[value]} == AUGMENTATIONS[value]
        elif key == "loss":
            assert found[key] == LOSSES[value]
        elif key == "remode":
            assert not source["reprob"] or found[key] == value
        elif key in ("ema", "warmup_epochs", "lr", "min_lr", "wd"):
            assert found[key] == pytest.approx(value, rel=1e-5), key
        else:
            assert found[key] == value, key
    # Options that a source lacks have neutral values, unless the source does not specify them.
    if "batch" in source:
        for key, neutral in (("ema", None), ("layer_decay", 1.0), ("dropout", None), ("head_bias", None)):
            assert key in source or found[key] == neutral, key


@pytest.mark.parametrize("name", [name for name in RECIPES if "min_learning_rate" in RECIPES[name].options])
def test_recipe_is_taken_with_any_batch_size(name):
    usual = parsed(name)
    for batch_size in (3, 256, 9000):
        arguments = replace(usual, batch_size=batch_size)
        check_options(arguments)
        if usual.base_batch_size is not None:
            rates = [each.lowest_learning_rate / each.peak_learning_rate for each in (arguments, usual)]
            assert rates[0] == pytest.approx(rates[1])


def test_what_a_recipe_of_masked_models_leaves_out_is_listed():
    for name, recipe in RECIPES.items():
        if name.startswith("beit-"):
            assert "weight decay of the tables of relative positions" in recipe.missing
            assert "a mean and deviation of 0.5" in recipe.missing
        if name.startswith("mae-finetune"):
            assert "the warm-up from 0" in recipe.missing


def test_every_recipe_is_compared_with_its_source():
    unchecked = set(RECIPES) - set(SOURCES) - {
        "mae-pretrain", "mae-linear-probe", "dinov2-linear-probe", "linear-probe", "lora", "few-shot",
    }  # fmt: skip
    assert not unchecked
    assert all(RECIPES[name].source for name in SOURCES)


def test_new_weights_are_drawn_as_the_source_draws_them():
    for name, recipe in RECIPES.items():
        drawn = "timm" if name.startswith("deit") else "google"
        assert recipe.options.get("initialization") == (drawn if "from_scratch" in recipe.options else None), name


def recipes_with_new_options() -> dict[str, list[str]]:
    """Return the options of each recipe that no earlier recipe sets."""
    left, found = {option for name in SOURCES for option in RECIPES[name].options}, {}
    for name in ["augreg-none", *SOURCES]:
        if mine := sorted(left & RECIPES[name].options.keys()):
            found[name] = mine
            left -= {*mine}
    return found


@pytest.mark.slow(quick=["augreg-none"])
@pytest.mark.parametrize("name", SOURCES if NIGHTLY else recipes_with_new_options())
def test_options_of_a_recipe_can_be_taken_back_and_the_run_repeated(name, tmp_path):
    plain = parse_arguments(FINETUNE, [*NEEDED, "--teacher", "t"], description=None)
    for option in RECIPES[name].options if NIGHTLY else recipes_with_new_options()[name]:
        words = [*NEEDED, "--teacher", "t", "--recipe", name, f"--{option}", "default"]
        arguments = parse_arguments(FINETUNE, words, description=None)
        assert getattr(arguments, option) == getattr(plain, option)
        file = tmp_path / "arguments.yaml"
        file.write_text(as_yaml(arguments))
        assert parse_arguments(FINETUNE, [str(file)], description=None) == arguments
    assert parse_arguments(FINETUNE, [*NEEDED, "--dataset_subset", "default"], description=None).dataset_subset


def test_the_head_is_kept_where_the_source_trains_on_with_the_same_classes():
    kept = {name for name, recipe in RECIPES.items() if recipe.options.get("keep_head")}
    assert kept == {"deit-384", *(name for name in RECIPES if name.startswith("deit3-finetune-"))}


def test_new_weights_have_the_deviations_of_torchvision_but_for_the_attention():
    torch.manual_seed(0)
    module = VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=256, mlp_dim=1024, num_classes=10)
    theirs = from_module(module)
    ours = PlainViTForImageClassification(PlainViTConfig(**theirs.config.to_dict() | {"initialization": "google"}))
    for name, tensor in theirs.state_dict().items():
        if "attention" not in name:
            same = ours.state_dict()[name]
            assert same.std().item() == pytest.approx(tensor.std().item(), rel=0.25 if tensor.ndim == 1 else 0.1), name


def test_linear_probe_of_mae_has_the_numbers_of_its_source():
    # facebookresearch/mae: defaults of main_linprobe.py, and FINETUNE.md: 512 images on 4 nodes of 8 GPUs.
    arguments = parse_arguments(PROBE, [*NEEDED, "--recipe", "mae-linear-probe"], description=None)
    assert (arguments.optimizer, arguments.learning_rates, arguments.probe_batch_size) == ("lars", [0.1], 512 * 4 * 8)
    assert (arguments.epochs, arguments.warmup_epochs, arguments.weight_decay) == (90, 10, 0)
    assert arguments.mode == "linear"


def test_pretraining_of_mae_has_the_numbers_of_its_source():
    # facebookresearch/mae: defaults of main_pretrain.py, and PRETRAIN.md: 64 images on 8 nodes of 8 GPUs.
    arguments = parse_arguments(PRETRAIN, [*NEEDED, "--recipe", "mae-pretrain"], description=None)
    check_options(arguments)
    assert (arguments.batch_size, arguments.peak_learning_rate) == (64 * 8 * 8, pytest.approx(1.5e-4 * 4096 / 256))
    assert (arguments.optimizer, arguments.betas, arguments.weight_decay) == ("adamw", [0.9, 0.95], 0.05)
    assert (arguments.epochs, arguments.warmup_fraction * 800, arguments.schedule) == (800, 40, "cosine")
    assert (arguments.mask_ratio, arguments.norm_pix_loss, arguments.max_grad_norm) == (0.75, True, 0)
    assert (arguments.crop_scale, arguments.horizontal_flip) == (0.2, 0.5)


def test_linear_evaluation_of_dinov2_has_the_numbers_of_its_source():
    # facebookresearch/dinov2: defaults of eval/linear.py: 128 images on each of the 8 GPUs of run/submit.py.
    arguments = parse_arguments(PROBE, [*NEEDED, "--recipe", "dinov2-linear-probe"], description=None)
    assert arguments.learning_rates == [
        1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1,
    ]  # fmt: skip
    assert (arguments.optimizer, arguments.probe_batch_size, arguments.weight_decay) == ("sgd", 128 * 8, 0)
    assert (arguments.mode, arguments.warmup_epochs) == ("linear", 0)
    assert arguments.epochs == pytest.approx(10 * 1250 * 1024 / 1_281_167, rel=0.001)


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].script.startswith("finetune")])
def test_transform_of_every_recipe_can_be_built(name):
    arguments = parse_arguments(FINETUNE, [*NEEDED, "--recipe", name], description=None)
    size = (arguments.image_size or [224])[0]
    processor = PlainViTImageProcessor(size={"height": size, "width": size})
    training_transform(processor, **keywords(arguments, TransformOptions))


def test_description_names_source_result_and_what_is_not_included():
    text = describe_recipes()
    for name, recipe in RECIPES.items():
        part = " ".join(text.split(f"\n{name}\n")[-1].split("\n\n")[0].split())
        for words in (recipe.source, recipe.target, recipe.missing):
            assert words in part, name
        assert recipe.description in part


def test_options_of_recipes_exist():
    known = {each.name for kind in (FINETUNE, PROBE, PRETRAIN) for each in fields(kind)}
    assert all(recipe.options.keys() <= known for recipe in RECIPES.values())
