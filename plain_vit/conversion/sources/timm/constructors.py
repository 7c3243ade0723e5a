"""Registry of timm's classes other than VisionTransformer. To add one, write a package and add one line here."""

from .constructor import Constructor
from .eva.source import EVA
from .naflex.source import NAFLEX
from .relative.beit import BEIT
from .relative.relpos import RELPOS

CONSTRUCTORS: tuple[Constructor, ...] = (EVA, BEIT, RELPOS, NAFLEX)


def constructor_named(architecture: str | None) -> Constructor | None:
    """Return the class of an architecture such as "vit_small_patch16_dinov3.lvd1689m"; None for other names."""
    base = (architecture or "").split(".")[0]
    return next((one for one in CONSTRUCTORS if base in one.architectures), None)
