"""Micro-batch sizes that fit into memory, and out-of-memory errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...errors import TrainingError
from ...system.extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
    from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size


def fitting_accumulation(
    try_images: Callable[[int], None], accelerator: Accelerator, *, images: int, at_least: int = 1
) -> int:
    """Return the smallest number of micro-batches per optimizer step with which a step fits into memory.

    All processes use the largest number that any of them needs.

    Args:
        try_images: runs a training step with this many images; raises an out-of-memory error if they do not fit.
        accelerator: accelerator of the run.
        images: images per optimizer step in each process.
        at_least: number of micro-batches to try first.

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
    """Return whether an error means that a device or the machine is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Replace out-of-memory errors of a training step by an error that says what to do.

    Raises:
        TrainingError: The step did not fit into memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lack_of_memory(error):
            raise
        raise TrainingError(
            f"Out of memory: let --auto_micro_batch find micro-batches that fit, or increase their number with "
            f"--gradient_accumulation_steps. ({error})"
        ) from error


def training_trial(
    model: nn.Module, accelerator: Accelerator, noise: Callable[[int], dict[str, torch.Tensor]]
) -> Callable[[int], None]:
    """Return a function that runs a forward and backward pass on noise, with memory reserved for optimizer states.

    Args:
        model: maps its inputs to an output with `logits`; its weights and statistics are not changed.
        accelerator: the accelerator that prepared the model.
        noise: returns the model's inputs for a number of images.
    """

    def attempt(images: int) -> None:
        bare = accelerator.unwrap_model(model)
        kept = [buffer.clone() for buffer in bare.buffers()]
        trained = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        reserve = [torch.empty_like(parameter) for parameter in trained for _ in range(2)]  # two states, as for Adam
        try:
            bare(**send_to_device(noise(images), accelerator.device)).logits.sum().backward()
        finally:
            del reserve
            bare.zero_grad()
            for buffer, value in zip(bare.buffers(), kept, strict=True):
                buffer.copy_(value)

    return attempt
