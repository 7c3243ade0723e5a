"""Image folders: one scan of the folder, and a cache of its rows.

The splits, rows and labels are those of the `imagefolder` of the `datasets` library, whose patterns are used, with one
exception: a file is one row, even if it matches several patterns of a split. Metadata files and archives are left to
that library.
"""

import fnmatch
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path

import filelock

from ...errors import DataError, OutputError, listed
from ...extras import needs
from ...files.manifest import manifest_problem, write_manifest
from ...files.staging import staged_file, staged_folder

with needs("plain-vit[train]"):
    import datasets
    import pyarrow
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, NamedSplit
    from datasets.data_files import ALL_DEFAULT_PATTERNS, FILES_TO_IGNORE, SPLIT_PATTERN_SHARDED
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

CACHE = "plain_vit_folders"  # in the cache of datasets
INDEX, ROWS = "index.json", "rows.json"
SETTLED = 2 * 10**9  # nanoseconds after which a change of a folder certainly changes its times again
CHUNK = 10_000  # rows
ENDINGS = frozenset(ImageFolder.EXTENSIONS)

Stamp = list[int] | None  # times and number of a folder; None if they do not show every change


@dataclass
class Listing:
    """The files of a folder and of those in it, without hidden ones.

    Args:
        root: the folder.
        names: names of the files of each folder, by its path in the root.
        stamps: by the same paths, what changes when a folder does.
    """

    root: Path
    names: dict[str, list[str]] = field(default_factory=dict)
    stamps: dict[str, Stamp] = field(default_factory=dict)

    def suffixes(self) -> set[str]:
        """Return the suffixes of all files."""
        return {os.path.splitext(name)[1] for names in self.names.values() for name in names}

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """Return the files that match the patterns of `datasets`, each once: by pattern, then by name."""
        if len(found := [self._matching(pattern) for pattern in patterns]) == 1:
            return found[0]
        return list(dict.fromkeys(file for files in found for file in files))

    def _matching(self, pattern: str) -> list[str]:
        parent, _, last = pattern.rpartition("/")
        matches = re.compile(glob_translate(pattern)).match
        if last == "**":  # decided by the folder
            return self._paths({at: names for at, names in self.names.items() if matches(_path(at, ""))})
        if parent == "**":  # decided by the name
            return self._paths({at: fnmatch.filter(names, last) for at, names in self.names.items()})
        if not has_magic(parent):
            return self._paths({parent: fnmatch.filter(self.names.get(parent, []), last)})
        return [path for path in self._paths(self.names) if matches(path)]

    @staticmethod
    def _paths(names: Mapping[str, list[str]]) -> list[str]:
        return sorted(_path(folder, name) for folder in sorted(names) for name in sorted(names[folder]))

    def splits(self) -> dict[str, list[str]]:
        """Return the files by split: named by folders, else by file names, else all are of one split."""
        for patterns in ALL_DEFAULT_PATTERNS:
            found = {str(split): self.matching(of_split) for split, of_split in patterns.items()}
            if any(found.values()):
                return {split: files for split, files in found.items() if files}
        return {}

    def fingerprint(self) -> str:
        """Return a hash of the paths of all files."""
        digest = hashlib.sha256(os.fsencode(self.root))
        for folder in sorted(self.names):
            digest.update(os.fsencode("\0".join(["", folder, *sorted(self.names[folder])])))
        return digest.hexdigest()


