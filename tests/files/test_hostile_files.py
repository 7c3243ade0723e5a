"""Broken and malicious files raise a documented error: no code runs, nothing hangs, little memory is used."""

import os
import resource
import time
from pathlib import Path

import gguf
import hypothesis
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import strategies

from plain_vit.conversion import from_checkpoint, open
from plain_vit.errors import CheckpointError, PlainViTError, UnsafeFileError
from plain_vit.files import torch_pickle
from plain_vit.files.reading import check_layer_numbers, read_checkpoint
from tests.files.bad_files import BAD_FILES, PAYLOAD
from tests.files.test_reading import WRITERS, some_tensors
from tests.processes import in_a_process, kilobytes
from tests.sizes import draws


@pytest.mark.slow(
    quick=[
        "index that maps to numbers",
        "one file beside an index",
        "a configuration instead of weights named weights.npz",
        "a shard of torch.distributed.checkpoint",
        "safetensors: a shape of truth values",
        "hostile pickle that torch did not write",
        "GGUF that ends in its header",
    ]
)
@pytest.mark.parametrize("title", BAD_FILES)
def test_a_bad_file_gets_the_error_that_names_it_and_its_remedy(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input").mkdir()
    monkeypatch.chdir(tmp_path)
    make, raises, says = BAD_FILES[title]
    source = make(tmp_path / "input")
    held = sorted(tmp_path.rglob("*"))
    started = time.monotonic()
    with pytest.raises(raises, match=says) as caught:
        read_checkpoint(source)
    assert time.monotonic() - started < 60
    assert type(caught.value) is raises
    assert str(source) in str(caught.value)
    assert len(str(caught.value)) < 3000
    assert sorted(tmp_path.rglob("*")) == held
    assert PAYLOAD not in os.listdir(tmp_path)


def test_the_payload_of_the_hostile_files_does_run_without_protection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make sure that the payload works; otherwise the tests above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    path = BAD_FILES["pickle that calls os.system"].make(tmp_path)
    torch.load(path, weights_only=False)
    assert (tmp_path / PAYLOAD).exists()


@pytest.mark.parametrize("title", ["pickle that calls os.system", "old pickle that calls os.system"])
def test_where_our_own_check_of_a_pickle_is_passed_torch_refuses_it_still(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_pickle, "TENSOR_GLOBALS", torch_pickle.TENSOR_GLOBALS | {"posix system"})
    with pytest.raises(CheckpointError, match="cannot be unpickled"):
        read_checkpoint(BAD_FILES[title].make(tmp_path))
    assert not (tmp_path / PAYLOAD).exists()


def open_all(sources: list[Path]) -> tuple[int, float]:
    """Open files with 1.2 GB to spare; return how many got a documented error, and by how many MB the process grew."""
    resource.setrlimit(resource.RLIMIT_AS, (kilobytes("VmSize") * 1024 + 1_200_000_000,) * 2)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = kilobytes("VmRSS")
    refused = 0
    for source in sources:
        try:
            read_checkpoint(source)
        except PlainViTError:
            refused += 1
    return refused, (kilobytes("VmHWM") - before) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its own size from /proc")
def test_no_bad_file_takes_much_memory(tmp_path: Path) -> None:
    sources = []
    for number, bad in enumerate(BAD_FILES.values()):
        (tmp_path / str(number)).mkdir()
        sources.append(bad.make(tmp_path / str(number)))
    refused, grown_mb = in_a_process(open_all, sources)
    assert refused == len(BAD_FILES)
    assert grown_mb < 800  # the largest header that is read, parsed, takes about half of it
    assert not list(tmp_path.rglob(PAYLOAD))


def test_a_torch_too_old_to_read_pickles_safely_reads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = WRITERS["pt"](some_tensors(), tmp_path)
    monkeypatch.setattr(torch_pickle, "RELEASE", torch.torch_version.TorchVersion("2.9.1+cpu"))
    with pytest.raises(UnsafeFileError, match=r"update to torch 2\.10"):
        read_checkpoint(path)
    read_checkpoint(WRITERS["safetensors"](some_tensors(), tmp_path))


def test_compressed_zeros_within_the_limit_are_read(tmp_path: Path) -> None:
    """The zeroed heads of real checkpoints compress a thousandfold; they are not decompression bombs."""
    np.savez_compressed(tmp_path / "head.npz", kernel=np.zeros((21843, 768), np.float32))
    tensors = read_checkpoint(tmp_path / "head.npz").tensors
    assert (tmp_path / "head.npz").stat().st_size < tensors.nbytes / 900
    assert not tensors["kernel"].any()


def test_a_damaged_array_of_an_npz_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", a=np.arange(1000.0))
        data = bytearray((tmp_path / "a.npz").read_bytes())
        data[600] ^= 0xFF
        (tmp_path / "a.npz").write_bytes(data)
        tensors = read_checkpoint(tmp_path / "a.npz").tensors
        with pytest.raises(PlainViTError, match="cannot be unpacked|too short"):
            tensors["a"]


# ---- mutations: what we open, the format's own reader opens with the same numbers ----


def _numbers_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    shape = tuple(map(int, tensor.shape[::-1]))
    is_bf16 = tensor.tensor_type == gguf.GGMLQuantizationType.BF16
    return tensor.data.view(np.int16 if is_bf16 else tensor.data.dtype).reshape(shape)


REFERENCES = {
    "safetensors": lambda path: safetensors.torch.load(path.read_bytes()),
    "pt": lambda path: torch.load(path, weights_only=True, map_location="cpu"),
    "pt before torch 1.6": lambda path: torch.load(path, weights_only=True, map_location="cpu"),
    "npz": lambda path: dict(np.load(path, allow_pickle=False)),
    "npz compressed": lambda path: dict(np.load(path, allow_pickle=False)),
    "gguf": lambda path: {tensor.name: _numbers_of(tensor) for tensor in gguf.GGUFReader(path).tensors},
}


@strategies.composite
def mutations(draw: strategies.DrawFn, size: int) -> list[tuple[str, int, int, bytes]]:
    """Mostly one edit, at most three: a byte or some changed, a stretch removed, repeated or inserted, the rest cut."""
    edits = []
    for _ in range(draw(strategies.sampled_from([1, 1, 1, 2, 3]))):
        kind = draw(strategies.sampled_from(["flip", "add", "overwrite", "remove", "repeat", "insert", "cut"]))
        start = draw(strategies.integers(0, size - 1))
        edits.append((kind, start, draw(strategies.integers(1, 64)), draw(strategies.binary(min_size=1, max_size=16))))
    return edits


def mutated(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    for kind, start, length, new in edits:
        if kind == "flip":
            data = (
                data[:start] + bytes(byte ^ (1 << length % 8) for byte in data[start : start + 1]) + data[start + 1 :]
            )
        elif kind == "add":  # of digits, it makes other digits
            data = data[:start] + bytes((byte + length) % 256 for byte in data[start : start + 1]) + data[start + 1 :]
        elif kind == "overwrite":
            data = data[:start] + new + data[start + len(new) :]
        elif kind == "remove":
            data = data[:start] + data[start + length :]
        elif kind == "repeat":
            data = data[: start + length] + data[start:]
        elif kind == "insert":
            data = data[:start] + new + data[start:]
        else:
            data = data[:start]
    return data


def assert_equal_bits(tensor: torch.Tensor, expected: torch.Tensor | np.ndarray) -> None:
    if isinstance(expected, np.ndarray):
        expected = expected.view(np.int16) if expected.dtype == np.dtype("V2") else expected
        expected = torch.from_numpy(expected.astype(expected.dtype.newbyteorder("=")))
    assert tensor.shape == expected.shape
    assert torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, expected)))


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_mutated_file_opens_with_the_numbers_it_holds_or_gets_a_documented_error(kind: str, tmp_path: Path) -> None:
    path, count, opened = WRITERS[kind](some_tensors(), tmp_path), draws(80, nightly=1000), 0
    whole = path.read_bytes()

    @hypothesis.settings(max_examples=count, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(mutations(len(whole)))
    def check(edits: list[tuple[str, int, int, bytes]]) -> None:
        nonlocal opened
        path.write_bytes(mutated(whole, edits))
        started = time.monotonic()
        try:
            tensors = dict(read_checkpoint(path, key=".").tensors)
        except PlainViTError:
            return
        finally:
            assert time.monotonic() - started < 60
        opened += 1
        reference = REFERENCES[kind](path)
        for name, tensor in tensors.items():
            assert_equal_bits(tensor, reference[name])

    check()
    assert opened >= count // 80, "too few mutated files opened: the mutations are too coarse to say anything"


@pytest.mark.parametrize("number", [10**4, 10**10, 10**30])
@pytest.mark.parametrize(
    "anchor, name",
    [
        ("to_patch_embedding.2.weight", "transformer.layers.{}.0.norm.weight"),
        ("patch_embed.proj.weight", "blocks.{}.norm1.weight"),
        ("conv_proj.weight", "encoder.layers.encoder_layer_{}.ln_1.weight"),
        ("embedding/kernel", "Transformer/encoderblock_{}/LayerNorm_0/scale"),
        ("vit.embeddings.patch_embeddings.projection.weight", "vit.encoder.layer.{}.layernorm_before.weight"),
    ],
)
def test_a_layer_number_beyond_the_count_of_tensors_is_refused_before_anything_is_built(
    anchor: str, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.safetensors"
    tensors = {anchor: torch.ones(8, 3, 4, 4), "blocks.0.norm1.weight": torch.ones(8)}
    safetensors.torch.save_file({**tensors, name.format(number): torch.ones(8)}, path)
    monkeypatch.setattr(open, "recognise", None)  # nothing is looked at, let alone built
    with pytest.raises(UnsafeFileError, match=f"number {number} of its kind, and 3 tensors in all"):
        from_checkpoint(path)


def test_numbers_in_names_that_count_no_layers_pass() -> None:
    check_layer_numbers(["vit_base_patch16_224.blocks.11.norm1.weight", "encoder_layer_31.ln_1.bias"], "vit.pt")
