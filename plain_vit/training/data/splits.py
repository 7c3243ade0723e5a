"""Parts of a split: a fraction for validation, a few images of each class, or random images."""

from collections.abc import Sequence

import numpy as np

from ...errors import DataError
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


def few_shots(train: Dataset, shots: int, names: Sequence[str], seed: int) -> Dataset:
    """Return `shots` random rows of each class.

    Raises:
        DataError: A class has fewer rows, or the number is below 1.
    """
    if shots < 1:
        raise DataError(f"shots_per_class is {shots}: expected at least 1.")
    labels = np.asarray(train["label"])
    rng = np.random.default_rng(seed)
    kept: list[np.ndarray] = []
    for number, name in enumerate(names):
        rows = rng.permutation(np.flatnonzero(labels == number))
        if len(rows) < shots:
            raise DataError(f"The class {name!r} has {len(rows)} training images, fewer than the {shots} requested.")
        kept.append(rows[:shots])
    return train.select(np.sort(np.concatenate(kept)))


def some_rows(split: Dataset, count: int, seed: int) -> Dataset:
    """Return at most `count` random rows, in their original order."""
    if count < 1:
        raise DataError(f"max_images is {count}: expected at least 1.")
    return split.select(np.sort(np.random.default_rng(seed).permutation(len(split))[:count]))
