"""Starting Accelerate so that the processes that run are the processes that were asked for."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator

from plain_vit.errors import TrainingError
from plain_vit.training.memory import keep_freed_memory


def start_accelerator(
    *, num_processes: int | None, gradient_accumulation_steps: int, mixed_precision: str
) -> Accelerator:
    """Start the one or many processes of a run; on a CPU they keep the memory that a step frees for the next one.

    Args:
        num_processes: how many there must be, or None to take what the launcher made.
        gradient_accumulation_steps: micro-batches per optimizer step in each process.
        mixed_precision: `no`, `bf16` or `fp16`.

    Raises:
        TrainingError: Another number of processes is running, or they would not do what was asked for.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    # Without a GPU, and without being told so, Accelerate would take each of several processes for the only one.
    cpu = True if launched > 1 and not torch.accelerator.is_available() else None
    accelerator = Accelerator(
        cpu=bool(cpu), gradient_accumulation_steps=gradient_accumulation_steps, mixed_precision=mixed_precision
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.device.type == "cpu":
        raise TrainingError("On CPUs Accelerate's FSDP is plain DDP: take another config file, and add --shard.")
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainingError("On CPUs Accelerate's fp16 is float32: use --mixed_precision bf16, or leave it out.")
    if accelerator.num_processes != (num_processes or launched):
        raise TrainingError(
            f"{accelerator.num_processes} processes are running, {num_processes or launched} were asked for. On a "
            "machine without GPUs start several with `torchrun --nproc_per_node N` or `accelerate launch --multi_gpu "
            "--num_processes N`: `accelerate launch --cpu --num_processes N` starts one."
        )
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


class StopRequest:
    """Inside this context, SIGTERM and SIGINT ask for a stop at the next step instead of ending the process."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self.handlers = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def requested_anywhere(self, accelerator: Accelerator) -> bool:
        """Return whether any process was asked to stop; all processes get the same answer."""
        if accelerator.num_processes == 1:
            return self.requested
        return bool(accelerator.reduce(torch.tensor(float(self.requested), device=accelerator.device)) > 0)
