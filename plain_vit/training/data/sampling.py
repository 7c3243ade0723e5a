"""Sampling of rows, and random seeds for images.

Everything random is a function of the seed, the epoch, the row of the image and its copy. A batch is therefore the same
in any process or worker, and a run resumed in the middle of an epoch sees the same images as an uninterrupted one.
"""

import hashlib
import itertools
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
        self.shares: np.ndarray | None = None
        if balanced_by is not None:
            _, classes, counts = np.unique(np.asarray(balanced_by), return_inverse=True, return_counts=True)
            self.shares = 1 / (len(counts) * counts[classes])

    def __len__(self) -> int:
        return self.length - self.start

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        done = self.start % self.batch_size  # start of the batch at which the run is resumed
        drawn = self._drawn(self.start - done)
        while batch := list(itertools.islice(drawn, self.batch_size)):
            spread = [place for copy in range(self.repeats) for place in batch[copy :: self.repeats]]
            yield from spread[done:]
            done = 0

    def _drawn(self, first: int) -> Iterator[tuple[int, ...]]:
        """Yield rows from the first position on, with the copies of each adjacent."""
        order_of = None
        for position in range(first, self.length):
            epoch, place = divmod(position, self.rows)
            if epoch != order_of:
                order_of, order = epoch, self._order(np.random.default_rng((self.seed, epoch)))
                before = _times_before(order)
            number, copy = divmod(place, self.repeats)
            row, copy = int(order[number]), copy + self.repeats * int(before[number])
            yield (epoch, row, copy) if copy else (epoch, row)

    def _order(self, rng: np.random.Generator) -> np.ndarray:
        if self.shares is None:
            return rng.permutation(self.rows)
        return rng.choice(self.rows, size=self.rows, p=self.shares)


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
