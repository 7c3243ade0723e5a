"""Which parameter learns how fast, and when."""

import math
import re
from collections.abc import Iterable

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from plain_vit.errors import TrainingError

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}

# Weight decay shrinks what multiplies the signal. Biases, norms, tokens and position tables stay as they are.
MULTIPLYING_LAYERS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd)


def make_optimizer(
    model: nn.Module,
    name: str,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
    momentum: float = 0.9,
) -> torch.optim.Optimizer:
    """Build an optimizer whose groups have their own learning rate, kept as `peak_lr`, and weight decay.

    Args:
        model: what it trains; parameters that need no gradient are left out.
        name: `adamw`, `adam` or `sgd`.
        learning_rate: the peak, for the head.
        weight_decay: for the matrices and kernels of layers; nothing else decays.
        layer_decay: each block learns this many times as fast as the one above it; 1 treats all alike.
        momentum: of SGD, and the first beta of Adam.

    Raises:
        TrainingError: `layer_decay` is asked for a model that is not one stack of blocks.
    """
    decayed = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, MULTIPLYING_LAYERS)
        for parameter in layer.parameters(recurse=False)
        if parameter.ndim >= 2
    }
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    heights = heights_above_input([name for name, _ in model.named_parameters()]) if layer_decay != 1 else {}
    top = max(heights.values(), default=0)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter_name, parameter in named:
        rate = learning_rate * layer_decay ** (top - heights.get(parameter_name, top))
        decay = weight_decay if id(parameter) in decayed else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    parameter_groups = [
        {"params": parameters, "lr": rate, "peak_lr": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]
    if name == "sgd":
        return torch.optim.SGD(parameter_groups, lr=learning_rate, momentum=momentum)
    return OPTIMIZERS[name](parameter_groups, lr=learning_rate, betas=(momentum, 0.999))


def heights_above_input(names: Iterable[str]) -> dict[str, int]:
    """Number the parameters of a stack of blocks from the input up.

    Args:
        names: all parameters, in the order in which the model defines them.

    Returns:
        0 for what stands before the blocks, 1 for the first block, and so on; one above the last block for the rest.

    Raises:
        TrainingError: There is not exactly one stack of blocks.
    """
    names = list(names)
    matches = {name: re.match(r"(.*?)\.(\d+)\.", name) for name in names}
    stacks = {match[1] for match in matches.values() if match and int(match[2]) > 0}
    if len(stacks) != 1:
        raise TrainingError(
            f"layer_decay needs a model with one stack of blocks, this one has {len(stacks)}: leave out --layer_decay."
        )
    stack = stacks.pop()
    blocks = {name: int(match[2]) + 1 for name, match in matches.items() if match and match[1] == stack}
    first, last = names.index(next(iter(blocks))), max(blocks.values())
    return {name: blocks.get(name, 0 if place < first else last + 1) for place, name in enumerate(names)}


def learning_rate_factor(step: int, *, total: int, warmup: int, schedule: str) -> float:
    """Return the part of the peak learning rate at which one optimizer step is taken.

    Args:
        step: from 0 to `total` - 1, in optimizer steps, however many processes and micro-batches make one.
        total: optimizer steps of the run.
        warmup: steps of the linear rise; the first step of all is taken at 1 / `warmup`.
        schedule: `cosine` or `linear`, both down to 0, or `constant`.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done if schedule == "linear" else 1.0


def average_of(model: nn.Module, decay: float, accelerator: Accelerator) -> AveragedModel:
    """Return a moving average of the weights; `update_parameters` after each step moves it by 1 - `decay`.

    Raises:
        TrainingError: The weights are going to be sharded.
    """
    if not 0 <= decay < 1:
        raise TrainingError(f"ema_decay is {decay}: expected at least 0 and less than 1, such as 0.999.")
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise TrainingError("No moving average is kept of sharded weights: leave out --ema_decay, or do not shard.")
    return AveragedModel(model, device=accelerator.device, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=False)
