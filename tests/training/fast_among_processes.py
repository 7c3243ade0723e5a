"""Train a small model in two processes: `torchrun ... -m tests.training.fast_among_processes`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from plain_vit import PlainViTForImageClassification
from plain_vit.training import fast_steps
from tests.conftest import randomize_
from tests.tiny import pixels, tiny_config

STEPS = 3
LABELS = torch.tensor([1, 2])


def build() -> Any:
    """Return a model in training mode with random parameters."""
    return randomize_(PlainViTForImageClassification(tiny_config())).train()


def train(model: nn.Module, images: slice = slice(None), begin: Callable[[], object] = lambda: None) -> None:
    """Do several steps on the selected images, calling `begin` before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        begin()
        optimizer.zero_grad()
        with fast_steps(model):
            model(pixels(seed=step)[images], labels=LABELS[images]).loss.backward()
        optimizer.step()


@contextmanager
def counting() -> Iterator[list[int]]:
    """Yield a list that grows by one entry per computed dense layer."""
    linear, calls = nn.functional.linear, list[int]()

    def counted(*args: Any) -> torch.Tensor:
        calls.append(1)
        return linear(*args)

    with patch.object(nn.functional, "linear", counted):
        yield calls


def eager(own: slice) -> tuple[nn.Module, dict[str, Any]]:
    """Train with DDP; also return for each step the order in which gradients were ready and buckets were sent."""
    model, steps = build(), list[list[list[str]]]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: steps[-1].append(["ready", name]))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def send(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        steps[-1].append(["sent", *(names[id(parameter)] for parameter in bucket.parameters())])
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, send)
    with counting() as calls:
        train(wrapped, own, lambda: steps.append([]))
    return model, {"steps": steps, "products": len(calls)}


def compiled(own: slice) -> tuple[nn.Module, dict[str, Any]]:
    """Train with DDP and one compiled graph, like the scripts; also return the products in the graph."""
    model, products = build(), list[str]()

    def keep(graph: torch.fx.GraphModule, examples: Any) -> Any:
        products.extend(str(node.target) for node in graph.graph.nodes if "linear" in str(node.target))
        return lookup_backend("aot_eager")(graph, examples)

    counters.clear()
    model.compile(fullgraph=True, backend=keep)
    train(DistributedDataParallel(model, gradient_as_bucket_view=True), own)
    return model, {"products": len(products), "breaks": sum(counters["graph_break"].values())}


def sharded(own: slice) -> tuple[nn.Module, dict[str, Any]]:
    """Train with FSDP2."""
    model = build()
    for block in model.vit.layers:
        fully_shard(block)
    fully_shard(model)
    with counting() as calls:
        train(model, own)
    return model, {"products": len(calls)}


def sharded_in_bfloat16(own: slice) -> tuple[nn.Module, dict[str, Any]]:
    """Train with FSDP2 in bfloat16 and compiled blocks, like the scripts."""
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.vit.layers:
        block.compile(backend="aot_eager")
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    counters.clear()
    train(model, own)
    return model, {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def main() -> None:
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    for kind in (eager, compiled, sharded, sharded_in_bfloat16):
        model, facts = kind(slice(rank, rank + 1))  # each process has one of the two images
        weights = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
        if rank == 0:
            torch.save(weights, folder / f"{kind.__name__}.pt")
            (folder / f"{kind.__name__}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
