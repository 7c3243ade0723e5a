"""Benchmark of the import time, compared with importing transformers' own ViT."""

import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import Case, compare, parser, report

IMPORTS = {
    "transformers' ViT": "from transformers import ViTForImageClassification",
    "plain_vit": "from plain_vit import PlainViTForImageClassification",
    "plain_vit.conversion": "from plain_vit.conversion import from_checkpoint",
    "transformers alone": "import transformers",
    "torch": "import torch",
}
NOTES = """Each turn starts a Python of its own, whose start counts too; all files are in the system's cache, compiled
to bytecode. The memory is this process's, not that of the Python it starts."""


def importing(line: str) -> Callable[[], object]:
    """Return a function that runs an import in a new Python process."""
    return lambda: subprocess.run([sys.executable, "-c", line], check=True)


def main() -> None:
    options = parser(__doc__).parse_args()
    cases = [Case(name, importing, {"line": line}) for name, line in IMPORTS.items()]
    report("import", "Importing the model", NOTES, compare(cases, options.turns), options.write)


if __name__ == "__main__":
    main()
