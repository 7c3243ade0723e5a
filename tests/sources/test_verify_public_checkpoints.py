"""The script that verifies public checkpoints, run on local checkpoints of every source."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
import vit_pytorch
from timm.models import save_for_hf

from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.sources.transformers.source import TRANSFORMERS
from tests import ROOT
from tests.conftest import randomize_
from tests.sources.google_models import random_arrays, save
from tests.sources.transformers_models import tiny_transformers
from tools import verify_public_checkpoints as script


def checkpoints(folder: Path) -> dict[str, str]:
    """Save a small random checkpoint of every source, with its own package if there is one; return the arguments."""
    module = timm.create_model("vit_tiny_patch16_224", img_size=(48, 64), embed_dim=56, num_heads=7, depth=3)
    arguments = {"img_size": (48, 64), "embed_dim": 56, "num_heads": 7, "depth": 3}
    save_for_hf(
        randomize_(module).eval(), folder / "timm", model_config={"model_args": arguments}, safe_serialization=True
    )
    for case in ("ViTForImageClassification", "CLIPModel", "ViTMAEForPreTraining"):
        tiny_transformers(case).save_pretrained(folder / case)
        transformers.CLIPImageProcessor(size={"shortest_edge": 60}, crop_size={"height": 24, "width": 56}
                                        if case.startswith("ViTFor") else {"height": 56, "width": 56}
                                        ).save_pretrained(folder / case)  # fmt: skip
    sizes = {"image_size": 40, "patch_size": 8, "num_layers": 3, "num_heads": 7, "hidden_dim": 56, "mlp_dim": 70}
    torch.save(randomize_(torchvision.models.VisionTransformer(**sizes)).state_dict(), folder / "vit.pth")
    lucid = vit_pytorch.ViT(image_size=(15, 21), patch_size=(5, 7), num_classes=11, dim=24, depth=2, heads=3,
                            dim_head=8, mlp_dim=40)  # fmt: skip
    torch.save(randomize_(lucid).state_dict(), folder / "vit.pt")
    save(folder / "vit.npz", random_arrays(shared_width=True))
    return {
        "timm": f"timm={folder / 'timm'}",
        "transformers": f"transformers={folder / 'ViTForImageClassification'}",
        "clip": f"transformers={folder / 'CLIPModel'}",
        "mae": f"transformers={folder / 'ViTMAEForPreTraining'}",
        "torchvision": f"torchvision={folder / 'vit.pth'},num_attention_heads=7,layer_norm_eps=1e-6",
        "vit_pytorch": f"vit_pytorch={folder / 'vit.pt'},num_attention_heads=3,image_size=15x21,patch_size=5x7",
        "google": f"google={folder / 'vit.npz'},hidden_act=gelu,image_size=20x28",
    }


def run(arguments: list[str], out: Path) -> tuple[int, list[list[str]]]:
    """Run the script in this process; return its exit code and the cells of its table."""
    code = script.main([*(word for text in arguments for word in ("--checkpoint", text)), "--out", str(out)])
    lines = out.read_text(encoding="utf-8").splitlines()
    return code, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]


def test_a_checkpoint_of_every_source_passes(tmp_path: Path) -> None:
    given = checkpoints(tmp_path)
    code, rows = run(list(given.values()), tmp_path / "table.md")
    assert [row[2] for row in rows] == ["same"] * len(given), rows
    assert code == 0
    assert {row[0] for row in rows} == set(script.PEERS)
    assert all(float(row[3]) <= 1e-5 for row in rows)
    assert [row[5] for row in rows[:4]] == ["0.0e+00"] * 4  # timm's and transformers' own preprocessing, bit for bit


def test_one_that_differs_and_one_that_is_broken_make_the_script_fail_and_the_others_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = checkpoints(tmp_path)
    (tmp_path / "vit.pth").write_bytes((tmp_path / "vit.pth").read_bytes()[:-100])
    read = TIMM.describe_checkpoint

    def misread(*arguments: Any) -> Any:
        described = read(*arguments)
        described.config.pooling = "mean"
        return described

    monkeypatch.setattr(TIMM, "describe_checkpoint", misread)
    arguments = [given["torchvision"], given["timm"], given["transformers"]]
    code, rows = run(arguments, tmp_path / "table.md")
    assert code == 1
    assert [row[2] for row in rows] == ["failed", "differs", "same"]
    assert rows[0][4].startswith("CheckpointError")
    assert float(rows[1][3]) > 1e-3
    assert rows[1][4] == "logits"


def test_wrong_pixels_alone_make_it_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = checkpoints(tmp_path)
    prepare = TRANSFORMERS.image_processor

    def shifted(*arguments: Any) -> tuple[Any, Any]:
        processor, assumed = prepare(*arguments)
        processor.image_mean = [0.5, 0.5, 0.25]
        return processor, assumed

    monkeypatch.setattr(TRANSFORMERS, "image_processor", shifted)
    code, rows = run([given["clip"]], tmp_path / "table.md")
    assert code == 1
    assert rows[0][2] == "differs"
    assert float(rows[0][3]) <= 1e-5
    assert float(rows[0][5]) > 0.1


@pytest.mark.slow
def test_the_public_ones_are_listed_and_filtered_without_a_network() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tools.verify_public_checkpoints", "--list", "--only", "*dinov2-with-registers-small"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert listed.stdout == "transformers facebook/dinov2-with-registers-small\n"
    assert len({(entry.source, entry.name) for entry in script.ENTRIES}) == len(script.ENTRIES) > 60
    with pytest.raises(SystemExit) as stopped:
        script.main(["--only", "nothing like this"])
    assert stopped.value.code == 2


def test_the_public_names_are_those_that_the_packages_know() -> None:
    tags = {f"timm/{tag}" for tag in timm.list_pretrained()}
    assert {entry.name for entry in script.ENTRIES if entry.source == "timm"} <= tags
    for entry in script.ENTRIES:
        if entry.source == "torchvision":
            assert torchvision.models.get_weight(entry.name).url
