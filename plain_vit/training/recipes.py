"""Recipes: named options of published runs, with the published results.

`--recipe NAME` sets the options of a recipe, and any other option overrides them. Where a publication selects an option
on a development split, the recipe has one choice and says so. A target is given if the publication reports one for the
same options.
"""

import difflib
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TrainingError


@dataclass(frozen=True)
class Recipe:
    """Named options.

    Args:
        description: description in a sentence or two.
        options: options of the training scripts, by name.
        target: the published result, and its model; empty if none is reported.
        script: the script in examples/ it belongs to.
    """

    description: str
    options: Mapping[str, Any]
    target: str = ""
    script: str = "finetune_image_classification.py"


# Dosovitskiy et al. 2021, Table 4 and appendix B.1.1; crop, flip, scale and warm-up as in their code.
PAPER_FINETUNING = {
    "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.01, "weight_decay": 0.0, "batch_size": 512,
    "schedule": "cosine", "warmup_steps": 500, "max_grad_norm": 1.0, "label_smoothing": 0.0, "image_size": [384],
    "crop_scale": 0.05, "horizontal_flip": 0.5,
}  # fmt: skip
# Table 3. Their Adam has decoupled weight decay, which is AdamW today.
PAPER_PRETRAINING = {
    "from_scratch": True, "optimizer": "adamw", "momentum": 0.9, "batch_size": 4096, "warmup_steps": 10_000,
    "image_size": [224], "dropout": 0.1, "label_smoothing": 0.0, "crop_scale": 0.05, "horizontal_flip": 0.5,
}  # fmt: skip


def _paper_finetuning(name: str, steps: int, sweep: str, share: str, target: str, **changes: Any) -> Recipe:
    return Recipe(
        f"The paper's fine-tuning on {name} (Table 4), at 384 pixels. It chooses the learning rate among {sweep} on "
        f"{share} of the training images (--validation_fraction) and then learns from all of them.",
        {**PAPER_FINETUNING, "steps": steps, **changes},
        target,
    )


def _augreg(layers: int, magnitude: int, mixup: float) -> Recipe:
    return Recipe(
        "An augmentation preset of AugReg (Steiner et al. 2022), to add after another recipe. They combine it with "
        "weight decay 0.03 or 0.1, and with dropout and stochastic depth both 0 or both 0.1.",
        {"augmentation": "randaugment" if layers else "none", "magnitude_scale": "big_vision", "magnitude_std": 0.0,
         "augmentation_layers": layers, "magnitude": magnitude, "mixup": mixup},
    )  # fmt: skip


