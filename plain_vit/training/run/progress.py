"""Progress of a run: a bar in a terminal or lines in a file, and a table with a row per evaluation."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

COLUMN = 8  # minimum width in characters, without the space between columns


class Progress:
    """Progress over all training images, the training clock, and the table.

    A terminal shows a bar; elsewhere, such as in the log file of a job, each `show` prints a line.

    The clock stops while the run does something other than training. The time spent waiting for data is the time that
    the loop takes to get its next batch, even if the accelerator is still busy with the previous one.

    Args:
        total: Number of images, over all epochs and processes; None if unknown.
        done: Number of images before the run was resumed.
        shown: Whether to print; only one process should.
        before: `times` from before the run was resumed.
    """

    def __init__(self, *, total: int | None, done: int, shown: bool, before: Mapping[str, float] | None = None) -> None:
        self.images, self.waited, self.paused = 0, 0.0, 0.0
        self.begun, self.before = time.perf_counter(), before or {}
        self.ended: float | None = None
        self.last_row = (0, 0.0)  # images and seconds at the last row of the table
        self.total, self.done = total, done
        self.in_terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total, initial=done, unit="img", unit_scale=True, dynamic_ncols=True, mininterval=0.2,
            disable=not (shown and self.in_terminal),
        )  # fmt: skip
        self.say = tqdm.write if shown else lambda line: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.bar.close()
        self.ended = time.perf_counter()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and measure the time spent waiting for them."""
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - asked
            yield batch

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock in this context, for evaluations, checkpoints and figures."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - since

    @property
    def seconds(self) -> float:
        """Return the time spent training."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.begun - self.paused

    def rates(self) -> dict[str, float]:
        """Return images per second and the fraction of time spent waiting for data, since the start."""
        return rates_of(images=self.images, training=self.seconds, waiting=self.waited)

    def times(self) -> dict[str, float]:
        """Return images, seconds of training, and seconds thereof waiting for data, including before a resume."""
        own = {"images": self.images, "training": self.seconds, "waiting": self.waited}
        return {name: value + self.before.get(name, 0) for name, value in own.items()}

    def update(self, images: int) -> None:
        """Advance by the images of one optimizer step, over all processes."""
        self.images += images
        self.bar.update(images)

    def show(self, **values: str) -> None:
        """Show values, images per second and the time left."""
        rates = self.rates()
        values["waiting for data"] = f"{rates['waiting_for_data']:.0%}"
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        self.bar.set_postfix_str(text, refresh=False)
        if not self.in_terminal:
            seen, rate = self.done + self.images, f"{rates['images_per_second']:.0f} images/s"
            if self.total is None:
                self.say(f"{seen} images, {rate}, {text}")
                return
            left = tqdm.format_interval((self.total - seen) / max(rates["images_per_second"], 1e-9))
            self.say(f"{seen / self.total:4.0%}, {seen} of {self.total} images, {rate}, {left} left, {text}")

    def row(self, cells: Mapping[str, str]) -> None:
        """Print a row of the table, with the time and the images per second since the last row; the header comes first.

        Args:
            cells: Cells by column name; the columns are the same in every row.
        """
        images, seconds = self.images - self.last_row[0], self.seconds - self.last_row[1]
        cells = {
            **cells,
            "images/s": f"{images / max(seconds, 1e-9):.0f}",
            "time": tqdm.format_interval(time.perf_counter() - self.begun),
        }
        if self.last_row == (0, 0.0):
            self.say("".join(f"  {name:>{_width(name)}}" for name in cells))
        self.say("".join(f"  {cell:>{_width(name)}}" for name, cell in cells.items()))
        self.last_row = (self.images, self.seconds)


def rates_of(*, images: float, training: float, waiting: float) -> dict[str, float]:
    """Return images per second and the fraction of time spent waiting for data, from `Progress.times`."""
    seconds = max(training, 1e-9)
    return {"images_per_second": images / seconds, "waiting_for_data": min(1.0, waiting / seconds)}


def _width(name: str) -> int:
    return max(COLUMN, len(name))
