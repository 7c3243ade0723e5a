"""Streaming of training images, for datasets larger than the disk.

A stream offers weaker guarantees than a stored dataset:

- Each worker of each process reads its own shards, so there must be at least as many shards as workers in total. The
  order of shards is shuffled, and so are images within blocks of consecutive ones. If shards differ in size, images of
  small shards come more often.
- A resumed run gives the same batches if it has the same number of processes and workers. Each worker continues with
  the block of images that it was in: it skips the earlier rows of that shard without decoding them.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ...errors import DataError
from ...system.extras import needs
from .augmentation import TrainingTransform

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
    from datasets import IterableDataset

TRIED = 1000  # number of rows to search for a readable image

# Start of a block of images: epoch, shards before it in the epoch's order, rows before it in its shard, and images
# before it since the start of the run.
Position = tuple[int, int, int, int]


class StreamedImages(torch.utils.data.IterableDataset):
    """Infinite stream of the training images of one process.

    An unreadable image and its label are replaced by the next readable ones, and reported in `broken`.

    Args:
        stream: rows with an `image`, as a file, and a `label`.
        transform: maps a stored image to pixels (C, H, W) in [0, 255].
        classes: number of classes.
        batch_size: batch size of this process.
        batches_before: number of batches of this process before the run was resumed.
        buffer: size of the blocks in which images are shuffled.
        process: (number of this process, number of processes).
        seed: seed of order and augmentation.
        positions: positions at which the run is resumed, by the number of the worker's part; a part without one is
            read from its beginning.
    """

    def __init__(
        self,
        stream: IterableDataset,
        transform: TrainingTransform,
        *,
        classes: int,
        batch_size: int,
        batches_before: int,
        buffer: int,
        process: tuple[int, int],
        seed: int,
        positions: Mapping[int, Position] | None = None,
    ) -> None:
        self.stream, self.positions = stream, dict(positions or {})
        self.transform, self.classes, self.seed, self.buffer = transform, classes, seed, buffer
        self.batch_size, self.batches_before, self.process = batch_size, batches_before, process

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        # The loader takes a batch from each worker in turn, starting with the first: in a resumed run, the first
        # worker takes the role of the worker whose turn it was.
        number = (number + self.batches_before) % workers
        batches = self.batches_before // workers + (number < self.batches_before % workers)
        process, processes = self.process
        part = process * workers + number
        start = self.positions.get(part, (0, 0, 0, 0))
        rows = self._shuffled(self.stream.shard(num_shards=processes * workers, index=part), part, start)
        ahead: deque[dict[str, Any]] = deque()  # rows that have already replaced an earlier row
        for place in itertools.count(start[-1]):
            row = ahead.popleft() if ahead else next(rows)
            if place < batches * self.batch_size:
                continue
            key = (self.seed, part, place)
            levels, broken = self.transform.read(row["image"], f"image {place} of part {part}", key)
            label = row["label"]
            for other in itertools.count():
                if levels is not None:
                    break
                if other == TRIED:
                    raise DataError(f"{TRIED} images in a row cannot be read, the first one is {broken}.")
                if other == len(ahead):
                    ahead.append(next(rows))
                levels, _ = self.transform.read(ahead[other]["image"], "", key)
                label = ahead[other]["label"]
            position = torch.tensor([part, *row["position"]])
            yield {"pixel_values": levels, "labels": label, "broken": broken, "position": position}

    def _shuffled(self, part: IterableDataset, number: int, start: Position) -> Iterator[dict[str, Any]]:
        """Yield the undecoded rows of a part's shards, epoch after epoch, each with the position of its block."""
        shards = [part.shard(num_shards=part.num_shards, index=index) for index in range(part.num_shards)]
        epoch, done, skipped, place = start
        while True:
            order = np.random.default_rng((self.seed, number, epoch)).permutation(len(shards))
            rows = _rows([shards[index] for index in order], done, skipped)
            empty = done == skipped == 0
            while block := list(itertools.islice(rows, self.buffer)):
                empty = False
                position = (epoch, block[0][0], block[0][1], place)
                for index in np.random.default_rng((self.seed, number, *position)).permutation(len(block)):
                    row = block[index][-1]
                    if not 0 <= row["label"] < self.classes:
                        raise DataError(f"A label of the stream is {row['label']}: expected 0 to {self.classes - 1}.")
                    yield {"image": row["image"], "label": row["label"], "position": position}
                place += len(block)
            if empty:
                raise DataError("A part of the stream has no images: use fewer workers, or fill its shards.")
            epoch, done, skipped = epoch + 1, 0, 0


def _rows(shards: Sequence[IterableDataset], done: int, skipped: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield shard number, row number in the shard, and row, starting at a position."""
    for number, shard in enumerate(shards[done:], done):
        # `iter(shard)` would divide the shards among the workers again.
        for offset, rows in enumerate(shard.skip(skipped).iter(batch_size=1), skipped):
            yield number, offset, {name: values[0] for name, values in rows.items()}
        skipped = 0


class StreamedBatches:
    """Yield batches on the device of this process, and track the positions at which a resumed run continues.

    Args:
        images: the images of this process.
        accelerator: accelerator of the run.
        count: number of batches.
        **loading: `num_workers` and other options of the loader.

    Raises:
        DataError: The stream has fewer shards than workers.
    """

    def __init__(self, images: StreamedImages, accelerator: Accelerator, *, count: int, **loading: Any) -> None:
        readers = accelerator.num_processes * max(1, loading.get("num_workers", 0))
        if images.stream.num_shards < readers:
            raise DataError(
                f"The stream has {images.stream.num_shards} shards, which cannot be divided among {readers} workers: "
                "use fewer processes or --num_workers, or store the dataset in more files."
            )
        collate = images.transform.collate
        self.loader: DataLoader[Any] = DataLoader(images, batch_size=images.batch_size, collate_fn=collate, **loading)
        self.device, self.count, self.positions = accelerator.device, count, dict(images.positions)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in itertools.islice(self.loader, self.count):
            part, *position = batch.pop("position")[-1].tolist()
            self.positions[part] = tuple(position)
            yield send_to_device(batch, self.device, non_blocking=True)