RECIPES: dict[str, Recipe] = {
    "vit-imagenet": _paper_finetuning(
        "ImageNet", 20_000, ".003, .01, .03 and .06", "1%",
        "pre-trained on ImageNet-21k: B/16 83.97%, B/32 81.28%, L/16 85.15%, L/32 80.99%, H/14 85.13% (Table 5)",
    ),
    "vit-cifar10": _paper_finetuning(
        "CIFAR-10", 10_000, ".001, .003, .01 and .03", "2%",
        "pre-trained on ImageNet-21k: B/16 98.95%, B/32 98.79%, L/16 99.16%, L/32 99.13%, H/14 99.27% (Table 5)",
    ),
    "vit-cifar100": _paper_finetuning(
        "CIFAR-100", 10_000, ".001, .003, .01 and .03", "2%",
        "pre-trained on ImageNet-21k: B/16 91.67%, B/32 91.97%, L/16 93.44%, L/32 93.04%, H/14 93.82% (Table 5)",
    ),
    "vit-pets": _paper_finetuning(
        "Oxford-IIIT Pets", 500, ".001, .003, .01 and .03", "10%",
        "L/16 pre-trained on ImageNet-21k: 94.67%; H/14 on JFT: 97.56% (Table 2)", warmup_steps=100,
    ),
    "vit-flowers": _paper_finetuning(
        "Oxford Flowers-102", 500, ".001, .003, .01 and .03", "10%",
        "L/16 pre-trained on ImageNet-21k: 99.61%; H/14 on JFT: 99.68% (Table 2)", warmup_steps=100,
    ),
    "vit-vtab": Recipe(
        "The paper's fine-tuning on each task of VTAB (Table 4), 1,000 images each, at 384 pixels.",
        {**PAPER_FINETUNING, "steps": 2500, "learning_rate": 0.01},
        "mean over the 19 tasks: L/16 pre-trained on ImageNet-21k 72.72%, H/14 on JFT 77.63% (Table 2)",
    ),
    "vit-pretrain-imagenet": Recipe(
        "The paper's pre-training on ImageNet-1k (Table 3): Adam, 300 epochs, strong weight decay.",
        {**PAPER_PRETRAINING, "epochs": 300, "learning_rate": 3e-3, "schedule": "cosine", "weight_decay": 0.3,
         "max_grad_norm": 1.0},
    ),
    "vit-pretrain-imagenet21k": Recipe(
        "The paper's pre-training on ImageNet-21k (Table 3): Adam, 90 epochs, linear decay.",
        {**PAPER_PRETRAINING, "epochs": 90, "learning_rate": 1e-3, "schedule": "linear", "weight_decay": 0.03,
         "max_grad_norm": 0.0},
    ),
    "augreg-finetune": Recipe(
        "The default fine-tuning of AugReg (Steiner et al. 2022): 500 steps at 384 pixels, cut out of 448.",
        {**PAPER_FINETUNING, "steps": 500, "warmup_steps": 100, "learning_rate": 0.03, "crop_scale": 1.0,
         "resize_to": 448},
        "B/16 on ImageNet at 384 pixels: 85.49%",
    ),
    "augreg-none": _augreg(0, 0, 0.0),
    "augreg-light1": _augreg(2, 0, 0.0),
    "augreg-light2": _augreg(2, 10, 0.2),
    "augreg-medium1": _augreg(2, 15, 0.2),
    "augreg-medium2": _augreg(2, 15, 0.5),
    "augreg-strong1": _augreg(2, 20, 0.5),
    "augreg-strong2": _augreg(2, 20, 0.8),
    "simplevit": Recipe(
        "SimpleViT's training on ImageNet-1k (Beyer et al. 2022), for 90 epochs; for a model with sin-cos positions "
        "and mean pooling.",
        {"from_scratch": True, "optimizer": "adamw", "momentum": 0.9, "learning_rate": 1e-3, "weight_decay": 1e-4,
         "batch_size": 1024, "epochs": 90, "schedule": "cosine", "warmup_steps": 10_000, "max_grad_norm": 1.0,
         "label_smoothing": 0.0, "image_size": [224], "crop_scale": 0.05, "horizontal_flip": 0.5,
         "augmentation": "randaugment", "magnitude_scale": "big_vision", "augmentation_layers": 2, "magnitude": 10,
         "mixup": 0.2},
        "S/16: 76.5% in 90 epochs, 78.5% in 150, 80.0% in 300",
    ),
    "mae-finetune": Recipe(
        "Fine-tuning of a base model with masked pre-training, like MAE (He et al. 2022, Table 9): "
        "AdamW with layer-wise decay, RandAugment, mixup, CutMix. The values are those of their command "
        "for the base model.",
        {"optimizer": "adamw", "momentum": 0.9, "learning_rate": 2e-3, "weight_decay": 0.05, "layer_decay": 0.65,
         "batch_size": 1024, "epochs": 100, "schedule": "cosine", "warmup_fraction": 0.05, "max_grad_norm": 0.0,
         "label_smoothing": 0.1, "image_size": [224], "crop_scale": 0.08, "horizontal_flip": 0.5,
         "augmentation": "randaugment", "magnitude_scale": "timm_increasing", "augmentation_layers": 2, "magnitude": 9,
         "magnitude_std": 0.5, "mixup": 0.8, "cutmix": 1.0, "random_erasing": 0.25, "random_erasing_mode": "pixel",
         "drop_path_rate": 0.1},
        "B/16 on ImageNet-1k: 83.57%, mean of four runs (their repository)",
    ),
    "deit3-pretrain": Recipe(
        "DeiT-III's training from scratch on ImageNet-1k (Touvron et al. 2022, Table 1): LAMB (from timm), binary "
        "cross-entropy, 3-Augment, three copies of an image (their training on ImageNet-21k and their fine-tuning "
        "repeat none). Not included: the stochastic depth, which depends on the model size (--drop_path_rate).",
        {"from_scratch": True, "optimizer": "timm:lamb", "learning_rate": 3e-3, "weight_decay": 0.02,
         "batch_size": 2048, "epochs": 400, "schedule": "cosine", "warmup_fraction": 0.0125, "max_grad_norm": 1.0,
         "loss": "bce", "label_smoothing": 0.0, "image_size": [224], "crop_scale": 0.08, "horizontal_flip": 0.5,
         "augmentation": "threeaugment", "repeated_augmentation": 3, "mixup": 0.8, "cutmix": 1.0},
    ),
    "linear-probe": Recipe(
        "Only a new head is trained, on a frozen backbone. examples/linear_probe.py does the same with features "
        "computed once, for many learning rates at once.",
        {"freeze": ["backbone"], "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1, "weight_decay": 0.0,
         "schedule": "cosine", "warmup_fraction": 0.0, "max_grad_norm": 0.0, "label_smoothing": 0.0},
    ),
    "lora": Recipe(
        "LoRA adapters on the attention are trained instead of the weights (Hu et al. 2022); the saved model has "
        "them added in.",
        {"lora_rank": 16, "lora_alpha": 16, "optimizer": "adamw", "learning_rate": 5e-3, "weight_decay": 0.0},
    ),
    "few-shot": Recipe(
        "The paper's few-shot evaluation (section 4.1): ridge regression in closed form from frozen features to -1 and "
        "1, on 1, 5, 10 and 25 images per class, each three times.",
        {"mode": "few_shot", "shots": [1, 5, 10, 25], "seeds": [0, 1, 2], "l2": 1024.0},
        script="linear_probe.py",
    ),
}  # fmt: skip


def recipe_options(name: str, known: Collection[str]) -> dict[str, Any]:
    """Return the options of a recipe.

    Args:
        name: one of `RECIPES`.
        known: the options that the script has.

    Raises:
        TrainingError: There is no such recipe, or it belongs to another script.
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(RECIPES)}."
        raise TrainingError(f"There is no recipe {name!r}: {hint} --list_recipes describes each.")
    recipe = RECIPES[name]
    if not recipe.options.keys() <= set(known):
        raise TrainingError(f"The recipe {name} is for examples/{recipe.script}.")
    return dict(recipe.options)


def describe_recipes() -> str:
    """Return descriptions, published results and options of all recipes."""
    paragraphs = []
    for name, recipe in RECIPES.items():
        words = [
            f"--{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for option, value in recipe.options.items()
        ]
        lines = [
            f"examples/{recipe.script}. {recipe.description}",
            *([f"Published: {recipe.target}."] if recipe.target else []),
            " ".join(words),
        ]
        wrapped = [
            textwrap.fill(line, 110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
            for line in lines
        ]
        paragraphs.append("\n".join([name, *wrapped]))
    return "\n\n".join(paragraphs)
