"""Helpers of the training tests: the example scripts as modules and as processes, and small models for them."""

import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from safetensors.torch import load_file
from transformers import (
    ConvNextImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.training.data import load_splits
from plain_vit.training.data.datasets import EMBEDDED, load_digits
from plain_vit.training.run.folder import read_log
from tests import ROOT
from tests.conftest import randomize_
from tests.processes import LIMIT, run_forked
from tests.tiny import tiny_config

EXAMPLES = ROOT / "examples"
ENTRIES = {
    "finetune_image_classification": ("finetune", "FinetuneArguments"),
    "pretrain": ("pretrain", "PretrainArguments"),
    "evaluate_image_classification": ("evaluate", "EvaluateArguments"),
    "extract_features": ("extract", "ExtractArguments"),
    "linear_probe": ("probe", "ProbeArguments"),
    "predict": ("predict", "PredictArguments"),
}
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SMALL = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 20}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic"}

# Both would take most of the time of a short run: Accelerate collects garbage among all imported objects, and every run
# encodes the same 1,797 digits.
gc.freeze()
_digits = functools.cache(load_digits)
EMBEDDED["digits"] = lambda: DatasetDict(_digits())


@functools.cache
def open_script(name: str) -> Any:
    """Import one of the examples as a module."""
    specification: Any = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and transformers look up the module
    specification.loader.exec_module(module)
    return module


def call(script: str, /, **options: Any) -> Any:
    """Run a script in this process, and return its result; options may be paths."""
    module, (function, arguments) = open_script(script), ENTRIES[script]
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return getattr(module, function)(getattr(module, arguments)(**given))


finetune, pretrain, evaluate, extract, probe, predict = (functools.partial(call, script) for script in ENTRIES)


def runs_in(folder: Path, **defaults: Any) -> Callable[..., Path]:
    """Return a function that fine-tunes, with these and further options, in a named subfolder."""

    def run(name: str, **options: Any) -> Path:
        finetune(**{**defaults, "output_dir": folder / name, **options})
        return folder / name

    return run


# Processes


def words_of(options: dict[str, object]) -> list[str]:
    """Return options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def start(script: str, launcher: list[str], **options: object) -> subprocess.Popen[str]:
    """Start a script in its own process group without waiting for it."""
    environment = {
        **os.environ, "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    return subprocess.Popen(
        [*launcher, str(EXAMPLES / f"{script}.py"), *words_of(options)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def launch(script: str, launcher: list[str], **options: object) -> str:
    """Run a script to its end, and return its output; processes are forked instead of started by the launcher."""
    if launcher in (PYTHON, TORCHRUN):
        return run_forked([str(EXAMPLES / f"{script}.py"), *words_of(options)], 1 if launcher == PYTHON else 2)
    process = start(script, launcher, **options)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def finish(process: subprocess.Popen[str], limit: float = LIMIT) -> str:
    """Wait for a script, and return its output.

    Raises:
        AssertionError: The script did not end in time; all its processes are aborted and print their stack traces.
    """
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        everyone = [*children_of(process.pid), process.pid]
        for each in everyone:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)  # otherwise they would notice each other's end
        for each in everyone:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGABRT)  # faulthandler prints the stacks of all threads
                os.kill(each, signal.SIGCONT)
                time.sleep(0.5)
        raise AssertionError(f"Not done after {limit:.0f} s:\n{process.communicate()[0]}") from None


def launch_and_kill(script: str, launcher: list[str], *, after_step: int, output_dir: Path, **options: object) -> None:
    """Run a script until there is a checkpoint of this step, and kill all its processes."""
    process = start(script, launcher, output_dir=output_dir, **options)
    wait_for_step(process, output_dir, after_step)
    for child in children_of(process.pid):
        with suppress(ProcessLookupError):  # workers come and go with each evaluation
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()
    assert not (output_dir / "config.json").exists(), "it ended before it was killed"


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until there is a checkpoint of this step or a later one."""
    end = time.monotonic() + LIMIT
    while not any(int(checkpoint.name[5:]) >= step for checkpoint in folder.glob("checkpoints/step_*")):
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"No checkpoint of step {step}:\n{finish(process, limit=1)}")
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the descendants of a process, the deepest first."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [descendant for child in map(int, listed.stdout.split()) for descendant in (*children_of(child), child)]


# Results


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_bits(one: Path, other: Path) -> None:
    """Assert that the logs and weights of two runs are equal bit for bit."""
    assert read_log(one) == read_log(other)
    weights, weights_again = weights_of(one), weights_of(other)
    assert weights.keys() == weights_again.keys()
    assert all(torch.equal(tensor, weights_again[name]) for name, tensor in weights.items())


# Data


def save_mixed_sizes(folder: Path, train: int = 42, test: int = 31) -> Path:
    """Save images of three classes with sides of 10 to 69 pixels, as a train and a test split."""
    features = Features({"image": Image(), "label": ClassLabel(names=["red", "green", "blue"])})
    splits = {}
    for seed, (split, count) in enumerate({"train": train, "test": test}.items()):
        draw = np.random.default_rng(seed)
        images = [draw.integers(0, 150, (*draw.integers(10, 70, 2), 3), dtype=np.uint8) for _ in range(count)]
        labels = [place % 3 for place in range(count)]
        for image, label in zip(images, labels, strict=True):
            image[..., label] += 60
        rows = {"image": [PIL.Image.fromarray(image) for image in images], "label": labels}
        splits[split] = Dataset.from_dict(rows, features=features)
    DatasetDict(splits).save_to_disk(folder)
    return folder


def save_digits(
    folder: Path, column: str, kind: Any, label_of: Callable[[int], Any], train: int = 70, test: int = 40
) -> str:
    """Save the first digits of both splits with other labels."""
    splits = {}
    for split, count in {"train": train, "test": test}.items():
        rows = load_splits("digits")[split].select(range(count))
        labels = {"image": rows["image"][:], column: [label_of(digit) for digit in rows["label"][:]]}
        splits[split] = Dataset.from_dict(labels, features=Features({"image": Image(), column: kind}))
    DatasetDict(splits).save_to_disk(folder)
    return str(folder)


# Models


def small_vit(**changes: object) -> PlainViTForImageClassification:
    config = PlainViTConfig(**{**SMALL, "image_size": (24, 16), "patch_size": 8, "num_labels": 5, **changes})
    model = PlainViTForImageClassification(config)
    randomize_(model)
    return model


def save_plain_vit(folder: Path, **changes: Any) -> Path:
    """Save a plain ViT with 4 x 3 patches and three classes."""
    config = tiny_config(**{"image_size": (32, 24), "patch_size": 8, "num_labels": 3, **changes})
    randomize_(PlainViTForImageClassification(config)).save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 32, "width": 24}).save_pretrained(folder)
    return folder


def save_stock_vit(folder: Path, **changes: Any) -> Path:
    """Save a ViT of transformers for three classes."""
    config = ViTConfig(
        hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=28, image_size=24, patch_size=8,
        num_labels=3, **changes,
    )  # fmt: skip
    randomize_(ViTForImageClassification(config)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return folder


def save_resnet(folder: Path, num_labels: int = 3) -> Path:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=num_labels
    )
    randomize_(ResNetForImageClassification(config)).save_pretrained(folder)
    ConvNextImageProcessor(size={"shortest_edge": 33}, crop_pct=1.0).save_pretrained(folder)
    return folder
