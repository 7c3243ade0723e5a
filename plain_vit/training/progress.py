"""What a person sees of a run while it runs: one bar, and a table with one line per evaluation."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

WIDTHS = (7, 8, 12, 11, 12, 11, 10, 10, 9)  # of the columns of the table


class Progress:
    """A bar over all training images, the clock of the training, and the table.

    The clock stands still while the run does something else than training. Time spent waiting for data is what the loop
    needs to get its next batch, also where an accelerator is still busy with the one before.

    Args:
        total: Images to learn from, over all epochs and processes.
        done: Images that were learnt from before, in the run that goes on.
        watched: The split that is evaluated along the way, for the head of the table.
        shown: Print; only one of several processes does.
    """

    def __init__(self, *, total: int, done: int, watched: str, shown: bool) -> None:
        self.watched = watched
        self.images, self.waited, self.paused = 0, 0.0, 0.0
        self.begun = time.perf_counter()
        self.last_line = (0, 0.0)  # images and seconds at the last line of the table
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
        """Pass batches on, and add up the time that each one took to come."""
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
        """Stop the clock: for evaluations, checkpoints and pictures."""
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
        """Return images per second, and the share of the time spent waiting for data, 0 to 1, since the start."""
        seconds = max(self.seconds, 1e-9)
        return {"images_per_second": self.images / seconds, "waiting_for_data": min(1.0, self.waited / seconds)}

    def update(self, images: int) -> None:
        """Move on by the images of one optimizer step, over all processes."""
        self.images += images
        self.bar.update(images)

    def show(self, *, loss: float, accuracy: float) -> None:
        """Put values beside the bar, which itself shows images per second and the time left."""
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, accuracy {accuracy:.1%}, waiting for data {self.rates()['waiting_for_data']:.0%}",
            refresh=False,
        )

    def line(
        self,
        *,
        epoch: float,
        step: int,
        train_loss: float,
        train_accuracy: float,
        loss: float,
        accuracy: float,
        evaluated: str,
        learning_rate: float,
    ) -> None:
        """Print one line of the table, the head above the first.

        Args:
            epoch: Passes over the training images so far.
            step: Optimizer steps so far.
            train_loss: Mean over the images since the last line, as they were learnt from.
            train_accuracy: Likewise.
            loss: On the watched split.
            accuracy: On the watched split.
            evaluated: How many images of how many of the watched split.
            learning_rate: Of the last step.
        """
        if self.last_line == (0, 0.0):
            head = ("epoch", "step", "train loss", "train acc", f"{self.watched[:5]} loss", f"{self.watched[:5]} acc",
                    "lr", "images/s", "time")  # fmt: skip
            self.say(_row(*head) + f"  {self.watched} images")
        images, seconds = self.images - self.last_line[0], self.seconds - self.last_line[1]
        self.last_line = (self.images, self.seconds)
        self.say(
            _row(
                f"{epoch:.1f}", str(step), f"{train_loss:.4f}", f"{train_accuracy:.2%}", f"{loss:.4f}",
                f"{accuracy:.2%}", f"{learning_rate:.2e}", f"{images / max(seconds, 1e-9):.0f}",
                tqdm.format_interval(time.perf_counter() - self.begun),
            )
            + f"  {evaluated}"
        )  # fmt: skip


def _row(*cells: str) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
