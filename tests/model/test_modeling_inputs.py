"""Unusual inputs of a model (empty batches, non-numeric values, other types), and torch's transforms of models."""

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import replicate
from torch.utils.flop_counter import FlopCounterMode

from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
    prepare_for_inference,
)
from tests.conftest import randomize_
from tests.sizes import NIGHTLY
from tests.tiny import VARIATIONS, in_turn, pixels, tiny_config

MODELS: list[Any] = [PlainViTModel, PlainViTForImageClassification, PlainViTForMaskedImageModeling, PlainViTBackbone]


def build(model_class: Any, name: str = "plain", **fields: Any) -> Any:
    """Return a model in evaluation mode, with a mask token."""
    return model_class(tiny_config(**{**VARIATIONS[name], "use_mask_token": True, **fields})).eval()


def inputs_of(model: Any, images: torch.Tensor) -> dict[str, Any]:
    """Return the inputs with which this class of model returns a loss for these images."""
    inputs: dict[str, Any] = {"pixel_values": images}
    if isinstance(model, PlainViTForImageClassification) and model.config.pooling != "none":
        inputs["labels"] = torch.zeros(images.shape[0], dtype=torch.int64, device=images.device)
    if isinstance(model, PlainViTForMaskedImageModeling):
        grid = model.grid_size(*images.shape[-2:])
        inputs["bool_masked_pos"] = torch.ones(images.shape[0], *grid, dtype=torch.bool, device=images.device)
    return inputs


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Return all tensors of an output, in order."""
    parts = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return [tensor for part in parts for tensor in ([part] if isinstance(part, torch.Tensor) else tensors_of(part))]


# The meta device: shapes without numbers


@pytest.mark.parametrize("model_class, name", in_turn(MODELS, quick=[
    "PlainViTModel-query_block", "PlainViTForImageClassification-learned_2d",
    "PlainViTForImageClassification-linear_patches", "PlainViTForImageClassification-plain",
    "PlainViTForImageClassification-representation", "PlainViTForMaskedImageModeling-branches",
]))  # fmt: skip
def test_on_the_meta_device_shapes_and_operations_are_those_of_the_cpu(model_class: Any, name: str) -> None:
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = build(model_class, name)
        images = torch.zeros(2, 3, 16, 28, device=device)  # another grid, so positions are resampled
        with FlopCounterMode(display=False) as counter:
            outputs = model(**inputs_of(model, images))
        found.append(([tensor.shape for tensor in tensors_of(outputs)], counter.get_total_flops()))
    assert found[0] == found[1]
    assert found[0][1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model_class", MODELS)
def test_on_the_meta_device_a_model_is_trained(model_class: Any) -> None:
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.5}
    for number, name in enumerate(VARIATIONS):
        if not NIGHTLY and MODELS[number // 2 % len(MODELS)] is not model_class:
            continue  # each variation runs with one model class and one dtype, in turn
        target = ("pixels", "mean_color")[number % 2]
        with torch.device("meta"):
            model = build(model_class, name, num_hidden_layers=2, reconstruction_target=target, **rates)
        model = model.to((torch.float32, torch.bfloat16)[number % 2]).train()
        outputs = model(**inputs_of(model, pixels().to("meta")))
        loss = getattr(outputs, "loss", None)
        (tensors_of(outputs)[0].sum() if loss is None else loss).backward()
        assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters()), name
        assert model.get_input_embeddings().projection.weight.grad is not None, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_on_the_meta_device_attentions_are_given(attention: str) -> None:
    with torch.device("meta"):
        model = build(PlainViTModel, attn_implementation=attention)
    outputs = model(pixels().to("meta"), output_attentions=True, output_hidden_states=True)
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(2, 5, 13, 13)] * 3


@pytest.mark.parametrize("name", ["plain", "swiglu", "differential"])
def test_on_the_meta_device_a_prepared_model_counts_too(name: str) -> None:
    with torch.device("meta"):
        model = build(PlainViTForImageClassification, name)
    prepared = prepare_for_inference(model)
    assert prepared(pixels(5).to("meta")).logits.shape == (5, 7)


# Empty batches


@pytest.mark.parametrize("model_class, name", in_turn(MODELS, quick=[
    "PlainViTForMaskedImageModeling-map", "PlainViTModel-mask_token", "PlainViTModel-no_projection",
    "PlainViTForMaskedImageModeling-query_block", "PlainViTModel-representation",
    "PlainViTForMaskedImageModeling-shared_keys",
]))  # fmt: skip
def test_a_batch_of_no_images_gives_empty_outputs_and_gradients_of_zero(model_class: Any, name: str) -> None:
    for attention in ("sdpa", "eager"):
        model = build(model_class, name, attn_implementation=attention, num_hidden_layers=2)
        one, none = (tensors_of(model(torch.zeros(count, 3, 24, 56))) for count in (1, 0))
        assert [tuple(tensor.shape) for tensor in none] == [(0, *tensor.shape[1:]) for tensor in one]
        model.train()
        sum(tensor.sum() for tensor in tensors_of(model(torch.zeros(0, 3, 24, 56)))).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all((gradient == 0).all() for gradient in gradients)


def test_the_losses_of_no_images_are_what_torch_makes_of_a_mean_of_nothing() -> None:
    images = torch.zeros(0, 3, 24, 56)
    for labels in (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 7)):
        model = build(PlainViTForImageClassification)
        assert model(images, labels=labels).loss.isnan()
        assert model(images, labels=labels, num_items_in_batch=8).loss == 0  # with gradient accumulation
    for target in ("pixels", "mean_color"):
        masked = build(PlainViTForMaskedImageModeling, reconstruction_target=target)
        assert masked(images, bool_masked_pos=torch.ones(0, 12, dtype=torch.bool)).loss == 0  # with no masked patches


def test_a_prepared_model_takes_a_batch_of_no_images() -> None:
    for name in ("plain", "map", "query", "prr", "linear_patches"):
        assert prepare_for_inference(build(PlainViTForImageClassification, name))(pixels()[:0]).logits.shape[0] == 0


# Inputs of other types


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize(
    "images, kind, message",
    [
        (None, TypeError, "pixel_values is a NoneType: expected a tensor of normalised floats"),
        (pixels().numpy(), TypeError, r'is a ndarray: expected a tensor .* return_tensors="pt"'),
        ([pixels()[0], pixels()[1]], TypeError, "is a list: expected a tensor"),
        ({"pixel_values": pixels()}, TypeError, "is a dict: expected a tensor"),
        (pixels().byte(), ValueError, "dtype torch.uint8: expected normalised floats"),
        (pixels() > 0, ValueError, "dtype torch.bool: expected normalised floats"),
        (pixels().to(torch.complex64), ValueError, "dtype torch.complex64: expected normalised floats"),
        (pixels()[0], ValueError, r"shape \(3, 24, 56\): expected \(batch, 3, height, width\)"),
        (pixels()[None], ValueError, r"expected \(batch, 3, height, width\)"),
        (torch.tensor(1.0), ValueError, r"shape \(\): expected"),
        (pixels(channels=1), ValueError, r"expected \(batch, 3, height, width\)"),
        (torch.zeros(2, 3, 0, 56), ValueError, "is not a multiple of patch_size"),
    ],
)
def test_invalid_pixels_are_refused_with_what_is_expected(
    model_class: Any, images: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        build(model_class)(images)


@pytest.mark.parametrize("model_class", [PlainViTModel, PlainViTForMaskedImageModeling])
@pytest.mark.parametrize(
    "mask, kind, message",
    [
        ([[True] * 12] * 2, TypeError, "bool_masked_pos is a list: expected a tensor of torch.bool"),
        (torch.ones(2, 12).numpy(), TypeError, "is a ndarray"),
        (torch.rand(2, 12), ValueError, "dtype torch.float32: expected torch.bool.*compare with a threshold"),
        (torch.ones(12).bool(), ValueError, r"shape \(12,\): expected .* of 2 images with the patch grid \(3, 4\)"),
        (torch.ones(1, 12).bool(), ValueError, "of 2 images"),  # would be broadcast to all images
        (torch.ones(3, 3, 4).bool(), ValueError, "of 2 images"),
        (torch.ones(2, 4, 3).bool(), ValueError, r"patch grid \(3, 4\)"),
        (torch.ones(2, 13).bool(), ValueError, "of 2 images"),
        (torch.tensor(True), ValueError, "of 2 images"),
    ],
)
def test_an_invalid_mask_is_refused(model_class: Any, mask: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build(model_class)(pixels(), bool_masked_pos=mask)


def test_a_mask_may_be_of_whole_numbers_as_collators_make_it() -> None:
    model = build(PlainViTForMaskedImageModeling)
    mask = torch.arange(24).view(2, 12) % 3 == 0
    expected = model(pixels(), bool_masked_pos=mask)
    found = model(pixels(), bool_masked_pos=mask.long())
    assert torch.equal(found.reconstruction, expected.reconstruction)
    assert found.loss == expected.loss


@pytest.mark.parametrize("labels", [[1, 2], 3, "cat", torch.tensor([1, 2]).numpy()])
def test_labels_that_are_no_tensor_are_refused(labels: Any) -> None:
    with pytest.raises(TypeError, match=r"labels is a \w+: expected a tensor"):
        build(PlainViTForImageClassification)(pixels(), labels=labels)


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_a_mask_that_no_model_applies_may_be_none_and_is_else_refused(model_class: Any, training: bool) -> None:
    model = build(model_class).train(training)
    expected, refused = tensors_of(model(pixels())), {"attention_mask", "head_mask"}
    if model_class is PlainViTBackbone:
        refused |= {"bool_masked_pos", "image_sizes", "pixel_attention_mask", "spatial_shapes"}
    found = tensors_of(model(pixels(), **dict.fromkeys(refused)))
    assert all(torch.equal(ours, same) for ours, same in zip(found, expected, strict=True))
    for name in refused:
        with pytest.raises(ValueError, match=rf"{name} is not an input of this model, .*: omit it"):
            model(pixels(), **{name: torch.ones(2, 13)})


# Copies and transforms of a model by torch


def replicas_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the copies that `nn.DataParallel` makes for two GPUs, on the CPU."""

    def copies(tensors: Any, devices: Any, detach: bool = False) -> list[list[torch.Tensor]]:
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(sys.modules[replicate.__module__], "_broadcast_coalesced_reshape", copies)
    return replicate(model, [0, 1])


