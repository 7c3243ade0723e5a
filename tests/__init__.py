"""The tests, in the same rooms as the package; see README.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
