"""If anything goes wrong while writing, either the old or the new content is there and loads."""

import json
import os
import random
import resource
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import vit_pytorch
from tqdm import tqdm
from transformers import ViTConfig, ViTModel

from plain_vit import PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint, to_checkpoint
from plain_vit.errors import OutputError, OutputExistsError
from plain_vit.files import staging
from plain_vit.files.reading import read_checkpoint
from plain_vit.files.safetensors import save_state_dict
from plain_vit.files.staging import staged_file, staged_folder
from plain_vit.files.tensors import LazyTensor, LazyTensors
from plain_vit_command import main
from tests.processes import in_a_process, kilobytes, processes
from tests.sizes import NIGHTLY, draws
from tests.tiny import tiny_config

tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared by all processes, and a killed child may hold it


def some_tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"layers.{index}.weight": torch.full((71, 131), value) for index in range(23)}


def write_version(target: Path, version: int, force: bool = True) -> None:
    """Write a folder of shards and a configuration that all contain the same version."""
    with staged_folder(target, force=force) as folder:
        save_state_dict(some_tensors(version), folder / "model.safetensors", max_shard_size="300KB", progress=False)
        (folder / "config.json").write_text(json.dumps({"model_type": "plain_vit", "version": version}))


def version_of(target: Path) -> int:
    """Read the whole folder, check that its files have one version, and return the version."""
    checkpoint = read_checkpoint(target)
    assert checkpoint.config is not None
    version = checkpoint.config["version"]
    assert set(checkpoint.tensors) == set(some_tensors())
    assert all((tensor == version).all() for tensor in checkpoint.tensors.values())
    return version


def recover(target: Path) -> bool:
    """Let a refused writer clean up after a killed one, and return whether anything was left."""
    left = any(target.with_name(f".plain-vit-{role}.{target.name}").exists() for role in ("new", "old"))
    with pytest.raises(OutputError, match="is a folder|already exists"), staged_file(target):
        pytest.fail("the block must not run")
    return left


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


# ---- one writer, no trouble ----


def test_a_folder_appears_complete_and_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"
    with staged_folder(target) as folder:
        assert folder.parent == target.parent
        (folder / "sub").mkdir()
        (folder / "sub" / "note.txt").write_text("kept")
        assert not target.exists()
    assert (target / "sub" / "note.txt").read_text() == "kept"
    assert beside(target) == []


