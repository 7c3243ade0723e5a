"""Analysis does not change models: shared by threads, compiled, wrapped, with adapters, under autocast."""

import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType
from typing import Any

import accelerate
import numpy as np
import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from plain_vit.analysis import (
    attention_maps,
    grad_cam,
    gradient_rollout,
    integrated_gradients,
    logit_lens,
    patch_features,
    patch_filters,
    patch_similarity,
    position_similarity,
    relative_position_biases,
    resampled_positions,
    token_layout,
)
from plain_vit.errors import AnalysisError
from plain_vit.modeling_plain_vit import PlainViTLayer
from tests.analysis.test_analysis import FUNCTIONS, build, images

OF_EVERY_KIND = [attention_maps, gradient_rollout, logit_lens]  # hooks on attentions, gradients, hooks that change


# Threads


@pytest.mark.slow
def test_threads_that_share_a_model_get_their_own_arrays() -> None:
    model = build("distilled")
    model.vit.layers[1].eval()
    modes = [module.training for module in model.modules()]
    pixels = [images(model, batch=1) for _ in range(4)]
    calls = [(function, image) for function in FUNCTIONS for image in pixels] * 2
    alone = [function(model, image) for function, image in calls]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda call: call[0](model, call[1]), calls))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_model_is_left_alone_while_it_is_looked_at(function: Callable[..., np.ndarray]) -> None:
    """Other threads may work meanwhile, for example on a training step; simulated in a user's hook."""
    model = build()
    pixels = images(model)
    trained: list[torch.Tensor] = []
    steps = iter("one step")

    def train(*call: Any) -> None:
        if next(steps, None):  # no further step within the last
            torch.manual_seed(0)
            trained.append(model(pixels).logits.detach())

    model.vit.layers[2].register_forward_hook(train)
    undisturbed = function(build(), pixels)
    np.testing.assert_array_equal(function(model, pixels), undisturbed)
    assert len(trained) == len("one step")
    torch.manual_seed(0)
    expected = model(pixels).logits.detach()
    for logits in trained:
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)


# Compiled, wrapped, replaced


def compiled(callee: Any) -> Any:
    return torch.compile(callee, backend="eager")


def with_compiled_layers(model: Any) -> Any:
    model.vit.layers = nn.ModuleList(map(compiled, model.vit.layers))
    return model


def with_compiled_attentions(model: Any) -> Any:
    for layer in model.vit.layers:
        layer.attention.compile(backend="eager")
    return model


def with_compiled_encoder(model: Any) -> Any:
    model.vit = compiled(model.vit)
    return model


def with_compiled_forwards(model: Any) -> Any:
    for module in (model, *model.vit.layers, model.vit.layers[0].mlp):
        module.forward = compiled(module.forward)
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def with_methods_for_forwards(model: Any) -> Any:
    for layer in model.vit.layers:
        layer.forward = MethodType(type(layer).forward, layer)
    return model


def with_hooks_of_accelerate(model: Any) -> Any:
    for module in (model.vit, *model.vit.layers, model.vit.layers[1].attention):
        add_hook_to_module(module, ModelHook())
    return model


def adapted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj", "fc1"], lora_dropout=0.5))


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "compiled in place": compiled_in_place,
    "compiled layers": with_compiled_layers,
    "compiled attentions": with_compiled_attentions,
    "compiled encoder": with_compiled_encoder,
    "compiled forwards": with_compiled_forwards,
    "twice": lambda model: compiled(compiled_in_place(with_compiled_layers(model))),
    "data parallel of compiled": lambda model: nn.DataParallel(compiled(model)),
    "adapted in compiled": lambda model: compiled(adapted(model)),
    "methods for forwards": with_methods_for_forwards,
    "hooks of accelerate": with_hooks_of_accelerate,
}


@pytest.mark.slow(quick=[how for how in WRAPPED if how not in ("compiled in place", "twice", "adapted in compiled")])
@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_and_compiled_models_show_what_the_model_does(how: str) -> None:
    pixels = images(build())
    wrapped = WRAPPED[how](build())
    with torch.no_grad():
        wrapped.eval()(pixels)  # from here on the compiled code is kept, and would not run hooks
    wrapped.train()
    modes = [module.training for module in wrapped.modules()]
    for function in OF_EVERY_KIND:
        np.testing.assert_array_equal(function(wrapped, pixels), function(build(), pixels))
    assert [module.training for module in wrapped.modules()] == modes == [True] * len(modes)
    assert token_layout(wrapped, pixels) == token_layout(build(), pixels)
    filters = [patch_filters(each).components for each in (wrapped, build())]
    np.testing.assert_array_equal(*filters)
    positions = [position_similarity(each, (5, 4)).patches for each in (wrapped, build())]
    np.testing.assert_array_equal(*positions)


def test_what_accelerate_prepares_is_looked_at_in_its_precision(fresh_accelerator: None) -> None:
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(build())
    pixels = images(prepared)
    for function in OF_EVERY_KIND:
        with torch.autocast("cpu", torch.bfloat16):
            expected = function(build(), pixels)
        np.testing.assert_array_equal(function(prepared, pixels), expected)
    assert prepared.training


