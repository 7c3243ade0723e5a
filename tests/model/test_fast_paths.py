"""Fast paths of the model, compared with the plain computation."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from plain_vit import PlainViTForImageClassification, attention_plain_vit, layers_plain_vit, modeling_plain_vit
from plain_vit.attention_plain_vit import DEFAULT_ATTENTION, FAST_ATTENTION, LONGEST_PRODUCTS
from plain_vit.heads_plain_vit import POOLERS
from tests.tiny import VARIATIONS, build, difference, pixels, tiny_config

REORDERED = 1e-5  # sums are taken in another order
OF_CLASS_TOKEN = sorted(name for name, fields in VARIATIONS.items() if fields.get("pooling", "cls") == "cls")


def fused(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by torch's fused kernel, written down."""
    attended = nn.functional.scaled_dot_product_attention(query, key, value, bias, kwargs["dropout"], scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def tokens_of_last_block(model: Any, images: torch.Tensor, **options: Any) -> int:
    """Return how many tokens of an image the last block computes, without being noticed: as one of its own methods."""
    kind, seen = type(model.vit.pooler), list[int]()
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, hidden_states: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(hidden_states.shape[1])
        return original(self, hidden_states, *rest)

    kind.forward = forward
    try:
        model(images, **options)
    finally:
        kind.forward = original
    return seen[0]


# Layers that do nothing


def test_what_a_config_omits_is_no_layer() -> None:
    layer = PlainViTForImageClassification(tiny_config()).vit.layers[0]
    attention = layer.attention
    omitted = (attention.q_norm, attention.k_norm, attention.norm, layer.mlp.norm)
    assert [*omitted, layer.layer_scale1, layer.layer_scale2, layer.drop_path] == [None] * 7


@pytest.mark.parametrize("watch", ["hook", "hook before", "hook of every module", "forward"])
def test_a_dropout_that_drops_nothing_is_called_if_someone_watches(watch: str) -> None:
    model = build()
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    seen: list[nn.Module] = []

    def see(module: nn.Module, *rest: Any) -> None:
        seen.append(module)

    def replaced(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        see(module)
        return hidden_states

    handles = []
    if watch == "hook of every module":
        handles.append(nn.modules.module.register_module_forward_hook(see))
    for dropout in dropouts:
        if watch == "hook":
            dropout.register_forward_hook(see)
        elif watch == "hook before":
            dropout.register_forward_pre_hook(see)
        elif watch == "forward":
            vars(dropout)["forward"] = functools.partial(replaced, dropout)
    model(pixels())
    for handle in handles:
        handle.remove()
    assert set(dropouts) <= set(seen)


def test_dropouts_drop_when_they_alone_are_trained_or_get_a_rate_later() -> None:
    """As Monte Carlo dropout does (Gal and Ghahramani 2016)."""
    model = build(hidden_dropout_prob=0.2)
    assert torch.equal(model(pixels()).logits, model(pixels()).logits)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not torch.equal(model(pixels()).logits, model(pixels()).logits)
    model = build().train()
    assert torch.equal(model(pixels()).logits, model(pixels()).logits)
    model.vit.layers[0].mlp.dropout.p = 0.2
    assert not torch.equal(model(pixels()).logits, model(pixels()).logits)


# The attention that is used where none is asked for


def test_it_is_sdpa_and_another_may_be_asked_for() -> None:
    assert build().config._attn_implementation == DEFAULT_ATTENTION == "sdpa"
    for attention in ("sdpa", "eager", "plain_vit", FAST_ATTENTION):
        assert build(attn_implementation=attention).config._attn_implementation == attention


def test_transformers_own_sdpa_is_not_replaced() -> None:
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert attention_plain_vit.SDPA is sdpa_attention_forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_in_evaluation_it_is_torch_s_fused_kernel_to_the_last_bit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name).to(dtype)
    logits = model(pixels()).logits
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "written_down", fused)
    model.set_attn_implementation("written_down")
    assert torch.equal(logits, model(pixels()).logits)


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_the_fast_attention_is_sdpa_to_the_last_bit_in_float32(name: str) -> None:
    fast = build(name, attn_implementation=FAST_ATTENTION)
    assert torch.equal(fast(pixels()).logits, build(name, attn_implementation="sdpa")(pixels()).logits)


