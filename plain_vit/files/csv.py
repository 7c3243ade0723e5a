"""CSV of untrusted texts, such as labels and file names: no cell can control a terminal or run in a spreadsheet."""

import csv
from collections.abc import Iterable
from io import StringIO

from ..errors import printable

FORMULA = ("=", "+", "-", "@")  # beginnings of cells that spreadsheets evaluate


def csv_table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV, with printable texts and an apostrophe before whatever a spreadsheet would evaluate."""
    text = StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerows(map(_cell, row) for row in (head, *rows))
    return text.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
