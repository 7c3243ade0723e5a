"""The three kinds of files that hold tensors (safetensors, torch's pickle, numpy's .npz), opened without trusting them.

Opening reads and checks headers only: names, shapes, dtypes and where the bytes lie. Nothing that a header declares is
allocated before it has been compared with the size of the file, no code in a file is run, and each tensor's bytes are
read when it is asked for, into memory of its own; a file that changes meanwhile is noticed. `LazyTensors.mapped` maps
safetensors files instead, which are replaced and not overwritten by what saves them; torch.save overwrites.
"""

import io
import json
import math
import mmap
import os
import pickletools
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
import torch

from ..errors import CheckpointError, UnsafeFileError

# Far above what any Vision Transformer needs, and far below what exhausts a memory while a header is parsed.
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 50_000
MAX_JSON_PARTS = 500_000  # of a safetensors header, a tensor takes some ten
MAX_PICKLE_OPCODES = 1_000_000  # of a tensor some forty
CHUNK_BYTES = 16 * 2**20
HUGE_PAGE = 2 * 2**20
UTF8_NAME = 0x800  # the flag of a member of a zip archive whose name is UTF-8, not of the first PCs

# A compressed .npz may hold zeros (the heads of the ImageNet-21k originals are), which shrink a thousandfold.
UNPACKED_PER_PACKED_BYTE = 20
UNPACKED_BYTES_FREE = 256 * 2**20

