"""Image folders: one scan of the folder, and its rows in a file that all processes map.

`layout.py` assigns files to splits. The `datasets` library reads metadata files and archives with its builder
`imagefolder`, tables and shards with theirs; each builder gets the files of each split and searches for none.
"""

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import filelock
import PIL.Image

from ...errors import DataError, OutputError, counted, did_you_mean, few, listed
from ...files.staging import staged_file
from ...system.extras import needs
from .layout import Parts, Tree, joined, splits_by_folder, splits_by_name

with needs("plain-vit[train]"):
    import datasets
    import fsspec
    import pyarrow
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, NamedSplit
    from datasets.data_files import FILES_TO_IGNORE
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from fsspec.registry import known_implementations

CACHE = "plain_vit_folders"  # in the cache of datasets
CHUNK = 10_000  # rows
PIL.Image.preinit()  # makes Pillow try common formats first: opening an image can take half the time
ENDINGS = frozenset(ImageFolder.EXTENSIONS) | ({".avif", ".qoi"} & PIL.Image.registered_extensions().keys())
UNREAD = frozenset({".heic", ".heif", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".svg"})  # formats Pillow cannot read
BUILDERS = {".parquet": "parquet", ".tar": "webdataset"}  # by file ending


@dataclass
class Listing:
    """The files in a folder and its subfolders, without hidden files.

    Args:
        root: the folder.
        names: file names in each folder, by the folder's path relative to `root`.
    """

    root: Path
    names: dict[str, list[str]] = field(default_factory=dict)

    def tree(self, is_wanted: Callable[[str], bool]) -> Tree:
        """Return the files with wanted names."""
        return Tree({folder: [name for name in names if is_wanted(name)] for folder, names in self.names.items()})


def list_folder(path: Path) -> Listing:
    """List the files in a folder and its subfolders, following links to files but not links to folders.

    Raises:
        DataError: A folder cannot be read.
    """
    found, links, waiting = Listing(path.resolve()), list[str](), [""]
    while waiting:
        folder = waiting.pop()
        names = list[str]()
        try:
            with os.scandir(found.root / folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith("__"):
                            waiting.append(joined(folder, entry.name))
                    elif entry.is_symlink():
                        links += [entry.path] * entry.is_dir()
                        names += [entry.name] * entry.is_file()
                    elif entry.is_file():
                        names.append(entry.name)
        except OSError as error:
            raise DataError(f"The folder {found.root / folder} cannot be read: {error.strerror}.") from error
        found.names[folder] = [name for name in names if name not in FILES_TO_IGNORE]
    if links:
        warnings.warn(
            f"Links to folders are not followed, their images are not used: {listed(sorted(links))}", stacklevel=2
        )
    return found


@dataclass(frozen=True)
class Opened:
    """The data of a folder: rows, or files for a builder of `datasets`.

    Args:
        builder: name of the builder; None if the folder has no data.
        rows: rows of each split, if the folder has only images.
        files: otherwise, the files of each split.
        images: all images of the splits in `files`.
    """

    builder: str | None
    rows: DatasetDict | None = None
    files: dict[str, list[str]] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)


def split_name(name: str) -> NamedSplit:
    """Return a name for `datasets`, which allows only words, from the name of a split, which may be a path."""
    return NamedSplit(re.sub(r"\W+", "_", name))


def _mapped(table: pyarrow.Table, split: str) -> Dataset:
    """Return rows mapped from a file in the cache of `datasets`, so that processes and workers share their memory.

    The file is named by a hash of its content and never changes. Without it, each process keeps the rows in memory.
    """
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    file = Path(datasets.config.HF_DATASETS_CACHE, CACHE, f"{hashlib.sha256(content).hexdigest()}.arrow")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(file.parent / "lock"):
            if not file.is_file() or file.read_bytes() != content:
                with staged_file(file, force=True) as new:
                    new.write_bytes(content)
        return Dataset.from_file(str(file), split=split_name(split))
    except (OSError, OutputError) as error:
        warnings.warn(f"The list of the images of the split {split} is not cached: {error}", stacklevel=2)
        return Dataset(table, split=split_name(split))


