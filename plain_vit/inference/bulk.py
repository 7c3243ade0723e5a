"""Features and predictions of many images, in parquet shards that a killed run need not compute again.

The data are divided into parts: one per shard for stored rows, one per file for a stream. One process reads a part in
order, and cuts it into shards of `shard_size` rows and these into batches. So the contents of a shard depend on the
data, not on the number of processes or workers. A shard is written when its last image is done.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path, PosixPath, WindowsPath
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, get_worker_info
from tqdm import tqdm

from ..errors import DataError, OutputError, OutputExistsError, TrainingError, counted
from ..files.staging import is_vacant, staged_file
from ..system.extras import needs
from ..training.arguments import BulkOptions, ImageOptions, keywords
from ..training.data import load_images
from ..training.data.decoding import as_files
from ..training.data.folders import file_system_of
from ..training.data.identity import contents_hash, paths_hash
from ..training.hardware.processes import start_processes
from ..training.models import checkpoint_hints, configuration_hash, names_of_classes, processor_settings, weights_hash
from ..training.reports.report import environment
from ..training.run.folder import as_json, changed_settings, read_json, require_seen
from ..training.run.progress import Progress
from .batches import read_batch
from .callables import BatchCallable, Predictor, open_model, prepared
from .columns import Columns, table_of, with_columns
from .engine_models import EngineModel
from .engines import ENGINES

with needs("plain-vit[train]"):
    import pyarrow as pa
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow import parquet

MANIFEST, SHARDS = "manifest.json", "data/part-*.parquet"
METADATA = b"plain_vit"  # of a shard: its position in the data, and the images that cannot be read
PATIENCE = 60  # seconds in which one of several jobs starts the folder


@dataclass(frozen=True)
class Shard:
    """The position of a shard in the data.

    Args:
        part: Number of the part of the data.
        number: Number in this part.
    """

    part: int
    number: int

    @property
    def name(self) -> str:
        """The name of the shard's file; sorted names are in the order of the data."""
        return f"part-{self.part:06d}-{self.number:06d}.parquet"


class Parts(torch.utils.data.IterableDataset):
    """The rows of a dataset in parts, as processed batches, starting at the first shard of each part to compute.

    As many threads as torch uses, one in a worker of a loader, read, decode and process the images of a batch. The
    result does not depend on their number.

    Args:
        rows: Rows with an undecoded `image`.
        image_processor: The model's image processor.
        shard_size: Rows in a shard.
        batch_size: Images in a batch.
        begin: The first shard to compute of each part.
    """

    def __init__(
        self,
        rows: Dataset | IterableDataset | Sequence[dict[str, Any]],
        image_processor: Any,
        shard_size: int,
        batch_size: int,
        begin: Sequence[Shard],
    ) -> None:
        super().__init__()
        self.rows, self.image_processor = rows, image_processor
        self.shard_size, self.batch_size, self.begin = shard_size, batch_size, begin

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches from `read_batch` with `shard` and `ends`: one of "", "shard" and "part"."""
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for begin in self.begin[first::step]:
            yield from self._part(begin)

    def _part(self, begin: Shard) -> Iterator[dict[str, Any]]:
        batches = self._batches(numbered_rows(self.rows, begin, self.shard_size), begin)
        following: Any = next(batches, (begin, [], False))  # a file of a stream may be empty
        while following is not None:
            (shard, batch, fills_shard), following = following, next(batches, None)
            ends = "part" if following is None else "shard" if fills_shard else ""
            of_part = f" of part {shard.part}" if isinstance(self.rows, IterableDataset) else ""  # row numbers restart
            stored = {number: row["image"] for number, row in batch}
            yield read_batch(self.image_processor, stored, of_part) | {"shard": shard, "ends": ends}

    def _batches(
        self, rows: Iterator[tuple[int, dict[str, Any]]], begin: Shard
    ) -> Iterator[tuple[Shard, list[tuple[int, dict[str, Any]]], bool]]:
        for number in itertools.count(begin.number):
            left = self.shard_size
            while left:
                batch = list(itertools.islice(rows, min(self.batch_size, left)))
                left -= len(batch)
                if not batch:
                    return
                yield Shard(begin.part, number), batch, left == 0


def numbered_rows(
    rows: Dataset | IterableDataset | Sequence[dict[str, Any]], begin: Shard, shard_size: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a part from a shard on, with their numbers in the split, or in the file of a stream."""
    if isinstance(rows, IterableDataset):
        done = begin.number * shard_size
        stream = rows.shard(num_shards=rows.num_shards, index=begin.part)
        # `iter(stream)` would divide its shards among the workers again.
        for number, row in enumerate(stream.skip(done).iter(batch_size=1), start=done):
            yield number, {"image": row["image"][0]}
        return
    first = begin.part * shard_size
    for row in range(first, min(first + shard_size, len(rows))):
        yield row, rows[row]


