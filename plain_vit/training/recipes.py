"""Recipes: named sets of options from published runs, with the published results.

`--recipe NAME` sets the options of a recipe; options given explicitly override them. If a publication selects an option
on a development split, the recipe has one choice and says so. A target is given if the publication reports a result for
the same options. `source` names the file or table of the numbers, `missing` the parts of the run that have no option.
"""

import difflib
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TrainingError


@dataclass(frozen=True)
class Recipe:
    """A named set of options.

    Args:
        description: one or two sentences.
        options: options of the training scripts, by name.
        source: where the numbers are published: a file of a repository, or a table of a paper.
        missing: parts of the published run that these options do not reproduce; empty if there are none.
        target: the published result and its model; empty if none is reported.
        script: the script in examples/ that the recipe is for.
    """

    description: str
    options: Mapping[str, Any]
    source: str = ""
    missing: str = ""
    target: str = ""
    script: str = "finetune_image_classification.py"


# Parts that several recipes share.

TIMM_RANDAUGMENT = {  # rand-m9-mstd0.5-inc1
    "augmentation": "randaugment", "magnitude_scale": "timm_increasing", "augmentation_layers": 2, "magnitude": 9,
    "magnitude_std": 0.5,
}  # fmt: skip
TIMM_ERASING = {"random_erasing": 0.25, "random_erasing_mode": "pixel"}
MIXING: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0}
INCEPTION_CROP = {"crop_scale": 0.05, "horizontal_flip": 0.5}
TORCH_CROP = {"crop_scale": 0.08, "horizontal_flip": 0.5}
TIMM_PREPROCESSING = (
    "ImageNet's mean and deviation and bicubic resizing, unless the checkpoint's image processor has them"
)


def _big_vision_randaugment(layers: int, magnitude: int) -> dict[str, Any]:
    return {"augmentation": "randaugment", "magnitude_scale": "big_vision", "augmentation_layers": layers,
            "magnitude": magnitude, "magnitude_std": 0.0}  # fmt: skip


# Dosovitskiy et al. 2021


PAPER_CODE = "google-research/vision_transformer, vit_jax/configs/common.py and input_pipeline.py"
# Table 4 and appendix B.1.1; crop, flip, scale and warm-up as in their code.
PAPER_FINETUNING = {
    "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.01, "weight_decay": 0.0, "batch_size": 512,
    "schedule": "cosine", "warmup_steps": 500, "max_grad_norm": 1.0, "label_smoothing": 0.0, "image_size": [384],
    **INCEPTION_CROP,
}  # fmt: skip
# Table 3. Their Adam has decoupled weight decay, as AdamW.
PAPER_PRETRAINING = {
    "from_scratch": True, "initialization": "google", "optimizer": "adamw", "momentum": 0.9, "batch_size": 4096,
    "warmup_steps": 10_000, "image_size": [224], "dropout": 0.1, "label_smoothing": 0.0, **INCEPTION_CROP,
}  # fmt: skip


def _paper_finetuning(name: str, steps: int, sweep: str, share: str, target: str, **changes: Any) -> Recipe:
    size = changes.get("image_size", [384])[0]
    return Recipe(
        f"The paper's fine-tuning on {name} (Table 4), at {size} pixels. It chooses the learning rate among {sweep} on "
        f"{share} of the training images (--validation_fraction) and then learns from all of them.",
        {**PAPER_FINETUNING, "steps": steps, **changes},
        f"Dosovitskiy et al. 2021, Table 4; {PAPER_CODE}",
        "the momentum in bfloat16",
        target,
    )


