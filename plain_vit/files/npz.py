"""NumPy .npz archives: reading with checked headers and lazy arrays, and writing; bfloat16 is stored as JAX does."""

import math
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch

from ..errors import CheckpointError, UnsafeFileError
from .tensors import LazyTensor, LazyTensors, UnchangedFile, check_name, check_shape, read_into
from .zip_archives import opened_member, zip_members

BFLOAT16 = np.dtype("V2")  # numpy has no bfloat16


def open_npz(path: Path) -> LazyTensors:
    """Check the header of every array in an .npz and return the tensors without reading them.

    Args:
        path: The file. Arrays of two-byte voids are bfloat16, as JAX stores it.

    Returns:
        The tensors by name, without `.npy`.

    Raises:
        CheckpointError: An array is damaged or not numeric.
        UnsafeFileError: An array contains Python objects, or the archive is malicious.
    """
    file = UnchangedFile(path)
    entries = {}
    for member, info in zip_members(path).items():
        name = member.removesuffix(".npy")
        check_name(path, name)
        where = f"{path}: array {name!r}"
        if name == member or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CheckpointError(f"{path}: {member!r} is not an array as numpy.savez writes it.")
        with opened_member(file, info, where) as stream:
            shape, fortran, dtype = _npy_header(stream, where)
            header_bytes = stream.tell()
        if dtype.hasobject:
            raise UnsafeFileError(
                f"{where} contains Python objects, which are a pickle: nothing was loaded. Save numeric arrays."
            )
        check_shape(where, shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if header_bytes + nbytes != info.file_size:
            raise CheckpointError(
                f"{where} of shape {shape} and dtype {dtype} does not fill its {info.file_size - header_bytes} bytes: "
                "the file is damaged."
            )
        read = partial(_read_npy, file, info, where, header_bytes, shape, fortran, dtype)
        entries[name] = LazyTensor(shape, _torch_dtype(dtype, where), read)
    return LazyTensors(entries)


def _npy_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"version {version} of the format")
        shape, fortran, dtype = readers[version](stream)
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"shape {shape!r:.200}")
    except Exception as error:  # numpy evaluates the header as a literal, which can raise any type of error
        raise CheckpointError(f"{where} has no readable header ({error}): the file is damaged.") from None
    return shape, fortran, dtype


def _torch_dtype(dtype: np.dtype, where: str) -> torch.dtype:
    if dtype == BFLOAT16:
        return torch.bfloat16
    try:
        if dtype.kind not in "biufc":  # subarrays, records, strings and times are not numeric
            raise TypeError(dtype)
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise CheckpointError(
            f"{where} has the dtype {dtype}: expected numbers of a dtype that torch supports."
        ) from None


def _read_npy(
    file: UnchangedFile,
    info: zipfile.ZipInfo,
    where: str,
    header_bytes: int,
    shape: tuple[int, ...],
    fortran: bool,
    dtype: np.dtype,
) -> torch.Tensor:
    with opened_member(file, info, where) as stream:
        stream.read(header_bytes)
        flat = read_into(stream, math.prod(shape) * dtype.itemsize, file.path).numpy()
        stream.read(1)  # zipfile checks the checksum at the end
    array = flat.view(dtype if dtype != BFLOAT16 else np.int16)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = np.ascontiguousarray(array.reshape(shape, order="F" if fortran else "C"))
    tensor = torch.from_numpy(array).reshape(shape)  # numpy's contiguous copy of a scalar is one-dimensional
    return tensor.view(torch.bfloat16) if dtype == BFLOAT16 else tensor


def save_npz(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors as arrays with the same bits, bfloat16 as two-byte voids."""
    arrays = {name: _as_numpy(tensor) for name, tensor in tensors.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]  # no array is named like an option of savez


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    return tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
