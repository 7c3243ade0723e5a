"""Conversion from file to file: the same bytes as through a model in memory, with a fraction of the memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import vit_pytorch

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.conversion import convert_checkpoint, from_checkpoint
from plain_vit.conversion.sources.vit_pytorch.source import VIT_PYTORCH
from plain_vit.conversion.tables.engine import Row
from plain_vit.errors import MappingError, VerificationError
from tests.conftest import randomize_
from tests.tiny import tiny_config

Source = tuple[Path, dict[str, Any]]


def timm_folder(folder: Path, **arguments: Any) -> Source:
    small = {"img_size": (48, 80), "embed_dim": 56, "num_heads": 7, "depth": 3, "num_classes": 11} | arguments
    module = randomize_(timm.create_model("vit_base_patch16_224", **small))
    timm.models.save_for_hf(module, folder, model_args=small, safe_serialization=True)
    return folder, {}


def old_file_of_lucidrains(folder: Path) -> Source:
    module = vit_pytorch.ViT(image_size=(15, 21), patch_size=(5, 7), num_classes=11, dim=24, depth=2, heads=3,
                             dim_head=8, mlp_dim=40)  # fmt: skip
    torch.save({"state_dict": randomize_(module).half().state_dict(), "epoch": 3}, folder.with_suffix(".pt"))
    return folder.with_suffix(".pt"), {"num_attention_heads": 3, "image_size": (15, 21), "patch_size": (5, 7)}


def file_of_torchvision(folder: Path) -> Source:
    module = torchvision.models.VisionTransformer(32, 8, 3, 4, 64, 80, num_classes=11)
    torch.save(randomize_(module).state_dict(), folder.with_suffix(".pth"))
    return folder.with_suffix(".pth"), {"num_attention_heads": 4, "layer_norm_eps": 1e-6}


def file_of_two_dtypes(folder: Path) -> Source:
    path, hints = file_of_torchvision(folder)
    state = torch.load(path, weights_only=True)
    torch.save({name: tensor if tensor.ndim < 2 else tensor.bfloat16() for name, tensor in state.items()}, path)
    return path, hints


def our_own_folder(folder: Path) -> Source:
    randomize_(PlainViTForImageClassification(tiny_config())).save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 24, "width": 56}).save_pretrained(folder)
    return folder, {}


SOURCES: list[Callable[[Path], Source]] = [
    timm_folder,
    # Only the encoder is converted.
    lambda folder: timm_folder(folder, num_classes=0, class_token=False, global_pool="avg"),
    old_file_of_lucidrains,
    file_of_torchvision,
    our_own_folder,
    file_of_two_dtypes,
]


@pytest.mark.parametrize("make", SOURCES)
def test_the_stream_writes_the_bytes_that_save_pretrained_writes(
    make: Callable[[Path], Source], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source, hints = make(tmp_path / "source")
    converted = from_checkpoint(source, **hints)
    converted.model.save_pretrained(tmp_path / "saved")
    if converted.image_processor is not None:
        converted.image_processor.save_pretrained(tmp_path / "saved")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    for verify in (False, True):
        folder = tmp_path / f"verify {verify}"
        folder.mkdir()
        streamed = convert_checkpoint(source, folder, verify=verify, **hints)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == saved
        assert (streamed.model.device.type == "meta") == (not verify or make is our_own_folder)
        assert "B/s" in capsys.readouterr().err


def test_a_converted_model_has_storages_of_its_own(tmp_path: Path) -> None:
    source, hints = timm_folder(tmp_path / "source")
    before = (source / "model.safetensors").read_bytes()
    model = from_checkpoint(source, **hints).model
    parameters = list(model.parameters())
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == len(parameters)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    assert (source / "model.safetensors").read_bytes() == before


def test_a_model_outlives_the_file_that_it_was_opened_from(tmp_path: Path) -> None:
    source, hints = timm_folder(tmp_path / "source")
    model = from_checkpoint(source, **hints).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file({"other": torch.ones(3)}, source / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    path, hints = old_file_of_lucidrains(tmp_path / "file")
    model = from_checkpoint(path, **hints).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path.write_bytes(b"")  # like an interrupted torch.save
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("is_known_before_the_first_write", [True, False])
def test_all_faults_are_listed_and_no_weights_are_left(is_known_before_the_first_write: bool, tmp_path: Path) -> None:
    path, hints = old_file_of_lucidrains(tmp_path / "file")
    state = torch.load(path, weights_only=True)["state_dict"]
    state["transformer.layers.1.1.net.1.bias"][2] = torch.nan
    if is_known_before_the_first_write:
        state["transformer.norm.weight"] = torch.ones(25)
    torch.save(state, path)
    (tmp_path / "out").mkdir()
    with pytest.raises(MappingError, match="NaN or infinite") as caught:
        convert_checkpoint(path, tmp_path / "out", verify=False, **hints)
    assert len(caught.value.faults) == 1 + is_known_before_the_first_write
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert not is_known_before_the_first_write or not list((tmp_path / "out").iterdir())


def test_convert_refuses_to_write_when_the_source_gives_other_numbers_unless_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hints = old_file_of_lucidrains(tmp_path / "file")
    rows = VIT_PYTORCH.rows

    def with_key_and_value_swapped(config: Any, layout: str | None) -> list[Row]:
        return [
            Row(row.source, (row.ours[0], row.ours[2], row.ours[1]), row.transform) if len(row.ours) == 3 else row
            for row in rows(config, layout)
        ]

    monkeypatch.setattr(VIT_PYTORCH, "rows", with_key_and_value_swapped)
    (tmp_path / "out").mkdir()
    with pytest.raises(VerificationError, match="layer 0"):
        convert_checkpoint(path, tmp_path / "out", **hints)
    assert not list((tmp_path / "out").iterdir())
    convert_checkpoint(path, tmp_path / "out", verify=False, **hints)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_verification_that_does_not_fit_in_memory_is_skipped_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hints = old_file_of_lucidrains(tmp_path / "file")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    (tmp_path / "out").mkdir()
    converted = convert_checkpoint(path, tmp_path / "out", **hints)
    assert "of memory, but only 1.0 KB are free" in str(converted.report)
    assert converted.report.differences is None
    from_checkpoint(tmp_path / "out")


UNDER_A_LIMIT = """
import json, os, resource, sys, tempfile
import plain_vit.conversion