def open_folder(path: Path, chosen: Sequence[str] = (), option: str = "--train_split") -> Opened:
    """Return the data of a folder, and warn about files that are left out.

    Args:
        path: the folder.
        chosen: requested splits, see `splits_by_folder`.
        option: the script's option that requests a split.

    Raises:
        DataError: A folder cannot be read, the splits are unclear, or a name is not UTF-8.
    """
    listing = list_folder(path)
    images = listing.tree(_is_image)
    for ending, builder in BUILDERS.items():
        tables = listing.tree(partial(_is_table, ending=ending, images=images))
        if tables.names:
            parts = splits_by_name(tables, where=listing.root, chosen=chosen, option=option)
            _warn_left_out(f"{ending} file", listing.root, tables.files, parts)
            _warn_left_out("image", listing.root, images.files, {}, why=f"as its {ending} files are the dataset")
            return Opened(builder, files=_absolute(listing.root, parts))
    if not images.names:
        return Opened(None)
    tree = listing.tree(lambda name: _is_image(name) or _is_read_by_datasets(name))
    parts = splits_by_folder(tree, where=listing.root, chosen=chosen, option=option)
    _warn_left_out("file", listing.root, tree.files, parts)
    unread = listing.tree(lambda name: _ending(name) in UNREAD).files
    _warn_left_out("image", listing.root, unread, {}, why="as Pillow cannot open them: convert them to JPEG or PNG")
    if all(map(_is_image, tree.files)):
        return Opened("imagefolder", image_rows(listing.root, parts))
    files = _absolute(listing.root, parts)
    known = [file for of_split in files.values() for file in of_split if _is_image(file)]
    if any(_is_metadata(file, images) for file in tree.files):  # metadata lists the images: `datasets` reads it
        files = {split: [file for file in of_split if not _is_image(file)] for split, of_split in files.items()}
    files = {split: of_split for split, of_split in files.items() if of_split}
    return Opened("imagefolder", files=files, images=known)