@dataclass(frozen=True)
class Run:
    """A run of a model over all images of a split.

    Args:
        folder: Output folder, for `manifest.json` and the shards in `data/`.
        rows: Rows with an undecoded `image`.
        image_processor: The model's image processor.
        columns_of: Maps the image processor's outputs, or None for no image, to the columns of a shard.
        options: How to divide the work, and what to do with unreadable images.
        settings: Everything that determines the contents of the shards.
    """

    folder: Path
    rows: Dataset | IterableDataset
    image_processor: Any
    columns_of: Callable[[Mapping[str, torch.Tensor] | None], Columns]
    options: BulkOptions
    settings: Mapping[str, Any]

    @property
    def count(self) -> int | None:
        """The number of images, if the data state it."""
        return len(self.rows) if isinstance(self.rows, Dataset) else None

    def to_end(self, accelerator: Accelerator, loading: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the missing shards, and write the manifest.

        Args:
            accelerator: The processes; each computes a share of the parts.
            loading: Options of the `DataLoader`.

        Returns:
            The manifest.

        Raises:
            OutputExistsError: The folder has other contents, or an unfinished run and the options do not resume it.
            DataError: An image cannot be read and the options do not skip such images, or rows are missing.
            TrainingError: A feature or prediction is not a finite number.
        """
        job, jobs = job_of(self.options)
        self._start(accelerator)
        begin = self._pending(job, jobs)
        accelerator.wait_for_everyone()  # now all processes have seen the same files
        mine = begin[accelerator.process_index :: accelerator.num_processes]
        parts = Parts(self.rows, self.image_processor, self.options.shard_size, self.options.batch_size, mine)
        total = None if self.count is None else sum(map(self._rows_in, range(self._parts)[job::jobs]))
        done = 0 if total is None else total - sum(self._rows_in(shard.part) for shard in begin)
        with Progress(total=total, done=done, shown=accelerator.is_main_process) as bar:
            self._compute(bar.batches(DataLoader(parts, batch_size=None, **loading)), accelerator, bar)
            if accelerator.is_main_process:
                bar.show()
        accelerator.wait_for_everyone()
        if missing := self._pending(job, jobs):
            raise DataError(f"{len(missing)} parts of the data were not read to their end: run again with --resume.")
        if jobs > 1 and (self._unbegun() or self._pending()):
            return dict(read_json(self.folder / MANIFEST))
        manifest = self._manifest()
        if accelerator.is_main_process:
            self._write(manifest, shared=jobs > 1)
        return manifest

    @property
    def _parts(self) -> int:
        """The number of parts of the data."""
        return self.rows.num_shards if self.count is None else -(-self.count // self.options.shard_size)

    def _rows_in(self, part: int) -> int:
        """Return the number of rows of a part of stored data."""
        size = self.options.shard_size
        return min(size, len(self.rows) - part * size)

    def _write(self, manifest: Mapping[str, Any], *, shared: bool) -> None:
        """Write the manifest; with `shared`, another job may write the same at this moment."""
        with suppress(OutputError) if shared else nullcontext(), written(self.folder / MANIFEST) as new:
            new.write_text(as_json(manifest, indent=2) + "\n", encoding="utf-8")

    def _start(self, accelerator: Accelerator) -> None:
        """Make the folder, or check that it belongs to the same run."""
        file, started = self.folder / MANIFEST, {"complete": False, "settings": self.settings}
        if self.options.part and accelerator.is_main_process:
            until = time.monotonic() + PATIENCE
            while is_free(self.folder) and time.monotonic() < until:
                self._write(started, shared=True)
                time.sleep(0.1)
        accelerator.wait_for_everyone()
        if file.is_file():
            if changed := changed_settings(read_json(file)["settings"], self.settings):
                raise OutputExistsError(
                    f"{self.folder} holds the output of another run: {changed}. Give another folder."
                )
            if not self.options.resume and not self.options.part:
                raise OutputExistsError(
                    f"{self.folder} holds the output of this run: add --resume to compute what is missing."
                )
        elif not is_free(self.folder):
            raise OutputExistsError(f"{self.folder} is not an empty folder: give another one.")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and not file.is_file():
            self._write(started, shared=False)
        accelerator.wait_for_everyone()
        require_seen(_fresh(self.folder) / MANIFEST, accelerator)

    def _unbegun(self) -> bool:
        """Return whether a part has no shard: the list of files says so, without reading them."""
        names = {file.name for file in shards_in(self.folder)}
        return any(Shard(part, 0).name not in names for part in range(self._parts))

    def _pending(self, job: int = 0, jobs: int = 1) -> list[Shard]:
        """Return the first unwritten shard of each part of a job, from which on the part is computed.

        Raises:
            OutputExistsError: A shard in the folder does not exist in the data.
        """
        files = (file for file in shards_in(self.folder) if jobs == 1 or part_of(file) % jobs == job)
        found = {file.name: notes_of(file)["ends_part"] for file in files}
        pending = []
        for part in range(self._parts)[job::jobs]:
            shard = Shard(part, 0)
            while (ends_part := found.pop(shard.name, None)) is False:
                shard = Shard(part, shard.number + 1)
            pending += [shard] if ends_part is None else []
        begun = {shard.name.rpartition("-")[0] for shard in pending}
        if others := sorted(name for name in found if name.rpartition("-")[0] not in begun):
            raise _foreign(self.folder / "data" / others[0])
        return pending

    def _compute(self, batches: Iterable[dict[str, Any]], accelerator: Accelerator, bar: Progress) -> None:
        """Compute batches, and write each shard after its last batch."""
        unfinished: dict[Shard, list[dict[str, Any]]] = {}
        for batch in batches:
            for broken in batch["broken"]:
                if self.options.corrupted == "stop":
                    raise DataError(
                        f"An image cannot be read: {broken}. Repair it, or leave such images out with --corrupted skip."
                    )
                bar.say(f"left out an image that cannot be read: {broken}")
            columns = self.columns_of(batch.pop("inputs"))
            unfinished.setdefault(batch["shard"], []).append(with_columns(batch, columns, self.settings))
            seen = (len(batch["rows"]) + len(batch["broken"])) * accelerator.num_processes
            bar.update(seen if bar.total is None else min(seen, bar.total - bar.done - bar.images))
            if batch["ends"]:
                write_shard(self.folder / "data" / batch["shard"].name, unfinished.pop(batch["shard"]))

    def _manifest(self) -> dict[str, Any]:
        """Return the manifest of a complete run, from the metadata of its shards."""
        shards, broken = {}, []
        for file in sorted(shards_in(self.folder), key=lambda file: file.name):
            with file.open("rb") as opened:
                shards[file.name] = parquet.read_metadata(opened).num_rows
            broken += notes_of(file)["broken"]
        return {
            "complete": True,
            "settings": self.settings,
            "images": sum(shards.values()),
            "unreadable_images": broken,
            "shards": shards,
            "environment": environment(),
        }


def write_shard(file: Path, batches: Sequence[Mapping[str, Any]]) -> None:
    """Write a shard, complete or not at all."""
    notes = {
        "ends_part": batches[-1]["ends"] == "part",
        "broken": [broken for batch in batches for broken in batch["broken"]],
    }
    with written(file) as new:
        parquet.write_table(table_of(batches).replace_schema_metadata({METADATA: json.dumps(notes)}), new)


def notes_of(file: Path) -> dict[str, Any]:
    """Return the metadata of a shard: `ends_part`, and the `broken` images that it leaves out.

    Raises:
        OutputExistsError: plain-vit did not write the file.
    """
    try:
        with file.open("rb") as opened:
            return dict(json.loads(parquet.read_schema(opened).metadata[METADATA]))
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise _foreign(file) from error


# Folders on a disk, and those of a store of objects, whose paths are those of universal-pathlib


def folder_of(name: str) -> Path:
    """Return the path of an output folder, or of a URL such as s3://bucket/features.

    Raises:
        DataError: There is no such kind of URL.
        MissingPackageError: A package for this kind of URL is not installed.
        OutputError: There is no such bucket or repository, or it may not be read.
    """
    if "://" not in name:
        return Path(name)
    system, path = file_system_of(name)
    if isinstance(system, LocalFileSystem):
        return Path(path)
    with needs("universal-pathlib"):
        import upath
    folder = cast(Path, upath.UPath(name))
    with _reached(folder):
        is_free(folder)
    return folder


def is_free(folder: Path) -> bool:
    """Return whether a folder is missing or vacant."""
    return is_vacant(folder) if isinstance(folder, PosixPath | WindowsPath) else not any(_fresh(folder).glob("*"))


def shards_in(folder: Path) -> list[Path]:
    """Return the shards in a folder."""
    return [*_fresh(folder).glob(SHARDS)]


def _fresh(folder: Path) -> Path:
    """Return a folder after forgetting what a store of objects listed before: other processes write there too."""
    if (system := getattr(folder, "fs", None)) is not None:
        system.invalidate_cache()
    return folder


@contextmanager
def written(file: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which then appears complete or not at all."""
    if isinstance(file, PosixPath | WindowsPath):
        with staged_file(file, force=True) as new:
            yield new
        return
    with TemporaryDirectory() as folder:
        yield Path(folder, file.name)
        with _reached(file):
            cast(Any, file).fs.put_file(str(Path(folder, file.name)), cast(Any, file).path)


@contextmanager
def _reached(path: Path) -> Iterator[None]:
    """Say what a store of objects refuses; each has errors of its own."""
    try:
        yield
    except Exception as error:
        [reason, *_] = str(error).splitlines() or [""]
        reason = f"{type(error).__name__}: {reason}".rstrip(".: ")
        raise OutputError(
            f"{path} cannot be reached: {reason}. Correct the URL, or give its file system the credentials and the "
            "endpoint."
        ) from error


def part_of(file: Path) -> int:
    """Return the number of the part in the name of a shard.

    Raises:
        OutputExistsError: plain-vit did not write the file.
    """
    try:
        return int(file.stem.split("-")[1])
    except ValueError as error:
        raise _foreign(file) from error


def job_of(options: BulkOptions) -> tuple[int, int]:
    """Return the number of this job, from 0, and that of all jobs that share the work.

    Raises:
        TrainingError: `part` does not name a job.
    """
    if options.part is None:
        return 0, 1
    number, _, count = options.part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise TrainingError(f"part is {options.part}: expected the number of a job and of all jobs, such as 3/100.")
    return int(number) - 1, int(count)


def _foreign(file: Path) -> OutputExistsError:
    return OutputExistsError(f"{file} is not a shard of this run: remove it, or give another folder.")


def run_over_images(kind: type[BatchCallable], options: BulkOptions) -> dict[str, Any]:
    """Compute features or predictions of all images, and return the contents of `manifest.json`.

    Args:
        kind: What to compute.
        options: Of the script, with the arguments of `kind`.
    """
    run, accelerator, loading = open_run(kind, options)
    manifest = run.to_end(accelerator, loading)
    if accelerator.is_main_process and not manifest["complete"]:
        tqdm.write(f"part {options.part} of the {kind.made} is in {run.folder}; other parts are missing")
    elif accelerator.is_main_process:
        tqdm.write(f"the {kind.made} of {counted(manifest['images'], 'image')} are in {run.folder}")
    return manifest


def open_run(kind: type[BatchCallable], options: BulkOptions) -> tuple[Run, Accelerator, dict[str, Any]]:
    """Open the images and the prepared model; return the run, the accelerator, and options of the data loader."""
    job_of(options)
    folder = folder_of(options.output_dir)
    accelerator, loading = start_processes(options)
    images = open_images(options)
    opened, image_processor = open_model(options, checkpoint_hints(options.model_hints))
    kind.check(options, opened)
    own = {each.name for each in fields(kind)} - {each.name for each in fields(BatchCallable)}
    chosen = {name: getattr(options, name) for name in sorted(own)}
    classes = {"classes": names_of_classes(opened.config)} if kind is Predictor else {}
    settings = settings_of(options, images, opened, image_processor) | chosen | classes
    work = kind(prepared(kind.part_of(opened), options, accelerator.device), image_processor=image_processor, **chosen)
    run = Run(folder, images, image_processor, work.columns, options, settings)
    return run, accelerator, loading


def open_images(options: BulkOptions) -> Dataset | IterableDataset:
    """Open the images of a split, undecoded."""
    named = keywords(options, ImageOptions)
    return as_files(load_images(**named, split=options.split, streaming=options.streaming, all_of_folder=True))


def settings_of(options: BulkOptions, rows: Dataset | IterableDataset, model: Any, processor: Any) -> dict[str, Any]:
    """Return everything that determines the contents of the shards: model, images, their division, and versions."""
    deciding = ("model", "model_hints", "dataset", "dataset_subset", "image_column", "split", "streaming", "batch_size",
                "shard_size", "corrupted", "mixed_precision", "engine")  # fmt: skip
    return {
        **{name: getattr(options, name) for name in deciding},
        "weights": model.files.hash() if isinstance(model, EngineModel) else weights_hash(model),
        "configuration": configuration_hash(model.config),
        "engine_version": engine_version(model, options),
        "revision": getattr(model.config, "_commit_hash", None),
        "image_processor": processor_settings(processor),
        "images": len(rows) if isinstance(rows, Dataset) else None,
        "paths": paths_hash(rows) if isinstance(rows, Dataset) else None,
        "contents": contents_hash(rows) if isinstance(rows, Dataset) else None,
    }


def engine_version(model: Any, options: BulkOptions) -> str | None:
    """Return the engine and its release; None for torch, whose release the manifest has anyway."""
    name = model.engine if isinstance(model, EngineModel) else options.engine
    return None if name == "torch" else f"{ENGINES[name].runtime} {ENGINES[name].version()}"
