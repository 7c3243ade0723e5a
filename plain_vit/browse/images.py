"""Read the features, predictions and true labels of images from parquet files."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, listed
from ..files.texts import parse_json, read_small_file
from ..inference.bulk import MANIFEST
from ..system.extras import needs
from ..training.data.datasets import Labels, labels_of
from ..training.models import matching_classes

with needs("plain-vit[train]"):
    import pyarrow as pa
    from pyarrow import compute, parquet

MOST_IMAGES = 100_000  # the browser holds all points and names, and every pair of images is compared
ROWS_AT_A_TIME = 4096
PREDICTED, PROBABILITY, TRUE = "label", "probability", "true_label"
OF_IMAGES = ("dataset", "dataset_subset", "split", "image_column", "images")  # settings that identify a run's images


@dataclass(frozen=True)
class Images:
    """The images of a page, in one order.

    Args:
        count: Number of images.
        rows: Row numbers in the data, if known.
        paths: Files of the images; None for an image without a file.
        features: Features [N, D] in float32, if there are any.
        predicted: Predicted classes, if there are any.
        probability: Probabilities of the predicted classes [N].
        true: True labels, if known.
    """

    count: int
    rows: np.ndarray | None
    paths: Sequence[str | None]
    features: np.ndarray | None = None
    predicted: Sequence[str | None] | None = None
    probability: np.ndarray | None = None
    true: Labels | None = None

    def in_order(self, order: np.ndarray) -> "Images":
        """Return the images with these indices, in this order."""
        rows, features, probability = (
            None if array is None else array[order] for array in (self.rows, self.features, self.probability)
        )
        paths = [self.paths[i] for i in order]
        predicted = None if self.predicted is None else [self.predicted[i] for i in order]
        true = None if self.true is None else self.true.in_order(order)
        return Images(len(order), rows, paths, features, predicted, probability, true)


class Shards:
    """Parquet files with the same columns: one file, a folder of files, or the output folder of a script.

    Args:
        place: The file or folder.

    Raises:
        DataError: There is no file, a file cannot be read or has other columns, or the folder is incomplete.
    """

    def __init__(self, place: str | Path) -> None:
        self.place = Path(place)
        self.settings: dict[str, Any] = {}  # from the manifest of the run that wrote the files, if there is one
        if self.place.is_dir():
            files = self._files_of_folder()
        elif self.place.is_file():
            files = [self.place]
        else:
            raise DataError(f"There is no file or folder {place}: give a parquet file, or the folder of a run.")
        self.files = [(file, _opened(file)) for file in files]
        self.schema: pa.Schema = self.files[0][1].schema_arrow
        for file, opened in self.files:
            if not opened.schema_arrow.equals(self.schema):
                raise DataError(f"{file} has other columns than {files[0]}: give a folder of one run.")
        if self.count == 0:
            raise DataError(f"{place} has no images: its files have no rows.")

    @cached_property
    def count(self) -> int:
        """The number of rows."""
        return sum(opened.metadata.num_rows for _, opened in self.files)

    def _files_of_folder(self) -> list[Path]:
        if not (manifest := self.place / MANIFEST).is_file():
            if not (files := sorted(self.place.glob("*.parquet"))):
                raise DataError(f"{self.place} has no parquet files: give a file, or the output folder of a run.")
            return files
        content = parse_json(read_small_file(manifest), str(manifest), (dict,))
        if not content.get("complete"):
            raise DataError(f"The run of {self.place} did not end: run its script again with --resume.")
        self.settings, shards = content.get("settings"), content.get("shards")
        if not isinstance(self.settings, dict) or not isinstance(shards, dict):
            raise DataError(f"{manifest} is not that of a run: give a parquet file, or a folder of them.")
        files = [self.place / "data" / Path(name).name for name in shards]
        if missing := [file.name for file in files if not file.is_file()]:
            raise DataError(
                f"{self.place} lacks shards that its manifest lists: {listed(missing)}. Run its script with --resume."
            )
        for file, count in zip(files, shards.values(), strict=True):
            if (rows := _opened(file).metadata.num_rows) != count:
                raise DataError(f"{file} has {rows} rows, and its manifest lists {count}: it is not that of this run.")
        if not files:
            raise DataError(f"{self.place} has no images: its manifest lists no shards.")
        return files

    def batches(self, name: str) -> Iterator[pa.Array]:
        """Yield the values of a column in parts."""
        for file, opened in self.files:
            try:
                for batch in opened.iter_batches(ROWS_AT_A_TIME, columns=[name]):
                    yield batch.column(0)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file} cannot be read: {error}") from error

    def texts(self, name: str) -> list[str | None] | None:
        """Return a column as strings, or None if there is no such column."""
        if name not in self.schema.names:
            return None
        try:
            parts = [batch.cast(pa.string()).to_pylist() for batch in self.batches(name)]
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"The column {name!r} of {self.place} is {self.schema.field(name).type}: expected texts."
            ) from error
        return list(itertools.chain.from_iterable(parts))

    def labels(self, name: str) -> Labels:
        """Return a column of true labels."""
        texts = self.texts(name) or []
        is_number = pa.types.is_integer(self.schema.field(name).type)
        return labels_of([int(text) if is_number and text is not None else text for text in texts])

    @property
    def classes(self) -> list[str] | None:
        """The model's classes, in order, if the manifest lists them."""
        names = self.settings.get("classes")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise DataError(f"The manifest of {self.place} has {names!a:.200} as classes: expected a list of names.")
        return names

    def numbers(self, name: str, kind: type) -> np.ndarray | None:
        """Return a column of finite numbers, or None if there is no such column."""
        if name not in self.schema.names:
            return None
        found = self.schema.field(name).type
        fits = pa.types.is_integer(found) if kind is np.int64 else pa.types.is_floating(found)
        if not fits:
            raise DataError(f"The column {name!r} of {self.place} is {found}: expected numbers.")
        parts = list(self.batches(name))
        if any(part.null_count for part in parts):
            raise DataError(f"The column {name!r} of {self.place} has empty cells: expected a number for each image.")
        return self._finite(name, np.concatenate([part.to_numpy(zero_copy_only=False).astype(kind) for part in parts]))

    def _finite(self, name: str, values: np.ndarray, first: int = 0) -> np.ndarray:
        """Return the values of rows, from the first of them on, if all are finite."""
        wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if len(wrong):
            raise DataError(
                f"The column {name!r} of {self.place} holds NaN or infinite values, first in row {first + wrong[0]} of "
                "the table: compute them again, in float32."
            )
        return values

    def vectors(self, name: str) -> np.ndarray:
        """Return a column of lists of equal length as a float32 array [N, D].

        Raises:
            DataError: The column does not hold such lists, or has values that are missing, NaN or infinite.
        """
        if name not in self.schema.names:
            raise DataError(f"{self.place} has no column {name!r}, only {listed(self.schema.names)}: correct --column.")
        kind = self.schema.field(name).type
        if _is_list(kind) and _is_list(kind.value_type):
            raise DataError(
                f"The column {name!r} of {self.place} holds a grid of patches for each image: extract features of "
                "whole images, with --feature pooled, cls or mean."
            )
        if not _is_vector(kind):
            raise DataError(f"The column {name!r} of {self.place} is {kind}: expected a list of numbers per image.")
        features, done = np.empty((0, 0), dtype=np.float32), 0
        for batch in self.batches(name):
            lengths = compute.unique(compute.list_value_length(batch)).to_pylist()
            is_other = done > 0 and lengths != [features.shape[1]]
            if batch.null_count or len(lengths) != 1 or not lengths[0] or is_other:
                raise DataError(
                    f"The features in {name!r} of {self.place} differ in length or are empty: expected one list of "
                    "numbers for each image, all of one length."
                )
            with np.errstate(over="ignore"):  # values too large for float32 become infinite, which raises below
                values = batch.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(batch), -1)
            if not done:
                features = np.empty((self.count, values.shape[1]), dtype=np.float32)
            features[done : done + len(values)] = self._finite(name, values, done)
            done += len(values)
        return features

    def feature_column(self) -> str | None:
        """Return the name of the feature column, or None if there is none.

        Raises:
            DataError: There are several feature columns.
        """
        names = self.schema.names  # lists written by `predict.py` are not features
        others = {"probabilities", *(["values"] if "labels" in names else [])}
        fields = [field for field in self.schema if field.name not in others]
        fitting = [field.name for field in fields if _is_list(field.type) and not _is_texts(field.type)]
        if "feature" in fitting or len(fitting) == 1:
            return "feature" if "feature" in fitting else fitting[0]
        if fitting:
            raise DataError(f"{self.place} has several columns of features, {listed(fitting)}: give one with --column.")
        return None


