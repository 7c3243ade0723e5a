"""Imported before all else: where transformers is too old for this code, says so instead of a name that is missing."""

import transformers

OLDEST = "5.4"  # before, a config was no dataclass (5.0 to 5.3), and classes had other names and places (4.x)

if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, OLDEST.split("."))):
    raise ImportError(
        f"plain-vit needs transformers {OLDEST} or later, and this is {transformers.__version__}: update it, or give a "
        "folder of its own classes, which `plain-vit export FOLDER OUT --to transformers` writes where plain-vit runs"
    )
