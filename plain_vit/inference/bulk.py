"""Features and predictions of many images, in parquet shards that a killed run need not compute again.

The data are divided into parts: one per shard for stored rows, one per file for a stream. One process reads a part in
order, and cuts it into shards of `shard_size` rows and these into batches. So the contents of a shard depend on the
data, not on the number of processes or workers. A shard is written when its last image is done.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `L` tokens, `D` hidden size.
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.utils.data import DataLoader, get_worker_info

from ..configuration_plain_vit import PlainViTConfig
from ..conversion import from_checkpoint
from ..errors import DataError, OutputExistsError, TrainingError
from ..files.images import UNREADABLE, decoding
from ..files.other_files import is_exported
from ..files.staging import is_vacant, staged_file
from ..modeling_plain_vit import PlainViTForImageClassification
from ..scores import REGRESSION, scores
from ..system.extras import needs
from ..training.arguments import BulkOptions, ImageOptions, keywords
from ..training.data import load_images
from ..training.data.decoding import BLANK, as_files, decode_image, name_broken, open_stored
from ..training.data.identity import contents_hash, paths_hash
from ..training.models import checkpoint_hints, configuration_hash, names_of_classes, processor_settings, weights_hash
from ..training.reports.report import environment
from ..training.run.folder import as_json, changed_settings, read_json, write_file
from ..training.run.progress import Progress
from .engine_models import EngineModel, open_with_processor
from .engines import ENGINES
from .prepare import prepare_for_inference

with needs("plain-vit[train]"):
    import pyarrow as pa
    import pyarrow.compute
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from pyarrow import parquet

MANIFEST, SHARDS = "manifest.json", "data/part-*.parquet"
METADATA = b"plain_vit"  # of a shard: its position in the data, and the images that cannot be read

BATCH = 8  # images in a forward pass over a few files
LISTS = ("rows", "paths", "names", "broken")  # of a batch
THREADS, PIECES = "read-images", 4  # names of threads, and pieces of a batch per thread: some images take longer

EXACT = {"mixed_precision": "no", "dtype": "float32"}  # the options least likely to overflow

Columns = dict[str, pa.Array]


@dataclass(frozen=True)
class Shard:
    """The position of a shard in the data.

    Args:
        part: Number of the part of the data.
        number: Number in this part.
    """

    part: int
    number: int

    def file(self, folder: Path) -> Path:
        """Return the path of the shard's file; sorted names are in the order of the data."""
        return folder / "data" / f"part-{self.part:06d}-{self.number:06d}.parquet"


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
        """Yield batches with `shard`, `LISTS`, `inputs` of the model, and `ends`: one of "", "shard" and "part"."""
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
            yield self._processed(batch, shard) | {"shard": shard, "ends": ends}

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

    def _processed(self, batch: Sequence[tuple[int, dict[str, Any]]], shard: Shard) -> dict[str, Any]:
        """Decode and process images in threads; leave out unreadable images and name them."""
        of_part = f" of part {shard.part}" if isinstance(self.rows, IterableDataset) else ""  # row numbers restart
        read = partial(self._read, of_part=of_part)
        pieces = in_threads(read, batch)
        inputs = [piece["inputs"] for piece in pieces if piece["inputs"] is not None]
        if len({each["pixel_values"].shape[1:] for each in inputs}) > 1:
            return read(batch)  # the image processor pads to the largest of a batch, or refuses unequal images
        joined = {name: [each for piece in pieces for each in piece[name]] for name in LISTS}
        together = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]} if inputs else None
        return joined | {"inputs": together}

    def _read(self, piece: Sequence[tuple[int, dict[str, Any]]], of_part: str) -> dict[str, Any]:
        stored = {number: row["image"] for number, row in piece}
        images: dict[int, PIL.Image.Image] = {}
        broken: dict[int, Exception] = {}
        for number, file in stored.items():
            try:
                images[number] = decode_image(open_stored(file))
            except UNREADABLE as error:
                broken[number] = error
        try:
            inputs = self._inputs(images)
        except UNREADABLE:
            refused = self._refused(images)
            if not refused:  # each alone is fine, but they do not fit together
                raise
            broken |= refused
            images = {number: image for number, image in images.items() if number not in refused}
            inputs = self._inputs(images)
        places = {number: f"row {number}{of_part}" for number in stored}
        paths = [(stored[number] or {}).get("path") for number in images]
        return {
            "rows": [*images],
            "paths": paths,
            "names": [path or places[number] for number, path in zip(images, paths, strict=True)],
            "inputs": inputs,
            "broken": [name_broken(stored[number], places[number], broken[number]) for number in sorted(broken)],
        }

    def _inputs(self, images: Mapping[int, PIL.Image.Image]) -> dict[str, torch.Tensor] | None:
        with decoding():  # image processors, too, raise any error for an odd image
            return dict(self.image_processor([*images.values()], return_tensors="pt")) if images else None

    def _refused(self, images: Mapping[int, PIL.Image.Image]) -> dict[int, Exception]:
        """Return the errors of the images that the image processor refuses even alone."""
        refused: dict[int, Exception] = {}
        for number, image in images.items():
            try:
                self._inputs({number: image})
            except UNREADABLE as error:
                refused[number] = error
        return refused


