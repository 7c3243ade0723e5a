"""Reading gives the saved values from every container and layout, and asks in ambiguous cases."""

import argparse
import importlib
import json
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import gguf
import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import timm.utils
import torch
import vit_pytorch
from torch import nn

from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, HubError, UnknownFormatError
from plain_vit.files import torch_pickle
from plain_vit.files.reading import read_checkpoint, strip_wrappers
from plain_vit.files.tensors import LazyTensors
from tests.conftest import randomize_
from tests.processes import in_a_process

Tensors = dict[str, torch.Tensor]


def some_tensors() -> Tensors:
    """Return tensors with shapes that containers often get wrong: scalar, empty, transposed, shared."""
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(7, 11, generator=generator)
    return {
        "blocks.0.weight": matrix,
        "blocks.0.bias": matrix[2],
        "blocks.1.weight": torch.randn(13, 3, generator=generator).T,
        "scale": torch.tensor(2.5),
        "cls_token": torch.empty(0, 11),
        "half": torch.randn(2, 3, 5, generator=generator).to(torch.bfloat16),
    }


def save_safetensors(tensors: Tensors, folder: Path) -> Path:
    path = folder / "weights.safetensors"
    safetensors.torch.save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path)
    return path


def save_torch(tensors: Tensors, folder: Path, name: str = "weights.pt", zipped: bool = True) -> Path:
    torch.save(tensors, folder / name, _use_new_zipfile_serialization=zipped)
    return folder / name


def save_without_checksums(tensors: Tensors, folder: Path) -> Path:
    torch.serialization.set_crc32_options(False)
    try:
        return save_torch(tensors, folder)
    finally:
        torch.serialization.set_crc32_options(True)


def save_npz(tensors: Tensors, folder: Path, save: Callable[..., None] = np.savez) -> Path:
    arrays = {
        name: value.contiguous().view(torch.int16).numpy().view("V2")
        if value.dtype == torch.bfloat16
        else value.numpy()
        for name, value in tensors.items()
    }
    save(folder / "weights.npz", **arrays)
    return folder / "weights.npz"


def save_sharded(tensors: Tensors, folder: Path) -> Path:
    whole = {name: value.contiguous().clone() for name, value in tensors.items()}
    huggingface_hub.save_torch_state_dict(whole, folder, max_shard_size=200)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    return folder


def save_sharded_bin(tensors: Tensors, folder: Path) -> Path:
    whole = {name: value.contiguous().clone() for name, value in tensors.items()}
    huggingface_hub.save_torch_state_dict(whole, folder, max_shard_size=200, safe_serialization=False)
    assert len(list(folder.glob("pytorch_model-*-of-*.bin"))) > 1
    return folder


def save_gguf(tensors: Tensors, folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "weights.gguf", "clip")
    for name, value in tensors.items():
        kind = gguf.GGMLQuantizationType.BF16 if value.dtype == torch.bfloat16 else gguf.GGMLQuantizationType.F32
        held = value.contiguous().view(torch.uint8) if value.dtype == torch.bfloat16 else value.contiguous()
        writer.add_tensor(name, held.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "weights.gguf"


WRITERS = {
    "safetensors": save_safetensors,
    "pt": save_torch,
    "pth.tar": lambda tensors, folder: save_torch(tensors, folder, "model_best.pth.tar"),
    "pt without checksums": save_without_checksums,
    "pt before torch 1.6": lambda tensors, folder: save_torch(tensors, folder, zipped=False),
    "npz": save_npz,
    "npz compressed": lambda tensors, folder: save_npz(tensors, folder, np.savez_compressed),
    "gguf": save_gguf,
    "folder of shards": save_sharded,
    "folder of pickled shards": save_sharded_bin,
    "folder with pytorch_model.bin": lambda tensors, folder: save_torch(tensors, folder, "pytorch_model.bin").parent,
}


def assert_same(read: LazyTensors, saved: Tensors) -> None:
    assert set(read) == set(saved)
    for name, value in saved.items():
        entry = read.entries[name]
        tensor = read[name]
        assert (entry.shape, entry.dtype) == (tuple(value.shape), value.dtype), name
        assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype), name
        assert torch.equal(tensor, value.detach()), name


