"""Common dtype of a model whose source has several: the smallest that holds all their values exactly."""

import functools
from collections import Counter
from collections.abc import Iterable

import torch

from ..errors import CheckpointError

# Dtypes that our model can have.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the smallest dtype that holds the values of all these floating-point dtypes exactly; others are ignored.

    Raises:
        CheckpointError: There are several floating-point dtypes, and one is not in `DTYPES`.
    """
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) > 1 and not floating <= set(DTYPES):
        raise CheckpointError(
            f"the tensors have several dtypes, {', '.join(sorted(map(str, floating)))}, and only those of "
            f"{', '.join(map(str, DTYPES))} have one that holds all their values exactly: save them in one"
        )
    return functools.reduce(torch.promote_types, floating)


def several_dtypes(dtypes: Iterable[torch.dtype]) -> str | None:
    """Return a note if there are several floating-point dtypes, which the model unifies; otherwise None."""
    counts = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point)
    if len(counts) < 2:
        return None
    held = " and ".join(f"{dtype} ({count})" for dtype, count in sorted(counts.items()))
    one = common_dtype(getattr(torch, dtype) for dtype in counts)
    return (
        f"the tensors are of {held}: the model is in {str(one).removeprefix('torch.')}, which holds all their values "
        "exactly; the source rounds more where it computes in a smaller dtype"
    )