def in_threads(function: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> list[Any]:
    """Apply a function to all pieces of a batch, in as many threads as torch uses, and return the results.

    Within each thread, torch uses that thread only. All threads have ended when this returns or raises.
    """
    count = torch.get_num_threads()
    if count == 1 or len(items) < 2:
        return [function(items)]
    PIL.Image.preinit()
    PIL.Image.init()  # a thread could miss a format that another thread is registering
    size = -(-len(items) // (count * PIECES))
    pool = ThreadPoolExecutor(count, THREADS, torch.set_num_threads, (1,))
    try:
        return list(pool.map(function, [items[begin : begin + size] for begin in range(0, len(items), size)]))
    finally:
        pool.shutdown(cancel_futures=True)
        for thread in threading.enumerate():  # the pool does not know a thread whose start was interrupted
            if thread.name.startswith(THREADS):
                thread.join()
        torch.set_num_threads(count)  # new threads inherit the number that was set last, in any thread


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
        columns_of: Maps the image processor's outputs, on the device, to the columns of a shard.
        options: How to divide the work, and what to do with unreadable images.
        settings: Everything that determines the contents of the shards.
    """

    folder: Path
    rows: Dataset | IterableDataset
    image_processor: Any
    columns_of: Callable[[dict[str, torch.Tensor]], Columns]
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
        self._start(accelerator)
        begin = self._pending()
        accelerator.wait_for_everyone()  # now all processes have seen the same files
        mine = begin[accelerator.process_index :: accelerator.num_processes]
        parts = Parts(self.rows, self.image_processor, self.options.shard_size, self.options.batch_size, mine)
        done = 0 if self.count is None else max(0, self.count - len(begin) * self.options.shard_size)
        with Progress(total=self.count, done=done, shown=accelerator.is_main_process) as bar:
            self._compute(bar.batches(DataLoader(parts, batch_size=None, **loading)), accelerator, bar)
            if accelerator.is_main_process:
                bar.show()
        accelerator.wait_for_everyone()
        if missing := self._pending():
            raise DataError(f"{len(missing)} parts of the data were not read to their end: run again with --resume.")
        manifest = self._manifest()
        if accelerator.is_main_process:
            write_file(self.folder / MANIFEST, as_json(manifest, indent=2) + "\n")
        return manifest

    def _start(self, accelerator: Accelerator) -> None:
        """Make the folder, or check that it belongs to the same run."""
        file = self.folder / MANIFEST
        if file.is_file():
            if changed := changed_settings(read_json(file)["settings"], self.settings):
                raise OutputExistsError(
                    f"{self.folder} holds the output of another run: {changed}. Give another folder."
                )
            if not self.options.resume:
                raise OutputExistsError(
                    f"{self.folder} holds the output of this run: add --resume to compute what is missing."
                )
        elif not is_vacant(self.folder):
            raise OutputExistsError(f"{self.folder} is not an empty folder: give another one.")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and not file.is_file():
            write_file(file, as_json({"complete": False, "settings": self.settings}, indent=2) + "\n")
        accelerator.wait_for_everyone()

    def _pending(self) -> list[Shard]:
        """Return the first unwritten shard of each part, from which on the part is computed.

        Raises:
            OutputExistsError: A shard in the folder does not exist in the data.
        """
        written = {file: notes_of(file)["ends_part"] for file in self.folder.glob(SHARDS)}
        stored = isinstance(self.rows, Dataset)
        count = -(-len(self.rows) // self.options.shard_size) if stored else self.rows.num_shards
        pending = []
        for part in range(count):
            shard = Shard(part, 0)
            while (ends_part := written.pop(shard.file(self.folder), None)) is False:
                shard = Shard(part, shard.number + 1)
            pending += [shard] if ends_part is None else []
        begun = {shard.file(self.folder).name.rpartition("-")[0] for shard in pending}
        if others := sorted(file for file in written if file.name.rpartition("-")[0] not in begun):
            raise _foreign(others[0])
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
            columns = self._columns(batch.pop("inputs"), accelerator.device)
            unfinished.setdefault(batch["shard"], []).append(with_columns(batch, columns, self.settings))
            seen = (len(batch["rows"]) + len(batch["broken"])) * accelerator.num_processes
            bar.update(seen if self.count is None else min(seen, self.count - bar.done - bar.images))
            if batch["ends"]:
                write_shard(batch["shard"].file(self.folder), unfinished.pop(batch["shard"]))

    def _columns(self, inputs: dict[str, torch.Tensor] | None, device: torch.device) -> Columns:
        """Return the columns of a batch; for a batch without a readable image, empty columns of the same types."""
        shown = dict(self.image_processor([BLANK], return_tensors="pt")) if inputs is None else inputs
        columns = self.columns_of({name: values.to(device, non_blocking=True) for name, values in shown.items()})
        return columns if inputs is not None else {name: values.slice(1) for name, values in columns.items()}

    def _manifest(self) -> dict[str, Any]:
        """Return the manifest of a complete run, from the metadata of its shards."""
        shards, broken = {}, []
        for file in sorted(self.folder.glob(SHARDS)):
            shards[file.name] = parquet.read_metadata(file).num_rows
            broken += notes_of(file)["broken"]
        return {
            "complete": True,
            "settings": self.settings,
            "images": sum(shards.values()),
            "unreadable_images": broken,
            "shards": shards,
            "environment": environment(),
        }


def with_columns(batch: Mapping[str, Any], columns: Columns, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add columns to a batch, for `table_of`.

    Args:
        batch: The batch, with `rows`, `paths`, `names` and others.
        columns: The features or predictions of these rows.
        settings: Settings of the computation; missing ones are those in `EXACT`.

    Raises:
        TrainingError: A feature or prediction is not a finite number.
    """
    for name, values in columns.items():
        flat = values
        while isinstance(flat, pa.ListArray | pa.FixedSizeListArray):
            flat = flat.flatten()
        if not pa.types.is_floating(flat.type):
            continue
        numbers = flat.to_numpy(zero_copy_only=False)
        if len(wrong := np.flatnonzero(~np.isfinite(numbers))):
            place = wrong[0] * len(values) // len(numbers)  # each row has as many numbers
            image = batch["names"][place]
            ways = [f"--{option} {exact}" for option, exact in EXACT.items() if settings.get(option, exact) != exact]
            advice = f"Give {' and '.join(ways)}" if ways else "Check the weights of the model, or export it in float32"
            raise TrainingError(f"The {name} of {image} is {numbers[wrong[0]]}: expected finite numbers. {advice}.")
    return {**batch, "columns": columns}


def table_of(batches: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the columns of batches from `with_columns` as one table."""
    columns: dict[str, list[pa.Array]] = {}
    for batch in batches:
        shown = {"row": pa.array(batch["rows"], pa.int64()), "path": pa.array(batch["paths"], pa.string())}
        for name, values in (shown | batch["columns"]).items():
            columns.setdefault(name, []).append(values)
    return pa.table({name: pa.chunked_array(values) for name, values in columns.items()}).combine_chunks()


def write_shard(file: Path, batches: Sequence[Mapping[str, Any]]) -> None:
    """Write a shard, complete or not at all."""
    notes = {
        "ends_part": batches[-1]["ends"] == "part",
        "broken": [broken for batch in batches for broken in batch["broken"]],
    }
    with staged_file(file, force=True) as new:
        parquet.write_table(table_of(batches).replace_schema_metadata({METADATA: json.dumps(notes)}), new)


def notes_of(file: Path) -> dict[str, Any]:
    """Return the metadata of a shard: `ends_part`, and the `broken` images that it leaves out.

    Raises:
        OutputExistsError: plain-vit did not write the file.
    """
    try:
        return dict(json.loads(parquet.read_schema(file).metadata[METADATA]))
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise _foreign(file) from error


def _foreign(file: Path) -> OutputExistsError:
    return OutputExistsError(f"{file} is not a shard of this run: remove it, or give another folder.")


def table_of_files(
    files: Sequence[str], image_processor: Any, columns_of: Callable[[dict[str, torch.Tensor]], Columns]
) -> tuple[pa.Table, list[str]]:
    """Return the columns of image files, and which files cannot be read and why.

    Args:
        files: Paths of the images.
        image_processor: The model's image processor.
        columns_of: As for `Run`.

    Raises:
        DataError: None of the files can be read.
        TrainingError: A feature or prediction is not a finite number.
    """
    rows = [{"image": {"path": file, "bytes": None}} for file in files]
    batches = list(Parts(rows, image_processor, len(rows), BATCH, [Shard(0, 0)]))
    broken = [each for batch in batches for each in batch["broken"]]
    if len(broken) == len(files):
        raise DataError(f"No image can be read: {', '.join(broken)}.")
    readable = [batch for batch in batches if batch["rows"]]
    return table_of([with_columns(batch, columns_of(batch["inputs"]), {}) for batch in readable]), broken


# Columns


def features_of(
    model: Any, inputs: Mapping[str, torch.Tensor], *, kind: str, layers: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the features of images, by the names of their columns.

    Args:
        model: A `PlainViTModel`.
        inputs: Outputs of the image processor.
        kind: `pooled`: the input of a classifier; `cls`; `mean` of the patches; `cls_mean`: both concatenated;
            `patches`: a grid [B, h, w, D].
        layers: Numbers, from 1, of the blocks whose outputs to use; empty for the last block, after the final norm.

    Raises:
        TrainingError: The images have many sizes, and the features are not `pooled`.
    """
    if kind != "pooled" and "spatial_shapes" in inputs:
        raise TrainingError("Of images of many sizes only pooled features can be extracted: give --feature pooled.")
    inputs = {name: values.to(model.dtype) if name == "pixel_values" else values for name, values in inputs.items()}
    read = num_tokens_needed(model, kind, layers)
    outputs = model(**inputs, num_output_tokens=read, output_hidden_states=bool(layers))
    if kind == "pooled":
        return {"feature": outputs.pooler_output}
    tokens = {f"feature_{layer}": outputs.hidden_states[layer] for layer in layers}
    size = inputs["pixel_values"].shape[-2:]
    return {
        name: _gather(model, states, (size[0], size[1]), kind)
        for name, states in (tokens or {"feature": outputs.last_hidden_state}).items()
    }


def num_tokens_needed(model: Any, kind: str, layers: Sequence[int]) -> int | None:
    """Return how many leading tokens the last block must compute; None for all, as in the graph of an engine."""
    if layers or isinstance(model, EngineModel):
        return None
    return {"pooled": model.pooler.num_tokens_read, "cls": 1}.get(kind)


def _gather(model: Any, states: torch.Tensor, size: tuple[int, int], kind: str) -> torch.Tensor:
    if kind == "cls":
        return states[:, 0]
    grid = model.tokens_to_map(states, *size)  # B D h w
    if kind == "patches":
        return grid.permute(0, 2, 3, 1)
    mean = grid.flatten(2).mean(dim=2)
    return mean if kind == "mean" else torch.cat((states[:, 0], mean), dim=1)


def check_features(config: PlainViTConfig, kind: str, layers: Sequence[int]) -> None:
    """Refuse features that a model does not have.

    Raises:
        TrainingError: The model has no class token, no pooling or fewer blocks, or pooled features of a block are
            requested.
    """
    if "cls" in kind and not config.use_class_token:
        raise TrainingError("The model has no class token: give --feature mean or patches.")
    if kind == "pooled" and config.pooling == "none":
        raise TrainingError("The model does not pool its tokens: give --feature mean or patches.")
    if kind == "pooled" and layers:
        raise TrainingError("Only the last block is pooled: omit --layers, or give --feature cls, mean or patches.")
    wrong = [layer for layer in layers if not 1 <= layer <= config.num_hidden_layers]
    if wrong:
        raise TrainingError(f"--layers {wrong[0]}: the model has the blocks 1 to {config.num_hidden_layers}.")


def check_outputs(model: Any, layers: Sequence[int], engine: str) -> None:
    """Refuse features that the graph of an engine does not return.

    Raises:
        TrainingError: The graph is a classifier's, or outputs of blocks are requested.
    """
    is_graph = isinstance(model, EngineModel)
    if layers and (is_graph or engine != "torch"):
        raise TrainingError("A graph in an engine gives no outputs of blocks: omit --layers, or compute with torch.")
    if is_graph and isinstance(model, PlainViTForImageClassification):
        raise TrainingError("The graph gives logits only: export model.base_model, with to_checkpoint in Python.")


def as_columns(tensors: Mapping[str, torch.Tensor]) -> Columns:
    """Return tensors of shape (B, ...) as columns of fixed-size lists."""
    columns = {}
    for name, tensor in tensors.items():
        values = pa.array(tensor.cpu().flatten().numpy())
        for size in reversed(tensor.shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, size)
        columns[name] = values
    return columns


def predictions_of(model: Any, inputs: Mapping[str, torch.Tensor], *, top: int) -> Columns:
    """Return the likeliest classes or labels of images: `label` and `probability`, and lists of the first `top`.

    For a regression, return the names of its numbers, `labels`, and the predicted `values`.

    Args:
        model: A `PlainViTForImageClassification`.
        inputs: Outputs of the image processor.
        top: Number of classes in the lists, at most all.
    """
    inputs = {name: values.to(model.dtype) if name == "pixel_values" else values for name, values in inputs.items()}
    shares = scores(model(**inputs).logits.float(), model.config.problem_type)
    names = names_of_classes(model.config)
    if model.config.problem_type == REGRESSION:
        return {
            "labels": pa.array([names] * len(shares), pa.list_(pa.string())),
            "values": pa.array(shares.tolist(), pa.list_(pa.float32())),
        }
    probabilities, classes = (values.cpu().numpy() for values in shares.topk(min(top, shares.shape[-1]), dim=-1))
    labels = np.asarray(names, dtype=object)[classes]
    return {
        "label": pa.array(labels[:, 0], pa.string()),
        "probability": pa.array(probabilities[:, 0]),
        "labels": pa.array(labels.tolist(), pa.list_(pa.string())),
        "probabilities": pa.array(probabilities.tolist(), pa.list_(pa.float32())),
    }


# Inputs


def open_images(options: BulkOptions) -> Dataset | IterableDataset:
    """Open the images of a split, undecoded."""
    named = keywords(options, ImageOptions)
    return as_files(load_images(**named, split=options.split, streaming=options.streaming, all_of_folder=True))


def open_model(options: BulkOptions) -> tuple[Any, Any]:
    """Open a checkpoint as our model, in float32, with its image processor; or a folder exported to an engine.

    Raises:
        TrainingError: The checkpoint has no image processor, or an option does not apply to an exported folder.
    """
    hints = checkpoint_hints(options.model_hints)
    if is_exported(options.model):
        if hints or options.engine != "torch":
            raise TrainingError(f"{options.model} was exported to an engine: give neither --model_hints nor --engine.")
        return open_with_processor(options.model, dtype=dtype_of(options), batch_size=options.batch_size)
    converted = from_checkpoint(options.model, **hints)
    if converted.image_processor is None:
        raise TrainingError(f"{options.model} has no image processor: convert it first, with its mean and deviation.")
    return converted.model.float(), converted.image_processor


def prepared(model: Any, options: BulkOptions, accelerator: Accelerator) -> Any:
    """Prepare a model for inference on the device of a process or in an engine, in the chosen precision."""
    if isinstance(model, EngineModel):
        return model
    if options.engine == "torch":
        model = model.to(accelerator.device)
    return prepare_for_inference(model, dtype=dtype_of(options), batch_size=options.batch_size, engine=options.engine)


def dtype_of(options: BulkOptions) -> torch.dtype:
    """Return the dtype in which the model computes."""
    return {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.mixed_precision]


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
