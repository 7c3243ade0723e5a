"""Dense layers trained in float32 on a CPU use matrix products of oneDNN."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTConfig, ViTForImageClassification

from plain_vit import PlainViTForImageClassification
from plain_vit.system import environment
from plain_vit.training import fast_steps
from plain_vit.training.hardware import products as module
from plain_vit.training.hardware.products import onednn_products, products
from plain_vit.training.tasks import classification
from plain_vit.training.tasks.classification import Classification
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, pixels, tiny_config
from tests.training.runs import assert_same_bits, open_script, save_plain_vit

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
script = open_script("finetune_image_classification")
REORDERED = 1e-5  # sums are taken in a different order


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that records the shape of each weight multiplied by oneDNN."""
    found: list[tuple[int, ...]] = []
    product = module._product

    def noted(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        found.append(tuple(weight.shape))
        return product(input, weight, bias)

    monkeypatch.setattr(module, "_product", noted)
    return found


def gradients(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss, including the loss itself."""
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(images).logits.square().sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}


def require_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= REORDERED * max(value.norm(), 1e-3), name


# A layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "outputs"), [(24, 96), (96, 24), (24, 24), (1, 3), (3, 1)])
@pytest.mark.parametrize("shape", [(5,), (2, 7), (2, 3, 4), (1,)])
def test_a_layer_has_the_output_and_the_gradients_of_torch_s(
    shape: tuple[int, ...], width: int, outputs: int, bias: bool, multiplied: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(width, outputs, bias=bias), torch.randn(*shape, width, requires_grad=True)
    found = []
    for context in (onednn_products(), torch.enable_grad()):
        with context:
            output = layer(inputs)
            of_all = torch.autograd.grad(output.square().sum(), [inputs, *layer.parameters()])
        found.append({str(number): one for number, one in enumerate((output.detach(), *of_all))})
    require_near(*found)
    assert len(multiplied) == 3
    for gradient, parameter in zip(of_all, [inputs, *layer.parameters()], strict=True):
        assert gradient.shape == parameter.shape


@pytest.mark.parametrize("strided", ["transposed", "expanded", "every second", "of the loss"])
def test_tensors_may_have_any_strides(strided: str) -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(6, 8, requires_grad=True), torch.randn(4, 8)
    if strided == "transposed":
        inputs, weight = torch.randn(8, 4).t(), torch.randn(8, 6).t().detach().requires_grad_()
    elif strided == "expanded":
        inputs = torch.randn(1, 8).expand(4, 8)
    elif strided == "every second":
        inputs = torch.randn(4, 16)[:, ::2]
    inputs = inputs.detach().requires_grad_()
    weigh = torch.randn(1, 6) if strided != "of the loss" else None  # the gradient of a sum is an expanded tensor
    found = []
    for context in (onednn_products(), torch.enable_grad()):
        with context:
            output = F.linear(inputs, weight)
            loss = output.sum() if weigh is None else (output * weigh).sum()
            of_both = torch.autograd.grad(loss, [inputs, weight])
        found.append({"output": output.detach(), "inputs": of_both[0], "weight": of_both[1]})
    require_near(*found)


def test_only_the_gradients_that_are_needed_are_computed(multiplied: list[tuple[int, ...]]) -> None:
    layer, inputs = nn.Linear(8, 6), torch.randn(4, 8)
    with onednn_products():
        layer(inputs).sum().backward()
        assert len(multiplied) == 2  # no gradient for the images
        layer.weight.requires_grad_(False)
        layer(inputs).sum().backward()
        assert len(multiplied) == 3
        assert not layer.requires_grad_(False)(inputs).requires_grad
    assert len(multiplied) == 4


def test_gradients_can_be_differentiated() -> None:
    layer, inputs = nn.Linear(5, 3).double(), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    expected = second(layer, inputs, torch.float64)
    with onednn_products():
        found = second(layer, inputs, torch.float32)
    assert (found - expected).norm() < REORDERED * expected.norm()


def second(layer: nn.Linear, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of the norm of a gradient."""
    layer, inputs = copy.deepcopy(layer).to(dtype), inputs.detach().to(dtype).requires_grad_()
    (first,) = torch.autograd.grad(layer(inputs).tanh().sum(), inputs, create_graph=True)
    (of_weight,) = torch.autograd.grad(first.square().sum(), layer.weight)
    return of_weight


# Layers that are left unchanged


def test_other_computations_have_torch_s_bits(multiplied: list[tuple[int, ...]]) -> None:
    layer, inputs = nn.Linear(8, 6), torch.randn(4, 8)

    def all_of_them() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found = [layer(inputs)]
        found += [copy.deepcopy(layer).to(dtype)(inputs.to(dtype)) for dtype in (torch.float64, torch.bfloat16)]
        found.append(vmap(grad(lambda one: layer(one).sum()))(inputs))
        found.append(functional_call(layer, dict(layer.named_parameters()), (inputs[:0],)))
        found.append(layer(inputs[0]))
        with FlopCounterMode(display=False):
            found.append(layer(inputs))
        return found

    expected = all_of_them()
    with onednn_products():
        found = all_of_them()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not multiplied


def test_a_subclass_of_tensors_is_left_alone(multiplied: list[tuple[int, ...]]) -> None:
    class Special(torch.Tensor):
        pass

    layer = nn.Linear(8, 6)
    with onednn_products():
        assert isinstance(layer(torch.randn(4, 8).as_subclass(Special)), Special)
    assert not multiplied


@pytest.mark.slow
def test_compiled_models_multiply_as_before(multiplied: list[tuple[int, ...]]) -> None:
    layer, inputs = nn.Linear(8, 6), torch.randn(4, 8)
    program = torch.compile(layer, backend="aot_eager")
    expected = program(inputs)
    with onednn_products():
        assert torch.equal(program(inputs), expected)
        program(inputs).sum().backward()
    assert not multiplied


def test_a_compiled_model_is_compiled_once() -> None:
    model, images = PlainViTForImageClassification(tiny_config()).train(), pixels()
    torch._dynamo.reset()
    frames = 0

    def count(graph: Any, examples: Any) -> Any:
        nonlocal frames
        frames += 1
        return graph

    program = torch.compile(model, fullgraph=True, backend=count)
    for _ in range(3):
        with onednn_products():
            program(images).logits.sum().backward()
    assert frames == 1


# A model


@pytest.mark.parametrize("name", ["plain", "registers", "swiglu", "differential", "mean"])
def test_a_model_has_the_gradients_of_torch_s_products(name: str, multiplied: list[tuple[int, ...]]) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(**VARIATIONS[name]))).train()
    expected = gradients(model, pixels())
    with onednn_products():
        found = gradients(model, pixels())
    exact = gradients(copy.deepcopy(model).double(), pixels().double())
    largest = max(value.norm() for value in exact.values())
    for key, value in exact.items():
        errors = [(one[key].double() - value).norm() for one in (found, expected)]
        assert errors[0] <= 3 * errors[1] + 1e-6 * largest, key
    assert len(multiplied) > 3 * len(model.vit.layers)


