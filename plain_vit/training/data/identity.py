"""Identity of a run's data, wherever it is stored: labels, file names and file contents."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...system.extras import needs
from .decoding import UNREADABLE, as_files, stored_bytes

with needs("plain-vit[train]"):
    import pyarrow as pa
    import pyarrow.compute
    from datasets import Dataset

READ = 256  # number of images whose contents are hashed


def dataset_identity(name: str, split: Any) -> str:
    """Return what a resumed run must find again: a dataset's name or, if it is stored here, a hash of its file names.

    Args:
        name: the dataset, as given; a path may change between resumptions.
        split: the training split, or a stream, whose files are not listed.
    """
    if not Path(name).exists():
        return name
    return f"local, {files_hash(split)}" if isinstance(split, Dataset) else "local"


def labels_hash(split: Any) -> str:
    """Return a hash of the labels of a split, in order."""
    return hashlib.sha256(str(split["label"][:]).encode()).hexdigest()


def files_hash(split: Dataset) -> str:
    """Return a hash of the image file names of a split, in order, without their folders."""
    names = [path and os.path.basename(path) for path in image_paths(split)]
    return hashlib.sha256(str(names).encode()).hexdigest()


def image_paths(split: Dataset) -> list[str | None]:
    """Return the path of each image of a split; None for an image that is not a file."""
    paths: list[str | None] = _stored_column(split, "path").to_pylist()
    return paths


def paths_hash(split: Dataset) -> str:
    """Return a hash of the image paths of a split, in order."""
    return hashlib.sha256("\0".join(map(str, image_paths(split))).encode()).hexdigest()


def contents_hash(split: Dataset) -> str:
    """Return a hash of the sizes in bytes of all images of a split, and of the contents of `READ` evenly spaced images.

    Hashing all contents would take as long as reading the data. File times do not count, so a copy has the same hash.
    The hash may miss that an image was replaced by another of the same number of bytes.
    """
    files = as_files(split).select_columns("image")
    digest = hashlib.sha256(str(_sizes(split)).encode())
    for stored in files[np.linspace(0, len(files) - 1, min(READ, len(files)), dtype=int)]["image"]:
        try:
            digest.update(stored_bytes(stored))
        except UNREADABLE:  # reported when the images are read
            digest.update(b"none")
    return digest.hexdigest()


def _sizes(split: Dataset) -> list[int | None]:
    """Return the size of each image in bytes; None for a missing image."""
    sizes = _stored_column(split, "bytes", pa.compute.binary_length).to_pylist()
    return [_size_of(path) if size is None else size for size, path in zip(sizes, image_paths(split), strict=True)]


def _stored_column(split: Dataset, name: str, of_column: Callable[[Any], Any] = lambda column: column) -> Any:
    """Apply a function to the column `bytes` or `path` of a split's images, in order, without copying all bytes."""
    flat = as_files(split).select_columns("image").flatten()
    column = of_column(flat.data.column(f"image.{name}"))
    return column if flat._indices is None else column.take(flat._indices.column(0))


def _size_of(path: str | None) -> int | None:
    try:
        return None if path is None else os.stat(path).st_size
    except (OSError, ValueError):  # reported when the images are read
        return None
