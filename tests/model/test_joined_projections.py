"""One product for query, key and value in training: the numbers of three layers, whose calls are made where seen."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules import module
from torch.nn.utils import parametrizations, prune

from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    attention_plain_vit,
    modeling_plain_vit,
)
from plain_vit.attention_plain_vit import join, join_projections
from tests.conftest import randomize_
from tests.model import joined_among_processes as processes
from tests.processes import run_forked
from tests.tiny import VARIATIONS, difference, pixels, tiny_config

REORDERED = 1e-6  # in float32, relative to the largest gradient: sums are taken in another order
APART = sorted({"differential", "branches"})  # of which no block has the one self-attention that is joined
TOGETHER = sorted(name for name in VARIATIONS if name not in APART)
QUICK = {"plain", "post_norm", "rms", "rotary", "shared_keys"}  # of them without biases, or with one of q and v alone


def build(name: str = "plain", kind: Any = PlainViTForImageClassification, **fields: Any) -> Any:
    """Return a model in training mode whose every parameter differs."""
    return randomize_(kind(tiny_config(**{**VARIATIONS[name], **fields}))).train()


def gradients(model: Any, loss: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss, and the loss."""
    model.zero_grad()
    torch.manual_seed(0)
    value = loss(model)
    value.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": value.detach()}


def squares(model: Any) -> torch.Tensor:
    return model(pixels()).logits.float().square().sum()


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers be called one by one."""
    monkeypatch.setattr(attention_plain_vit, "among_processes", lambda: False)
    monkeypatch.setattr(modeling_plain_vit, "join_projections", lambda blocks: [None] * len(blocks))


def among(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let each attention join its own, as among processes, and return a list that gets whether each could."""
    found = list[bool]()

    def counted(attentions: Any) -> Any:
        results = join(attentions)
        found.extend(one is not None for one in results)
        return results

    monkeypatch.setattr(attention_plain_vit, "among_processes", lambda: True)
    monkeypatch.setattr(attention_plain_vit, "join", counted)
    return found


