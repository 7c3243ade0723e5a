"""Our model classes pass transformers' own common tests."""

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import transformers

from tests import ROOT

FOLDER = ROOT / ".peers" / f"transformers-{transformers.__version__}"
SUITE = "tests/model/transformers_own.py"
SUITES = {"BaseModelTest", "ImageClassificationTest", "MaskedImageModelingTest", "BackboneTest"}

# Allowed reasons for skipping a test that transformers' own ViT does not skip, with their meaning here.
SKIPS = {
    "no inputs_embeds|doesn't use `inputs_embeds`": "an image model embeds pixels; so with transformers' own ViT",
    "Embedding of tokens": "transformers' own ViT replaces this test by one that ours has too",
    "RoPE|rope": "positions are added, not rotated",
    "doesn't yet support non-text modalities": "where a config has `rope_parameters`, it asks for `vocab_size`",
    "Model does not support output_attentions": "read from the signature, where transformers' own ViT has none either",
    "No conversion found": "the names in our files are those in memory: nothing is renamed while loading",
    "Cannot capture hidden states": "it asks for one class of block; test_transformers_common.py tests it for ours",
    "first output, and a backbone's is a tuple": "test_transformers_common.py tests it on the maps",
}


def run(folder: Path, *selection: str) -> dict[str, str | None]:
    """Run transformers' tests in a separate process; return the reason why each was skipped, or None if it passed."""
    if not (FOLDER / "transformers_tests" / "test_modeling_common.py").is_file():
        pytest.skip(f"the tests of transformers {transformers.__version__} are not in .peers: run `make install`")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("transformers' tests import torchvision")
    report = folder / "report.xml"
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
         "-o", "addopts=", "-o", "filterwarnings=", f"--junitxml={report}", *selection],
        cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-20_000:] + process.stderr[-2_000:]
    found: dict[str, str | None] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        name = f"{str(case.get('classname')).rpartition('.')[2]}.{case.get('name')}"
        found[name] = None if skipped is None else str(skipped.get("message"))
    return found


def check_skips(found: dict[str, str | None], folder: Path) -> None:
    """Check that every reason for a skip is allowed or also given by transformers' own ViT."""
    unknown = {
        name: reason
        for name, reason in found.items()
        if reason is not None and not any(re.search(known, reason) for known in SKIPS)
    }
    if unknown:
        tests = {name.rpartition(".")[2] for name in unknown}
        stock = run(folder, *(f"{SUITE}::StockViTTest::{test}" for test in sorted(tests)))
        unknown = {
            name: reason
            for name, reason in unknown.items()
            if without_class(reason) != without_class(stock[f"StockViTTest.{name.rpartition('.')[2]}"])
        }
    assert not unknown


def without_class(reason: str | None) -> str | None:
    """Remove the name of the model class from a reason."""
    return reason and re.sub(r"<class '[^']*'>|\b(Plain)?ViT\w+", "the class", reason)


@pytest.mark.slow
def test_every_model_class_passes_the_common_tests_of_transformers(tmp_path: Path) -> None:
    found = run(tmp_path, SUITE, "-k", "not StockViTTest")
    check_skips(found, tmp_path)
    passed = [name for name, reason in found.items() if reason is None]
    assert len(passed) >= 200
    for suite in SUITES:
        assert sum(name.startswith(f"{suite}.") for name in passed) >= 50, suite
