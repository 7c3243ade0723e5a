"""Data files of the sources: their named architectures, written by `make architectures`."""

import functools
import json
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent.parent / "sources"


@functools.cache
def data_file(name: str) -> dict[str, Any]:
    """Return the tables of a data file, with tuples for lists.

    Args:
        name: Path of the file in `sources`, such as "timm/architectures.json".
    """
    return json.loads((SOURCES / name).read_text(encoding="utf-8"), object_hook=_with_tuples)


def _with_tuples(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()}