PAPER = {
    "vit-imagenet": _paper_finetuning(
        "ImageNet", 20_000, ".003, .01, .03 and .06", "1%",
        "pre-trained on ImageNet-21k: B/16 83.97%, B/32 81.28%, L/16 85.15%, L/32 80.99%, H/14 85.13% (Table 5)",
    ),
    "vit-imagenet-512": _paper_finetuning(
        "ImageNet", 20_000, ".003, .01, .03 and .06", "1%",
        "L/16 pre-trained on JFT: 87.76% (Table 2)", image_size=[512], ema_decay=0.9999,
    ),
    "vit-imagenet-518": _paper_finetuning(
        "ImageNet", 20_000, ".003, .01, .03 and .06", "1%",
        "H/14 pre-trained on JFT: 88.55% (Table 2)", image_size=[518], ema_decay=0.9999,
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
        "The paper's fine-tuning on each task of VTAB (Table 4), 1,000 images each, at 384 pixels. Images are neither "
        "cropped nor flipped, which would change the labels of digits, orientations and distances.",
        {**PAPER_FINETUNING, "steps": 2500, "learning_rate": 0.01, "crop_scale": 1.0, "horizontal_flip": 0.0},
        f"Dosovitskiy et al. 2021, Table 4 and appendix B.1.1; {PAPER_CODE}",
        "the preprocessing of each task as in BiT, which crops and flips natural images: add --crop_scale and "
        "--horizontal_flip for those; the momentum in bfloat16",
        "mean over the 19 tasks: L/16 pre-trained on ImageNet-21k 72.72%, H/14 on JFT 77.63% (Table 2)",
    ),
    "vit-pretrain-imagenet": Recipe(
        "The paper's pre-training on ImageNet-1k (Table 3): Adam, 300 epochs, strong weight decay.",
        {**PAPER_PRETRAINING, "epochs": 300, "learning_rate": 3e-3, "schedule": "cosine", "weight_decay": 0.3,
         "max_grad_norm": 1.0},
        "Dosovitskiy et al. 2021, Table 3",
    ),
    "vit-pretrain-imagenet21k": Recipe(
        "The paper's pre-training on ImageNet-21k (Table 3): Adam, 90 epochs, linear decay.",
        {**PAPER_PRETRAINING, "epochs": 90, "learning_rate": 1e-3, "schedule": "linear", "weight_decay": 0.03,
         "max_grad_norm": 0.0},
        "Dosovitskiy et al. 2021, Table 3",
    ),
}  # fmt: skip


# AugReg (Steiner et al. 2022) and SimpleViT (Beyer et al. 2022). big_vision multiplies the weight decay by the schedule
# but not by the learning rate: its 1e-4 at a learning rate of 1e-3 is 0.1 for torch's AdamW.

BIG_VISION = {
    "from_scratch": True, "initialization": "google", "optimizer": "adamw", "momentum": 0.9, "learning_rate": 1e-3,
    "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 10_000, "max_grad_norm": 1.0, "label_smoothing": 0.0,
    "image_size": [224], "test_crop": 0.875, **INCEPTION_CROP,
}  # fmt: skip
# Its pp.resize of 448 has no effect: input_pipeline.py reads it only without its crop, which is on.
AUGREG_FINETUNING_SOURCE = "google-research/vision_transformer, vit_jax/configs/augreg.py and input_pipeline.py"
BIG_VISION_MISSING = "the last 1% of the training images, which it holds out; the first moment in bfloat16"


def _augreg(layers: int, magnitude: int, mixup: float) -> Recipe:
    return Recipe(
        "An augmentation preset of AugReg (Steiner et al. 2022), to add after augreg-pretrain-imagenet or "
        "augreg-pretrain-imagenet21k. They combine it with weight decay 0.03 or 0.1, and with dropout and stochastic "
        "depth both 0 or both 0.1.",
        {**_big_vision_randaugment(layers, magnitude), "mixup": mixup}
        if layers
        else {"augmentation": "none", "mixup": mixup},
        "google-research/big_vision, big_vision/configs/vit_i1k.py (RANDAUG_DEF, MIXUP_DEF)",
    )


