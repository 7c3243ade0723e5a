"""Copying of a source's licence files next to the converted weights: only texts, and no links out of the folder."""

import os
import re
import warnings
from pathlib import Path

from ..errors import CheckpointError, UnsafeFileError, printable
from ..files.reading import inside
from ..files.texts import plain_text, read_small_file

LICENSE_FILE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE)(-[A-Za-z0-9][\w.-]{0,29})?(\.(txt|md|rst))?")
MOST_FILES = 20


def license_files(folder: Path) -> list[str]:
    """Return the names of the licence files of a folder."""
    return sorted(name for name in os.listdir(folder) if LICENSE_FILE.fullmatch(name))


def copy_license_files(source: Path, folder: Path) -> list[str]:
    """Copy the licence files of a source, byte for byte, and warn about files that are not copied.

    Args:
        source: Folder of a checkpoint.
        folder: Folder of the converted checkpoint.

    Returns:
        The names of the copied files.
    """
    source, copied = Path(os.path.realpath(source)), []
    names = license_files(source)
    if len(names) > MOST_FILES:
        warnings.warn(f"{source} has {len(names)} licence files: the first {MOST_FILES} are copied", stacklevel=2)
    for name in names[:MOST_FILES]:
        try:
            content = read_small_file(inside(source, name))
            plain_text(content)
            (folder / name).write_bytes(content)
        except (CheckpointError, UnsafeFileError) as error:
            warnings.warn(printable(f"{source / name} was not copied: {error}"), stacklevel=2)
        else:
            copied.append(name)
    return copied
