"""Data files of the sources: their named architectures and published weights, written by `make architectures`.

`plain_vit_command.py` runs this file by its path, so it imports only the standard library.
"""

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


@functools.cache
def models_of(source: str) -> dict[str, dict[str, Any]]:
    """Return the models of a source that open by name, with what is known about the weights of each.

    A name with a dot is of published weights; of a model, timm's default weights come first.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((SOURCES / source).rglob("*.json")):
        table = data_file(path.relative_to(SOURCES).as_posix())
        found |= {name: {} for name in table.get("architectures", ()) if name not in table.get("closed", ())}
        found |= table.get("models", {})
    return found


def _with_tuples(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()}
