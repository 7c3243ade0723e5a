"""Precision of float32 matrix products on GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Inside this context, GPUs multiply float32 matrices and convolve in TF32, with 10 bits of mantissa, or not.

    Args:
        enabled: whether they do. TF32 is several times as fast; CPUs and 16-bit types are not affected.
    """
    # The old names: the new ones, `fp32_precision`, do not set these, which torch.compile reads.
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = enabled
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
