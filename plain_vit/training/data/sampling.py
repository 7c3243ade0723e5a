"""Sampling of rows, and random seeds for images.

All randomness is a function of the seed, the epoch, the row of the image and the number of its copy. Batches are
therefore the same in any process or worker, and a run resumed in mid-epoch sees the same images as one without a stop.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import Sampler


class ShuffledStream(Sampler[tuple[int, ...]]):
    """Sample rows as a continuous stream of shuffled epochs.

    A batch may contain the end of one epoch and the beginning of the next, so every image is used exactly once per
    epoch. With balanced classes, rows are drawn independently, and each class equally often.

    Repeated augmentation (Berman et al. 2019, Hoffer et al. 2020; order as in DeiT's `RASampler`) uses only the first
    rows of an epoch's order, with several copies of each, until the epoch has as many images as the dataset. A batch
    has one copy of each image first, then the next copy of each, and so on. Processes thus get different copies, and
    mixup of neighbours does not blend an image with itself.

    Yields:
        The key of an image: (epoch, row), or (epoch, row, number) if that row was drawn before in the epoch.

    Args:
        rows: size of the dataset.
        length: number of rows to draw, over all epochs.
        seed: seed of the orders.
        start: number of rows drawn before, in a resumed run.
        balanced_by: the class of each row, to draw each class equally often.
        repeats: number of copies of each image, which differ in their augmentation.
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
        """Return the keys of the images at these places in the stream, all within one batch."""
        if not len(places):
            return []
        first = int(places[0]) // self.batch_size * self.batch_size
        spread = _spread(min(self.batch_size, self.length - first), self.repeats)
        return [self._key(position) for position in (first + spread[places - first]).tolist()]

    def _key(self, position: int) -> tuple[int, ...]:
        """Return the key at a position of the order in which the copies of each image are adjacent."""
        epoch, place = divmod(position, self.rows)
        if epoch not in self.orders:
            # Keep the neighbouring epoch too: a batch may contain images of both.
            self.orders = {known: order for known, order in self.orders.items() if abs(known - epoch) == 1}
            self.orders[epoch] = self._order(np.random.default_rng((self.seed, epoch)))
        order, before = self.orders[epoch]
        number, copy = divmod(place, self.repeats)
        copy += 0 if before is None else self.repeats * int(before[number])
        row = int(order[number])
        return (epoch, row, copy) if copy else (epoch, row)

    def _order(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """Return an epoch's rows in order and, if rows repeat, how often each has occurred before."""
        if self.shares is None:
            return rng.permutation(self.rows), None
        order = rng.choice(self.rows, size=self.rows, p=self.shares)
        return order, _times_before(order)


@functools.lru_cache(maxsize=2)
def _spread(images: int, repeats: int) -> np.ndarray:
    """Return the order of a batch's images that spreads adjacent copies over the batch."""
    return np.concatenate([np.arange(copy, images, repeats) for copy in range(min(repeats, images))])


class MicroBatches(Sampler[list[tuple[int, ...]]]):
    """Batch sampler of one process: yields the micro-batches of this process from each batch of a stream.

    The first images of a batch form the first micro-batch of the first process, the next images the first micro-batch
    of the second process, and so on.

    Args:
        stream: the images of all processes; its start and length are multiples of its batch size.
        size: images of a micro-batch; all micro-batches of all processes make up a batch.
        process: number of this process.
        processes: number of processes.
        followed: append to each micro-batch the image that follows it in the batch; the first image follows the last.
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
    """Return, for each position of an order, how often its row has occurred before."""
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
