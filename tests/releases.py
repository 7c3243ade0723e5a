"""The releases that are installed, for tests that run with older ones too: `make test-floors`, `make test-year`."""

import pytest
import torch
import transformers

TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Where the package is installed, its classes open a folder even if its code is trusted.
IS_LOCAL_CODE_PREFERRED = TRANSFORMERS >= (5, 10)


HAS_REGRESSION = TRANSFORMERS >= (5, 23)  # before, the pipeline answered the sigmoid of each number


def since_transformers(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip a test with an older transformers."""
    return pytest.mark.skipif((major, minor) > TRANSFORMERS, reason=f"before {major}.{minor}, {reason}")