def file_system_of(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system that a URL names, and the path in it.

    Raises:
        DataError: fsspec knows no such file system.
        MissingPackageError: The package that opens this kind of URL is not installed.
    """
    kinds = re.findall(r"([\w+-]+)://", url)  # several in zip://images.zip::s3://bucket/shards.zip
    packages = {
        known_implementations[kind]["class"].partition(".")[0] for kind in kinds if kind in known_implementations
    }
    try:
        with needs(*sorted(name.replace("fsspec", "fsspec[full]") for name in packages)):
            return fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise DataError(f"{url} cannot be opened: {error}{did_you_mean(kinds[0], known_implementations)}") from error


def names_files(name: str) -> bool:
    """Return whether a name is a pattern of files."""
    return any(character in name for character in "*?[")


def open_files(name: str) -> Opened:
    """Return the data of files that a pattern or a URL names, as one split without labels.

    Args:
        name: A pattern of local files, a file, or a URL of a file system of fsspec: of a file, a folder, or a pattern.

    Raises:
        DataError: There are no such files.
        MissingPackageError: The package that reads this kind of URL is not installed.
    """
    system, path = file_system_of(name)
    found = system.glob(path) if names_files(path) else [path] if system.isfile(path) else system.find(path)
    found = [file if "://" not in name else system.unstrip_protocol(file) for file in sorted(found)]
    for ending, builder in BUILDERS.items():
        if files := [file for file in found if file.endswith(ending)]:
            return Opened(builder, files={"train": files})
    images = [file for file in found if _is_image(file)]
    if not images:
        raise DataError(f"{name} names no images, .parquet or .tar files: {counted(len(found), 'file')} found.")
    return Opened(
        "imagefolder", DatasetDict(train=_mapped(_table(images, None, Features({"image": Image()})), "train"))
    )


def _warn_left_out(
    kind: str, root: Path, files: Sequence[str], parts: Parts, *, why: str = "as they are in none of the splits"
) -> None:
    """Warn about the files that are in no split."""
    taken = {file for part in parts.values() for file in part.files}
    if left := [file for file in files if file not in taken]:
        why += f" {listed([*parts])}" if parts else ""
        of_all = f"{len(left)} of {counted(len(files), kind)}"
        warnings.warn(f"{of_all} in {root} left out, {why}: {few([*map(repr, left)])}", stacklevel=3)


def _absolute(root: Path, parts: Parts) -> dict[str, list[str]]:
    return {split: [joined(str(root), file) for file in part.files] for split, part in parts.items()}


def image_rows(root: Path, parts: Parts) -> DatasetDict:
    """Return the rows of the splits of a folder of images.

    Raises:
        DataError: A name is not UTF-8.
    """
    labels, labelled = _labels(root, parts)
    numbers = {label: number for number, label in enumerate(labels)}
    features = Features({"image": Image(), **({"label": ClassLabel(names=labels)} if labels else {})})
    rows = DatasetDict()
    for split, part in parts.items():
        folders = [file.rpartition("/")[0] for file in part.files]
        number_of = {folder: numbers[_label(root, folder)] if split in labelled else None for folder in set(folders)}
        of_rows = [number_of[folder] for folder in folders] if labels else None
        rows[split] = _mapped(_table([joined(str(root), file) for file in part.files], of_rows, features), split)
    return rows


def _is_image(name: str) -> bool:
    return _ending(name) in ENDINGS


def _ending(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def _is_table(name: str, ending: str, images: Tree) -> bool:
    return name.endswith(ending) and not _is_metadata(name, images)


def _is_metadata(file: str, images: Tree) -> bool:
    """Return whether a file holds labels of images; one in a folder without images does not."""
    return bool(images.names) and os.path.basename(file) in ImageFolder.METADATA_FILENAMES


def _is_read_by_datasets(file: str) -> bool:
    """Return whether `datasets` reads a file beside the images: an archive, metadata, or a compressed image."""
    stem, ending = os.path.splitext(os.path.basename(file))
    compressed = ending.lower() not in ENDINGS and _ending(stem) in ENDINGS
    return compressed or ending.lower() == ".zip" or stem + ending in ImageFolder.METADATA_FILENAMES


def _labels(root: Path, parts: Parts) -> tuple[list[str], set[str]]:
    """Return the classes, and the splits with labels: the splits whose images are not all directly in their folder.

    Both are empty if there is only one class folder, or if class folders are at different depths.
    """
    folders = {split: {file.rpartition("/")[0] for file in part.files} for split, part in parts.items()}
    labelled = {split for split, part in parts.items() if folders[split] != {part.folder}}
    depths = {
        joined(folder, "").count("/") - joined(parts[split].folder, "").count("/")
        for split in labelled
        for folder in folders[split]
    }
    labels = sorted({_label(root, folder) for split in labelled for folder in folders[split]})
    return (labels, labelled) if len(labels) > 1 and len(depths) == 1 else ([], set())


def _label(root: Path, folder: str) -> str:
    return folder.rpartition("/")[-1] or root.name


def _table(paths: list[str], labels: list[int | None] | None, features: Features) -> pyarrow.Table:
    """Return rows as `datasets` stores them, in chunks.

    Raises:
        DataError: A path is not UTF-8.
    """
    batches = []
    for first in range(0, len(paths), CHUNK):
        chunk = paths[first : first + CHUNK]
        try:
            files = pyarrow.array(chunk, pyarrow.string())
        except UnicodeEncodeError as error:
            raise DataError(f"The name of {error.object!r} is not UTF-8: rename the file.") from error
        nothing = pyarrow.nulls(len(chunk), pyarrow.binary())
        columns = [pyarrow.StructArray.from_arrays([nothing, files], ["bytes", "path"])]
        if labels is not None:
            columns.append(pyarrow.array(labels[first : first + CHUNK], pyarrow.int64()))
        batches.append(pyarrow.RecordBatch.from_arrays(columns, schema=features.arrow_schema))
    return pyarrow.Table.from_batches(batches)
