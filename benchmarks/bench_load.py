"""Benchmark of loading a ViT-L from any source as our model, compared with each package loading its own files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from transformers import ViTForImageClassification

from benchmarks.harness import Case, compare, memory_bandwidth, parser, report
from benchmarks.large_models import SOURCES, check, written
from plain_vit import PlainViTForImageClassification
from plain_vit.conversion import from_checkpoint

NOTES = """Each turn opens a 1.2 GB file that lies in the system's cache and then sums every weight, because a file that
is mapped has not been read when it is open. Before that, each opened model was found to give its source's logits. The
limit is the time that one thread needs to read that many bytes in memory. torchvision's file is opened in the best way
that torch has: an empty model, `torch.load(mmap=True)`, `load_state_dict(assign=True)`; "mapped" is `mmap=True` of
`from_checkpoint`, without which torch files are read. "Peak memory" counts the pages
of a mapped file, which all processes share and the system takes back when it needs them; "of it its own" is what only
this process has: 0 means no copy, 1217 MB one."""


def opening(source: Path, how: Callable[..., nn.Module], arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return a function that opens a source and reads every weight."""
    check(how(source, **arguments).eval(), source)

    def take_turn() -> nn.Module:
        model = how(source, **arguments)
        with torch.no_grad():
            sum(float(parameter.sum()) for parameter in model.parameters())
        return model

    return take_turn


def by_from_checkpoint(source: Path, **options: Any) -> nn.Module:
    """Open any source as our model."""
    return from_checkpoint(source, **options).model


def by_from_pretrained(folder: Path, kind: type[Any]) -> nn.Module:
    """Open a folder with the model class that wrote it."""
    return kind.from_pretrained(folder)


def by_timm(folder: Path) -> nn.Module:
    """Open timm's folder with timm."""
    return timm.create_model(f"local-dir:{folder}", pretrained=True)


def by_torch(file: Path) -> nn.Module:
    """Open torchvision's file memory-mapped."""
    with torch.device("meta"):
        model = torchvision.models.vit_l_16()
    model.load_state_dict(torch.load(file, mmap=True), assign=True)
    return model


def main() -> None:
    options = parser(__doc__).parse_args()
    with written() as (folder, size):
        limit = size / memory_bandwidth()

        def case(name: str, source: str, how: Callable[..., nn.Module], **arguments: Any) -> Case:
            return Case(name, opening, {"source": folder / source, "how": how, "arguments": arguments}, limit)

        cases = [
            case(
                "transformers opens its own folder", "transformers", by_from_pretrained, kind=ViTForImageClassification
            ),
            case("timm opens its own folder", "timm", by_timm),
            case("torch opens torchvision.pth", "torchvision.pth", by_torch),
            case(
                "plain_vit opens its own folder", "plain_vit", by_from_pretrained, kind=PlainViTForImageClassification
            ),
            *(case(f"plain_vit converts {name}", name, by_from_checkpoint, **hints) for name, hints in SOURCES.items()),
            *(
                case(f"plain_vit converts {name}, mapped", name, by_from_checkpoint, mmap=True, **SOURCES[name])
                for name in ("vit_pytorch.pt", "torchvision.pth")
            ),
        ]
        results = compare(cases, options.turns)
    report("load", f"Opening a ViT-L of {size / 1e9:.2f} GB", NOTES, results, options.write)


if __name__ == "__main__":
    main()
