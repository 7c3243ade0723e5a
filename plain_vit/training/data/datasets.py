"""Image classification datasets: opening, columns, validation and splits."""

import glob
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import DatasetCard, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from yaml import YAMLError

from ...errors import DataError, PlainViTError, counted, did_you_mean, few, listed
from ...files.staging import full_disk
from ...system.extras import needs
from .benchmarks import BENCHMARKS, Benchmark
from .decoding import RefusedImages, as_files
from .folders import ENDINGS, Opened, names_files, open_files, open_folder, split_name
from .glyphs import CHARACTERS, render_glyphs
from .idx import dataset_of_pixels, holds_idx, load_idx
from .layout import ALL, NAMES_OF
from .splits import carve, choose_shots, some_rows
from .targets import check_evaluated, label_type_error, whole_numbers, with_vectors

with needs("plain-vit[train]"):
    import fsspec
    from datasets import (
        ClassLabel,
        Dataset,
        DatasetDict,
        Features,
        Image,
        IterableDataset,
        IterableDatasetDict,
        SplitDict,
        SplitInfo,
        Value,
        concatenate_datasets,
        config,
        load_dataset,
        load_from_disk,
    )
    from datasets.exceptions import DatasetNotFoundError
    from datasets.naming import camelcase_to_snakecase
    from pyarrow import parquet
    from sklearn.datasets import load_digits as load_scikit_learn_digits
    from sklearn.model_selection import train_test_split


