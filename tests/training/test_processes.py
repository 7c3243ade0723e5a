"""One process, two processes and a resumed run give the same weights, with every kind of randomness in training."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, List, Value
from safetensors.torch import load_file
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPImageProcessor,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipImageProcessor,
)

from plain_vit.training.run.folder import read_log
from tests.conftest import randomize_
from tests.training.run_cases import run_case, run_in_two
from tests.training.runs import (
    SMALL,
    assert_same_bits,
    evaluate,
    save_digits,
    save_mixed_sizes,
    save_plain_vit,
    save_resnet,
    save_stock_vit,
    weights_of,
)

FINETUNE, PRETRAIN = "finetune_image_classification", "pretrain"
EVALUATE, PROBE = "evaluate_image_classification", "linear_probe"


@dataclass
class Case:
    """A run that is done without interruption, stopped and resumed, and in two processes.

    Args:
        options: options of the script.
        fields: changes of the model.
        save: function that saves the model.
        two: options that differ with two processes; None if two processes give other weights than one.
        stop: the step before which the run is stopped.
        limit: the largest allowed difference of weights, which are of order 1.
    """

    options: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    script: str = FINETUNE
    save: Callable[..., Path] = save_plain_vit
    two: dict[str, Any] | None = field(default_factory=dict)
    stop: int = 5
    limit: float = 1e-6


# 70 images in batches of 12, so epochs end within batches. 40 evaluated images are not a multiple of 26. SGD, because
# Adam takes steps of full size even for gradients that are only rounding errors.
COMMON = {"dataset": "digits", "steps": 8, "batch_size": 12, "evaluations": 2, "log_every": 3, "optimizer": "sgd",
          "learning_rate": 0.1, "checkpoint_every": 2}  # fmt: skip
TUNED = {**COMMON, "eval_batch_size": 26, "report": False}
MIXED = {**TUNED, "mixup": 0.8, "cutmix": 1.0}
RANDOM = {"drop_path_rate": 0.4, "patch_dropout_prob": 0.4}  # of the model
NATIVE = {**TUNED, "dataset": "mixed", "native_aspect_ratio": True, "max_num_patches": 21, "crop_scale": 0.4,
          "horizontal_flip": 0.5, "ema_decay": 0.9, "drop_path_rate": 0.4}  # fmt: skip


def save_clip(folder: Path) -> Path:
    """Save a classifier whose logits do not depend on its last norm."""
    config = CLIPConfig(vision_config={**SMALL, "image_size": 24, "patch_size": 8}, num_labels=10)
    randomize_(CLIPForImageClassification(config)).save_pretrained(folder)
    CLIPImageProcessor(size={"height": 24, "width": 24}, do_center_crop=False).save_pretrained(folder)
    return folder


def save_siglip(folder: Path) -> Path:
    """Save a mean-pooling classifier that has an unused pooling head."""
    config = SiglipConfig(vision_config={**SMALL, "image_size": 24, "patch_size": 8}, num_labels=10)
    randomize_(SiglipForImageClassification(config)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return folder


CASES = {
    "everything": Case({**MIXED, "augmentation": "affine", "repeated_augmentation": 3, "ema_decay": 0.9,
                        "model_ema_warmup": True, "train_interpolation": "random", "color_jitter": [0.4],
                        "class_balance": "sampler", "gradient_checkpointing": True, "schedule": "constant",
                        "cooldown_steps": 3, "sharpness_radius": 0.2},
                       RANDOM, two={"gradient_accumulation_steps": 2}),
    "accumulated, binary losses, selected": Case({
        **MIXED, "loss": "bce", "gradient_accumulation_steps": 3, "num_workers": 2, "clip_mode": "agc",
        "max_grad_norm": 0.01, "validation_fraction": 0.2, "early_stopping": 4, "best_kept": 2,
    }, RANDOM),
    "low rank, recipes": Case({
        **MIXED, "lora_rank": 2, "crop_padding": 3, "augmentation": "randaugment", "magnitude_std": 0.5,
        "random_erasing": 0.5, "random_erasing_mode": "pixel", "bce_target_threshold": 0.0, "loss": "bce",
        "label_smoothing": 0.0, "head_bias": -2.3, "base_batch_size": 6, "min_learning_rate": 1e-4, "test_crop": 0.875,
    }),
    "plateau": Case({**TUNED, "validation_fraction": 0.3, "schedule": "plateau", "plateau_patience": 1,
                     "evaluations": 8}),
    "distillation token": Case({**TUNED, "teacher": "teacher", "distillation": "hard", "mixup": 0.2},
                               {"use_distillation_token": True}),
    "many sizes": Case({**NATIVE, "augmentation": "randaugment", "gradient_accumulation_steps": 3,
                        "repeated_augmentation": 2}),
    "several labels": Case({**TUNED, "dataset": "labels", "problem_type": "multi_label_classification", "mixup": 0.3,
                            "cutmix": 1.0}, save=save_clip),
    "numbers": Case({**TUNED, "dataset": "numbers", "problem_type": "regression", "learning_rate": 0.01},
                    save=save_siglip),
    "masked patches": Case({**COMMON, "from_scratch": True, "num_workers": 1, "crop_scale": 0.7, "horizontal_flip": 0.5,
                            "validation_fraction": 0.03, "gradient_accumulation_steps": 2}, script=PRETRAIN),
    "masked autoencoder": Case({**COMMON, "method": "mae", "norm_pix_loss": True, "decoder_embed_dim": 20,
                                "decoder_depth": 2, "decoder_num_heads": 5, "crop_scale": 0.7, "horizontal_flip": 0.5,
                                "validation_fraction": 0.03}, RANDOM, script=PRETRAIN,
                               two={"gradient_accumulation_steps": 3}),
    "features of a teacher": Case({**COMMON, "method": "distillation", "teacher": "teacher", "crop_scale": 0.7,
                                   "num_workers": 1, "validation_fraction": 0.03}, RANDOM, script=PRETRAIN),
    "bfloat16 copies": Case({**MIXED, "mixed_precision": "bf16", "param_dtype": "bf16"}, RANDOM, limit=1e-2),
    "compiled": Case({**MIXED, "eval_batch_size": 20}, {**RANDOM, "num_hidden_layers": 1},
                     two={"compile": True, "gradient_accumulation_steps": 2}),
    "dropout": Case({**TUNED, "optimizer": "adamw", "layer_decay": 0.8, "freeze": ["1"]},
                    {"hidden_dropout_prob": 0.1}, save=save_stock_vit, two=None),
    "many sizes, streamed": Case({**NATIVE, "streaming": True, "stream_images": 42, "num_workers": 2,
                                  "random_erasing": 0.4, "random_erasing_mode": "pixel", "lora_rank": 2}, two=None),
}  # fmt: skip


def compare(cases: dict[str, Case], folder: Path) -> None:
    """Run each case whole and resumed, in two processes, and resumed with another number of processes."""
    of_two: list[tuple[Any, ...]] = []
    moved = dict[Path, tuple[str, dict[str, Any]]]()
    for number, (name, case) in enumerate(cases.items()):
        here = folder / name
        options = {**case.options, "model": str(case.save(here / "model", **case.fields))}
        runs = {run: {**options, "output_dir": str(here / run)} for run in ("one", "resumed", "two", "moved")}
        run_case(case.script, runs["one"])
        run_case(case.script, runs["resumed"], stop_before=case.stop)
        if ended := (here / "resumed" / "config.json").exists():
            assert "early_stopping" in options  # the only other reason for an early end
        elif number % 2:
            shutil.copytree(here / "resumed", here / "moved")
        if not ended:
            run_case(case.script, {**runs["resumed"], "resume": True})
        assert_same_bits(here / "one", here / "resumed")
        if case.two is None:
            continue
        of_two.append((case.script, {**runs["two"], **case.two}))
        if (here / "moved").exists():
            of_two.append((case.script, {**runs["moved"], "resume": True}))
        else:
            of_two.append((case.script, runs["moved"], case.stop))
            moved[here / "moved"] = case.script, {**runs["moved"], "resume": True}
    run_in_two(of_two, folder / "cases.json")
    for run, (script, options) in moved.items():
        if not (run / "config.json").exists():
            run_case(script, options)
    differences = {
        (name, run): off
        for name, case in cases.items()
        for run in (("two", "moved") if case.two is not None else ())
        if (off := difference(folder / name / "one", folder / name / run, case)) > case.limit
    }
    assert not differences, {name: cases[name] for name, _ in differences}


def difference(one: Path, other: Path, case: Case) -> float:
    """Return the largest difference between the weights of two runs, and compare their logs and results."""
    logs = [read_log(folder) for folder in (one, other)]
    assert [line.keys() for line in logs[0]] == [line.keys() for line in logs[1]], one
    if not case.options.get("mixed_precision"):  # rounding may change the class of an image
        for line, line_of_other in zip(*logs, strict=True):
            assert line_of_other == pytest.approx(line, rel=1e-5, abs=1e-6), one
    if case.script == FINETUNE:
        results, others = (json.loads((folder / "results.json").read_text()) for folder in (one, other))
        assert results["images_evaluated"] == others["images_evaluated"]
        if not case.options.get("mixed_precision"):
            for name in ("test_loss", "test_accuracy", "test_mean_average_precision", "test_r2"):
                assert others.get(name) == pytest.approx(results.get(name), abs=1e-5), (one, name)
    weights, others = weights_of(one), weights_of(other)
    assert weights.keys() == others.keys()
    return max(float((tensor - others[name]).abs().max()) for name, tensor in weights.items())


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a teacher and the data of the cases: digits, digits with different labels, images of many sizes."""
    folder = tmp_path_factory.mktemp("sets")
    digits = dict(enumerate(map(str, range(10))))
    return {
        "digits": save_digits(folder / "digits", "label", ClassLabel(names=[*digits.values()]), int),
        "labels": save_digits(folder / "labels", "labels", List(Value("string")), lambda d: ["a", "b"][d % 3 :]),
        "numbers": save_digits(folder / "numbers", "target", List(Value("float64")), lambda d: [d / 3, 7.0 - d]),
        "mixed": str(save_mixed_sizes(folder / "mixed")),
        "teacher": str(save_plain_vit(folder / "teacher", num_labels=10, id2label=digits)),
    }


