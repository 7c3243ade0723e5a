"""Broken and malicious files, each with the error that it must raise.

Tests of reading, the command line and the documentation share this table.
"""

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import nn

from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    PlainViTError,
    UnknownFormatError,
    UnsafeFileError,
)

TENSORS = {"norm.weight": torch.arange(7.0), "head.weight": torch.arange(15.0).reshape(5, 3)}
PAYLOAD = "PAYLOAD_RAN"  # the file that a malicious pickle would create in the working folder


class BadFile(NamedTuple):
    """How to make the file in an empty folder, and the expected error and message."""

    make: Callable[[Path], Path]
    raises: type[PlainViTError]
    says: str


BAD_FILES: dict[str, BadFile] = {}


def bad_file(title: str, raises: type[PlainViTError], says: str) -> Callable[[Callable], Callable]:
    def add(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        assert title not in BAD_FILES
        BAD_FILES[title] = BadFile(make, raises, says)
        return make

    return add


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# ---- not a checkpoint at all ----

for _title, _data, _says in [
    ("an empty file", b"", "is empty"),
    (
        "a Git LFS pointer",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234567\n",
        "git lfs pull",
    ),
    ("an HTML page", b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>" * 9, "HTML"),
    ("an HTML page after blank lines", b"\n\n  <html><body>404</body></html>", "HTML"),
    ("a configuration instead of weights", b'{"model_type": "vit"}', "JSON"),
    ("noise", bytes(range(7, 256)) * 5, "begins with"),
    ("zeros", bytes(4096), "begins with"),
]:
    for _name in ("model.safetensors", "weights.pt", "weights.npz"):
        bad_file(f"{_title} named {_name}", CheckpointError, _says)(
            lambda folder, name=_name, data=_data: _written(folder / name, data)
        )


# ---- files and folders of other programs ----

_HDF5, _MSGPACK = b"\x89HDF\r\n\x1a\n" + bytes(99), b"\x82\xa3vit\x80\xaaclassifier\x80"
_PROTOBUF = b"\x08\x0a\x12\x07pytorch"
for _title, _name, _data, _says in [
    ("an ONNX graph", "model.onnx", _PROTOBUF, "is an ONNX graph, which has lost the names of the layers"),
    ("an ONNX graph named as weights", "model.bin", _PROTOBUF, "is an ONNX graph or a message like it"),
    ("a file of Keras 2", "vit.h5", _HDF5, "is an HDF5 file, as Keras writes it"),
    ("weights of transformers for TensorFlow", "tf_model.h5", _HDF5, "is an HDF5 file of transformers for TensorFlow"),
    ("weights of transformers for Flax", "flax_model.msgpack", _MSGPACK, "is a msgpack file of transformers for Flax"),
    ("weights of Flax", "vit.msgpack", _MSGPACK, "is a msgpack file, as Flax writes it"),
    ("weights of TensorFlow", "vit.data-00000-of-00001", bytes(99), "is a file of TensorFlow|is a model of TensorFlow"),
    ("a program of TensorFlow Lite", "vit.tflite", b"\x1c\0\0\0TFL3" + bytes(99), "is a compiled program"),
    ("a program of TensorRT", "vit.engine", b"ftrt" + bytes(99), "is a compiled program"),
    ("a graph of OpenVINO", "vit.xml", b'<?xml version="1.0"?>\n<net name="vit">', "is a graph of OpenVINO"),
    ("a shard of torch.distributed.checkpoint", "__0_0.distcp", b"PK\3\4" + bytes(99), "a checkpoint of torch"),
]:  # fmt: skip
    for _where in ("", ", by its folder"):
        bad_file(f"{_title}{_where}", CheckpointError, _says)(
            lambda folder, name=_name, data=_data, alone=not _where: (
                _written(folder / name, data) if alone else _written(folder / name, data).parent
            )
        )


for _title, _name, _says in [
    ("torch.distributed.checkpoint", ".metadata", "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"),
    ("DeepSpeed", "zero_to_fp32.py", "is a checkpoint of DeepSpeed's ZeRO, in shards"),
    ("Orbax", "_METADATA", "is an Orbax checkpoint"),
    ("TensorFlow", "saved_model.pb", "is a model of TensorFlow"),
    ("an adapter without its model", "adapter_model.safetensors", "is an adapter of peft without the model"),
]:  # fmt: skip
    bad_file(f"folder of {_title}", CheckpointError, _says)(
        lambda folder, name=_name: _written(folder / name, b"{}").parent
    )


for _title, _member, _says in [
    ("Keras 3", "model.weights.h5", "is an archive of Keras"),
    ("torch.export", "vit/models/model.json", "is a program written by torch.export"),
    ("documents named .pt", "word/document.xml", "is a zip archive of 'word/document.xml', not of tensors"),
]:
    bad_file(f"archive of {_title}", CheckpointError, _says)(
        lambda folder, member=_member: _zip(folder / "model.keras", {member: b"<xml/>"})
    )


# ---- safetensors ----


def _safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


_GOOD = safetensors.torch.save(TENSORS)
_A = _entry()

for _title, _data, _raises, _says in [
    ("cut in its data", _GOOD[:-3], CheckpointError, "truncated"),
    ("cut in its header", _GOOD[:40], CheckpointError, "truncated"),
    ("cut in its length", _GOOD[:5], CheckpointError, "begins with"),
    ("bytes after the last tensor", _GOOD + b"\0", CheckpointError, "trail the last tensor"),
    ("a header longer than the file", _safetensors({"a": _A}, bytes(8), 10**9), CheckpointError, "truncated"),
    ("a header length near 2**64", _safetensors({"a": _A}, bytes(8), 2**64 - 1), CheckpointError, "truncated"),
    ("a header of over 100 MB", _safetensors(b"{" + b" " * 101_000_000 + b"}"), UnsafeFileError, "a header of"),
    ("a name of 10 MB", _safetensors({"a." * 5_000_000: _A}, bytes(8)), UnsafeFileError, "a name of 10,000,000"),
    ("a header that is no JSON", _safetensors(b'{"a": {"dtype"'), CheckpointError, "not JSON"),
    ("a header that is no UTF-8", _safetensors(b'{"\xff\xfe": 1}'), CheckpointError, "not JSON"),
    ("a header nested very deep", _safetensors(b'{"a":' + b"[" * 10**5), CheckpointError, "not JSON"),
    ("a number of 5,000 digits", _safetensors(b'{"a":' + b"9" * 5000 + b"}"), CheckpointError, "not JSON"),
    ("one name twice", _safetensors(b'{"a":%s,"a":%s}' % ((json.dumps(_A).encode(),) * 2), bytes(8)), CheckpointError,
     "names 'a' twice"),
    ("an unknown dtype", _safetensors({"a": _entry("F31")}, bytes(8)), CheckpointError, "dtype 'F31'"),
    ("a dtype that is a number", _safetensors({"a": _entry(32)}, bytes(8)), CheckpointError, "dtype 32"),
    ("a shape that overflows", _safetensors({"a": _entry(shape=(2**33, 2**33))}, bytes(8)), CheckpointError, "shape"),
    ("a huge shape with zero", _safetensors({"a": _entry(shape=(0, 2**70), offsets=(0, 0))}), CheckpointError, "shape"),
    ("a negative shape", _safetensors({"a": _entry(shape=(-2, -1))}, bytes(8)), CheckpointError, "shape"),
    ("a fractional shape", _safetensors({"a": _entry(shape=(2.0,))}, bytes(8)), CheckpointError, "shape"),
    ("a shape of truth values", _safetensors({"a": _entry(shape=(True, 2))}, bytes(8)), CheckpointError, "shape"),
    ("a shape of 1,000 dimensions", _safetensors({"a": _entry(shape=(1,) * 1000)}, bytes(8)), CheckpointError, "shape"),
    ("offsets out of the file", _safetensors({"a": _entry(offsets=(800, 808))}, bytes(8)), CheckpointError, "gap"),
    ("offsets that run backwards", _safetensors({"a": _entry(offsets=(8, 0))}, bytes(8)), CheckpointError, "damaged"),
    ("one offset", _safetensors({"a": _entry(offsets=(0,))}, bytes(8)), CheckpointError, "damaged"),
    ("overlapping tensors", _safetensors({"a": _A, "b": _A}, bytes(8)), CheckpointError, "overlaps"),
    ("a gap between them", _safetensors({"a": _A, "b": _entry(offsets=(12, 20))}, bytes(20)), CheckpointError, "gap"),
    ("too few bytes for a shape", _safetensors({"a": _entry(shape=(3,))}, bytes(8)), CheckpointError, "does not fill"),
    ("a tensor without a shape", _safetensors({"a": {"dtype": "F32"}}, bytes(8)), CheckpointError, "not described"),
    ("a tensor with more to it", _safetensors({"a": _A | {"x": 1}}, bytes(8)), CheckpointError, "not described"),
    ("a tensor that is a list", _safetensors({"a": [1]}, bytes(8)), CheckpointError, "not described"),
    ("metadata that is no text", _safetensors({"__metadata__": {"a": 1}, "a": _A}, bytes(8)), CheckpointError, "texts"),
    ("no tensors", _safetensors({"__metadata__": {"format": "pt"}}), CheckpointError, "no tensors"),
    ("16 MB of empty lists", _safetensors(b'{"a":[' + b"[]," * 5_500_000 + b"0]}"), UnsafeFileError, "braces, "),
    ("60,000 tensors", _safetensors({str(i): _entry(shape=(0,), offsets=(0, 0)) for i in range(60_000)}),
     UnsafeFileError, "60000 tensors"),
]:  # fmt: skip
    bad_file(f"safetensors: {_title}", _raises, _says)(
        lambda folder, data=_data: _written(folder / "model.safetensors", data)
    )


# ---- pickles ----


class _Runs:
    """Creates the payload's file when unpickled carelessly."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple]:
        return self.reduced


def _pickled(saved: object, folder: Path, name: str = "weights.pt", **options: Any) -> Path:
    torch.save(saved, folder / name, **options)
    return folder / name


for _zipped in (True, False):
    for _title, _function, _arguments, _says in [
        ("os.system", os.system, (f"touch {PAYLOAD}",), "posix.system"),
        ("eval", eval, (f"open({PAYLOAD!r}, 'w')",), "__builtin__.eval"),
        ("open", open, (PAYLOAD, "w"), "io.open"),
        ("torch.load", torch.load, ("other.pt",), "torch.serialization.load"),
        ("a memory bomb", bytearray, (2**40,), "__builtin__.bytearray"),
        ("a tensor of a terabyte", torch.FloatTensor, (2**38,), "FloatTensor"),
    ]:
        bad_file(f"{'pickle' if _zipped else 'old pickle'} that calls {_title}", UnsafeFileError, _says)(
            lambda folder, function=_function, arguments=_arguments, zipped=_zipped: _pickled(
                {"model": TENSORS, "epoch": _Runs(function, *arguments)}, folder, _use_new_zipfile_serialization=zipped
            )
        )
    bad_file(
        f"{'pickle' if _zipped else 'old pickle'} of a whole module", UnsafeFileError, "torch.nn.modules.linear.Linear"
    )(lambda folder, zipped=_zipped: _pickled(nn.Linear(3, 5), folder, _use_new_zipfile_serialization=zipped))


@bad_file("hostile pickle named as safetensors", CheckpointError, "rename it to end in .pt")
def _hostile_safetensors(folder: Path) -> Path:
    return _pickled({"a": _Runs(os.system, f"touch {PAYLOAD}")}, folder, "model.safetensors")


@bad_file("hostile pickle that torch did not write", CheckpointError, "protocol 4|not a complete pickle")
def _plain_pickle(folder: Path) -> Path:
    return _written(folder / "weights.pt", pickle.dumps(_Runs(os.system, f"touch {PAYLOAD}"), protocol=4))


@bad_file("hostile pickle of protocol 0", CheckpointError, "begins with")
def _text_pickle(folder: Path) -> Path:
    return _written(folder / "weights.pt", pickle.dumps(_Runs(os.system, f"touch {PAYLOAD}"), protocol=0))


@bad_file("pickle of another protocol", CheckpointError, "protocol 4")
def _protocol(folder: Path) -> Path:
    return _pickled(TENSORS, folder, pickle_protocol=4)


@bad_file("pickle of four million steps", UnsafeFileError, "steps")
def _long_pickle(folder: Path) -> Path:
    steps = b"\x80\x02]" + b"]0" * 2_000_000 + b"."  # a list is made and dropped, again and again
    return _zip(folder / "weights.pt", {"weights/data.pkl": steps})


@bad_file("TorchScript archive", UnsafeFileError, "TorchScript")
def _torchscript(folder: Path) -> Path:
    members = {"m/constants.pkl": b"\x80\x02).", "m/code/m.py": b"", "m/data.pkl": b"\x80\x02}."}
    return _zip(folder / "weights.pt", members)


@bad_file("tar archive of early torch", CheckpointError, "not a complete pickle")
def _tar(folder: Path) -> Path:
    with tarfile.open(folder / "weights.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("../../escape"), io.BytesIO())
    return folder / "weights.pt"


def _doctored(folder: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Write a file like torch.save, with changed bytes in some members."""
    good = _pickled(TENSORS, folder, "good.pt")
    with zipfile.ZipFile(good) as archive:
        members = {name.replace("good/", "weights/"): archive.read(name) for name in archive.namelist()}
    good.unlink()
    return _zip(folder / "weights.pt", {name: change(name, data) for name, data in members.items()})


@bad_file("pickle whose record is shorter than its tensor", CheckpointError, "is outside the bytes|cannot be unpickled")
def _short_record(folder: Path) -> Path:
    return _doctored(folder, lambda name, data: data[:-4] if name.endswith("data/0") else data)


def _patched(path: Path, old: bytes, new: bytes) -> Path:
    """Change bytes of the pickle inside its archive in place, and its checksum with them."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        pickled = archive.read(name)
    assert pickled.count(old) == 1
    assert len(old) == len(new)
    changed = pickled.replace(old, new)
    data = data.replace(pickled, changed)
    return _written(path, data.replace(struct.pack("<I", zlib.crc32(pickled)), struct.pack("<I", zlib.crc32(changed))))


def _key(key: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(key)) + key  # BINUNICODE


@bad_file("pickle that mixes up its records", CheckpointError, "in the order of its pickle")
def _mixed_up(folder: Path) -> Path:
    path = _pickled({name: torch.full((2, 3), float(index)) for index, name in enumerate("abc")}, folder)
    for old, new in ((b"1", b"7"), (b"2", b"1"), (b"7", b"2")):
        path = _patched(path, _key(old), _key(new))
    return path


@bad_file("old pickle with a tensor that has no bytes", CheckpointError, "without bytes")
def _no_bytes(folder: Path) -> Path:
    path = _pickled(TENSORS, folder, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    key = str(TENSORS["norm.weight"].untyped_storage()._cdata).encode()
    assert data.count(_key(key)) == 2  # where it is used, and where it is listed
    other = key[:-1] + (b"1" if key[-1:] == b"0" else b"0")
    return _written(path, data.replace(_key(key), _key(other), 1))


@bad_file("old pickle that names a storage in a way of its own", CheckpointError, "as torch.save does")
def _other_name(folder: Path) -> Path:
    path = _pickled(TENSORS, folder, _use_new_zipfile_serialization=False)
    return _written(path, path.read_bytes().replace(_key(b"storage"), _key(b"torages"), 1))


@bad_file("pickle with a damaged header of a record", CheckpointError, "the header of 'weights/data/1' is damaged")
def _record_header(folder: Path) -> Path:
    path = _pickled(TENSORS, folder)
    data = path.read_bytes()
    return _written(path, data.replace(b"weights/data/1", b"weights/dato/1", 1))


@bad_file("pickle of another byte order", CheckpointError, "byte order")
def _byte_order(folder: Path) -> Path:
    return _doctored(folder, lambda name, data: b"big" if name.endswith("byteorder") else data)


@bad_file("pickle whose storages are aligned to 0 bytes", CheckpointError, "expected an alignment from 1")
def _alignment(folder: Path) -> Path:
    return _doctored(folder, lambda name, data: b"0" if name.endswith(".storage_alignment") else data)


@bad_file("pickle with a record that torch.save does not write", CheckpointError, "is not one that torch.save writes")
def _other_record(folder: Path) -> Path:
    path = _pickled(TENSORS, folder)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{path.stem}/.storage_size", "1")
    return path


@bad_file("pickle cut short inside its archive", CheckpointError, "not a complete pickle")
def _cut_pickle(folder: Path) -> Path:
    return _doctored(folder, lambda name, data: data[:-9] if name.endswith("data.pkl") else data)


@bad_file("views of a terabyte over four bytes", CheckpointError, "an expanded tensor")
def _expanded(folder: Path) -> Path:
    return _pickled({"a.weight": torch.ones(1).expand(2**19, 2**19), "b.weight": torch.ones(3, 5)}, folder)


@bad_file("many views of one storage", UnsafeFileError, "holds views of")
def _many_views(folder: Path) -> Path:
    whole = torch.ones(1000, 1000)
    return _pickled({f"layers.{index}": whole for index in range(50)}, folder)


@bad_file("pickle with a name of 1,001 characters", UnsafeFileError, "a name of 1,001 characters")
def _long_name(folder: Path) -> Path:
    return _pickled({"a" * 1001: torch.ones(2, 3), "b": torch.ones(3, 5)}, folder)


@bad_file("npz with a name of 1,001 characters", UnsafeFileError, "a name of 1,001 characters")
def _long_array_name(folder: Path) -> Path:
    np.savez(folder / "weights.npz", **{"a" * 1001: np.ones(3)})
    return folder / "weights.npz"


@bad_file("sparse tensors", UnsafeFileError, "_rebuild_sparse_tensor")
def _sparse(folder: Path) -> Path:
    return _pickled({"a": torch.eye(3).to_sparse(), "b": torch.ones(3, 5)}, folder)


@bad_file("dictionaries nested in each other without end", UnsafeFileError, "nests over")
def _nested(folder: Path) -> Path:
    level: dict[str, object] = {"a": torch.ones(2, 3)}
    for _ in range(4):
        level = {str(index): level for index in range(20)}
    return _pickled(level, folder)


@bad_file("dictionary that holds itself", UnknownFormatError, "no dictionary of named tensors")
def _loop(folder: Path) -> Path:
    loop: dict[str, object] = OrderedDict()
    loop["model"] = loop
    return _pickled(loop, folder)


# ---- GGUF ----


def _gguf(folder: Path, header: bytes, counts: tuple[int, int], version: int = 3, data: bytes = b"") -> Path:
    return _written(folder / "mmproj.gguf", b"GGUF" + struct.pack("<IQQ", version, *counts) + header + data)


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf_tensor(name: str, shape: tuple[int, ...], kind: int = 0, start: int = 0) -> bytes:
    return _gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


_FLAG, _ONE = _gguf_text("general.flag") + struct.pack("<IB", 7, 1), _gguf_tensor("v.a", (4,))
for _title, _raises, _says, _header, _counts, _rest in [
    ("of version 1", CheckpointError, "of version 1 of GGUF, or big-endian", b"", (0, 0), {"version": 1}),
    ("without tensors", CheckpointError, "contains no tensors", b"", (0, 0), {}),
    ("that ends in its header", CheckpointError, "ends in its header", _FLAG[:9], (0, 1), {}),
    ("that claims 10^18 settings", UnsafeFileError, "claims 1000000000000000000 entries", _FLAG, (0, 10**18), {}),
    ("that claims 10^18 tensors", UnsafeFileError, "claims 1000000000000000000 entries", _ONE, (10**18, 0), {}),
    ("with a text of 10^18 bytes", CheckpointError, "ends in its header", struct.pack("<Q", 10**18), (0, 1), {}),
    ("with a list of 10^18 numbers", CheckpointError, "ends in its header",
     _gguf_text("a") + struct.pack("<IIQ", 9, 6, 10**18), (0, 1), {}),
    ("with a list of 10^18 texts", CheckpointError, "ends in its header",
     _gguf_text("a") + struct.pack("<IIQ", 9, 8, 10**18), (0, 1), {}),
    ("with lists in lists", CheckpointError, "setting of the unknown type 9",
     _gguf_text("a") + struct.pack("<IIQ", 9, 9, 2) * 9, (0, 1), {}),
    ("with a text that is none", CheckpointError, "not UTF-8", struct.pack("<Q", 1) + b"\xff", (0, 1), {}),
    ("with a setting twice", CheckpointError, "setting 'general.flag' twice", _FLAG * 2, (0, 2), {}),
    ("with an alignment of 0", CheckpointError, "general.alignment = 0",
     _gguf_text("general.alignment") + struct.pack("<II", 4, 0), (0, 1), {}),
    ("with a header of 17 MiB", UnsafeFileError, "has a header of over", _gguf_text("a") + struct.pack(
        "<IIQ", 9, 0, 17 * 2**20) + bytes(17 * 2**20), (0, 1), {}),
    ("with a tensor twice", CheckpointError, "has the tensor 'v.a' twice", _ONE * 2, (2, 0), {"data": bytes(99)}),
    ("without the end of a tensor", CheckpointError, "too short for the tensor 'v.a'", _ONE, (1, 0), {}),
    ("with an impossible shape", CheckpointError, "impossible shape", _gguf_tensor("v.a", (2**40, 2**40)), (1, 0), {}),
    ("with a tensor of 5 axes", UnsafeFileError, "claims 5 entries", _gguf_tensor("v.a", (1,) * 5), (1, 0), {}),
    ("with a tensor of whole numbers", CheckpointError, "tensors of type 24, which gguf does not dequantise",
     _gguf_tensor("v.a", (4,), 24), (1, 0), {"data": bytes(99)}),
    ("with a tensor of no type", CheckpointError, "tensors of type 99, which gguf does not dequantise",
     _gguf_tensor("v.a", (4,), 99), (1, 0), {"data": bytes(99)}),
    ("with half a block", CheckpointError, "no whole blocks of Q8_0",
     _gguf_tensor("v.a", (48,), 8), (1, 0), {"data": bytes(99)}),
    ("whose tensors share bytes", UnsafeFileError, "'v.b' shares bytes",
     _ONE + _gguf_tensor("v.b", (4,), 0, 8), (2, 0), {"data": bytes(99)}),
]:  # fmt: skip
    bad_file(f"GGUF {_title}", _raises, _says)(
        lambda folder, given=(_header, _counts), rest=_rest: _gguf(folder, *given, **rest)
    )


# ---- zip archives and .npz ----


def _zip(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array)
    return stream.getvalue()


for _name in ("../../etc/cron.d/x.npy", "/etc/x.npy", "a\\..\\x.npy", "C:x.npy"):
    bad_file(f"npz with the member {_name}", UnsafeFileError, "leads out of the archive")(
        lambda folder, name=_name: _zip(folder / "weights.npz", {name: _npy(np.ones(3))})
    )


@bad_file("npz of Python objects", UnsafeFileError, "Python objects")
def _objects(folder: Path) -> Path:
    np.savez(
        folder / "weights.npz", a=np.array([_Runs(os.system, f"touch {PAYLOAD}")], dtype=object), allow_pickle=True
    )
    return folder / "weights.npz"


@bad_file("npz of texts", CheckpointError, "expected numbers")
def _texts(folder: Path) -> Path:
    np.savez(folder / "weights.npz", a=np.array(["vit", "b16"]))
    return folder / "weights.npz"


for _what, _descr, _size in (
    ("arrays of arrays", ("<f4", (3,)), 24), ("records", [("x", "<f4"), ("y", "<i2")], 12), ("times", "<M8[s]", 16),
    ("records of arrays", [("x", ("<f4", (3,)))], 24), ("bytes", "|S4", 8), ("numbers of 16 bytes", "<f16", 32),
):  # fmt: skip
    bad_file(f"npz of {_what}", CheckpointError, "expected numbers")(
        lambda folder, descr=_descr, size=_size: _zip(folder / "weights.npz", {"a.npy": _npy_of(descr, bytes(size))})
    )


def _npy_of(descr: object, data: bytes) -> bytes:
    """Return an array of two items in any dtype that a header can name."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": (2,)})
    return stream.getvalue() + data


