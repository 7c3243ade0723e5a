"""Features and predictions as callables of a batch, for other engines: `datasets`, Ray, Spark, joblib, scikit-learn.

A callable holds its settings and the path of a checkpoint, so it travels to workers in some hundred bytes. A worker
opens the model when the first batch arrives, once in each process however many copies of the callable arrive.
"""

import copy
import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args, get_type_hints

import numpy as np
import PIL.Image
import torch

from ..conversion import from_checkpoint
from ..errors import DataError, TrainingError, counted, did_you_mean, few, listed
from ..files.other_files import is_exported
from ..modeling_plain_vit import PlainViTForImageClassification
from ..system.calls import keep_freed_memory
from ..system.extras import needs
from ..training.arguments import Count, Group
from ..training.data.decoding import BLANK
from .batches import read_batch
from .columns import (
    Columns,
    as_columns,
    check_features,
    check_outputs,
    features_of,
    predictions_of,
    table_of,
    with_columns,
)
from .engine_models import EngineModel, open_with_processor
from .prepare import prepare_for_inference

with needs("plain-vit[train]"):
    import pandas as pd
    import pyarrow as pa
    from sklearn.base import BaseEstimator, TransformerMixin

MOST_OPEN = 4  # models that a process keeps open
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IMPORTED_IN = os.getpid()


class Opened(NamedTuple):
    """A model that is ready for inference, and its image processor."""

    model: Any
    image_processor: Any


OPENED: dict[tuple[object, ...], Opened] = {}  # in this process