def test_a_class_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = images(build())
    expected = [function(build(), pixels) for function in OF_EVERY_KIND]
    monkeypatch.setattr(PlainViTLayer, "forward", compiled(PlainViTLayer.forward))
    model = build().eval()
    with torch.no_grad():
        model(pixels)
    for function, array in zip(OF_EVERY_KIND, expected, strict=True):
        np.testing.assert_array_equal(function(model, pixels), array)


def test_a_forward_that_may_compute_with_the_model_itself_is_refused() -> None:
    model = build()
    attention = model.vit.layers[1].attention
    attention.forward = torch.autocast("cpu", enabled=False)(attention.forward)
    with pytest.raises(AnalysisError, match=r"forward of vit.layers.1.attention .*remove it, `del") as raised:
        attention_maps(model, images(model))
    advice = re.search("`(del .*)`", str(raised.value))
    assert advice is not None
    exec(advice[1], {"model": model})
    assert attention_maps(model, images(model)).shape == (2, 3, 5, 5, 4)


# Adapters


@pytest.mark.parametrize("kind", ["plain", "sin-cos, dense patches"])
@pytest.mark.parametrize("adapter", [peft.LoraConfig, partial(peft.LoraConfig, use_dora=True), peft.LoHaConfig])
def test_filters_are_those_of_the_projection_with_its_adapter(kind: str, adapter: Any) -> None:
    model = build(kind)
    without = patch_filters(model, count=9)
    adapted = peft.get_peft_model(model, adapter(target_modules=["projection"], r=3))
    for name, parameter in adapted.named_parameters():
        if "lora" in name or "hada" in name:
            nn.init.normal_(parameter, std=0.3)
    with_adapter = patch_filters(adapted, count=9)
    with adapted.disable_adapter():
        disabled = patch_filters(adapted, count=9)
    merged = patch_filters(adapted.merge_and_unload(), count=9)
    assert np.abs(merged.components[0] - without.components[0]).max() > 0.01
    # Filters are outputs for single pixels, not weights: each is a difference of two float32 roundings.
    for found, expected in ((with_adapter, merged), (disabled, without)):
        np.testing.assert_allclose(found.explained_variance, expected.explained_variance, rtol=1e-5)
        np.testing.assert_allclose(found.components, expected.components, rtol=0, atol=1e-4)


# Autocast


def test_what_is_read_from_weights_is_the_same_under_autocast() -> None:
    model, biased = build("distilled"), build("relative")
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            similarity = position_similarity(model, (5, 4))
            results.append([
                similarity.patches, similarity.prefix, patch_filters(model).components,
                resampled_positions(model, (15, 16)).after, relative_position_biases(biased, (5, 4)),
            ])  # fmt: skip
    for outside, under in zip(*results, strict=True):
        np.testing.assert_array_equal(outside, under)


# Numbers of numpy and torch


def test_numbers_may_be_those_of_numpy_and_torch() -> None:
    model, biased = build(), build("relative")
    pixels = images(model)
    features = patch_features(model, pixels)
    number, tensor, several = np.int64, torch.tensor, np.array
    calls: list[tuple[Callable[..., Any], Any, Any]] = [
        (lambda *n: attention_maps(model, pixels, (n[0], n[1]), layers=n[1], heads=n[2]), number, int),
        (lambda *n: attention_maps(model, pixels, several(n[:2]), layers=several(n[:2]), heads=n[2]), number, int),
        (lambda *n: patch_features(model, pixels, n[1]), number, int),
        (lambda *n: patch_similarity(features, (n[2], n[1]), n[1]), number, int),
        (lambda *n: position_similarity(model, (n[2], n[1])).patches, number, int),
        (lambda *n: relative_position_biases(biased, (n[2], n[1])), number, int),
        (lambda *n: resampled_positions(model, (3 * n[2], 4 * n[1])).after, number, int),
        *((lambda *n, f=f: f(model, pixels, n[2]), kind, int) for f in (grad_cam, gradient_rollout)
          for kind in (number, np.uint8, tensor)),
        (lambda *n: grad_cam(model, pixels, n[:2]), number, int),
        (lambda *n: grad_cam(model, pixels, several(n[:2])), number, int),
        (lambda *n: integrated_gradients(model, pixels, n[2], baseline=n[0], steps=n[2]), np.uint8, int),
        (lambda *n: integrated_gradients(model, pixels, 1, baseline=n[0], steps=3), np.float32, float),
    ]  # fmt: skip
    for call, kind, plain_kind in calls:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the contributions")  # of few steps
            given, expected = call(*map(kind, (0, 1, 2))), call(*map(plain_kind, (0, 1, 2)))
        np.testing.assert_array_equal(given, expected)
    baseline = images(model, batch=1)
    np.testing.assert_array_equal(
        integrated_gradients(model, pixels, 2, baseline.numpy()), integrated_gradients(model, pixels, 2, baseline)
    )
