"""Tokens of single blocks and new classifiers, by timm's and DINOv2's names and with timm's results."""

from collections.abc import Mapping
from typing import Any, assert_type

import pytest
import timm
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageClassification
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput

from plain_vit import PlainViTBackbone, PlainViTForImageClassification, PlainViTForMaskedImageModeling, PlainViTModel
from plain_vit.conversion import from_module
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, pixels, tiny_config

SIZES: dict[str, Any] = {"depth": 3, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "registers": ("vit_base_patch16_224", {"reg_tokens": 2}),
    "distilled": ("deit_base_distilled_patch16_224", {}),
    "norm after pooling": ("vit_base_patch16_224", {"class_token": False, "global_pool": "avg", "fc_norm": True}),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a model of timm and its conversion."""
    name, arguments = MODELS[request.param]
    theirs = randomize_(timm.create_model(name, pretrained=False, **SIZES, **arguments)).eval()
    return theirs, from_module(theirs)


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    elif isinstance(theirs, Mapping):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_equal(ours[name], theirs[name])
    else:
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"indices": 2, "norm": True},
        {"indices": [2, -3], "return_prefix_tokens": True, "output_fmt": "NLC"},
        {"indices": [1], "intermediates_only": True, "stop_early": True},
        {"indices": [0, 1], "stop_early": True},
        {"output_dict": True, "return_prefix_tokens": True},
        {"output_dict": True, "intermediates_only": True},
    ],
    ids=str,
)
def test_intermediates_are_timms(pair: tuple[Any, Any], arguments: dict[str, Any]) -> None:
    theirs, ours = pair
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_equal(ours.forward_intermediates(images, **arguments), theirs.forward_intermediates(images, **arguments))


def test_features_and_head_are_timms(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features, expected = ours.forward_features(images), theirs.forward_features(images)
        assert_equal(features, expected)
        for pre_logits in (False, True):
            assert_equal(ours.forward_head(features, pre_logits), theirs.forward_head(expected, pre_logits=pre_logits))
        assert torch.equal(ours.vit.forward_head(features), ours.vit(images).pooler_output)


@pytest.mark.parametrize("n", [1, 2, [0, 2]])
def test_intermediate_layers_are_timms_with_the_default_norm_of_dinov2(pair: tuple[Any, Any], n: Any) -> None:
    theirs, ours = pair
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for arguments in ({"norm": False}, {"reshape": True, "norm": True}):
            expected = theirs.get_intermediate_layers(images, n, **arguments)
            assert_equal(ours.get_intermediate_layers(images, n, **arguments), tuple(expected))
        assert_equal(
            ours.get_intermediate_layers(images, n), tuple(theirs.get_intermediate_layers(images, n, norm=True))
        )
        if ours.config.use_class_token:
            found = ours.get_intermediate_layers(images, n, return_class_token=True)
            expected = theirs.get_intermediate_layers(images, n, return_prefix_tokens=True, norm=True)
            assert_equal([list(one) for one in found], [[patches, prefix[:, 0]] for patches, prefix in expected])


def test_blocks_after_the_last_one_asked_for_are_skipped(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    called = []
    handles = []
    for number in range(3):
        layer = ours.vit.get_submodule(f"layers.{number}")
        handles.append(layer.register_forward_hook(lambda *_, number=number: called.append(number)))
    with torch.no_grad():
        ours.get_intermediate_layers(torch.randn(1, 3, 32, 32), [1])
    for handle in handles:
        handle.remove()
    assert called == [0, 1]


def test_feature_info_is_timms_but_for_the_names_of_blocks(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    renamed = [{**one, "module": one["module"].replace("blocks.", "layers.")} for one in theirs.feature_info]
    assert ours.feature_info == renamed
    assert all(ours.vit.get_submodule(one["module"]) is not None for one in ours.feature_info)


@pytest.mark.parametrize("name", ["registers_last", "relative_table", "rotary_mixed", "resnet"])
@pytest.mark.parametrize("kind", [PlainViTModel, PlainViTBackbone, PlainViTForMaskedImageModeling])
def test_every_model_gives_the_hidden_states_that_transformers_gives(kind: Any, name: str) -> None:
    model: Any = randomize_(kind(tiny_config(**VARIATIONS[name], apply_layernorm=True))).eval()
    height, width = model.config.image_shape
    images = pixels(height=height, width=width)
    with torch.no_grad():
        states = model(images, output_hidden_states=True).hidden_states
        found = model.forward_intermediates(images, intermediates_only=True)
    for one, other in zip(found, states[1:], strict=True):
        assert torch.equal(one, model.tokens_to_map(other, height, width))


def test_blocks_and_tokens_that_do_not_exist_are_refused() -> None:
    model = PlainViTModel(tiny_config(use_class_token=False, pooling="mean")).eval()
    for indices in (0, 4, -1, [3], [-4], []):
        with pytest.raises(ValueError, match="expected a count up to 3, or numbers below 3"):
            model.forward_intermediates(pixels(), indices)
    with pytest.raises(ValueError, match="has no class token"):
        model.get_intermediate_layers(pixels(), return_class_token=True)
    with pytest.raises(ValueError, match='expected "NCHW" or "NLC"'):
        model.forward_intermediates(pixels(), output_fmt="NHWC")


@pytest.mark.parametrize("pooling", [None, "mean", "map", "cls_mean"])
def test_a_new_classifier_trains_and_is_saved(pooling: str | None, tmp_path: Any) -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(id2label=dict(enumerate("abcdefg")))))
    before = {name: tensor.clone() for name, tensor in model.vit.layers.state_dict().items()}
    model.reset_classifier(4, pooling)
    assert model.get_classifier().out_features == model.config.num_labels == 4
    assert model.config.id2label == {number: f"LABEL_{number}" for number in range(4)}
    model(pixels(), labels=torch.tensor([0, 3])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.get_classifier().parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.vit.layers.state_dict().items())
    model.save_pretrained(tmp_path)
    again, info = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(again(pixels()).logits, model.eval()(pixels()).logits)


def test_the_names_of_labels_stay_if_their_number_does() -> None:
    model = (
        PlainViTForImageClassification(tiny_config(id2label=dict(enumerate("abc")), num_labels=3))
        .to(torch.bfloat16)
        .eval()
    )
    model.reset_classifier(3)
    assert model.config.id2label == dict(enumerate("abc"))
    assert model.classifier.weight.dtype == torch.bfloat16
    assert not model.classifier.training
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), torch.nn.Identity)


def test_the_problem_of_the_old_labels_goes_with_them_unless_it_was_chosen() -> None:
    model = randomize_(PlainViTForImageClassification(tiny_config(num_labels=7)))
    model(pixels(), labels=torch.tensor([6, 2]))
    assert model.config.problem_type == "single_label_classification"
    model.reset_classifier(7)
    assert model.config.problem_type == "single_label_classification"
    model.reset_classifier(4)
    labels = torch.tensor([[1.0, 0, 1, 1], [0, 0, 1, 0]])
    outputs = model(pixels(), labels=labels)
    torch.testing.assert_close(outputs.loss, F.binary_cross_entropy_with_logits(outputs.logits, labels))
    assert model.config.problem_type == "multi_label_classification"
    model.config.problem_type = "regression"
    model.reset_classifier(1)
    assert model.config.problem_type == "regression"


def test_an_impossible_pooling_leaves_the_model_as_it_is() -> None:
    model = PlainViTForImageClassification(tiny_config(use_class_token=False, pooling="mean", num_labels=3))
    classifier = model.classifier
    with pytest.raises(ValueError, match="set use_class_token=True"):
        model.reset_classifier(5, "cls")
    assert (model.config.num_labels, model.config.pooling, model.classifier) == (3, "mean", classifier)


def test_editors_know_the_types_of_models_and_outputs(tmp_path: Any) -> None:
    """`make quality` checks the types, and running them that they are true."""
    PlainViTForImageClassification(tiny_config()).save_pretrained(tmp_path)
    model = assert_type(PlainViTForImageClassification.from_pretrained(tmp_path), PlainViTForImageClassification)
    outputs = assert_type(model(pixels()), ImageClassifierOutput)
    tokens = assert_type(assert_type(model.vit, PlainViTModel)(pixels()), BaseModelOutputWithPooling)
    maps = assert_type(PlainViTBackbone.from_pretrained(tmp_path)(pixels()), BackboneOutput)
    assert [type(each) for each in (outputs, tokens, maps)] == [
        ImageClassifierOutput, BaseModelOutputWithPooling, BackboneOutput
    ]  # fmt: skip
