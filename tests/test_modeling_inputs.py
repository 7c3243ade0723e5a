"""What a model makes of inputs that are not a usual batch of images: none at all, no numbers, another kind of thing."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
    prepare_for_inference,
)
from tests.tiny import VARIATIONS, pixels, tiny_config

MODELS: list[Any] = [PlainViTModel, PlainViTForImageClassification, PlainViTForMaskedImageModeling, PlainViTBackbone]


def build(model_class: Any, name: str = "plain", **fields: Any) -> Any:
    """Return a model in evaluation mode, with a mask token."""
    return model_class(tiny_config(**{**VARIATIONS[name], "use_mask_token": True, **fields})).eval()


def inputs_of(model: Any, images: torch.Tensor) -> dict[str, Any]:
    """Return these images and whatever else makes this kind of model give a loss."""
    inputs: dict[str, Any] = {"pixel_values": images}
    if isinstance(model, PlainViTForImageClassification) and model.config.pooling != "none":
        inputs["labels"] = torch.zeros(images.shape[0], dtype=torch.int64, device=images.device)
    if isinstance(model, PlainViTForMaskedImageModeling):
        grid = model.grid_size(*images.shape[-2:])
        inputs["bool_masked_pos"] = torch.ones(images.shape[0], *grid, dtype=torch.bool, device=images.device)
    return inputs


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Return every tensor of an output, in order."""
    parts = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return [tensor for part in parts for tensor in ([part] if isinstance(part, torch.Tensor) else tensors_of(part))]


# The meta device: shapes without numbers


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_on_the_meta_device_shapes_and_operations_are_those_of_the_cpu(model_class: Any, name: str) -> None:
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = build(model_class, name)
        images = torch.zeros(2, 3, 16, 28, device=device)  # not its own grid: the positions are resampled
        with FlopCounterMode(display=False) as counter:
            outputs = model(**inputs_of(model, images))
        found.append(([tensor.shape for tensor in tensors_of(outputs)], counter.get_total_flops()))
    assert found[0] == found[1]
    assert found[0][1] > 0


@pytest.mark.parametrize("model_class", MODELS)
def test_on_the_meta_device_a_model_is_trained(model_class: Any) -> None:
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.5}
    for number, name in enumerate(VARIATIONS):
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
