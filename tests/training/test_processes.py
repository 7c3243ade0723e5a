"""One process and two give the same weights, whatever is random in training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPImageProcessor,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipImageProcessor,
)

from plain_vit.training.data import load_splits
from plain_vit.training.run.folder import read_log
from tests.conftest import randomize_
from tests.training.run_cases import run_case, run_in_two
from tests.training.runs import (
    SMALL,
    save_mixed_sizes,
    save_plain_vit,
    save_resnet,
    weights_of,
)

FINETUNE, PRETRAIN = "finetune_image_classification", "pretrain_masked_patches"
# 70 images in batches of 12: epochs end within batches. 360 evaluated images are not a multiple of 26. SGD, because
# Adam makes steps of the same size of gradients that differ only by rounding.
COMMON = {"dataset": "digits", "steps": 16, "batch_size": 12, "evaluations": 2, "log_every": 3, "optimizer": "sgd",
          "learning_rate": 0.1}  # fmt: skip
TUNED = {**COMMON, "shots_per_class": 7, "eval_batch_size": 26, "report": False}
MIXED = {**TUNED, "mixup": 0.8, "cutmix": 1.0}
RANDOM = {"drop_path_rate": 0.4, "patch_dropout_prob": 0.4}  # of the model

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nothing random": (FINETUNE, TUNED, {}),
    "mixup": (FINETUNE, {**TUNED, "mixup": 0.8}, {}),
    "cutmix": (FINETUNE, {**TUNED, "cutmix": 1.0}, {}),
    "both with binary losses": (FINETUNE, {**MIXED, "loss": "bce"}, {}),
    "drop path": (FINETUNE, TUNED, {"drop_path_rate": 0.4}),
    "patch dropout": (FINETUNE, TUNED, {"patch_dropout_prob": 0.4}),
    "everything": (FINETUNE, {**MIXED, "augmentation": "affine", "repeated_augmentation": 3, "ema_decay": 0.9,
                              "class_balance": "sampler", "gradient_checkpointing": True}, RANDOM),
    "accumulated": (FINETUNE, {**MIXED, "gradient_accumulation_steps": 3}, RANDOM),
    "masked patches": (PRETRAIN, {**COMMON, "from_scratch": True, "batch_size": 10, "validation_fraction": 0.013}, {}),
}  # fmt: skip
SLOW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "workers": (FINETUNE, {**MIXED, "num_workers": 2}, RANDOM),
    "masked patches in workers": (PRETRAIN, {**CASES["masked patches"][1], "num_workers": 2}, {}),
    "compiled": (FINETUNE, {**MIXED, "compile": True}, RANDOM),
    "compiled and accumulated": (FINETUNE, {**MIXED, "compile": True, "gradient_accumulation_steps": 2}, RANDOM),
    "bfloat16": (FINETUNE, {**MIXED, "mixed_precision": "bf16"}, RANDOM),
    "bfloat16 copies": (FINETUNE, {**MIXED, "mixed_precision": "bf16", "param_dtype": "bf16"}, RANDOM),
}


def save_clip(folder: Path) -> Path:
    """Save a classifier whose last norm no logit depends on."""
    config = CLIPConfig(vision_config={**SMALL, "image_size": 24, "patch_size": 8}, num_labels=10)
    randomize_(CLIPForImageClassification(config)).save_pretrained(folder)
    CLIPImageProcessor(size={"height": 24, "width": 24}, do_center_crop=False).save_pretrained(folder)
    return folder


def save_siglip(folder: Path) -> Path:
    """Save a classifier of the mean of the patches, which has a pooling head."""
    config = SiglipConfig(vision_config={**SMALL, "image_size": 24, "patch_size": 8}, num_labels=10)
    randomize_(SiglipForImageClassification(config)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return folder


SAVED = {"CLIP": save_clip, "SigLIP": save_siglip}


def compare(cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]], folder: Path) -> None:
    """Run the cases in one process and in two, and compare logs and weights."""
    of_two = []
    for name, (script, options, fields) in cases.items():
        save = SAVED.get(name, save_plain_vit)
        model = str(save(folder / name / "model", **fields))
        options = {**options, "model": model}
        run_case(script, {**options, "output_dir": str(folder / name / "one")})
        of_two.append((script, {**options, "output_dir": str(folder / name / "two")}))
    run_in_two(of_two, folder / "cases.json")
    for name, (script, options, _) in cases.items():
        if script == FINETUNE:
            results = [json.loads((folder / name / count / "results.json").read_text()) for count in ("one", "two")]
            images = len(load_splits(options["dataset"])["test"])
            assert [result["images_evaluated"] for result in results] == [images, images]
            if not options.get("mixed_precision"):  # its roundings may decide an image
                assert results[0]["test_accuracy"] == results[1]["test_accuracy"]
    differences = {name: difference(folder / name / "one", folder / name / "two") for name in cases}
    limits = {name: 1e-2 if options.get("mixed_precision") else 1e-6 for name, (_, options, _) in cases.items()}
    assert not {name: value for name, value in differences.items() if value > limits[name]}


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of the weights of two runs, which are of the order of 1."""
    logs = [read_log(folder) for folder in (one, other)]
    assert [line.keys() for line in logs[0]] == [line.keys() for line in logs[1]]
    weights, others = weights_of(one), weights_of(other)
    assert weights.keys() == others.keys()
    return max(float((tensor - others[name]).abs().max()) for name, tensor in weights.items())


def many_sizes(folder: Path) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return runs on images of many sizes; 42 images in batches of 12."""
    options = {**COMMON, "dataset": str(save_mixed_sizes(folder / "data")), "report": False, "eval_batch_size": 7,
               "native_aspect_ratio": True, "max_num_patches": 21, "crop_scale": 0.4, "horizontal_flip": 0.5,
               "augmentation": "randaugment", "gradient_accumulation_steps": 3, "repeated_augmentation": 2,
               "ema_decay": 0.9, "drop_path_rate": 0.4}  # fmt: skip
    return {"many sizes": (FINETUNE, options, {})}


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one(tmp_path):
    cases = {"everything": CASES["everything"], **{name: (FINETUNE, TUNED, {}) for name in SAVED}}
    compare({**cases, **many_sizes(tmp_path)}, tmp_path)


@pytest.mark.nightly
def test_running_statistics_of_two_processes_are_those_that_are_saved(tmp_path):
    """An average of weights is evaluated with them, in each process."""
    options = {**TUNED, "model": str(save_resnet(tmp_path / "model", num_labels=10)), "ema_decay": 0.5}
    cases = [(FINETUNE, {**options, "output_dir": str(tmp_path / "run"), "resume": resume}) for resume in (False, True)]
    found = []
    for case in cases:
        run_in_two([case], tmp_path / "cases.json")
        found.append(json.loads((tmp_path / "run" / "results.json").read_text()))
    names = ("test_loss", "test_calibration_error", "test_accuracy")
    assert [found[0][name] for name in names] == [found[1][name] for name in names]


@pytest.mark.nightly
def test_two_processes_give_the_weights_of_one_whatever_is_random(tmp_path):
    compare({name: case for name, case in CASES.items() if name != "everything"}, tmp_path)


@pytest.mark.nightly
def test_two_processes_give_the_weights_of_one_with_workers_and_compiled(tmp_path):
    torch.compiler.reset()
    compare(SLOW, tmp_path)
