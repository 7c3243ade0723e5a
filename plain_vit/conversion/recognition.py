"""Recognise the format of a state dict by its names, and explain what is wrong with unknown names."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    MappingError,
    PlainViTError,
    UnknownFormatError,
    did_you_mean,
    few,
)
from ..files.reading import strip_wrappers
from ..files.tensors import LazyTensors
from .tables.format import Format, Hints, StateDict

MAX_PREFIX_PARTS = 4  # longest path of a nested module
# Names in plain-vit's own encoders, after the prefix of the model around them.
OUR_PATCHES = "embeddings.patch_embeddings.projection.weight"
OUR_LAYER = re.compile(r"layers\.\d+\.(layernorm_(before|after)|layer_scale[12]|(attention|mlp)(_branches)?)\..*")
# Parts of the tensor names of adapters by peft or loralib, alone or in a model that they are not merged into.
ADAPTERS = re.compile(
    r"lora_([AB]|embedding_[AB]|magnitude_vector)|(hada|lokr)_w[12](_[ab])?|ia3_l|b?oft_[RS]|vera_lambda_[bd]"
)


def recognise(
    names: StateDict, formats: Mapping[str, Format], source: str, stored: StateDict, wrappers: Sequence[str]
) -> Format:
    """Return the format of a state dict.

    Args:
        names: The tensors by name, without prefixes of training code.
        formats: All formats by name.
        source: Name of the checkpoint for error messages.
        stored: The tensors by their names in the file.
        wrappers: The keys under which the state dict is nested in the file.

    Raises:
        AmbiguousCheckpointError: Several formats match.
        UnknownFormatError: No format matches.
    """
    matching = [format for format in formats.values() if format.matches_names(names)]
    if len(matching) > 1:
        raise AmbiguousCheckpointError(
            f"{source} has names that match several formats", {"format": [format.name for format in matching]}
        )
    if matching:
        return matching[0]
    for format in formats.values():
        if (others := format.names_of_others(names)) is not None:
            raise UnknownFormatError(f"{source} has the tensors of {others}, which plain-vit does not open yet")
    if _are_ours(names):
        raise UnknownFormatError(
            f"{source} has plain-vit's own names but no config.json: give the folder written by save_pretrained"
        )
    raise UnknownFormatError(
        f"{source} matches no known format ({', '.join(formats)}): its tensors are {few(list(map(repr, names)))}"
        + _remedy(stored, formats, wrappers)
    )


def require(
    format: Format,
    names: StateDict,
    formats: Mapping[str, Format],
    source: str,
    stored: StateDict,
    wrappers: Sequence[str],
) -> None:
    """Raise an error if the names do not match the given format; the arguments are as for `recognise`.

    Raises:
        MappingError: There are other tensors outside the model.
        UnknownFormatError: The names are not of this format; names the format that they match.
    """
    if unexpected_names := format.unexpected_names(names):
        raise MappingError(
            f"{source} contains a model of {format.name} and other tensors that are not part of it"
            f"{_remedy(stored, formats, wrappers)}:",
            [f"left over: {name!r}" for name in unexpected_names],
        )
    if format.matches_names(names):
        return
    others = [one.name for one in formats.values() if one.matches_names(names) and not _fault(one, _meta(names))]
    looks = f"they look like {' or '.join(others)}: omit format=, or give that one" if others else ""
    raise UnknownFormatError(
        f"{source} does not have the names of {format.name}: "
        + (looks or f"its tensors are {few(list(map(repr, names)))}" + _remedy(stored, formats, wrappers))
    )


def refuse_adapters(names: Collection[str], source: str) -> None:
    """Raise an error if there are tensors of an adapter, alone or in a model that it is not merged into.

    Raises:
        CheckpointError: explains how to merge the adapter.
    """
    found = [name for name in names if any(map(ADAPTERS.fullmatch, name.split(".")))]
    if not found:
        return
    what = f"{source} has the tensors of an adapter, such as {few(list(map(repr, found)), most=2)}"
    if len(found) == len(names):
        raise CheckpointError(
            f"{what}, and not those of the model that it adapts: merge the two, save the result and give that "
            "(peft.PeftModel.from_pretrained(model, folder).merge_and_unload())"
        )
    raise CheckpointError(
        f"{what}, which is not merged into the model: merge it, save the state dict again and give that "
        "(model.merge_and_unload() of peft; of loralib, model.eval() merges it, and the lora_ tensors can be dropped)"
    )


def refuse_settings(settings: Mapping[str, Any], formats: Mapping[str, Format], source: str) -> None:
    """Raise an error if a `config.json` names an unsupported model, whatever the tensors are called.

    Raises:
        UnknownFormatError: names the model.
    """
    for format in formats.values():
        if (described := format.settings_of_others(settings)) is not None:
            raise UnknownFormatError(f"{source} is a folder of {described}")


def refuse_unknown_architecture(hints: Hints, format: Format, formats: Mapping[str, Format], source: str) -> None:
    """Raise an error if the caller gave an architecture that the format does not have.

    Raises:
        CheckpointError: suggests architectures with similar names.
    """
    name = hints.architecture
    if name is None or format.has_architecture(name):
        return
    if not format.architectures:
        raise CheckpointError(f"the hints contradict {source}: architecture={name!r} (it has no effect here). Omit it")
    owners = [other.name for other in formats.values() if other.architectures and other.has_architecture(name)]
    whose = f", but of {' and '.join(owners)}" if owners else did_you_mean(name.partition(".")[0], format.architectures)
    raise CheckpointError(
        f"architecture={name!r} is not an architecture of {format.name}, the format of {source}{whose}"
    )


def models_inside(tensors: StateDict, formats: Mapping[str, Format]) -> tuple[dict[str, str], dict[str, str]]:
    """Find the parts of a state dict that are a model of a known format.

    Args:
        tensors: The tensors by their names in the file.
        formats: All formats by name.

    Returns:
        For each prefix of a model that opens, with or without hints, its format; and for each prefix of an unsupported
        model its description. Of nested prefixes, only the outermost is returned.
    """
    opening: dict[str, str] = {}
    others: dict[str, str] = {}
    under: dict[str, list[str]] = {}
    for name in tensors:
        parts = name.split(".")
        for depth in range(1, min(MAX_PREFIX_PARTS, len(parts) - 1) + 1):
            prefix = ".".join(parts[:depth])
            under.setdefault(prefix, []).append(name[len(prefix) + 1 :])
    meta = None
    for prefix in sorted(under, key=lambda prefix: prefix.count(".")):
        if any(prefix.startswith(f"{outer}.") for outer in (*opening, *others)):
            continue
        try:
            short = strip_wrappers(under[prefix]).names
        except CheckpointError:
            continue
        matching = [format for format in formats.values() if format.matches_names(set(short.values()))]
        if len(matching) != 1 or matching[0].unexpected_names(set(short.values())):
            continue
        if (described := matching[0].names_of_others(set(short.values()))) is not None:
            others[prefix] = described
            continue
        meta = _meta(tensors) if meta is None else meta
        if _fault(matching[0], {short[name]: meta[f"{prefix}.{name}"] for name in short}) is None:
            opening[prefix] = matching[0].name
    return opening, others


def _meta(tensors: StateDict) -> StateDict:
    return tensors.meta() if isinstance(tensors, LazyTensors) else tensors


def _fault(format: Format, tensors: StateDict) -> Exception | None:
    """Return the error that tensors raise whatever the hints are; None if some hints may open them."""
    try:
        format.describe_checkpoint(tensors, {}, Hints())
    except (UnknownFormatError, MappingError, ExportError) as error:
        return error
    except PlainViTError:  # the caller can give what is missing
        return None
    except Exception as error:  # names that only look like a model's
        return error
    return None


def _remedy(stored: StateDict, formats: Mapping[str, Format], wrappers: Sequence[str]) -> str:
    """Return the keys that would open parts of a state dict, or else what unsupported models it contains."""
    opening, others = models_inside(stored, formats)
    keys = [f"key={'.'.join((*wrappers, prefix))!r} names a model of {format}" for prefix, format in opening.items()]
    known = (f"under {prefix!r} are those of {what}, which does not open" for prefix, what in others.items())
    parts = [", ".join(keys)] if keys else known
    return "".join(f"; {part}" for part in parts)


def _are_ours(names: Collection[str]) -> bool:
    """Return whether a state dict is of one of plain-vit's modules: it has our patch projection and only our layers."""
    for patches in (name for name in names if name.endswith(OUR_PATCHES)):
        prefix = patches.removesuffix(OUR_PATCHES)
        own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        layers = [name for name in own if name.startswith("layers.")]
        if layers and all(map(OUR_LAYER.fullmatch, layers)):
            return True
    return False
