"""Sets to evaluate a classifier on, and what their labels mean among the model's classes."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..scores import MULTI_LABEL, REGRESSION
from ..system.extras import needs
from .data import load_labelled_split
from .data.datasets import read_names
from .data.identity import image_paths
from .models import matching_classes

with needs("plain-vit[train]"):
    from datasets import Dataset


@dataclass(frozen=True)
class EvaluationSet:
    """Images to evaluate on.

    Args:
        rows: an `image`, a `label` as the task or `judge_logits` expects it, and perhaps the text of a `group`.
        classes: the model's classes that the labels can mean.
        left_out: number of images that are not in `rows`, as none of the classes is right.
    """

    rows: Dataset
    classes: Sequence[int] = ()
    left_out: int = 0


def named_sets(words: Sequence[str], taken: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return `dataset` and `split` of each `name=DATASET` or `name=DATASET@SPLIT`.

    Args:
        words: values of `--eval_dataset`.
        taken: names that the sets cannot have.

    Raises:
        DataError: A word has another form, or its name is taken.
    """
    sets: dict[str, dict[str, Any]] = {}
    for word in words:
        name, _, dataset = word.partition("=")
        if not dataset or not re.fullmatch(r"[\w.-]+", name) or name in (*sets, *taken):
            raise DataError(f"eval_dataset has {word!r}: expected name=DATASET or name=DATASET@SPLIT, with a new name.")
        folder, _, split = dataset.rpartition("@")
        parted = folder and "/" not in split and not Path(dataset).exists()
        sets[name] = {"dataset": folder, "split": split} if parted else {"dataset": dataset, "split": None}
    return sets


def value_of(name: str, words: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value that an option has for a set: that of `name=value`, or else that of a word without a name."""
    values: dict[str, str] = {}
    for word in words:
        of, _, value = word.partition("=")
        values |= {of: value} if of in names else {"": word}
    return values.get(name, values.get(""))


def open_evaluation_set(
    class_names: list[str],
    *,
    problem_type: str,
    labels_by: str = "name",
    class_map: str | None = None,
    real_labels: str | None = None,
    **where: Any,
) -> EvaluationSet:
    """Open a set, with labels in the order of the model's classes.

    Args:
        class_names: the model's classes, in order.
        problem_type: the model's problem.
        labels_by: how classes are matched, by `name` or by `number`.
        class_map: text file with the data's name of each class of the model, one per line, as timm's class maps; it is
            used instead of the model's names and numbers.
        real_labels: see `_with_real_labels`.
        where: arguments of `load_labelled_split`.

    Raises:
        DataError: The data do not fit the model, or an option does not fit its problem.
    """
    single = {"real_labels": real_labels, "group_column": where.get("group_column")}
    if problem_type in (MULTI_LABEL, REGRESSION) and (given := [f"--{name}" for name in single if single[name]]):
        raise DataError(f"The model's problem is {problem_type}, without single labels: omit {', '.join(given)}.")
    labels_by = "name" if class_map else labels_by
    rows, data_classes = load_labelled_split(
        **where, problem_type=problem_type, classes=len(class_names) if labels_by == "number" else None
    )
    if problem_type == REGRESSION:
        if len(data_classes) != len(class_names):
            raise DataError(
                f"Each image has {len(data_classes)} numbers, and the model predicts {len(class_names)}: give the data "
                "that it was trained on, or name the column with --label_column."
            )
        return EvaluationSet(rows)
    if real_labels is not None:
        return _with_real_labels(rows, real_labels, len(class_names))
    names = read_names(class_map, "--class_map") or class_names
    if len(names) != len(class_names):
        raise DataError(f"{class_map} has {len(names)} lines: expected one for each of {len(class_names)} classes.")
    numbers = matching_classes(names, data_classes, labels_by=labels_by)
    labels = rows["label"][:]
    if problem_type == MULTI_LABEL:
        vectors = np.zeros((len(labels), len(class_names)), dtype=np.float32)
        vectors[:, numbers] = np.asarray(labels)
        return EvaluationSet(_labelled(rows, list(vectors)))
    return EvaluationSet(_labelled(rows, [numbers[label] for label in labels]), sorted(numbers))


def _labelled(rows: Dataset, labels: list[Any]) -> Dataset:
    return rows.remove_columns("label").add_column("label", labels)


def _with_real_labels(rows: Dataset, file: str, classes: int) -> EvaluationSet:
    """Return the images for which any class is right, each with all such classes (Beyer et al. 2020).

    Args:
        rows: the images.
        file: JSON list with the list of such classes, as numbers, for each image: for validation images of ImageNet in
            the order of the numbers in their names, for others in that of the rows.
        classes: number of the model's classes.
    """
    try:
        right = [[int(number) for number in numbers] for numbers in json.loads(Path(file).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file} holds no list of numbers for each image ({error}): correct --real_labels.") from error
    found = [re.search(r"ILSVRC2012_val_(\d{8})", path or "") for path in image_paths(rows)]
    places = [int(match[1]) - 1 for match in found if match] if all(found) else range(len(rows))
    whole = len(rows) == len(right) or all(found)
    kept = [row for row, place in enumerate(places) if place < len(right) and right[place]]
    labels = [right[places[row]] for row in kept]
    allowed = {*(number for some in labels for number in some)}
    if not whole or max(places) >= len(right) or not allowed or not allowed <= {*range(classes)}:
        raise DataError(
            f"{file} has {len(right)} lists, of numbers such as {right[:3]}: expected one for each of the {len(rows)} "
            f"images, of numbers from 0 to {classes - 1}, the model's classes."
        )
    most = max(map(len, labels))
    filled = [some + [-1] * (most - len(some)) for some in labels]
    return EvaluationSet(_labelled(rows.select(kept), filled), sorted(allowed), len(rows) - len(kept))
