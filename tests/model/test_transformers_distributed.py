"""DDP, FSDP2 and tensor parallelism: two processes give the same logits, gradients and folder as one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plain_vit import PlainViTForImageClassification
from tests.processes import run_forked
from tests.tiny import VARIATIONS

# Two processes each sum one half. The tests use float64, because in float32 even one process is off by 7e-4 for the
# lambdas of differential attention, whose gradients are differences of nearly equal numbers.
REORDERED = 1e-10
NAMES = ["plain", "registers", "parallel", "branches", "swiglu", "swiglu_packed", "differential", "map"]

WORKER = """
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from plain_vit import PlainViTForImageClassification
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, difference, pixels, tiny_config

folder, names = Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
assert dist.get_world_size() == 2
labels = torch.tensor([1, 2])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(model, reference, forward=None, images=slice(None)):
    found = (forward or model.train())(pixels()[images], labels=labels[images])
    expected = reference.train()(pixels(), labels=labels)
    found.loss.backward()
    expected.loss.backward()
    gradients = dict(reference.named_parameters())
    # A key's bias changes nothing: its gradient is what is left of rounding.
    worst = max(
        difference(whole(parameter.grad), gradients[name].grad)
        for name, parameter in model.named_parameters()
        if gradients[name].grad.abs().max() > 1e-12
    )
    reference.zero_grad()
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    return {
        "logits": difference(whole(found.logits), expected.logits[images]), "gradients": worst, "sharded": sharded,
        "all": list(gradients),
    }


results = {}
for name in names:
    config = tiny_config(**{"num_attention_heads": 4, "hidden_size": 48, **VARIATIONS[name]})
    reference = randomize_(PlainViTForImageClassification(config)).double()
    if dist.get_rank() == 0:
        reference.save_pretrained(folder / name)
    dist.barrier()
    sharded = randomize_(PlainViTForImageClassification(config)).double()
    for layer in sharded.vit.layers:
        fully_shard(layer)
    fully_shard(sharded)
    results[f"fsdp {name}"] = compare(sharded, reference)
    split = PlainViTForImageClassification.from_pretrained(
        folder / name, distributed_config=DistributedConfig(tp_size=2)
    )
    results[f"tp {name}"] = compare(split, reference)
    split.save_pretrained(folder / f"{name} saved")
    copied = randomize_(PlainViTForImageClassification(config)).double().train()
    own = slice(dist.get_rank(), dist.get_rank() + 1)  # each process has one of the two images
    forward = DistributedDataParallel(copied, gradient_as_bucket_view=True)
    results[f"ddp {name}"] = compare(copied, reference, forward, own)
if dist.get_rank() == 0:
    (folder / "results.json").write_text(json.dumps(results))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two processes, and return the folder with their results."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "worker.py").write_text(WORKER)
    run_forked([str(folder / "worker.py"), str(folder), *NAMES], 2)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Return the differences that the first process recorded."""
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp"])
def test_two_processes_give_the_logits_and_gradients_of_one(results: dict[str, Any], kind: str, name: str) -> None:
    found = results[f"{kind} {name}"]
    assert found["logits"] < REORDERED
    # Differential attention computes its lambda in float32, so gradients summed in halves differ by float32 rounding.
    assert found["gradients"] < (1e-6 if (kind, name) == ("ddp", "differential") else REORDERED)
    if kind == "fsdp":
        assert found["sharded"] == found["all"]
    elif kind == "tp":
        split = {path.rpartition(".")[0].rpartition(".")[2] for path in found["sharded"]}
        attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"fc1", "fc2"}
        assert attention <= split or name == "differential"
        assert mlp <= split or name == "swiglu_packed"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_split_model_saves_an_ordinary_folder(folder: Path, name: str) -> None:
    before = PlainViTForImageClassification.from_pretrained(folder / name).state_dict()
    after = PlainViTForImageClassification.from_pretrained(folder / f"{name} saved").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert VARIATIONS[name].items() <= json.loads((folder / f"{name} saved" / "config.json").read_text()).items()
