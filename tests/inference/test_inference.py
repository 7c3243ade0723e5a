"""Models prepared for inference: logits, errors, and an unchanged original model."""

import copy
import functools
import itertools
import pickle
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
    prepare_for_inference,
)
from plain_vit.attention_plain_vit import FAST_ATTENTION, PlainViTAttention
from plain_vit.errors import PreparedModelError
from plain_vit.inference import prepared as inference
from plain_vit.inference.cuda_graphs import CudaGraphs, is_unseen
from plain_vit.inference.prepared import JoinedAttention, PackedLinear, simplify
from plain_vit.layers_plain_vit import LayerScale
from plain_vit.system import environment
from tests.conftest import randomize_
from tests.sizes import few
from tests.tiny import VARIATIONS, build, difference, in_turn, pixels, tiny_config

REORDERED = 1e-5  # sums are taken in a different order, and gains are folded into weights


@pytest.fixture(autouse=True, params=["packed", "not packed"])
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Pack weights as on a processor with AVX-512 or not, in bfloat16 if this one can."""
    supported = {torch.float32: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    is_packed = request.param == "packed"
    monkeypatch.setattr(inference, "is_worth_packing", lambda dtype: is_packed and supported.get(dtype, False))
    return is_packed


def first(outputs: Any) -> torch.Tensor:
    """Return the first tensor of an output."""
    value = outputs.to_tuple()[0]
    return value if isinstance(value, torch.Tensor) else value[0]


@pytest.mark.parametrize("packs, name", in_turn(["packed", "not packed"], quick=[
    "packed-learned_2d", "packed-projection", "packed-rms_all_heads", "not packed-differential", "not packed-max",
    "not packed-parallel",
]), indirect=["packs"])  # fmt: skip
def test_in_float32_the_logits_stay_within_rounding(name: str) -> None:
    model = build(name)
    prepared = prepare_for_inference(model)
    with torch.no_grad():
        for images in (pixels(), pixels(3), pixels(1, 40, 28) if name != "truncate" else pixels(1)):
            assert difference(prepared(images).logits, model(images).logits) < REORDERED


@pytest.mark.parametrize("packs, name", in_turn(["packed", "not packed"], quick=[
    "packed-learned_2d", "packed-prr", "packed-rotary", "not packed-learned_2d", "not packed-relative_table",
    "not packed-rotary",
]), indirect=["packs"])  # fmt: skip
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
@pytest.mark.parametrize("before", [False, True])
def test_hidden_states_and_attentions_are_still_given(name: str, before: bool) -> None:
    model = build(name)
    with torch.no_grad():
        model(
            pixels(), output_hidden_states=before, output_attentions=before
        )  # the first time, transformers adds hooks
        found, expected = (
            one(pixels(), output_hidden_states=True, output_attentions=True)
            for one in (prepare_for_inference(model), model)
        )
    for kind in ("hidden_states", "attentions"):
        for ours, theirs in zip(found[kind], expected[kind], strict=True):
            assert difference(ours, theirs) < REORDERED


# Modules that someone replaced or sees


def changed(output: Any) -> Any:
    """Return other values: no gain or scale commutes with them, and they mix tokens."""
    if isinstance(output, tuple):
        return changed(output[0]), *output[1:]
    return (
        0.5 * output + 0.1 * output.flip(1) + 0.25 if isinstance(output, torch.Tensor) and output.ndim > 1 else output
    )


def calling(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `forward`, and change what it returns."""
    return changed(forward(*args, **kwargs))


def subclassed(module: Any) -> None:
    """Give a module the class of a user, which returns something else."""
    kind = type(module)
    module.__class__ = type(
        "Own", (kind,), {"forward": lambda self, *args, **kw: changed(kind.forward(self, *args, **kw))}
    )


CHANGES: dict[str, Any] = {
    "class": subclassed,
    "forward": lambda module: setattr(module, "forward", functools.partial(calling, module.forward)),
    "hook": lambda module: module.register_forward_hook(lambda module, args, output: changed(output)),
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda module, args: changed(args)),
}  # fmt: skip


@pytest.mark.slow(quick=["not packed-shared_keys-1"])
@pytest.mark.parametrize(
    "packs, name, odd",
    [("not packed", "shared_keys", 1), ("packed", "shared_keys", 0), ("not packed", "branches", 0),
     ("packed", "branches", 1)],
    indirect=["packs"],
)  # fmt: skip
def test_a_module_that_computes_something_else_does_so_in_the_prepared_model(name: str, odd: int, packs: bool) -> None:
    plain = build(name, layer_scale_init_value=0.3)
    parts = ("vit.layers.1", "vit.layers.2", "vit.layernorm", "vit.pooler", "classifier")
    paths = [path for path, _ in plain.named_modules() if path.startswith(parts)][odd::2]
    changes = itertools.islice(itertools.cycle(CHANGES.values()), odd + 2 * packs, None)
    with torch.no_grad():
        before, effects = plain(pixels()).logits, 0
        for path, change in zip(paths, changes, strict=False):
            model = copy.deepcopy(plain)
            change(model.get_submodule(path))
            expected = model(pixels()).logits
            assert difference(prepare_for_inference(model)(pixels()).logits, expected) < REORDERED, path
            effects += not torch.equal(expected, before)
    assert effects > len(paths) / 2


