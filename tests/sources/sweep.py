"""Record the measurements of the sweeps over the sources for the table in the docs.

With PLAIN_VIT_SWEEP=path, every source appends lines of JSON to that file; tools/tabulate_what_opens.py makes the table
from them.
"""

import datetime
import json
import os
from pathlib import Path
from typing import Any


def record(result: dict[str, Any]) -> None:
    """Append a line to the file named by the environment, if there is one.

    Args:
        result: `source`, whose first word is its package, and measurements: largest relative differences in float32
            (`logits`, `blocks`, `another_resolution`) and in `bfloat16`, `way_back_bit_exact`, and versions by package.
            Several lines of one source are merged.
    """
    path = os.environ.get("PLAIN_VIT_SWEEP")
    if path:
        line = json.dumps({"date": datetime.date.today().isoformat(), **result})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
