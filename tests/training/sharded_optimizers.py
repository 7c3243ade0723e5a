"""Step optimizers on whole and on sharded weights: `torchrun ... -m tests.training.sharded_optimizers`.

It prints a line of JSON per optimizer: the largest difference of weights, relative to how far the optimizer moved them,
or why the optimizer was refused. Halfway, the sharded state is saved and loaded into a new optimizer.
"""

import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor, distribute_tensor

from plain_vit import PlainViTForImageClassification
from plain_vit.errors import TrainingError
from plain_vit.training.hardware.sharding import ShardedState, check_optimizer, shard
from plain_vit.training.optimization import make_optimizer
from tests.tiny import tiny_config


def differences(name: str, folder: Path, accelerator: Accelerator) -> dict[str, Any]:
    """Return the line for an optimizer."""
    make = partial(make_optimizer, name=name, learning_rate=0.01, weight_decay=0.1)
    try:
        check_optimizer(make, accelerator)
    except TrainingError as error:
        return {"optimizer": name, "refused": str(error)}
    torch.manual_seed(0)
    whole: Any = PlainViTForImageClassification(tiny_config(num_hidden_layers=1))
    before = {key: tensor.detach().clone() for key, tensor in whole.named_parameters()}
    sharded: Any = copy.deepcopy(whole)
    shard(sharded, accelerator)
    optimizer, other_optimizer = make(whole), make(sharded)
    others: dict[str, DTensor] = dict(sharded.named_parameters())
    for step in range(3):
        for key, tensor in whole.named_parameters():
            tensor.grad = torch.randn_like(tensor)
            others[key].grad = distribute_tensor(tensor.grad, others[key].device_mesh, others[key].placements)
        optimizer.step()
        other_optimizer.step()
        if step == 1:
            sharded.zero_grad()
            ShardedState(sharded, other_optimizer, None).save(folder)
            other_optimizer = make(sharded, learning_rate=0.5, weight_decay=0.7)
            ShardedState(sharded, other_optimizer, None).load(folder)
    difference = {
        key: (tensor - others[key].full_tensor()).norm() / (tensor - before[key]).norm()
        for key, tensor in whole.named_parameters()
    }
    return {"optimizer": name, "difference": float(max(difference.values()))}


def main() -> None:
    """Print the lines of the optimizers named on the command line after a folder."""
    accelerator = Accelerator(cpu=True)
    folder, *names = sys.argv[1:]
    for number, name in enumerate(names):
        line = differences(name, Path(folder) / str(number), accelerator)
        accelerator.print(json.dumps(line))


if __name__ == "__main__":
    with torch.no_grad():
        main()