@pytest.mark.parametrize("swaps", [True, False])
def test_force_replaces_the_whole_folder_and_mixes_nothing(
    swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:  # as on file systems without it: two renames
        monkeypatch.setattr(staging, "exchange_names", lambda one, other: False)
    target = tmp_path / "model"
    write_version(target, 1)
    (target / "preprocessor_config.json").write_text("of version 1")
    write_version(target, 2)
    assert version_of(target) == 2
    assert not (target / "preprocessor_config.json").exists()
    assert beside(target) == []


def thesis(target: Path) -> None:
    (target / "thesis.tex").write_text("years of work")


def link_to_weights(target: Path) -> None:
    (target.parent / "elsewhere").mkdir()
    shard = next(target.glob("model-00001-*"))
    shard.rename(target.parent / "elsewhere" / "a.safetensors")
    shard.symlink_to(target.parent / "elsewhere" / "a.safetensors")


# the files of others in a folder of ours
FOREIGN = {
    "thesis": {"thesis.tex": "years of work"},
    "thesis below": {"data/thesis.tex": "years of work"},
    "config of others": {"config.json": "{}", "thesis.tex": "years of work"},
    "downloaded": {"config.json": json.dumps({"model_type": "vit", "version": 1})},
    "own page": {"README.md": "# What I found out in three years"},
    "link to weights": {},
}


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("name", FOREIGN)
def test_force_keeps_a_folder_that_holds_what_plain_vit_did_not_write(
    name: str, swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    write_version(target, 1)
    for file, text in FOREIGN[name].items():
        (target / file).parent.mkdir(exist_ok=True)
        (target / file).write_text(text)
    if name == "link to weights":
        link_to_weights(target)
    held = {path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    if not swaps:
        monkeypatch.setattr(staging, "exchange_names", lambda one, other: False)
    with pytest.warns(
        UserWarning, match=rf"{target} contained files not written by plain-vit \('.*'\).* is kept as .*kept-1"
    ):
        write_version(target, 2)
    assert version_of(target) == 2
    kept = tmp_path / "model.kept-1"
    assert {path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()} == held
    assert [name for name in beside(target) if name != "elsewhere"] == ["model.kept-1"]
    thesis(target)
    with pytest.warns(UserWarning, match="kept-2"):
        write_version(target, 3)
    assert (tmp_path / "model.kept-2" / "thesis.tex").read_text() == "years of work"


def rewrite_a_thesis_for_ever(target: Path, started: Any) -> None:
    warnings.simplefilter("ignore")
    while True:
        (target / f"thesis-{started.value + 1}.tex").write_text("years of work")
        started.value += 1
        write_version(target, started.value)


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [True, False])
def test_killed_while_a_folder_is_kept_every_thesis_survives(
    swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(staging, "exchange_names", lambda one, other: False)
    target, rng = tmp_path / "model", random.Random(7)
    write_version(target, 1)
    begun = processes.Value("i", 0, lock=False)
    for _ in range(10):
        before = begun.value
        child = processes.Process(target=rewrite_a_thesis_for_ever, args=(target, begun), daemon=True)
        child.start()
        while begun.value < before + 2 and child.is_alive():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        recover(target)
        theses = {path.name for path in tmp_path.glob("model*/thesis-*.tex") if path.read_text() == "years of work"}
        assert theses >= {f"thesis-{number}.tex" for number in range(1, begun.value + 1)}


def test_a_name_as_long_as_a_file_system_takes_is_written_and_recovered(tmp_path: Path) -> None:
    for name in ("m" * 255, "模" * 85, "m" * 243 + ".safetensors"):
        target = tmp_path / name
        write_version(target, 1)
        thesis(target)
        with pytest.warns(UserWarning, match="kept-1"):
            write_version(target, 2)
        assert version_of(target) == 2
        (kept,) = beside(target)
        assert (tmp_path / kept / "thesis.tex").exists()
        shutil.rmtree(tmp_path / kept)
        shutil.rmtree(target)
    with pytest.raises(OutputError, match="File name too long"):
        write_version(tmp_path / ("m" * 256), 1)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_as_the_target(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_version(tmp_path / "model", 3, force=False)
    assert version_of(tmp_path / "model") == 3


def test_a_file_is_replaced_in_one_step_and_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    with staged_file(target) as path:
        assert (path.parent, path.suffix) == (target.parent, target.suffix)
        save_state_dict(some_tensors(1), path, progress=False)
    with pytest.raises(OutputExistsError, match="already exists"), staged_file(target):
        pytest.fail("the block must not run")
    with staged_file(target, force=True) as path:
        save_state_dict(some_tensors(2), path, progress=False)
    assert all((tensor == 2).all() for tensor in read_checkpoint(target).tensors.values())
    assert beside(target) == []


# ---- targets that are refused ----


def refuse_all(tmp_path: Path) -> Iterator[tuple[str, type[OutputError], Callable[[], Any]]]:
    model = tmp_path / "model"
    write_version(model, 1)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to_mum.txt").write_text("x")
    source = model / "model.safetensors.index.json"
    fresh = tmp_path / "fresh"
    yield "is not empty", OutputExistsError, lambda: staged_folder(model)
    yield "contains files but no model", OutputExistsError, lambda: staged_folder(tmp_path / "letters", force=True)
    yield "working or home folder", OutputExistsError, lambda: staged_folder(tmp_path, force=True)
    yield "working or home folder", OutputExistsError, lambda: staged_folder(Path.home(), force=True)
    yield "is a file", OutputError, lambda: staged_folder(tmp_path / "file", force=True)
    yield "is a folder", OutputError, lambda: staged_file(model, force=True)
    yield "is a link", OutputError, lambda: staged_folder(tmp_path / "link", force=True)
    yield "both the source and the output", OutputError, lambda: staged_folder(model, force=True, sources=[model])
    yield "both the source", OutputError, lambda: staged_folder(tmp_path / "x/../model", force=True, sources=[model])
    yield "both the source", OutputError, lambda: staged_folder(model, force=True, sources=[tmp_path / "link"])
    yield "inside the other", OutputError, lambda: staged_folder(model / "onnx", sources=[model])
    yield "inside the other", OutputError, lambda: staged_folder(model, force=True, sources=[source])
    yield "cannot be written: File exists", OutputError, lambda: staged_folder(tmp_path / "file" / "model")
    yield "cannot be an output", OutputError, lambda: staged_folder("/", force=True)
    yield "is not empty", OutputExistsError, lambda: staged_folder(model, sources=["someone/on-the-hub", fresh])


def test_targets_that_would_lose_something_are_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = list(refuse_all(tmp_path))
    held = sorted(tmp_path.rglob("*"))
    for says, raises, open_target in cases:
        with pytest.raises(raises, match=says) as caught, open_target():
            pytest.fail(f"the block must not run: {says}")
        assert type(caught.value) is raises
        assert sorted(tmp_path.rglob("*")) == held, says
    assert version_of(tmp_path / "model") == 1


def write_as_nobody(target: Path) -> None:
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    write_version(target, 2)


def test_a_read_only_folder_is_a_clear_error(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):  # so that the child, which runs as user nobody, has access
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    target = tmp_path / "model"
    write_version(target, 1)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OutputError, match="cannot be written: Permission denied"):
            in_a_process(write_as_nobody, target)
    finally:
        tmp_path.chmod(0o755)
    assert version_of(target) == 1
    assert beside(target) == []


# ---- trouble on the way ----


def write_with_a_full_disk(target: Path, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    write_version(target, 2)


@pytest.mark.parametrize("limit", [0, 100, 50_000, 250_000])
def test_a_full_disk_leaves_what_was_there(limit: int, tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_version(target, 1)
    with pytest.raises(OutputError, match="File too large.*the previous content is unchanged"):
        in_a_process(write_with_a_full_disk, target, limit)
    assert version_of(target) == 1
    assert beside(target) == []


def export_with_a_full_disk(model: Path, target: Path, format: str, limit: int) -> None:
    opened = from_checkpoint(model)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    to_checkpoint(opened.model, target, format=format, image_processor=opened.image_processor, force=True)


EXPORTS = [
    ("vit_pytorch", "model.pt"), ("vit_pytorch", "model.safetensors"), ("torchvision", "model.pth"),
    ("torchvision", "model.safetensors"), ("google", "model.npz"), ("timm", "model"), ("transformers", "model"),
]  # fmt: skip
LIMITS = [0, 100, 3000, 12_000]
# Each export in the middle of its file, and at one other place.
FULL = [(*export, 3000) for export in EXPORTS]
FULL += [(*export, limit) for export, limit in zip(EXPORTS, [0, 12_000, 0, 100, 12_000, 100, 12_000], strict=True)]
EXPRESSIBLE: dict[str, dict[str, Any]] = {
    "vit_pytorch": {"position_embedding_on_prefix": True, "layer_norm_eps": 1e-5, "qkv_bias": False,
                    "final_norm": "after_pooling", "patch_projection": "linear", "patch_pre_norm": True,
                    "patch_post_norm": True},
    "google": {"hidden_act": "gelu_pytorch_tanh"},
}  # fmt: skip


@pytest.mark.slow(
    quick=[
        *(f"{format}-{name}-3000" for format, name in EXPORTS[:5]),
        "torchvision-model.safetensors-100",
    ]
)
@pytest.mark.parametrize(
    "format, name, limit", [(*export, limit) for export in EXPORTS for limit in LIMITS] if NIGHTLY else FULL
)
def test_every_export_to_a_full_disk_leaves_what_was_there(format: str, name: str, limit: int, tmp_path: Path) -> None:
    sizes = {"image_size": 24, "patch_size": 8, **EXPRESSIBLE.get(format, {})}
    PlainViTForImageClassification(tiny_config(**sizes)).save_pretrained(tmp_path / "ours")
    target = tmp_path / "out" / name
    to_checkpoint(from_checkpoint(tmp_path / "ours").model, target, format=format)
    before = {path: path.read_bytes() for path in target.parent.rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match="was not written: File too large.*the previous content is unchanged"):
        in_a_process(export_with_a_full_disk, tmp_path / "ours", target, format, limit)
    assert {path: path.read_bytes() for path in target.parent.rglob("*") if path.is_file()} == before


def test_too_little_disk_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    huge = {"a": torch.empty(2**50, device="meta")}
    with pytest.raises(OutputError, match=r"needs 4503599\.6 GB, but only .* are free"):
        save_state_dict(huge, tmp_path / "model.safetensors", progress=False)
    assert list(tmp_path.iterdir()) == []


def write_and_fail(target: Path, error: BaseException) -> None:
    with staged_folder(target, force=True) as folder:
        (folder / "config.json").write_text("{}")
        raise error


@pytest.mark.parametrize("error", [ValueError("bad image"), KeyboardInterrupt(), FileNotFoundError(2, "no source")])
def test_an_error_in_the_block_comes_through_unchanged_and_leaves_what_was_there(
    error: BaseException, tmp_path: Path
) -> None:
    target, fresh = tmp_path / "model", tmp_path / "some" / "where" / "new"
    write_version(target, 1)
    for place in (target, fresh):
        with pytest.raises(type(error)) as caught:
            write_and_fail(place, error)
        assert caught.value is error
    assert version_of(target) == 1
    assert beside(target) == []


def write_for_ever(target: Path, started: Any) -> None:
    version = version_of(target)
    while True:
        version += 1
        write_version(target, version)
        started.value = version


def interrupted_at(moment: float, target: Path, with_signal: signal.Signals) -> int:
    """Stop a process that rewrites the target in a loop, and return the last version that it reported as finished."""
    finished = processes.Value("i", version_of(target), lock=False)
    child = processes.Process(target=write_for_ever, args=(target, finished), daemon=True)
    child.start()
    begun = finished.value
    while finished.value == begun and child.is_alive():
        time.sleep(0.001)
    time.sleep(moment)
    while child.is_alive():  # Python drops an interrupt that comes in a __del__, such as tqdm's: a person presses again
        os.kill(child.pid, with_signal)
        child.join(5)
    assert child.exitcode != 0
    return finished.value


def survive_kills(target: Path) -> None:
    kills = draws(10, nightly=100)
    write_version(target, 1)
    rng = random.Random(7)
    left = 0
    for _ in range(kills):
        finished = interrupted_at(rng.uniform(0, 0.3), target, signal.SIGKILL)
        if hasattr(os, "uname") and os.uname().sysname == "Linux":  # names are swapped in one step
            assert version_of(target) in (finished, finished + 1)
        left += recover(target)
        assert version_of(target) in (finished, finished + 1)
        assert beside(target) == [f".plain-vit-lock.{target.name}"][: len(beside(target))]
    write_version(target, 10**6)
    assert version_of(target) == 10**6
    assert beside(target) == []
    assert left > kills // 3, "too few kills fell into the writing to say anything"


def test_killed_at_random_moments_the_target_is_whole(tmp_path: Path) -> None:
    survive_kills(tmp_path / "model")


@pytest.mark.slow
def test_killed_at_random_moments_of_two_renames_the_target_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "exchange_names", lambda one, other: False)
    monkeypatch.setattr(os, "uname", lambda: type("Other", (), {"sysname": "another system"}))
    survive_kills(tmp_path / "model")


def test_interrupted_from_the_keyboard_the_target_is_whole_and_the_rest_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_version(target, 1)
    rng = random.Random(7)
    for _ in range(10):
        finished = interrupted_at(rng.uniform(0, 0.05), target, signal.SIGINT)
        recover(target)  # an interrupt may come while the writer itself clears up
        assert version_of(target) in (finished, finished + 1)
        assert beside(target) == []


@pytest.mark.parametrize(
    "target, new, old, expected",
    [
        (1, 2, None, 1),  # killed while writing: the new one may be half
        (2, None, 1, 2),  # killed before the old one was removed
        (None, 2, 1, 1),  # killed between two renames
        (None, None, 1, 1),  # killed while clearing up after that
    ],
)
def test_every_state_that_a_crash_can_leave_is_recovered(
    target: int | None, new: int | None, old: int | None, expected: int, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    for role, version in (("new", new), ("old", old), (None, target)):
        if version is not None:
            write_version(tmp_path / "elsewhere" / "model", version)
            (tmp_path / "elsewhere" / "model").rename(tmp_path / f".plain-vit-{role}.model" if role else place)
    (tmp_path / "elsewhere").rmdir()
    assert recover(place)
    assert version_of(place) == expected
    assert beside(place) == []
    assert not recover(place)


# ---- two writers ----


def write_slowly(target: Path, entered: Any) -> None:
    with staged_folder(target, force=True) as folder:
        (folder / "config.json").write_text("{}")
        entered.set()
        time.sleep(600)


def test_a_second_writer_is_turned_away_until_the_first_is_gone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_version(target, 1)
    entered = processes.Event()
    first = processes.Process(target=write_slowly, args=(target, entered), daemon=True)
    first.start()
    assert entered.wait(60)
    with pytest.raises(OutputError, match="being written by another process"):
        write_version(target, 2)
    assert version_of(target) == 1
    first.kill()
    first.join()
    write_version(target, 2)
    assert version_of(target) == 2
    assert beside(target) == []


def test_one_process_cannot_write_the_same_target_twice_at_once(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "model") as folder:
        with pytest.raises(OutputError, match="being written"), staged_folder(tmp_path / "model"):
            pytest.fail("the block must not run")
        assert folder.is_dir()
    assert (tmp_path / "model").is_dir()


def write_once(target: Path, version: int, results: Any) -> None:
    try:
        write_version(target, version)
        results.put(version)
    except OutputError:
        results.put(None)


def test_of_many_writers_at_once_each_one_writes_whole_or_is_turned_away(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_version(target, 1)
    results = processes.Queue()
    children = [
        processes.Process(target=write_once, args=(target, version, results), daemon=True) for version in range(2, 14)
    ]
    for child in children:
        child.start()
    outcomes = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert version_of(target) in [version for version in outcomes if version]
    assert beside(target) == []


# ---- the safetensors files ----


def test_the_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3, 5) for name in ("b", "a.weight", "a.bias")} | {"half": torch.ones(7).half()}
    save_state_dict(tensors, tmp_path / "ours.safetensors", {"format": "pt"}, progress=False)
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_every_dtype_and_layout_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.randn(5, 3).to(dtype).T,
        "scalar": torch.ones(()).to(dtype),
        "empty": torch.ones(0, 3).to(dtype),
        "parameter": torch.nn.Parameter(torch.randn(7, 2).to(dtype), requires_grad=False),
        "ümlaut": torch.ones(3).to(dtype),
    }
    save_state_dict(tensors, tmp_path / "a.safetensors", progress=False)
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].tolist() == tensor.tolist()


def test_shards_and_index_are_what_transformers_loads(tmp_path: Path) -> None:
    config = ViTConfig(
        hidden_size=12, num_hidden_layers=3, num_attention_heads=3, intermediate_size=20, image_size=14, patch_size=7
    )
    model = ViTModel(config, add_pooling_layer=False)
    state_dict = model.state_dict()
    config.save_pretrained(tmp_path)
    written = save_state_dict(state_dict, tmp_path / "model.safetensors", {"format": "pt"}, max_shard_size=5000)
    assert len(written) > 3
    assert written[-1].name == "model.safetensors.index.json"
    loaded = ViTModel.from_pretrained(tmp_path, add_pooling_layer=False).state_dict()
    assert set(loaded) == set(state_dict)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_dict.items())


def test_one_file_is_written_where_it_fits_the_shard_size(tmp_path: Path) -> None:
    assert save_state_dict(some_tensors(), tmp_path / "model.safetensors", max_shard_size="1GB", progress=False) == [
        tmp_path / "model.safetensors"
    ]


def test_pairs_are_written_in_whatever_order_they_come(tmp_path: Path) -> None:
    tensors = {f"layers.{index}": torch.randn(index + 1, 3) for index in range(7)}
    like = {name: tensor.to("meta") for name, tensor in tensors.items()}
    pairs = list(tensors.items())
    random.Random(3).shuffle(pairs)
    save_state_dict(iter(pairs), tmp_path / "model.safetensors", like=like, max_shard_size=100, progress=False)
    read = read_checkpoint(tmp_path).tensors
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "pairs, says",
    [
        ([("a", torch.ones(3))], "such as 'b'"),
        ([("a", torch.ones(3)), ("b", torch.ones(2)), ("a", torch.ones(3))], "is not in `like`, or occurs twice"),
        ([("a", torch.ones(3)), ("c", torch.ones(2))], "is not in `like`, or occurs twice"),
        ([("a", torch.ones(4))], "is not in `like`, or occurs twice"),
        ([("a", torch.ones(3).double())], "is not in `like`, or occurs twice"),
    ],
)
def test_pairs_that_are_not_what_was_announced_leave_no_file(pairs: list, says: str, tmp_path: Path) -> None:
    like = {"a": torch.ones(3), "b": torch.ones(2)}
    for size in (None, 10):
        with pytest.raises(OutputError, match=says):
            save_state_dict(iter(pairs), tmp_path / "a.safetensors", like=like, max_shard_size=size, progress=False)
        assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(OutputExistsError, match="already exists"):
        save_state_dict(some_tensors(), tmp_path / "model.safetensors", progress=False)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot store torch\.complex128"):
        save_state_dict({"a": torch.ones(3, dtype=torch.complex128)}, tmp_path / "a.safetensors", progress=False)


