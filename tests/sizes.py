"""Numbers of generated cases: few in every run, many in the nightly run."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
NIGHTLY = os.environ.get("PLAIN_VIT_NIGHTLY") == "1"


def draws(usually: int, nightly: int) -> int:
    """Return how many inputs to generate: `nightly` if the environment has PLAIN_VIT_NIGHTLY=1, else `usually`."""
    return nightly if NIGHTLY else usually


def few(table: Iterable[T], usually: int) -> list[T]:
    """Return `usually` evenly spaced cases of a table, or all if the environment has PLAIN_VIT_NIGHTLY=1."""
    cases = list(table)
    return cases if NIGHTLY else cases[:: max(1, -(-len(cases) // usually))]