def test_joined_projections_and_transformers_own_models_take_part(multiplied: list[tuple[int, ...]]) -> None:
    model = PlainViTForImageClassification(tiny_config()).train()
    width = model.config.hidden_size
    with onednn_products(), fast_steps(model):
        model(pixels())
    assert multiplied.count((3 * width, width)) == len(model.vit.layers)
    multiplied.clear()
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32)
    with onednn_products():
        ViTForImageClassification(config).train()(torch.randn(1, 3, 32, 32)).logits.sum().backward()
    assert len(multiplied) == 3 * 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_computed_again_with_the_same_products(
    reentrant: bool, multiplied: list[tuple[int, ...]]
) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config())).train()
    images = pixels().requires_grad_()
    with onednn_products():
        expected = gradients(model, images)
        whole = len(multiplied)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients(model, images)
    assert len(multiplied) > 2 * whole
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# The processor, and the scripts


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "expected"),
    [
        ("AuthenticAMD", "26", "AVX512", True),
        ("AuthenticAMD", "27", "AVX512", True),
        ("AuthenticAMD", "26", "AVX2", False),  # ATEN_CPU_CAPABILITY
        ("AuthenticAMD", "25", "AVX512", False),
        ("GenuineIntel", "6", "AVX512", False),
        ("", "", "AVX512", False),
    ],
)
def test_the_processor_decides(
    vendor: str, family: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {"vendor_id": vendor, "cpu family": family}
    monkeypatch.setattr(environment, "_described", described.__getitem__)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert environment.has_slow_float32_products.__wrapped__() is expected
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not environment.has_slow_float32_products.__wrapped__()
    monkeypatch.setattr(module, "has_slow_float32_products", lambda: expected)
    linear = F.linear
    with products(torch.device("cpu")):
        assert (F.linear is not linear) is expected
    assert F.linear is linear
    with products(torch.device("cuda")):  # a GPU's host may have such a processor
        assert F.linear is linear


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_the_script_takes_them_in_its_steps_alone_and_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplied: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(module, "has_slow_float32_products", lambda: True)
    model, seen = save_plain_vit(tmp_path / "model"), {"loss": set[bool](), "evaluate": set[bool]()}

    def noting(name: str) -> Any:
        function = getattr(Classification, name)

        def noted(*args: Any, **keywords: Any) -> Any:
            multiplied.clear()
            result = function(*args, **keywords)
            seen[name].add(bool(multiplied))
            return result

        return noted

    def run(name: str, **options: Any) -> Path:
        given = {"dataset": "digits", "shots_per_class": 2, "steps": 6, "batch_size": 4, "log_every": 1, **options}
        given |= {"checkpoint_every": 2, "checkpoints_kept": 1, "evaluations": 1, "report": False}
        script.finetune(script.FinetuneArguments(model=str(model), output_dir=str(tmp_path / name), **given))
        return tmp_path / name

    for name in seen:
        monkeypatch.setattr(Classification, name, noting(name))
    whole = run("whole")
    with monkeypatch.context() as patched:
        patched.setattr(classification, "save_classifier", stop)
        with pytest.raises(KeyboardInterrupt):
            run("half")
    assert_same_bits(run("half", resume=True), whole)
    assert seen == {"loss": {True}, "evaluate": {False}}


def stop(*arguments: object) -> None:
    raise KeyboardInterrupt
