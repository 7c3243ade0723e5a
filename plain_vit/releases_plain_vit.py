"""Raises a clear error, before any other import can fail, if transformers is too old."""

import transformers

OLDEST = "5.4"  # in 5.0 to 5.3 configs are not dataclasses, in 4.x classes have other names

if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, OLDEST.split("."))):
    raise ImportError(
        f"plain-vit needs transformers {OLDEST} or later, and this is {transformers.__version__}: update it, or load a "
        "stock model, which `plain-vit export FOLDER OUT --to transformers` writes on a machine that has a newer one"
    )
