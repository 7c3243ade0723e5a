"""Registry of sources, and the weights behind the names of models.

To add a source, write a module or package, add it here and its name to `FORMATS` in `plain_vit_command.py`.
"""

import os

from ..errors import CheckpointError, few
from .catalogue import HUB, OURS, SOURCES, Named, named_by
from .sources.gguf import GGUF
from .sources.google import GOOGLE
from .sources.open_clip.source import OPEN_CLIP
from .sources.renamed import RENAMED
from .sources.timm.source import TIMM
from .sources.torchvision.source import TORCHVISION
from .sources.transformers.source import TRANSFORMERS
from .sources.vit_pytorch.source import VIT_PYTORCH
from .tables.data_files import models_of
from .tables.format import Format, NamedFormat

FORMATS: dict[str, Format] = {
    format.name: format for format in (TIMM, VIT_PYTORCH, TORCHVISION, TRANSFORMERS, OPEN_CLIP, GOOGLE, GGUF, *RENAMED)
}

NAMED: dict[str, NamedFormat] = {format.name: format for format in (TIMM, TORCHVISION, OPEN_CLIP)}  # by prefix, too


def format_named(name: str) -> Format:
    """Return the source of this name.

    Raises:
        ValueError: There is no such source.
    """
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def located(source: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """Return the file, folder or Hub id of a source of weights, and the format of the model if the source is its name.

    Raises:
        CheckpointError: There is no such file and no model of this name, or the name is of a model without weights.
        HubError: The file of a name cannot be downloaded.
    """
    named = named_by(source)
    if named is None:
        return source, None
    return weights_of(named), None if named.prefix == HUB else SOURCES[named.prefix]


def weights_of(named: Named) -> str:
    """Return the Hub id or the file of the weights of a model.

    Raises:
        CheckpointError: The model has no weights, several, or only some that are not on the Hub.
        HubError: The file cannot be downloaded.
    """
    if named.prefix == HUB:
        return named.name
    if named.prefix != OURS and (place := NAMED[named.prefix].weights_of(named.name)) is not None:
        return place
    if url := named.entry.get("url"):
        raise CheckpointError(f"the weights of {named} are not on the Hub: download {url}, and give the file")
    listed = [] if named.prefix == OURS else [f"{named.prefix}:{name}" for name in models_of(SOURCES[named.prefix])]
    choices = [name for name in listed if name.startswith(f"{named}.")]
    wanted = f"name some: {few(choices)}" if choices else "create_model and finetune --from-scratch draw new ones"
    raise CheckpointError(f"{named} is a model without weights: {wanted}")