SAFETENSORS_DTYPES = {
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

# What torch.save writes for tensors. Other names that torch would still accept can allocate at will (bytearray, tensor
# classes) or hold no weights (sparse, quantised and distributed tensors).
TENSOR_GLOBALS = {
    "collections OrderedDict",
    "__builtin__ set",
    "_codecs encode",
    "torch Size",
    "torch device",
    "torch._tensor _rebuild_from_type_v2",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch.nn.parameter Parameter",
    "torch.storage TypedStorage",
    "torch.storage UntypedStorage",
    "torch BFloat16Storage",
    "torch BoolStorage",
    "torch ByteStorage",
    "torch CharStorage",
    "torch DoubleStorage",
    "torch FloatStorage",
    "torch HalfStorage",
    "torch IntStorage",
    "torch LongStorage",
    "torch ShortStorage",
    *(
        f"torch {name}Storage"
        for name in ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
    ),
    *(f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}

# What training scripts store beside the tensors. These names are read as `_Ignored`: the real classes are not imported.
IGNORED_GLOBALS = {
    "argparse Namespace",
    "types SimpleNamespace",
    "numpy dtype",
    "numpy.core.multiarray scalar",
    "numpy._core.multiarray scalar",
    "pathlib PosixPath",
    "pathlib WindowsPath",
    "pathlib._local PosixPath",
    "pathlib._local WindowsPath",
}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor's shape and dtype, and the function that reads or computes it, afresh at each call.

    Args:
        shape: Of the tensor.
        dtype: Of the tensor.
        read: Gives it in memory of its own.
        map: Gives it as a private mapping of its file, which costs no memory until it is changed; None where there is
            none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    map: Callable[[], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes once it has been read."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name that are read when asked for and not kept.

    Args:
        entries: For each name, its shape and dtype and how to read it.
    """

    def __init__(self, entries: Mapping[str, LazyTensor]) -> None:
        self.entries = dict(entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.entries

    def mapped(self) -> "LazyTensors":
        """Return the same tensors, mapped from their files where that can be."""
        return LazyTensors({name: replace(entry, read=entry.map or entry.read) for name, entry in self.entries.items()})

    def meta(self) -> dict[str, torch.Tensor]:
        """Return tensors on the meta device: names, shapes and dtypes, without reading."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in self.entries.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.entries.values())


class _File:
    """A file that must not change between the check of its header and the reading of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = self._stamp(os.stat(path))
        self.size = self.stamp[2]

    @staticmethod
    def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def open(self) -> IO[bytes]:
        try:
            file = open(self.path, "rb")  # noqa: SIM115 (the caller closes it)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be opened any more: {error.strerror}.") from error
        if self._stamp(os.fstat(file.fileno())) != self.stamp:
            file.close()
            raise CheckpointError(f"{self.path} changed while it was being read: open it again.")
        return file

    def read(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Read `nbytes` at `offset` as a one-dimensional tensor."""
        with self.open() as file:
            file.seek(offset)
            return _read_into(file, nbytes, self.path).view(dtype)

    def map(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Map what `read` would read; what is written to the tensor stays in this process."""
        if nbytes == 0 or offset % dtype.itemsize:  # torch computes on aligned items only
            return self.read(offset, nbytes, dtype)
        before = offset % mmap.ALLOCATIONGRANULARITY
        with self.open() as file:
            pages = mmap.mmap(file.fileno(), before + nbytes, access=mmap.ACCESS_COPY, offset=offset - before)
        return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=before).view(dtype)


def _read_into(file: IO[bytes], nbytes: int, path: Path) -> torch.Tensor:
    """Read exactly `nbytes` into a fresh tensor, (nbytes,) of uint8."""
    buffer = _fresh(nbytes)
    view, filled = buffer.numpy().data, 0
    while filled < nbytes:
        count = file.readinto(view[filled : filled + CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} ends {nbytes - filled} bytes too early: download or copy it again.")
        filled += count
    return buffer


def _fresh(nbytes: int) -> torch.Tensor:
    """Return memory that is not yet filled, (nbytes,) of uint8."""
    if nbytes < HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    # Pages of their own go back to the system at once; of malloc's, five freed tensors were seen to stay.
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: a third of the processor time, where the kernel offers it
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=start)


# ---- safetensors ----


def open_safetensors(path: Path) -> tuple[LazyTensors, dict[str, str]]:
    """Check a safetensors header wholly and return the tensors, unread, and the metadata.

    Args:
        path: The file.

    Returns:
        The tensors by name, and the `__metadata__` of the header.

    Raises:
        CheckpointError: The header is not what the format asks for, or the data is not what the header says.
        UnsafeFileError: The header is too large or names too many tensors.

    Source: the format's specification in the safetensors repository.
    """
    file = _File(path)
    header, data_start = _safetensors_header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of texts: the file is damaged.")
    if len(header) > MAX_TENSORS:
        raise UnsafeFileError(f"{path} names {len(header)} tensors; at most {MAX_TENSORS} are read.")

    entries, spans = {}, []
    for name, entry in header.items():
        shape, dtype, begin, end = _safetensors_entry(path, name, entry)
        spans.append((begin, end, name))
        place = data_start + begin, shape, dtype
        entries[name] = LazyTensor(
            shape, dtype, partial(_safetensor, file.read, *place), partial(_safetensor, file.map, *place)
        )

    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} at bytes {begin} to {end} {fault}: the file is damaged.")
        position = end
    held = file.size - data_start
    if held != position:
        fault = "truncated: download or copy it again" if held < position else "damaged: bytes trail the last tensor"
        raise CheckpointError(f"{path} holds {held} bytes of tensors, its header asks for {position}; it is {fault}.")
    return LazyTensors(entries), metadata


def _safetensors_header(file: _File) -> tuple[dict[str, Any], int]:
    with file.open() as opened:
        length = struct.unpack("<Q", opened.read(8))[0] if file.size >= 8 else 0
        if length + 8 > file.size or length < 2:
            raise CheckpointError(
                f"{file.path} has {file.size} bytes, which is no safetensors file with a header of {length} bytes; "
                "it is truncated or something else: download or copy it again."
            )
        if length > MAX_HEADER_BYTES:
            raise UnsafeFileError(f"{file.path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read.")
        text = opened.read(length)
    header = parse_json(text, f"{file.path}: the header")
    return header, 8 + length


def _safetensors_entry(path: Path, name: str, entry: object) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not described by dtype, shape and data_offsets: the file is damaged.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has shape {shape!r:.200} at {offsets!r:.200}: the file is damaged.")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{where} has the dtype {entry['dtype']!r:.200}; this version reads {', '.join(SAFETENSORS_DTYPES)}."
        )
    dtype = SAFETENSORS_DTYPES[entry["dtype"]]
    _check_shape(where, shape)
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} of shape {shape} and dtype {entry['dtype']} does not fill the {offsets[1] - offsets[0]} bytes "
            "it is given: the file is damaged."
        )
    return tuple(shape), dtype, offsets[0], offsets[1]


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_shape(where: str, shape: tuple[int, ...] | list[int]) -> None:
    """Refuse what torch cannot index, a zero size beside huge ones included."""
    if len(shape) > 64 or math.prod(max(size, 1) for size in shape) >= 2**60:
        raise CheckpointError(f"{where} has the impossible shape {tuple(shape)!r:.200}: the file is damaged.")


def _safetensor(
    take: Callable[[int, int, torch.dtype], torch.Tensor], offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return take(offset, math.prod(shape) * dtype.itemsize, dtype).reshape(shape)


def parse_json(text: bytes, what: str, kinds: tuple[type, ...] = (dict,)) -> Any:
    """Parse JSON that somebody else wrote: an object, or one of the kinds that are expected.

    Args:
        text: The bytes, at most `MAX_HEADER_BYTES` of them.
        what: What the text is, as the error should call it.
        kinds: What it may be as a whole: dict, list.

    Returns:
        What was parsed.

    Raises:
        CheckpointError: It is not UTF-8, not JSON, holds half of a pair of surrogates, is of another kind, or names a
            key twice.
        UnsafeFileError: It has so many parts that it would take many times its size.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{what} names {twice!r} twice: the file is damaged.")
        return table

    parts = sum(map(text.count, (b"{", b"[", b",")))
    if parts > MAX_JSON_PARTS:
        raise UnsafeFileError(f"{what} has {parts} braces, brackets and commas; at most {MAX_JSON_PARTS} are read.")
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
        if b"\\ud" in text or b"\\uD" in text:
            json.dumps(parsed, ensure_ascii=False).encode()
    except CheckpointError:
        raise
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{what} holds half a character ({error.object[error.start]!a}): it is damaged."
        ) from None
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of thousands of digits
        raise CheckpointError(f"{what} is not JSON ({error}): it is truncated or damaged.") from None
    if not isinstance(parsed, kinds):
        expected = " or ".join("object" if kind is dict else kind.__name__ for kind in kinds)
        raise CheckpointError(f"{what} is not a JSON {expected} but {type(parsed).__name__}.")
    return parsed


# ---- zip archives, which torch and numpy both write ----


def zip_members(path: Path) -> dict[str, zipfile.ZipInfo]:
    """List an archive's members after checking that it is what a writer of tensors makes.

    Args:
        path: The archive.

    Returns:
        The members by name.

    Raises:
        CheckpointError: The archive is truncated, damaged or encrypted, or names a member twice.
        UnsafeFileError: A member leaves the archive, or the archive unpacks to far more than its own size.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            _check_zip_directory(path, file, size)
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
    except CheckpointError:
        raise
    except NotImplementedError as error:  # by zipfile, for a member that names a later version of the zip format
        raise CheckpointError(f"{path} is an archive that cannot be unpacked here ({error}): write it again.") from None
    except (zipfile.BadZipFile, struct.error, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is a damaged archive ({error}): download or copy it again.") from None

    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or name[1:2] == ":" or info.orig_filename != name:
            raise UnsafeFileError(f"{path} has the member {name!r}, which leaves the archive: do not use this file.")
        if name in members:
            raise CheckpointError(f"{path} has two members named {name!r}: the file is damaged.")
        if info.flag_bits & 0x1:
            raise CheckpointError(f"{path}: {name!r} is encrypted: unpack it, and save the tensors without a password.")
        members[name] = info
    if sum(info.compress_size for info in infos) > size:
        raise UnsafeFileError(
            f"{path}: its members share bytes (they add up to more than {size}): do not use this file."
        )
    unpacked, limit = sum(info.file_size for info in infos), UNPACKED_PER_PACKED_BYTE * size + UNPACKED_BYTES_FREE
    if unpacked > limit:
        raise UnsafeFileError(
            f"{path} of {size} bytes would unpack to {unpacked}, more than {UNPACKED_PER_PACKED_BYTE} times its size: "
            "if you trust it, load and save it again without compression."
        )
    return members


def _check_zip_directory(path: Path, file: IO[bytes], size: int) -> None:
    """Refuse a directory that is too large to list, or bytes around the archive that other readers see differently."""
    tail = 22 + 20 + 56  # end record, and before it the locator and the end record of archives above 4 GB
    file.seek(max(size - tail, 0))
    end = file.read(tail)
    if len(end) < 22 or end[-22:-18] != b"PK\x05\x06":
        raise CheckpointError(f"{path} is an archive without its end: it is truncated; download or copy it again.")
    entries, directory_size, directory_start = struct.unpack("<HII", end[-12:-2])
    if len(end) == tail and end[-42:-38] == b"PK\x06\x07" and end[:4] == b"PK\x06\x06":
        entries, directory_size, directory_start = struct.unpack("<QQQ", end[32:56])
        tail_size = tail
    else:
        tail_size = 22
    if directory_size > MAX_HEADER_BYTES or entries > MAX_TENSORS:
        raise UnsafeFileError(
            f"{path} lists {entries} members in {directory_size} bytes; at most {MAX_TENSORS} are read."
        )
    if directory_start + directory_size + tail_size != size:
        raise CheckpointError(f"{path}: its directory is not where its end says: the file is damaged.")
    file.seek(0)


# ---- .npz ----


def open_npz(path: Path) -> LazyTensors:
    """Check the header of every array in an .npz and return the tensors, unread.

    Args:
        path: The file; arrays of Python objects are refused. Arrays of two-byte voids are bfloat16, as JAX writes it.

    Returns:
        The tensors by name, without `.npy`.

    Raises:
        CheckpointError: An array is damaged or holds no numbers.
        UnsafeFileError: An array holds Python objects, or the archive is a trap.
    """
    file = _File(path)
    entries = {}
    for member, info in zip_members(path).items():
        name = member.removesuffix(".npy")
        where = f"{path}: array {name!r}"
        if name == member or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CheckpointError(f"{path}: {member!r} is not an array as numpy.savez writes them.")
        with _opened_member(file, info, where) as stream:
            shape, fortran, dtype = _npy_header(stream, where)
            header_bytes = stream.tell()
        if dtype.hasobject:
            raise UnsafeFileError(
                f"{where} holds Python objects, which are a pickle: nothing was loaded. Save numbers."
            )
        _check_shape(where, shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if header_bytes + nbytes != info.file_size:
            raise CheckpointError(
                f"{where} of shape {shape} and dtype {dtype} does not fill its {info.file_size - header_bytes} bytes: "
                "the file is damaged."
            )
        read = partial(_read_npy, file, info, where, header_bytes, shape, fortran, dtype)
        entries[name] = LazyTensor(shape, _torch_dtype(dtype, where), read)
    return LazyTensors(entries)


@contextmanager
def _opened_member(file: _File, info: zipfile.ZipInfo, where: str) -> Iterator[IO[bytes]]:
    """Open an archive's member without listing the archive again; faults that show while it is read are named too."""
    try:
        with file.open() as opened:
            opened.seek(_data_start(opened, info, file.path))
            if info.CRC == 0:  # torch writes this where it was told not to compute any; None is not compared
                info.CRC = None  # type: ignore[assignment]
            with zipfile.ZipExtFile(opened, "r", info) as stream:
                yield cast(IO[bytes], stream)
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be unpacked ({error}): the file is damaged.") from None


def _npy_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"version {version} of the format")
        shape, fortran, dtype = readers[version](stream)
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"shape {shape!r:.200}")
    except Exception as error:  # numpy evaluates the header as a literal: any fault of its text can come out here
        raise CheckpointError(f"{where} has no readable header ({error}): the file is damaged.") from None
    return shape, fortran, dtype


def _torch_dtype(dtype: np.dtype, where: str) -> torch.dtype:
    if dtype == np.dtype("V2"):
        return torch.bfloat16
    try:
        if dtype.kind not in "biufc":  # an array of arrays, of records, of texts or of times is none of numbers
            raise TypeError(dtype)
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise CheckpointError(f"{where} has the dtype {dtype}: expected numbers that torch has too.") from None


def _read_npy(
    file: _File,
    info: zipfile.ZipInfo,
    where: str,
    header_bytes: int,
    shape: tuple[int, ...],
    fortran: bool,
    dtype: np.dtype,
) -> torch.Tensor:
    with _opened_member(file, info, where) as stream:
        stream.read(header_bytes)
        flat = _read_into(stream, math.prod(shape) * dtype.itemsize, file.path).numpy()
        stream.read(1)  # at its end zipfile compares the checksum
    array = flat.view(dtype if dtype != np.dtype("V2") else np.int16)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = np.ascontiguousarray(array.reshape(shape, order="F" if fortran else "C"))
    tensor = torch.from_numpy(array).reshape(shape)  # numpy makes a scalar's contiguous copy one-dimensional
    return tensor.view(torch.bfloat16) if dtype == np.dtype("V2") else tensor


# ---- torch.save ----


class _Ignored:
    """Stands for an object of a training script; takes whatever it is given and keeps nothing."""

    def __new__(cls, *_: object) -> "_Ignored":
        return object.__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class TorchFile:
    """A file of `torch.save`, unpickled as tensors only; the bytes of the tensors stay in the file.

    Args:
        path: The file, an archive (torch 1.6 and later) or the older single stream.

    Raises:
        CheckpointError: The file is damaged, or written by a pickle protocol that torch.save does not use by itself.
        UnsafeFileError: The pickle asks for code, or this torch is too old to read any pickle safely.

    Attributes:
        tree: What was saved, with tensors on the meta device in place of those in the file.
    """

    tree: object

    def __init__(self, path: Path) -> None:
        if torch.torch_version.TorchVersion(torch.__version__) < (2, 10):  # type: ignore[operator]
            raise UnsafeFileError(
                f"{path} is a pickle, and torch {torch.__version__} can be made to run code by one in spite of "
                "weights_only (CVE-2026-24747): update to torch 2.10, or convert the file to safetensors elsewhere."
            )
        self._file = _File(path)
        with self._file.open() as opened:
            self._zipped = opened.read(4) == b"PK\x03\x04"
        self._records = self._check_archive() if self._zipped else self._check_stream()
        self.tree = self._load()

    def _check_archive(self) -> dict[int, int]:
        """Check names and pickle of an archive; return the size of each record by where its bytes start."""
        path = self._file.path
        members = zip_members(path)
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in members):
            raise UnsafeFileError(f"{path} is a TorchScript archive, which holds code: save its state_dict() instead.")
        if len(pickles) != 1:
            raise CheckpointError(f"{path} is an archive without one data.pkl: torch.save did not write it.")
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise CheckpointError(f"{path} was packed again by another program: unpack it, or save it with torch.save.")
        if members[pickles[0]].file_size > MAX_HEADER_BYTES:
            raise UnsafeFileError(f"{path}: a pickle of {members[pickles[0]].file_size} bytes: save the tensors alone.")

        root = pickles[0].removesuffix("data.pkl")
        with _opened_member(self._file, members[pickles[0]], f"{path}: the pickle") as stream:
            keys, _ = _check_pickle(io.BytesIO(stream.read()), path)
        if f"{root}byteorder" in members:
            with _opened_member(self._file, members[f"{root}byteorder"], f"{path}: the byte order") as stream:
                if (byte_order := stream.read(16)) != b"little":
                    raise CheckpointError(
                        f"{path} has the byte order {byte_order!r}: save it on a little-endian machine."
                    )

        records: dict[int, int] = {}
        order: list[str] = []
        with self._file.open() as opened:
            for info in sorted(members.values(), key=lambda info: info.header_offset):
                if info.filename.startswith(f"{root}data/"):
                    start = _data_start(opened, info, path)
                    records[start] = info.file_size
                    order.append(info.filename.removeprefix(f"{root}data/"))
        if (
            f"{root}.format_version" in members and keys != order
        ):  # there torch takes places from the order, not the names
            raise CheckpointError(f"{path} does not hold its tensors in the order of its pickle: the file is damaged.")
        return records

    def _check_stream(self) -> dict[int, int]:
        """Check the five pickles before the bytes in files older than torch 1.6."""
        with self._file.open() as opened:
            pickles = io.BytesIO(opened.read(MAX_HEADER_BYTES))
        # The magic number, the protocol, the system, the object, and the order in which the storages follow.
        _, _, _, (keys, _), (_, listed) = [_check_pickle(pickles, self._file.path) for _ in range(5)]
        if not set(keys) <= set(listed):  # torch would leave what is not listed as memory that nobody has written
            raise CheckpointError(f"{self._file.path} has tensors without bytes: the file is damaged.")
        return {}

    def _load(self) -> object:
        ignored = [(_Ignored, name.replace(" ", ".")) for name in sorted(IGNORED_GLOBALS)]
        location = "meta" if self._zipped else "cpu"
        try:
            with (
                self._file.open() as opened,
                warnings.catch_warnings(action="ignore"),
                torch.serialization.safe_globals(ignored),  # type: ignore[arg-type]
            ):
                return torch.load(opened, map_location=location, weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle makes torch fail in any way; nothing of the file was run
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise CheckpointError(f"{self._file.path} cannot be unpickled ({reason[0]:.300}): it is damaged.") from None

    def lazy(self, tensors: Mapping[str, torch.Tensor]) -> LazyTensors:
        """Turn tensors of `tree` into tensors that are read from the file when asked for.

        Args:
            tensors: Some of the tensors in `tree`, by the names they shall have.

        Returns:
            The same names, to be read.

        Raises:
            CheckpointError: A tensor does not lie where the archive holds its bytes.
            UnsafeFileError: The tensors are views that would take far more memory than the file.
        """
        lazy = LazyTensors({name: self._entry(name, tensor) for name, tensor in tensors.items()})
        if lazy.nbytes > 4 * self._file.size + 2**20:  # tied weights are stored once
            raise UnsafeFileError(f"{self._file.path} of {self._file.size} bytes holds views of {lazy.nbytes} bytes.")
        return lazy

    def _entry(self, name: str, tensor: torch.Tensor) -> LazyTensor:
        where = f"{self._file.path}: tensor {name!r}"
        tensor = torch.detach(tensor)  # without what a pickle may have hung on it
        if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
            raise CheckpointError(
                f"{where} is not an ordinary dense tensor: save it with .to_dense() or .resolve_neg()."
            )
        storage = tensor.untyped_storage()
        shape, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        start = int(tensor.storage_offset()) * dtype.itemsize
        span = (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * dtype.itemsize
        if tensor.numel() == 0:
            return LazyTensor(shape, dtype, partial(torch.empty, shape, dtype=dtype))
        if start + span > storage.nbytes() or tensor.numel() * dtype.itemsize > storage.nbytes():
            raise CheckpointError(f"{where} reaches beyond its {storage.nbytes()} bytes: the file is damaged.")
        if not self._zipped:
            return LazyTensor(shape, dtype, tensor.clone)
        offset = getattr(storage, "_checkpoint_offset", -1)  # torch.load leaves it on storages of the meta device
        if self._records.get(offset) != storage.nbytes():
            raise CheckpointError(f"{where} does not lie where the archive holds bytes for it: the file is damaged.")
        return LazyTensor(shape, dtype, partial(self._read, offset + start, span, dtype, shape, stride))

    def _read(
        self, offset: int, span: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        return self._file.read(offset, span, dtype).as_strided(shape, stride)


def _data_start(file: IO[bytes], info: zipfile.ZipInfo, path: Path) -> int:
    """Return where a member's bytes begin, by its own header, which has to agree with the directory."""
    file.seek(info.header_offset)
    header = file.read(30).ljust(30, b"\0")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    name = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8_NAME else "cp437")
    if header[:4] != b"PK\x03\x04" or file.read(name_length) != name:
        raise CheckpointError(f"{path}: the header of {info.filename!r} is damaged: download or copy it again.")
    return info.header_offset + 30 + name_length + extra_length


def _check_pickle(stream: io.BytesIO, path: Path) -> tuple[list[str], list[str]]:
    """Walk one pickle's instructions, without executing any, up to its end.

    Returns:
        The keys of the storages in the order in which they are first asked for, and all texts.
    """
    names: set[str] = set()
    keys: dict[str, None] = {}
    texts: list[str] = []
    memo: dict[object, object] = {}
    top: object = None  # what lies on the stack where that is a text
    pushed: list[object] = []  # since the last mark
    storage: list[object] = []  # the items of a tuple that was just made
    strange = False
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count > MAX_PICKLE_OPCODES:
                raise UnsafeFileError(f"{path}: a pickle of over {MAX_PICKLE_OPCODES} steps: save the tensors alone.")
            kind = opcode.name
            if kind in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = top
                continue
            if kind == "PROTO" and argument != 2:
                raise CheckpointError(
                    f"{path} was pickled with protocol {argument}; torch reads tensors safely from protocol 2 only, "
                    "its default: save it again without pickle_protocol."
                )
            if kind == "BINPERSID":
                key = storage[2] if len(storage) > 2 and storage[0] == "storage" else None
                if not isinstance(key, str):
                    strange = True
                    continue
                keys[key] = None
            storage = pushed if kind == "TUPLE" else []
            top = argument if kind == "BINUNICODE" else None
            if kind == "BINUNICODE":
                texts.append(str(argument))
            elif kind in ("GLOBAL", "INST"):
                names.add(str(argument))
            elif kind in ("BINGET", "LONG_BINGET"):
                top = memo.get(argument)
            pushed = [] if kind == "MARK" else [*pushed[:6], top]
    except CheckpointError:
        raise
    except Exception as error:  # pickletools leaves the faults of a damaged text as they come
        raise CheckpointError(f"{path} is not a whole pickle ({error}): it is truncated or damaged.") from None
    if blocked := sorted(names - TENSOR_GLOBALS - IGNORED_GLOBALS):
        shown = ", ".join(name.replace(" ", ".") for name in blocked[:20]) + (" ..." if len(blocked) > 20 else "")
        raise UnsafeFileError(
            f"{path} asks for {shown}; loading that could run code, so nothing was loaded. Where you trust the file, "
            "save its tensors alone: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
        )
    if strange:
        raise CheckpointError(f"{path} does not name its storages as torch.save does: the file is damaged.")
    return list(keys), texts
