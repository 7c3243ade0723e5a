"""Names of files, folders and repositories for pages that are shared: without the private folders of this machine."""

import os
from collections.abc import Sequence
from pathlib import Path


def public_name(place: str | os.PathLike[str]) -> str:
    """Return a Hub id unchanged, but only the last name of a path."""
    path = Path(place).expanduser()
    is_path = path.is_absolute() or path.exists()
    return os.path.basename(os.path.abspath(path)) if is_path else os.fspath(place)


def common_folder(paths: Sequence[str]) -> str:
    """Return the folder, with a slash at its end, that all absolute paths have in common; "" without any."""
    folders = [os.path.dirname(path) for path in paths if os.path.isabs(path)]
    return os.path.join(os.path.commonpath(folders), "") if folders else ""