def _opened(file: Path) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as a parquet file: {error}") from error


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_texts(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)


def _is_vector(kind: pa.DataType) -> bool:
    return _is_list(kind) and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


def read_images(shards: Shards, *, column: str | None = None, label_column: str | None = None) -> Images:
    """Read the images of parquet files.

    Args:
        shards: The files.
        column: The column of features (default: `feature`, or the only one).
        label_column: The column of true labels (default: `true_label`, or `label` if there is no `probability`).

    Raises:
        DataError: A column is missing or has another type, or there are too many images.
    """
    if shards.count > MOST_IMAGES:
        raise DataError(
            f"{shards.place} has {shards.count} images, and a page shows at most {MOST_IMAGES}: give a folder with "
            "some of its shards."
        )
    names = shards.schema.names
    if label_column is not None and label_column not in names:
        raise DataError(f"{shards.place} has no column {label_column!r}, only {listed(names)}: correct --label-column.")
    are_predictions = PROBABILITY in names and PREDICTED in names
    label_column = label_column or next(
        (name for name in (TRUE, *(() if are_predictions else (PREDICTED,))) if name in names), None
    )
    column = column or shards.feature_column()
    features = None if column is None else shards.vectors(column)
    if features is None and not are_predictions:
        raise DataError(f"{shards.place} has neither features nor predictions, only {listed(names)}.")
    paths = shards.texts("path")
    return Images(
        shards.count,
        shards.numbers("row", np.int64),
        [None] * shards.count if paths is None else paths,
        features,
        shards.texts(PREDICTED) if are_predictions else None,
        shards.numbers(PROBABILITY, np.float32) if are_predictions else None,
        None if label_column is None else shards.labels(label_column),
    )