@pytest.mark.parametrize("model_class, name", in_turn(MODELS, quick=[
    f"PlainViTForImageClassification-{name}"
    for name in ("deit", "mask_token", "no_pooling", "plain", "registers_last", "rms_all_heads")
]))  # fmt: skip
def test_the_replicas_of_data_parallel_give_the_outputs_and_gradients_of_the_model(
    model_class: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, whole = pixels(4).half(), {"output_hidden_states": True, "output_attentions": True}
    model = randomize_(build(model_class, name))
    for training in (False, True):
        inputs = [inputs_of(model, part) | whole for part in images.split(2)]
        torch.manual_seed(0)
        expected = [tensors_of(model.train(training)(**part)) for part in inputs]
        replicas = replicas_of(model, monkeypatch)
        torch.manual_seed(0)
        found = [tensors_of(one(**part)) for one, part in zip(replicas, inputs, strict=True)]
        for ours, same in zip(found, expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours, same, strict=True))
        gradients = []
        for outputs in (found, expected):
            model.zero_grad()
            sum(tensor.sum() for one in outputs for tensor in one).backward()
            gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys() != set()
        largest = max(gradient.abs().max() for gradient in gradients[1].values())
        assert all((ours - gradients[1][key]).abs().max() <= 1e-6 * largest for key, ours in gradients[0].items())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for fused attention
@pytest.mark.parametrize("training", [False, True])
def test_the_loss_of_classes_is_differentiated_for_each_image(training: bool) -> None:
    model = randomize_(build(PlainViTForImageClassification)).train(training)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    images, labels = pixels(3), torch.tensor([0, 6, 3])

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (image[None],), {"labels": label[None]}).loss

    of_each = vmap(grad(loss), (None, 0, 0))(weights, images, labels)
    model(images, labels=labels).loss.backward()
    for name, p in model.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad  # only the mask token's gradient
        assert torch.allclose(of_each[name].mean(0), expected, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_the_loss_of_classes_is_computed_of_fake_tensors_and_traced() -> None:
    model = build(PlainViTForImageClassification, num_hidden_layers=1).train()
    images, labels = pixels(), torch.tensor([0, 6])

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(images, labels=labels).loss

    expected = loss(images, labels)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert loss(images, labels).shape == ()
        assert loss(mode.from_tensor(images), mode.from_tensor(labels)).shape == ()
    for tracing_mode in ("real", "symbolic"):
        traced = make_fx(loss, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(images, labels)
        assert torch.allclose(traced(images, labels), expected)
