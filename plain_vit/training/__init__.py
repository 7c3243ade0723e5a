"""Parts shared by the training scripts in `examples/`: the loop and its tasks, data, optimisation, run folders."""

from .hardware.fast_steps import fast_steps

__all__ = ["fast_steps"]