def with_predictions(images: Images, shards: Shards, settings: Mapping[str, Any]) -> Images:
    """Add the predictions of another run over the same data to images, joined by `row`.

    Args:
        images: The images.
        shards: The predictions.
        settings: Settings of the run that wrote the images, if known.

    Raises:
        DataError: The predictions are for other images.
    """
    others = read_images(shards)
    if others.predicted is None:
        raise DataError(f"{shards.place} has no predictions: expected the columns label and probability.")
    what = f"The predictions in {shards.place} are of other images"
    if differing := other_images(settings, shards.settings, as_many=images.count == others.count):
        raise DataError(f"{what}: {differing}. Give those of the same data.")
    order = places_of(images, others.rows, f"the predictions in {shards.place}")
    others = others.in_order(order)
    for one, other in zip(images.paths, others.paths, strict=True):
        if one is not None and other is not None and one != other:
            raise DataError(f"{what}: {other!r} has the row of {one!r}.")
    return replace(images, predicted=others.predicted, probability=others.probability, true=images.true or others.true)


def other_images(settings: Mapping[str, Any], others: Mapping[str, Any], *, as_many: bool) -> str:
    """Describe how the images of two runs differ according to their settings; empty if they do not.

    Equal contents mean the same images, wherever they are stored. Settings that only one run records (the contents of
    a stream, a default) are not compared.

    Args:
        settings: Settings of one run.
        others: Settings of the other run.
        as_many: Whether both runs have equally many images.
    """
    contents = settings.get("contents"), others.get("contents")
    if None not in contents and contents[0] == contents[1]:
        return ""
    known = [name for name in OF_IMAGES if settings.get(name) is not None and others.get(name) is not None]
    named = [name for name in known if settings[name] != others[name]]
    if None in contents and not as_many and not named and not may_be_one_split(settings, others):
        named = ["split"]
    differing = ", ".join(f"{name} {others[name]!r}, expected {settings[name]!r}" for name in named)
    return differing or ("" if None in contents else "files of other contents")


def may_be_one_split(settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether two runs may have used one split; the default is `train`, or the only split of a dataset."""
    if "split" not in settings or "split" not in others:
        return True
    splits = {settings["split"], others["split"]}
    return len(splits) == 1 or splits == {None, "train"}


def with_model_classes(images: Images, shards: Shards, labels_by: str) -> Images:
    """Map the true labels of images to the model's classes, by the rules of an evaluation.

    Args:
        images: The images.
        shards: The predictions.
        labels_by: Whether to match the classes of data and model by `name` or `number`; `none` omits the labels.

    Raises:
        DataError: The model lacks classes of the data, or the model's classes are not known.
    """
    if labels_by == "none":
        return replace(images, true=None)
    true, classes = images.true, shards.classes
    if true is None or images.predicted is None:
        if labels_by == "number":
            raise DataError("--labels_by matches true labels with predictions: give both, or omit it.")
        return images
    if classes is None:
        if labels_by == "number" or (true.are_numbers and not {*true.classes} <= {*images.predicted}):
            raise DataError(
                f"The true labels are matched by number, or are numbers without names, and {shards.place} does not say "
                "the model's classes: give the output folder of predict.py, or labels that are names, or leave them "
                "out, with --labels_by none."
            )
        return images
    if labels_by == "number" and true.are_numbers:
        numbers = [int(name) for name in true.classes]
        if wrong := [number for number in numbers if not 0 <= number < len(classes)]:
            raise DataError(
                f"True labels are {listed(wrong)}, and the model has the classes 0 to {len(classes) - 1}: give the "
                "data that it was trained for, or leave the labels out, with --labels_by none."
            )
    else:
        try:
            numbers = matching_classes(classes, list(true.classes), labels_by=labels_by)
        except DataError as error:
            raise DataError(f"{error} Or leave the true labels out, with --labels_by none.") from error
    return replace(images, true=true.renumbered(numbers, classes))


def places_of(images: Images, rows: np.ndarray | None, what: str) -> np.ndarray:
    """Return the position of each image's row among other rows.

    Args:
        images: The images.
        rows: The other rows.
        what: What the other rows belong to, for the error message.

    Raises:
        DataError: Either side has no row numbers or duplicate ones, or a row is missing.
    """
    if images.rows is None or rows is None:
        raise DataError(f"The images and {what} cannot be joined: both need a column `row`.")
    places = {int(row): place for place, row in enumerate(rows)}
    if len(places) < len(rows) or len(set(images.rows.tolist())) < images.count:
        raise DataError(
            f"The images and {what} cannot be joined: a number in `row` occurs twice, as in the output for a stream."
        )
    if missing := [row for row in images.rows.tolist() if row not in places]:
        raise DataError(f"{len(missing)} images are not among {what}, first row {missing[0]}: give those of one split.")
    return np.asarray([places[row] for row in images.rows.tolist()])