@pytest.mark.slow
def test_one_process_two_and_resumed_runs_give_the_same_weights(sets, tmp_path):
    torch.compiler.reset()
    cases = {}
    for name, case in CASES.items():
        places: dict[str, Any] = {key: sets[case.options[key]] for key in ("dataset", "teacher") if key in case.options}
        cases[name] = replace(case, options={**case.options, **places})
    compare(cases, tmp_path)


@pytest.mark.slow
def test_running_statistics_of_two_processes_are_those_that_are_saved(sets, tmp_path):
    """Averaged weights are evaluated with these statistics in each process."""
    model = save_resnet(tmp_path / "model", num_labels=10)
    options = {**TUNED, "dataset": sets["digits"], "model": str(model), "ema_decay": 0.5}
    run_in_two([(FINETUNE, {**options, "output_dir": str(tmp_path / "run")})], tmp_path / "cases.json")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    saved = evaluate(model=tmp_path / "run", dataset=sets["digits"])
    assert results["test_loss"] == pytest.approx(saved["loss"], rel=1e-5)
    assert results["test_accuracy"] == saved["top1_accuracy"]


@pytest.mark.slow
def test_two_processes_evaluate_every_image_once_and_give_the_probes_of_one(sets, tmp_path):
    model = {"model": sets["teacher"], "dataset": sets["digits"]}
    probe = {**model, "dataset": sets["mixed"], "epochs": 2, "learning_rates": [0.01]}
    cases: dict[str, list[tuple[str, dict[str, Any]]]] = {
        run: [
            (EVALUATE, {**model, "batch_size": 26, "num_workers": 1, "output": str(tmp_path / run / "results.json")}),
            *((PROBE, {**probe, **mode, "output_dir": str(tmp_path / run / "probe")}) for mode in (
                {"mode": "few_shot", "shots": [1, 2]}, {"mode": "knn", "neighbors": [10]}, {"mode": "attentive"},
            )),
        ] for run in ("one", "two")
    }  # fmt: skip
    for script, options in cases["one"]:
        run_case(script, options)
    run_in_two(cases["two"], tmp_path / "cases.json")
    one, two = (json.loads((tmp_path / run / "results.json").read_text()) for run in cases)
    assert (two["processes"], two["images"]) == (2, 40)
    for name in ("top1_accuracy", "top5_accuracy", "classes", "confused"):
        assert two[name] == one[name]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    one, two = (json.loads((tmp_path / run / "probe" / "results.json").read_text()) for run in cases)
    assert {name: one[name] for name in ("few_shot", "knn", "attentive")} == {
        name: two[name] for name in ("few_shot", "knn", "attentive")
    }
    one, two = (load_file(tmp_path / run / "probe" / "features.safetensors") for run in cases)
    for name, tensor in one.items():  # batches of another size are summed in a different order
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5 * tensor.abs().max().item())
    for split in ("train", "validation", "test"):  # and tokens rounded to 11 bits
        tokens, others = (np.load(tmp_path / run / "probe" / f"tokens-{split}.npy").astype(np.float32) for run in cases)
        np.testing.assert_allclose(others, tokens, rtol=2**-10, atol=1e-4)
