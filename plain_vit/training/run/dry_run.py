"""Memory and disk requirements of a run, measured on the model before training."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import in_bytes
from ...system.extras import needs
from ..hardware.fast_steps import fast_steps

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.utils import send_to_device

TRIED = 2  # images to try; batch norms need more than one


@dataclass(frozen=True)
class Needs:
    """Memory that training a model takes, in bytes.

    Args:
        weights: Weights of the model, including buffers.
        gradients: Gradients of the trained parameters.
        optimizer: Optimizer states.
        average: Moving average of the weights, or 0.
        activations: Activations kept per image for the backward pass.
        copies: Copies of weights kept for the backward pass, fused or in another precision.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    copies: int = 0

    def memory(self, micro_batch: int, *, shards: int = 1) -> int:
        """Return the memory of one process, in bytes.

        Args:
            micro_batch: Images of one forward pass.
            shards: Number of processes over which weights, gradients, states and average are sharded.
        """
        divided = self.weights + self.gradients + self.optimizer + self.average
        return divided // shards + self.copies + micro_batch * self.activations

    @property
    def checkpoint(self) -> int:
        """Return the size of one checkpoint on disk, in bytes."""
        return self.weights + self.optimizer + self.average

    def disk(self, *, checkpoints_kept: int, models_kept: int) -> int:
        """Return the peak disk space, in bytes; the next checkpoint is written before an old one is deleted.

        Args:
            checkpoints_kept: Number of checkpoints to keep; 0 if none is written.
            models_kept: Number of best models to keep; a new one is written before an old one is deleted.
        """
        checkpoints = (checkpoints_kept + 1) * self.checkpoint if checkpoints_kept else 0
        return checkpoints + (models_kept + (models_kept > 0) + 1) * self.weights


def measure_needs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    noise: Callable[[int], dict[str, torch.Tensor]],
    *,
    averaged: bool,
) -> Needs:
    """Run one step on noise and measure its memory. This changes the weights.

    Args:
        model: Maps its inputs to an output with `logits`; not prepared yet.
        optimizer: Optimizer of the model.
        accelerator: Accelerator with device and precision.
        noise: Returns the model's inputs for a number of images.
        averaged: Whether a moving average of the weights will be kept.
    """
    model.to(accelerator.device).train()
    with fast_steps(model):
        few = _kept(model, noise(TRIED), accelerator)[0]
        more, loss = _kept(model, noise(2 * TRIED), accelerator)
        activations = (more - few) // TRIED
        loss.backward()
    optimizer.step()
    weights = _bytes([*model.parameters(), *model.buffers()])
    return Needs(
        weights=weights,
        gradients=_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
        optimizer=_bytes(
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ),
        average=weights if averaged else 0,
        activations=activations,
        copies=few - TRIED * activations,
    )


def _kept(model: nn.Module, inputs: dict[str, Any], accelerator: Accelerator) -> tuple[int, torch.Tensor]:
    """Return a loss, and the bytes that autograd keeps for its backward pass besides the model's own tensors."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = send_to_device(inputs, accelerator.device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), accelerator.autocast():
        loss = model(**inputs).logits.float().sum()
    return sum(kept.values()), loss


def describe_needs(
    needs: Needs,
    folder: Path,
    *,
    micro_batch: int,
    shards: int,
    checkpoints_kept: int,
    models_kept: int,
) -> dict[str, dict[str, object]]:
    """Return tables of memory and disk requirements, by title.

    Args:
        needs: From `measure_needs`.
        folder: Run folder; it need not exist.
        micro_batch: Images of one forward pass of one process.
        shards: Number of processes over which weights, gradients, states and average are sharded.
        checkpoints_kept: Number of checkpoints to keep; 0 if none is written.
        models_kept: Number of best models to keep.
    """

    def divided(number: int) -> str:
        return in_bytes(number) if shards == 1 else f"{in_bytes(number // shards)}, 1/{shards} of {in_bytes(number)}"

    exchanged = "weights and gradients" if shards > 1 else "gradients"
    memory: dict[str, object] = {
        "weights": divided(needs.weights),
        "gradients": divided(needs.gradients),
        "optimizer states": divided(needs.optimizer),
        "moving average": divided(needs.average) if needs.average else "none",
        "copies of weights": in_bytes(needs.copies) if needs.copies else "none",
        "activations": f"{in_bytes(micro_batch * needs.activations)}, {micro_batch} x "
        f"{in_bytes(needs.activations)} per image",
        "in all": f"about {in_bytes(needs.memory(micro_batch, shards=shards))}",
        "how estimated": f"measured in a step on {TRIED} and {2 * TRIED} images of noise; without the working memory "
        "of operations, blocks computed again for the backward pass, allocator overhead, and buffers of "
        f"{exchanged} that processes exchange",
    }
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free, most = shutil.disk_usage(place).free, needs.disk(checkpoints_kept=checkpoints_kept, models_kept=models_kept)
    disk: dict[str, object] = {
        "a checkpoint": f"about {in_bytes(needs.checkpoint)}",
        "at most": f"about {in_bytes(most)} at once"
        + (f", with {checkpoints_kept} checkpoints kept" if checkpoints_kept else ", without checkpoints"),
        "free": f"{in_bytes(free)} at {place}" + ("" if free > most else ": NOT ENOUGH"),
    }
    return {"Memory of one process": memory, "Disk": disk}


def text_tables(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Format tables of `describe_needs` as text."""
    width = max(len(name) for rows in tables.values() for name in rows)
    blocks = [
        "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])
        for title, rows in tables.items()
    ]
    return "\n\n".join(blocks)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
