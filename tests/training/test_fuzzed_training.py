"""Random options of the training scripts: one process, two processes and a resumed run give the same weights."""

import random
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, List, Value

from tests.sizes import draws
from tests.training.runs import save_digits, save_mixed_sizes
from tests.training.test_processes import FINETUNE, PRETRAIN, Case, compare

PROBLEMS = {"many": "multi_label_classification", "numbers": "regression"}
SINGLE = ("digits", "mixed")  # sets with one label per image


class Options(dict[str, Any]):
    """Randomly drawn options of a run."""

    def __init__(self, chance: random.Random, **given: Any) -> None:
        super().__init__(given)
        self.chance = chance

    def draw(self, probability: float, name: str, *values: Any) -> None:
        """Set an option to one of these values with a probability."""
        if self.chance.random() < probability:
            self[name] = self.chance.choice(values)


def draw(chance: random.Random, folder: Path) -> Case:
    """Draw a run with SGD, which does not amplify rounding like Adam."""
    data, script = chance.choice([*SINGLE, *PROBLEMS]), chance.choice([FINETUNE, FINETUNE, FINETUNE, PRETRAIN])
    options = Options(
        chance, optimizer="sgd", learning_rate=0.02, dataset=data if data == "digits" else str(folder / data),
        steps=chance.choice([7, 10, 13]), batch_size=chance.choice([12, 24]), evaluations=chance.choice([1, 2, 3]),
        log_every=chance.choice([1, 3, 4]), checkpoint_every=chance.choice([1, 2, 3]), seed=chance.randrange(5),
    )  # fmt: skip
    options.draw(0.5, "validation_fraction", 0.2, 0.3)
    options.draw(0.4, "gradient_accumulation_steps", 2, 3)
    chosen = script == FINETUNE and "validation_fraction" in options  # the selected weights depend on evaluations
    options.draw(0.5, "schedule", "linear", "inverse_sqrt", "constant", *["plateau"] * chosen)
    schedule = options.get("schedule", "cosine")
    if schedule == "cosine":
        options.draw(0.3, "restarts", 1, 2)
    elif schedule in ("inverse_sqrt", "constant"):
        options.draw(0.5, "cooldown_steps", 2, 3)
    elif schedule == "plateau":
        options["plateau_patience"] = 1
    options.draw(0.3, "warmup_steps", 0, 1, 3)
    options.draw(0.3, "max_grad_norm", 0.0, 0.1)
    options.draw(0.2, "base_batch_size", 6, 48)
    options.draw(0.2, "sharpness_radius", 0.05)
    if options.get("max_grad_norm"):
        options.draw(0.3, "clip_mode", "agc")
    options.draw(0.3, "horizontal_flip", 0.5)
    options.draw(0.3, "crop_scale", 0.3)
    options.draw(0.15, "num_workers", 1, 2)
    stop = chance.randrange(1, options["steps"])
    if script == PRETRAIN:
        options.draw(0.5, "target", "pixels")
        options.draw(0.5, "mask_ratio", 0.3)
        return Case({**options, "from_scratch": True}, script=script, stop=stop, limit=3e-6)
    options["report"], options["eval_batch_size"] = False, chance.choice([7, 26, 64])
    if data == "digits":
        options["shots_per_class"] = chance.choice([4, 7])
    if data in PROBLEMS:
        options["problem_type"] = PROBLEMS[data]
    fields = Options(chance)
    fields.draw(0.3, "drop_path_rate", 0.4)
    _draw_model(options)
    _draw_images(options, fields, mixed=data in SINGLE)
    if data in SINGLE:
        options.draw(0.3, "loss", "bce", "bce_sum")
        options.draw(0.3, "class_balance", "loss", "sampler")
    if chosen:
        options.draw(0.3, "early_stopping", 1, 2)
        options.draw(0.3, "best_kept", 2)
        options.draw(0.3, "best_metric", "loss", *["macro_f1", "calibration_error"] * (data in SINGLE))
    return Case(dict(options), dict(fields), stop=stop, limit=3e-6)


def _draw_model(options: Options) -> None:
    options.draw(0.3, "layer_decay", 0.7)
    options.draw(0.3, "ema_decay", 0.9, 0.5)
    options.draw(0.3, "gradient_checkpointing", True)
    options.draw(0.2, "drop_path_rate", 0.2)
    if options.chance.random() < 0.5:
        options.draw(0.3, "freeze", ["backbone"], ["1"])
    else:
        options.draw(0.3, "lora_rank", 2)


def _draw_images(options: Options, fields: Options, *, mixed: bool) -> None:
    native = options.chance.random() < 0.25
    if native:
        options["native_aspect_ratio"] = True
        options.draw(0.5, "max_num_patches", 9, 21)
    else:
        fields.draw(0.2, "patch_dropout_prob", 0.4)
        options.draw(0.2, "image_size", [24], [16, 32])
        options.draw(0.2, "test_size", [40, 24])
        options.draw(0.2, "test_crop", 0.875)
        if options.chance.random() < 0.2:
            options |= {"initial_image_size": 16, "growth_epochs": 1}
        if "crop_scale" not in options:
            options.draw(0.3, *options.chance.choice([("crop_padding", 3), ("resize_to", 40)]))
    options.draw(0.4, "augmentation", "affine", "randaugment", "autoaugment", "trivialaugment", "threeaugment")
    options.draw(0.3, "random_erasing", 0.5)
    if any(name in options for name in ("augmentation", "random_erasing", "horizontal_flip", "crop_scale")):
        options.draw(0.3, "repeated_augmentation", 2, 3)
    if mixed and not native:
        options.draw(0.3, "mixup", 0.4)
        options.draw(0.3, "cutmix", 1.0)
        if "mixup" in options or "cutmix" in options:
            options.draw(0.3, "mixup_probability", 0.5)
            options.draw(0.3, "mixup_off_epoch", 1)


def save_sets(folder: Path) -> None:
    """Save data sets with one label, with several labels, and with a number per image."""
    save_mixed_sizes(folder / "mixed")
    bits = List(ClassLabel(names=[*"abcd"]))
    save_digits(folder / "many", "labels", bits, lambda digit: [bit for bit in range(4) if digit >> bit & 1], 41, 29)
    save_digits(folder / "numbers", "target", Value("float32"), lambda digit: digit - 4.5, 41, 29)


@pytest.mark.slow
def test_generated_options_give_the_same_weights_resumed_and_in_two_processes(tmp_path):
    save_sets(tmp_path)
    compare({str(seed): draw(random.Random(seed), tmp_path) for seed in range(draws(2, nightly=24))}, tmp_path)
