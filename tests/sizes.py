"""How much a test draws: little in every run, much in the nightly one."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
NIGHTLY = os.environ.get("PLAIN_VIT_NIGHTLY") == "1"


def draws(usually: int, nightly: int) -> int:
    """Return how many inputs to generate: `nightly` of them where the environment has PLAIN_VIT_NIGHTLY=1."""
    return nightly if NIGHTLY else usually


def few(table: Iterable[T], usually: int) -> list[T]:
    """Return so many cases of a table, evenly spaced; all of them where the environment has PLAIN_VIT_NIGHTLY=1."""
    cases = list(table)
    return cases if NIGHTLY else cases[:: max(1, -(-len(cases) // usually))]