def test_the_bar_counts_bytes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_state_dict({"a": torch.ones(250_000)}, tmp_path / "a.safetensors")
    shown = capsys.readouterr().err
    assert "Writing a.safetensors" in shown
    assert "1.00M/1.00M" in shown
    assert "B/s" in shown


def copy(source: Path, target: Path) -> None:
    with staged_folder(target) as folder:
        save_state_dict(read_checkpoint(source).tensors, folder / "model.safetensors", progress=False)


def growth_of_a_copy(small: Path, source: Path, target: Path) -> int:
    """Copy a small checkpoint, so that all code is in memory, then another; return how many bytes that one took."""
    copy(small, target.with_name("small copy"))
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = kilobytes("VmRSS")
    copy(source, target)
    return (kilobytes("VmHWM") - before) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its own size from /proc")
@pytest.mark.parametrize("save, suffix", [(safetensors.torch.save_file, ".safetensors"), (torch.save, ".pt")])
def test_a_checkpoint_is_copied_holding_two_tensors_at_a_time(save: Callable, suffix: str, tmp_path: Path) -> None:
    large = {f"layers.{index}": torch.full((5, 2**20), 1.0) for index in range(12)}
    save(large, tmp_path / f"large{suffix}")
    save(some_tensors(), tmp_path / f"small{suffix}")
    small, source = tmp_path / f"small{suffix}", tmp_path / f"large{suffix}"
    grown = in_a_process(growth_of_a_copy, small, source, tmp_path / "copy")
    one = 5 * 2**20 * 4
    assert 0.9 * one < grown < 2.2 * one  # of twelve: one is read while another is written
    read = read_checkpoint(tmp_path / "copy").tensors
    assert all(torch.equal(read[name], tensor) for name, tensor in large.items())