def joined_blocks(model: Any) -> list[bool]:
    """Return which blocks have one product."""
    return [joined is not None for joined in join_projections(model.vit.layers)]


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare gradients, relative to the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        assert (found[name] - gradient).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TOGETHER]
)
def test_one_product_gives_the_loss_and_the_gradients_of_three(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    assert all(joined_blocks(model))
    exact = copy.deepcopy(model).double()
    found, found_exact = (
        gradients(model, squares),
        gradients(exact, lambda m: m(pixels().double()).logits.square().sum()),
    )
    apart(monkeypatch)
    require_equal(found, gradients(model, squares), REORDERED)
    expected = gradients(exact, lambda m: m(pixels().double()).logits.square().sum())
    require_equal(found_exact, expected, 1e-13)


@pytest.mark.parametrize("name", APART)
def test_blocks_of_another_kind_call_their_layers(name: str) -> None:
    model = build(name)
    assert not any(joined_blocks(model))


@pytest.mark.parametrize("kind", [PlainViTForMaskedImageModeling, PlainViTBackbone])
def test_other_models_are_joined_too(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = build(kind=kind), pixels()

    def loss(model: Any) -> torch.Tensor:
        outputs = model(images)
        maps = outputs.feature_maps if kind is PlainViTBackbone else [outputs.reconstruction]
        return torch.stack([one.square().sum() for one in maps]).sum()

    calls: list[int] = []
    joined = modeling_plain_vit.join_projections

    def counted(blocks: Any) -> Any:
        result = joined(blocks)
        calls.append(sum(one is not None for one in result))
        return result

    monkeypatch.setattr(modeling_plain_vit, "join_projections", counted)
    found = gradients(model, loss)
    assert calls == [3]
    apart(monkeypatch)
    require_equal(found, gradients(model, loss), REORDERED)


def test_under_autocast_it_is_as_near_to_float32_as_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    expected = gradients(model, squares)

    def autocast(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model)

    found = gradients(model, autocast)
    apart(monkeypatch)
    of_three = gradients(model, autocast)
    largest = max(gradient.abs().max() for gradient in expected.values())
    errors = [
        max(((one[name] - gradient).abs().max() / largest).item() for name, gradient in expected.items())
        for one in (found, of_three)
    ]
    assert errors[0] < max(0.02, 1.2 * errors[1])


def test_evaluation_calls_the_layers_one_by_one_also_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build().eval()
    assert not any(joined_blocks(model))
    found = gradients(model, squares)
    apart(monkeypatch)
    for name, gradient in gradients(model, squares).items():
        assert torch.equal(found[name], gradient)


def test_a_block_in_evaluation_is_not_joined() -> None:
    model = build()
    model.vit.layers[1].eval()  # as some freeze it
    assert joined_blocks(model) == [True, False, True]


# Where the call of a layer is seen, or is another


@pytest.mark.parametrize("layer", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
def test_a_hook_is_called_and_the_other_blocks_are_joined(layer: str, register: str) -> None:
    model, calls = build(), []
    getattr(model.vit.layers[1].attention.get_submodule(layer), register)(lambda *seen: calls.append(1))
    assert joined_blocks(model) == [True, False, True]
    squares(model).backward()
    assert calls == [1]


@pytest.mark.parametrize(
    "register",
    [module.register_module_forward_hook, module.register_module_forward_pre_hook,
     module.register_module_full_backward_hook, module.register_module_full_backward_pre_hook],
)  # fmt: skip
def test_a_hook_of_every_module_is_called_for_each_layer_of_each_block(register: Callable[..., Any]) -> None:
    model, seen, images = build(), set(), pixels().requires_grad_()
    with register(lambda one, *_: seen.add(one)):
        assert joined_blocks(model) == [False, False, False]
        model(images).logits.sum().backward()
    assert {one for one in model.modules() if isinstance(one, nn.Linear)} <= seen
    assert joined_blocks(model) == [True, True, True]


def replace_forward(attention: Any) -> None:
    forward = attention.q_proj.forward
    attention.q_proj.forward = lambda tokens: forward(tokens)  # as accelerate does for weights on other devices


class Tensor(torch.Tensor):
    """A tensor of another kind, such as a quantised one or a part of a sharded one."""


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
    assert joined_blocks(model) == [True, True, False]
    squares(model).backward()


def test_adapters_get_the_gradients_of_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoraConfig(target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 2], layers_pattern="layers")
    model = randomize_(get_peft_model(PlainViTForImageClassification(tiny_config()), config)).train()
    assert joined_blocks(model) == [False, True, False]
    found = gradients(model, squares)
    assert any("lora_A" in name for name in found)
    apart(monkeypatch)
    require_equal(found, gradients(model, squares), REORDERED)
    model.merge_and_unload()


def test_weights_given_to_functional_call_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    others = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    found = torch.func.functional_call(model, others, (pixels(),)).logits
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    assert difference(found, doubled(pixels()).logits) < 1e-5


@pytest.mark.parametrize("place", ["dtype", "device"])
def test_blocks_of_several_dtypes_or_devices_call_their_layers(place: str) -> None:
    model = build()
    model.vit.layers[1].to(torch.bfloat16 if place == "dtype" else "meta")
    assert not any(joined_blocks(model))


def test_some_weights_may_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    for block in model.vit.layers[:2]:
        block.requires_grad_(False)
    model.vit.layers[2].attention.k_proj.requires_grad_(False)
    found = gradients(model, squares)
    assert "vit.layers.0.attention.q_proj.weight" not in found
    apart(monkeypatch)
    require_equal(found, gradients(model, squares), REORDERED)


# What surrounds a training step


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_give_the_same_gradients(reentrant: bool) -> None:
    model = build()
    expected = gradients(model, lambda m: m(pixels().requires_grad_()).logits.square().sum())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model, lambda m: m(pixels().requires_grad_()).logits.square().sum())
    require_equal(found, expected, REORDERED)


def test_gradients_accumulate_and_may_be_changed_in_place() -> None:
    model = build()
    once = {name: gradient.clone() for name, gradient in gradients(model, squares).items()}
    squares(model).backward()
    nn.utils.clip_grad_norm_([model.vit.layers[0].attention.q_proj.weight], 0.0)
    for name, parameter in model.named_parameters():
        factor = 0 if name == "vit.layers.0.attention.q_proj.weight" else 2
        assert (parameter.grad - factor * once[name]).abs().max() <= 1e-6 * once[name].abs().max()


def test_second_gradients_are_those_of_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def penalty(model: Any) -> torch.Tensor:
        images = pixels().double().requires_grad_()
        (slope,) = torch.autograd.grad(model(images).logits.sum(), images, create_graph=True)
        return slope.square().sum()

    model = build(attn_implementation="eager").double()
    found = gradients(model, penalty)
    apart(monkeypatch)
    require_equal(found, gradients(model, penalty), 1e-12)


@pytest.mark.parametrize("output", ["output_attentions", "output_hidden_states"])
def test_attentions_and_hidden_states_are_those_of_three_products(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    found = model(pixels(), **{output: True})
    apart(monkeypatch)
    expected = model(pixels(), **{output: True})
    for one, other in zip(found[output.removeprefix("output_")], expected[output.removeprefix("output_")], strict=True):
        assert difference(one, other) < 1e-5


def test_a_copy_and_a_saved_model_have_the_three_layers(tmp_path: Any) -> None:
    model = build()
    squares(model).backward()
    copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    opened = PlainViTForImageClassification.from_pretrained(tmp_path)
    assert all(torch.equal(opened.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("several", [False, True])
def test_compiled_training_joins_too(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plain_vit, "among_processes", lambda: several)
    model = build()
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    program = torch.compile(model, fullgraph=True, backend=keep)
    found = program(pixels()).logits
    assert difference(found, model(pixels()).logits) < 1e-5
    (graph,) = graphs
    products = [node for node in graph.graph.nodes if "linear" in str(node.target)]
    assert len(products) == 3 * 4 + 1  # projection, output, and two of the MLP, and the classifier


# Among processes, where a block's gradients are sent while those of the blocks before it are computed


@pytest.mark.parametrize("name", sorted(QUICK))
def test_each_block_joins_its_own_and_gives_the_gradients_of_three(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    joined = among(monkeypatch)
    found = gradients(model, squares)
    assert joined == [True, True, True]
    assert not any(joined_blocks(model))
    apart(monkeypatch)
    require_equal(found, gradients(model, squares), REORDERED)


def test_other_blocks_call_their_layers_among_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, calls = among(monkeypatch), []
    gradients(build("differential"), squares)
    assert not joined
    model = build()
    model.vit.layers[0].attention.k_proj.register_forward_hook(lambda *seen: calls.append(1))
    subclass(model.vit.layers[2].attention)
    squares(model).backward()
    assert (joined, calls) == ([False, True, False], [1])


def test_evaluation_is_the_same_to_the_last_bit_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build().eval()
    expected = gradients(model, squares)
    joined = among(monkeypatch)
    for name, gradient in gradients(model, squares).items():
        assert torch.equal(gradient, expected[name])
    assert joined == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_join_their_own_and_keep_no_copy(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    expected = gradients(model, lambda m: m(pixels().requires_grad_()).logits.square().sum())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    joined = among(monkeypatch)
    found = gradients(model, lambda m: m(pixels().requires_grad_()).logits.square().sum())
    assert joined == [True] * 6  # again in the backward pass
    require_equal(found, expected, REORDERED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what two processes wrote about their training."""
    folder = tmp_path_factory.mktemp("processes")
    run_forked(["-m", "tests.model.joined_among_processes", str(folder)], 2)
    return folder


def facts(folder: Path, kind: str) -> dict[str, Any]:
    """Return what the first process wrote down."""
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
def test_in_two_processes_each_block_joins_its_own(folder: Path, kind: str) -> None:
    assert facts(folder, kind)["joined"] == [1] * 3 * processes.STEPS


@pytest.mark.slow
def test_gradients_are_ready_and_sent_from_the_last_block_to_the_first(folder: Path) -> None:
    steps = facts(folder, "eager")["steps"]
    assert len(steps) == processes.STEPS
    for events in steps:
        blocks = [int(name.split(".")[2]) for event, name, *_ in events if event == "ready" and ".layers." in name]
        assert blocks == sorted(blocks, reverse=True)
    # From the second step on, buckets have the order of the first, and several are sent during the backward pass.
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
