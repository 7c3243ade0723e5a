"""Measurements of the sweeps over the sources, recorded for the table in the docs.

With PLAIN_VIT_SWEEP=path every source adds lines of JSON to that file, of which tools/tabulate_what_opens.py makes the
table.
"""

import datetime
import json
import os
from pathlib import Path
from typing import Any


def record(result: dict[str, Any]) -> None:
    """Add a line to the file that the environment names, if it does.

    Args:
        result: `source`, whose first word is that of its package, and what was measured: largest differences in float32
            as shares of the largest value (`logits`, `blocks`, `another_resolution`) and in `bfloat16`,
            `way_back_bit_exact`, and the versions by the names of their packages. Several lines of one source add up.
    """
    path = os.environ.get("PLAIN_VIT_SWEEP")
    if path:
        line = json.dumps({"date": datetime.date.today().isoformat(), **result})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
