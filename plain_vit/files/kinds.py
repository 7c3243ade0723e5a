"""What a source is, before anything in it is read and without torch: a path, a kind of weights, or a repository."""

import os
import re
from pathlib import Path

from ..errors import CheckpointError
from .other_files import described_file, is_part_of_dcp

# Far above the needs of any Vision Transformer, and far below what exhausts the memory when a header is parsed.
MAX_HEADER_BYTES = 16 * 2**20
SUFFIXES = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt", ".tar"),  # .tar as in model_best.pth.tar
    "npz": (".npz",),
    "gguf": (".gguf",),
}
WEIGHTS = sum(SUFFIXES.values(), ())
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def path_of(source: str | os.PathLike[str]) -> Path | None:
    """Return the path of a source that is here, and None for the id of a Hub repository.

    Raises:
        CheckpointError: The source is neither, or it is a file that begins as no weights do.
    """
    path = Path(os.path.expanduser(source))
    try:
        if path.exists():
            if not path.is_dir():
                kind_of(path)
            return path
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    if HUB_ID.fullmatch(os.fspath(source)) and path.suffix not in WEIGHTS:
        return None
    raise CheckpointError(f"{path} does not exist: expected a checkpoint file, a folder or a Hub id (user/name).")


def kind_of(path: Path) -> str:
    """Return the kind of a file by its first bytes: safetensors, torch, gguf or zip, whose members tell torch and npz.

    Raises:
        CheckpointError: They are not those of weights.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file: expected a checkpoint.")
    with open(path, "rb") as file:
        start = file.read(512)
    if not start:
        raise CheckpointError(f"{path} is empty: download or copy it again.")
    # Checked first, because the header length in the first bytes can look like any other type.
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES:
        return "safetensors"
    if is_part_of_dcp(path):
        raise CheckpointError(f"{path} is {described_file(path, start)}")
    if start.startswith(b"PK"):
        return "zip"
    if start.startswith(b"GGUF"):
        return "gguf"
    if start[0] == 0x80 or (len(start) > 262 and start[257:262] == b"ustar"):
        return "torch"
    if len(start) > 8 and start[8:9] == b"{":
        return "safetensors"
    if (described := described_file(path, start)) is not None:
        raise CheckpointError(f"{path} is {described}")
    raise CheckpointError(
        f"{path} begins with {start[:12]!r}: expected a safetensors, torch, .npz or .gguf file. Download or copy it "
        "again."
    )