AUGREG = {
    "augreg-pretrain-imagenet": Recipe(
        "AugReg's pre-training on ImageNet-1k, for 300 epochs, with the preset medium2, its choice for B/16. It uses "
        "light1 for Ti/16, medium1 for S/32 and medium2 for larger models.",
        {**BIG_VISION, "batch_size": 4096, "epochs": 300, "loss": "bce_sum", "head_bias": -6.9,
         **_big_vision_randaugment(2, 15), "mixup": 0.5},
        "google-research/big_vision, big_vision/configs/vit_i1k.py",
        f"the tanh layer before the head (representation_size of the model's config); {BIG_VISION_MISSING}",
    ),
    "augreg-pretrain-imagenet21k": Recipe(
        "AugReg's pre-training on ImageNet-21k, for 300 epochs, with the preset light2, its choice for B/16, and a "
        "model with mean pooling. It uses none for Ti/16, light1 for S/16 and medium2 for L/16; the published Ti/16 "
        "and S/16 have --weight_decay 0.03.",
        {**BIG_VISION, "batch_size": 4096, "epochs": 300, "loss": "bce_sum", "head_bias": -10.0,
         **_big_vision_randaugment(2, 10), "mixup": 0.2},
        "google-research/big_vision, big_vision/configs/vit_i21k.py",
        "several labels per image; the 51,200 images that it holds out; the first moment in bfloat16",
    ),
    "augreg-finetune": Recipe(
        "The default fine-tuning of AugReg: 500 steps at 384 pixels.",
        {**PAPER_FINETUNING, "steps": 500, "warmup_steps": 100, "learning_rate": 0.03},
        AUGREG_FINETUNING_SOURCE,
        "the momentum in bfloat16",
    ),
    "augreg-finetune-imagenet": Recipe(
        "The fine-tuning of AugReg's published checkpoints on ImageNet-1k (steps_20k-lr_0.03-res_384): 20,000 steps. "
        "L/16 was best with --learning_rate 0.01.",
        {**PAPER_FINETUNING, "steps": 20_000, "learning_rate": 0.03},
        f"google-research/vision_transformer, README.md; {AUGREG_FINETUNING_SOURCE}",
        "the momentum in bfloat16",
        "pre-trained on ImageNet-21k: B/16 85.49%, S/16 83.73%",
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
        {**BIG_VISION, "batch_size": 1024, "epochs": 90, **_big_vision_randaugment(2, 10), "mixup": 0.2},
        "google-research/big_vision, big_vision/configs/vit_s16_i1k.py",
        BIG_VISION_MISSING,
        "S/16: 76.5% in 90 epochs, 78.5% in 150, 80.0% in 300",
    ),
}  # fmt: skip


# DeiT (Touvron et al. 2021) and DeiT-III (Touvron et al. 2022). DeiT and MAE scale the learning rate with the batch
# size, but not its minimum. Here both scale, and the minimum equals theirs at the batch size of the recipe.


DEIT = {
    "optimizer": "adamw", "betas": [0.9, 0.999], "epsilon": 1e-8, "schedule": "cosine", "max_grad_norm": 0.0,
    "label_smoothing": 0.1, "test_crop": 0.875, "repeated_augmentation": 3, "drop_path_rate": 0.1, **TORCH_CROP,
    **TIMM_RANDAUGMENT, **TIMM_ERASING, **MIXING,
}  # fmt: skip
DEIT_MISSING = f"the warm-up from 1e-6 and the schedule in whole epochs; {TIMM_PREPROCESSING}"
DEIT_TOKEN = "the deviation of a new class token (0.02)"
# apex's FusedLAMB itself clips gradients at 1.
LAMB = {"optimizer": "timm:lamb", "betas": [0.9, 0.999], "epsilon": 1e-8, "max_grad_norm": 1.0}
DEIT3 = {
    "schedule": "cosine", "min_learning_rate": 1e-5, "batch_size": 2048, "test_crop": 1.0, "horizontal_flip": 0.5,
    "cutmix": 1.0,
}  # fmt: skip
DEIT3_SOURCE = "facebookresearch/deit, README_revenge.md, main.py, engine.py and augment.py"


def _deit3(size: str, pixels: int, learning_rate: float, drop_path_rate: float, target: str) -> Recipe:
    return Recipe(
        f"DeiT-III's training of a {size} model from scratch on ImageNet-1k, for 800 epochs at {pixels} pixels: LAMB "
        "(from timm), binary cross-entropy, 3-Augment, three copies of an image."
        + ("" if pixels == 224 else f" deit3-finetune-{size}-224 follows it."),
        {"from_scratch": True, "initialization": "timm", **DEIT3, **LAMB, "learning_rate": learning_rate,
         "weight_decay": 0.05, "epochs": 800, "warmup_fraction": 5 / 800, "loss": "bce", "bce_target_threshold": 0.0,
         "label_smoothing": 0.0, "image_size": [pixels], "crop_scale": 0.08, "augmentation": "threeaugment",
         "repeated_augmentation": 3, "mixup": 0.8, "drop_path_rate": drop_path_rate},
        DEIT3_SOURCE,
        f"LayerScale, which the model's config has; {DEIT_TOKEN}; {DEIT_MISSING}",
        target,
    )  # fmt: skip