def test_computed_tensors_are_computed_once(tmp_path: Path) -> None:
    calls = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return torch.ones(3, 5)

    save_state_dict(
        LazyTensors({"a": LazyTensor((3, 5), torch.float32, compute)}), tmp_path / "a.safetensors", progress=False
    )
    assert calls == [1]


# ---- the commands themselves ----


SAID = {"num_attention_heads": 3, "image_size": 24, "patch_size": 8}
WORDS = ["--num-attention-heads", "3", "--image-size", "24", "--patch-size", "8"]


def save_source(folder: Path, version: int) -> Path:
    """Save a checkpoint of vit-pytorch whose tensors differ from those of every other version."""
    torch.manual_seed(version)
    model = vit_pytorch.ViT(
        image_size=24, patch_size=8, num_classes=5, dim=20, depth=9, heads=3, dim_head=10, mlp_dim=24
    )
    torch.save(model.state_dict(), folder / f"source {version}.pt")
    return folder / f"source {version}.pt"


def rewrite_for_ever(command: str, sources: list[Path], target: Path, rounds: Any) -> None:
    more = ["--to", "vit_pytorch"] if command == "export" else ["--no-verify"]
    while True:
        for source in sources:
            assert main([command, str(source), str(target), "--force", *more, *WORDS]) == 0
            rounds.value += 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "export"])
