"""Vector targets: several labels per image, or numbers to predict."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import DataError, listed
from ...scores import REGRESSION
from ...system.extras import needs

with needs("plain-vit[train]"):
    from datasets import ClassLabel, Dataset, List, Value


def with_vectors(
    splits: Mapping[str, Dataset], problem_type: str, *, column: str, given: Sequence[str] | None
) -> tuple[dict[str, Dataset], list[str]]:
    """Return splits whose `label` is a vector of floats, and the names of its entries.

    Args:
        splits: rows with a `label`: a list of labels, or a number or a list of numbers. The first split defines the
            labels; each must occur in a split `train`.
        problem_type: `multi_label_classification` (1 for each label of an image, 0 for others) or `regression`.
        column: name of the label column in the dataset, which also names numbers that have no names.
        given: names from `--label_names`; they must include all labels that occur in lists.

    Raises:
        DataError: A label is missing, unknown or has another type, or the lists are multi-hot.
    """
    columns = {role: split["label"][:] for role, split in splits.items()}
    if problem_type != REGRESSION:
        columns = {role: [_whole_list(labels) for labels in values] for role, values in columns.items()}
    for role, values in columns.items():
        if None in values:
            raise DataError(f"Row {values.index(None)} of the {role} split has no label: remove the row.")
    if problem_type == REGRESSION:
        vectors = {role: _numbers(role, values) for role, values in columns.items()}
        names = _names_of_numbers({role: each.shape[1] for role, each in vectors.items()}, column, given)
    else:
        first = next(iter(splits))
        classes, names = _classes(splits[first].features["label"], columns[first], given)
        vectors = {role: _shown(role, values, classes) for role, values in columns.items()}
        occurs = vectors["train"].any(axis=0) if "train" in vectors else np.ones(len(names))
        lacking = [names[place] for place in np.flatnonzero(occurs == 0)]
        if lacking:
            raise DataError(
                f"{len(lacking)} of the {len(names)} labels have no training images: {listed(lacking)}. Add images, or "
                "remove the labels."
            )
    feature = List(Value("float32"))
    return {
        role: split.remove_columns("label").add_column("label", list(vectors[role]), feature=feature)
        for role, split in splits.items()
    }, names


def whole_numbers(values: Sequence[Any]) -> list[Any]:
    """Undo what pandas does to an integer column with gaps: whole floats become integers again, and NaN None."""
    return [
        (None if math.isnan(value) else int(value) if value.is_integer() else value)
        if isinstance(value, float)
        else value
        for value in values
    ]


def label_type_error(column: str, kind: object) -> DataError:
    """Return the error for a label column that cannot hold classes, with the remedy."""
    name = kind.dtype if isinstance(kind, Value) else repr(kind)
    if isinstance(kind, List):
        cure = (
            "fine-tuning takes a list of labels per image with --problem_type multi_label_classification, and one of "
            "numbers with --problem_type regression"
        )
    elif isinstance(kind, Value) and "float" in kind.dtype:
        cure = "fine-tuning takes numbers to predict with --problem_type regression; convert classes to integers"
    else:
        cure = "convert the column to integers or strings"
    return DataError(
        f"The label column {column!r} holds {name}: expected one class per image, as ClassLabel, integers, strings, "
        f"booleans or whole floats; {cure}, or choose another column with --label_column."
    )


def check_evaluated(splits: Mapping[str, Dataset], problem_type: str) -> None:
    """Refuse splits whose results are undefined: average precision without labels, or R2 of one image.

    Args:
        splits: rows with a vector as their `label`.
        problem_type: see `with_vectors`.

    Raises:
        DataError: A split other than the training split is of this kind.
    """
    for role, split in splits.items():
        if role == "train":
            continue
        if problem_type == REGRESSION and len(split) < 2:
            raise DataError(f"The {role} split has one image, but R2 needs at least two: add images.")
        if problem_type != REGRESSION and not any(map(any, split["label"][:])):
            raise DataError(
                f"None of the {len(split)} images of the {role} split has a label, but average precision needs "
                "labels: add images, or use another split, or a larger fraction or batch."
            )


def _whole_list(labels: Any) -> Any:
    return whole_numbers(labels) if isinstance(labels, list) else labels


def _numbers(role: str, values: Sequence[Any]) -> np.ndarray:
    """Return the numbers of a split as an array [images, K]."""
    try:
        numbers = np.asarray(values, dtype=np.float32)
        if isinstance(values[0], bool | str) or numbers.ndim > 2:
            raise ValueError(f"got {values[0]!r}")
    except (ValueError, TypeError) as error:
        raise DataError(
            f"The labels of the {role} split are no numbers, or lists of different lengths ({error}): expected a "
            "number, or a list of equally many numbers, for each image."
        ) from error
    wrong = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(axis=1))
    if len(wrong):
        raise DataError(f"Row {wrong[0]} of the {role} split has the label {values[wrong[0]]}: correct or remove it.")
    return numbers.reshape(len(numbers), -1)


def _names_of_numbers(widths: Mapping[str, int], column: str, given: Sequence[str] | None) -> list[str]:
    width = next(iter(widths.values()))
    if set(widths.values()) != {width}:
        raise DataError(f"The splits have different numbers of targets per image: {dict(widths)}.")
    if given is not None and len(given) != width:
        raise DataError(f"--label_names has {len(given)} names for {width} numbers per image: give one for each.")
    return list(given) if given else [column] if width == 1 else [f"{column} {place}" for place in range(width)]


def _classes(feature: Any, values: Sequence[Any], given: Sequence[str] | None) -> tuple[dict[Any, int], list[str]]:
    """Return the index of each label that may occur, and the names of the labels."""
    if not all(isinstance(labels, list) for labels in values):
        raise DataError(f"The label column holds {feature}: expected a list of labels for each image.")
    inner = getattr(feature, "feature", None)
    if isinstance(inner, ClassLabel):
        if given is not None:
            raise DataError(f"The labels already have names, {', '.join(inner.names[:5])}, ...: omit --label_names.")
        _refuse_ones_and_zeros(values, max(2, len(inner.names)))
        return {place: place for place in range(len(inner.names))}, list(inner.names)
    kinds = {type(label) for labels in values for label in labels}
    if kinds == {bool}:
        _refuse_ones_and_zeros(values, 1)
    if kinds not in ({int}, {str}):
        raise DataError(f"The label column holds {feature}: expected lists of classes, integers or strings.")
    found = sorted({label for labels in values for label in labels})
    has_names = given is not None or kinds == {str}
    _refuse_ones_and_zeros(values, max(2, len(given or found)) if has_names else 1)
    if given is not None:
        places = range(len(given)) if kinds == {int} else given
        return {label: place for place, label in enumerate(places)}, list(given)
    return {label: place for place, label in enumerate(found)}, [str(label) for label in found]


def _refuse_ones_and_zeros(values: Sequence[Sequence[Any]], shortest: int) -> None:
    """Refuse multi-hot lists, of ones and zeros, instead of lists of the labels that an image has.

    Args:
        values: the lists.
        shortest: minimum length from which equally long lists of ones and zeros count as multi-hot.
    """
    lengths = {len(labels) for labels in values}
    occurring = {str(label) for labels in values for label in labels}
    if len(lengths) != 1 or min(lengths) < shortest or not (occurring <= {"0", "1"} or occurring <= {"False", "True"}):
        return
    hint = "; if they are the numbers of labels, name them with --label_names" if lengths == {1} else ""
    raise DataError(
        f"The {len(values)} lists of labels are all {min(lengths)} long, of ones and zeros: expected the labels that "
        f"an image has, not whether it has each; write [2, 5] for [0, 0, 1, 0, 0, 1]{hint}."
    )


def _shown(role: str, values: Sequence[Sequence[Any]], classes: Mapping[Any, int]) -> np.ndarray:
    """Return multi-hot labels [images, K]: 1 for each label of an image, 0 for the others."""
    unknown = {label for labels in values for label in labels} - classes.keys()
    if unknown:
        row = next(row for row, labels in enumerate(values) if not unknown.isdisjoint(labels))
        raise DataError(
            f"The {role} split has labels that are unknown or that the training split lacks: "
            f"{listed(sorted(map(str, unknown)))}, first at row {row}: correct or remove them."
        )
    shown = np.zeros((len(values), len(classes)), dtype=np.float32)
    for row, labels in enumerate(values):
        shown[row, [classes[label] for label in labels]] = 1
    return shown
