"""Benchmark of `plain-vit convert --no-verify` for a ViT-L, compared with copying and syncing the file."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, compare, memory_bandwidth, parser, report
from benchmarks.large_models import SOURCES, check, weights, written
from plain_vit.conversion import convert_checkpoint, from_checkpoint
from plain_vit.files.staging import staged_folder

NOTES = """Each turn reads a 1.2 GB file out of the system's cache, and ends when the new one is on the disk. Before
that, each converted model was found to give its source's logits. The limit is the time that one thread needs to read
and to write that many bytes in memory. A conversion also checks every number (NaN); starting Python and importing torch
and transformers, a few seconds, come on top where the command is used once."""


def copying(source: Path, target: Path) -> Callable[[], None]:
    """Return a function that copies a file and syncs it."""

    def take_turn() -> None:
        shutil.copyfile(source, target)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(target, target.with_name("removed"))

    return take_turn


def converting(source: Path, target: Path, options: dict[str, Any]) -> Callable[[], None]:
    """Return a function that converts a checkpoint like the command."""

    def take_turn() -> None:
        with staged_folder(target, force=True) as folder:
            convert_checkpoint(source, folder, verify=False, **options)

    take_turn()
    check(from_checkpoint(target).model.eval(), source)
    return take_turn


def main() -> None:
    options = parser(__doc__).parse_args()
    with written() as (folder, size):
        limit = 2 * size / memory_bandwidth()
        arguments = {"source": weights(folder / "timm"), "target": folder / "copied"}
        cases = [Case("copy and sync", copying, arguments, limit)]
        for name, hints in SOURCES.items():
            source = {"source": folder / name, "target": folder / f"converted {name}", "options": hints}
            cases.append(Case(f"plain_vit converts {name}", converting, source, limit))
        results = compare(cases, options.turns)
    report("convert", f"Converting a ViT-L of {size / 1e9:.2f} GB", NOTES, results, options.write)


if __name__ == "__main__":
    main()
