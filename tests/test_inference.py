"""Models prepared for inference: their logits, what they refuse, and that the original model is unchanged."""

import copy
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import plain_vit
from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
    environment,
    inference,
)
from plain_vit.attention_plain_vit import FAST_ATTENTION
from plain_vit.cuda_graphs import is_unseen
from plain_vit.errors import PreparedModelError
from plain_vit.inference import JoinedAttention, PackedLinear, prepare_for_inference
from plain_vit.layers_plain_vit import LayerScale
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, difference, pixels, tiny_config

REORDERED = 1e-5  # sums are taken in another order, gains are multiplied in before


@pytest.fixture(autouse=True, params=["packed", "not packed"])
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Pack weights as on a processor with AVX-512 or not, in bfloat16 if this one can."""
    supported = {torch.float32: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    is_packed = request.param == "packed"
    monkeypatch.setattr(inference, "is_worth_packing", lambda dtype: is_packed and supported.get(dtype, False))
    return is_packed


def build(name: str = "plain", kind: Any = PlainViTForImageClassification, **fields: Any) -> Any:
    """Return a model in evaluation mode whose every parameter differs."""
    return randomize_(kind(tiny_config(**{**VARIATIONS[name], **fields}))).eval()


def first(outputs: Any) -> torch.Tensor:
    """Return the first tensor of an output."""
    value = outputs.to_tuple()[0]
    return value if isinstance(value, torch.Tensor) else value[0]


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_in_float32_the_logits_stay_within_rounding(name: str) -> None:
    model = build(name)
    prepared = prepare_for_inference(model)
    with torch.no_grad():
        for images in (pixels(), pixels(3), pixels(1, 40, 28) if name != "truncate" else pixels(1)):
            assert difference(prepared(images).logits, model(images).logits) < REORDERED


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_in_bfloat16_they_are_as_near_to_float32_as_the_model_in_bfloat16(name: str) -> None:
    model, images = build(name), pixels(16)
    prepared = prepare_for_inference(model, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(images).logits
        plain, found = (one(images).logits for one in (copy.deepcopy(model).bfloat16(), prepared))
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 2 * (plain.float() - expected).norm()


@pytest.mark.parametrize("kind", [PlainViTModel, PlainViTForMaskedImageModeling, PlainViTBackbone])
@pytest.mark.parametrize("name", ["mask_token", "branches", "swiglu", "map"])
def test_every_kind_of_model_is_prepared(kind: Any, name: str) -> None:
    model = build(name, kind, use_mask_token=True)
    prepared = prepare_for_inference(model)
    assert isinstance(prepared, kind)
    with torch.no_grad():
        assert difference(first(prepared(pixels())), first(model(pixels()))) < REORDERED


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations_inside_and_outside_the_product(activation: str) -> None:
    model = build(hidden_act=activation)
    with torch.no_grad():
        assert difference(prepare_for_inference(model)(pixels()).logits, model(pixels()).logits) < REORDERED


@pytest.mark.parametrize("name", ["plain", "swiglu_packed", "parallel", "branches", "map"])
def test_every_dense_layer_is_packed_and_every_gain_folded(name: str, packs: bool) -> None:
    prepared = prepare_for_inference(build(name))
    kinds = [type(module) for module in prepared.modules()]
    assert (torch.nn.Linear in kinds, PackedLinear in kinds) == (not packs, packs)
    assert LayerScale not in kinds
    assert kinds.count(JoinedAttention) == 2 * prepared.config.num_branches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_packed_where_the_processor_gains_by_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    has_part = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    expected = {"AVX512": {torch.float32: True, torch.bfloat16: has_part}}
    for capability in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert inference.is_worth_packing(dtype) is expected.get(capability, {}).get(dtype, False)
    monkeypatch.undo()
    prepared = prepare_for_inference(build(), dtype=dtype)  # on this processor, whatever it is
    assert prepared(pixels().to(dtype)).logits.isfinite().all()


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="reads the flags of x86")
def test_products_of_bfloat16_come_with_avx512() -> None:
    flags = {*next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()}
    assert environment.has_products(torch.float32)
    if "avx_ne_convert" not in flags:  # of later processors, with 256 bits
        assert environment.has_products(torch.bfloat16) is ({"avx512bw", "avx512vl", "avx512dq"} <= flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_without_products_is_said_to_be_slow(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(environment.logger, "warning_once", warned.append)
    prepare_for_inference(build(), dtype=dtype)
    expected = [] if environment.has_products(dtype) else [True]
    assert [str(dtype).removeprefix("torch.") in text for text in warned] == expected


@pytest.mark.parametrize(
    "asked, taken",
    [(None, FAST_ATTENTION), ("sdpa", FAST_ATTENTION), ("plain_vit", FAST_ATTENTION), ("eager", "eager")],
)
def test_the_fast_attention_takes_the_place_of_sdpa(asked: str | None, taken: str) -> None:
    assert prepare_for_inference(build(attn_implementation=asked)).config._attn_implementation == taken


def test_a_gain_without_a_dense_layer_before_it_stays() -> None:
    model = build("no_projection", layer_scale_init_value=0.3)
    prepared = prepare_for_inference(model)
    assert sum(isinstance(module, LayerScale) for module in prepared.modules()) == 3
    with torch.no_grad():
        assert difference(prepared(pixels()).logits, model(pixels()).logits) < REORDERED


@pytest.mark.parametrize("name", ["plain", "parallel", "deit"])
def test_hidden_states_and_attentions_are_still_given(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        found, expected = (
            one(pixels(), output_hidden_states=True, output_attentions=True)
            for one in (prepare_for_inference(model), model)
        )
    for kind in ("hidden_states", "attentions"):
        for ours, theirs in zip(found[kind], expected[kind], strict=True):
            assert difference(ours, theirs) < REORDERED


def test_the_model_itself_stays_as_it_is() -> None:
    model = build("parallel").train()
    before = copy.deepcopy(model.state_dict())
    prepared = prepare_for_inference(model, dtype=torch.bfloat16)
    assert model.training
    assert not prepared.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in prepared.parameters())
    assert type(model) is PlainViTForImageClassification
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_what_a_prepared_model_cannot_is_refused(tmp_path: Path) -> None:
    prepared = prepare_for_inference(build())
    with pytest.raises(PreparedModelError, match="train the original model"):
        prepared.train()
    with pytest.raises(PreparedModelError, match="save the original model"):
        prepared.save_pretrained(tmp_path)
    for change in (prepared.bfloat16, prepared.float, lambda: prepared.to("meta")):
        with pytest.raises(PreparedModelError, match="move or cast the original model"):
            change()
    with pytest.raises(PreparedModelError, match="already prepared"):
        prepare_for_inference(prepared)
    with pytest.raises(PreparedModelError, match="Linear is not a plain ViT"):
        prepare_for_inference(torch.nn.Linear(2, 3))  # type: ignore[type-var]
    assert prepared.eval() is prepared
    assert not prepared(pixels().requires_grad_()).logits.requires_grad
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["plain", "sincos", "deit", "map"])
@pytest.mark.parametrize("kind", [PlainViTForImageClassification, PlainViTModel])
def test_a_model_that_the_code_in_its_folder_made_is_prepared_too(kind: Any, name: str, tmp_path: Path) -> None:
    model = build(name, kind)
    model.save_pretrained(tmp_path)
    travelled_kind: Any = get_class_from_dynamic_module(f"modeling_plain_vit.{kind.__name__}", tmp_path)
    travelled = travelled_kind.from_pretrained(tmp_path).eval()
    assert not isinstance(travelled, kind)
    before = copy.deepcopy(travelled.state_dict())
    prepared = prepare_for_inference(travelled)
    assert isinstance(prepared, kind)
    assert any(isinstance(part, JoinedAttention) for part in prepared.modules())
    assert difference(first(prepared(pixels())), first(model(pixels()))) < REORDERED
    assert all(torch.equal(tensor, before[key]) for key, tensor in travelled.state_dict().items())


def test_it_is_a_public_name() -> None:
    assert plain_vit.prepare_for_inference is prepare_for_inference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "parallel", "map"])
def test_compiled_the_logits_stay_within_rounding(name: str) -> None:
    model = build(name)
    prepared = prepare_for_inference(model, compile=True, batch_size=2)
    with torch.no_grad():
        assert difference(prepared(pixels()).logits, model(pixels()).logits) < REORDERED


def test_a_prepared_body_returns_hidden_states() -> None:
    model: Any = randomize_(PlainViTModel(tiny_config())).eval()
    with torch.no_grad():
        expected = model(pixels(), output_hidden_states=True)
    outputs = prepare_for_inference(model)(pixels(), output_hidden_states=True)
    for ours, theirs in zip(outputs.hidden_states, expected.hidden_states, strict=True):
        assert difference(ours, theirs) <= 1e-5


def test_passes_are_recorded_only_where_nothing_sees_the_operations() -> None:
    images, seen = pixels(), []

    def passed(one: torch.Tensor) -> torch.Tensor:
        seen.append(is_unseen())
        return one + 1

    passed(images)
    assert seen == [True]
    torch.jit.trace(passed, images, check_trace=False)
    torch.func.vmap(passed)(images)
    torch.compile(passed, backend="eager")(images)
    with FlopCounterMode(display=False):
        passed(images)
    with torch.autocast("cuda", enabled=False):
        assert is_unseen()
    assert len(seen) > 3
    assert not any(seen[1:])
