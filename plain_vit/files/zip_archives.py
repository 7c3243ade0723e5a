"""Untrusted zip archives, in which torch and numpy store tensors."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from ..errors import CheckpointError, UnsafeFileError
from .kinds import MAX_HEADER_BYTES
from .tensors import MAX_TENSORS, UnchangedFile

UTF8_NAME = 0x800  # flag of a zip member whose name is in UTF-8, not in code page 437

# A compressed .npz may contain zeros (such as the heads of the ImageNet-21k originals), which shrink a thousandfold.
UNPACKED_PER_PACKED_BYTE = 20
UNPACKED_BYTES_FREE = 256 * 2**20


def zip_members(path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive, after checking that torch or numpy could have written it.

    Args:
        path: The archive.

    Returns:
        The members by name.

    Raises:
        CheckpointError: The archive is truncated, damaged or encrypted, or has duplicate members.
        UnsafeFileError: A member has an unsafe path, or the archive unpacks to far more than its size.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            _check_zip_directory(path, file, size)
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
    except CheckpointError:
        raise
    except NotImplementedError as error:  # from zipfile, for a member that requires a later version of the zip format
        raise CheckpointError(f"{path} is an archive that cannot be unpacked here ({error}): save it again.") from None
    except (zipfile.BadZipFile, struct.error, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is a damaged archive ({error}): download or copy it again.") from None

    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or name[1:2] == ":" or info.orig_filename != name:
            raise UnsafeFileError(
                f"{path} has the member {name!r}, whose path leads out of the archive: do not use this file."
            )
        if name in members:
            raise CheckpointError(f"{path} has two members named {name!r}: the file is damaged.")
        if info.flag_bits & 0x1:
            raise CheckpointError(f"{path}: {name!r} is encrypted: unpack it, and save the tensors without a password.")
        members[name] = info
    if sum(info.compress_size for info in infos) > size:
        raise UnsafeFileError(
            f"{path}: its members share bytes (their total is more than {size}): do not use this file."
        )
    unpacked, limit = sum(info.file_size for info in infos), UNPACKED_PER_PACKED_BYTE * size + UNPACKED_BYTES_FREE
    if unpacked > limit:
        raise UnsafeFileError(
            f"{path} of {size} bytes would unpack to {unpacked}, more than {UNPACKED_PER_PACKED_BYTE} times its size: "
            "if you trust it, load it and save it again without compression."
        )
    return members


def _check_zip_directory(path: Path, file: IO[bytes], size: int) -> None:
    """Refuse a directory too large to list, or bytes around the archive that other readers interpret differently."""
    tail = 22 + 20 + 56  # end record, preceded by the locator and the end record of archives above 4 GB
    file.seek(max(size - tail, 0))
    end = file.read(tail)
    if len(end) < 22 or end[-22:-18] != b"PK\x05\x06":
        raise CheckpointError(f"{path} is an archive without its end: it is truncated, so download or copy it again.")
    entries, directory_size, directory_start = struct.unpack("<HII", end[-12:-2])
    if len(end) == tail and end[-42:-38] == b"PK\x06\x07" and end[:4] == b"PK\x06\x06":
        entries, directory_size, directory_start = struct.unpack("<QQQ", end[32:56])
        tail_size = tail
    else:
        tail_size = 22
    if directory_size > MAX_HEADER_BYTES or entries > MAX_TENSORS:
        raise UnsafeFileError(
            f"{path} lists {entries} members in {directory_size} bytes; expected at most {MAX_TENSORS}."
        )
    if directory_start + directory_size + tail_size != size:
        raise CheckpointError(f"{path}: its directory is not where its end record says: the file is damaged.")
    file.seek(0)


@contextmanager
def opened_member(file: UnchangedFile, info: zipfile.ZipInfo, where: str) -> Iterator[IO[bytes]]:
    """Open a member of an archive without listing the archive again; errors while reading it are converted too."""
    try:
        with file.open() as opened:
            opened.seek(data_start(opened, info, file.path))
            if info.CRC == 0:  # written by torch if checksums are disabled; None is not checked
                info.CRC = None  # type: ignore[assignment]
            with zipfile.ZipExtFile(opened, "r", info) as stream:
                yield cast(IO[bytes], stream)
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be unpacked ({error}): the file is damaged.") from None


def data_start(file: IO[bytes], info: zipfile.ZipInfo, path: Path) -> int:
    """Return the offset of a member's bytes, from its local header, whose name must match the directory."""
    file.seek(info.header_offset)
    header = file.read(30).ljust(30, b"\0")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    name = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8_NAME else "cp437")
    if header[:4] != b"PK\x03\x04" or file.read(name_length) != name:
        raise CheckpointError(f"{path}: the header of {info.filename!r} is damaged: download or copy it again.")
    return info.header_offset + 30 + name_length + extra_length
