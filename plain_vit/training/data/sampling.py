"""Sampling of rows, and random seeds for images.

Everything random is a function of the seed, the epoch, the row of the image and its copy. A batch is therefore the same
in any process or worker, and a run resumed in the middle of an epoch sees the same images as an uninterrupted one.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import Sampler


class ShuffledStream(Sampler[tuple[int, ...]]):
    """Sample rows in one shuffled epoch after another, as a continuous stream.

    A batch may contain the end of one epoch and the beginning of the next, so every image is used exactly once per
    epoch. With balanced classes, each row is drawn independently, every class equally often.

    Repeated augmentation (Berman et al. 2019, Hoffer et al. 2020; order as in DeiT's `RASampler`) uses only the first
    rows of an epoch's order, with several copies of each, until the epoch has as many images as the dataset. The copies
    within a batch are spread over it: first one copy of each image, then the next of each. Processes thus get different
    copies, and mixup of neighbours does not blend an image with itself.

    Yields:
        The key of an image: (epoch, row), or (epoch, row, number) if that row was drawn before in the epoch.

    Args:
        rows: size of the dataset.
        length: number of rows to draw, over all epochs.
        seed: seed of the orders.
        start: number of rows drawn before, in a resumed run.
        balanced_by: the classes of the rows, to draw each class equally often.
        repeats: copies of an image, which differ in their augmentation.
        batch_size: images per optimizer step, over which copies are spread.
    """

    def __init__(
        self,
        rows: int,
        *,
        length: int,
        seed: int,
        start: int = 0,
        balanced_by: Sequence[int] | None = None,
        repeats: int = 1,
        batch_size: int = 1,
    ) -> None:
        self.rows, self.length, self.seed, self.start = rows, length, seed, start
        self.repeats, self.batch_size = repeats, batch_size
        self.orders: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}  # of the current epochs
        self.shares: np.ndarray | None = None
        if balanced_by is not None:
            _, classes, counts = np.unique(np.asarray(balanced_by), return_inverse=True, return_counts=True)
            self.shares = 1 / (len(counts) * counts[classes])

    def __len__(self) -> int:
        return self.length - self.start

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        for first in range(self.start - self.start % self.batch_size, self.length, self.batch_size):
            places = np.arange(max(first, self.start), min(first + self.batch_size, self.length))
            yield from self.keys(places)

    def keys(self, places: np.ndarray) -> list[tuple[int, ...]]:
        """Return the keys of the images at some places of the stream, all within one batch."""
        if not len(places):
            return []
        first = int(places[0]) // self.batch_size * self.batch_size
        spread = _spread(min(self.batch_size, self.length - first), self.repeats)
        return [self._key(position) for position in (first + spread[places - first]).tolist()]

    def _key(self, position: int) -> tuple[int, ...]:
        """Return the key of a position in the order with the copies of each image adjacent."""
        epoch, place = divmod(position, self.rows)
        if epoch not in self.orders:
            # A batch has images of neighbouring epochs, unless epochs are shorter than batches.
            self.orders = {known: order for known, order in self.orders.items() if abs(known - epoch) == 1}
            self.orders[epoch] = self._order(np.random.default_rng((self.seed, epoch)))
        order, before = self.orders[epoch]
        number, copy = divmod(place, self.repeats)
        copy += 0 if before is None else self.repeats * int(before[number])
        row = int(order[number])
        return (epoch, row, copy) if copy else (epoch, row)

    def _order(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the rows of an epoch in order, and how often each has occurred before if they repeat."""
        if self.shares is None:
            return rng.permutation(self.rows), None
        order = rng.choice(self.rows, size=self.rows, p=self.shares)
        return order, _times_before(order)


@functools.lru_cache(maxsize=2)
def _spread(images: int, repeats: int) -> np.ndarray:
    """Return the positions of a batch's images, whose copies are adjacent, such that they are spread over the batch."""
    return np.concatenate([np.arange(copy, images, repeats) for copy in range(min(repeats, images))])


class MicroBatches(Sampler[list[tuple[int, ...]]]):
    """Batch sampler of one process: its micro-batches of each batch of a stream, without the others.

    The first images of a batch are the first micro-batch of the first process, the next ones that of the second
    process, and so on.

    Args:
        stream: the images of all processes; its length is a multiple of its batch size, at which it also starts.
        size: images of a micro-batch; all micro-batches of all processes make up a batch.
        process: number of this process.
        processes: number of processes.
        followed: append the image after the last one in the batch; the first image follows the last.
    """

    def __init__(
        self, stream: ShuffledStream, size: int, *, process: int = 0, processes: int = 1, followed: bool = False
    ) -> None:
        self.stream, self.size, self.process, self.processes = stream, size, process, processes
        self.followed = followed

    def __len__(self) -> int:
        return len(self.stream) // (self.size * self.processes)

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        images = self.stream.batch_size
        own = self.process * self.size + np.arange(self.size + self.followed)
        for batch in range(self.stream.start, self.stream.length, images):
            for first in range(0, images, self.size * self.processes):
                yield self.stream.keys(batch + (first + own) % images)


def _times_before(order: np.ndarray) -> np.ndarray:
    """Return how often each row of an order has occurred before each position."""
    places = np.argsort(order, kind="stable")
    _, first, counts = np.unique(order[places], return_index=True, return_counts=True)
    before = np.empty_like(order)
    before[places] = np.arange(len(order)) - np.repeat(first, counts)
    return before


def randomness(*key: int) -> int:
    """Return a 64-bit seed from a hash of the key."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest())


@contextmanager
def cpu_randomness(*key: int) -> Iterator[None]:
    """Seed torch's CPU generator, which the transforms use, and restore it afterwards."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(randomness(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
