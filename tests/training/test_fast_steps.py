"""Training steps that compute less have the same gradients as the plain computation."""

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import ImageClassifierOutput

from plain_vit import PlainViTBackbone, PlainViTForImageClassification, PlainViTForMaskedImageModeling
from plain_vit.training import fast_steps
from tests.conftest import randomize_
from tests.processes import run_forked
from tests.tiny import VARIATIONS, difference, pixels, tiny_config
from tests.training import fast_among_processes as processes

REORDERED = 1e-5  # in float32, relative to the largest gradient: sums are taken in a different order
QUICK = {
    "plain",
    "post_norm",
    "rms",
    "rotary",
    "shared_keys",
    "deit",
    "branches",
}  # keys without biases, or shared


def build(name: str = "plain", kind: Any = PlainViTForImageClassification, **fields: Any) -> Any:
    """Return a model in training mode with random parameters."""
    return randomize_(kind(tiny_config(**{**VARIATIONS[name], **fields}))).train()


def squares(model: Any) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(pixels().to(dtype).requires_grad_()).logits.float().square().sum()


def gradients(model: Any, loss: Callable[[Any], torch.Tensor] = squares) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss, including the loss itself."""
    model.zero_grad()
    torch.manual_seed(0)  # the network of relative biases has dropout
    value = loss(model)
    value.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": value.detach()}


def require_same_gradients(
    model: Any, loss: Callable[[Any], torch.Tensor] = squares, tolerance: float = REORDERED
) -> None:
    """Assert that gradients inside and outside the context agree, relative to the largest gradient."""
    expected = gradients(model, loss)
    with fast_steps(model):
        found = gradients(model, loss)
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        assert (found[name] - gradient).abs().max() <= tolerance * largest, name


def called_blocks(model: Any, layer: str = "k_proj") -> list[bool]:
    """Return for each block whether it calls a layer of its attention in a fast step."""
    calls = set[int]()
    for number, block in enumerate(model.vit.layers):
        hook = functools.partial(lambda number, *seen: calls.add(number), number)
        block.attention.get_submodule(layer).register_forward_hook(hook)
    with fast_steps(model):
        squares(model).backward()
    return [number in calls for number in range(len(model.vit.layers))]


# The same gradients


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(VARIATIONS)]
)
def test_the_gradients_are_those_of_the_plain_computation(name: str) -> None:
    model = build(name)
    require_same_gradients(model)
    require_same_gradients(model.double(), lambda m: m(pixels().double()).logits.square().sum(), 1e-12)


@pytest.mark.parametrize("kind", [PlainViTForMaskedImageModeling, PlainViTBackbone])
def test_other_models_are_faster_too(kind: Any) -> None:
    model, images = build(kind=kind), pixels()

    def loss(model: Any) -> torch.Tensor:
        outputs = model(images)
        maps = outputs.feature_maps if kind is PlainViTBackbone else [outputs.reconstruction]
        return torch.stack([one.square().sum() for one in maps]).sum()

    require_same_gradients(model, loss)
    with fast_steps(model):
        assert all("project" in vars(layer.attention) for layer in getattr(model, "vit", model).layers)


def test_under_autocast_it_is_as_near_to_float32_as_three_products() -> None:
    model = build()
    expected = gradients(model)

    def autocast(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model)

    of_three = gradients(model, autocast)
    of_three = {name: gradient.clone() for name, gradient in of_three.items()}
    with fast_steps(model):
        found = gradients(model, autocast)
    largest = max(gradient.abs().max() for gradient in expected.values())
    errors = [
        max(((one[name] - gradient).abs().max() / largest).item() for name, gradient in expected.items())
        for one in (found, of_three)
    ]
    assert errors[0] < max(0.02, 1.2 * errors[1])


def test_second_gradients_are_those_of_the_plain_computation() -> None:
    def penalty(model: Any) -> torch.Tensor:
        images = pixels().double().requires_grad_()
        (slope,) = torch.autograd.grad(model(images).logits.sum(), images, create_graph=True)
        return slope.square().sum()

    require_same_gradients(build(attn_implementation="eager").double(), penalty, 1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_give_the_same_gradients(reentrant: bool) -> None:
    model = build()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    require_same_gradients(model)
    assert called_blocks(model) == [False, False, False]


def test_some_weights_may_be_frozen() -> None:
    model = build()
    for block in model.vit.layers[:2]:
        block.requires_grad_(False)
    model.vit.layers[2].attention.k_proj.requires_grad_(False)
    assert "vit.layers.0.attention.q_proj.weight" not in gradients(model)
    require_same_gradients(model)


# Layers other than torch's dense layers are called


class Tensor(torch.Tensor):
    """A tensor subclass, like those of quantised or sharded weights."""


def replace_forward(attention: Any) -> None:
    forward = attention.q_proj.forward
    attention.q_proj.forward = lambda tokens: forward(tokens)  # like accelerate for weights on other devices


def other_tensor(attention: Any) -> None:
    attention.v_proj.weight = nn.Parameter(attention.v_proj.weight.detach().as_subclass(Tensor))


def subclass(attention: Any) -> None:
    attention.k_proj.__class__ = type("Mine", (nn.Linear,), {})


CHANGES: dict[str, Callable[[Any], object]] = {
    "spectral norm": lambda attention: parametrizations.spectral_norm(attention.q_proj),
    "pruned": lambda attention: prune.l1_unstructured(attention.v_proj, "weight", 0.3),
    "replaced forward": replace_forward,
    "subclass": subclass,
    "other tensor": other_tensor,
    "no layer": lambda attention: setattr(attention, "k_proj", nn.Sequential(attention.k_proj)),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_layer_that_is_not_plain_is_called(change: str) -> None:
    model = build()
    CHANGES[change](model.vit.layers[2].attention)
    assert called_blocks(model) == [False, False, True]


def test_a_block_in_evaluation_calls_its_layers() -> None:
    model = build()
    model.vit.layers[1].eval()  # a way to freeze a block
    assert called_blocks(model) == [False, True, False]


def test_adapters_get_the_gradients_of_three_layers() -> None:
    config = LoraConfig(target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 2], layers_pattern="layers")
    model = randomize_(get_peft_model(PlainViTForImageClassification(tiny_config()), config)).train()
    require_same_gradients(model)
    assert any("lora_A" in name for name in gradients(model))
    assert called_blocks(model.get_base_model()) == [True, False, True]


# The last block computes what the head reads


def tokens_of_last_block(model: Any, **options: Any) -> int:
    """Return the number of tokens per image that the pooler gets."""
    seen = list[int]()
    handle = model.vit.pooler.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    model(pixels(), **options)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["plain", "deit", "mean", "cls_mean", "map", "prr", "no_pooling"])
def test_the_last_block_computes_the_tokens_that_the_head_reads(name: str) -> None:
    model = build(name)
    every = math.prod(model.config.grid_size) + model.config.num_prefix_tokens
    read = model.vit.pooler.num_tokens_read
    assert (read is None) == (name not in ("plain", "deit"))
    assert tokens_of_last_block(model) == every
    with fast_steps(model):
        assert tokens_of_last_block(model) == (read or every)
    with fast_steps(model.eval()):
        assert tokens_of_last_block(model) == every


def test_another_pooler_in_its_place_gets_every_token() -> None:
    class LastToken(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states[:, 12]

    model = build()
    model.vit.pooler = LastToken()
    require_same_gradients(model)


class MixedTokens(nn.Module):
    """An MLP that adds to each token the mean of all."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden_states) + hidden_states.mean(dim=1, keepdim=True)


