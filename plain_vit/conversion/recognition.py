"""Recognition of the format of a state dict by its names, and errors for unknown ones."""

from collections.abc import Collection, Mapping, Sequence

from ..errors import AmbiguousCheckpointError, CheckpointError, MappingError, UnknownFormatError
from ..files.reading import strip_wrappers
from .format import Format

MAX_PREFIX_PARTS = 4  # of a nested module
OUR_POSITIONS = "embeddings.position_embeddings.weight"


def recognise(
    names: Collection[str], formats: Mapping[str, Format], source: str, stored: Collection[str], wrappers: Sequence[str]
) -> Format:
    """Return the format with these names.

    Args:
        names: Names of the tensors, without prefixes of training code.
        formats: All formats by name.
        source: Name of the checkpoint for error messages.
        stored: The names as in the file.
        wrappers: The keys under which they are nested.

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
    if any(name.endswith(OUR_POSITIONS) for name in names):
        raise UnknownFormatError(
            f"{source} has plain-vit's own names but no config.json: give the folder written by save_pretrained"
        )
    raise UnknownFormatError(
        f"{source} matches no known format ({', '.join(formats)}): its tensors are {_some(names)}"
        + _remedy(stored, formats, wrappers)
    )


def require(
    format: Format,
    names: Collection[str],
    formats: Mapping[str, Format],
    source: str,
    stored: Collection[str],
    wrappers: Sequence[str],
) -> None:
    """Refuse names that do not match the given format; the arguments are those of `recognise`.

    Raises:
        MappingError: There are further tensors outside the model.
        UnknownFormatError: names the format that they match.
    """
    if unexpected_names := format.unexpected_names(names):
        raise MappingError(
            f"{source} contains a model of {format.name} and other tensors that are not part of it"
            f"{_remedy(stored, formats, wrappers)}:",
            [f"left over: {name!r}" for name in unexpected_names],
        )
    if format.matches_names(names):
        return
    others = [other.name for other in formats.values() if other.matches_names(names)]
    looks = f"they look like {' or '.join(others)}: omit format=, or give that one" if others else ""
    raise UnknownFormatError(
        f"{source} does not have the names of {format.name}: "
        + (looks or f"its tensors are {_some(names)}" + _remedy(stored, formats, wrappers))
    )


def models_inside(names: Collection[str], formats: Mapping[str, Format]) -> dict[str, str]:
    """Return the parts of a state dict that are a complete model of a format.

    Args:
        names: The names as in the file.
        formats: All formats by name.

    Returns:
        The format of each part, by its prefix; of nested prefixes only the outermost.
    """
    found: dict[str, str] = {}
    under: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, min(MAX_PREFIX_PARTS, len(parts) - 1) + 1):
            prefix = ".".join(parts[:depth])
            under.setdefault(prefix, []).append(name[len(prefix) + 1 :])
    for prefix in sorted(under, key=lambda prefix: prefix.count(".")):
        if any(prefix.startswith(f"{outer}.") for outer in found):
            continue
        try:
            short = set(strip_wrappers(under[prefix]).names.values())
        except CheckpointError:
            continue
        matching = [format for format in formats.values() if format.matches_names(short)]
        if len(matching) == 1 and not matching[0].unexpected_names(short):
            found[prefix] = matching[0].name
    return found


def _remedy(stored: Collection[str], formats: Mapping[str, Format], wrappers: Sequence[str]) -> str:
    """Return a remedy with the keys that would open parts of a state dict."""
    inside = models_inside(stored, formats)
    keys = [f"key={'.'.join((*wrappers, prefix))!r} names a model of {format}" for prefix, format in inside.items()]
    return "; " + ", ".join(keys) if keys else ""


def _some(names: Collection[str]) -> str:
    """Return the first names and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, list(names)[:5])) + more
