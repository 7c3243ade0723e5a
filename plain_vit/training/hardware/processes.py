"""Processes of a run: training processes, data loader workers, and stopping on request."""

import math
import os
import signal
import time
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Self

import torch

from ...errors import TrainingError
from ...system.calls import handled_signals, keep_freed_memory, start_fork_server
from ...system.environment import warn_of_slow_products
from ...system.extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
        str_to_bool,
    )

CPU_SETTING = "ACCELERATE_USE_CPU"  # set by `accelerate launch` for its processes
DIVIDERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")  # likewise
# How long processes wait while one of them lists images, writes a model or draws the report.
PATIENCE = timedelta(hours=1)


def start_processes(options: Any) -> tuple[Accelerator, dict[str, Any]]:
    """Return the accelerator of a script, and keyword arguments for a `DataLoader`; see the functions below.

    Args:
        options: `ProcessOptions`, and possibly `gradient_accumulation_steps`.
    """
    accelerator = start_accelerator(
        num_processes=options.num_processes,
        gradient_accumulation_steps=getattr(options, "gradient_accumulation_steps", 1),
        mixed_precision=options.mixed_precision,
    )
    return accelerator, loading_options(options.num_workers)


def start_accelerator(
    *, num_processes: int | None, gradient_accumulation_steps: int = 1, mixed_precision: str
) -> Accelerator:
    """Start the processes of a run; on a CPU, let them reuse the memory that a step frees.

    Args:
        num_processes: required number of processes, or None for any.
        gradient_accumulation_steps: micro-batches per optimizer step in each process.
        mixed_precision: `no`, `bf16` or `fp16`.

    Raises:
        TrainingError: Accelerate is configured to divide the model itself, the number of running processes differs, or
            fp16 would have no effect on a CPU.
    """
    for name in DIVIDERS:
        if str_to_bool(os.environ.get(f"ACCELERATE_USE_{name}", "false")):
            raise TrainingError(
                f"Accelerate is configured for {name}, which these scripts do not use: launch them for data "
                "parallelism, as with examples/accelerate_configs/gpus.yaml, and in training divide weights, gradients "
                "and optimizer states with --shard."
            )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    # Without a GPU or an explicit setting, Accelerate would treat each of several processes as the only one.
    cpu = True if launched > 1 and not torch.accelerator.is_available() else None
    accelerator = Accelerator(
        cpu=bool(cpu),
        gradient_accumulation_steps=gradient_accumulation_steps,
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=PATIENCE),
        ],
    )
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainingError("On CPUs Accelerate's fp16 is float32: use --mixed_precision bf16, or omit it.")
    if accelerator.num_processes != (num_processes or launched):
        raise TrainingError(
            f"{accelerator.num_processes} processes are running, {num_processes or launched} were requested. On a "
            "machine without GPUs start several with `torchrun --nproc_per_node N` or `accelerate launch --multi_gpu "
            "--num_processes N`: `accelerate launch --cpu --num_processes N` starts one."
        )
    if accelerator.num_processes == 1 and num_processes is None and str_to_bool(os.environ.get(CPU_SETTING, "false")):
        accelerator.print(
            "One process: `accelerate launch --cpu` starts one, whatever its --num_processes says. Several: "
            "`torchrun --nproc_per_node N` or `accelerate launch --multi_gpu --num_processes N`."
        )
    if mixed_precision == "bf16" and accelerator.device.type == "cpu" and accelerator.is_main_process:
        warn_of_slow_products(torch.bfloat16)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


STOP_SIGNALS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
# Modules imported by data loader workers and their script, preloaded once in the fork server.
PREPARED_MODULES = ["plain_vit.training.metrics", "plain_vit.training.models", "plain_vit.training.reports.report"]


