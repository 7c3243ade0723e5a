"""Print the collectives of a training step of a small model, as JSON: `torchrun ... -m tests.training.collectives`."""

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.training.hardware.sharding import blocks_to_shard, shard

# Kind of each operation, and the index of its process group argument, after the tensors.
KINDS = {
    "allreduce_": ("all_reduce", 1),
    "_allgather_base_": ("all_gather", 2),
    "_reduce_scatter_base_": ("reduce_scatter", 2),
}
NAME = "vit-tiny-patch16-224"


class Collectives(TorchDispatchMode):
    """Count collectives and the bytes of the larger of input and output, by phase, kind and number of processes."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            kind, place = KINDS[name]
            sizes = (tree_leaves(side) for side in args[:place])
            nbytes = max(sum(each.nbytes for each in side) for side in sizes)
            members = dist.ProcessGroup.unbox(args[place]).size()
            count = self.found.setdefault(f"{self.phase} {kind} {members}", [0, 0])
            count[0] += 1
            count[1] += nbytes
        return func(*args, **(kwargs or {}))


def prepared(strategy: str, accelerator: Accelerator) -> nn.Module:
    """Return the model as the training scripts prepare it, or sharded within nodes, which no script does."""
    torch.manual_seed(0)
    model = PlainViTForImageClassification(PlainViTConfig.from_name(NAME, num_labels=1000)).train()
    if strategy == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if strategy == "FSDP2":
        shard(model, accelerator)
        return model
    mesh = init_device_mesh("cpu", (accelerator.num_processes // 2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_to_shard(model, accelerator):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def main() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    counted = {}
    for strategy in sys.argv[1:]:
        model = prepared(strategy, accelerator)
        collectives = Collectives()
        # DistributedDataParallel builds its buckets in the first step, and sends their order before the second.
        for context in (nullcontext(), nullcontext(), collectives):
            with context:
                loss = model(torch.randn(1, 3, 224, 224)).logits.float().sum()
                collectives.phase = "backward"
                loss.backward()
            collectives.phase = "forward"
        counted[strategy] = collectives.found
    if accelerator.is_main_process:
        print(json.dumps(counted))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
