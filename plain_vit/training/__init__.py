"""Parts shared by the training scripts in `examples/`: the loop and its tasks, data, optimisation, run folders."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hardware.fast_steps import fast_steps


def __getattr__(name: str) -> Any:  # on use: the options of the scripts are read without torch
    if name == "fast_steps":
        from .hardware.fast_steps import fast_steps

        return fast_steps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["fast_steps"]