@pytest.mark.parametrize("name", ["plain", "differential", "rms_per_head", "wide_heads"])
def test_in_bfloat16_it_is_as_near_to_float32_as_the_products_written_down(name: str) -> None:
    expected = build(name)(pixels()).logits
    found = {
        attention: difference(build(name, attn_implementation=attention).bfloat16()(pixels()).logits.float(), expected)
        for attention in (FAST_ATTENTION, "eager")
    }
    assert max(found.values()) < 0.03, found  # 8 bits of mantissa, over three blocks


@pytest.mark.parametrize("attention", [None, "sdpa", "plain_vit"])
def test_training_in_bfloat16_attends_by_the_fast_one(attention: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "written_down", fused)
    model, fast, written = (
        build(attn_implementation=name).bfloat16() for name in (attention, FAST_ATTENTION, "written_down")
    )
    assert torch.equal(model(pixels()).logits, written(pixels()).logits)  # in evaluation
    logits = model.train()(pixels()).logits
    assert torch.equal(logits, fast.train()(pixels()).logits)
    assert not torch.equal(logits, written.train()(pixels()).logits)


def test_training_leaves_what_someone_put_in_the_place_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return fused(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", counted)
    build().bfloat16().train()(pixels())
    assert len(calls) == 3


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("attention", ["plain_vit", FAST_ATTENTION])
def test_folders_that_say_an_older_name_open(key: str, attention: str, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, key: attention}))
    opened = PlainViTForImageClassification.from_pretrained(tmp_path)
    assert opened.config._attn_implementation == attention
    assert torch.equal(opened(pixels()).logits, model(pixels()).logits)
    expected = build(attn_implementation=FAST_ATTENTION).bfloat16()
    opened = opened.bfloat16().train(attention == "plain_vit")
    assert torch.equal(opened(pixels()).logits, expected.train(opened.training)(pixels()).logits)


def test_long_images_leave_the_products() -> None:
    side = 8 * 33  # 33 x 32 patches and the class token
    assert LONGEST_PRODUCTS < 33 * 32 + 1
    images = pixels(1, side, 14 * 32).bfloat16()
    fast, fused = (build(attn_implementation=attention).bfloat16() for attention in (FAST_ATTENTION, "sdpa"))
    assert torch.equal(fast(images).logits, fused(images).logits)
    assert not torch.equal(fast(images[..., :56]).logits, fused(images[..., :56]).logits)


# Under autocast, what several products read is cast once


@pytest.mark.parametrize("name", ["plain", "differential", "rms_per_head", "swiglu", "swiglu_packed", "post_norm"])
def test_one_cast_for_several_products_changes_no_logit_and_keeps_less(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    monkeypatch.setattr(modeling_plain_vit, "join_projections", lambda blocks: [None] * len(blocks))
    for once in (True, False):
        if not once:
            for module in (attention_plain_vit, layers_plain_vit):
                monkeypatch.setattr(module, "cast_once", lambda hidden_states: hidden_states)
        model, kept = build(name).train(), dict[int, int]()

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(pixels()).logits.float()
            size = sum(kept.values())
        logits.square().sum().backward()
        results.append((logits, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, size))
    (logits, gradients, size), (expected, expected_gradients, expected_size) = results
    assert torch.equal(logits, expected)
    assert size < expected_size
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for key, gradient in gradients.items():
        assert (gradient - expected_gradients[key]).abs().max() < 0.02 * largest, key  # bf16 sums in place of float32


# The last block computes what the head reads


@pytest.mark.parametrize("name", OF_CLASS_TOKEN)
def test_training_computes_only_what_the_head_reads_with_the_same_logits_and_gradients(name: str) -> None:
    model = build(name).train()
    prefix = 1 + model.config.use_distillation_token
    results = []
    for options in ({}, {"output_hidden_states": True}):
        model.zero_grad()
        torch.manual_seed(0)  # the network of a relative bias has dropout
        images = pixels().requires_grad_()
        logits = model(images, **options).logits
        logits.square().sum().backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), images.grad, gradients))
    (logits, image, gradients), (expected, expected_image, expected_gradients) = results
    assert difference(logits, expected) < REORDERED
    assert difference(image, expected_image) < REORDERED
    assert gradients.keys() == expected_gradients.keys()
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for key, gradient in gradients.items():
        assert (gradient - expected_gradients[key]).abs().max() < REORDERED * largest, key
    assert tokens_of_last_block(model, pixels()) == prefix
    patches = math.prod(model.config.grid_size)
    assert tokens_of_last_block(model, pixels(), output_hidden_states=True) == patches + model.config.num_prefix_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_computes_every_token_whose_bits_are_a_source_s(dtype: torch.dtype) -> None:
    model = build().to(dtype)
    assert tokens_of_last_block(model, pixels()) == 13
    assert tokens_of_last_block(model.train(), pixels()) == 1