def _deit3_finetuning(size: str, pixels: int, drop_path_rate: float, target: str) -> Recipe:
    return Recipe(
        f"DeiT-III's fine-tuning of a {size} model at {pixels} pixels, after deit3-{size}.",
        {"keep_head": True, **DEIT3, "batch_size": 512, "optimizer": "adamw", "betas": [0.9, 0.999], "epsilon": 1e-8,
         "max_grad_norm": 0.0, "learning_rate": 1e-5, "weight_decay": 0.1, "epochs": 20, "warmup_fraction": 0.25,
         "label_smoothing": 0.1, "image_size": [pixels], "crop_scale": 0.08, **TIMM_RANDAUGMENT, "mixup": 0.8,
         "drop_path_rate": drop_path_rate},
        DEIT3_SOURCE,
        DEIT_MISSING,
        target,
    )  # fmt: skip


def _deit3_imagenet21k(
    size: str, pixels: int, epochs: int, drop_path_rates: tuple[float, float], target: str
) -> dict[str, Recipe]:
    """Return DeiT-III's pre-training on ImageNet-21k, and its fine-tuning on ImageNet-1k."""
    shared = {**DEIT3, **LAMB, "weight_decay": 0.02, "label_smoothing": 0.1, "crop_padding": 4,
              "augmentation": "threeaugment", "mixup": 0.0}  # fmt: skip
    name = f"deit3-{size}-imagenet21k"
    return {
        name: Recipe(
            f"DeiT-III's pre-training of a {size} model on ImageNet-21k, for {epochs} epochs at {pixels} pixels. "
            f"{name}-finetune follows it.",
            {"from_scratch": True, "initialization": "timm", **shared, "learning_rate": 1e-3, "epochs": epochs,
             "warmup_fraction": 5 / epochs, "image_size": [pixels], "drop_path_rate": drop_path_rates[0]},
            DEIT3_SOURCE,
            f"LayerScale, which the model's config has; {DEIT_TOKEN}; {DEIT_MISSING}",
        ),
        f"{name}-finetune": Recipe(
            f"DeiT-III's fine-tuning of a {size} model on ImageNet-1k, after {name}.",
            {**shared, "learning_rate": 3e-4, "epochs": 50, "warmup_fraction": 0.1, "image_size": [224],
             "drop_path_rate": drop_path_rates[1]},
            DEIT3_SOURCE,
            DEIT_MISSING,
            target,
        ),
    }  # fmt: skip


DEITS = {
    "deit": Recipe(
        "DeiT's training from scratch on ImageNet-1k, for 300 epochs, of tiny, small and base models.",
        {"from_scratch": True, "initialization": "timm", **DEIT, "learning_rate": 5e-4, "base_batch_size": 512,
         "min_learning_rate": 5e-6, "weight_decay": 0.05, "batch_size": 1024, "epochs": 300,
         "warmup_fraction": 5 / 300, "image_size": [224]},
        "facebookresearch/deit, README_deit.md and the defaults of main.py",
        f"{DEIT_TOKEN}; {DEIT_MISSING}",
        "Ti/16 72.2%, S/16 79.9%, B/16 81.8%",
    ),
    "deit-distilled": Recipe(
        "DeiT's training from scratch with a distillation token, which the model has to have, by the decisions of a "
        "--teacher (there: RegNetY-16GF).",
        {"from_scratch": True, "initialization": "timm", **DEIT, "learning_rate": 5e-4, "base_batch_size": 512,
         "min_learning_rate": 5e-6, "weight_decay": 0.05, "batch_size": 1024, "epochs": 300,
         "warmup_fraction": 5 / 300, "image_size": [224],
         "distillation": "hard", "distillation_weight": 0.5},
        "facebookresearch/deit, README_deit.md and the defaults of main.py",
        f"{DEIT_TOKEN}; {DEIT_MISSING}",
        "Ti/16 74.5%, S/16 81.2%, B/16 83.4%",
    ),
    "deit-384": Recipe(
        "DeiT's fine-tuning at 384 pixels, for 30 epochs.",
        {"keep_head": True, **DEIT, "learning_rate": 5e-6, "base_batch_size": 512, "min_learning_rate": 5e-6,
         "weight_decay": 1e-8, "batch_size": 512, "epochs": 30, "warmup_fraction": 5 / 30, "image_size": [384]},
        "facebookresearch/deit, README_deit.md and the defaults of main.py",
        DEIT_MISSING,
        "B/16 82.9%",
    ),
    "deit3-small": _deit3("small", 224, 4e-3, 0.05, "S/16 81.4%"),
    "deit3-base": _deit3("base", 192, 3e-3, 0.2, ""),
    "deit3-large": _deit3("large", 192, 3e-3, 0.45, ""),
    "deit3-huge": _deit3("huge", 160, 3e-3, 0.6, ""),
    "deit3-finetune-base-224": _deit3_finetuning("base", 224, 0.2, "B/16 83.8%"),
    "deit3-finetune-large-224": _deit3_finetuning("large", 224, 0.45, "L/16 84.9%"),
    "deit3-finetune-huge-224": _deit3_finetuning("huge", 224, 0.55, "H/14 85.2%"),
    "deit3-finetune-small-384": _deit3_finetuning("small", 384, 0.0, "S/16 83.4%"),
    "deit3-finetune-base-384": _deit3_finetuning("base", 384, 0.15, "B/16 85.0%"),
    "deit3-finetune-large-384": _deit3_finetuning("large", 384, 0.4, "L/16 85.8%"),
    **_deit3_imagenet21k("small", 224, 240, (0.05, 0.05), "S/16 83.1%"),
    **_deit3_imagenet21k("base", 224, 240, (0.1, 0.15), "B/16 85.7%"),
    **_deit3_imagenet21k("large", 224, 240, (0.3, 0.4), "L/16 87.0%"),
    **_deit3_imagenet21k("huge", 128, 90, (0.5, 0.45), "H/14 87.2%"),
}  # fmt: skip


