"""Images and labels in IDX files, the format of MNIST and datasets like it."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...system.extras import needs

with needs("plain-vit[train]"):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

# File name prefixes of MNIST and datasets like it.
STEMS = {"train": "train", "test": "t10k"}
BYTES = 0x08  # IDX type code for unsigned bytes
MOST_BYTES = 2**32  # size limit of an unpacked file; EMNIST, the largest such dataset, has 2**29
CHUNK = 2**20


def holds_idx(folder: Path) -> bool:
    """Return whether a folder has an IDX file of training images."""
    return _stored(folder / _names("train")[0]) is not None


def load_idx(folder: Path, label_names: Sequence[str] | None = None) -> DatasetDict:
    """Open the four files of a dataset like MNIST, gzip-compressed or not.

    Args:
        folder: has `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and the same for `t10k`, with or without .gz.
        label_names: the classes, in the order of their numbers (default: labels remain numbers).

    Returns:
        Splits `train` and `test`, with a greyscale `image` and a `label`.

    Raises:
        DataError: A file is missing or damaged, or images and labels do not match.
    """
    files = {split: [_stored(folder / name) or folder / name for name in _names(split)] for split in STEMS}
    if missing := [file.name for pair in files.values() for file in pair if not file.is_file()]:
        raise DataError(f"The folder {folder} lacks {' and '.join(missing)}, or the same with .gz: add it.")
    return DatasetDict({split: _split(images, labels, label_names) for split, (images, labels) in files.items()})


def read_idx(file: Path, dimensions: int) -> np.ndarray:
    """Read an IDX file of bytes.

    Args:
        file: gzip-compressed if its name ends in .gz.
        dimensions: 3 for images (count, height, width), 1 for labels.

    Returns:
        An array of dtype uint8 with this many dimensions.

    Raises:
        DataError: The file is not an IDX file of bytes, is truncated, or has trailing bytes.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            header = stream.read(4 + 4 * dimensions)
            if header[:4] != bytes((0, 0, BYTES, dimensions)) or len(header) < 4 + 4 * dimensions:
                raise DataError(
                    f"{file} is no IDX file of bytes in {dimensions} dimensions: it begins with {header[:4].hex(' ')}, "
                    f"expected 00 00 {BYTES:02x} {dimensions:02x} and {dimensions} sizes."
                )
            shape = tuple(np.frombuffer(header, ">u4", offset=4).tolist())
            size = math.prod(shape)
            if not 0 < size <= MOST_BYTES:
                raise DataError(f"{file} says that it holds {shape} numbers: expected 1 to {MOST_BYTES} in all.")
            content = bytearray()  # grows with the actual data, not with the size that the header claims
            while len(content) <= size and (chunk := stream.read(CHUNK)):
                content += chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is damaged ({error}): download it again.") from error
    if len(content) != size:
        found = f"only {len(content)}" if len(content) < size else "more"
        raise DataError(f"{file} is damaged: it says that it holds {size} bytes, but has {found}. Download it again.")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _names(split: str) -> tuple[str, str]:
    return f"{STEMS[split]}-images-idx3-ubyte", f"{STEMS[split]}-labels-idx1-ubyte"


def _stored(file: Path) -> Path | None:
    """Return the file or else its compressed version, or None if neither exists."""
    return next((each for each in (file, file.with_name(f"{file.name}.gz")) if each.is_file()), None)


def _split(images: Path, labels: Path, label_names: Sequence[str] | None) -> Dataset:
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(f"{images} has {len(pixels)} images, but {labels} {len(numbers)} labels: expected as many.")
    if label_names is not None and numbers.max() >= len(label_names):
        row = int(np.argmax(numbers >= len(label_names)))
        raise DataError(f"{labels} has the label {numbers[row]} at row {row}: expected 0 to {len(label_names) - 1}.")
    return dataset_of_pixels(pixels, numbers, label_names)


def dataset_of_pixels(pixels: np.ndarray, labels: np.ndarray, names: Sequence[str] | None) -> Dataset:
    """Return greyscale images [N, H, W] and labels [N] as rows.

    The images are stored as PGM files, which hold raw pixels and take a hundredth of PNG's time to write.
    """
    _, height, width = pixels.shape
    header = b"P5 %d %d 255\n" % (width, height)
    images = [{"bytes": header + image.tobytes(), "path": None} for image in pixels]
    kind = Value("int64") if names is None else ClassLabel(names=list(names))
    features = Features({"image": Image(), "label": kind})
    return Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features)
