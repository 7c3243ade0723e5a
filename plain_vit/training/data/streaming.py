"""Streams of training images, for datasets larger than the disk.

A stream offers weaker guarantees than a stored dataset:

- Every worker of every process has shards of its own, so there must be as many shards as workers in total. Images are
  shuffled within a buffer, shards with each other. If shards differ in size, images of small ones come more often.
- A resumed run reads the stream again up to its position, without decoding it, and then gives the same batches. This
  requires the same number of processes and workers.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from ...errors import DataError
from ...extras import needs
from .augmentation import TrainingTransform

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
    from datasets import IterableDataset

TRIED = 1000  # rows searched for a readable image


class StreamedImages(torch.utils.data.IterableDataset):
    """Infinite stream of the images of one process.

    An unreadable image is replaced by the next readable one, with that one's label, and named in `broken`.

    Args:
        stream: rows with an `image`, as a file, and a `label`.
        transform: maps a stored image to pixels (C, H, W) in [0, 255].
        classes: number of classes.
        batch_size: batch size of this process.
        batches_before: number of batches of this process before the run was resumed.
        buffer: size of the shuffle buffer, in images.
        process: (number of this process, number of processes).
        seed: seed of order and augmentation.
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
    ) -> None:
        self.stream = stream
        self.transform, self.classes, self.seed, self.buffer = transform, classes, seed, buffer
        self.batch_size, self.batches_before, self.process = batch_size, batches_before, process

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        # The loader takes a batch from each worker in turn, starting with the first: in a resumed run, the first
        # takes the role of the worker whose turn it was.
        number = (number + self.batches_before) % workers
        batches = self.batches_before // workers + (number < self.batches_before % workers)
        process, processes = self.process
        part = process * workers + number
        rows = self._rows(self.stream.shard(num_shards=processes * workers, index=part))
        ahead: deque[dict[str, Any]] = deque()  # rows that already replaced an earlier one
        for place in itertools.count():
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
            yield {"pixel_values": levels, "labels": label, "broken": broken}

    def _rows(self, shards: IterableDataset) -> Iterator[dict[str, Any]]:
        """Yield the undecoded rows of some shards, epoch after epoch."""
        shuffled = shards.shuffle(seed=self.seed, buffer_size=self.buffer)
        for epoch in itertools.count():
            shuffled.set_epoch(epoch)
            empty = True
            # Not `iter(shuffled)`, which would divide the shards among the workers again.
            for rows in shuffled.iter(batch_size=1):
                empty = False
                label = rows["label"][0]
                if not 0 <= label < self.classes:
                    raise DataError(f"A label of the stream is {label}: expected 0 to {self.classes - 1}.")
                yield {"image": rows["image"][0], "label": label}
            if empty:
                raise DataError("A part of the stream has no images: use fewer workers, or fill its shards.")


def streamed_batches(
    images: StreamedImages, accelerator: Accelerator, *, count: int, **loading: Any
) -> Iterator[dict[str, Any]]:
    """Yield batches on the device of this process.

    Args:
        images: the images of this process.
        accelerator: accelerator of the run.
        count: number of batches.
        **loading: `num_workers` and other options of the loader.

    Raises:
        DataError: There are fewer shards than workers.
    """
    readers = accelerator.num_processes * max(1, loading.get("num_workers", 0))
    if images.stream.num_shards < readers:
        raise DataError(
            f"The stream has {images.stream.num_shards} shards, which cannot be divided among {readers} workers: use "
            "fewer processes or --num_workers, or store the dataset in more files."
        )
    loader = DataLoader(images, batch_size=images.batch_size, **loading)
    return (send_to_device(batch, accelerator.device) for batch in itertools.islice(loader, count))