def _path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def list_folder(path: Path) -> Listing:
    """List the files in a folder and in the folders in it; links to files are followed, those to folders are not.

    Raises:
        DataError: A folder cannot be read.
    """
    found, links, waiting = Listing(path.resolve()), list[str](), [""]
    while waiting:
        folder = waiting.pop()
        names, stamp = list[str](), _stamp(found.root / folder, now=time.time_ns())
        try:
            with os.scandir(found.root / folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith("__"):
                            waiting.append(_path(folder, entry.name))
                    elif entry.is_symlink():
                        stamp = None  # what it links to changes without the folder
                        links += [entry.path] * entry.is_dir()
                        names += [entry.name] * entry.is_file()
                    elif entry.is_file():
                        names.append(entry.name)
        except OSError as error:
            raise DataError(f"The folder {found.root / folder} cannot be read: {error.strerror}.") from error
        found.names[folder] = [name for name in names if name not in FILES_TO_IGNORE]
        found.stamps[folder] = stamp
    if links:
        warnings.warn(
            f"Links to folders are not followed, their images are not used: {listed(sorted(links))}", stacklevel=2
        )
    return found


def _stamp(folder: Path, *, now: int = 0) -> Stamp:
    """Return the times and the number of a folder, or None if it has just changed and might again at the same time."""
    try:
        status = os.stat(folder)
    except OSError:
        return None
    if now and now - max(status.st_mtime_ns, status.st_ctime_ns) < SETTLED:
        return None
    return [status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def open_folder(path: Path) -> tuple[set[str], DatasetDict | None]:
    """Return the suffixes of the files in a folder, and its splits if it is an image folder.

    The splits are None for all that is left to `datasets`: other files, archives of images, and metadata files. The
    first process lists the folder and writes the rows into a cache, which all processes open. Without a place for the
    cache each process lists the folder.

    Raises:
        DataError: A folder cannot be read, a file is of two splits, or a name is not UTF-8.
    """
    cache = FolderCache(path.resolve())
    cached = cache.read()
    if cached is not None:
        return cached
    with cache.alone():
        return cache.read() or cache.build()


class FolderCache:
    """The rows of an image folder in the cache of `datasets`, valid as long as no folder in it has changed.

    Rows are never replaced: those of a changed folder are another file, so that a process that has not opened its file
    yet finds the same rows as the others of its run.

    Args:
        root: the image folder.
    """

    def __init__(self, root: Path) -> None:
        key = hashlib.blake2b(os.fsencode(f"{datasets.__version__} {root}"), digest_size=16).hexdigest()
        self.root, self.path = root, Path(datasets.config.HF_DATASETS_CACHE, CACHE, key)
        self.is_writable = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context for one process at a time, if the cache can be written."""
        with ExitStack() as lock:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock.enter_context(filelock.FileLock(self.path / "lock"))
            except OSError as error:
                self.is_writable = False
                self._warn(error)
            yield

    def read(self) -> tuple[set[str], DatasetDict] | None:
        """Return the suffixes and the splits, or None if the folder has changed or the cache is damaged."""
        try:
            index = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
            stamps, rows = index["stamps"], self.path / index["rows"]
            if any(stamp is None or stamp != _stamp(self.root / at) for at, stamp in stamps.items()):
                return None
            return None if manifest_problem(rows) else _open_rows(rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def build(self) -> tuple[set[str], DatasetDict | None]:
        """List the folder and write its rows."""
        listing = list_folder(self.root)
        suffixes, tables = listing.suffixes(), image_tables(listing)
        if tables is None:
            return suffixes, None
        rows = self.path / listing.fingerprint()
        try:
            if self.is_writable and manifest_problem(rows):
                shutil.rmtree(rows, ignore_errors=True)
                with staged_folder(rows) as new:
                    _write_rows(new, suffixes, tables)
            if self.is_writable:
                with staged_file(self.path / INDEX, force=True) as file:
                    file.write_text(json.dumps({"rows": rows.name, "stamps": listing.stamps}), encoding="utf-8")
                return _open_rows(rows)
        except (OSError, OutputError) as error:
            self._warn(error)
        splits = {name: Dataset(table, split=NamedSplit(name)) for name, table in tables.items()}
        return suffixes, DatasetDict(splits)

    def _warn(self, error: Exception) -> None:
        warnings.warn(f"The list of the files in {self.root} is not cached: {error}", stacklevel=2)


def _write_rows(folder: Path, suffixes: set[str], tables: Mapping[str, pyarrow.Table]) -> None:
    for name, table in tables.items():
        with pyarrow.ipc.new_stream(str(folder / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table)
    content = {"suffixes": sorted(suffixes), "splits": list(tables)}
    (folder / ROWS).write_text(json.dumps(content), encoding="utf-8")
    write_manifest(folder)


def _open_rows(folder: Path) -> tuple[set[str], DatasetDict]:
    content = json.loads((folder / ROWS).read_text(encoding="utf-8"))
    splits = {
        name: Dataset.from_file(str(folder / f"{name}.arrow"), split=NamedSplit(name)) for name in content["splits"]
    }
    return set(content["suffixes"]), DatasetDict(splits)


def image_tables(listing: Listing) -> dict[str, pyarrow.Table] | None:
    """Return the rows of the splits of an image folder, or None if it is left to `datasets`.

    Raises:
        DataError: The splits have no images, a file is of two splits, or a name is not UTF-8.
    """
    suffixes = listing.suffixes()
    if {".parquet", ".tar"} & suffixes or not ENDINGS & {suffix.lower() for suffix in suffixes}:
        return None
    splits = listing.splits()
    images = {split: [file for file in files if _ending(file) in ENDINGS] for split, files in splits.items()}
    sharded = listing.matching([SPLIT_PATTERN_SHARDED.replace("{split}", "*")])
    others = (file for split, files in splits.items() if len(files) > len(images[split]) for file in files)
    if sharded or any(map(_is_read_by_datasets, others)):
        return None
    images = {split: files for split, files in images.items() if files}
    if not images:
        raise DataError(f"The folder {listing.root} has no images in its splits, which are {listed([*splits])}.")
    _refuse_two_splits(listing.root, images)
    folders = {split: [file.rpartition("/")[0] for file in files] for split, files in images.items()}
    labels, labelled = _labels(listing.root, folders)
    features = Features({"image": Image(), **({"label": ClassLabel(names=labels)} if labelled[-1] else {})})
    numbers = {
        folder: labels.index(_label(listing.root, folder)) for split in folders.values() for folder in set(split)
    }
    tables = {}
    for (split, files), has_labels in zip(images.items(), labelled, strict=True):
        of_rows = [numbers[folder] if has_labels else None for folder in folders[split]] if labelled[-1] else None
        tables[split] = _table([_path(str(listing.root), file) for file in files], of_rows, features)
    return tables


def _ending(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def _is_read_by_datasets(file: str) -> bool:
    """Return whether a file beside the images is an archive, holds metadata, or is taken for a compressed image."""
    stem, ending = os.path.splitext(os.path.basename(file))
    compressed = ending.lower() not in ENDINGS and _ending(stem) in ENDINGS
    return compressed or ending.lower() == ".zip" or stem + ending in ImageFolder.METADATA_FILENAMES


def _refuse_two_splits(root: Path, splits: Mapping[str, list[str]]) -> None:
    """Refuse a file in two splits, on which a model would be trained and evaluated."""
    split_of: dict[str, str] = {}
    for split, files in splits.items():
        for file in files:
            if split_of.setdefault(file, split) != split:
                raise DataError(
                    f"{root / file} is of the splits {split_of[file]} and {split}, because of the names in its path: "
                    "rename the folder, or the class, whose name is not meant as a split."
                )


def _labels(root: Path, folders: Mapping[str, list[str]]) -> tuple[list[str], list[bool]]:
    """Return the classes, and whether the images of each split have labels.

    As in `datasets`: if there are two folders in the split and those before it, all of the same depth.
    """
    known, labelled, labels = set[str](), [], list[str]()
    for of_split in folders.values():
        known.update(of_split)
        labels = sorted({_label(root, folder) for folder in known})
        depths = {_path(folder, "").count("/") for folder in known}
        labelled.append(len(labels) > 1 and len(depths) == 1)
    return labels, labelled


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