# MAE (He et al. 2022) and BEiT (Bao et al. 2022)


MASKED_FINETUNING = {
    "optimizer": "adamw", "betas": [0.9, 0.999], "epsilon": 1e-8, "schedule": "cosine", "min_learning_rate": 1e-6,
    "max_grad_norm": 0.0, "label_smoothing": 0.1, "image_size": [224], "test_crop": 0.875, **TORCH_CROP,
    **TIMM_RANDAUGMENT, **TIMM_ERASING,
}  # fmt: skip


def _mae(size: str, rate: float, layer_decay: float, epochs: int, drop_path_rate: float, target: str) -> Recipe:
    return Recipe(
        f"MAE's fine-tuning of a {size} model with masked pre-training and mean pooling on ImageNet-1k.",
        {**MASKED_FINETUNING, "learning_rate": rate, "base_batch_size": 256, "min_learning_rate": 2.5e-7,
         "weight_decay": 0.05,
         "layer_decay": layer_decay, "batch_size": 1024, "epochs": epochs, "warmup_fraction": 5 / epochs, **MIXING,
         "drop_path_rate": drop_path_rate},
        "facebookresearch/mae, FINETUNE.md and the defaults of main_finetune.py",
        "the warm-up from 0, whose first step changes nothing; the head drawn with a deviation of 2e-5 instead of 0; "
        f"{TIMM_PREPROCESSING}",
        target,
    )  # fmt: skip


def _beit(size: str, description: str, target: str = "", **options: Any) -> Recipe:
    return Recipe(
        f"BEiT's fine-tuning of a {size} model on ImageNet-1k, {description}.",
        {**MASKED_FINETUNING, **options},
        "microsoft/unilm, beit/get_started_for_image_classification.md and the defaults of run_class_finetuning.py",
        "relative position biases and LayerScale, which are the model's; the warm-up from 1e-6; the head drawn with a "
        "small deviation instead of 0; weight decay of the tables of relative positions; DeepSpeed; a mean and "
        "deviation of 0.5 and bicubic resizing, unless the checkpoint's image processor has them",
        target,
    )


