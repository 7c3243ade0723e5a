"""Sharding of weights, gradients, optimizer states and moving averages over processes (FSDP2).

Accelerate shards only on accelerators: on CPUs, its FSDP silently becomes DDP. Here `fully_shard` is called directly,
which works on both. A checkpoint contains the shards of all processes in PyTorch's distributed format.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from ...errors import TrainingError
from ...system.extras import needs

with needs("plain-vit[train]"):
    from accelerate import Accelerator

FOLDER = "sharded"  # subfolder of a checkpoint


def shard(model: nn.Module, accelerator: Accelerator) -> None:
    """Shard a model over all processes: each block gathers its weights before it runs.

    Args:
        model: a model on any device; its parameters are replaced, so create optimizers afterwards.
        accelerator: accelerator of the run, with several processes.

    Raises:
        TrainingError: See `blocks_to_shard`.
    """
    blocks = blocks_to_shard(model, accelerator)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    policy = MixedPrecisionPolicy()
    if accelerator.mixed_precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.to(accelerator.device)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Reshard parameters outside the blocks after each forward pass too: an evaluation has no backward pass, and
    # checkpoints and averages need shards.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def check_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer], accelerator: Accelerator) -> None:
    """Check that an optimizer supports sharded weights: take two steps with a few weights of each shape.

    Args:
        make: builds the optimizer of a model.
        accelerator: accelerator of the run, with several processes.

    Raises:
        TrainingError: The optimizer uses an operation that sharded tensors do not support.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    model = nn.Sequential(nn.Sequential(nn.ModuleList([nn.Conv2d(3, 4, 2), nn.Linear(4, 6)]))).to(accelerator.device)
    fully_shard(model, mesh=mesh)
    optimizer = make(model)
    try:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrainingError(
            f"The optimizer does not work with sharded weights ({reason}): use adamw, or omit --shard."
        ) from error


def blocks_to_shard(model: nn.Module, accelerator: Accelerator) -> list[nn.Module]:
    """Return the blocks of a model that `shard` shards one by one.

    Args:
        model: a model that is not sharded yet.
        accelerator: accelerator of the run.

    Raises:
        TrainingError: There is only one process, or the model does not declare its blocks.
    """
    if accelerator.num_processes < 2:
        raise TrainingError(
            "Sharding needs at least two processes: start several, as to resume a run with --shard; or omit --shard."
        )
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise TrainingError(f"{type(model).__name__} does not declare its blocks: omit --shard.")
    return blocks


def held_here(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters in this process and in total."""
    return sum(each.numel() for each in local_parameters(model)), sum(each.numel() for each in model.parameters())


def local_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of a model, or this process's shards of them."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model was sharded by `shard`."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Gather the whole weights in the main process; all processes must call this."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


class ShardedState:
    """Sharded part of a checkpoint.

    Args:
        model: model sharded by `shard`.
        optimizer: optimizer of the model's parameters.
        average: moving average whose module is sharded too, or None.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel | None) -> None:
        self.model, self.optimizer, self.average = model, optimizer, average

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if self.average is not None:
            state["average"] = get_model_state_dict(self.average.module)
            state["averaged"] = self.average.n_averaged
        return state

    def save(self, checkpoint: Path) -> None:
        """Write the shards of all processes to the folder of a checkpoint.

        Raises:
            ExceptionGroup: Processes could not write their shards; holds the error of each.
        """
        try:
            distributed_checkpoint.save(self._state(), checkpoint_id=str(checkpoint / FOLDER))
        except CheckpointException as error:  # derives from BaseException
            failures: list[Any] = [failure for failure, _ in error.failures.values()]
            raise ExceptionGroup(f"{checkpoint / FOLDER} was not written", failures) from error

    def load(self, checkpoint: Path) -> None:
        """Load the shards of this process from the folder of a checkpoint."""
        state = self._state()
        distributed_checkpoint.load(state, checkpoint_id=str(checkpoint / FOLDER))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if self.average is not None:
            set_model_state_dict(self.average.module, state["average"])
            self.average.n_averaged.copy_(state["averaged"])
