"""Memory: how many images fit in at once, and what to do when they do not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...errors import TrainingError
from ...extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size


def fitting_accumulation(
    try_images: Callable[[int], None], accelerator: Accelerator, *, images: int, at_least: int = 1
) -> int:
    """Return into how many micro-batches the images of one optimizer step must be divided to fit into memory.

    All processes try, and all take the largest number that one of them needs.

    Args:
        try_images: does with so many images what training does, and runs out of memory with too many.
        accelerator: of the run.
        images: of one optimizer step in one process.
        at_least: micro-batches to begin with.

    Raises:
        TrainingError: Not even one image fits.
    """
    for parts in (parts for parts in range(at_least, images + 1) if images % parts == 0):
        fits = True
        try:
            try_images(images // parts)
        except RuntimeError as error:
            if not is_lack_of_memory(error):
                raise
            fits = False
        clear_device_cache(garbage_collection=True)
        lacking = torch.tensor(float(not fits), device=accelerator.device)
        if accelerator.reduce(lacking) == 0:
            return parts
    raise TrainingError(
        "Not even one image fits into memory: train with --gradient_checkpointing, --mixed_precision bf16, --freeze or "
        "--lora_rank, or a smaller --image_size."
    )


def is_lack_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that a device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Say what to do when a training step does not fit into memory.

    Raises:
        TrainingError: It did not.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lack_of_memory(error):
            raise
        raise TrainingError(
            f"The memory is full: let --auto_micro_batch find micro-batches that fit, or make more of them with "
            f"--gradient_accumulation_steps. ({error})"
        ) from error


def training_trial(
    model: nn.Module, accelerator: Accelerator, image_shape: tuple[int, int, int]
) -> Callable[[int], None]:
    """Return what runs a model forward and backward on images of noise, with room left for the states of an optimizer.

    Args:
        model: maps `pixel_values` to an output with `logits`; its weights and statistics stay as they are.
        accelerator: that prepared it.
        image_shape: (C, H, W).
    """

    def attempt(images: int) -> None:
        bare = accelerator.unwrap_model(model)
        kept = [buffer.clone() for buffer in bare.buffers()]
        trained = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        reserve = [torch.empty_like(parameter) for parameter in trained for _ in range(2)]  # as Adam needs
        try:
            bare(pixel_values=torch.randn(images, *image_shape, device=accelerator.device)).logits.sum().backward()
        finally:
            del reserve
            bare.zero_grad()
            for buffer, value in zip(bare.buffers(), kept, strict=True):
                buffer.copy_(value)

    return attempt
