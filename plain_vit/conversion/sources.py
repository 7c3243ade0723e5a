"""Registry of sources: an additional one is one module or package and one line here."""

from .format import Format
from .google import GOOGLE
from .open_clip.source import OPEN_CLIP
from .timm.source import TIMM
from .torchvision.source import TORCHVISION
from .transformers.source import TRANSFORMERS
from .vit_pytorch.source import VIT_PYTORCH

FORMATS: dict[str, Format] = {
    format.name: format for format in (TIMM, VIT_PYTORCH, TORCHVISION, TRANSFORMERS, OPEN_CLIP, GOOGLE)
}


def format_named(name: str) -> Format:
    """Return the source of this name.

    Raises:
        ValueError: There is none.
    """
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
