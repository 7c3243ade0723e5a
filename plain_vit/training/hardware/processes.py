"""Processes of a run: those that train, those that prepare images, and an end on request."""

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
    """Start the one or many processes of a run; on a CPU they keep the memory that a step frees for the next one.

    Args:
        num_processes: how many there must be, or None to take what the launcher made.
        gradient_accumulation_steps: micro-batches per optimizer step in each process.
        mixed_precision: `no`, `bf16` or `fp16`.

    Raises:
        TrainingError: Another number of processes is running, or they would not do what was asked for.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    # Without a GPU, and where nothing says so, Accelerate would take each of several processes for the only one.
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


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# What the processes that prepare images, and the script that they belong to, import: only once, in their server.
PREPARED_MODULES = ["plain_vit.training.metrics", "plain_vit.training.models", "plain_vit.training.run.report"]


def loading_options(num_workers: int) -> dict[str, Any]:
    """Return how a `DataLoader` shall work: with so many processes, and into memory that a GPU can copy from.

    To be called early: what these processes import is imported while the run prepares itself. They import the script
    too, which must do its work under `if __name__ == "__main__":`.

    The processes come from a server that only imports, where the system can have one. Signals to a group of processes,
    which `torchrun` and Ctrl-C send, do not reach them: the process that trains needs them until it has saved.

    Args:
        num_workers: processes that prepare images; 0 leaves it to the process that trains.
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
