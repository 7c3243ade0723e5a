"""GGUF files of llama.cpp: reading with a checked header and lazy tensors, and writing.

`GGUFReader` of the package gguf makes arrays of every value of a header: 172 times its size in memory, and a minute for
ten megabytes. Here a header is read as plain values, up to `MAX_HEADER_BYTES`. The package dequantises and writes.
"""

import math
import struct
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import CheckpointError, UnsafeFileError, counted, shortened
from ..system.extras import needs
from .kinds import MAX_HEADER_BYTES
from .tensors import MAX_TENSORS, LazyTensor, LazyTensors, Place, UnchangedFile, check_name, check_shape

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = "general.alignment"
# Types of values, with the letters of `struct`; and the types of tensors that torch has.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
DTYPES = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
EXTRA = "plain-vit[gguf]"


class _Stored(NamedTuple):
    """A tensor in a file: its shape, the number of its type, and its bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int
    nbytes: int


class _Header:
    """The values of a header, one after the other; each is compared with the bytes that are there before it is read."""

    def __init__(self, file: UnchangedFile) -> None:
        self.path, self.at = file.path, len(MAGIC)
        with file.open() as stream:
            self.data = stream.read(MAX_HEADER_BYTES)
        self.is_whole = len(self.data) == file.size

    def take(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{letter}") * count
        if size > len(self.data) - self.at:
            if self.is_whole:
                raise CheckpointError(f"{self.path} ends in its header: download or copy it again.")
            raise UnsafeFileError(
                f"{self.path} has a header of over {MAX_HEADER_BYTES} bytes: expected a vision tower."
            )
        self.at += size
        return struct.unpack_from(f"<{count}{letter}", self.data, self.at - size)

    def number(self, letter: str, most: int | None = None) -> Any:
        (value,) = self.take(letter)
        if most is not None and value > most:
            raise UnsafeFileError(f"{self.path} claims {value} entries of one kind: expected at most {most}.")
        return value

    def text(self) -> str:
        (encoded,) = self.take("s", self.number("Q"))
        try:
            return encoded.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} has a text that is not UTF-8 ({error}): the file is damaged.") from None

    def value(self) -> Any:
        kind = self.number("I")
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind in NUMBERS:
                return self.take(NUMBERS[kind], count)
            if kind == TEXT:
                return tuple(self.text() for _ in range(count))
        elif kind in NUMBERS:
            return self.number(NUMBERS[kind])
        elif kind == TEXT:
            return self.text()
        raise CheckpointError(f"{self.path} has a setting of the unknown type {kind}: the file is damaged.")


def open_gguf(path: Path) -> tuple[LazyTensors, dict[str, Any], tuple[str, ...]]:
    """Check the header of a GGUF file and return its tensors without reading them, its settings, and notes.

    Raises:
        CheckpointError: The file is damaged, or a tensor is of an unknown type.
        UnsafeFileError: The header would exhaust the memory, or tensors share bytes.
        MissingPackageError: There are quantised tensors, and the package gguf is not installed.
    """
    file = UnchangedFile(path)
    settings, stored = _read_header(file)
    entries = {}
    for name, (shape, kind, start, nbytes) in stored.items():
        if (dtype := DTYPES.get(kind)) is not None:
            read, map = (partial(_shaped, way, start, nbytes, dtype, shape) for way in (file.read, file.map))
            entries[name] = LazyTensor(shape, dtype, read, map, is_overwritten=True, place=Place(path, start, dtype))
        else:
            entries[name] = LazyTensor(shape, torch.float32, partial(_dequantized, file, stored[name]))
    quantised = Counter(_quantisation(path, one.kind)[0] for one in stored.values() if one.kind not in DTYPES)
    held = ", ".join(f"{name} ({counted(count, 'tensor')})" for name, count in sorted(quantised.items()))
    notes = (f"quantised tensors are read as float32, which adds nothing to what they hold: {held}",) if held else ()
    return LazyTensors(entries), settings, notes


def _read_header(file: UnchangedFile) -> tuple[dict[str, Any], dict[str, _Stored]]:
    header = _Header(file)
    if (version := header.number("I")) not in VERSIONS:
        raise CheckpointError(
            f"{file.path} is of version {version} of GGUF, or big-endian: expected one of {VERSIONS}."
        )
    count, pairs = header.number("Q", MAX_TENSORS), header.number("Q", MAX_TENSORS)
    settings: dict[str, Any] = {}
    for _ in range(pairs):
        key = header.text()
        if key in settings:
            raise CheckpointError(f"{file.path} has the setting {shortened(key)!r} twice: the file is damaged.")
        settings[key] = header.value()
    tensors: dict[str, _Stored] = {}
    for _ in range(count):
        name = header.text()
        check_name(file.path, name)
        if name in tensors:
            raise CheckpointError(f"{file.path} has the tensor {name!r} twice: the file is damaged.")
        shape = header.take("Q", header.number("I", 4))[::-1]
        check_shape(f"{file.path}: tensor {name!r}", shape)
        kind, start = header.number("I"), header.number("Q")
        tensors[name] = _Stored(shape, kind, start, _nbytes(file.path, name, shape, kind))
    alignment = settings.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_HEADER_BYTES:
        raise CheckpointError(f"{file.path} has {ALIGNMENT} = {alignment!r:.100}: expected a number of bytes.")
    begin = math.ceil(header.at / alignment) * alignment
    tensors = {name: one._replace(start=begin + one.start) for name, one in tensors.items()}
    spans = sorted((one.start, one.start + one.nbytes, name) for name, one in tensors.items() if one.nbytes)
    if spans and spans[-1][1] > file.size:
        raise CheckpointError(f"{file.path} is too short for the tensor {spans[-1][2]!r}: download or copy it again.")
    if shared := [name for (_, end, _), (start, _, name) in pairwise(spans) if start < end]:
        raise UnsafeFileError(f"{file.path}: the tensor {shared[0]!r} shares bytes with another: nothing was loaded.")
    return settings, tensors


def _quantisation(path: Path, kind: int) -> tuple[str, int, int]:
    """Return the name of a quantised type, the numbers of a block, and its bytes."""
    with needs(EXTRA):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    try:
        found = GGMLQuantizationType(kind)
        numbers, nbytes = GGML_QUANT_SIZES[found]
        dequantize(np.zeros((1, nbytes), np.uint8), found)
    except (ValueError, KeyError, NotImplementedError):
        raise CheckpointError(
            f"{path} has tensors of type {kind}, which gguf does not dequantise: update it, or give another file."
        ) from None
    return found.name, numbers, nbytes


def _nbytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    if (dtype := DTYPES.get(kind)) is not None:
        return math.prod(shape) * dtype.itemsize
    named, numbers, nbytes = _quantisation(path, kind)
    if not shape or shape[-1] % numbers:
        raise CheckpointError(f"{path}: tensor {name!r} of shape {shape} has no whole blocks of {named}.")
    return math.prod(shape) // numbers * nbytes


def _shaped(way: Any, start: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return way(start, nbytes, dtype).reshape(shape)


def _dequantized(file: UnchangedFile, stored: _Stored) -> torch.Tensor:
    with needs(EXTRA):
        from gguf import GGMLQuantizationType, dequantize
    data = file.read(stored.start, stored.nbytes, torch.uint8).numpy()
    rows = dequantize(data.reshape(math.prod(stored.shape[:-1]), -1), GGMLQuantizationType(stored.kind))
    return torch.from_numpy(np.ascontiguousarray(rows, np.float32)).reshape(stored.shape)


def save_gguf(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a GGUF file; each number is a uint32 or a float32, as llama.cpp reads it.

    Args:
        settings: The settings; the first is the architecture.
        tensors: The tensors, of dtypes in `DTYPES`.
        path: The new file.
    """
    with needs(EXTRA):
        from gguf import GGMLQuantizationType, GGUFWriter
    writer = GGUFWriter(path, settings["general.architecture"])
    add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
                            str: writer.add_string, list: writer.add_array}  # fmt: skip
    for key, value in list(settings.items())[1:]:
        add[type(value)](key, value)
    kinds = {dtype: GGMLQuantizationType(kind) for kind, dtype in DTYPES.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.cpu().contiguous().view(torch.uint8).numpy(), raw_dtype=kinds[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