@pytest.mark.parametrize("writer", WRITERS)
def test_every_container_gives_back_the_bits_that_were_saved_in_memory_of_its_own(writer: str, tmp_path: Path) -> None:
    saved = some_tensors()
    tensors = read_checkpoint(WRITERS[writer](saved, tmp_path)).tensors
    assert_same(tensors, saved)
    assert {name: (meta.shape, meta.dtype) for name, meta in tensors.meta().items()} == {
        name: (value.shape, value.dtype) for name, value in saved.items()
    }
    tensors["blocks.0.weight"].zero_()
    assert_same(tensors, saved)


@pytest.mark.parametrize("writer", ["pt", "pt before torch 1.6", "folder of pickled shards"])
def test_pickles_are_read_whole_with_torch_2_10(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not give the offsets of tensors; older ones read no pickles."""
    monkeypatch.setattr(torch_pickle, "HAS_OFFSETS", False)
    test_every_container_gives_back_the_bits_that_were_saved_in_memory_of_its_own(writer, tmp_path)


@pytest.mark.parametrize("order, dtype", [("F", "<f8"), ("C", ">f4"), ("F", ">i2"), ("C", "<f2")])
def test_npz_arrays_of_any_byte_order_and_layout_are_read(order: str, dtype: str, tmp_path: Path) -> None:
    array = np.asarray(np.arange(2 * 3 * 5).reshape(2, 3, 5), dtype=dtype, order=order)  # type: ignore[call-overload]
    np.savez(tmp_path / "a.npz", **{"Transformer/posembed_input/pos_embedding": array, "other": np.float32(3)})
    tensors = read_checkpoint(tmp_path / "a.npz").tensors
    read = tensors["Transformer/posembed_input/pos_embedding"]
    assert read.shape == (2, 3, 5)
    assert np.array_equal(read.numpy(), array)


def test_a_folder_brings_its_configuration_and_a_file_alone_does_not(tmp_path: Path) -> None:
    saved = save_safetensors(some_tensors(), tmp_path).rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    (tmp_path / "preprocessor_config.json").write_text('{"size": 32}')
    folder = read_checkpoint(tmp_path)
    assert (folder.config, folder.preprocessor_config) == ({"architecture": "vit_tiny_patch16_224"}, {"size": 32})
    assert folder.files == (saved,)
    file = read_checkpoint(saved)
    assert (file.config, file.preprocessor_config, file.files) == (None, None, (saved,))


def test_the_image_processor_within_another_is_preferred_as_by_transformers(tmp_path: Path) -> None:
    save_safetensors(some_tensors(), tmp_path).rename(tmp_path / "model.safetensors")
    (tmp_path / "preprocessor_config.json").write_text('{"size": 32}')
    for content, expected in (('{"image_processor": {"size": 16}}', {"size": 16}), ('{"tokenizer": {}}', {"size": 32})):
        (tmp_path / "processor_config.json").write_text(content)
        assert read_checkpoint(tmp_path).preprocessor_config == expected
    (tmp_path / "processor_config.json").write_text('{"image_processor": [16]}')
    with pytest.raises(CheckpointError, match=r"image_processor = \[16\]: expected an object"):
        read_checkpoint(tmp_path)


def test_safetensors_are_preferred_to_a_pickle_next_to_them_and_the_report_says_so(tmp_path: Path) -> None:
    save_safetensors(some_tensors(), tmp_path).rename(tmp_path / "model.safetensors")
    save_torch({"other": torch.ones(2, 3)}, tmp_path, "pytorch_model.bin")
    checkpoint = read_checkpoint(tmp_path)
    assert_same(checkpoint.tensors, some_tensors())
    assert checkpoint.notes == ("model.safetensors was read and pytorch_model.bin ignored",)
    for other in ("model_1.safetensors", "last.ckpt", "optimizer.pt", "model (1).safetensors"):
        (tmp_path / other).write_bytes((tmp_path / "model.safetensors").read_bytes())
    beside = ["last.ckpt", "model (1).safetensors", "model_1.safetensors", "pytorch_model.bin"]
    assert read_checkpoint(tmp_path).notes == (f"model.safetensors was read and {', '.join(beside)} ignored",)


def test_a_folder_of_accelerate_is_read_as_it_is(tmp_path: Path) -> None:
    model = randomize_(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)))
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    prepared(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    assert (tmp_path / "optimizer.bin").exists()
    assert_same(read_checkpoint(tmp_path).tensors, dict(model.state_dict()))


def test_a_file_that_changes_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = save_safetensors(some_tensors(), tmp_path)
    tensors = read_checkpoint(path).tensors
    status = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        tensors["scale"]
    path.unlink()
    with pytest.raises(CheckpointError, match="can no longer be opened"):
        tensors["scale"]


# ---- training checkpoints ----


def test_timms_own_training_checkpoint_asks_for_the_weights_or_their_average(tmp_path: Path) -> None:
    model = randomize_(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=3))
    average = timm.utils.ModelEmaV3(model, decay=0.5)
    randomize_(average.module, seed=3)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = timm.utils.CheckpointSaver(
        model, optimizer, args=argparse.Namespace(model="vit", data=Path("/images")), model_ema=average,
        checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path),
    )  # fmt: skip
    saver.save_checkpoint(3, metric=np.float64(0.5))
    path = tmp_path / "last.pth.tar"
    with pytest.raises(AmbiguousCheckpointError, match="which one is the model") as caught:
        read_checkpoint(path)
    assert caught.value.candidates == {"key": ("state_dict", "state_dict_ema")}
    for key, source in {"state_dict": model, "state_dict_ema": average.module}.items():
        checkpoint = read_checkpoint(path, key=key)
        assert_same(checkpoint.tensors, dict(source.state_dict()))
        assert checkpoint.wrappers == (key,)


@pytest.mark.parametrize(
    "saved, wrappers, names",
    [
        ({"epoch": 3, "model": some_tensors()}, ("model",), None),
        ({"model": {"state_dict": some_tensors()}, "lr": [0.1]}, ("model", "state_dict"), None),
        ({"state_dict": {f"net.{k}": v for k, v in some_tensors().items()}, "loops": {}}, ("state_dict",), "net."),
        ({"module": OrderedDict(some_tensors()), "optimizer": {"state": some_tensors()}}, ("module",), None),
        (some_tensors() | {"epoch": 3}, (), None),
    ],
)
def test_the_model_is_found_in_a_training_checkpoint(
    saved: dict, wrappers: tuple[str, ...], names: str | None, tmp_path: Path
) -> None:
    torch.save(saved, tmp_path / "last.ckpt")
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert checkpoint.wrappers == wrappers
    assert_same(checkpoint.tensors, {f"{names or ''}{name}": value for name, value in some_tensors().items()})


def test_non_tensors_in_a_state_dict_are_reported(tmp_path: Path) -> None:
    torch.save(some_tensors() | {"epoch": 3}, tmp_path / "last.pt")
    assert read_checkpoint(tmp_path / "last.pt").notes == ("ignored entries that are not tensors: epoch",)


def test_one_model_under_two_keys_is_not_ambiguous(tmp_path: Path) -> None:
    tensors = some_tensors()
    torch.save({"model": tensors, "last": tensors}, tmp_path / "last.pt")
    assert_same(read_checkpoint(tmp_path / "last.pt").tensors, tensors)
    assert_same(read_checkpoint(tmp_path / "last.pt", key="last").tensors, tensors)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_vit_pytorchs_student_and_teacher_are_chosen_by_key(suffix: str, tmp_path: Path) -> None:
    vit = vit_pytorch.SimpleViT(image_size=16, patch_size=8, num_classes=5, dim=12, depth=1, heads=3, mlp_dim=7)
    learner = randomize_(vit_pytorch.Dino(vit, image_size=16, projection_hidden_size=6, num_classes_K=4))
    state_dict = {name: value.clone() for name, value in learner.state_dict().items()}
    path = tmp_path / f"dino{suffix}"
    (safetensors.torch.save_file if suffix == ".safetensors" else torch.save)(state_dict, path)
    with pytest.raises(AmbiguousCheckpointError, match="several models side by side") as caught:
        read_checkpoint(path)
    assert caught.value.candidates == {"key": ("student_encoder", "teacher_encoder")}
    read = read_checkpoint(path, key="teacher_encoder.net").tensors
    assert_same(read, dict(learner.get_submodule("teacher_encoder.net").state_dict()))


def test_an_unknown_key_is_an_error_that_lists_the_existing_ones(tmp_path: Path) -> None:
    torch.save({"model": some_tensors(), "ema": some_tensors()}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="nothing called 'teacher'; it holds 'model', 'ema'"):
        read_checkpoint(tmp_path / "last.pt", key="teacher")
    with pytest.raises(CheckpointError, match=r"no tensor whose name begins with 'layers\.'"):
        read_checkpoint(tmp_path / "last.pt", key="model.layers")
    with pytest.raises(CheckpointError, match=r"no tensor whose name begins with 'layers\.'"):
        read_checkpoint(save_safetensors(some_tensors(), tmp_path), key="layers")


@pytest.mark.parametrize("saved", [{"epoch": 3, "loss": torch.ones(())}, [torch.ones(2, 3)], torch.ones(2, 3)])
def test_a_pickle_without_a_state_dict_says_what_it_holds(saved: object, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "last.pt")
    with pytest.raises(UnknownFormatError, match="'epoch', 'loss'|list|Tensor"):
        read_checkpoint(tmp_path / "last.pt")


# ---- wrappers ----


def test_the_names_that_torch_itself_wraps_are_unwrapped() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 2)))
    plain = set(model.state_dict())
    compiled: Any = torch.compile(model)
    wrapped = nn.DataParallel(compiled)
    stripped = strip_wrappers(wrapped.state_dict())
    assert set(stripped.names.values()) == plain
    assert set(stripped.prefixes) == {"_orig_mod", "module"}
    averaged = torch.optim.swa_utils.AveragedModel(model)
    stripped = strip_wrappers(averaged.state_dict())
    assert set(stripped.names.values()) == plain
    assert stripped.counters == ("n_averaged",)
    part: Any = torch.compile(model[1])
    model[1] = part
    assert set(strip_wrappers(model.state_dict()).names.values()) == plain


@pytest.mark.parametrize(
    "names, short, prefixes",
    [
        (["model.vit.a.w", "model.vit.b"], ["a.w", "b"], ("model", "vit")),
        (["model.a", "head.b"], ["model.a", "head.b"], ()),  # not every name has it
        (["encoder.layer.0.w", "encoder.layer.1.w"], ["layer.0.w", "layer.1.w"], ("encoder",)),
        (["blocks.0.w", "blocks.1.w"], ["blocks.0.w", "blocks.1.w"], ()),  # shared, but no wrapper
        (["model", "model.a"], ["model", "model.a"], ()),  # a name would be left empty
        ([], [], ()),
    ],
)
def test_a_prefix_goes_only_when_every_name_has_it(names: list[str], short: list[str], prefixes: tuple) -> None:
    stripped = strip_wrappers(names)
    assert list(stripped.names) == names
    assert (list(stripped.names.values()), stripped.prefixes) == (short, prefixes)


def test_names_that_become_the_same_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'a\.w'"):
        strip_wrappers(["a.w", "a._orig_mod.w"])


# ---- the Hub's cache, and where there is nothing ----


def cached_repository(tensors: Tensors, folder: Path, commit: str) -> Path:
    """Lay out a repository like the Hub's client: snapshots with links into a folder of blobs."""
    repository = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--someone--vit"
    shutil.rmtree(repository, ignore_errors=True)
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    shutil.copy(save_safetensors(tensors, folder), blobs / "0a1b")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    (blobs / "2c3d").write_text(json.dumps({"architecture": "vit"}))
    (snapshot / "config.json").symlink_to("../../blobs/2c3d")
    return repository


def test_a_repository_in_the_hubs_cache_is_read_offline_through_its_links(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cached_repository(some_tensors(), tmp_path, commit)
    try:
        checkpoint = read_checkpoint("someone/vit")
        assert_same(checkpoint.tensors, some_tensors())
        assert [file.parent.name for file in checkpoint.files] == [commit]
        assert checkpoint.config == {"architecture": "vit"}
    finally:
        shutil.rmtree(repository)


def test_a_repository_that_cannot_be_fetched_is_a_hub_error() -> None:
    with pytest.raises(HubError, match=r"someone/nothing is neither a file or folder here nor could it be fetched"):
        read_checkpoint("someone/nothing")


@pytest.mark.parametrize("source", ["nothing", "./some/where", "models/weights.pt", "a/b/c", ""])
def test_a_path_that_is_not_there_is_an_error(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist|holds no weights"):
        read_checkpoint(source)


def test_a_revision_of_a_local_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no revision 'main'"):
        read_checkpoint(save_safetensors(some_tensors(), tmp_path), revision="main")


@pytest.mark.parametrize("start", [b"PK", b"\x80", b"<", b"{", b"\x1f\x8b", b"\x93N"])
def test_a_safetensors_header_may_be_as_long_as_any_other_beginning_reads(start: bytes, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, separators=(",", ":")).encode()
    length = int.from_bytes(start, "little")
    assert length > len(header)
    values = torch.tensor([2.0, 3.0, 5.0])
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header.ljust(length) + values.numpy().tobytes())
    assert path.read_bytes().startswith(start)
    checkpoint = read_checkpoint(path)
    assert checkpoint.kind == "safetensors"
    assert torch.equal(checkpoint.tensors["a"], values)
    assert torch.equal(checkpoint.tensors.mapped()["a"], values)


def test_a_torch_file_may_be_overwritten_once_its_tensors_are_read(tmp_path: Path) -> None:
    values = some_tensors()["blocks.0.weight"]
    path = save_torch(some_tensors(), tmp_path)
    read = read_checkpoint(path).tensors.mapped()["blocks.0.weight"]
    save_torch({"blocks.0.weight": -values, "blocks.0.bias": values[0]}, tmp_path)
    assert torch.equal(read, values)


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Return whether a tensor's memory is mapped from a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith(os.path.realpath(path))
    return False  # an empty one has none


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the mappings")
def test_torch_files_are_mapped_only_on_request(tmp_path: Path) -> None:
    path = save_torch(some_tensors(), tmp_path)
    tensors = read_checkpoint(path).tensors
    by_default, on_request = tensors.mapped(), tensors.mapped(overwritten=True)
    assert not any(is_mapped(by_default[name], path) for name in tensors)
    for name, value in some_tensors().items():
        mapped = on_request[name]
        assert is_mapped(mapped, path) or not mapped.numel()
        assert torch.equal(mapped, value)
        assert mapped.stride() == value.stride() or not mapped.numel()
    before = path.read_bytes()
    on_request["blocks.1.weight"].zero_()
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the mappings")
def test_torch_files_in_the_hubs_cache_are_mapped(tmp_path: Path) -> None:
    home = tmp_path / "models--some--one"
    folder, blobs = home / "snapshots" / "0123", home / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    blob = save_torch(some_tensors(), blobs, "abcdef")
    (folder / "pytorch_model.bin").symlink_to(blob)
    shutil.copy(blob, folder / "copied.bin")
    assert is_mapped(read_checkpoint(folder / "pytorch_model.bin").tensors.mapped()["half"], blob)
    assert not is_mapped(read_checkpoint(folder / "copied.bin").tensors.mapped()["half"], folder / "copied.bin")


def test_a_mapped_file_that_was_cut_off_before_is_refused(tmp_path: Path) -> None:
    path = save_torch(some_tensors(), tmp_path)
    tensors = read_checkpoint(path).tensors.mapped(overwritten=True)
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        tensors["half"]


def imported_with_file_tools() -> set[str]:
    """Return our modules that the file tools import, starting without any of ours."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "plain_vit"]:
        del sys.modules[name]
    importlib.import_module("plain_vit.files.reading")
    importlib.import_module("plain_vit.files.staging")
    return {name for name in sys.modules if name.startswith("plain_vit.")}


@pytest.mark.slow
def test_file_tools_import_no_source_of_checkpoints() -> None:
    imported = in_a_process(imported_with_file_tools)
    assert "plain_vit.files.reading" in imported
    assert not any(name.startswith("plain_vit.conversion") for name in imported)
