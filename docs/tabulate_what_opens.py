"""Write docs/what_opens.md from what the sweep over timm's entrypoints measured.

PLAIN_VIT_SWEEP=sweep.jsonl make test-all
python docs/tabulate_what_opens.py sweep.jsonl
"""

import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("what_opens.md")
COLUMNS = {
    "logits": "logits",
    "blocks": "after every block",
    "bfloat16": "logits in bfloat16",
    "another_resolution": "at another resolution",
}


def read(paths: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the last measurement of each source."""
    lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {row["source"]: row for row in map(json.loads, lines)}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Write one line for each source: the largest differences, as shares of the largest value, and the way back."""
    text = [f"| source | {' | '.join(COLUMNS.values())} | way back |", "|---|" + "---|" * (len(COLUMNS) + 1)]
    for source in sorted(rows):
        row = rows[source]
        differences = ["-" if row.get(name) is None else f"{row[name]:.1e}" for name in COLUMNS]
        back = "bit for bit" if row["way_back_bit_exact"] else "not exact"
        text.append(f"| {source} | {' | '.join(differences)} | {back} |")
    return "\n".join(text)


def summary(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Say in a paragraph what the table shows."""
    any_row = next(iter(rows.values()))
    exact = sum(row["logits"] == 0 for row in rows.values())
    largest = max(row["logits"] for row in rows.values())
    return (
        f"All {sum(row['opens'] for row in rows.values())} of {len(rows)} entrypoints open. In float32 the logits of "
        f"{exact} equal timm's exactly, those of the others are within {largest:.1e} of the largest value. "
        f"Measured on a CPU ({platform.machine()}) with random weights in every parameter and small geometry, against "
        f"timm {any_row['timm']} with torch {any_row['torch'].partition('+')[0]}; table written on "
        f"{datetime.date.today().isoformat()}."
    )


def main() -> None:
    rows = read(sys.argv[1:])
    OUT.write_text(
        "# What opens: timm, entrypoint by entrypoint\n\n"
        "Written by `docs/tabulate_what_opens.py` from what `tests/test_conversion_timm_sweep.py` measured.\n\n"
        f"{summary(rows)}\n\n{table(rows)}\n",
        encoding="utf-8",
    )
    print(f"{OUT}: {len(rows)} sources")


if __name__ == "__main__":
    main()
