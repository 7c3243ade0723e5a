"""Registry of sources.

To add a source, write a module or package, add it here and its name to `FORMATS` in `plain_vit_command.py`.
"""

from .sources.google import GOOGLE
from .sources.open_clip.source import OPEN_CLIP
from .sources.timm.source import TIMM
from .sources.torchvision.source import TORCHVISION
from .sources.transformers.source import TRANSFORMERS
from .sources.vit_pytorch.source import VIT_PYTORCH
from .tables.format import Format

FORMATS: dict[str, Format] = {
    format.name: format for format in (TIMM, VIT_PYTORCH, TORCHVISION, TRANSFORMERS, OPEN_CLIP, GOOGLE)
}


def format_named(name: str) -> Format:
    """Return the source of this name.

    Raises:
        ValueError: There is no such source.
    """
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
