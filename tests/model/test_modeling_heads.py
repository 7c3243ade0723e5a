"""The heads (classifier with its losses, masked images, backbone), and what analysis relies on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captum.attr import IntegratedGradients
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    AutoBackbone,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    VitPoseConfig,
    VitPoseForPoseEstimation,
)
from vit_pytorch.mpp import MPPLoss

from plain_vit import (
    PlainViTBackbone,
    PlainViTConfig,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTModel,
)
from plain_vit.analysis import tokens_to_grid
from plain_vit.inference.adapters import LogitsOnly
from tests.conftest import randomize_
from tests.releases import not_with_transformers
from tests.tiny import SIZES, VARIATIONS, difference, pixels, tiny_config

# Sums are taken in a different order than in the source.
REORDERED = 1e-5


def randomized(model: nn.Module) -> Any:
    """Randomise every parameter of the model."""
    return randomize_(model).eval()


# Classifier


def test_with_a_distillation_token_the_logits_are_the_mean_of_two_classifiers() -> None:
    model = randomized(PlainViTForImageClassification(tiny_config(use_distillation_token=True)))
    tokens = model.vit(pixels()).last_hidden_state
    expected = (model.classifier(tokens[:, 0]) + model.distillation_classifier(tokens[:, 1])) / 2
    assert torch.equal(model(pixels()).logits, expected)


def test_without_labels_there_is_no_classifier() -> None:
    model = randomized(PlainViTForImageClassification(tiny_config(num_labels=0)))
    assert torch.equal(model(pixels()).logits, model.vit(pixels()).pooler_output)


@pytest.mark.parametrize(
    "labels, expected",
    [
        (torch.tensor([6, 2]), lambda logits, labels: F.cross_entropy(logits, labels)),
        (torch.tensor([6, -100]), lambda logits, labels: F.cross_entropy(logits[:1], labels[:1])),
        (torch.rand(2, 7).round(), lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels)),
    ],
    ids=["classes", "a class missing", "several labels"],
)
def test_the_loss_follows_the_labels(labels: torch.Tensor, expected: Any) -> None:
    model = randomized(PlainViTForImageClassification(tiny_config()))
    outputs = model(pixels(), labels=labels)
    assert difference(outputs.loss, expected(outputs.logits, labels)) < REORDERED


@pytest.mark.parametrize("mode", ["train", "eval", "distilled"])
@pytest.mark.parametrize(
    "num_labels, labels",
    [
        (7, torch.tensor([6, 2])), (7, torch.rand(2, 7).round()), (7, torch.eye(7, dtype=torch.float64)[3:5]),
        (1, torch.rand(2, 1)), (1, torch.tensor([3, -4])),
    ],
)  # fmt: skip
def test_the_config_records_the_problem_that_the_labels_show_as_the_stock_class_does(
    num_labels: int, labels: torch.Tensor, mode: str
) -> None:
    square = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": num_labels}
    stock = ViTForImageClassification(ViTConfig(**square))
    ours = PlainViTForImageClassification(tiny_config(**square, use_distillation_token=mode == "distilled"))
    ours.train(mode == "train")
    stock(pixels(height=32, width=32), labels=labels if labels.ndim < 2 and num_labels > 1 else labels.float())
    assert ours.config.problem_type is None
    ours(pixels(height=32, width=32), labels=labels)
    assert ours.config.problem_type == stock.config.problem_type is not None


def test_labels_that_fit_no_loss_leave_the_config_as_it_is() -> None:
    model = PlainViTForImageClassification(tiny_config())
    with pytest.raises(ValueError, match="size"):
        model(pixels(), labels=torch.tensor([1.0, 0.0]))
    model(pixels(), labels=torch.tensor([1, 0]))
    assert model.config.problem_type == "single_label_classification"


@pytest.mark.parametrize("num_labels, shape", [(1, (2,)), (1, (2, 1)), (7, (2, 7))])
def test_a_regression_takes_targets_of_the_shape_they_have(num_labels: int, shape: tuple[int, ...]) -> None:
    problem = None if num_labels == 1 else "regression"
    model = randomized(PlainViTForImageClassification(tiny_config(num_labels=num_labels, problem_type=problem)))
    targets = torch.randn(shape)
    outputs = model(pixels(), labels=targets)
    assert difference(outputs.loss, ((outputs.logits.view(shape) - targets) ** 2).mean()) < REORDERED


@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification", "regression"])
def test_accumulated_gradients_are_those_of_one_large_batch(problem_type: str) -> None:
    model = randomized(PlainViTForImageClassification(tiny_config(problem_type=problem_type)))
    images = pixels(batch=4)
    labels = torch.tensor([1, 6, -100, 3]) if problem_type.startswith("single") else torch.rand(4, 7).round()
    model(images, labels=labels).loss.backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    items = labels.ne(-100).sum()
    for part in (slice(0, 1), slice(1, 4)):
        model(images[part], labels=labels[part], num_items_in_batch=items).loss.backward()
    for name, parameter in model.named_parameters():
        if whole[name].abs().max() > 1e-6:  # key biases have no effect: their gradients are rounding errors
            assert difference(parameter.grad, whole[name]) < REORDERED, name


def test_a_hook_of_every_module_sees_every_token_of_the_last_block() -> None:
    model, seen = PlainViTForImageClassification(tiny_config()).train(), {}
    with register_module_forward_hook(lambda module, _, outputs: seen.update({module: outputs})):
        model(pixels())
    assert seen[model.vit.layers[-1]].shape[1] == seen[model.vit.layernorm].shape[1] == 13


@pytest.mark.parametrize("label", [7, -1, 1000])
def test_labels_that_are_no_classes_are_refused(label: int) -> None:
    model = PlainViTForImageClassification(tiny_config())
    with pytest.raises(ValueError, match=rf"labels hold \[{label}\]: expected classes from 0 to 6.*num_labels"):
        model(pixels(), labels=torch.tensor([0, label]))


def test_a_loss_of_one_s_own_replaces_ours() -> None:
    model = randomized(PlainViTForImageClassification(tiny_config()))
    model.loss_function = lambda labels, logits, config, **kwargs: logits.sum()
    outputs = model(pixels(), labels=torch.tensor([0, 1]))
    assert outputs.loss == outputs.logits.sum()


# Masked images


@not_with_transformers(5, 8, "other parameter names")
def test_masked_pixels_are_those_of_the_stock_vit() -> None:
    square = {**SIZES, "image_size": 32, "patch_size": 8}  # the stock model requires squares
    stock = ViTForMaskedImageModeling(ViTConfig(**square, encoder_stride=8, layer_norm_eps=1e-3))
    randomize_(stock).eval()
    weights = stock.state_dict()
    table = weights.pop("vit.embeddings.position_embeddings")
    weights["vit.embeddings.position_embeddings.weight"] = table[0]
    weights["decoder.projection.weight"] = weights.pop("decoder.0.weight")[:, :, 0, 0]
    weights["decoder.projection.bias"] = weights.pop("decoder.0.bias")
    config = tiny_config(image_size=32, patch_size=8, layer_norm_eps=1e-3, use_mask_token=True)
    ours = PlainViTForMaskedImageModeling(config).eval()
    ours.load_state_dict(weights)
    images, mask = pixels(height=32, width=32), torch.rand(2, 16) > 0.5
    found, expected = ours(images, mask), stock(images, mask)
    assert difference(found.reconstruction, expected.reconstruction) < REORDERED  # a product, theirs is a convolution
    assert difference(found.loss, expected.loss) < REORDERED  # theirs divides by 1e-5 more


@pytest.mark.parametrize("name", ["mask_token", "registers", "registers_last", "map", "clip"])
@pytest.mark.parametrize("target", ["pixels", "mean_color"])
@pytest.mark.parametrize("size", [(24, 56), (40, 28)])
def test_a_masked_image_model_predicts_images_of_any_size(name: str, target: str, size: tuple[int, int]) -> None:
    config = tiny_config(**{**VARIATIONS[name], "use_mask_token": True, "reconstruction_target": target})
    model = randomized(PlainViTForMaskedImageModeling(config))
    grid = (size[0] // 8, size[1] // 14)
    outputs = model(pixels(2, *size), torch.rand(2, *grid) > 0.5)
    assert outputs.reconstruction.shape == (2, 3, *size)
    assert (outputs.color_logits is not None) == (target == "mean_color")
    outputs.loss.backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert unused == set()  # DistributedDataParallel requires this
    assert model(pixels(2, *size)).loss is None


@pytest.mark.parametrize("target", ["pixels", "mean_color"])
def test_the_loss_is_over_the_hidden_patches_alone(target: str) -> None:
    config = tiny_config(use_mask_token=True, reconstruction_target=target)
    model = randomized(PlainViTForMaskedImageModeling(config))
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[0, 1, 2] = mask[1, 2, 0] = True
    images = pixels()
    loss = model(images, mask).loss
    hidden, seen = images.clone(), images.clone()
    hidden[0, :, 8:16, 28:42] += 4
    seen[0, :, :8, :14] += 4
    # Masked pixels affect the loss only as its target, other pixels only as input.
    reconstruction = model(images, mask).reconstruction
    assert torch.equal(model(hidden, mask).reconstruction, reconstruction)
    assert not torch.equal(model(hidden, mask).loss, loss)
    assert not torch.equal(model(seen, mask).reconstruction, reconstruction)
    if target == "pixels":
        parts = [(0, slice(8, 16), slice(28, 42)), (1, slice(16, 24), slice(0, 14))]
        errors = [(images[i, :, r, c] - reconstruction[i, :, r, c]).abs().mean() for i, r, c in parts]
        assert difference(loss, torch.stack(errors).mean()) < REORDERED
    assert model(images, torch.zeros(2, 12, dtype=torch.bool)).loss == 0


def test_mean_colors_and_their_loss_are_those_of_vit_pytorch() -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    config = tiny_config(
        image_size=(24, 56), patch_size=8, use_mask_token=True, reconstruction_target="mean_color",
        image_mean=mean, image_std=std,
    )  # fmt: skip
    model = randomized(PlainViTForMaskedImageModeling(config))
    peer = MPPLoss(patch_size=8, channels=3, output_channel_bits=3, max_pixel_val=1.0, mean=mean, std=std)
    levels = torch.rand(2, 3, 24, 56) * torch.rand(2, 3, 3, 7).repeat_interleave(8, 2).repeat_interleave(8, 3) * 2
    images = (levels.clamp(max=1) - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    mask = torch.rand(2, 21) > 0.5
    outputs = model(images, mask)
    assert difference(outputs.loss, peer(outputs.color_logits, images, mask)) < REORDERED
    assert len(model.decoder.colors(images).unique()) > 20


def test_a_painted_color_is_read_as_itself() -> None:
    config = tiny_config(use_mask_token=True, reconstruction_target="mean_color", image_mean=[0.2, 0.3, 0.4])
    decoder = randomized(PlainViTForMaskedImageModeling(config)).decoder
    colors = torch.randint(8**3, (2, 3, 4))
    image = decoder.paint(colors, torch.zeros(()))
    assert image.shape == (2, 3, 24, 56)
    assert torch.equal(decoder.colors(image), colors)


@pytest.mark.parametrize(
    "fields, remedy",
    [
        ({"patch_dropout_prob": 0.5}, "set patch_dropout_prob=0"),
        ({"drop_partial_patches": True}, "set drop_partial_patches=False"),
    ],
)
def test_a_masked_image_model_needs_every_patch(fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        PlainViTForMaskedImageModeling(tiny_config(**fields))


def test_a_masked_image_model_has_a_mask_token_and_its_own_config_says_so(tmp_path: Any) -> None:
    config = tiny_config()
    model = randomized(PlainViTForMaskedImageModeling(config))
    assert not config.use_mask_token
    assert model.config.use_mask_token
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))
    model.save_pretrained(tmp_path)
    assert PlainViTConfig.from_pretrained(tmp_path).use_mask_token
    mask = torch.arange(24).view(2, 12) % 3 == 0
    opened = AutoModelForMaskedImageModeling.from_pretrained(tmp_path)
    assert torch.equal(opened(pixels(), mask).reconstruction, model(pixels(), mask).reconstruction)


@pytest.mark.parametrize("auto_class", [AutoModelForMaskedImageModeling, PlainViTForMaskedImageModeling])
def test_a_classifier_s_checkpoint_starts_a_masked_image_model(auto_class: Any, tmp_path: Any) -> None:
    classifier = randomized(PlainViTForImageClassification(tiny_config()))
    classifier.save_pretrained(tmp_path)
    model, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {
        "vit.embeddings.mask_token", "decoder.projection.weight", "decoder.projection.bias",
    }  # fmt: skip
    assert info["unexpected_keys"] == {"classifier.weight", "classifier.bias"}
    assert not info["mismatched_keys"]
    assert model.config.use_mask_token
    assert (model.vit.embeddings.mask_token == 0).all()  # the same in every initialization
    assert model.decoder.projection.weight.std() > 0
    assert torch.equal(model.vit(pixels()).last_hidden_state, classifier.vit(pixels()).last_hidden_state)


def test_a_masked_image_model_s_checkpoint_starts_a_classifier(tmp_path: Any) -> None:
    masked = randomized(PlainViTForMaskedImageModeling(tiny_config(pooling="map")))
    masked.save_pretrained(tmp_path)
    classifier, info = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    pooler = {f"vit.pooler.{name}" for name in classifier.vit.pooler.state_dict()}
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"} | pooler
    assert info["unexpected_keys"] == {"decoder.projection.weight", "decoder.projection.bias"}
    assert torch.equal(classifier.vit(pixels()).last_hidden_state, masked.vit(pixels()).last_hidden_state)


# Backbone


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_a_backbone_s_maps_are_the_model_s_hidden_states(name: str) -> None:
    config = tiny_config(**VARIATIONS[name], out_indices=[0, 2, 3])
    model = randomized(PlainViTModel(config))
    backbone = AutoBackbone.from_config(config)
    assert isinstance(backbone, PlainViTBackbone)
    backbone.load_state_dict({key: value for key, value in model.state_dict().items() if "pool" not in key and
                              "representation" not in key})  # fmt: skip
    outputs = backbone.eval()(pixels(), output_hidden_states=True, output_attentions=True)
    states = model(pixels(), output_hidden_states=True, output_attentions=True).hidden_states
    assert backbone.channels == [40, 40, 40]
    backbone.out_indices = [0, -2, -1]
    for chosen, feature_map in zip(
        backbone(pixels(), output_attentions=True).feature_maps, outputs.feature_maps, strict=True
    ):
        assert torch.equal(chosen, feature_map)
    assert len(outputs.hidden_states) == 4
    assert len(outputs.attentions) == 3 * config.num_branches
    for feature_map, index in zip(outputs.feature_maps, [0, 2, 3], strict=True):
        assert feature_map.shape == (2, 40, *config.grid_size)
        assert torch.equal(feature_map, model.tokens_to_map(model.layernorm(states[index]), 24, 56))
    backbone(pixels(2, 40, 28)).feature_maps[0].sum()


def test_a_backbone_opens_a_classifier_s_folder(tmp_path: Any) -> None:
    classifier = randomized(PlainViTForImageClassification(tiny_config()))
    classifier.save_pretrained(tmp_path)
    backbone: Any = PlainViTBackbone.from_pretrained(tmp_path, out_features=["stage1", "stage3"])
    first, last = backbone(pixels(2, 40, 28)).feature_maps
    assert first.shape == last.shape == (2, 40, 5, 2)
    tokens = classifier.vit(pixels(2, 40, 28)).last_hidden_state
    assert torch.equal(last, classifier.tokens_to_map(tokens, 40, 28))


@pytest.mark.parametrize("norm, reshape", [(False, True), (True, False)])
def test_a_backbone_gives_raw_features_or_tokens_where_asked(norm: bool, reshape: bool) -> None:
    config = tiny_config(apply_layernorm=norm, reshape_hidden_states=reshape)
    backbone = randomized(PlainViTBackbone(config))
    outputs = backbone(pixels(), output_hidden_states=True)
    (found,) = outputs.feature_maps
    tokens = backbone.layernorm(outputs.hidden_states[-1]) if norm else outputs.hidden_states[-1]
    assert torch.equal(found, backbone.tokens_to_map(tokens, 24, 56) if reshape else tokens)
    assert any("layernorm." in name for name in backbone.state_dict() if "layers" not in name) == norm


def test_a_backbone_carries_a_segmentation_model_on_non_square_images() -> None:
    config = tiny_config(out_features=["stem", "stage1", "stage2", "stage3"])
    upernet = UperNetConfig(
        backbone_config=config, hidden_size=24, num_labels=5, auxiliary_in_channels=40, pool_scales=[1, 2]
    )
    model = UperNetForSemanticSegmentation(upernet).eval()
    assert isinstance(model.backbone, PlainViTBackbone)
    assert model(pixels(2, 40, 28)).logits.shape == (2, 5, 40, 28)


def test_a_backbone_needs_every_patch() -> None:
    with pytest.raises(ValueError, match="set patch_dropout_prob=0"):
        PlainViTBackbone(tiny_config(patch_dropout_prob=0.5))


# Attentions and hidden states for analysis


@pytest.mark.parametrize("name", ["plain", "deit", "registers", "registers_last", "sincos"])
def test_tokens_become_the_map_they_came_from(name: str) -> None:
    model = randomized(PlainViTModel(tiny_config(**VARIATIONS[name])))
    assert model.grid_size(40, 28) == (5, 2)
    tokens = torch.randn(2, model.num_prefix_tokens + 10 + 2 * (name == "registers_last"), 40)
    found = model.tokens_to_map(tokens, 40, 28)
    for row in range(5):
        for column in range(2):
            assert torch.equal(found[:, :, row, column], tokens[:, model.num_prefix_tokens + 2 * row + column])


def test_a_map_of_patches_shows_where_the_image_changed() -> None:
    model = randomized(PlainViTModel(tiny_config(num_register_tokens=2)))
    image, changed = pixels(1), pixels(1)
    changed[:, :, 8:16, 42:56] += 1
    before, after = (model.tokens_to_map(model.embeddings(x), 24, 56) for x in (image, changed))
    assert (before != after).any(1).nonzero().tolist() == [[0, 1, 3]]


def test_tokens_of_another_size_are_refused() -> None:
    model = PlainViTModel(tiny_config())
    with pytest.raises(ValueError, match=r"got 13 tokens, 12 of them patches.*24 x 28 pixels has 3 x 2"):
        model.tokens_to_map(torch.zeros(1, 13, 40), 24, 28)
    with pytest.raises(ValueError, match=r"use \(24, 28\)"):
        model.tokens_to_map(torch.zeros(1, 13, 40), 24, 30)


def test_captum_attributes_through_the_adapter() -> None:
    model = randomized(PlainViTForImageClassification(tiny_config()))
    adapter = LogitsOnly(model)
    assert torch.equal(adapter(pixels()), model(pixels()).logits)
    baseline = torch.zeros_like(pixels())
    attributions = IntegratedGradients(adapter).attribute(pixels(), baseline, target=3, n_steps=100)
    total = (adapter(pixels()) - adapter(baseline))[:, 3]
    assert attributions.sum((1, 2, 3)).tolist() == pytest.approx(total.tolist(), rel=0.05)


def test_grad_cam_draws_maps_of_non_square_images_through_the_adapters() -> None:
    model = randomized(PlainViTForImageClassification(tiny_config(num_register_tokens=2)))
    layer = model.vit.layers[-1].layernorm_before
    with GradCAM(LogitsOnly(model), [layer], reshape_transform=tokens_to_grid(model, pixels())) as cam:
        maps = cam(input_tensor=pixels(), targets=[ClassifierOutputTarget(2)] * 2)
    assert maps.shape == (2, 24, 56)
    assert maps.max() > 0
    with pytest.raises(ValueError, match=r"use \(24, 56\)"):
        tokens_to_grid(model, torch.zeros(1, 3, 25, 56))


@pytest.mark.parametrize("size", [(24, 56), (32, 32)])
def test_vitpose_takes_the_backbone_and_is_saved_with_it(size: tuple[int, int], tmp_path: Path) -> None:
    given = {"use_class_token": False, "pooling": "mean", "reshape_hidden_states": False, "out_indices": [2]}
    backbone = tiny_config(image_size=size, patch_size=(8, 8), **given)
    pose = VitPoseForPoseEstimation(VitPoseConfig(backbone_config=backbone, num_labels=5)).eval()
    randomize_(pose)
    pixel_values = pixels(height=size[0], width=size[1])
    found = pose(pixel_values).heatmaps
    assert found.shape == (2, 5, size[0] // 8 * 4, size[1] // 8 * 4)  # four times as fine as the patches
    pose.save_pretrained(tmp_path)
    assert torch.equal(VitPoseForPoseEstimation.from_pretrained(tmp_path)(pixel_values).heatmaps, found)


def test_sizes_of_equal_sides_are_one_number_where_features_are_laid_out() -> None:
    assert tiny_config(image_size=(32, 32), patch_size=(8, 8)).patch_size == 8
    assert tiny_config(image_size=32, patch_size=8, reshape_hidden_states=False).patch_size == 8
    assert tiny_config(image_size=[32, 32], patch_size=8, reshape_hidden_states=False).image_size == (32, 32)
