"""Parts that the training scripts in `examples/` share: the loop and its tasks, data, optimisation, folders of runs."""

from .hardware.fast_steps import fast_steps

__all__ = ["fast_steps"]
