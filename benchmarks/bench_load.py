"""How long it takes to open a ViT-L of any source as ours, beside transformers opening its own ViT-L."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import ViTForImageClassification

from benchmarks.harness import Case, compare, memory_bandwidth, parser, report
from benchmarks.large_models import SOURCES, weights, write_all
from plain_vit import PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint

NOTES = """Each turn opens a 1.2 GB file that lies in the system's cache and then sums every weight, because a file that
is mapped has not been read when it is open. The limit is the time that one thread needs to read that many bytes in
memory. "Peak memory" counts the pages of a mapped file, which all processes share and the system takes back when it
needs them; "of it its own" is what only this process has: 0 means no copy, 1217 MB one."""


def with_transformers(folder: Path, kind: type[Any]) -> Callable[[], nn.Module]:
    """Open a folder by `from_pretrained`."""
    return lambda: _read(kind.from_pretrained(folder))


def with_plain_vit(source: Path, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Open a checkpoint by `from_checkpoint`."""
    return lambda: _read(from_checkpoint(source, **options).model)


def _read(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        sum(float(parameter.sum()) for parameter in model.parameters())
    return model


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_all(folder)
        size = weights(folder / "timm").stat().st_size
        limit = size / memory_bandwidth()
        of_transformers = {"folder": folder / "transformers", "kind": ViTForImageClassification}
        of_ours = {"folder": folder / "plain_vit", "kind": PlainViTForImageClassification}
        cases = [
            Case("transformers opens its own ViT", with_transformers, of_transformers, limit),
            Case("from_pretrained opens plain_vit", with_transformers, of_ours, limit),
            *(
                Case(
                    f"from_checkpoint opens {name}", with_plain_vit, {"source": folder / name, "options": hints}, limit
                )
                for name, hints in SOURCES.items()
            ),
        ]
        results = compare(cases, options.turns)
    report("load", f"Opening a ViT-L of {size / 1e9:.2f} GB", NOTES, results, options.write)


if __name__ == "__main__":
    main()
