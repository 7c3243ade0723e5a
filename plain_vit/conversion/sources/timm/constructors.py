"""Registry of timm's classes beside its VisionTransformer: an additional one is one package and one line here."""

from .constructor import Constructor
from .eva.source import EVA
from .naflex.source import NAFLEX
from .relative.beit import BEIT
from .relative.relpos import RELPOS

CONSTRUCTORS: tuple[Constructor, ...] = (EVA, BEIT, RELPOS, NAFLEX)


def constructor_named(architecture: str | None) -> Constructor | None:
    """Return the class of an architecture, such as "vit_small_patch16_dinov3.lvd1689m", if it is one of these."""
    base = (architecture or "").split(".")[0]
    return next((one for one in CONSTRUCTORS if base in one.architectures), None)
