"""The tests, in rooms; see README.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