FILE_SUFFIXES = frozenset({".parquet", ".tar", ".zip", ".gz", ".csv", ".json", ".jsonl", ".arrow", ".txt", ".npz"})
HUB_SECONDS = 10.0  # how long to wait for an answer
GLYPHS_PER_CLASS = {"train": 1000, "test": 100}
SHARDS = 16  # number of shards when a stored dataset is streamed
# Names that make a column of numbers or strings the label column; webdataset shards use `cls`.
LABEL_NAMES = frozenset({"label", "labels", "class", "classes", "class_name", "cls", "target", "category"})
LABEL_TYPES = frozenset(
    {"string", "large_string", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
)
CONVERTED_TYPES = frozenset({"bool", "float32", "float64"})  # accepted if no column has one of the types above
VALIDATION_NAMES = ("validation", "valid", "val", "dev")


def load_digits() -> DatasetDict:
    """Return scikit-learn's 1,797 handwritten digits of 8 by 8 pixels; a stratified fifth is held out."""
    digits = load_scikit_learn_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # 17 grey levels to 8 bits
    train, test = train_test_split(
        np.arange(len(pixels)), test_size=0.2, stratify=digits.target, shuffle=True, random_state=0
    )
    names = [str(digit) for digit in range(10)]
    return DatasetDict(
        train=dataset_of_pixels(pixels[train], digits.target[train], names),
        test=dataset_of_pixels(pixels[test], digits.target[test], names),
    )


def load_glyphs() -> DatasetDict:
    """Return rendered digits and capital letters of 24 by 24 pixels: 1,000 of each for training, 100 held out."""
    names = list(CHARACTERS)
    return DatasetDict(
        {
            split: dataset_of_pixels(*render_glyphs(count * len(names), seed=seed), names)
            for seed, (split, count) in enumerate(GLYPHS_PER_CLASS.items())
        }
    )


EMBEDDED: dict[str, Callable[[], DatasetDict]] = {"digits": load_digits, "glyphs": load_glyphs}


def load_splits(
    name: str,
    *,
    subset: str | None = None,
    streaming: bool = False,
    chosen: Sequence[str] = (),
    option: str = "--train_split",
) -> DatasetDict | IterableDatasetDict:
    """Open a built-in dataset, a local one, or one from the Hub.

    Args:
        name: one of `EMBEDDED`; a folder with one sub-folder per class (or per split, and per class in each); a
            parquet file; a folder of parquet files or webdataset shards, named after their splits; a folder written by
            `save_to_disk`; a pattern of files such as `images/*.jpg`, or a URL such as `s3://bucket/images` of files or
            of a folder, without labels; a folder with the four IDX files of a dataset like MNIST; one of `BENCHMARKS`,
            read from its package if that is installed; or a dataset on the Hub.
        subset: the configuration, of a dataset on the Hub (or a clone of it) that has several.
        streaming: stream the rows instead of storing them first.
        chosen: requested splits of a folder of files: folders in it, or `all`; see `layout.py`.
        option: the script's option that requests a split, for messages.

    Returns:
        The splits by name.

    Raises:
        DataError: The dataset does not exist or cannot be opened.
    """
    path = Path(name)
    if "://" in name or (names_files(name) and not path.exists()) or (path.is_file() and path.suffix == ".tar"):
        if subset is not None:
            raise DataError(f"{name} has no subset {subset!r}: omit --dataset_subset.")
        with _explained(name):
            opened = open_files(name)
            return (
                _built(opened, streaming)
                if opened.rows is None
                else _streamed(opened.rows)
                if streaming
                else opened.rows
            )
    if subset is not None and (name in EMBEDDED or path.is_file()):
        raise DataError(f"{name} has no subset {subset!r}: omit --dataset_subset.")
    if name in EMBEDDED:
        return _streamed(EMBEDDED[name]()) if streaming else EMBEDDED[name]()
    if path.is_dir():
        with _explained(name):
            return _load_folder(path, subset, streaming, chosen, option)
    if path.is_file():
        if path.suffix == ".parquet":
            with _explained(name):
                splits = load_dataset("parquet", data_files={"train": name}, streaming=streaming)
                return _with_sizes(splits, {"train": _parquet_rows(name)}) if streaming else splits
        raise DataError(f"The file {name} is not a dataset: expected a .parquet file or a folder.")
    if not _may_be_of_hub(name):
        raise DataError(f"There is no file or folder {name}: correct the path.")
    known = BENCHMARKS.get(name, Benchmark(name))
    if known.package is not None and subset is None and Path(known.package.folder).is_dir():
        packaged = load_idx(Path(known.package.folder), known.package.label_names)
        return _streamed(packaged) if streaming else packaged
    _ask_hub(known)
    try:
        return load_dataset(known.repository, subset, streaming=streaming)
    except DatasetNotFoundError as error:
        raise DataError(f"The Hub has no readable dataset {name!r}: {error}. {_what_opens(known)}") from error
    except (ConnectionError, OSError) as error:
        raise DataError(_unreachable(name, error, known)) from error
    except ValueError as error:  # an unknown subset, a repository without data files
        raise DataError(f"The Hub dataset {name!r} cannot be opened: {error}") from error


def _may_be_of_hub(name: str) -> bool:
    """Return whether a name that is not a path can be a dataset on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    suffix = Path(name).suffix.lower()
    return not name.startswith(".") and suffix not in FILE_SUFFIXES and suffix not in ENDINGS


def _ask_hub(known: Benchmark) -> None:
    """Check once that the Hub has a dataset: if the Hub is down, `datasets` would retry for half a minute.

    Raises:
        DataError: The dataset does not exist, or it is not cached and the Hub does not answer.
    """
    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().dataset_info(known.repository, timeout=HUB_SECONDS)
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 404):
            raise DataError(
                f"There is no file or folder {known.repository}, and the Hub has no dataset of this name that you may "
                f"read: correct the name, or run `hf auth login` if it is private. {_what_opens(known)}"
            ) from error
        *owner, dataset = known.repository.split("/")
        if not Path(config.HF_DATASETS_CACHE, "___".join([*owner, camelcase_to_snakecase(dataset)])).is_dir():
            raise DataError(_unreachable(known.repository, error, known)) from error


def _unreachable(name: str, error: Exception, known: Benchmark) -> str:
    [reason, *_] = str(error).splitlines() or [type(error).__name__]
    return f"The dataset {name!r} is not cached and the Hub cannot be reached: {reason}. {_what_opens(known)}"


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Add the dataset's name to errors from reading it, or from a disk that cannot hold its cache."""
    try:
        yield
    except PlainViTError:
        raise
    except Exception as error:
        if (full := full_disk(Path(name), error)) is not None:
            raise full from error
        advice = (
            "Correct the URL, or give its file system the credentials and the endpoint"
            if "://" in name
            else "Write it again if a file is damaged; a split without rows cannot be read either: remove it"
        )
        raise DataError(f"{name} cannot be read: {type(error).__name__}: {error}. {advice}.") from error


def _what_opens(known: Benchmark) -> str:
    if known.package is not None:
        return (
            f"Install the package {known.package.name} of Debian, which contains it: `apt-get install "
            f"{known.package.name}`. It is read from {known.package.folder}."
        )
    is_short = known in BENCHMARKS.values()
    near = "." if is_short else did_you_mean(known.repository, [*EMBEDDED, *BENCHMARKS]) or "."
    return f"Available offline: {', '.join(EMBEDDED)}, image folders, parquet files, folders of save_to_disk{near}"


def _load_folder(
    path: Path, subset: str | None, streaming: bool, chosen: Sequence[str], option: str
) -> DatasetDict | IterableDatasetDict:
    configs = _configs_of_card(path)
    if configs:
        folder = _folder_of_config(path, configs, subset)
        if folder is not None:
            return _load_files(folder, streaming, chosen, option)
        try:
            return load_dataset(str(path.resolve()), subset, streaming=streaming)
        except ValueError as error:  # the subset is unknown, or none was chosen of several
            raise DataError(f"{path} cannot be opened: {error} Choose with --dataset_subset.") from error
        except OSError as error:  # a file named by the card is missing
            raise DataError(f"{path} cannot be opened: {error}") from error
    if subset is not None:
        raise DataError(f"{path} has no subset {subset!r}, as its README.md names none: omit --dataset_subset.")
    return _load_files(path, streaming, chosen, option)


def _load_files(path: Path, streaming: bool, chosen: Sequence[str], option: str) -> DatasetDict | IterableDatasetDict:
    """Open a folder that has no card, or whose card does not list its files."""
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = load_from_disk(str(path))
        saved = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        return _streamed(saved) if streaming else saved
    if holds_idx(path):
        return _streamed(load_idx(path)) if streaming else load_idx(path)
    opened = open_folder(path, chosen, option)
    if opened.rows is not None:
        return _streamed(opened.rows) if streaming else opened.rows
    if opened.builder is not None:
        return _built(opened, streaming)
    raise DataError(
        f"The folder {path} holds no dataset: expected one sub-folder of images per class, parquet files, webdataset "
        "shards (.tar), IDX files such as train-images-idx3-ubyte.gz, or the output of Dataset.save_to_disk."
    )


def _built(opened: Opened, streaming: bool) -> DatasetDict | IterableDatasetDict:
    """Read files with a builder of `datasets`; warn about images missing from the metadata beside them."""
    keys = {name: name if name in NAMES_OF else f"split_{number}" for number, name in enumerate(opened.files)}
    patterns = {keys[name]: [glob.escape(file) for file in files] for name, files in opened.files.items()}
    has_archives = any(file.lower().endswith(".zip") for files in opened.files.values() for file in files)
    stores = not streaming or (opened.builder == "imagefolder" and not has_archives)  # metadata is short
    splits = load_dataset(opened.builder, data_files=patterns, streaming=not stores)
    splits = type(splits)({name: splits[key] for name, key in keys.items()})
    if stores:
        _warn_of_unlisted(opened.images, splits)
        return _streamed(splits) if streaming else splits
    if opened.builder != "parquet":
        return splits
    return _with_sizes(splits, {name: sum(map(_parquet_rows, files)) for name, files in opened.files.items()})


def _warn_of_unlisted(images: Sequence[str], splits: DatasetDict) -> None:
    """Warn about images that no row names."""
    named = set()
    for split in splits.values() if images else ():
        for column in (name for name, kind in split.features.items() if isinstance(kind, Image)):
            rows = split.select_columns([column]).cast_column(column, Image(decode=False))
            named |= {os.path.normpath(image["path"]) for image in rows[column][:] if image and image["path"]}
    if unlisted := [file for file in images if file not in named]:
        warnings.warn(
            f"{len(unlisted)} of {counted(len(images), 'image')} left out, as no metadata file beside them names them: "
            f"{few([*map(repr, unlisted)])}",
            stacklevel=2,
        )


def _configs_of_card(path: Path) -> list[dict[str, Any]]:
    """Return the `configs` in the card of a cloned dataset: the files of its subsets and splits."""
    try:
        return list(DatasetCard.load(path / "README.md", ignore_metadata_errors=True).data.get("configs") or [])
    except (OSError, ValueError, YAMLError):  # no card, or text between lines
        return []


def _folder_of_config(path: Path, configs: Sequence[dict[str, Any]], subset: str | None) -> Path | None:
    """Return the folder of a subset if that is all its card tells; `datasets` would guess the splits from names."""
    names = (subset,) if subset is not None else ("default", *(each.get("config_name") for each in configs[:1]))
    fitting = [each for each in configs if each.get("config_name") in names or (subset is None and each.get("default"))]
    if len(fitting) != 1 or (subset is None and len(configs) > 1 and fitting[0].get("config_name") != "default"):
        return None
    folder = path / str(fitting[0].get("data_dir") or "")
    says_more = fitting[0].keys() - {"config_name", "data_dir", "default"}
    return None if says_more or not folder.resolve().is_relative_to(path.resolve()) else folder


def _streamed(splits: DatasetDict) -> IterableDatasetDict:
    streams = {name: split.to_iterable_dataset(num_shards=min(len(split), SHARDS)) for name, split in splits.items()}
    return _with_sizes(IterableDatasetDict(streams), {name: len(split) for name, split in splits.items()})


def _with_sizes(streams: IterableDatasetDict, sizes: Mapping[str, int]) -> IterableDatasetDict:
    """Store the number of rows in each stream, where `_stream_size` looks for it."""
    for name, stream in streams.items():
        if not sizes[name]:
            raise DataError(f"The {name} split has no rows: remove it.")
        split = split_name(name)
        stream.info.splits = SplitDict({str(split): SplitInfo(str(split), num_examples=sizes[name])})
        stream._split = split
    return streams


def _parquet_rows(file: str) -> int:
    with fsspec.open(file) as opened:
        return int(parquet.read_metadata(opened).num_rows)


def find_columns(
    features: Features, *, image: str | None = None, label: str | None = None, single: bool = True
) -> tuple[str, str]:
    """Find the image and the label column by their types.

    Args:
        features: the columns of the dataset.
        image: the image column, if there are several.
        label: the label column, if there are several, or if the labels are plain numbers or strings.
        single: whether each image has one label; otherwise the column is found by its name.

    Returns:
        The names of the image column and of the label column.

    Raises:
        DataError: A given column is missing or has another type, or no column or several match by type.
    """
    image = _find_column(features, "image", image, Image)
    if label is None and not single:
        label = next((name for name in features if name.lower() in LABEL_NAMES), None)
    return image, _find_column(features, "label", label, ClassLabel)


def _is_stored_image(kind: Any) -> bool:
    """Return whether a column may hold image files as pandas and Spark write them: `{bytes, path}` or only bytes."""
    if isinstance(kind, dict):
        return {"bytes", "path"} == kind.keys()
    return getattr(kind, "dtype", None) in ("binary", "large_binary")


def _is_plain_label(kind: Any, types: frozenset[str] = LABEL_TYPES | CONVERTED_TYPES) -> bool:
    return isinstance(kind, Value) and kind.dtype in types


def _find_column(features: Features, role: str, asked: str | None, wanted: type) -> str:
    fitting = [name for name, kind in features.items() if isinstance(kind, wanted)]
    if not fitting and role == "image":
        fitting = [name for name, kind in features.items() if _is_stored_image(kind)]
    meant = [name for name in features if role == "label" and name.lower() in LABEL_NAMES]
    for types in (LABEL_TYPES, CONVERTED_TYPES):
        fitting = fitting or [name for name in meant if _is_plain_label(features[name], types)]
    columns = ", ".join(f"{name} ({_type_name(kind)})" for name, kind in features.items())
    option = f"--{role}_column"
    if asked is None:
        if len(fitting) == 1:
            return fitting[0]
        if role == "label" and set(features) == {"image"}:
            raise DataError(
                "The images have no labels: an image folder has the images of each class in a folder of their own, as "
                "train/CLASS/image.jpg, and no others beside them."
            )
        if len(meant) == 1 and not fitting:
            raise label_type_error(meant[0], features[meant[0]])
        if role == "label" and not fitting:
            raise DataError(
                f"No column of {columns} is of type ClassLabel, or has numbers or strings and one of the names "
                f"{', '.join(sorted(LABEL_NAMES))}: give one with --label_column."
            )
        found = "no column" if not fitting else f"{len(fitting)} columns, {' and '.join(fitting)},"
        which = f"of type {wanted.__name__}"
        if fitting and not isinstance(features[fitting[0]], wanted):
            which = "that may be meant,"
        raise DataError(f"Found {found} {which} among {columns}: give one with {option}.")
    if asked not in features:
        raise DataError(f"There is no column {asked!r}, only {columns}: correct {option}.")
    # Labels may also be numbers or strings, which are converted to classes.
    if role == "image" and not (asked in fitting or _is_stored_image(features[asked])):
        raise DataError(f"The column {asked!r} holds no images; the columns are {columns}: correct {option}.")
    return asked


def _type_name(kind: object) -> str:
    return getattr(kind, "dtype", None) if type(kind).__name__ == "Value" else type(kind).__name__  # type: ignore[return-value]


@dataclass(frozen=True)
class ImageClassificationData:
    """Labelled images, validated and split, with columns named `image` and `label`.

    Args:
        train: the training split; a stream yields undecoded files.
        validation: the split that selects the best epoch, or None.
        test: the held-out split, or None.
        label_names: the classes, in the order of their numbers.
        train_images: number of training images.
        unreadable: images that `without_unreadable` removed from the evaluated splits, and why.
        others: further sets of these classes to evaluate on at the end, by name.
    """

    train: Dataset | IterableDataset
    validation: Dataset | None
    test: Dataset | None
    label_names: list[str]
    train_images: int
    unreadable: Sequence[str] = ()
    others: Mapping[str, Dataset] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, Any]:
        """Return the existing splits by name, from the training split to the held-out split."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in splits.items() if split is not None}

    @property
    def watched(self) -> str:
        """Return the name of the split to evaluate during training; only `validation` may select weights."""
        return [*self.splits][1]

    @property
    def held_out(self) -> str:
        """Return the name of the split to evaluate at the end."""
        return [*self.splits][-1]


def load_classification_data(
    dataset: str,
    *,
    dataset_subset: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_split: str | None = None,
    validation_split: str | None = None,
    test_split: str | None = None,
    validation_fraction: float = 0.0,
    shots_per_class: int | None = None,
    max_images: int | None = None,
    label_names: str | None = None,
    problem_type: str = "single_label_classification",
    streaming: bool = False,
    stream_images: int | None = None,
    seed: int = 0,
) -> ImageClassificationData:
    """Open a dataset and prepare it for training.

    The columns and splits of `BENCHMARKS` are predefined, and can be overridden.

    Args:
        dataset: see `load_splits`.
        dataset_subset: see `load_splits`.
        image_column: see `find_columns`.
        label_column: see `find_columns`.
        train_split: the training split (default: `train`); combine several with `+`.
        validation_split: the split that selects the best epoch (default: `validation`, if there is one).
        test_split: the held-out split (default: `test`, if there is one).
        validation_fraction: fraction of the training split to split off for validation, stratified; in [0, 1).
        shots_per_class: number of training images per class; None keeps all.
        max_images: largest number of images of each split, drawn at random; None keeps all.
        label_names: a text file with one class per line, for labels that are plain numbers.
        problem_type: `single_label_classification`, or a problem of `with_vectors`.
        streaming: stream the training images; other splits are stored.
        stream_images: number of training images, if the stream does not know it.
        seed: seed of the random selections above.

    Returns:
        The splits, with all images converted to RGB.

    Raises:
        DataError: A split or column is unknown, a label is outside its classes, or there are fewer than two classes.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction is {validation_fraction}: expected at least 0 and less than 1.")
    if streaming and (validation_fraction or shots_per_class is not None or max_images is not None):
        raise DataError("A stream cannot be split: omit --validation_fraction, --shots_per_class and --max_images.")
    if known := _benchmark(dataset):
        image_column, label_column = image_column or known.image, label_column or known.label
        train_split, test_split = train_split or known.train, test_split or known.test
    asked = [*(train_split or "").split("+"), validation_split, test_split]
    splits = load_splits(dataset, subset=dataset_subset, streaming=streaming, chosen=[*filter(None, asked)])
    chosen = _choose_splits(splits, train_split or "train", validation_split, test_split)
    if validation_fraction and "validation" in chosen:
        raise DataError("The dataset already has a validation split: omit --validation_fraction.")
    single = problem_type == "single_label_classification"
    image_column, label_column = find_columns(
        _features(chosen["train"]), image=image_column, label=label_column, single=single
    )
    chosen = {role: _standard_columns(split, image_column, label_column) for role, split in chosen.items()}
    if streaming:
        chosen |= {role: _stored(split) for role, split in chosen.items() if role != "train"}
    if single:
        chosen = {role: _plain_labels(split, role, label_column) for role, split in chosen.items()}
        chosen, names = _with_class_labels(chosen, read_names(label_names))
        chosen = _checked(chosen, names, test_is_named=test_split is not None)
    else:
        chosen, names = with_vectors(chosen, problem_type, column=label_column, given=read_names(label_names))
        chosen = {role: split.cast_column("image", Image(mode="RGB")) for role, split in chosen.items()}
    if validation_fraction:
        chosen["train"], chosen["validation"] = carve(chosen["train"], validation_fraction, seed)
    if shots_per_class is not None:
        rows = choose_shots(np.asarray(chosen["train"]["label"]), names, shots_per_class, seed)
        chosen["train"] = chosen["train"].select(rows)
    if max_images is not None:
        chosen = {role: some_rows(split, max_images, seed) for role, split in chosen.items()}
    if not single:
        check_evaluated(chosen, problem_type)
    return ImageClassificationData(
        train=chosen["train"],
        validation=chosen.get("validation"),
        test=chosen.get("test"),
        label_names=names,
        train_images=_stream_size(chosen["train"], stream_images) if streaming else len(chosen["train"]),
    )


