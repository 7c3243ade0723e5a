"""Meaning of timm's model names, so that checkpoints open, and errors name unsupported models, without timm.

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
            hybrids in `vision_transformer_hybrid.py`. Three arguments are not timm's: `distilled` selects the class
            with a distillation token, `norm_eps` is the epsilon bound to `norm_layer`, and `stem_depths` the stages
            of a hybrid's ResNet.
        any_size: The entrypoints whose models take images of any size.
        old_names: Names of earlier releases that timm still maps and that older folders contain.
        published_files: Model and tag of each published file whose name ends in a prefix of its SHA-256.
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
    """A file of timm with unsupported models that resemble its plain ones; `{}` in a part stands for any number.

    Args:
        title: Title in the file's docstring.
        entrypoints: Its models that plain-vit does not open.
        marks: Parts of their layers that no other model of timm has.
        others: Other parts in the same modules that no Vision Transformer of timm has.
    """

    title: str
    entrypoints: tuple[str, ...]
    marks: frozenset[str]
    others: frozenset[str]


@functools.cache
def families() -> dict[str, Family]:
    """Return the files of timm with unsupported models, so that an error can name them."""
    return {
        file: Family(family["title"], family["entrypoints"], frozenset(family["marks"]), frozenset(family["others"]))
        for file, family in data_file("timm/families.json")["families"].items()
    }
