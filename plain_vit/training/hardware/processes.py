"""Processes of a run: training processes, data loader workers, and stopping on request."""

import os
import signal
from types import FrameType
from typing import Any, Self

import torch

from ...errors import TrainingError
from ...extras import needs
from ...system import handled_signals, keep_freed_memory, start_fork_server

with needs("plain-vit[train]"):
    from accelerate import Accelerator


def start_accelerator(
    *, num_processes: int | None, gradient_accumulation_steps: int = 1, mixed_precision: str
) -> Accelerator:
    """Start the processes of a run; on a CPU they reuse the memory that a step frees for the next one.

    Args:
        num_processes: required number of processes, or None for any.
        gradient_accumulation_steps: micro-batches per optimizer step in each process.
        mixed_precision: `no`, `bf16` or `fp16`.

    Raises:
        TrainingError: Another number of processes is running, or they would not do what was requested.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    # Without a GPU and an explicit setting, Accelerate would treat each of several processes as the only one.
    cpu = True if launched > 1 and not torch.accelerator.is_available() else None
    accelerator = Accelerator(
        cpu=bool(cpu), gradient_accumulation_steps=gradient_accumulation_steps, mixed_precision=mixed_precision
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.device.type == "cpu":
        raise TrainingError("On CPUs Accelerate's FSDP is plain DDP: use another config file, and add --shard.")
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainingError("On CPUs Accelerate's fp16 is float32: use --mixed_precision bf16, or omit it.")
    if accelerator.num_processes != (num_processes or launched):
        raise TrainingError(
            f"{accelerator.num_processes} processes are running, {num_processes or launched} were requested. On a "
            "machine without GPUs start several with `torchrun --nproc_per_node N` or `accelerate launch --multi_gpu "
            "--num_processes N`: `accelerate launch --cpu --num_processes N` starts one."
        )
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Modules that data loader workers and their script import: preloaded once in the fork server.
PREPARED_MODULES = ["plain_vit.training.metrics", "plain_vit.training.models", "plain_vit.training.run.report"]


def loading_options(num_workers: int) -> dict[str, Any]:
    """Return the options of a `DataLoader`: workers and pinned memory.

    Call it early: the workers' imports then overlap with the preparation of the run. They import the script too, which
    must do its work under `if __name__ == "__main__":`.

    The workers are started by a fork server, if the system supports it. Signals to the process group, as sent by
    `torchrun` and Ctrl-C, do not reach them: the training process needs them until it has saved.

    Args:
        num_workers: number of data loader workers; 0 loads in the training process.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": torch.cuda.is_available()}
    if num_workers and start_fork_server(PREPARED_MODULES, ignored=STOP_SIGNALS):
        options |= {"multiprocessing_context": "forkserver", "worker_init_fn": _leave_group}
    return options


def _leave_group(worker: int) -> None:
    os.setsid()


class StopRequest:
    """Inside this context, SIGTERM and SIGINT ask for a stop at the next step instead of ending the process."""

    def __init__(self) -> None:
        self.requested = False
        self.handling = handled_signals(dict.fromkeys(STOP_SIGNALS, self._request))

    def __enter__(self) -> Self:
        self.handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.handling.__exit__(*error)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def requested_anywhere(self, accelerator: Accelerator) -> bool:
        """Return whether any process was asked to stop; all processes get the same answer."""
        if accelerator.num_processes == 1:
            return self.requested
        return bool(accelerator.reduce(torch.tensor(float(self.requested), device=accelerator.device)) > 0)
