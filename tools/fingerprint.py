"""Show that a change of the code changes no result: neither the models converted from sources nor training runs.

    python -m tools.fingerprint sources before.json   # minutes, on one core
    python -m tools.fingerprint training before.json  # minutes, on two
    python -m tools.fingerprint compare before.json after.json --renamed old.module=new.module

`sources` runs the tests that measure the sources for docs/what_opens.md, with a pytest plugin that records every
conversion. Seeds are fixed and there is one thread, so on one machine with the same releases, equal code writes equal
files. If the old tree does not contain this file, copy it there.
"""

import argparse
import functools
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
LINES = "PLAIN_VIT_FINGERPRINT"  # names the file to which the pytest processes append lines
SWEEP = "tests.sources.sweep"
TEMPORARY = re.compile(r"/[^\s'\"]*/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?")
CONVERSIONS = ("from_module", "to_module", "from_checkpoint", "convert_checkpoint")
TIMES = ("seconds", "images_per_second", "waiting_for_data", "memory_bytes", "tflops")


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the dtype, the shape and a hash of the bits of each tensor, in order."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]} {_bits(tensor)}"
        for name, tensor in tensors.items()
    }


def _bits(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(octets).hexdigest()[:16]


# Sources: this module is also a plugin of pytest


def pytest_configure() -> None:
    """Wrap the public conversions to record their results, before any test imports them."""
    from plain_vit import conversion  # not before conftest.py has set the environment
    from tests.sources import sweep

    for name in CONVERSIONS:
        setattr(conversion, name, _observed(getattr(conversion, name)))
    sweep.record = lambda result: _write(source=result["source"], measured={**result, "date": None})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that record a source."""
    items[:] = [item for item in items if isinstance(item, pytest.Function) and _records(item.function)]


def _records(function: Any) -> bool:
    """Return whether a test calls `record`, itself or through a function of its module."""
    function = inspect.unwrap(function)
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    codes = [function.__code__, *(each.__code__ for each in called if inspect.isfunction(each))]
    return any("record" in code.co_names for code in codes)


def _observed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **keywords: Any) -> Any:
        try:
            result = function(*args, **keywords)
        except Exception as error:
            _write(function=function.__name__, facts={"error": f"{type(error).__name__}: {error}"})
            raise
        _write(function=function.__name__, facts=facts_of(result))
        return result

    return observed


def facts_of(result: Any) -> dict[str, Any]:
    """Return the facts about a source model, a converted model or a converted checkpoint."""
    report: Any = getattr(result, "report", None)
    processor: Any = getattr(result, "image_processor", None)
    model = result if report is None else result.model
    config: Any = getattr(model, "config", None)
    facts = {
        "class": type(model).__name__,
        "tensors": described(model.state_dict()),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "training": model.training,
        "config": config.to_dict() if hasattr(config, "to_dict") else None,
    }
    if report is not None:
        facts |= {
            "layout": report.layout, "inferences": [str(each) for each in report.inferences], "used": report.used,
            "ignored": dict(report.ignored), "notes": [*report.notes], "report": str(report).splitlines(),
            "image_processor": None if processor is None else processor.to_dict(),
        }  # fmt: skip
    return facts


def _write(**line: Any) -> None:
    """Append a line with the name of the running test; skipped in fixtures, which run in whichever test is first."""
    test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if phase == "(call)":
        text = TEMPORARY.sub("TEMPORARY", json.dumps({"test": test, **line}, default=str))
        with open(os.environ[LINES], "a", encoding="utf-8") as file:
            file.write(text + "\n")


def sources() -> dict[str, Any]:
    """Run the tests that record sources, and return their findings by source and test."""
    files = [str(path) for path in ROOT.glob("tests/*/test_*.py") if f"from {SWEEP} import record" in path.read_text()]
    files = sorted(path for path in files if not path.endswith("test_what_opens.py"))  # it tests `record` itself
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines.jsonl")
        environment = {**os.environ, LINES: str(lines), "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "tools.fingerprint", "-p", "no:cacheprovider"]
        code = subprocess.run([*command, *files], cwd=ROOT, env=environment).returncode
        if code:
            sys.exit(f"tests failed with exit code {code}: their sources would be missing")
        return by_source(lines)


def by_source(lines: Path) -> dict[str, Any]:
    """Group recorded lines by source, test, function and number of the call."""
    found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    source_of = {line["test"]: line["source"] for line in found if "source" in line}
    result: dict[str, dict[str, Any]] = {}
    for line in found:
        of_source = result.setdefault(line.get("source") or source_of.get(line["test"], line["test"]), {})
        test = re.sub(r".*::(\w+).*", r"\1", line["test"])
        kind = f"{test} {line.get('function', 'measured')}"
        number = sum(name.startswith(f"{kind} ") for name in of_source)
        of_source[f"{kind} {number}"] = line.get("facts") or line["measured"]
    return result


# Training

COMMON = {
    "dataset": "digits", "max_images": 100, "steps": 12, "batch_size": 12, "checkpoint_every": 2, "evaluations": 2,
    "log_every": 1, "learning_rate": 0.01, "num_workers": 0, "report": False,
}  # fmt: skip
MIXED = {"mixup": 0.8, "cutmix": 1.0, "horizontal_flip": 0.5, "dropout": 0.1, "drop_path_rate": 0.3}
STREAM = {"streaming": True, "stream_images": 70, "stream_buffer": 20, "max_images": None, "mixup": 0.8}
SHARDED = {"shard": True, "ema_decay": 0.9}
PATCHES = {"report": None, "max_images": None, "from_scratch": True, "crop_scale": 0.7, "validation_fraction": 0.1}
# Number of processes, and options; None removes an option.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "2 processes": (2, {}),
    "accumulation": (1, {"gradient_accumulation_steps": 3}),
    "2 processes, accumulation": (2, {"gradient_accumulation_steps": 3}),
    "average, selected weights": (1, {"ema_decay": 0.9, "validation_fraction": 0.2, "best_kept": 2}),
    "2 processes, average, mixing, dropout": (2, {**MIXED, "ema_decay": 0.9}),
    "LoRA": (1, {"lora_rank": 2, "loss": "bce", "random_erasing": 0.5}),
    "2 processes, LoRA": (2, {"lora_rank": 2}),
    "2 processes, sharded, average": (2, SHARDED),
    "2 processes, sharded, LoRA": (2, {"shard": True, "lora_rank": 2, "gradient_accumulation_steps": 2}),
    "stream": (1, STREAM),
    "2 processes, stream": (2, STREAM),
    "many sizes": (1, {"native_aspect_ratio": True, "crop_scale": 0.3, "augmentation": "randaugment"}),
    "growing images": (1, {"initial_image_size": 8, "growth_epochs": 1, "optimizer": "sgd"}),
    "sharpness": (1, {"sharpness_radius": 0.2, "layer_decay": 0.8, "gradient_checkpointing": True}),
    "masked patches": (1, PATCHES),
    "2 processes, masked patches": (2, {**PATCHES, "gradient_accumulation_steps": 2}),
}
KILLED = ("average, selected weights", "2 processes, sharded, average", "stream")


def training() -> Iterator[tuple[str, dict[str, Any]]]:
    """Do the training runs, some also killed and resumed, and yield the facts about each."""
    from tests.training.kill_matrix import Run  # sets the environment for tests
    from tests.training.runs import PYTHON, TORCHRUN, launch, save_plain_vit

    with tempfile.TemporaryDirectory() as temporary:
        for name, (processes, own) in RUNS.items():
            script = "pretrain" if "masked patches" in name else "finetune_image_classification"
            options = {option: value for option, value in {**COMMON, **own}.items() if value is not None}
            options["model"] = str(save_plain_vit(Path(temporary, name, "model")))
            for kind in ("whole", "killed and resumed") if name in KILLED else ("whole",):
                folder, resume = Path(temporary, name, kind), {}
                if kind != "whole":
                    log, resume = Path(temporary, name, "log"), {"resume": True}
                    run = Run(processes, {**options, "output_dir": str(folder)}, log)
                    while not [*folder.glob("checkpoints/step_*")] and not run.wait(0.02):
                        pass
                    run.kill()
                    was_killed = folder.is_dir() and not (folder / "config.json").exists()
                    assert was_killed, f"{name} ended before it was killed:\n{log.read_text(encoding='utf-8')}"
                launch(script, PYTHON if processes == 1 else TORCHRUN, output_dir=folder, **options, **resume)
                yield f"{name}, {kind}", json.loads(json.dumps(run_facts(folder)).replace(temporary, "TEMPORARY"))


def run_facts(folder: Path) -> dict[str, Any]:
    """Return a run's log, results without times, weights, config and file names."""
    from safetensors.torch import load_file

    log = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return {
        "log": [json.loads(line) for line in log],
        "results": {name: value for name, value in results.items() if name not in TIMES},
        "weights": {name: described(load_file(folder / name)) for name in files if name.endswith(".safetensors")},
        "config": json.loads((folder / "config.json").read_text(encoding="utf-8")),
        "files": sorted(files),
    }


# Comparison


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the differences between two fingerprints, each with its path."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other:
                yield f"{path}: {name!r} only {'before' if name in one else 'after'}"
            else:
                yield from differences(one[name], other[name], f"{path} / {name}" if path else name)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (each, its) in enumerate(zip(one, other, strict=True)):
            yield from differences(each, its, f"{path} / {number}")
    elif one != other:
        yield f"{path}: {one!r:.300} before, {other!r:.300} after"


def compare(before: Path, after: Path, renamed: Sequence[str]) -> bool:
    """Print the differences by source or run, and return whether there are none; `renamed` has strings old=new."""
    text = before.read_text(encoding="utf-8")
    for pair in renamed:
        old, _, new = pair.partition("=")
        text = text.replace(old, new)
    one, other = json.loads(text), json.loads(after.read_text(encoding="utf-8"))
    found = list(differences(one, other))
    print("\n".join([*found, f"{len(one)} before, {len(other)} after, {len(found)} differences"]))
    return not found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("sources", "training"):
        commands.add_parser(name).add_argument("out", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW")
    given = parser.parse_args()
    if given.command == "compare":
        sys.exit(not compare(given.before, given.after, given.renamed))
    found = sources() if given.command == "sources" else {}
    for name, facts in training() if given.command == "training" else ():
        found[name] = facts
        print(name, flush=True)
        _save(found, given.out)  # save after each run: a later one may fail
    _save(found, given.out)
    print(f"{given.out}: {len(found)} {'sources' if given.command == 'sources' else 'runs'}")


def _save(found: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