def test_a_class_with_another_forward_computes_it_in_the_prepared_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = build(), PlainViTAttention.forward
    monkeypatch.setattr(PlainViTAttention, "forward", lambda *args, **kwargs: changed(original(*args, **kwargs)))
    with torch.no_grad():
        assert difference(prepare_for_inference(model)(pixels()).logits, model(pixels()).logits) < REORDERED


def test_what_is_in_two_places_has_the_gains_of_each() -> None:
    model = build(layer_scale_init_value=0.3)
    first, second, third = model.vit.layers
    second.mlp, second.attention.q_proj = first.mlp, first.attention.q_proj
    third.mlp.fc2.weight, first.attention.k_proj.weight = first.mlp.fc2.weight, first.attention.q_proj.weight
    with torch.no_grad():
        assert difference(prepare_for_inference(model)(pixels()).logits, model(pixels()).logits) < REORDERED


class Doubled(torch.nn.Module):
    """In place of an attention, which returns weights too, or of an MLP."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return 2 * hidden_states if self.part == "mlp" else (2 * hidden_states, None)


@pytest.mark.parametrize("part", ["attention", "mlp"])
@pytest.mark.parametrize("name", ["plain", "deit", "parallel"])
def test_a_part_of_a_block_that_was_replaced_stays(name: str, part: str) -> None:
    model = build(name)
    block = next(module for module in model.vit.layers[0].modules() if hasattr(module, part))
    setattr(block, part, Doubled(part))
    with torch.no_grad():
        assert difference(prepare_for_inference(model)(pixels()).logits, model(pixels()).logits) < REORDERED


def halved(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """As a hook, halve what a module returns."""
    return output / 2


def test_another_activation_stays() -> None:
    model = build()
    model.vit.layers[1].mlp.activation = torch.nn.Tanh()
    with torch.no_grad():
        assert difference(prepare_for_inference(model)(pixels()).logits, model(pixels()).logits) < REORDERED


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "classifier"])
def test_an_adapter_that_is_not_merged_is_kept(target: str, use_dora: bool) -> None:
    peft: Any = pytest.importorskip("peft")
    model = build("parallel")
    options = peft.LoraConfig(target_modules=[target], init_lora_weights=False, use_dora=use_dora)
    adapted = peft.get_peft_model(model, options).eval()
    prepared = prepare_for_inference(adapted.get_base_model())
    with torch.no_grad():
        assert difference(prepared(pixels()).logits, adapted(pixels()).logits) < REORDERED


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_every_module_is_known_of_a_model_as_its_config_builds_it(name: str, packs: bool) -> None:
    model = build(name)
    if not packs:
        model.vit.layers[0].register_forward_hook(lambda module, args, output: None)
    assert simplify(model).is_as_built is packs


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


@pytest.mark.slow(quick=["not packed-PlainViTForImageClassification-deit"])
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


@pytest.mark.slow(quick=["not packed-pre-hook"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_copy_of_that_code_would_lose_is_refused(change: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    travelled_kind: Any = get_class_from_dynamic_module("modeling_plain_vit.PlainViTForImageClassification", tmp_path)
    travelled = travelled_kind.from_pretrained(tmp_path).eval()
    CHANGES[change](travelled.vit.layers[0].mlp.activation)
    with pytest.raises(PreparedModelError, match="'vit.layers.0.mlp.activation' of .* hooks"):
        prepare_for_inference(travelled)


# Copies, and pickles for other processes

COPIES: dict[str, Any] = {
    "deep": copy.deepcopy,
    "shallow": copy.copy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "pickled twice": lambda model: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model)))),
}


@pytest.mark.slow(quick=[
    "packed-plain-pickled twice", "packed-branches-shallow", "packed-deit-deep", "not packed-plain-pickled",
    "not packed-branches-deep", "not packed-deit-shallow",
])  # fmt: skip
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ["plain", "parallel", "branches", "map", "deit"])
def test_a_copy_of_a_prepared_model_is_the_same_prepared_model(name: str, way: str, packs: bool) -> None:
    prepared = prepare_for_inference(build(name))
    found = COPIES[way](prepared)
    assert torch.equal(found(pixels()).logits, prepared(pixels()).logits)
    assert isinstance(found, PlainViTForImageClassification)
    assert [type(module) for module in found.vit.modules()] == [type(module) for module in prepared.vit.modules()]
    layouts = [module.weight.is_mkldnn for module in found.modules() if isinstance(module, PackedLinear)]
    assert (len(layouts) > 5) == packs
    assert all(layouts)
    assert (found.is_as_built, found.num_tokens_read) == (prepared.is_as_built, prepared.num_tokens_read)
    with pytest.raises(PreparedModelError, match="train the original model"):
        found.train()


@pytest.mark.parametrize("kind", [PlainViTModel, PlainViTForMaskedImageModeling, PlainViTBackbone])
def test_every_kind_of_prepared_model_is_copied_in_its_dtype(kind: Any) -> None:
    prepared = prepare_for_inference(build("swiglu", kind, use_mask_token=True), dtype=torch.bfloat16)
    images = pixels().bfloat16()
    for way in COPIES.values():
        assert torch.equal(first(way(prepared)(images)), first(prepared(images)))


@pytest.mark.parametrize("before", [False, True])
def test_copies_record_hidden_states_and_attentions_whatever_was_recorded_before(before: bool) -> None:
    prepared, asked = prepare_for_inference(build()), {"output_hidden_states": True, "output_attentions": True}
    if before:
        prepared(pixels(), **asked)  # transformers adds its hooks
    expected = pickle.dumps(prepared), copy.deepcopy(prepared)
    for found in (pickle.loads(expected[0]), expected[1]):
        outputs = prepared(pixels(), **asked)
        for name in ("hidden_states", "attentions"):
            for ours, theirs in zip(found(pixels(), **asked)[name], outputs[name], strict=True):
                assert torch.equal(ours, theirs)


def test_a_part_that_was_replaced_goes_along_with_what_someone_hooked() -> None:
    model = build(layer_scale_init_value=0.3)
    model.vit.layers[1].mlp = Doubled("mlp")
    model.vit.layers[2].mlp.register_forward_hook(halved)
    prepared = prepare_for_inference(model)
    with torch.no_grad():
        assert difference(prepared(pixels()).logits, model(pixels()).logits) < REORDERED
    for way in COPIES.values():
        assert torch.equal(way(prepared)(pixels()).logits, prepared(pixels()).logits)


def test_a_pickle_is_opened_where_weights_are_not_packed(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_for_inference(build())
    content, expected = pickle.dumps(prepared), prepared(pixels()).logits
    monkeypatch.setattr(inference, "is_worth_packing", lambda dtype: False)
    assert difference(pickle.loads(content)(pixels()).logits, expected) < REORDERED
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    if packs:
        with pytest.raises(PreparedModelError, match="send the model itself, and prepare it here"):
            pickle.loads(content)(pixels())


NOT_PACKED = pytest.mark.parametrize("packs", ["not packed"], indirect=True)  # as no compiled model is


@pytest.mark.slow
@NOT_PACKED
def test_a_compiled_model_s_copies_are_compiled() -> None:
    model = build(num_hidden_layers=1)
    prepared = prepare_for_inference(model, compile=True, batch_size=2)
    expected = prepared(pixels()).logits
    with torch.no_grad():
        assert difference(expected, model(pixels()).logits) < REORDERED
    for way in ("deep", "pickled"):
        found = COPIES[way](prepared)
        assert found._compiled_call_impl is not None
        assert torch.equal(found(pixels()).logits, expected)


@pytest.mark.slow
@NOT_PACKED
@pytest.mark.parametrize("name", few(["parallel", "map", "plain"], 1))
def test_compiled_the_logits_stay_within_rounding(name: str) -> None:
    model = build(name, num_hidden_layers=2)
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


@pytest.mark.parametrize("change", CHANGES)
def test_passes_are_recorded_only_of_the_modules_of_the_first_one(change: str) -> None:
    model, graphs = build(), CudaGraphs()
    assert graphs.is_unchanged(model)
    adapted = copy.deepcopy(model)
    assert CudaGraphs().is_unchanged(adapted)
    assert not graphs.is_unchanged(adapted)
    CHANGES[change](model.vit.layers[1].mlp)
    assert graphs.is_unchanged(model) is (change == "class")
    model.vit.layers[1].mlp = torch.nn.Sequential(model.vit.layers[1].mlp)
    assert not graphs.is_unchanged(model)


def test_passes_that_a_hook_of_all_modules_sees_are_not_recorded() -> None:
    model, graphs = build(), CudaGraphs()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    assert not graphs.is_unchanged(model)
    handle.remove()
    assert graphs.is_unchanged(model)


@pytest.mark.slow(quick=["not packed"])
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