def without_unreadable(
    data: ImageClassificationData, image_processor: Any, problem_type: str = "single_label_classification"
) -> ImageClassificationData:
    """Remove images from the evaluated splits that cannot be read or that the image processor refuses.

    Args:
        data: the dataset.
        image_processor: image processor used for evaluation.
        problem_type: see `load_classification_data`.

    Raises:
        DataError: A split has no images left, or too few to compute its results.
    """
    refused, unreadable, readable = RefusedImages(image_processor), list(data.unreadable), {}
    for role, split in {"validation": data.validation, "test": data.test, **data.others}.items():
        if split is None or not (broken := refused.problems(split)):
            continue
        unreadable += broken.values()
        if len(broken) == len(split):
            raise DataError(
                f"None of the {counted(len(split), 'image')} of the {role} split can be read, the first one is "
                f"{next(iter(broken.values()))}: repair them, or take another split."
            )
        readable[role] = split.select([row for row in range(len(split)) if row not in broken])
    if problem_type != "single_label_classification":
        check_evaluated(readable, problem_type)
    others = {name: readable.pop(name, split) for name, split in data.others.items()}
    return replace(data, **readable, others=others, unreadable=unreadable)


def load_labelled_split(
    dataset: str,
    split: str | None = None,
    *,
    dataset_subset: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    label_names: str | None = None,
    group_column: str | None = None,
    problem_type: str = "single_label_classification",
    classes: int | None = None,
) -> tuple[Dataset, list[str]]:
    """Open one split for evaluation.

    Args:
        dataset: see `load_splits`.
        split: the split (default: `test`, else the validation split, else the only one).
        dataset_subset: see `load_splits`.
        image_column: see `find_columns`.
        label_column: see `find_columns`.
        label_names: a text file with one class per line, for labels that are plain numbers.
        group_column: a column of which each value is a group of images.
        problem_type: `single_label_classification`, or a problem of `with_vectors`.
        classes: number of classes, if labels are integers without names (default: each integer that occurs names a
            class, in order).

    Returns:
        Rows with an RGB `image`, a `label` and the text of their `group`, if asked for, and the classes in the order of
        their numbers.

    Raises:
        DataError: The split or a column is unknown, or a label is outside its classes.
    """
    if known := _benchmark(dataset):
        image_column, label_column = image_column or known.image, label_column or known.label
        split = split or known.test
    asked = [] if split is None else [split]
    splits = load_splits(dataset, subset=dataset_subset, chosen=asked, option="--split")
    rows = _one_split(splits, split, ("test", *VALIDATION_NAMES))
    single = problem_type == "single_label_classification"
    image_column, label_column = find_columns(rows.features, image=image_column, label=label_column, single=single)
    chosen, given = {"evaluated": _standard_columns(rows, image_column, label_column)}, read_names(label_names)
    if single:
        chosen["evaluated"] = _plain_labels(chosen["evaluated"], "evaluated", label_column)
    _refuse_missing_labels({"evaluated": chosen["evaluated"]["label"][:]})
    if classes is not None and given is None and _are_numbers(chosen["evaluated"].features["label"]):
        given = [str(number) for number in range(classes)]
    if single:
        chosen, names = _with_class_labels({"train": chosen["evaluated"]}, given)
        _check_labels("evaluated", np.asarray(chosen["train"]["label"]), names)
    else:
        chosen, names = with_vectors(chosen, problem_type, column=label_column, given=given)
        check_evaluated(chosen, problem_type)
    (evaluated,) = chosen.values()
    if group_column is not None:
        evaluated = evaluated.add_column("group", _texts(rows, group_column))
    return evaluated.cast_column("image", Image(mode="RGB")), names


