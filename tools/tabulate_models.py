"""Write docs/reference/models.md: every model that opens by name, with its size, cost, image size and licence.

python -m tools.tabulate_models
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.conversion.catalogue import HUB, OURS, PREFIXES, find, list_models
from plain_vit.conversion.create import config_named

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
TITLES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "open_clip": "open_clip: image towers",
    OURS: "Presets, without weights",
    HUB: "transformers",
}
INTRODUCTION = """# Models by name

Written by `python -m tools.tabulate_models` from the tables of `make architectures`.
[Models by name](../guide/convert.md#by-name) shows how to use the names. A name with a dot is of published weights;
without what follows the dot it is of the model, in timm with the weights of timm's default tag. Parameters
include the classifier or the projection. A GFLOP is 10^9 additions or multiplications of matrix products, for one image
of the given size (height x width, or the side of a square). The licence of the weights is the one that their package
states; check it on the page of the weights.

<input type="search" placeholder="part of a name, or a licence" aria-label="Show only rows with this text"
oninput="for (const row of document.querySelectorAll('tbody tr'))
row.hidden = !row.textContent.toLowerCase().includes(this.value.toLowerCase())">
"""
LIST = """Any repository of a model that opens works: `hf:` and its id. transformers' documentation names these:

"""


class Size(NamedTuple):
    """The size of a model: parameters, and floating-point operations of a forward pass of one image."""

    parameters: int
    operations: int


def size_of(config: PlainViTConfig) -> Size:
    """Return the size of a model, from models of one and of two blocks where all blocks are alike."""
    saved = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
    labels = config.num_labels or 0
    if isinstance(config.num_key_value_heads, list | tuple):
        return _measured(json.dumps(saved), labels)
    one, two = (_measured(json.dumps({**saved, "num_hidden_layers": depth}), labels) for depth in (1, 2))
    further = config.num_hidden_layers - 1
    return Size(*(first + further * (second - first) for first, second in zip(one, two, strict=True)))


@functools.cache
def _measured(saved: str, num_labels: int) -> Size:
    """Return the size of the model of a saved config, on the meta device."""
    config = PlainViTConfig.from_dict(json.loads(saved), num_labels=num_labels)
    with torch.device("meta"), torch.no_grad():
        model = PlainViTForImageClassification._from_config(config, attn_implementation="eager")
        model.eval().requires_grad_(False)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, config.num_channels, *config.image_shape))
    return Size(parameters, counter.get_total_flops())


def listed(prefix: str) -> list[str]:
    """Return the names in a table: weights, and models without weights."""
    weights = list_models(source=prefix, pretrained=True) if prefix != OURS else []
    known = {name.partition(".")[0] for name in weights}
    return [*weights, *(name for name in list_models(source=prefix) if name not in known)]


def row(name: str) -> str:
    """Return the row of a model."""
    named, config = find(name), config_named(name)
    size, (height, width) = size_of(config), config.image_shape
    side = str(height) if height == width else f"{height} x {width}"
    millions, billions = f"{size.parameters / 1e6:.1f} M", f"{size.operations / 1e9:.1f}"
    cells = (f"`{name}`", millions, billions, side, named.entry.get("license", ""))
    return f"| {' | '.join(cells)} |"


def sections(prefixes: Sequence[str] = tuple(TITLES)) -> Iterator[str]:
    """Yield the parts of the page."""
    for prefix in prefixes:
        names = listed(prefix)
        yield f"## {TITLES[prefix]}\n"
        if prefix == HUB:
            yield LIST + "\n".join(f"- `{name}`" for name in names) + "\n"
        else:
            head = "| name | parameters | GFLOPs | image | licence |\n|---|---|---|---|---|\n"
            yield head + "\n".join(map(row, names)) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text("\n".join([INTRODUCTION, *sections()]), encoding="utf-8")


if __name__ == "__main__":
    assert set(TITLES) == set(PREFIXES)
    main()
