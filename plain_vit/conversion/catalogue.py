"""Names of models: what the packages of the sources build and publish, presets, and repositories of the Hub.

A name is the source's own after a prefix, such as "timm:vit_base_patch16_224.augreg_in21k", "torchvision:vit_b_16",
"open_clip:ViT-B-32.laion2b_s34b_b79k", "plain_vit:vit-base-patch16-224", or "hf:" and the id of a repository. What
follows the dot names published weights. The prefix may be left out where no other source has the name.
"""

import fnmatch
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

from ..configuration_plain_vit import PRESET_NAME, PRESETS, PlainViTConfig
from ..errors import CheckpointError, did_you_mean, few
from ..files.reading import HUB_ID, SUFFIXES
from .registry import FORMATS

HUB, OURS = "hf", PlainViTConfig.model_type
# The formats with named models, by prefix.
SOURCES = {HUB if name == "transformers" else name: format for name, format in FORMATS.items() if format.models}
PREFIXES = (*SOURCES, OURS)
LARGE = ("huge", "giant", "gigantic")  # presets with patches of 14 pixels in their papers
WORD = re.compile(r"[\w.-]+")


class Named(NamedTuple):
    """A model: the prefix of its source, and its name there."""

    prefix: str
    name: str

    def __str__(self) -> str:
        return f"{self.prefix}:{self.name}"


@functools.cache
def names(prefix: str) -> tuple[str, ...]:
    """Return the names of the models of a source, in its own order."""
    if prefix == OURS:
        return tuple(f"vit-{size}-patch{14 if size in LARGE else 16}-224" for size in PRESETS)
    return tuple(SOURCES[prefix].models)


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
    chosen = HUB if source == "transformers" else source
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
    return named.prefix == HUB or ("." in named.name and "url" not in SOURCES[named.prefix].models[named.name])


def find(name: str) -> Named:
    """Return the model of a name.

    Raises:
        CheckpointError: No source, or several, have a model of this name; suggests similar ones.
    """
    prefix, colon, own = name.partition(":")
    if colon and prefix not in PREFIXES:
        raise CheckpointError(f"{prefix!r} in {name!r} is no source: expected one of {', '.join(PREFIXES)}")
    if colon:
        if own in names(prefix) or (prefix == HUB and HUB_ID.fullmatch(own)) or (prefix == OURS and is_preset(own)):
            return Named(prefix, own)
        known = "the id of a repository (user/name)" if prefix == HUB else f"one of its {len(names(prefix))} names"
        raise CheckpointError(f"{own!r} is no model of {prefix}: expected {known}{did_you_mean(own, names(prefix))}")
    if owners := [prefix for prefix in PREFIXES if name in names(prefix)]:
        if len(owners) > 1:
            both = " or ".join(f"{owner}:{name}" for owner in owners)
            raise CheckpointError(f"{' and '.join(owners)} have a model {name}: give {both}")
        return Named(owners[0], name)
    if is_preset(name):
        return Named(OURS, name)
    if HUB_ID.fullmatch(name):
        return Named(HUB, name)
    raise CheckpointError(
        f"there is no model {name!r}: expected a name that list_models() (plain-vit list) has, vit-SIZE-patchP-I with "
        f"SIZE one of {', '.join(PRESETS)}, or the id of a repository (user/name){suggestion(name)}"
    )


def suggestion(name: str) -> str:
    """Return a question that suggests the names of all sources nearest to an unknown one; empty if none is near."""
    return did_you_mean(name, [one for prefix in PREFIXES for one in names(prefix)])


def is_preset(name: str) -> bool:
    """Return whether a name is of a size of ours, with any patch and image size."""
    match = PRESET_NAME.fullmatch(name)
    return match is not None and match["size"] in PRESETS


def is_name(source: str | os.PathLike[str]) -> bool:
    """Return whether a source of weights is the name of a model, and neither a path nor the id of a repository."""
    text = os.fspath(source)
    prefix, colon, _ = text.partition(":")
    named = prefix in PREFIXES if colon else is_preset(text) or any(text in names(each) for each in PREFIXES)
    return named and not HUB_ID.fullmatch(text) and not Path(os.path.expanduser(text)).exists()


def located(source: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """Return the file, folder or Hub id of a source of weights, which may be a name, and the format of a named one.

    Raises:
        CheckpointError: There is no such file and no model of this name, or the name is of a model without weights.
    """
    if is_name(source):
        named = find(os.fspath(source))
        return weights_of(named), None if named.prefix == HUB else named.prefix
    path = Path(os.path.expanduser(source))
    is_word = WORD.fullmatch(os.fspath(source)) and path.suffix not in sum(SUFFIXES.values(), ())
    if is_word and not path.exists() and (near := suggestion(os.fspath(source))):
        raise CheckpointError(f"{source} does not exist, and is no model by name{near}")
    return source, None


def weights_of(named: Named) -> str:
    """Return the Hub id or the file of the weights of a model.

    Raises:
        CheckpointError: The model has no weights, several, or only some that are not on the Hub.
        HubError: The file cannot be downloaded.
    """
    if named.prefix == HUB:
        return named.name
    published = {} if named.prefix == OURS else SOURCES[named.prefix].models
    if named.name in published and (place := SOURCES[named.prefix].weights_of(named.name)) is not None:
        return place
    if url := published.get(named.name, {}).get("url"):
        raise CheckpointError(f"the weights of {named} are not on the Hub: download {url}, and give the file")
    choices = [f"{named.prefix}:{name}" for name in published if name.startswith(f"{named.name}.")]
    wanted = f"name some: {few(choices)}" if choices else "create_model and finetune --from_scratch draw new ones"
    raise CheckpointError(f"{named} is a model without weights: {wanted}")
