"""How much a test draws: little in every run, much in the nightly one."""

import os

NIGHTLY = os.environ.get("PLAIN_VIT_NIGHTLY") == "1"


def draws(usually: int, nightly: int) -> int:
    """Return how many inputs to generate: `nightly` of them where the environment has PLAIN_VIT_NIGHTLY=1."""
    return nightly if NIGHTLY else usually
