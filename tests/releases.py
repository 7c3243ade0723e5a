"""Installed releases, for tests that also run with older releases: `make test-floors`, `make test-year`."""

import pytest
import transformers

TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
IS_LOCAL_CODE_PREFERRED = TRANSFORMERS >= (5, 5)  # the installed package is used even if the folder's code is trusted
HAS_REGRESSION = TRANSFORMERS >= (5, 23)  # before, the pipeline applied a sigmoid


def not_with_transformers(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip a test with this and older releases of transformers, for a known reason."""
    return pytest.mark.skipif(
        (major, minor) >= TRANSFORMERS, reason=f"transformers {transformers.__version__}: {reason}"
    )
