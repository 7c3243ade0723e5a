"""Names of files, folders and repositories for shared pages, without the private folders of this machine."""

import os
from collections.abc import Sequence
from pathlib import Path


def public_name(place: str | os.PathLike[str]) -> str:
    """Return a Hub id unchanged, but only the last name of a path."""
    path = Path(place).expanduser()
    is_path = path.is_absolute() or path.exists()
    return os.path.basename(os.path.abspath(path)) if is_path else os.fspath(place)


def public_paths(paths: Sequence[str]) -> list[str]:
    """Return absolute paths without their common folder; if they have none, only their last two names."""
    folders = [os.path.dirname(path) for path in paths if os.path.isabs(path)]
    common = os.path.join(os.path.commonpath(folders), "") if folders else ""

    def public(path: str) -> str:
        if not os.path.isabs(path):
            return path
        return "/".join(Path(path).parts[1:][-2:]) if common == os.sep else path.removeprefix(common)

    return list(map(public, paths))
