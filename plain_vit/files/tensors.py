"""Lazy tensors in files; the limits and checks shared by all file types.

Opening reads and checks headers only: names, shapes, dtypes and offsets. Nothing that a header declares is allocated
before it has been compared with the size of the file, no code in a file is run, and each tensor is read on access, into
newly allocated memory; a file changed in the meantime is detected. `LazyTensors.mapped` maps files instead, if writers
replace them with new files; torch.save overwrites files in place.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

import torch

from ..errors import CheckpointError, UnsafeFileError, shortened

MAX_TENSORS = 50_000  # far above the needs of any Vision Transformer
LONGEST_NAME = 1000  # characters of a tensor's name, which is copied and matched many times; real names have up to 100
CHUNK_BYTES = 16 * 2**20
HUGE_PAGE = 2 * 2**20


class Place(NamedTuple):
    """Where a file holds the numbers of a tensor, one after the other: the file, the offset in bytes and the dtype."""

    path: Path
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LazyTensor:
    """A tensor's shape and dtype, and the function that reads or computes it anew in each call.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        read: Returns the tensor in newly allocated memory.
        map: Returns the tensor as a private mapping of its file, which takes no memory until it is changed; None if it
            cannot be mapped.
        is_overwritten: Whether writers overwrite the file in place instead of replacing it. A mapped tensor then
            changes with the file, and the process is killed if the file becomes shorter.
        place: Where the tensor can be replaced; None if its file has other bytes than its numbers, or other ways to
            find them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    map: Callable[[], torch.Tensor] | None = None
    is_overwritten: bool = False
    place: Place | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensor in memory, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, read on each access and not cached.

    Args:
        entries: The lazy tensor of each name.
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

    def mapped(self, overwritten: bool = False) -> "LazyTensors":
        """Return the same tensors, mapped from their files where possible.

        Args:
            overwritten: Also map files that writers overwrite in place.
        """

        def mapping(entry: LazyTensor) -> LazyTensor:
            may_map = overwritten or not entry.is_overwritten
            return replace(entry, read=entry.map) if entry.map and may_map else entry

        return LazyTensors({name: mapping(entry) for name, entry in self.entries.items()})

    def in_dtype(self, dtype: torch.dtype) -> "LazyTensors":
        """Return the same tensors, with floating-point tensors converted to the dtype as they are read."""

        def converting(entry: LazyTensor) -> LazyTensor:
            if entry.dtype == dtype or not entry.dtype.is_floating_point:
                return entry
            mapped = entry.map
            read, map = (lambda: entry.read().to(dtype)), mapped and (lambda: mapped().to(dtype))
            return replace(entry, dtype=dtype, read=read, map=map)

        return LazyTensors({name: converting(entry) for name, entry in self.entries.items()})

    def meta(self) -> dict[str, torch.Tensor]:
        """Return tensors on the meta device: names, shapes and dtypes, without reading."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in self.entries.items()
        }

    @property
    def nbytes(self) -> int:
        """Total size of all tensors, in bytes."""
        return sum(entry.nbytes for entry in self.entries.values())


class UnchangedFile:
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
            raise CheckpointError(f"{self.path} can no longer be opened: {error.strerror}.") from error
        if self._stamp(os.fstat(file.fileno())) != self.stamp:
            file.close()
            raise CheckpointError(f"{self.path} changed while it was being read: open it again.")
        return file

    def read(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Read `nbytes` at `offset` as a one-dimensional tensor."""
        with self.open() as file:
            file.seek(offset)
            return read_into(file, nbytes, self.path).view(dtype)

    def map(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Map the bytes that `read` would read; changes to the tensor are not written to the file."""
        if nbytes == 0 or offset % dtype.itemsize:  # torch only computes on aligned items
            return self.read(offset, nbytes, dtype)
        before = offset % mmap.ALLOCATIONGRANULARITY
        with self.open() as file:
            pages = mmap.mmap(file.fileno(), before + nbytes, access=mmap.ACCESS_COPY, offset=offset - before)
        return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=before).view(dtype)


def read_into(file: IO[bytes], nbytes: int, path: Path) -> torch.Tensor:
    """Read exactly `nbytes` into a new tensor, (nbytes,) of uint8."""
    buffer = _uninitialized(nbytes)
    view, filled = buffer.numpy().data, 0
    while filled < nbytes:
        count = file.readinto(view[filled : filled + CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{path} is {nbytes - filled} bytes too short: download or copy it again.")
        filled += count
    return buffer


def _uninitialized(nbytes: int) -> torch.Tensor:
    """Return uninitialized memory, (nbytes,) of uint8."""
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return torch.empty(nbytes, dtype=torch.uint8)
    # Separate pages are returned to the system at once; malloc retained five freed tensors in a measurement.
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: a third of the CPU time, if the kernel supports it
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=start)


def check_name(path: Path, name: str) -> None:
    """Refuse a tensor name that is longer than in any model."""
    if len(name) > LONGEST_NAME:
        raise UnsafeFileError(
            f"{path} has a tensor with a name of {len(name):,} characters, {shortened(repr(name))}; expected at most "
            f"{LONGEST_NAME:,}: save the tensors by their names in a model."
        )


def check_shape(where: str, shape: tuple[int, ...] | list[int]) -> None:
    """Refuse a shape that torch cannot index, even if one of its huge sizes is multiplied by zero."""
    if len(shape) > 64 or math.prod(max(size, 1) for size in shape) >= 2**60:
        raise CheckpointError(f"{where} has the impossible shape {tuple(shape)!r:.200}: the file is damaged.")
