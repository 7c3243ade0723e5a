"""Fast paths of the model, compared with the plain computation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from plain_vit import PlainViTForImageClassification, attention_plain_vit, layers_plain_vit
from plain_vit.attention_plain_vit import DEFAULT_ATTENTION, FAST_ATTENTION, LONGEST_PRODUCTS
from plain_vit.heads_plain_vit import POOLERS
from tests.tiny import VARIATIONS, build, difference, pixels, tiny_config


def fused(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with torch's fused kernel, written out."""
    attended = nn.functional.scaled_dot_product_attention(query, key, value, bias, kwargs["dropout"], scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


# Layers that a config omits


def test_what_a_config_omits_is_no_layer() -> None:
    layer = PlainViTForImageClassification(tiny_config()).vit.layers[0]
    attention = layer.attention
    norms = (attention.q_norm, attention.k_norm, attention.norm, layer.mlp.norm)
    branches = (layer.layer_scale1, layer.layer_scale2, layer.drop_path, attention.dropout, layer.mlp.dropout)
    assert [*norms, *branches] == [None] * 9


def test_dropouts_drop_when_they_alone_are_trained() -> None:
    """Monte Carlo dropout does this (Gal and Ghahramani 2016)."""
    model = build(hidden_dropout_prob=0.2)
    assert torch.equal(model(pixels()).logits, model(pixels()).logits)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not torch.equal(model(pixels()).logits, model(pixels()).logits)


# The default attention


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


# Under autocast, the common input of several products is cast once


@pytest.mark.parametrize("name", ["plain", "differential", "rms_per_head", "swiglu", "swiglu_packed", "post_norm"])
def test_one_cast_for_several_products_changes_no_logit_and_keeps_less(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
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
        assert (gradient - expected_gradients[key]).abs().max() < 0.02 * largest, key  # sums in bf16 instead of float32


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