@pytest.mark.parametrize("name", ["mean", "cls_mean", "map", "prr", "no_pooling"])
def test_other_poolings_read_every_token(name: str) -> None:
    model = build(name).train()
    assert tokens_of_last_block(model, pixels()) == 12 + model.config.num_prefix_tokens


@pytest.mark.parametrize("pooling", sorted(POOLERS))
def test_a_pooler_reads_as_many_of_the_first_tokens_as_it_says(pooling: str) -> None:
    model: Any = build(pooling) if pooling in VARIATIONS and "attention" in pooling else build(pooling=pooling)
    tokens = torch.randn(2, 13, 40, generator=torch.Generator().manual_seed(3))
    expected, read = model.vit.pooler(tokens), model.vit.pooler.num_tokens_read
    changed = []
    for index in range(13):
        others = tokens.clone()
        others[:, index] *= 4
        changed.append(not torch.equal(model.vit.pooler(others), expected))
    assert (read is None) == any(changed[1:])
    assert not any(changed[read:] if read else [])


def test_another_pooler_in_its_place_gets_every_token() -> None:
    class LastToken(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states[:, 12]

    model = build().train()
    model.vit.pooler = LastToken()
    assert model(pixels()).logits.shape == (2, 7)


@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("by_config", [False, True])
def test_what_is_asked_for_is_computed_for_every_token(output: str, by_config: bool) -> None:
    model = build(attn_implementation="eager").train()
    setattr(model.config, output, by_config)
    found = model(pixels()) if by_config else model(pixels(), **{output: True})
    last = found.hidden_states[-1] if output == "output_hidden_states" else found.attentions[-1][:, 0]
    assert last.shape[1] == 13


@pytest.mark.parametrize("watched", ["vit", "vit.layers.2", "vit.layers.2.mlp.fc1", "vit.layernorm"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_sees_every_token(watched: str, register: str) -> None:
    model = build().train()
    shapes: list[Any] = []

    def look(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        tensor = outputs.last_hidden_state if watched == "vit" else outputs[0] if type(outputs) is tuple else outputs
        shapes.append(tensor.shape[1])

    if watched == "vit" and register == "register_full_backward_hook":
        pytest.skip("torch hooks into the gradients of tensors, and this module gives a dataclass")
    getattr(model.get_submodule(watched), register)(look)
    model(pixels()).logits.sum().backward()
    assert shapes == [13]


def test_a_hook_of_the_pooler_sees_every_token() -> None:
    model, shapes = build().train(), []
    model.vit.pooler.register_forward_pre_hook(lambda _module, inputs: shapes.append(inputs[0].shape[1]))
    model(pixels())
    assert shapes == [13]


# Those who look without a hook of torch, or replace a part


class Looking(ModelHook):
    """A hook of accelerate that notes how many tokens of an image come out."""

    def __init__(self, seen: list[int]):
        self.seen = seen

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        self.seen.append(tensor.shape[1])
        return output


def look_by_forward(module: Any, seen: list[int], name: str = "forward") -> None:
    """Put another method on one module, which notes how many tokens come out."""
    method = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: Looking(seen).post_forward(module, method(*args, **kwargs)))


def look_by_class(module: Any, seen: list[int]) -> None:
    """Give one module a class of one's own."""
    kind = type(module)
    noted: Any = {
        "forward": lambda self, *args, **kw: Looking(seen).post_forward(self, kind.forward(self, *args, **kw))
    }
    module.__class__ = type("Own", (kind,), noted)


LOOKS: dict[str, Callable[[Any, list[int]], Any]] = {
    "a hook of accelerate": lambda module, seen: add_hook_to_module(module, Looking(seen)),
    "two of them": lambda module, seen: add_hook_to_module(
        add_hook_to_module(module, AlignDevicesHook("cpu")), Looking(seen), append=True
    ),
    "another forward": look_by_forward,
    "another class": look_by_class,
}


@pytest.mark.parametrize(
    "watched", ["vit", "vit.layers.2", "vit.layers.2.attention", "vit.layers.2.mlp", "vit.layernorm"]
)
@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_every_token(look: str, watched: str) -> None:
    model, seen = build().train(), list[int]()
    LOOKS[look](model.get_submodule(watched), seen)
    model(pixels())
    assert seen == [13]


def test_who_looks_into_the_attention_sees_every_query() -> None:
    model, seen = build().train(), list[int]()
    look_by_forward(model.vit.layers[2].attention, seen, "attend")
    model(pixels())
    assert seen == [13]


def test_a_forward_of_a_whole_class_sees_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, original = build().train(), list[int](), modeling_plain_vit.PlainViTLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Looking(seen).post_forward(self, original(self, *args, **kwargs))

    monkeypatch.setattr(modeling_plain_vit.PlainViTLayer, "forward", forward)
    model(pixels())
    assert seen == [13] * 3


@pytest.mark.slow
def test_who_looks_within_a_compiled_block_sees_every_token() -> None:
    model, seen = build().train(), list[int]()
    look_by_forward(model.vit.layers[2].mlp, seen)
    model.vit.layers[2] = torch.compile(model.vit.layers[2], backend="eager")
    model(pixels())
    assert seen == [13]


class MixedTokens(nn.Module):
    """An MLP of one's own, which adds to each token the mean of all."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden_states) + hidden_states.mean(dim=1, keepdim=True)


def test_a_part_that_mixes_tokens_gives_in_training_what_it_gives_in_evaluation() -> None:
    model = build()
    model.vit.layers[2].mlp = MixedTokens(model.vit.layers[2].mlp)
    expected = model(pixels()).logits
    assert difference(model.train()(pixels()).logits, expected) < REORDERED


def unhook(model: Any) -> Any:
    """Hook accelerate into the last block, and remove it again: its `forward` stays on the instance."""
    for module in model.vit.layers[2].modules():
        remove_hook_from_module(add_hook_to_module(module, Looking([])))
    return model


def adapt(model: Any) -> Any:
    """Return the base model with LoRA in each block."""
    options = LoraConfig(target_modules=["q_proj", "o_proj", "fc1", "fc2"], init_lora_weights=False)
    return get_peft_model(model, options).get_base_model()


def compile_parts(model: Any) -> Any:
    """Compile the encoder, and within it the last block, its MLP and the norm."""
    model.vit.layers[2].mlp.compile(backend="eager")
    model.vit.layernorm = torch.compile(model.vit.layernorm, backend="eager")
    model.vit.layers[2] = torch.compile(model.vit.layers[2], backend="eager")
    model.vit = torch.compile(model.vit, backend="eager")
    return model


def normalise_weights(model: Any) -> Any:
    """Give layers of the last block a weight of two factors."""
    nn.utils.parametrizations.weight_norm(model.vit.layers[2].mlp.fc1)
    nn.utils.parametrizations.weight_norm(model.vit.layers[2].attention.o_proj)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooks of accelerate, removed": unhook,
    "hooks that move inputs": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "compiled parts": compile_parts,
    "parametrised weights": normalise_weights,
    "LoRA": adapt,
}


@pytest.mark.slow(quick=["hooks of accelerate, removed"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_show_no_token_to_anybody_leave_the_last_block_short(change: str) -> None:
    model = CHANGES[change](build()).train()
    assert tokens_of_last_block(model, pixels()) == 1
    assert tokens_of_last_block(model.eval(), pixels()) == 13
