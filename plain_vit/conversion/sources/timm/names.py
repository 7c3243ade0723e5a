"""Names of timm's tensors and unsupported models, so that errors name these without timm.

`make architectures` writes the table, and `tests/sources/test_timm_architectures.py` compares it with the installed
timm.
"""

import functools
from collections.abc import Collection
from typing import NamedTuple

from ...tables.data_files import data_file


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


def part_of(name: str) -> str:
    """Return the module of a tensor without numbers: "blocks.{}.attn.qkv" for "blocks.3.attn.qkv.bias"."""
    parts = ["{}" if part.isdigit() else part for part in name.split(".")]
    return ".".join(parts[:-1] if parts[-1] in ("weight", "bias", "running_mean", "running_var") else parts)


def families_of(names: Collection[str], known: Collection[str] = ()) -> list[str]:
    """Return the files of timm, with their titles, that are the only ones to which tensors with these names can belong.

    A file is recognised by parts that no other timm model has. All other parts in the same modules must be its own too:
    users replace heads and add parts, but not inside the layers.

    Args:
        names: Names of the tensors.
        known: The parts of timm's VisionTransformer.
    """
    parts = {part_of(name) for name in names if not name.endswith("num_batches_tracked")}
    found = parts & set().union(*(family.marks for family in families().values()))
    modules = {part.partition(".")[0] for part in found}
    inside = {part for part in parts if part.partition(".")[0] in modules}
    return [
        f"{file}.py ({family.title})"
        for file, family in families().items()
        if found and found <= family.marks and inside <= family.marks | family.others | set(known)
    ]
