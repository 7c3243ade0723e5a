"""Parts of a split: a fraction for validation, a few images of each class, or random images."""

from collections.abc import Sequence

import numpy as np

from ...errors import DataError, counted
from ...system.extras import needs

with needs("plain-vit[train]"):
    from datasets import Dataset
    from sklearn.model_selection import train_test_split


def carve(train: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split off a fraction, stratified by class.

    Raises:
        DataError: One of the parts would have fewer images than classes.
    """
    labels = np.asarray(train["label"])
    try:
        stratify = labels if labels.ndim == 1 else None
        kept, carved = train_test_split(
            np.arange(len(labels)), test_size=fraction, stratify=stratify, random_state=seed
        )
    except ValueError as error:  # fewer images than classes in one of the parts
        raise DataError(
            f"No stratified fraction of {fraction} can be split off {len(labels)} images: {error}"
        ) from error
    return train.select(np.sort(kept)), train.select(np.sort(carved))


def choose_shots(labels: np.ndarray, names: Sequence[str], shots: int, seed: int) -> np.ndarray:
    """Return the rows of `shots` random images of each class, in their original order.

    Args:
        labels: class number of each image.
        names: the classes, in the order of their numbers.
        shots: number of images per class, at least 1.
        seed: seed of the selection.

    Raises:
        DataError: A class has fewer images, or the number is below 1.
    """
    if shots < 1:
        raise DataError(f"Expected 1 or more images per class: got {shots}.")
    rng = np.random.default_rng(seed)
    kept: list[np.ndarray] = []
    for number, name in enumerate(names):
        rows = rng.permutation(np.flatnonzero(labels == number))
        if len(rows) < shots:
            raise DataError(
                f"The class {name!r} has {counted(len(rows), 'training image')}, fewer than the {shots} requested: "
                "request fewer."
            )
        kept.append(rows[:shots])
    return np.sort(np.concatenate(kept))


def some_rows(split: Dataset, count: int, seed: int) -> Dataset:
    """Return at most `count` random rows, in their original order."""
    if count < 1:
        raise DataError(f"max_images is {count}: expected at least 1.")
    return split.select(np.sort(np.random.default_rng(seed).permutation(len(split))[:count]))
