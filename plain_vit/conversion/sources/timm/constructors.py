"""Registry of timm's classes. To add one, write a package and add one line here."""

from ....errors import UnknownFormatError
from ...tables.data_files import data_file
from .arguments import OPENED
from .constructor import Constructor
from .eva.source import EVA
from .naflex.source import NAFLEX
from .names import families
from .plain.source import VISION_TRANSFORMER
from .relative.beit import BEIT
from .relative.relpos import RELPOS

# The first class that represents a model is the one that it is exported to.
CONSTRUCTORS: tuple[Constructor, ...] = (VISION_TRANSFORMER, EVA, BEIT, RELPOS, NAFLEX)


def constructor_named(architecture: str) -> Constructor:
    """Return the class of an architecture such as "vit_base_patch16_224" or "vit_small_patch16_dinov3.lvd1689m".

    Raises:
        UnknownFormatError: There is no such architecture of timm, or it does not open.
    """
    base = architecture.split(".")[0]
    for constructor in CONSTRUCTORS:
        if constructor.entrypoint(base) in constructor.architectures:
            return constructor
    if file := next((file for file, family in families().items() if base in family.entrypoints), None):
        raise UnknownFormatError(
            f"{architecture!r} is of timm's {file}.py ({families()[file].title}), which plain-vit does not open: it "
            f"opens its {OPENED}"
        )
    known = sum(len(constructor.architectures) for constructor in CONSTRUCTORS)
    release = data_file(VISION_TRANSFORMER.data_file)["timm"]
    raise UnknownFormatError(
        f"{architecture!r} is not one of the {known} Vision Transformers of timm {release} that plain-vit opens: "
        f"its {OPENED}"
    )
