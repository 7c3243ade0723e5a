"""What identifies the data of a run, wherever it is: labels and names of files."""

import hashlib
from pathlib import Path
from typing import Any

from ...extras import needs
from .decoding import as_files

with needs("plain-vit[train]"):
    from datasets import Dataset


def dataset_identity(name: str, split: Any) -> str:
    """Return what a resumed run must find again: the name of a dataset, or the file names of one that is stored here.

    Args:
        name: the dataset, as given; a path may change between resumptions.
        split: its training split, or a stream, whose files are not listed.
    """
    if not Path(name).exists():
        return name
    return f"local, {files_hash(split)}" if isinstance(split, Dataset) else "local"


def labels_hash(split: Any) -> str:
    """Return a hash of the labels of a split, in their order."""
    return hashlib.sha256(str(split["label"][:]).encode()).hexdigest()


def files_hash(split: Dataset) -> str:
    """Return a hash of the names of the image files of a split, in their order, without the folders they are in."""
    names = [path and Path(path).name for path in image_paths(split)]
    return hashlib.sha256(str(names).encode()).hexdigest()


def image_paths(split: Dataset) -> list[str | None]:
    """Return the path of each image of a split, or None where it is not a file."""
    return list(as_files(split).select_columns("image").flatten().select_columns("image.path")["image.path"])
