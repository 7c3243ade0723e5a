"""Installed releases, for the tests that also run with older ones: `make test-floors`, `make test-year`."""

import pytest
import transformers

TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
IS_LOCAL_CODE_PREFERRED = TRANSFORMERS >= (5, 5)  # the installed package is used even if the folder's code is trusted
HAS_REGRESSION = TRANSFORMERS >= (5, 23)  # before, the pipeline returned the sigmoid of each value


def not_with_transformers(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip a test up to this release of transformers, for a reason that was seen with it."""
    return pytest.mark.skipif(
        (major, minor) >= TRANSFORMERS, reason=f"transformers {transformers.__version__}: {reason}"
    )