def loading_options(num_workers: int) -> dict[str, Any]:
    """Return keyword arguments for a `DataLoader`: persistent workers and pinned memory.

    Call this early, so that the workers' imports overlap with the preparation of the run. The workers import the script
    too, which must do its work under `if __name__ == "__main__":`.

    A fork server starts the workers, if the system supports it. Signals to the process group, as sent by `torchrun` and
    Ctrl-C, do not reach the workers, since the training process needs them until it has saved.

    Args:
        num_workers: number of data loader workers; 0 loads in the training process.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": torch.cuda.is_available()}
    if num_workers:
        options["persistent_workers"] = True
    if num_workers and start_fork_server(PREPARED_MODULES, ignored=STOP_SIGNALS):
        options |= {"multiprocessing_context": "forkserver", "worker_init_fn": _leave_group}
    return options


def _leave_group(worker: int) -> None:
    os.setsid()


OUT_OF_TIME = 75  # exit status of a run that ended at its deadline: EX_TEMPFAIL of sysexits.h, "try again"


class StopRequest:
    """Context in which signals request a stop at the end of a step instead of ending the process, as a deadline does.

    SLURM can send SIGUSR1 before the time limit of a job (`--signal=USR1@120`).

    Args:
        until: the deadline, by `time.perf_counter`.
    """

    def __init__(self, until: float = math.inf) -> None:
        self.until = until
        self.signal = 0  # number of the last signal
        self.handling = handled_signals(dict.fromkeys(STOP_SIGNALS, self._request))

    def __enter__(self) -> Self:
        self.handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.handling.__exit__(*error)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    @property
    def status(self) -> int:
        """Return the exit status with which to stop, or 0 to go on."""
        if self.signal:
            return 128 + self.signal
        return OUT_OF_TIME if time.perf_counter() >= self.until else 0


EXCHANGE_EVERY = 2.0  # seconds of training between exchanges: a stop takes less than 5 seconds, or one step


class Agreement(NamedTuple):
    """What all processes know after an exchange.

    Args:
        stop: exit status with which to stop, or 0.
        bad_step: the first step whose loss was not finite, or None.
        save: whether a checkpoint is due.
    """

    stop: int = 0
    bad_step: int | None = None
    save: bool = False


class StepExchange:
    """Agreement of all processes after a step.

    In an exchange, every process waits for all others and for its device. Exchanges happen only at steps that all
    processes know in advance: the next one follows from the slowest step of all processes. A single process on a CPU
    waits for nothing, so it checks after each step.

    Args:
        accelerator: accelerator of the run.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.waits = accelerator.num_processes > 1 or accelerator.device.type != "cpu"
        self.first_bad = torch.tensor(math.inf, device=accelerator.device)
        self.next_step, self.last_step, self.since = 0, 0, time.perf_counter()

    def watch(self, loss: torch.Tensor, step: int) -> None:
        """Record the step if its loss is not finite, without waiting for the device."""
        self.first_bad = torch.where(loss.isfinite(), self.first_bad, self.first_bad.clamp(max=step))

    def after(self, step: int, status: int, *, due: bool, save: bool = False) -> Agreement:
        """Return what the processes agree on: the highest status, the first bad step, and to save if one asks for it.

        Args:
            step: number of steps taken; the same in all processes, like `due`.
            status: the exit status with which this process has to stop, or 0.
            due: exchange even if no exchange is scheduled.
            save: whether this process asks for a checkpoint.
        """
        if not self.waits:
            return Agreement(status, self._step_of(float(self.first_bad)), save)
        if step < self.next_step and not due:
            return Agreement()
        seconds = (time.perf_counter() - self.since) / max(1, step - self.last_step)
        own = torch.tensor([[float(status), seconds, 0.0, float(save)]], device=self.accelerator.device)
        own[0, 2] = self.first_bad
        statuses, durations, first_bad, saves = self.accelerator.gather(own).unbind(dim=1)
        self.next_step = step + max(1, int(EXCHANGE_EVERY / max(float(durations.max()), 1e-4)))
        self.last_step, self.since = step, time.perf_counter()
        return Agreement(int(statuses.max()), self._step_of(float(first_bad.min())), bool(saves.max()))

    @staticmethod
    def _step_of(first_bad: float) -> int | None:
        return None if first_bad == math.inf else int(first_bad)


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the random number generators of the CPU and a device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
