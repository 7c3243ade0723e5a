"""Detection of file types by content: pickles of any protocol, and archives."""

import pickletools
import re
from io import BytesIO
from typing import Any

LONGEST = 4_000_000  # bytes of a text that are checked; the rest is not needed for the decision
MANY_STEPS = 2_000
FEW_STEPS = 4  # a text with fewer steps and trailing characters is not a pickle
NAMES = re.compile(r"[^\W\d][\w.]* [^\W\d][\w.]*")  # a module and a name in it
CALLS = ("REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD")
FIRST_OPCODES = {opcode.code.encode("latin-1") for opcode in pickletools.opcodes if not opcode.stack_before}
BINARY_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")

# By their magic bytes: offset in the file, bytes, description.
KINDS = (
    (0, b"PK\x03\x04", "a zip archive, as torch.save and .npz write"),
    (0, b"PK\x05\x06", "a zip archive"),
    (0, b"\x1f\x8b", "compressed with gzip"),
    (0, b"BZh", "compressed with bzip2"),
    (0, b"\xfd7zXZ\x00", "compressed with xz"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (0, b"\x04\x22\x4d\x18", "compressed with lz4"),
    (0, b"7z\xbc\xaf", "a 7z archive"),
    (0, b"Rar!", "a rar archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x93NUMPY", "a numpy array: save safetensors"),
    (0, b"SQLite format 3", "an SQLite database"),
    (0, b"\x7fELF", "a program or a core dump"),
    (0, b"b0VIM", "a swap file of vim"),
    (0, b"\x89HDF", "an HDF5 file"),
    (0, b"%PDF", "a PDF"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WebP image"),
    (0, b"II*\0", "a TIFF image"),
    (0, b"MM\0*", "a TIFF image"),
    (4, b"ftyp", "a HEIF or AVIF image, or a video"),
)
PACKED = ("zip", "gzip", "bzip2", "xz", "zstd", "lz4", "7z", "rar", "tar")


def kind_of(data: bytes) -> str | None:
    """Return a description of a binary file by its magic bytes; None if unknown."""
    if is_pickle(data):
        return "a pickle, which runs code when loaded: save safetensors"
    return next((words for place, magic, words in KINDS if data.startswith(magic, place)), None)


def is_packed(data: bytes) -> bool:
    """Return whether bytes are a pickle, an archive or compressed."""
    kind = kind_of(data)
    return kind is not None and (kind.startswith("a pickle") or any(word in kind.split(" ") for word in PACKED))


def is_pickle(data: bytes) -> bool:
    """Return whether bytes are a pickle of any protocol, without running any of it.

    A text counts as a pickle if each of its first steps finds on the stack the items that it pops.
    """
    if BINARY_PROTOCOL.match(data):
        return True
    if data[:1] not in FIRST_OPCODES:
        return False
    data = data[:LONGEST].rstrip()
    stack: list[object] = []
    steps, names, calls = 0, False, False
    try:
        for opcode, argument, position in pickletools.genops(BytesIO(data)):
            if opcode.name in ("GLOBAL", "INST") and not NAMES.fullmatch(str(argument)):
                return False
            if not _takes_from(stack, opcode):
                return False
            steps += 1
            names |= opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST")
            calls |= names and opcode.name in CALLS
            if opcode.name == "STOP":
                return position == len(data) - 1 or steps >= FEW_STEPS
            if steps == MANY_STEPS:
                return True
    except Exception:  # pickletools raises many types of errors for invalid arguments
        pass
    return calls and steps >= FEW_STEPS


def _takes_from(stack: list[object], opcode: Any) -> bool:
    """Apply the stack effect of an opcode; return False if the stack does not allow it."""
    mark = pickletools.markobject
    before = list(opcode.stack_before)
    if mark in before:
        if mark not in stack:
            return False
        while stack.pop() is not mark:
            pass
        before = before[: before.index(mark)]
    if len(before) > len(stack) or (before and mark in stack[-len(before) :]):
        return False
    if before:
        del stack[-len(before) :]
    stack.extend(opcode.stack_after)
    return True
