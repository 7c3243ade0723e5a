"""Behaviour that transformers' common tests require of a vision model."""

import inspect
import math
from typing import Any, cast

import pytest
import torch
import transformers
from packaging.version import Version

from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
)
from tests.conftest import randomize_
from tests.sizes import NIGHTLY
from tests.tiny import VARIATIONS, difference, in_turn, pixels, tiny_config

HEADS: list[Any] = [
    PlainViTModel, PlainViTForImageClassification, PlainViTForMaskedImageModeling, PlainViTBackbone,
]  # fmt: skip
# Other kernels sum in a different order.
REORDERED = 1e-5


def build(model_class: Any = PlainViTForImageClassification, **fields: Any) -> Any:
    """Return a small model with random parameters."""
    return randomize_(model_class(tiny_config(**{"use_mask_token": True, **fields}))).eval()


def flat(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested output, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for part in outputs for tensor in flat(part)]


def loss_of(model: Any) -> torch.Tensor:
    """Return a loss to minimise."""
    if isinstance(model, PlainViTForImageClassification):
        return cast(torch.Tensor, model(pixels(), labels=torch.tensor([3, 6])).loss)
    if isinstance(model, PlainViTForMaskedImageModeling):
        return cast(torch.Tensor, model(pixels(), bool_masked_pos=torch.arange(24).view(2, 12) % 3 == 0).loss)
    return flat(model(pixels(), return_dict=False))[0].square().mean()


@pytest.mark.parametrize("model_class", HEADS)
def test_pixels_come_first_and_the_patch_embedding_is_the_input_embedding(model_class: Any) -> None:
    model = build(model_class)
    assert next(iter(inspect.signature(model.forward).parameters)) == model.main_input_name == "pixel_values"
    assert model.get_input_embeddings()(pixels()).shape == (2, 12, 40)
    assert model.get_output_embeddings() is None
    assert not model.can_generate()
    assert torch.equal(flat(model(pixels()).to_tuple())[0], flat(model(pixel_values=pixels()).to_tuple())[0])


# Hidden states and attentions in every form


@pytest.mark.parametrize("model_class, name", in_turn(HEADS, quick=[
    "PlainViTModel-shared_keys", "PlainViTModel-map", "PlainViTModel-query_block", "PlainViTBackbone-linear_patches",
]))  # fmt: skip
def test_hidden_states_and_attentions_are_all_there(model_class: Any, name: str) -> None:
    asked = {"output_hidden_states": True, "output_attentions": True}
    model = build(model_class, **VARIATIONS[name])
    outputs, config = model(pixels(), **asked), model.config
    last = config.num_register_tokens * config.register_tokens_last
    tokens = math.prod(config.grid_size) + config.num_prefix_tokens + last
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, tokens, 40)] * 4
    assert [tuple(a.shape) for a in outputs.attentions] == [
        (2, config.num_attention_heads, tokens, tokens)
    ] * 3 * config.num_branches
    by_config = build(model_class, **VARIATIONS[name], **asked)
    found = by_config(pixels())
    assert all(map(torch.equal, found.hidden_states, outputs.hidden_states))
    assert all(map(torch.equal, found.attentions, outputs.attentions))
    without = by_config(pixels(), output_hidden_states=False, output_attentions=False)
    assert without.hidden_states is None
    assert without.attentions is None


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="transformers 5.23 brought the choice")
@pytest.mark.parametrize("model_class", HEADS)
@pytest.mark.parametrize("selected, kept", [(0, {0}), (2, {2}), ([0, 3], {0, 3}), ([-1], {3}), ([-2, 1], {1, 2})])
def test_hidden_states_are_chosen_by_index(model_class: Any, selected: Any, kept: set[int]) -> None:
    model = build(model_class)
    every = model(pixels(), output_hidden_states=True).hidden_states
    found = model(pixels(), output_hidden_states=selected).hidden_states
    if selected == 0:  # 0 equals False
        assert found is None
        return
    assert {index for index, state in enumerate(found) if state is not None} == kept
    assert all(torch.equal(found[index], every[index]) for index in kept)


@pytest.mark.parametrize("model_class", HEADS)
def test_tuples_hold_what_the_dict_holds_in_its_order(model_class: Any) -> None:
    model = build(model_class)
    asked = {"output_hidden_states": True, "output_attentions": True}
    outputs = model(pixels(), **asked)
    found = model(pixels(), **asked, return_dict=False)
    assert isinstance(found, tuple)
    expected = flat(outputs.to_tuple())
    assert len(expected) >= 8
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(flat(found), expected, strict=True))
    model.config.return_dict = False
    assert isinstance(model(pixels()), tuple)


@pytest.mark.parametrize("model_class", HEADS)
def test_gradients_are_kept_where_asked(model_class: Any) -> None:
    model = build(model_class)
    outputs = model(pixels(), output_hidden_states=True, output_attentions=True)
    kept = [*outputs.hidden_states, *outputs.attentions]
    for tensor in kept:
        tensor.retain_grad()
    flat(outputs.to_tuple())[0].square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().max() > 0 for tensor in kept)