def test_a_layer_that_mixes_tokens_gets_every_token() -> None:
    model = build()
    model.vit.layers[2].mlp = MixedTokens(model.vit.layers[2].mlp)
    require_same_gradients(model)


def test_a_classifier_with_its_own_forward_gets_every_token() -> None:
    class OfPatches(PlainViTForImageClassification):
        def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
            tokens = self.vit(pixel_values, **kwargs).last_hidden_state
            return ImageClassifierOutput(logits=self.classifier(tokens[:, 1:].mean(dim=1)))

    require_same_gradients(build(kind=OfPatches))


# Nesting, exceptions and compilation


def test_evaluation_has_the_same_bits() -> None:
    model = build().eval()
    expected = model(pixels()).logits
    with fast_steps(model):
        assert torch.equal(model(pixels()).logits, expected)


def test_the_model_is_left_as_it_was_also_by_an_error(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(ValueError, match="expected"), fast_steps(model):
        model(pixels()[:, :2])
    assert not any("project" in vars(module) for module in model.modules())
    assert "encode" not in vars(model.vit)
    with fast_steps(model), fast_steps(model):  # contexts may be nested
        squares(model).backward()
        copy.deepcopy(model)
    assert not any("project" in vars(module) for module in model.modules())
    model.save_pretrained(tmp_path)
    opened = PlainViTForImageClassification.from_pretrained(tmp_path)
    assert all(torch.equal(opened.state_dict()[name], value) for name, value in model.state_dict().items())


def test_a_compiled_step_has_one_graph_and_one_product_for_three() -> None:
    model = build()
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    program = torch.compile(model, fullgraph=True, backend=keep)
    expected = model(pixels()).logits
    for _ in range(2):
        with fast_steps(model):
            assert difference(program(pixels()).logits, expected) < REORDERED
    (graph,) = graphs  # the second step reuses the graph
    products = [node for node in graph.graph.nodes if "linear" in str(node.target)]
    assert len(products) == 3 * 4 + 1  # per block: projection, output, two in the MLP; and the classifier


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_in_it(tmp_path: Path) -> None:
    rows = [{"pixel_values": pixels(1)[0], "labels": number % 7} for number in range(6)]
    settings = {"output_dir": str(tmp_path), "max_steps": 3, "report_to": "none", "use_cpu": True, "seed": 0}
    losses = []
    for inside in (False, True):
        model = build()
        trainer = Trainer(model, TrainingArguments(**settings), train_dataset=rows)
        if inside:
            with fast_steps(model):
                losses.append(trainer.train().training_loss)
        else:
            losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Several processes: gradients of a block are sent while those of earlier blocks are computed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in two processes, and return the folder with their records."""
    folder = tmp_path_factory.mktemp("processes")
    run_forked(["-m", "tests.training.fast_among_processes", str(folder)], 2)
    return folder


def facts(folder: Path, kind: str) -> dict[str, Any]:
    """Return the records of the first process."""
    return json.loads((folder / f"{kind}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, tolerance", [("eager", 1e-6), ("compiled", 1e-6), ("sharded", 1e-6), ("sharded_in_bfloat16", 0.01)]
)
def test_two_processes_train_to_the_weights_of_one(folder: Path, kind: str, tolerance: float) -> None:
    model = processes.build()
    processes.train(model)
    for name, weight in torch.load(folder / f"{kind}.pt").items():
        torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "sharded"])
def test_in_two_processes_each_block_has_one_product(folder: Path, kind: str) -> None:
    assert facts(folder, kind)["products"] == (3 * 4 + 1) * processes.STEPS


@pytest.mark.slow
def test_gradients_are_ready_and_sent_from_the_last_block_to_the_first(folder: Path) -> None:
    steps = facts(folder, "eager")["steps"]
    assert len(steps) == processes.STEPS
    for events in steps:
        blocks = [int(name.split(".")[2]) for event, name, *_ in events if event == "ready" and ".layers." in name]
        assert blocks == sorted(blocks, reverse=True)
    # From the second step on, buckets keep the order of the first, and several are sent during the backward pass.
    for place, (event, name, *_) in enumerate(steps[-1]):
        if event == "ready" and name in ("vit.layers.1.mlp.fc2.bias", "vit.layers.0.mlp.fc2.bias"):
            sent = {each for what, *names in steps[-1][:place] if what == "sent" for each in names}
            later = f"vit.layers.{int(name.split('.')[2]) + 1}.attention"
            assert {f"{later}.{layer}_proj.weight" for layer in "qkv"} <= sent


@pytest.mark.slow
def test_compiled_training_in_two_processes_has_no_graph_break(folder: Path) -> None:
    assert facts(folder, "compiled") == {"products": 3 * 4 + 1, "breaks": 0}
    blocks = facts(folder, "sharded_in_bfloat16")
    assert blocks["graphs"] >= 1
    assert blocks["breaks"] == 0