def test_killed_at_random_moments_of_a_command_its_output_is_whole(command: str, tmp_path: Path) -> None:
    kills = draws(10, nightly=100)
    sources = [save_source(tmp_path, version) for version in (1, 2)]
    target = tmp_path / ("model.pt" if command == "export" else "model")
    rounds = processes.Value("i", 0, lock=False)
    hints = SAID if command == "export" else {}
    expected = [from_checkpoint(source, **SAID).model.state_dict() for source in sources]
    rng, left = random.Random(7), 0
    staged = target.with_name(f".plain-vit-new.{target.name}")
    for kill in range(kills):
        before = rounds.value
        child = processes.Process(target=rewrite_for_ever, args=(command, sources, target, rounds), daemon=True)
        child.start()
        while rounds.value == before and child.is_alive():
            time.sleep(0.001)
        if kill % 2:  # a moment of the whole command, or one of the writing, which is short
            time.sleep(rng.uniform(0, 0.4))
        else:
            while not staged.exists() and child.is_alive():
                time.sleep(0.0001)
            time.sleep(rng.uniform(0, 0.01))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        found = from_checkpoint(target, **hints).model.state_dict()
        assert any(all(torch.equal(found[name], of[name]) for name in found) for of in expected)
        left += recover(target)
        assert set(beside(target)) <= {"source 1.pt", "source 2.pt", f".plain-vit-lock.{target.name}"}
    assert left >= kills // 10, "too few kills fell into the writing to say anything"
