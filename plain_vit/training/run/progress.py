"""Progress of a run: a bar, and a table with one row per evaluation."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

COLUMN = 10  # minimum width in characters


class Progress:
    """Progress bar over all training images, training clock, and table.

    The clock stops while the run does something other than training. Time spent waiting for data is the time the loop
    needs to get its next batch, even if an accelerator is still busy with the previous one.

    Args:
        total: Number of training images, over all epochs and processes.
        done: Number of images before the run was resumed.
        shown: Whether to print; only one of several processes does.
    """

    def __init__(self, *, total: int, done: int, shown: bool) -> None:
        self.images, self.waited, self.paused = 0, 0.0, 0.0
        self.begun = time.perf_counter()
        self.last_row = (0, 0.0)  # images and seconds at the last row of the table
        self.bar = tqdm(
            total=total, initial=done, unit="img", unit_scale=True, dynamic_ncols=True, mininterval=0.2,
            disable=not shown,
        )  # fmt: skip
        self.say = tqdm.write if shown else lambda line: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.bar.close()

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
        """Stop the clock, for evaluations, checkpoints and figures."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - since

    @property
    def seconds(self) -> float:
        """Return the time spent training."""
        return time.perf_counter() - self.begun - self.paused

    def rates(self) -> dict[str, float]:
        """Return images per second, and the fraction of time spent waiting for data, since the start."""
        seconds = max(self.seconds, 1e-9)
        return {"images_per_second": self.images / seconds, "waiting_for_data": min(1.0, self.waited / seconds)}

    def update(self, images: int) -> None:
        """Advance by the images of one optimizer step, over all processes."""
        self.images += images
        self.bar.update(images)

    def show(self, **values: str) -> None:
        """Show values next to the bar, which shows images per second and the time left."""
        values["waiting for data"] = f"{self.rates()['waiting_for_data']:.0%}"
        self.bar.set_postfix_str(", ".join(f"{name} {value}" for name, value in values.items()), refresh=False)

    def row(self, cells: Mapping[str, str]) -> None:
        """Print one row of the table, with images per second since the last one, and the time; the header comes first.

        Args:
            cells: Cells by column name, the same columns in every row.
        """
        images, seconds = self.images - self.last_row[0], self.seconds - self.last_row[1]
        cells = {
            **cells,
            "images/s": f"{images / max(seconds, 1e-9):.0f}",
            "time": tqdm.format_interval(time.perf_counter() - self.begun),
        }
        if self.last_row == (0, 0.0):
            self.say("".join(name.rjust(_width(name)) for name in cells))
        self.say("".join(cell.rjust(_width(name)) for name, cell in cells.items()))
        self.last_row = (self.images, self.seconds)


def _width(name: str) -> int:
    return max(COLUMN, len(name) + 2)
