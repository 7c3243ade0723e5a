"""Names of models: what the packages of the sources build and publish, presets, and repositories of the Hub.

A name is the source's own after a prefix, such as "timm:vit_base_patch16_224.augreg_in21k", "torchvision:vit_b_16",
"open_clip:ViT-B-32.laion2b_s34b_b79k", "plain_vit:vit-base-patch16-224", or "hf:" and the id of a repository. What
follows the dot names published weights. The prefix may be left out where no other source has the name. The command
looks names up before it imports torch, so this file and `data_files.py` do not.
"""

import fnmatch
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import CheckpointError, did_you_mean
from ..files.kinds import HUB_ID, WEIGHTS
from .tables.data_files import data_file, models_of

HUB, OURS = "hf", "plain_vit"
SOURCES = {"timm": "timm", "torchvision": "torchvision", "open_clip": "open_clip", HUB: "transformers"}  # by prefix
PREFIXES = (*SOURCES, OURS)
# The patches of the listed presets. The names of others say other patch and image sizes.
PRESETS = {"tiny": 16, "small": 16, "base": 16, "large": 16, "huge": 14, "giant": 14, "gigantic": 14}
PRESET = re.compile(rf"vit-({'|'.join(PRESETS)})-patch\d+-\d+")
WORD = re.compile(r"[\w.-]+")


class Named(NamedTuple):
    """A model: the prefix of its source, and its name there."""

    prefix: str
    name: str

    def __str__(self) -> str:
        return f"{self.prefix}:{self.name}"

    @property
    def entry(self) -> dict[str, Any]:
        """What is known about its weights."""
        return {} if self.prefix == OURS else models_of(SOURCES[self.prefix]).get(self.name, {})


def names(prefix: str) -> Sequence[str]:
    """Return the names of the models of a source, and of their weights."""
    if prefix == OURS:
        return [f"vit-{size}-patch{patch}-224" for size, patch in PRESETS.items()]
    return list(models_of(SOURCES[prefix]))


def list_models(filter: str = "*", source: str | None = None, pretrained: bool = False) -> list[str]:
    """Return the names of models that `create_model` builds, with the prefixes of their sources.

    Of transformers' models, whose names are the ids of repositories, only those in its documentation are listed.

    Args:
        filter: Pattern such as "*dinov3*", with or without the prefix.
        source: A format such as "timm", or its prefix (default: all).
        pretrained: List published weights, such as "timm:vit_small_patch16_dinov3.lvd1689m", instead of models.

    Raises:
        ValueError: There is no such source.
    """
    chosen = HUB if source == SOURCES[HUB] else source
    if chosen is not None and chosen not in PREFIXES:
        raise ValueError(f"source is {source!r}: expected one of {', '.join(PREFIXES)}{did_you_mean(chosen, PREFIXES)}")
    listed = [Named(prefix, name) for prefix in PREFIXES if chosen in (None, prefix) for name in names(prefix)]
    kept = [str(named) for named in listed if (is_published if pretrained else is_model)(named)]
    found = [name for name in kept if any(fnmatch.fnmatchcase(one, filter) for one in (name, name.partition(":")[2]))]
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def is_model(named: Named) -> bool:
    """Return whether a listed name is of a model, not of weights; a repository of the Hub is both."""
    return named.prefix == HUB or "." not in named.name


def is_published(named: Named) -> bool:
    """Return whether a listed name is of weights that can be had: on the Hub, or as a file of torchvision."""
    return named.prefix == HUB or ("." in named.name and "url" not in named.entry)


def find(name: str) -> Named:
    """Return the model of a name.

    Raises:
        CheckpointError: No source, or several, have a model of this name; suggests similar ones.
    """
    prefix, colon, own = today(name).partition(":")
    if colon and prefix not in PREFIXES:
        near = did_you_mean(prefix, PREFIXES)
        raise CheckpointError(f"{prefix!r} in {name!r} is no source: expected one of {', '.join(PREFIXES)}{near}")
    if colon:
        if own in names(prefix) or {HUB: HUB_ID, OURS: PRESET}.get(prefix, re.compile("")).fullmatch(own):
            return Named(prefix, own)
        known = "the id of a repository (user/name)" if prefix == HUB else f"one of its {len(names(prefix))} names"
        raise CheckpointError(f"{own!r} is no model of {prefix}: expected {known}{did_you_mean(own, names(prefix))}")
    if owners := [prefix for prefix in PREFIXES if name in names(prefix)]:
        if len(owners) > 1:
            both = " or ".join(f"{owner}:{name}" for owner in owners)
            raise CheckpointError(f"{' and '.join(owners)} have a model {name}: give {both}")
        return Named(owners[0], name)
    if PRESET.fullmatch(name):
        return Named(OURS, name)
    if HUB_ID.fullmatch(name):
        return Named(HUB, name)
    raise CheckpointError(
        f"there is no model {name!r}: expected a name that list_models() (plain-vit list) has, vit-SIZE-patchP-I with "
        f"SIZE one of {', '.join(PRESETS)}, or the id of a repository (user/name){suggestion(name)}"
    )


def today(name: str) -> str:
    """Return today's name of a model of timm that timm still maps from an earlier one; other names as they are."""
    current = data_file("timm/architectures.json")["old_names"].get(name.removeprefix("timm:"))
    return name if current is None else f"timm:{current}"


def suggestion(name: str) -> str:
    """Return a question that suggests the names of all sources nearest to an unknown one; empty if none is near."""
    return did_you_mean(name, [one for prefix in PREFIXES for one in names(prefix)])


def named_by(source: str | os.PathLike[str]) -> Named | None:
    """Return the model that a source of weights names; None for a path, or the id of a repository without prefix.

    Raises:
        CheckpointError: The source is none of these, but nearly a name; suggests it.
    """
    if os.path.exists(os.path.expanduser(source)):
        return None
    text = today(os.fspath(source))
    prefix = text.partition(":")[0]
    if (prefix in PREFIXES and prefix != text) or PRESET.fullmatch(text):
        return find(text)
    if WORD.fullmatch(text) and not text.endswith(WEIGHTS):
        if any(text in names(each) for each in PREFIXES):
            return find(text)
        if near := suggestion(text):
            raise CheckpointError(f"{text} does not exist, and is no model by name{near}")
    return None
