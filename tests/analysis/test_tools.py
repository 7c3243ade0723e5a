"""Third-party tools on our models: captum, pytorch-grad-cam, timm's and torchvision's feature extraction.

Legend: `B` batch, `L` tokens, `D` hidden size.
"""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients, LayerGradCam, Occlusion, Saliency
from pytorch_grad_cam import EigenCAM, GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from timm.models import FeatureHooks
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.analysis import grad_cam, grad_cam_layer, gradient_rollout, integrated_gradients, tokens_to_grid
from tests.conftest import randomize_

GRID = (5, 4)


class Logits(nn.Module):
    """A wrapper for tools that expect a model to return a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values).logits


@pytest.fixture(params=["cls", "mean"])
def model(request: pytest.FixtureRequest) -> Any:
    config = PlainViTConfig(
        hidden_size=20, num_hidden_layers=3, num_attention_heads=5, intermediate_size=23, image_size=(12, 20),
        patch_size=(3, 4), num_labels=7, num_register_tokens=2, pooling=request.param,
    )  # fmt: skip
    return randomize_(PlainViTForImageClassification(config)).eval()


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(2, 3, 15, 16)


def test_captum_explains_pixels(model: Any, pixels: torch.Tensor) -> None:
    attributions, gap = IntegratedGradients(Logits(model)).attribute(
        pixels, target=3, n_steps=20, return_convergence_delta=True
    )
    np.testing.assert_allclose(integrated_gradients(model, pixels, target=3, steps=20), attributions, atol=1e-5)
    assert gap.abs().max() < 0.05
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).logits[:, 3].sum(), leaf)
    torch.testing.assert_close(Saliency(Logits(model)).attribute(pixels, target=3), gradient.abs())
    window, steps = (3, 3, 4), (3, 3, 4)
    occlusion = Occlusion(Logits(model)).attribute(pixels, window, target=3, strides=steps)
    hidden = pixels.clone()
    hidden[:, :, 3:6, 8:12] = 0  # the patch in row 1, column 2
    with torch.no_grad():
        change = model(pixels).logits[:, 3] - model(hidden).logits[:, 3]
    torch.testing.assert_close(occlusion[:, 0, 4, 9], change, rtol=1e-4, atol=1e-5)


def test_captum_explains_layers(model: Any, pixels: torch.Tensor) -> None:
    # captum averages the gradient over all axes after the second one: here the features.
    attributions = LayerGradCam(Logits(model), grad_cam_layer(model)).attribute(pixels, target=3)
    assert attributions.shape == (2, 1, 20)


def test_pytorch_grad_cam_gives_the_same_maps(model: Any, pixels: torch.Tensor) -> None:
    targets = [ClassifierOutputTarget(6), ClassifierOutputTarget(2)]
    tool = GradCAM(Logits(model), [grad_cam_layer(model)], reshape_transform=tokens_to_grid(model, pixels))
    theirs = tool(pixels, targets)
    tool.activations_and_grads.release()
    assert_same_maps(theirs, grad_cam(model, pixels, target=[6, 2]))
    np.testing.assert_array_equal(grad_cam(model, pixels, targets), grad_cam(model, pixels, [6, 2]))
    assert EigenCAM(Logits(model), [grad_cam_layer(model)], tokens_to_grid(model, pixels))(pixels, None).shape == (
        2,
        15,
        16,
    )


def assert_same_maps(theirs: np.ndarray, ours: np.ndarray) -> None:
    """Compare with maps of pytorch-grad-cam, which are enlarged linearly and scaled from 0 to 1 each."""
    enlarged = torch.nn.functional.interpolate(torch.from_numpy(ours)[:, None], (15, 16), mode="bilinear")[:, 0]
    lowest, highest = enlarged.amin(dim=(1, 2), keepdim=True), enlarged.amax(dim=(1, 2), keepdim=True)
    assert theirs.shape == (2, 15, 16)
    assert (highest > 0.001).all()
    # They keep the highest value from being 0 by adding 1e-7 to it, before and after enlarging.
    np.testing.assert_allclose(theirs, (enlarged - lowest) / (highest - lowest), atol=2e-4)


class SimilarityToConcept:
    """The target of pytorch-grad-cam's tutorial on embeddings."""

    def __init__(self, features: torch.Tensor) -> None:
        self.features = features

    def __call__(self, model_output: torch.Tensor) -> torch.Tensor:
        return torch.nn.CosineSimilarity(dim=0)(model_output, self.features)


def test_functions_of_pooled_features_explain_models_without_a_classifier(model: Any, pixels: torch.Tensor) -> None:
    vit, vectors = PlainViTModel(model.config).eval(), torch.randn(2, 20)
    vit.load_state_dict(model.vit.state_dict())
    targets = [SimilarityToConcept(vector) for vector in vectors]

    class Pooled(Logits):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.model(pixel_values).pooler_output

    tool = GradCAM(Pooled(vit), [grad_cam_layer(vit)], reshape_transform=tokens_to_grid(vit, pixels))
    theirs = tool(pixels, targets)
    tool.activations_and_grads.release()
    assert_same_maps(theirs, grad_cam(vit, pixels, targets))

    # A classifier whose only class is the product with a vector has the same gradients as the function.
    one, vector = copy.deepcopy(model), vectors[0]
    one.reset_classifier(1)
    with torch.no_grad():
        one.classifier.weight.copy_(vector[None])
    for function in (grad_cam, gradient_rollout, partial(integrated_gradients, steps=60)):
        expected = function(one, pixels, 0)
        np.testing.assert_allclose(
            function(vit, pixels, lambda pooled: pooled @ vector), expected, rtol=1e-4, atol=1e-7
        )


def test_timm_hooks_collect_features_of_every_layer(model: Any, pixels: torch.Tensor) -> None:
    wanted = [{"module": f"vit.layers.{i}", "hook_type": "forward"} for i in range(3)]
    hooks = FeatureHooks(wanted, model.named_modules(), out_map=["first", "second", "third"])
    with torch.no_grad():
        expected = model(pixels, output_hidden_states=True).hidden_states
    features = hooks.get_output(pixels.device)
    assert list(features) == ["first", "second", "third"]
    torch.testing.assert_close(features["first"], expected[1], rtol=0, atol=0)
    torch.testing.assert_close(features["second"], expected[2], rtol=0, atol=0)
    assert tokens_to_grid(model, pixels)(features["third"]).shape == (2, 20, *GRID)


def test_torchvision_cuts_a_model_at_named_layers(model: Any, pixels: torch.Tensor) -> None:
    # torch.fx follows the layers themselves; the models around them take what transformers passes by keyword.
    mlp = model.vit.layers[1].mlp
    states = torch.randn(2, 23, 20)
    with torch.no_grad():
        narrow = create_feature_extractor(mlp, {"activation": "activation"})(states)["activation"]
        torch.testing.assert_close(narrow, mlp.activation(mlp.fc1(states)), rtol=0, atol=0)
