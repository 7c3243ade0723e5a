"""Orders in which rows are drawn, and randomness as a function of what it is for.

Everything random is a function of the seed, the epoch, the row of the image and which of its copies it is. So a batch
is the same in whichever process or worker it is made, and a run resumed in the middle of an epoch sees what it would
have seen.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import Sampler


class ShuffledStream(Sampler[tuple[int, ...]]):
    """Draw the rows of a set in one shuffled order after the other, without end between them.

    A batch may hold the end of one epoch and the beginning of the next: no image is left out and none is doubled,
    unless the classes are balanced: then each row is drawn anew, every class as often as the others.

    Repeated augmentation (Berman et al. 2019, Hoffer et al. 2020; order of drawing as in DeiT's `RASampler`) takes the
    first rows of an epoch's order only, several copies of each, until the epoch has as many images as the set. The
    copies that fall into a batch are spread over it: first one of each image, then another of each. So processes get
    different ones, and what mixes neighbours does not blend an image with itself.

    Yields:
        What decides an image: (epoch, row), and (epoch, row, number) where that row was drawn before in the epoch.

    Args:
        rows: size of the set.
        length: how many rows to draw in all, over all epochs.
        seed: decides the orders.
        start: how many rows the run had drawn when it was stopped.
        balanced_by: the classes of the rows, to draw each class equally often.
        repeats: copies of an image, which differ in their augmentation.
        batch_size: images of one optimizer step, over which copies are spread.
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
        done = self.start % self.batch_size  # of the batch in which the run is resumed
        drawn = self._drawn(self.start - done)
        while batch := list(itertools.islice(drawn, self.batch_size)):
            spread = [place for copy in range(self.repeats) for place in batch[copy :: self.repeats]]
            yield from spread[done:]
            done = 0

    def _drawn(self, first: int) -> Iterator[tuple[int, ...]]:
        """Draw rows from the first position on, the copies of each side by side."""
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
    """Return how often each row of an order occurs before each of its places."""
    places = np.argsort(order, kind="stable")
    _, first, counts = np.unique(order[places], return_index=True, return_counts=True)
    before = np.empty_like(order)
    before[places] = np.arange(len(order)) - np.repeat(first, counts)
    return before


def randomness(*key: int) -> int:
    """Return a seed of 64 bits that depends on every part of the key, so that neighbours are unrelated."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest())


@contextmanager
def cpu_randomness(*key: int) -> Iterator[None]:
    """Set torch's generator for the CPU, which the transforms draw from, and put it back."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(randomness(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
