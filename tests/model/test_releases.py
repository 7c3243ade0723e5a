"""Older releases: stock models of transformers, the versions that setup.py allows, and errors for older versions."""

import re
import runpy
import sys
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.sources.transformers import installed
from tests import ROOT
from tests.sources.transformers_models import pixels_for, stage_differences, tiny_transformers, tolerance

YEAR = dict(line.split("==") for line in (ROOT / "tests" / "year.txt").read_text().split("\n") if "==" in line)
# One class of each group whose parameters were renamed together, and one that was never renamed.
STOCK = [
    "ViTForImageClassification", "DeiTForImageClassificationWithTeacher", "BeitForImageClassification",
    "Dinov2ForImageClassification, SwiGLU", "CLIPVisionModel", "CLIPVisionModelWithProjection", "SiglipVisionModel",
]  # fmt: skip


@pytest.mark.parametrize("case", STOCK)
def test_stock_models_open_live_and_from_folders_and_go_back(case: str, tmp_path: Path) -> None:
    module = tiny_transformers(case)
    module.save_pretrained(tmp_path / "stock")
    for ours in (from_module(module), from_checkpoint(tmp_path / "stock").model):
        ours.eval().set_attn_implementation("eager")
        assert max(stage_differences(module, ours, pixels_for(module)).values()) <= tolerance(case)
    back = to_module(ours, "transformers", layout=type(module).__name__)
    back.set_attn_implementation("eager")
    assert max(stage_differences(back, ours, pixels_for(module)).values()) <= tolerance(case)
    to_checkpoint(ours, tmp_path / "back", format="transformers", layout=type(module).__name__)
    again = type(module).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    assert max(stage_differences(again, ours, pixels_for(module)).values()) <= tolerance(case)


def test_the_releases_of_a_year_ago_are_admitted() -> None:
    admitted = [Requirement(line) for line in requires("plain-vit") or ()]
    refused = [str(one) for one in admitted if one.name in YEAR and not one.specifier.contains(YEAR[one.name])]
    assert refused == []
    assert YEAR.keys() <= {one.name for one in admitted}


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0rc1", "5.3.0"])
def test_a_transformers_that_is_too_old_is_named_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    needed = (
        rf"needs transformers 5\.4 or later, and this is {re.escape(version)}: .*export FOLDER OUT --to transformers"
    )
    with pytest.raises(ImportError, match=needed) as caught:
        runpy.run_path(str(ROOT / "plain_vit" / "releases_plain_vit.py"))
    assert "\n" not in str(caught.value)


def test_an_older_release_without_a_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_transformers("ViTModel").save_pretrained(tmp_path)
    monkeypatch.setattr(installed, "transformers", SimpleNamespace(__version__="5.4.0"))
    with pytest.raises(ImportError, match=r"transformers 5\.4\.0 has no ViTModel: pip install 'transformers>="):
        from_checkpoint(tmp_path)
