"""Manifest of a folder: the size and the hash of each of its files, to detect damage."""

import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_text(files: dict[str, list[Any]]) -> str:
    """Return the text of a manifest, which includes a hash of its own entries."""
    listed = json.dumps(files, sort_keys=True)
    return json.dumps({"files": files, "sha256": hashlib.sha256(listed.encode()).hexdigest()}, sort_keys=True)


def write_manifest(folder: Path) -> None:
    """Write a manifest into a folder, with the size and the SHA-256 of every file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): [path.stat().st_size, _hash_of(path)] for path in paths}
    (folder / MANIFEST).write_text(_manifest_text(files), encoding="utf-8")


def manifest_problem(folder: Path) -> str:
    """Return how the files of a folder differ from its manifest, or "" if they do not."""
    try:
        text = (folder / MANIFEST).read_bytes().decode("utf-8")
        files = json.loads(text)["files"]
        if text != _manifest_text(files):
            return f"{MANIFEST} has changed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _hash_of(path) != digest:
            return f"the content of {name} has changed"
    return ""
