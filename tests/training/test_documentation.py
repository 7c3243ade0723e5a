"""Scripts accept every training command in docs/; test_documentation_installed.py runs the commands."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import yaml

from plain_vit.training.arguments import ImageOptions, parse_arguments
from plain_vit.training.data import EMBEDDED
from plain_vit.training.data.benchmarks import BENCHMARKS, Benchmark
from tests import ROOT
from tests.project.test_documentation import BLOCK
from tests.training.runs import open_script

PAGES = ("guide/fine_tune", "guide/many_gpus", "guide/pretrain", "reference/training")
TEXTS = [(ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES]
BLOCKS = [block for text in TEXTS for block in BLOCK.findall(text)]
COMMANDS = [line for kind, code in BLOCKS if kind == "bash" for line in code.replace("\\\n", "").splitlines()]
ARGUMENTS = {
    "finetune_image_classification": "FinetuneArguments",
    "evaluate_image_classification": "EvaluateArguments",
    "pretrain": "PretrainArguments",
    "linear_probe": "ProbeArguments",
}


def script_of(words: list[str]) -> tuple[str, int]:
    """Return the name of the script in a command, and the index where its options begin."""
    module = "plain_vit.examples."
    place = next(
        i for i, word in enumerate(words) if re.fullmatch(r"examples/\w+\.py", word) or word.startswith(module)
    )
    return Path(words[place].removeprefix(module)).stem, place + 1


def test_every_training_command_is_understood_by_its_script():
    seen = set()
    for line in COMMANDS:
        words = shlex.split(line)
        if words[0] in ("pip", "plain-vit"):
            continue
        name, place = script_of(words)
        kind = getattr(open_script(name), ARGUMENTS[name])
        arguments = parse_arguments(kind, words[place:], description=None)
        seen.add(name)
        data = arguments.dataset
        assert data in ("digits", *BENCHMARKS) or data.startswith("/data/")
        if "--config_file" in words:
            file = words[words.index("--config_file") + 1].replace("$(plain-vit examples --path)", "examples")
            config = yaml.safe_load((ROOT / file).read_text())
            launched = words.index("--num_processes") if "--num_processes" in words[: place - 1] else None
            processes = config["num_processes"] if launched is None else int(words[launched + 1])
            assert arguments.num_processes in (processes, None if processes == 2 else processes)
            share = processes * arguments.gradient_accumulation_steps
            assert arguments.batch_size % share == 0
    assert seen == ARGUMENTS.keys()


def test_help_and_page_name_every_dataset_with_a_short_name():
    said = ImageOptions.__dataclass_fields__["dataset"].metadata["help"]
    names = [*EMBEDDED, *(name for name in BENCHMARKS if name != "fashion-mnist")]
    assert {*names} <= {*re.split("[,;] ", said)}
    page = (ROOT / "docs" / "reference" / "datasets.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page.partition("\n## ")[0] for name in EMBEDDED)
    rows = re.findall(
        r"^\| `([\w-]+)` \| `([\w/-]+)`.* \| `(\w+)`, `(\w+)`.* \| `([\w+]+)`.*, `(\w+)`", page, re.MULTILINE
    )
    found = {name: Benchmark(*described) for name, *described in rows}
    assert found == {name: replace(BENCHMARKS[name], package=None) for name in names if name in BENCHMARKS}


def test_counts_of_steps_are_those_of_the_recipes():
    text = " ".join(TEXTS[PAGES.index("guide/many_gpus")].split())
    module = open_script("finetune_image_classification")
    for recipe, images, steps in (
        ("vit-pretrain-imagenet", 1_281_167, 93_836),
        ("vit-pretrain-imagenet21k", 14_197_122, 311_949),
    ):
        words = ["--model", "m", "--dataset", "d", "--output_dir", "o", "--recipe", recipe]
        arguments = parse_arguments(module.FinetuneArguments, words, description=None)
        assert -(-arguments.epochs * images // arguments.batch_size) == steps
        assert f"{images:,}" in text
        assert f"{steps:,} steps" in text
