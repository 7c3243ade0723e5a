"""Safetensors files: reading with checked headers and lazy or mapped tensors, and writing, optionally in shards."""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from tqdm import tqdm

from ..errors import CheckpointError, OutputError, OutputExistsError, UnsafeFileError, in_bytes, printable, shortened
from .kinds import MAX_HEADER_BYTES
from .tensors import (
    CHUNK_BYTES,
    MAX_TENSORS,
    LazyTensor,
    LazyTensors,
    Place,
    UnchangedFile,
    check_name,
    check_shape,
)
from .texts import parse_json

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

OpenPlace = tuple[IO[bytes], int]  # the file to write a tensor to, and the offset in it


def open_safetensors(path: Path) -> tuple[LazyTensors, dict[str, str]]:
    """Check the complete header of a safetensors file and return the tensors, without reading them, and the metadata.

    Args:
        path: The file.

    Returns:
        The tensors by name, and the `__metadata__` of the header.

    Raises:
        CheckpointError: The header violates the format, or the data does not match the header.
        UnsafeFileError: The header is too large or names too many tensors.

    Source: the specification of the format in the safetensors repository.
    """
    file = UnchangedFile(path)
    header, data_start = _safetensors_header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of texts: the file is damaged.")
    if len(header) > MAX_TENSORS:
        raise UnsafeFileError(f"{path} has {len(header)} tensors: expected at most {MAX_TENSORS}.")

    entries, spans = {}, []
    for name, entry in header.items():
        shape, dtype, begin, end = _safetensors_entry(path, name, entry)
        spans.append((begin, end, name))
        read, map = (partial(_safetensor, way, data_start + begin, shape, dtype) for way in (file.read, file.map))
        entries[name] = LazyTensor(shape, dtype, read, map, place=Place(path, data_start + begin, dtype))

    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            fault = "overlaps the previous tensor" if begin < position else "follows a gap"
            raise CheckpointError(f"{path}: tensor {name!r} at bytes {begin} to {end} {fault}: the file is damaged.")
        position = end
    held = file.size - data_start
    if held != position:
        fault = "truncated: download or copy it again" if held < position else "damaged: bytes trail the last tensor"
        raise CheckpointError(f"{path} has {held} bytes of tensors, its header requires {position}; it is {fault}.")
    return LazyTensors(entries), metadata


def _safetensors_header(file: UnchangedFile) -> tuple[dict[str, Any], int]:
    with file.open() as opened:
        length = struct.unpack("<Q", opened.read(8))[0] if file.size >= 8 else 0
        if length + 8 > file.size or length < 2:
            raise CheckpointError(
                f"{file.path} has {file.size} bytes, not enough for a safetensors header of {length} bytes; it is "
                "truncated or not a safetensors file: download or copy it again."
            )
        if length > MAX_HEADER_BYTES:
            raise UnsafeFileError(f"{file.path}: a header of {length} bytes; expected at most {MAX_HEADER_BYTES}.")
        text = opened.read(length)
    header = parse_json(text, f"{file.path}: the header")
    return header, 8 + length