# Attention


# One of each attention class and an attention pooling, because torch compiles a kernel for each. transformers' flex
# attention would add the first head's relative bias to all heads, so this is an error (`test_positions.py`).
FLEXIBLE = ["differential", "map", "rms_per_head", "rotary", "shared_keys"]
if NIGHTLY:
    FLEXIBLE = [name for name in sorted(VARIATIONS) if not name.startswith("relative")]


@pytest.mark.slow(quick=["sdpa-learned_2d"])
@pytest.mark.parametrize(
    "attention, name",
    [*(("sdpa", name) for name in sorted(VARIATIONS)), *(("flex_attention", name) for name in FLEXIBLE)],
)
def test_attention_implementations_agree(name: str, attention: str) -> None:
    model = build(**VARIATIONS[name])
    model.set_attn_implementation("eager")
    images = pixels(2, 40, 28) if name != "truncate" else pixels()
    with torch.no_grad():
        expected = model(images).logits
        model.set_attn_implementation(attention)
        assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
            attention
        }
        found = model(images).logits
    assert difference(found, expected) < REORDERED


def test_attention_implementations_agree_on_gradients() -> None:
    gradients = []
    for attention in ("eager", "sdpa"):
        model = build(attn_implementation=attention)
        model(pixels(), labels=torch.tensor([1, 2])).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        if not name.endswith("k_proj.bias"):  # has no effect: its gradient is rounding error
            assert difference(gradients[1][name], gradient) < REORDERED, name


def test_an_unknown_attention_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such_attention"):
        build(attn_implementation="no_such_attention")


def test_an_attention_of_one_s_own_is_used() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("counted", counted)
    model = build(attn_implementation="counted")
    model(pixels())
    assert len(calls) == 3


# Forward


@pytest.mark.parametrize("model_class", HEADS)
@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_an_image_gives_the_same_alone_as_in_a_batch(model_class: Any, name: str) -> None:
    model = build(model_class, **VARIATIONS[name])
    images = pixels(batch=3)
    with torch.no_grad():
        together = flat(model(images).to_tuple())
        alone = flat(model(images[1:2]).to_tuple())
    for whole, single in zip(together, alone, strict=True):
        assert difference(single, whole[1:2]) < REORDERED


@pytest.mark.parametrize("model_class", HEADS)
def test_without_training_the_model_gives_the_same_every_time(model_class: Any) -> None:
    rates = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "drop_path_rate": 0.5}
    model = build(model_class, **rates, classifier_dropout_prob=0.5)
    first, second = (flat(model(pixels()).to_tuple()) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    model.train()
    assert not torch.equal(flat(model(pixels()).to_tuple())[0], first[0])


@pytest.mark.parametrize("model_class", HEADS)
def test_keywords_reach_the_attention(model_class: Any) -> None:
    model = build(model_class)
    seen = []
    attention = next(module for name, module in model.named_modules() if name.endswith("layers.1.attention"))
    attention.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    model(pixels(), some_flash_option=3)
    assert seen[0]["some_flash_option"] == 3


def test_autocast_runs_in_half_precision() -> None:
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(pixels(), labels=torch.tensor([1, 2]))
    assert outputs.logits.dtype == torch.bfloat16
    outputs.loss.backward()
    assert model.classifier.weight.grad.dtype == torch.float32
    assert difference(outputs.logits.float(), model(pixels()).logits) < 0.05  # 8 bits of mantissa


@pytest.mark.slow(quick=["image0"])
@pytest.mark.parametrize("image", [torch.zeros(1, 3, 24, 56), torch.full((1, 3, 24, 56), 1e4), pixels(1) * 1e-6])
def test_black_white_and_faint_images_give_finite_numbers(image: torch.Tensor) -> None:
    for name in VARIATIONS:
        model = build(**VARIATIONS[name])
        assert model(image).logits.isfinite().all(), name


def test_channels_last_pixels_give_the_same() -> None:
    for name in ("plain", "linear_patches"):
        model = build(**VARIATIONS[name])
        found = model(pixels().to(memory_format=torch.channels_last)).logits
        assert difference(found, model(pixels()).logits) < REORDERED, name


# Training


@pytest.mark.parametrize("model_class", HEADS)
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_training_goes_down_and_reaches_every_parameter(model_class: Any, checkpointing: bool | None) -> None:
    torch.manual_seed(2)
    model = build(model_class, use_mask_token=model_class is PlainViTForMaskedImageModeling).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = loss_of(model).item()
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert loss.item() < first


def test_frozen_layers_stay_and_reentrant_checkpointing_still_trains_the_others() -> None:
    model = build(use_mask_token=False).train()
    model.vit.embeddings.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model(pixels(), labels=torch.tensor([1, 2])).loss.backward()
    assert all(p.grad is None for p in model.vit.embeddings.parameters())
    assert model.vit.layers[0].mlp.fc1.weight.grad.abs().max() > 0