def _texts(rows: Dataset, column: str) -> list[str]:
    """Return the values of a column as texts; of classes, their names."""
    if column not in rows.features:
        raise DataError(f"There is no column {column!r}, only {', '.join(rows.features)}: correct --group_column.")
    kind, values = rows.features[column], rows[column][:]
    return [kind.int2str(each) for each in values] if isinstance(kind, ClassLabel) else [*map(str, values)]


def load_images(
    dataset: str,
    split: str | None = None,
    *,
    dataset_subset: str | None = None,
    image_column: str | None = None,
    streaming: bool = False,
    all_of_folder: bool = False,
) -> Any:
    """Open the images of one split, without labels.

    Args:
        dataset: see `load_splits`; an image folder needs no sub-folders.
        split: the split (default: `train`, else the only one).
        dataset_subset: see `load_splits`.
        image_column: the image column, if there are several.
        streaming: stream the rows instead of storing them first.
        all_of_folder: without a split, open all files of a folder, whatever their names.

    Returns:
        Rows with an RGB `image`; an `IterableDataset` if they are streamed.

    Raises:
        DataError: The split or the column is unknown.
    """
    if known := _benchmark(dataset):
        image_column = image_column or known.image
    asked = [split] if split else [ALL] if all_of_folder else []
    splits = load_splits(dataset, subset=dataset_subset, streaming=streaming, chosen=asked, option="--split")
    rows = _one_split(splits, split, ("train",))
    column = _find_column(_features(rows), "image", image_column, Image)
    rows = _with_images(rows.select_columns([column]), column)
    return _renamed(rows, column, "image").cast_column("image", Image(mode="RGB"))


