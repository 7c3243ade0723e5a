"""Cases for the tests of the benchmark harness, whose processes import this and little else."""

import multiprocessing
import os
import time
from collections.abc import Callable

import torch

from benchmarks.harness import Case, Checked, Result, compare


def sleeping(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def sleeping_as_expected(seconds: float) -> Checked:
    return Checked(sleeping(seconds), 0.25)


def allocating(megabytes: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(megabytes * 10**6, dtype=torch.uint8)


def failing(after: int) -> Callable[[], None]:
    turns = iter(range(after))
    return lambda: print(next(turns))


def with_a_process(seconds: float) -> Callable[[], None]:
    def turn() -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,))
        process.start()
        process.join()
        assert process.exitcode == 0

    return turn


CASES = [
    Case("short", sleeping, {"seconds": 0.2}),
    Case("long", sleeping_as_expected, {"seconds": 0.5}, limit=0.4),
    Case("large", allocating, {"megabytes": 300}),
]


def in_one_process() -> list[Result]:
    """Compare the cases in this process, and notice if one is prepared in another."""
    processes = []

    def noting(seconds: float) -> Checked:
        processes.append(os.getpid())
        return sleeping_as_expected(seconds)

    short, long, large = CASES
    results = compare([short, Case(long.name, noting, long.arguments), large], turns=2, at_once=2, one_process=True)
    assert processes == [os.getpid()]
    return results