def in_use() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))

source, room = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (in_use() + room, resource.RLIM_INFINITY))
with tempfile.TemporaryDirectory(dir=os.path.dirname(source)) as folder:
    plain_vit.conversion.convert_checkpoint(source, folder, verify=False)
    converted = os.path.getsize(os.path.join(folder, "model.safetensors"))
try:
    plain_vit.conversion.from_checkpoint(source)
    opened = True
except (OSError, MemoryError, RuntimeError):
    opened = False
print(json.dumps({"converted": converted, "opened": opened}))
"""


@pytest.mark.slow
def test_a_sharded_source_is_converted_in_a_fifth_of_its_size(tmp_path: Path) -> None:
    # RLIMIT_DATA limits the writable memory of a process; the page cache of the files belongs to the system.
    size = {"embed_dim": 576, "num_heads": 6, "depth": 12, "num_classes": 7}
    module = timm.create_model("vit_base_patch16_224", **size)
    source = tmp_path / "source"
    source.mkdir()
    settings = {"architecture": "vit_base_patch16_224", "model_args": size, "num_classes": 7, "pretrained_cfg": {}}
    (source / "config.json").write_text(json.dumps(settings))
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}, {}]
    for i, (name, tensor) in enumerate(module.state_dict().items()):
        shards[i % 4][name] = tensor
    names = [f"model-{i + 1:05d}-of-00004.safetensors" for i in range(4)]
    for name, shard in zip(names, shards, strict=True):
        safetensors.torch.save_file(shard, source / name)
    index = {"weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    total = sum(os.path.getsize(source / name) for name in names)
    assert total > 190e6

    arguments = [sys.executable, "-c", UNDER_A_LIMIT, str(source), str(total // 5)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["converted"] == pytest.approx(total, rel=1e-3)
    assert not result["opened"]  # the limit is effective