@dataclass(kw_only=True, eq=False, repr=False)
class BatchCallable(BaseEstimator, ABC):
    """A model that adds columns to batches of images."""

    model: Any = field(kw_only=False)
    image_column: str | None = None
    keep: Sequence[str] | None = None
    prefix: str = ""
    batch_size: Count = 32
    corrupted: Literal["stop", "skip"] = "stop"
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    engine: Literal["torch", "openvino", "onnx"] = "torch"
    device: Any = None
    model_hints: Mapping[str, Any] | None = None
    image_processor: Any = None

    def __post_init__(self) -> None:
        """Refuse unknown choices, and options that a model which is already open would not use.

        Raises:
            TrainingError: An option is out of range, or has no effect.
        """
        Group.__post_init__(cast(Any, self))
        for name, hint in get_type_hints(type(self)).items():
            choices, value = get_args(hint), getattr(self, name)
            if getattr(hint, "__origin__", None) is Literal and value not in choices:
                near = did_you_mean(str(value), choices)
                raise TrainingError(f"{name} is {value!r}: expected {' or '.join(map(repr, choices))}{near}")
        if not self._is_path:
            idle = [name for name in ("mixed_precision", "engine", "device", "model_hints") if self._is_set(name)]
            if idle:
                raise TrainingError(
                    f"{listed(idle)}: a model that is open computes as it is. Give its path, or omit them."
                )
            if self.image_processor is None:
                raise TrainingError("The model is open, but its image processor is missing: give image_processor.")
            if self.model.training:
                raise TrainingError("The model is in training mode: call model.eval() first.")

    @property
    def _is_path(self) -> bool:
        return isinstance(self.model, str | os.PathLike)

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings by name, also in a subclass with another signature, as Ray makes it."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the stamp of the model's files, so that a hash of this changes with them."""
        return {**self.get_params(deep=False), "_stamp": stamp_of(self.model) if self._is_path else None}

    def opened(self) -> Opened:
        """Return the model, ready for inference, and its image processor; open them on the first call.

        Raises:
            TrainingError: The model does not have these outputs.
            CheckpointError: The checkpoint cannot be opened.
        """
        asked = os.getpid(), self.get_params(deep=False)
        held: tuple[object, Opened] | None = vars(self).get("_held")
        if held is None or held[0] != asked:
            self.__post_init__()
            if os.getpid() != IMPORTED_IN:
                torch.set_num_threads(1)  # the other threads of torch's pool stayed in the process that forked this one
            self._held = held = asked, self._open()
        return held[1]

    def _open(self) -> Opened:
        if not self._is_path:
            self.check(self, self.model)
            return Opened(self.part_of(self.model), self.image_processor)
        device = torch.device(self.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
        own = self.image_processor is None
        key = (
            os.getpid(), own, str(self.model), stamp_of(self.model), repr(self.model_hints), self.engine,
            self.mixed_precision, self.batch_size, str(device), self.part_of,
        )  # fmt: skip
        if key not in OPENED:
            if device.type == "cpu":
                keep_freed_memory()
            model, image_processor = open_model(self, self.model_hints or {}, needs_processor=own)
            self.check(self, model)
            while len(OPENED) >= MOST_OPEN:
                del OPENED[next(iter(OPENED))]
            OPENED[key] = Opened(prepared(self.part_of(model), self, device), image_processor)
        found = OPENED[key]
        self.check(self, found.model)
        return found if own else found._replace(image_processor=self.image_processor)

    # What the two kinds differ in.

    made: ClassVar[str]  # what the columns are

    @staticmethod
    @abstractmethod
    def check(options: Any, model: Any) -> None:
        """Refuse a model that does not have the outputs.

        Args:
            options: The callable, or options of a script with the same names.
            model: From `open_model`.
        """

    @staticmethod
    @abstractmethod
    def part_of(model: Any) -> Any:
        """Return the part of a model that computes the outputs."""

    @abstractmethod
    def outputs(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Columns:
        """Return the columns of the images in a batch."""

    # Batches.

    def columns(self, inputs: Mapping[str, torch.Tensor] | None) -> Columns:
        """Return the columns of a batch; for a batch without a readable image, empty columns of the same types.

        Args:
            inputs: Outputs of the image processor.
        """
        model, image_processor = self.opened()
        shown = dict(image_processor([BLANK], return_tensors="pt")) if inputs is None else inputs
        with torch.no_grad():
            found = self.outputs(
                model, {name: values.to(model.device, non_blocking=True) for name, values in shown.items()}
            )
        columns = {self.prefix + name: values for name, values in found.items()}
        return columns if inputs is not None else {name: values.slice(1) for name, values in columns.items()}

    def table(self, images: Sequence[Any]) -> tuple[pa.Table, list[str]]:
        """Return the `row`, `path` and columns of each image that can be read, and which cannot and why.

        Args:
            images: Images, arrays (H, W) or (H, W, 3) of uint8, bytes or paths of files, or dicts of these two.

        Raises:
            TrainingError: A feature or prediction is not a finite number.
        """
        image_processor, done = self.opened().image_processor, []
        settings = {name: getattr(self, name) for name in ("mixed_precision", "dtype") if hasattr(self, name)}
        for begin in range(0, len(images), self.batch_size) or [0]:
            piece = images[begin : begin + self.batch_size]
            batch = read_batch(image_processor, dict(enumerate(piece, begin)))
            done.append(with_columns(batch, self.columns(batch.pop("inputs")), settings))
        return table_of(done), [broken for batch in done for broken in batch["broken"]]

    def __call__(self, batch: Any) -> Any:
        """Return a batch with columns added.

        Args:
            batch: A dict of lists or arrays, a pyarrow Table or RecordBatch, or a pandas DataFrame, which is returned
                with more columns; a list of rows, or of images, which becomes a dict; or an iterator over batches.

        Raises:
            DataError: The column of images is not clear, a column would be overwritten, or an image cannot be read.
            TrainingError: A feature or prediction is not a finite number.
        """
        if isinstance(batch, Iterator):
            return map(self, batch)
        batch, has_names = named(batch)
        columns, rows = self._added(batch)
        names = [*columns_in(batch)] if self.keep is None else [*self.keep]
        names = names if has_names else []
        if missing := [name for name in names if name not in columns_in(batch)]:
            raise DataError(f"keep names {listed(missing)}, but the columns are {listed([*columns_in(batch)])}.")
        if taken := [name for name in columns if name in names]:
            raise DataError(
                f'The batch already has the column {listed(taken)}: give a prefix, such as prefix="predicted_", or the '
                "columns to keep."
            )
        return extended(batch, names, columns, rows)

    def _added(self, batch: Any) -> tuple[Columns, list[int] | None]:
        """Return the columns to add, and the rows that are left, or None for all."""
        images = images_in(batch, self.image_column)
        table, broken = self.table(images)
        if broken and self.corrupted == "stop":
            raise DataError(f'An image cannot be read: {broken[0]}. Repair it, or leave it out with corrupted="skip".')
        if broken:
            warnings.warn(f"{counted(len(broken), 'image')} left out, unreadable: {few(broken)}", stacklevel=3)
        columns = {name: table[name].combine_chunks() for name in table.column_names if name not in ("row", "path")}
        return columns, table["row"].to_pylist() if broken else None


@dataclass(kw_only=True, eq=False, repr=False)
class FeatureExtractor(TransformerMixin, BatchCallable):
    """Add the features of images to batches, as `plain-vit embed` and `examples/extract_features.py` compute them.

    The extractor pickles to less than a kilobyte, and each process opens the model once, on the first batch. It is a
    stateless transformer of scikit-learn, too.

    Args:
        model: Path or Hub id of anything that `plain-vit convert` opens, or an exported folder; or an open model.
        feature: `pooled` (what a classifier reads), `cls`, `mean` (of the patches), `cls_mean`, or `patches` (a grid).
        layers: Blocks, from 1, whose outputs are used (default: the last, after its norm).
        dtype: Dtype of the features.
        image_column: Column of images (default: `image`, or the only one that holds images).
        keep: Columns of the batch to return beside the new ones (default: all).
        prefix: Put before the names of the new columns.
        batch_size: Images in a forward pass.
        corrupted: `stop` with an error at an image that cannot be read, or `skip` its row.
        mixed_precision: Precision of the forward pass.
        engine: What computes, on a CPU; an exported folder has its own.
        device: Where the model computes (default: an accelerator if there is one).
        model_hints: Settings that another library's checkpoint lacks, as for `from_checkpoint`.
        image_processor: Image processor of an open model, or to use instead of the checkpoint's own.

    Raises:
        TrainingError: An option is out of range, or the model does not have these features.
    """

    feature: Literal["pooled", "cls", "mean", "cls_mean", "patches"] = field(default="pooled", kw_only=False)
    layers: Sequence[int] = ()
    dtype: Literal["float32", "float16"] = "float32"

    made = "features"

    @staticmethod
    def check(options: Any, model: Any) -> None:
        """Refuse a model without these features."""
        check_features(model.config, options.feature, options.layers)
        check_outputs(model, options.layers, options.engine)

    @staticmethod
    def part_of(model: Any) -> Any:
        """Return the model without its head."""
        return model.base_model

    def outputs(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Columns:
        """Return the features of a batch as columns of lists."""
        features = features_of(model, inputs, kind=self.feature, layers=self.layers)
        return as_columns({name: values.to(getattr(torch, self.dtype)) for name, values in features.items()})

    def fit(self, X: Any = None, y: Any = None) -> "FeatureExtractor":
        """Return the extractor: the model is trained already."""
        return self

    def __sklearn_is_fitted__(self) -> bool:
        """Return True, for scikit-learn."""
        return True

    def transform(self, X: Any) -> np.ndarray:
        """Return the features of images, shape (B, D), for a scikit-learn `Pipeline`.

        Args:
            X: Images, in a list or an array, or a batch as for a call.
        """
        columns, _ = self._added(named(X)[0])
        return np.concatenate([array_of(values).reshape(len(values), -1) for values in columns.values()], axis=1)


@dataclass(kw_only=True, eq=False, repr=False)
class Predictor(BatchCallable):
    """Add predictions to batches: `label`, `probability`, and `labels` and `probabilities` of the likeliest classes.

    A regression adds `labels`, the names of its numbers, and `values`. With `prefix="predicted_"`, the true labels in a
    column `label` stay.

    Args:
        model: As for `FeatureExtractor`, and so are the arguments that are not listed here.
        top: Number of classes in the lists, at most all.

    Raises:
        TrainingError: An option is out of range, or the model has no classifier.
    """

    top: Count = 5

    made = "predictions"

    @staticmethod
    def check(options: Any, model: Any) -> None:
        """Refuse a model without a classifier."""
        if not isinstance(model, PlainViTForImageClassification):
            name = options.model if isinstance(options.model, str | os.PathLike) else f"The {type(model).__name__}"
            raise TrainingError(f"{name} has no classifier: give a fine-tuned model, or extract features.")

    @staticmethod
    def part_of(model: Any) -> Any:
        """Return the whole model."""
        return model

    def outputs(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Columns:
        """Return the likeliest classes of a batch, or the numbers of a regression."""
        return predictions_of(model, inputs, top=self.top)


# Forms of batches


def named(batch: Any) -> tuple[Any, bool]:
    """Return a batch with named columns, and whether its columns had names.

    Raises:
        DataError: The batch has another form.
    """
    if isinstance(batch, Mapping | pa.Table | pa.RecordBatch | pd.DataFrame):
        return batch, True
    if isinstance(batch, pd.Series | pa.Array | pa.ChunkedArray):
        return {"image": batch}, False
    if not isinstance(batch, list | tuple | np.ndarray):
        raise DataError(
            f"The batch is a {type(batch).__name__}: expected a dict of columns, a pyarrow Table or RecordBatch, a "
            "pandas DataFrame, or a list or array of images."
        )
    rows = len(batch) > 0 and isinstance(batch[0], Mapping) and not batch[0].keys() & {"bytes", "path"}
    return ({name: [row[name] for row in batch] for name in batch[0]}, True) if rows else ({"image": batch}, False)


def columns_in(batch: Any) -> Sequence[str]:
    """Return the names of the columns of a batch."""
    return batch.schema.names if isinstance(batch, pa.Table | pa.RecordBatch) else [*batch]


def images_in(batch: Any, column: str | None) -> Sequence[Any]:
    """Return the images of a batch.

    Args:
        batch: A batch with named columns.
        column: The column of images, if it is not the only one.

    Raises:
        DataError: There is no such column, or none or several hold images.
    """
    names = columns_in(batch)
    shown = copy.copy(batch) if isinstance(batch, Mapping) else batch  # `datasets` encodes again what was read
    if column is not None and column not in names:
        raise DataError(f"The batch has no column {column!r}, only {listed([*names])}: correct image_column.")
    if column is None and names and not len(values_in(shown[names[0]])):
        return []  # any column will do
    if column is None:
        fitting = ["image"] if "image" in names else [name for name in names if holds_images(values_in(shown[name]))]
        if len(fitting) != 1 and len(names) != 1:
            found = f"{listed(fitting)} hold" if fitting else "none holds"
            raise DataError(f"Of the columns {listed([*names])}, {found} images: give image_column.")
        column = (fitting or names)[0]
    return values_in(shown[column])


def values_in(column: Any) -> Sequence[Any]:
    """Return the values of a column of any form, in Python's types and numpy's."""
    if isinstance(column, pd.Series):
        return column.tolist()
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if not isinstance(column.type, pa.BaseExtensionType):
        return column.to_pylist()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]  # tensors
    return [
        each
        for chunk in chunks
        for each in (chunk.to_numpy_ndarray() if hasattr(chunk, "to_numpy_ndarray") else chunk.to_numpy(False))
    ]


def holds_images(values: Sequence[Any]) -> bool:
    """Return whether the first value that is not missing is an image; a text may be the path of one or not."""
    first = next((value for value in values if value is not None), None)
    if isinstance(first, np.ndarray):
        return first.ndim > 1
    has_bytes = isinstance(first, Mapping) and "bytes" in first
    return has_bytes or isinstance(first, PIL.Image.Image | bytes | bytearray | memoryview)


def extended(batch: Any, names: Sequence[str], columns: Columns, rows: list[int] | None) -> Any:
    """Return a batch with these columns of its own and new ones, in the same form.

    Args:
        batch: A batch with named columns.
        names: Its columns to keep.
        columns: The new ones.
        rows: The rows to keep, which the new columns have; None for all.
    """
    if isinstance(batch, pa.Table | pa.RecordBatch):
        kept = batch.select(list(names)) if rows is None else batch.select(list(names)).take(pa.array(rows, pa.int64()))
        for name, values in columns.items():
            of_spark = isinstance(batch, pa.RecordBatch)  # which reads no lists of fixed size
            kept = kept.append_column(name, values.cast(with_plain_lists(values.type)) if of_spark else values)
        return kept
    if isinstance(batch, pd.DataFrame):
        kept = batch[list(names)] if rows is None else batch[list(names)].iloc[rows]
        return kept.assign(**{name: values.to_pandas().set_axis(kept.index) for name, values in columns.items()})
    kept = copy.copy(batch)
    for name in columns_in(batch):
        if name not in names:
            del kept[name]
        elif rows is not None:
            values = kept[name]
            kept[name] = values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
    kept.update({name: array_of(values) for name, values in columns.items()})
    return kept


def with_plain_lists(kind: pa.DataType) -> pa.DataType:
    """Return a type with lists of any length in place of those of one length."""
    return pa.list_(with_plain_lists(kind.value_type)) if hasattr(kind, "value_type") else kind


def array_of(values: pa.Array) -> np.ndarray:
    """Return a column of numbers, texts or lists of equal lengths as an array."""
    shape = [len(values)]
    while isinstance(values, pa.FixedSizeListArray | pa.ListArray):
        inner = values.flatten()
        shape.append(getattr(values.type, "list_size", None) or len(inner) // max(len(values), 1))
        values = inner
    return values.to_numpy(zero_copy_only=False).reshape(shape)


# Models


def open_model(options: Any, hints: Mapping[str, Any], *, needs_processor: bool = True) -> tuple[Any, Any]:
    """Open a checkpoint as our model, in float32, with its image processor; or a folder exported to an engine.

    Args:
        options: `BulkOptions` or a callable: `model`, `engine`, `mixed_precision` and `batch_size`.
        hints: Arguments of `from_checkpoint`.
        needs_processor: Whether the image processor has to be the checkpoint's own.

    Raises:
        TrainingError: The checkpoint has no image processor, or an option does not apply to an exported folder.
    """
    if is_exported(options.model):
        if hints or options.engine != "torch":
            raise TrainingError(f"{options.model} was exported to an engine: give neither --model_hints nor --engine.")
        return open_with_processor(options.model, dtype=DTYPES[options.mixed_precision], batch_size=options.batch_size)
    converted = from_checkpoint(options.model, **hints)
    if converted.image_processor is None and needs_processor:
        raise TrainingError(f"{options.model} has no image processor: convert it first, with its mean and deviation.")
    return converted.model.float(), converted.image_processor


def prepared(model: Any, options: Any, device: torch.device) -> Any:
    """Prepare a model for inference on a device or in an engine, in the chosen precision.

    Args:
        model: From `open_model`.
        options: As for `open_model`.
        device: Where torch computes.
    """
    if isinstance(model, EngineModel):
        return model
    if options.engine == "torch":
        model = model.to(device)
    dtype = DTYPES[options.mixed_precision]
    return prepare_for_inference(model, dtype=dtype, batch_size=options.batch_size, engine=options.engine)


def stamp_of(model: str | os.PathLike[str]) -> str:
    """Return a hash of the sizes and times of the files of a checkpoint; empty for one on the Hub."""
    path = Path(model)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path] * path.is_file()
    states = [(file.as_posix(), *((state := file.stat()).st_size, state.st_mtime_ns)) for file in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16] if states else ""