MASKED = {
    "mae-finetune": _mae("base", 5e-4, 0.65, 100, 0.1, "B/16 83.57%, mean of four runs"),
    "mae-finetune-large": _mae("large", 1e-3, 0.75, 50, 0.2, "L/16 85.87%, mean of four runs"),
    "mae-finetune-huge": _mae("huge", 1e-3, 0.75, 50, 0.3, "H/14 86.93%"),
    "mae-linear-probe": Recipe(
        "MAE's linear probe on ImageNet-1k: LARS on standardised features. They train large and huge models for 50 "
        "epochs.",
        {"mode": "linear", "optimizer": "lars", "learning_rates": [0.1], "epochs": 90.0, "warmup_epochs": 10.0,
         "probe_batch_size": 16384, "weight_decay": 0.0},
        "facebookresearch/mae, FINETUNE.md and the defaults of main_linprobe.py",
        "random crops and flips: the features of each image are computed once; running statistics of the batch norm",
        "B/16 67.8%, L/16 76.0%, H/14 77.2%",
        "linear_probe.py",
    ),
    "beit-finetune-base": _beit(
        "base", "after self-supervised pre-training only", learning_rate=4e-3, weight_decay=0.05, layer_decay=0.65,
        batch_size=1024, epochs=100, warmup_fraction=0.2, drop_path_rate=0.1, **MIXING,
    ),
    "beit-finetune-large": _beit(
        "large", "after self-supervised pre-training only", learning_rate=1e-3, weight_decay=0.05, layer_decay=0.75,
        batch_size=1024, epochs=50, warmup_fraction=0.1, drop_path_rate=0.2, **MIXING,
    ),
    "beit-finetune-base-imagenet22k": _beit(
        "base", "after intermediate fine-tuning on ImageNet-22k", learning_rate=2e-5, weight_decay=1e-8,
        layer_decay=0.85, batch_size=512, epochs=30, warmup_fraction=5 / 30, drop_path_rate=0.1, mixup=0.0, cutmix=0.0,
    ),
    "beit-finetune-large-imagenet22k": _beit(
        "large", "after intermediate fine-tuning on ImageNet-22k", "L/16 87.40%", learning_rate=2e-5,
        weight_decay=1e-8, layer_decay=0.9, batch_size=512, epochs=30, warmup_fraction=5 / 30, drop_path_rate=0.4,
        mixup=0.0, cutmix=0.0,
    ),
}  # fmt: skip


# torchvision


def _torchvision(model: str, augmentation: Mapping[str, Any], target: str) -> Recipe:
    return Recipe(
        f"torchvision's training of {model} from scratch on ImageNet-1k, for 300 epochs.",
        {"from_scratch": True, "initialization": "google", "optimizer": "adamw", "betas": [0.9, 0.999],
         "epsilon": 1e-8, "learning_rate": 3e-3,
         "weight_decay": 0.3, "batch_size": 4096, "epochs": 300, "schedule": "cosine", "warmup_fraction": 0.1,
         "max_grad_norm": 1.0, "label_smoothing": 0.11, "image_size": [224], "test_crop": 0.875, **TORCH_CROP,
         **augmentation, "mixup": 0.2, "cutmix": 1.0, "repeated_augmentation": 3, "ema_decay": 0.99973},
        "pytorch/vision, references/classification/README.md and the defaults of train.py",
        "the initial weights of the attention; weight decay of biases, norms, tokens and positions; the average is "
        "updated in each step with the 32nd root of the decay that it has every 32 steps; the warm-up from 3.3% and "
        "the schedule in whole epochs; ImageNet's mean and deviation",
        target,
    )  # fmt: skip


TORCHVISION = {
    "torchvision-vit-b16": _torchvision(
        "vit_b_16",
        {"augmentation": "randaugment", "magnitude_scale": "torchvision", "augmentation_layers": 2, "magnitude": 9,
         "magnitude_std": 0.0},
        "B/16 81.07%",
    ),
    "torchvision-vit-b32": _torchvision("vit_b_32", {"augmentation": "autoaugment"}, "B/32 75.91%"),
}  # fmt: skip


OTHERS = {
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
        "Dosovitskiy et al. 2021, section 4.1; google-research/big_vision, big_vision/evaluators/fewshot_lsr.py",
        script="linear_probe.py",
    ),
}  # fmt: skip

RECIPES: dict[str, Recipe] = {**PAPER, **AUGREG, **DEITS, **MASKED, **TORCHVISION, **OTHERS}


def recipe_options(name: str, known: Collection[str]) -> dict[str, Any]:
    """Return the options of a recipe.

    Args:
        name: one of `RECIPES`.
        known: the options of the script.

    Raises:
        TrainingError: The recipe does not exist or belongs to another script.
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
    """Return the descriptions, published results, sources and options of all recipes, as text."""
    paragraphs = []
    for name, recipe in RECIPES.items():
        words = [
            f"--{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for option, value in recipe.options.items()
        ]
        lines = [
            f"examples/{recipe.script}. {recipe.description}",
            *([f"Published: {recipe.target}."] if recipe.target else []),
            *([f"Source: {recipe.source}."] if recipe.source else []),
            *([f"Not included: {recipe.missing}."] if recipe.missing else []),
            " ".join(words),
        ]
        wrapped = [
            textwrap.fill(line, 110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
            for line in lines
        ]
        paragraphs.append("\n".join([name, *wrapped]))
    return "\n\n".join(paragraphs)