@dataclass(frozen=True)
class Labels:
    """True labels of images.

    Args:
        numbers: class number of each image; None for an image without a label.
        classes: the names of the classes, in the order of their numbers.
        are_numbers: the labels are integers without names, and `classes` are the integers that occur.
    """

    numbers: Sequence[int | None]
    classes: Sequence[str]
    are_numbers: bool = False

    def names(self) -> list[str | None]:
        """Return the class name of each image."""
        return [None if number is None else self.classes[number] for number in self.numbers]

    def renumbered(self, numbers: Sequence[int], classes: Sequence[str]) -> "Labels":
        """Return the labels for other classes; `numbers` has the new number of each present class."""
        return Labels([None if number is None else numbers[number] for number in self.numbers], classes)

    def in_order(self, order: Iterable[int]) -> "Labels":
        """Return the labels of the images with these indices, in this order."""
        return Labels([self.numbers[i] for i in order], self.classes, self.are_numbers)


def load_images_and_labels(
    dataset: str,
    split: str | None = None,
    *,
    dataset_subset: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> tuple[Dataset, Labels | None]:
    """Open the undecoded images of one split, and their labels.

    Args:
        dataset: see `load_splits`; an image folder needs no sub-folders.
        split: the split (default: all files of a folder; otherwise `train`, or the only split).
        dataset_subset: see `load_splits`.
        image_column: the image column, if there are several.
        label_column: the label column, if there are several.

    Returns:
        Rows with an `image`, and their labels, or None without a label column.

    Raises:
        DataError: The split or a column is unknown.
    """
    if known := _benchmark(dataset):
        image_column, label_column = image_column or known.image, label_column or known.label
    splits = load_splits(dataset, subset=dataset_subset, chosen=[split or ALL], option="--split")
    rows = _one_split(splits, split, ("train",))
    image_column = _find_column(rows.features, "image", image_column, Image)
    may_be_labels = any(
        isinstance(kind, ClassLabel) or (column.lower() in LABEL_NAMES and _is_plain_label(kind))
        for column, kind in rows.features.items()
    )
    labels = None
    if label_column is not None or may_be_labels:
        label_column = _find_column(rows.features, "label", label_column, ClassLabel)
        kind, values = rows.features[label_column], rows[label_column][:]
        if isinstance(kind, ClassLabel):
            labels = Labels([None if value == -1 else value for value in values], list(kind.names))
        else:
            labels = labels_of(values)
    images = _with_images(rows.select_columns([image_column]), image_column)
    return as_files(_renamed(images, image_column, "image")), labels


def labels_of(values: Sequence[Any]) -> Labels:
    """Return labels made from integers, whole floats, strings or booleans; None values have no label.

    Raises:
        DataError: A value has another type.
    """
    values = whole_numbers(values)
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return labels_of([None if value is None else str(value) for value in values])
    if not (kinds <= {int} or kinds <= {str}):
        raise DataError(
            f"The labels are of the types {listed(sorted(kind.__name__ for kind in kinds))}: expected integers or "
            "texts, one per image."
        )
    found = sorted({value for value in values if value is not None})
    numbers = {value: number for number, value in enumerate(found)}
    return Labels([numbers.get(value) for value in values], [str(value) for value in found], are_numbers=int in kinds)


def _benchmark(name: str) -> Benchmark | None:
    return None if Path(name).is_dir() else BENCHMARKS.get(name)


def _check_split(splits: DatasetDict | IterableDatasetDict, name: str, option: str) -> None:
    if name not in splits:
        raise DataError(f"There is no split {name!r}, only {', '.join(splits)}: correct {option}.")
    if isinstance(splits[name], Dataset) and splits[name].num_rows == 0:
        raise DataError(f"The split {name!r} is empty.")


def _one_split(splits: DatasetDict | IterableDatasetDict, name: str | None, usual: Sequence[str]) -> Any:
    if name is None:
        name = next((each for each in usual if each in splits), None)
        if name is None and len(splits) > 1:
            raise DataError(f"The splits are {', '.join(splits)}: give one with --split.")
        name = name or next(iter(splits))
    _check_split(splits, name, "--split")
    return splits[name]


def _choose_splits(
    splits: DatasetDict | IterableDatasetDict, train: str, validation: str | None, test: str | None
) -> dict[str, Any]:
    taken = {*train.split("+"), test}
    validation = validation or next((name for name in VALIDATION_NAMES if name in splits and name not in taken), None)
    test = test or ("test" if "test" in splits else None)
    wanted: dict[str, list[str | None]] = {"train": [*train.split("+")], "validation": [validation], "test": [test]}
    parts = {role: [name for name in names if name is not None] for role, names in wanted.items()}
    for role, names in parts.items():
        for name in names:
            _check_split(splits, name, f"--{role}_split")
    all_names = [name for names in parts.values() for name in names]
    if len(set(all_names)) < len(all_names):
        raise DataError(f"A split cannot have two roles: got {', '.join(all_names)}.")
    return {role: _joined(splits, names) for role, names in parts.items() if names}


def _joined(splits: DatasetDict | IterableDatasetDict, names: Sequence[str]) -> Any:
    if len(names) == 1:
        return splits[names[0]]
    try:
        return concatenate_datasets([splits[name] for name in names])
    except ValueError as error:  # their columns or classes differ
        raise DataError(f"The splits {' and '.join(names)} cannot be joined: {error}") from error


def _features(split: Dataset | IterableDataset) -> Features:
    if split.features is None:
        raise DataError("The stream does not declare its columns: store the dataset as parquet, or do not stream.")
    return split.features


def _stored(stream: IterableDataset) -> Dataset:
    """Store a stream."""
    return Dataset.from_generator(_rows_of, features=stream.features, gen_kwargs={"stream": stream})


def _rows_of(stream: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from stream


def _stream_size(stream: IterableDataset, given: int | None) -> int:
    if given is not None:
        return given
    said = (stream.info.splits or {}).get(str(stream.split))
    if said is None or not said.num_examples:
        raise DataError(
            "The stream does not say how many training images it has, as .tar shards never do: set --stream_images."
        )
    return int(said.num_examples)


def _standard_columns(split: Any, image: str, label: str) -> Any:
    missing = [column for column in (image, label) if column not in split.features]
    if missing:
        raise DataError(f"One of the splits has no column {missing[0]!r}, only {', '.join(split.features)}.")
    split = _with_images(split, image)
    if isinstance(split, IterableDataset):
        split = split.cast_column(image, Image(decode=False))  # or each of the next operations would decode the images
    return _renamed(_renamed(split.select_columns([image, label]), image, "image"), label, "label")


def _renamed(split: Any, old: str, new: str) -> Any:
    return split if old == new else split.rename_column(old, new)


def _with_images(split: Any, column: str) -> Any:
    """Return a split whose image column has the type `Image`, even if stored as `{bytes, path}` or as bytes."""
    kind = split.features[column]
    if kind == Value("large_binary"):  # datasets before 4.6 cannot cast it to Image directly
        split = split.cast_column(column, Value("binary"))
    return split if isinstance(kind, Image) else split.cast_column(column, Image())


def read_names(file: str | None, option: str = "--label_names") -> list[str] | None:
    """Return the names in a text file, one per line; None without a file.

    Args:
        file: the file.
        option: the script's option that names it, for messages.

    Raises:
        DataError: There is no such file, or it has no names.
    """
    if file is None:
        return None
    if not Path(file).is_file():
        raise DataError(f"There is no file {file}: {option} is a text file with one class per line.")
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()  # without a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason}): {option} has one class per line.") from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise DataError(f"{file} has no names: expected one class per line in {option}.")
    return names


def _plain_labels(split: Any, role: str, column: str) -> Any:
    """Return a split whose labels are classes, integers or strings; booleans and whole floats are converted.

    Raises:
        DataError: The labels have another type, or a float is not a whole number.
    """
    kind = split.features["label"]
    if isinstance(kind, ClassLabel) or (isinstance(kind, Value) and ("int" in kind.dtype or "string" in kind.dtype)):
        return split
    if not _is_plain_label(kind) or isinstance(split, IterableDataset):
        raise label_type_error(column, kind)
    values = whole_numbers(split["label"][:])
    _refuse_missing_labels({role: values})
    if any(isinstance(value, float) for value in values):
        raise label_type_error(column, kind)
    if kind.dtype == "bool":
        values, kind = [str(value) for value in values], Value("string")
    else:
        kind = Value("int64")
    return split.remove_columns("label").add_column("label", values, feature=kind)


def _with_class_labels(splits: dict[str, Any], given: list[str] | None = None) -> tuple[dict[str, Any], list[str]]:
    """Convert numbers and strings to classes: the given ones, or those of the training split in sorted order."""
    feature = splits["train"].features["label"]
    if given is not None:
        if isinstance(feature, ClassLabel):
            raise DataError(f"The classes already have names, {', '.join(feature.names[:5])}, ...: omit --label_names.")
        if len(set(given)) < len(given):
            raise DataError("--label_names contains a class twice: remove one.")
        classes = ClassLabel(names=given)
        try:
            return {role: split.cast_column("label", classes) for role, split in splits.items()}, given
        except ValueError as error:  # a number out of range
            raise DataError(f"The labels do not match the {len(given)} classes of --label_names: {error}") from error
    if isinstance(splits["train"], IterableDataset) and not isinstance(feature, ClassLabel):
        raise DataError(
            f"The labels of the stream are {feature.dtype} without names, which a stream cannot be searched for: give "
            "--label_names, a text file with one class per line."
        )
    if isinstance(feature, ClassLabel):
        for role, split in splits.items():
            if split.features["label"] != feature:
                raise DataError(f"The classes of the {role} split differ from those of the training split.")
        return splits, list(feature.names)
    values = {role: split["label"][:] for role, split in splits.items()}
    _refuse_missing_labels(values)
    if len({type(value) for column in values.values() for value in column}) > 1:
        kinds = {role: split.features["label"].dtype for role, split in splits.items()}
        raise DataError(f"The labels of the splits are of different types, {kinds}: convert them to one.")
    classes = sorted(set(values["train"]))
    names = [str(value) for value in classes]
    for role, column in values.items():
        unknown = sorted(set(column) - set(classes))
        if unknown:
            raise DataError(f"The {role} split has labels that the training split lacks: {unknown[:10]}.")
        numbers = [classes.index(value) for value in column]
        splits[role] = (
            splits[role].remove_columns("label").add_column("label", numbers, feature=ClassLabel(names=names))
        )
    return splits, names


def _checked(splits: dict[str, Any], names: list[str], *, test_is_named: bool) -> dict[str, Any]:
    """Validate labels and return the stored splits in RGB; a test split without labels is dropped."""
    values = {role: split["label"][:] for role, split in splits.items() if isinstance(split, Dataset)}
    if not test_is_named and "test" in values and {*values["test"]} <= {None, -1}:
        warnings.warn(
            f"The {counted(len(values['test']), 'image')} of the test split left out, as none has a label.",
            stacklevel=2,
        )
        del splits["test"], values["test"]  # the Hub publishes secret labels as -1
    _refuse_missing_labels(values)
    labels = {role: np.asarray(numbers) for role, numbers in values.items()}
    for role, numbers in labels.items():
        _check_labels(role, numbers, names)
    if len(names) < 2 or ("train" in labels and len(np.unique(labels["train"])) < 2):
        only = names[int(labels["train"][0])] if "train" in labels else names[0]
        raise DataError(
            f"All training images are {only!r}: expected at least two classes. Add images of another class, choose the "
            "column of the labels with --label_column, or pre-train without labels with pretrain.py."
        )
    if "train" in labels:
        images = np.bincount(labels["train"], minlength=len(names))
        if lacking := [names[number] for number in np.flatnonzero(images == 0)]:
            raise DataError(
                f"{len(lacking)} of the {len(names)} classes have no training images: {listed(lacking)}. Add images, "
                "or remove the classes."
            )
    return {**splits, **{role: splits[role].cast_column("image", Image(mode="RGB")) for role in labels}}


def _are_numbers(feature: Any) -> bool:
    """Return whether labels, one or several per image, are integers without names."""
    inner = getattr(feature, "feature", feature)
    return isinstance(inner, Value) and "int" in inner.dtype


def _refuse_missing_labels(labels: Mapping[str, Sequence[Any]]) -> None:
    for role, values in labels.items():
        if None in values:
            raise DataError(
                f"{values.count(None)} of the {len(values)} images of the {role} split have no label, the first one is "
                f"at row {values.index(None)}. In an image folder the images of each class are in a folder of their "
                f"own, as {role}/CLASS/image.jpg; elsewhere, remove the rows."
            )


def _check_labels(role: str, labels: np.ndarray, names: Sequence[str]) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        raise DataError(
            f"{len(wrong)} labels of the {role} split are outside 0 to {len(names) - 1}, the first one is "
            f"{labels[wrong[0]]} at row {wrong[0]}: correct or remove those rows."
        )