@bad_file("npz that unpacks to 320 MB", UnsafeFileError, "would unpack to")
def _bomb(folder: Path) -> Path:
    with (
        zipfile.ZipFile(folder / "weights.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w") as member,
    ):
        member.write(_npy(np.zeros(0, np.uint8)).replace(b"(0,)", b"(335544320,)"))
        for _ in range(20):
            member.write(bytes(2**24))
    return folder / "weights.npz"


@bad_file("npz whose header asks for a terabyte", CheckpointError, "does not fill")
def _header_bomb(folder: Path) -> Path:
    header = _npy(np.zeros(0, np.float32)).replace(b"(0,), }           ", b"(274877906944,), }")
    assert b"274877906944" in header
    return _zip(folder / "weights.npz", {"a.npy": header})


@bad_file("npz whose header is code", CheckpointError, "no readable header")
def _code_header(folder: Path) -> Path:
    header = (
        b"{'descr': __import__('os').system('touch " + PAYLOAD.encode() + b"'), 'shape': (), 'fortran_order': False}"
    )
    return _zip(folder / "weights.npz", {"a.npy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header})


@bad_file("npz with one array twice", CheckpointError, "two members named")
def _twice(folder: Path) -> Path:
    path = _zip(folder / "weights.npz", {"a.npy": _npy(np.ones(3)), "b.npy": _npy(np.ones(3))})
    return _written(path, path.read_bytes().replace(b"b.npy", b"a.npy"))


@bad_file("npz without its end", CheckpointError, "without its end")
def _cut_npz(folder: Path) -> Path:
    np.savez(folder / "weights.npz", a=np.ones(1000))
    return _written(folder / "weights.npz", (folder / "weights.npz").read_bytes()[:-30])


@bad_file("npz that shares bytes between arrays", UnsafeFileError, "share bytes")
def _shared_bytes(folder: Path) -> Path:
    path = _zip(folder / "weights.npz", {f"{i}.npy": _npy(np.ones(i)) for i in (900, 1)})
    data = bytearray(path.read_bytes())
    start = data.rindex(b"PK\x01\x02")  # the second entry claims the size of the first
    first = data.index(b"PK\x01\x02")
    data[start + 20 : start + 28] = data[first + 20 : first + 28]
    return _written(path, bytes(data))


@bad_file("archive of documents", CheckpointError, "not an array")
def _documents(folder: Path) -> Path:
    return _zip(folder / "weights.npz", {"word/document.xml": b"<xml/>"})


@bad_file("archive with bytes before it", CheckpointError, "its directory is not where|damaged")
def _prepended(folder: Path) -> Path:
    path = _zip(folder / "weights.npz", {"a.npy": _npy(np.ones(3))})
    return _written(path, b"PK--" + path.read_bytes())


@bad_file("encrypted archive", CheckpointError, "encrypted")
def _encrypted(folder: Path) -> Path:
    path = _zip(folder / "weights.npz", {"a.npy": _npy(np.ones(3))})
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return _written(path, bytes(data))


@bad_file("archive of a later version of the zip format", CheckpointError, "zip file version 9.0")
def _later_version(folder: Path) -> Path:
    path = _zip(folder / "weights.npz", {"a.npy": _npy(np.ones(3))})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 90
    return _written(path, bytes(data))


@bad_file("npz packed with a rare method", CheckpointError, "not an array as numpy.savez writes")
def _rare(folder: Path) -> Path:
    return _zip(folder / "weights.npz", {"a.npy": _npy(np.ones(3))}, zipfile.ZIP_LZMA)


# ---- wrong names ----


@bad_file("safetensors named .pt", CheckpointError, "rename it to end in .safetensors")
def _safetensors_named_pt(folder: Path) -> Path:
    return _written(folder / "weights.pt", _GOOD)


@bad_file("npz named .bin", CheckpointError, "rename it to end in .npz")
def _npz_named_bin(folder: Path) -> Path:
    np.savez(folder / "a.npz", a=np.ones(3))
    return (folder / "a.npz").rename(folder / "weights.bin")


@bad_file("safetensors with no ending", CheckpointError, "rename it to end in .safetensors")
def _no_suffix(folder: Path) -> Path:
    return _written(folder / "weights", _GOOD)


# ---- folders ----


def _folder(folder: Path, weight_map: object, *shards: str) -> Path:
    for name, shard in zip(shards, ("norm.weight", "head.weight"), strict=False):
        safetensors.torch.save_file({shard: TENSORS[shard]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_FIRST, _SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_MAP = {"norm.weight": _FIRST, "head.weight": _SECOND}

for _title, _weight_map, _shards, _raises, _says in [
    ("leads to ../", {"a": "../model.safetensors"}, (), UnsafeFileError, "points to '../model.safetensors'"),
    ("leads to an absolute path", {"a": "/etc/model.safetensors"}, (), UnsafeFileError, "points to '/etc"),
    ("leads to a subfolder", {"a": "sub/model.safetensors"}, (), UnsafeFileError, "points to 'sub/"),
    ("leads to a Windows path", {"a": "..\\model.safetensors"}, (), UnsafeFileError, "points to"),
    ("leads to a pickle", {"a": "pytorch_model.bin"}, (), UnsafeFileError, "points to 'pytorch_model.bin'"),
    ("names a missing shard", _MAP, (_FIRST,), CheckpointError, f"{_SECOND} is missing"),
    ("places a tensor in the wrong shard", _MAP | {"norm.weight": _SECOND}, (_FIRST, _SECOND), CheckpointError,
     f"{_SECOND} lacks 'norm.weight'"),
    ("omits a tensor of a shard", {"head.weight": _SECOND, "x": _FIRST}, (_FIRST, _SECOND), CheckpointError,
     f"{_FIRST} contains 'norm.weight'"),
    ("omits a shard", {"norm.weight": _FIRST}, (_FIRST, _SECOND), CheckpointError, f"{_SECOND} is not in the index"),
    ("has no weight_map", None, (), CheckpointError, "no weight_map"),
    ("maps to numbers", {"a": 3}, (), CheckpointError, "no weight_map"),
    ("is empty", {}, (), UnsafeFileError, "names 0 tensors"),
]:  # fmt: skip
    bad_file(f"index that {_title}", _raises, _says)(
        lambda folder, weight_map=_weight_map, shards=_shards: _folder(folder, weight_map, *shards)
    )


@bad_file("index that is cut short", CheckpointError, "not JSON")
def _cut_index(folder: Path) -> Path:
    _folder(folder, _MAP, _FIRST, _SECOND)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-9])
    return folder


@bad_file("index that names a tensor twice", CheckpointError, "twice")
def _double_index(folder: Path) -> Path:
    _folder(folder, _MAP, _FIRST, _SECOND)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("head.weight", "norm.weight"))
    return folder


@bad_file("two shards with the same tensor", CheckpointError, f"{_SECOND} contains 'norm.weight', which the index")
def _double_shard(folder: Path) -> Path:
    _folder(folder, _MAP, _FIRST, _SECOND)
    safetensors.torch.save_file(TENSORS, folder / _SECOND)
    return folder


@bad_file("one file beside an index", CheckpointError, "left over from an earlier save")
def _stale_index(folder: Path) -> Path:
    safetensors.torch.save_file(TENSORS, folder / "model.safetensors")
    return _folder(folder, _MAP, _FIRST, _SECOND)


@bad_file("one file beside shards of an earlier save", CheckpointError, "left over from an earlier save")
def _stale_shard(folder: Path) -> Path:
    safetensors.torch.save_file(TENSORS, folder / "model.safetensors")
    safetensors.torch.save_file(TENSORS, folder / _FIRST)
    return folder


@bad_file("shards without an index", CheckpointError, "no model.safetensors.index.json")
def _no_index(folder: Path) -> Path:
    safetensors.torch.save_file(TENSORS, folder / _FIRST)
    return folder


@bad_file("weights that link out of the folder", UnsafeFileError, "leads out of its folder")
def _link(folder: Path) -> Path:
    safetensors.torch.save_file(TENSORS, folder / "elsewhere.safetensors")
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").symlink_to("../elsewhere.safetensors")
    return folder / "model"


@bad_file("shard that links out of the folder", UnsafeFileError, "leads out of its folder")
def _linked_shard(folder: Path) -> Path:
    (folder / "model").mkdir()
    _folder(folder / "model", _MAP, _FIRST, _SECOND)
    (folder / "model" / _SECOND).rename(folder / "elsewhere.safetensors")
    (folder / "model" / _SECOND).symlink_to("../elsewhere.safetensors")
    return folder / "model"


@bad_file("configuration that links out of the folder", UnsafeFileError, "leads out of its folder")
def _linked_config(folder: Path) -> Path:
    safetensors.torch.save_file(TENSORS, folder / "model.safetensors")
    (folder / "config.json").symlink_to("/etc/hostname")
    return folder


@bad_file("link that leads nowhere", CheckpointError, "missing or not a regular file")
def _dangling(folder: Path) -> Path:
    (folder / "model.safetensors").symlink_to("gone.safetensors")
    return folder


@bad_file("pipe named as weights", CheckpointError, "not a regular file")
def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors")
    return folder


@bad_file("device named as weights", UnsafeFileError, "leads out of its folder")
def _device(folder: Path) -> Path:
    (folder / "model.safetensors").symlink_to("/dev/zero")
    return folder


for _title, _text, _raises, _says in [
    ("cut short", '{"model_type": "vit", "hidden_si', CheckpointError, "not JSON"),
    ("a list", "[1, 2]", CheckpointError, "not a JSON object"),
    ("naming a field twice", '{"depth": 1, "depth": 2}', CheckpointError, "twice"),
    ("of 20 MB", '{"a": "' + "x" * 20_000_000 + '"}', UnsafeFileError, "20000009 bytes"),
]:

    def _config(folder: Path, text: str = _text) -> Path:
        safetensors.torch.save_file(TENSORS, folder / "model.safetensors")
        (folder / "config.json").write_text(text)
        return folder

    bad_file(f"configuration {_title}", _raises, _says)(_config)


@bad_file("folder with nothing to read", CheckpointError, "holds no weights")
def _nothing(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"x")
    return folder


@bad_file("folder with several checkpoints", AmbiguousCheckpointError, "several checkpoints")
def _several(folder: Path) -> Path:
    _pickled(TENSORS, folder, "first.pt")
    _pickled(TENSORS, folder, "last.pt")
    return folder
