"""The command on simulated Windows and macOS, see `tests/cli/hidden_systems.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from vit_pytorch import ViT

from tests import ROOT
from tests.hub.endpoint import HubEndpoint
from tests.sizes import NIGHTLY

SHAPE = ["--num-attention-heads", "4", "--image-size", "16", "--patch-size", "8"]
IMAGE = "examples/space/images/3.png"


@pytest.mark.slow
@pytest.mark.parametrize("system", ["windows", "macos"])
def test_a_model_is_converted_trained_used_and_pushed(system: str, tmp_path: Path, hub: HubEndpoint) -> None:
    source, folder, trained, shown = (tmp_path / name for name in ("source.safetensors", "vit", "trained", "shown"))
    vit = ViT(image_size=16, patch_size=8, num_classes=10, dim=256, depth=1, heads=4, mlp_dim=3072)  # one of 3 MB
    save_file(vit.state_dict(), source)
    folder.mkdir()
    convert = ["convert", source, folder, *SHAPE]
    train = ["finetune", "--model", folder, "--dataset", "digits", "--output_dir", trained, "--steps", "2"]
    commands = [
        convert, [*convert, "--force"], [*train, "--num_workers", "1", "--checkpoint_every", "1"], [*train, "--resume"],
        ["predict", IMAGE, "--model", trained], ["push", trained, "alice/model"],
    ]  # fmt: skip
    if system == "windows" or NIGHTLY:  # macOS lacks less
        commands += [
            ["verify", source, folder, *SHAPE], ["show", IMAGE, "--model", trained, "--out", shown],
            ["export", trained, tmp_path / "back.safetensors", "--to", "vit_pytorch"],
        ]  # fmt: skip
    words = [str(word) for command in commands for word in (*command, "+")]
    # As on Windows, UTF-8 is the default neither for files nor for pipes.
    environment = hub.environment(tmp_path / "cache") | {
        "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONIOENCODING": "cp1252",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.hidden_systems", system, *words],
        cwd=ROOT, env=environment, capture_output=True, encoding="cp1252",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3.png" in done.stdout
    if ["verify", source, folder, *SHAPE] in commands:
        stages = re.findall(r"^(embeddings|layer 0|logits) +0\.00e\+00 .* 0\.00e\+00$", done.stdout, re.MULTILINE)
        assert stages == ["embeddings", "layer 0", "logits"]
        assert (shown / "index.html").exists()
    assert set(hub.files("alice/model")) >= {"config.json", "model.safetensors", "README.md"}


MISSED = """
import sys
from tests.cli.hidden_systems import hide
hide("windows")
import ctypes, mmap, multiprocessing, os, signal
from pathlib import Path

for use in (lambda: signal.SIGUSR1, lambda: os.sysconf("SC_PAGE_SIZE"), lambda: mmap.MAP_PRIVATE,
            lambda: ctypes.CDLL(None), lambda: multiprocessing.get_context("forkserver"),
            lambda: os.replace("a", "b"), lambda: os.open("a", os.O_RDONLY), lambda: open("/proc/meminfo"),
            lambda: Path("/proc/meminfo").read_text()):
    try:
        use()
    except (AttributeError, TypeError, ValueError, OSError):
        continue
    sys.exit("nothing is hidden")
"""


def test_hidden_features_are_missing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", MISSED], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