def _safetensors_entry(path: Path, name: str, entry: object) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    check_name(path, name)
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not described by dtype, shape and data_offsets: the file is damaged.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has shape {shape!r:.200} at {offsets!r:.200}: the file is damaged.")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        found = shortened(repr(entry["dtype"]))
        raise CheckpointError(f"{where} has the dtype {found}; expected one of {', '.join(DTYPES)}.")
    dtype = DTYPES[entry["dtype"]]
    check_shape(where, shape)
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} of shape {shape} and dtype {entry['dtype']} does not fill its {offsets[1] - offsets[0]} "
            "bytes: the file is damaged."
        )
    return tuple(shape), dtype, offsets[0], offsets[1]


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _safetensor(
    take: Callable[[int, int, torch.dtype], torch.Tensor], offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return take(offset, math.prod(shape) * dtype.itemsize, dtype).reshape(shape)


def save_state_dict(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    like: Mapping[str, torch.Tensor] | None = None,
    max_shard_size: int | str | None = None,
    progress: bool = True,
) -> list[Path]:
    """Write tensors as safetensors, each while the next one is computed, and sync them to disk.

    Args:
        tensors: The tensors by name, or pairs of name and tensor in any order, which are consumed one at a time.
        path: The file to write, in a staging folder; it must not exist.
        metadata: Strings for the header.
        like: For pairs: tensors of the same names, shapes and dtypes, which may be on the meta device.
        max_shard_size: If one file would be larger, split into files of at most this size (bytes, or a string such as
            `"5GB"`) with an index, named after `path` as transformers names them.
        progress: Show a progress bar with the bytes per second.

    Returns:
        The files written, the index last.

    Raises:
        OutputExistsError: The file already exists.
        OutputError: The disk is full, the format lacks a dtype, or the tensors do not match `like`.
    """
    path = Path(path)
    if like is None:
        if not isinstance(tensors, Mapping):
            raise TypeError("pairs of name and tensor need `like`, with their names, shapes and dtypes")
        like = tensors.meta() if isinstance(tensors, LazyTensors) else tensors
    size = _check_room(path, like)
    shards = _shards(path, like, max_shard_size)
    written = [path.with_name(name) for name in shards]
    with ExitStack() as stack:
        places: dict[str, OpenPlace] = {}
        for file_path, names in zip(written, shards.values(), strict=True):
            file = stack.enter_context(_new_file(file_path))
            places.update(_write_header(file, {name: like[name] for name in names}, metadata or {}))
        title = f"Writing {printable(path.name)}"
        bar = stack.enter_context(tqdm(total=size, unit="B", unit_scale=True, desc=title, disable=not progress))
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        _write_in_turn(_announced(pairs, like, path), places, bar)
        if len(shards) > 1:
            written.append(path.with_name(f"{path.name}.index.json"))
            stack.enter_context(_new_file(written[-1])).write(_index(shards, size))
    return written


def _check_room(path: Path, like: Mapping[str, torch.Tensor]) -> int:
    """Return the size of all tensors in bytes, after checking dtypes and free disk space."""
    if unsupported := {tensor.dtype for tensor in like.values()} - set(DTYPE_NAMES):
        raise OutputError(
            f"{path}: safetensors files cannot store {', '.join(map(str, unsupported))}: cast the tensors first."
        )
    size = sum(tensor.nbytes for tensor in like.values())
    if (free := shutil.disk_usage(path.parent).free) < size:
        raise OutputError(f"{path} needs {in_bytes(size)}, but only {in_bytes(free)} are free: free disk space.")
    return size


def _shards(
    path: Path, like: Mapping[str, torch.Tensor], max_shard_size: int | str | None
) -> Mapping[str, Sequence[str]]:
    """Return the names of the tensors in each file."""
    if max_shard_size is None:
        return {path.name: list(like)}
    return split_state_dict_into_shards_factory(
        dict(like),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=f"{path.stem}{{suffix}}{path.suffix}",
        max_shard_size=max_shard_size,
    ).filename_to_tensors


def _index(shards: Mapping[str, Sequence[str]], size: int) -> bytes:
    """Return the index from tensors to files, as transformers writes it."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    table = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(table, indent=2).encode() + b"\n"


def _announced(
    pairs: Iterable[tuple[str, torch.Tensor]], like: Mapping[str, torch.Tensor], path: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, checking that each occurs exactly once and matches `like`."""
    missing = set(like)
    for name, tensor in pairs:
        if name not in missing or tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise OutputError(
                f"{path}: {name!r} of {tuple(tensor.shape)} and {tensor.dtype} is not in `like`, or occurs twice."
            )
        missing.remove(name)
        yield name, tensor
        del tensor
    if missing:
        first = next(name for name in like if name in missing)
        raise OutputError(f"{path}: {len(missing)} tensors of `like` are missing, such as {first!r}.")


def _write_in_turn(pairs: Iterable[tuple[str, torch.Tensor]], places: Mapping[str, OpenPlace], bar: tqdm) -> None:
    """Write each tensor to its place while the next one is computed; at most two are in memory."""
    with ThreadPoolExecutor(1) as writer:
        written_before = writer.submit(lambda: None)
        for name, tensor in pairs:
            written_before.result()
            # A list that the writer empties, because a submitted call keeps its arguments even after its result.
            written_before = writer.submit(_write_tensor, [tensor], *places[name], bar)
            del tensor
        written_before.result()


def _write_tensor(tensor: list[torch.Tensor], file: IO[bytes], offset: int, bar: tqdm) -> None:
    file.seek(offset)
    data = tensor.pop().detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK_BYTES):
        bar.update(file.write(data[start : start + CHUNK_BYTES]))


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file; sync it at the end, or remove it after an error."""
    try:
        file = open(path, "xb")  # noqa: SIM115 (closed below)
    except FileExistsError:
        raise OutputExistsError(f"{path} already exists: write into a staging folder.") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise


def _write_header(
    file: IO[bytes], like: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> dict[str, OpenPlace]:
    """Write a safetensors header, set the file to its full size, and return the place of each tensor."""
    order = sorted(like, key=lambda name: (-like[name].dtype.itemsize, name))  # aligns every tensor to its item size
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, position = {}, 0
    for name in order:
        tensor = like[name]
        starts[name], position = position, position + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], position],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + position)
    return {name: (file, 8 + len(text) + start) for name, start in starts.items()}
