"""What timm's names of models mean, so that files open, and errors name others, without timm.

`make architectures` writes the tables, and `tests/sources/test_timm_architectures.py` compares them with the
installed timm.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...tables.data_files import data_file


class PlainNames(NamedTuple):
    """Names of plain Vision Transformers.

    Args:
        timm: The release of timm.
        architectures: The arguments of all entrypoints of `vision_transformer.py` and `deit.py`, and of the paper's
            hybrids of `vision_transformer_hybrid.py`. Three arguments are not timm's: `distilled` names the class with
            a distillation token, `norm_eps` the epsilon bound to `norm_layer`, `stem_depths` the stages of a hybrid's
            ResNet.
        any_size: The entrypoints whose models take images of other sizes than their own.
        old_names: Names of earlier releases that timm still maps, and that older folders carry.
        published_files: Files whose names end in the first digits of their SHA-256, and the model and tag in each.
    """

    timm: str
    architectures: dict[str, dict[str, Any]]
    any_size: Sequence[str]
    old_names: Mapping[str, str]
    published_files: Mapping[str, str]


def plain_names() -> PlainNames:
    """Return the names of plain Vision Transformers."""
    return PlainNames(**data_file("timm/architectures.json"))


class Family(NamedTuple):
    """A file of timm with models that are like its plain ones and do not open; `{}` in a part stands for every number.

    Args:
        title: What it says that it holds.
        entrypoints: Its models that plain-vit does not open.
        marks: Parts of their layers that no other model of timm has.
        others: Parts beside them, in the same modules, that a Vision Transformer of timm has not.
    """

    title: str
    entrypoints: tuple[str, ...]
    marks: frozenset[str]
    others: frozenset[str]


@functools.cache
def families() -> dict[str, Family]:
    """Return the files of timm whose models do not open, so that an error can name them."""
    return {
        file: Family(family["title"], family["entrypoints"], frozenset(family["marks"]), frozenset(family["others"]))
        for file, family in data_file("timm/families.json")["families"].items()
    }
