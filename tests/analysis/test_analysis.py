"""Results of `plain_vit.analysis`: known answers, every kind of model, no changed state.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `L` tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import pipeline

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel, prepare_for_inference
from plain_vit.analysis import (
    attention_distance,
    attention_maps,
    attention_rollout,
    average_over_images,
    confusion_matrix,
    displayable,
    grad_cam,
    grad_cam_layer,
    gradient_rollout,
    integrated_gradients,
    logit_lens,
    patch_distances,
    patch_features,
    patch_filters,
    pixel_batches,
    position_similarity,
    predict,
    probe_attention,
    relative_position_biases,
    resampled_positions,
    rollout,
    token_layout,
    token_norms,
)
from plain_vit.analysis.attention import SIGNED
from plain_vit.analysis.readout import NOT_READ_OUT, READOUTS
from plain_vit.errors import AnalysisError
from plain_vit.heads_plain_vit import POOLERS
from plain_vit.image_processing_plain_vit import PlainViTImageProcessor
from plain_vit.inference import prepared as inference
from plain_vit.inference.engine_models import EngineModel
from tests.conftest import randomize_
from tests.releases import HAS_REGRESSION

SIZES: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 23,
    "image_size": (12, 20), "patch_size": (3, 4), "num_labels": 7,
}  # fmt: skip
GRID, PATCH = (4, 5), (3, 4)  # at the native size
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled": {"use_distillation_token": True, "num_register_tokens": 2},
    "registers last": {"pooling": "mean", "use_class_token": False, "num_register_tokens": 3,
                       "register_tokens_last": True, "final_norm": "after_pooling"},
    "map": {"pooling": "map", "num_register_tokens": 1},
    "map of all tokens": {"pooling": "map", "pool_prefix_tokens": True},
    "query": {"pooling": "query", "num_register_tokens": 1},
    "class and mean": {"pooling": "cls_mean", "num_register_tokens": 1},
    "mean of all tokens": {"pooling": "mean", "pool_prefix_tokens": True, "final_norm": "both"},
    "max": {"pooling": "max", "representation_size": 11},
    "mean and max": {"pooling": "mean_max", "num_register_tokens": 1},
    "branches": {"block_type": "branches", "num_branches": 2},
    "parallel": {"block_type": "parallel"},
    "post norm": {"block_type": "post_norm"},
    "sin-cos, dense patches": {"position_embedding_type": "sincos_2d", "position_embedding_on_prefix": False,
                               "patch_projection": "linear", "patch_pre_norm": True},
    "rotary": {"rope_parameters": {"rope_type": "axial"}, "num_register_tokens": 1, "key_bias": False},
    "relative": {"relative_position_bias": {"type": "table"}, "pooling": "mean", "final_norm": "after_pooling"},
    "to the others": {"attention_type": "locality"},
    "one channel, norms, gains": {"num_channels": 1, "qk_norm": "norm", "layer_scale_init_value": 0.5},
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)
with_uniform_attention = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "to the others"])


def build(kind: str = "plain", **fields: Any) -> Any:
    """Return a randomised model in training mode with dropout, which analysis must handle."""
    dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "drop_path_rate": 0.3}
    config = PlainViTConfig(**{**SIZES, **dropout, **KINDS[kind], **fields})
    config._attn_implementation = "sdpa"
    model = PlainViTForImageClassification(config)
    randomize_(model)
    return model.train()


def images(model: Any, batch: int = 2, size: tuple[int, int] = (15, 16)) -> torch.Tensor:
    """Return images of a different size than the native one: a grid of (5, 4)."""
    return torch.randn(batch, model.config.num_channels, *size)


def attention_by_hand(model: Any, pixels: torch.Tensor) -> list[np.ndarray]:
    """Return the attention weights of each layer as the model outputs them, (B, heads, L, L)."""
    model.eval()
    with torch.no_grad():
        attentions = model(pixels, output_attentions=True).attentions
    model.train()
    branches = model.config.num_branches
    return [torch.cat(attentions[i : i + branches], dim=1).numpy() for i in range(0, len(attentions), branches)]


def shares_of_maxima(model: Any, pixels: torch.Tensor) -> np.ndarray:
    """Return the share of channels whose maximum is at each patch, (B, N)."""
    with torch.no_grad():
        tokens = model.eval().vit(pixels).last_hidden_state[:, token_layout(model, pixels).patches]
    model.train()
    return np.stack([np.bincount(of_image, minlength=tokens.shape[1]) for of_image in tokens.argmax(dim=1)]) / 20


def uniform(model: Any) -> Any:
    """Make every token attend to all tokens alike."""
    for name, parameter in model.named_parameters():
        if "k_proj" in name or "relative_position_bias" in name:
            nn.init.zeros_(parameter)
    return model


def looking_at(destination: Callable[[int], int]) -> Any:
    """Build a model in which every patch attends to exactly one patch: patch i to patch `destination(i)`.

    Positions are one-hot, tokens hold nothing else, and queries and keys are large permuted copies of them.
    """
    count = math.prod(GRID)
    config = PlainViTConfig(
        **{**SIZES, "hidden_size": count, "num_attention_heads": 1, "num_hidden_layers": 1, "use_class_token": False,
           "pooling": "mean", "qkv_bias": False, "patch_bias": False}
    )  # fmt: skip
    model: Any = PlainViTForImageClassification(config)
    attention, embeddings = model.vit.layers[0].attention, model.vit.embeddings
    with torch.no_grad():
        model.vit.layers[0].layernorm_before.bias.fill_(1 / count)  # restores LayerNorm's mean of a one-hot
        embeddings.patch_embeddings.projection.weight.zero_()
        embeddings.position_embeddings.weight.copy_(torch.eye(count))
        attention.k_proj.weight.copy_(100 * torch.eye(count))
        attention.q_proj.weight.zero_()
        for i in range(count):
            attention.q_proj.weight[destination(i), i] = 100
    return model


# Attention maps


@every_kind
def test_attention_maps_are_those_of_the_model_itself(kind: str) -> None:
    model = build(kind)
    pixels = images(model)
    layout = token_layout(model, pixels)
    by_hand = attention_by_hand(model, pixels)
    one = layout.patches.start + 14
    for query, rows in (((3, 2), slice(one, one + 1)), ("patches", layout.patches)):
        maps = attention_maps(model, pixels, query)
        for layer, weights in enumerate(by_hand):
            expected = weights[:, :, rows, layout.patches].mean(axis=2).reshape(*weights.shape[:2], 5, 4)
            # The order of sums depends on the processor: two float32 roundings of a number below one.
            np.testing.assert_allclose(maps[:, layer], expected, rtol=0, atol=2 * float(np.finfo(np.float32).eps))


def test_tokens_are_where_the_layout_says() -> None:
    model = build("distilled")
    layout = token_layout(model, images(model))
    assert layout.before == ("class", "distillation", "register 0", "register 1")
    assert layout.patches == slice(4, 24)
    assert layout.query("register 1") == slice(3, 4)
    behind = token_layout(build("registers last"), images(model))
    assert (behind.before, behind.patches) == ((), slice(0, 20))
    assert behind.query("register 2") == slice(22, 23)


def test_the_class_token_is_the_query_where_there_is_one() -> None:
    with_class, without = build(), build("registers last")
    pixels = images(with_class)
    np.testing.assert_array_equal(attention_maps(with_class, pixels), attention_maps(with_class, pixels, "class"))
    np.testing.assert_array_equal(attention_maps(without, pixels), attention_maps(without, pixels, "patches"))


def test_chosen_layers_and_heads_are_parts_of_the_whole() -> None:
    model = build()
    pixels = images(model)
    whole = attention_maps(model, pixels)
    assert whole.shape == (2, 3, 5, 5, 4)
    np.testing.assert_array_equal(attention_maps(model, pixels, layers=-1, heads=[4, 1]), whole[:, 2:, [4, 1]])


def test_the_probe_attends_as_the_pooling_pools() -> None:
    for kind in ("map", "map of all tokens"):
        model = build(kind)
        pixels, pooler = images(model), model.vit.pooler
        layout = token_layout(model, pixels)
        seen: dict[str, torch.Tensor] = {}
        pooler.v_proj.register_forward_hook(lambda *call, seen=seen: seen.update(value=call[2]))
        pooler.o_proj.register_forward_hook(lambda *call, seen=seen: seen.update(pooled=call[1][0]))
        weights = torch.from_numpy(probe_attention(model, pixels)).flatten(2)  # B heads N
        first = layout.patches.start if model.config.pool_prefix_tokens else 0
        values = seen["value"].unflatten(-1, (5, 4)).transpose(1, 2)[:, :, first:]  # B heads N d
        pooled = (weights[:, :, None] @ values)[:, :, 0].flatten(1)
        if not model.config.pool_prefix_tokens:
            torch.testing.assert_close(pooled, seen["pooled"][:, 0], rtol=0, atol=1e-6)
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))
        else:
            assert (weights.sum(-1) < 1).all()


# Rollout


@with_uniform_attention
def test_rollout_of_uniform_attention_is_known(kind: str) -> None:
    model = uniform(build(kind))
    pixels = images(model)
    tokens = attention_by_hand(model, pixels)[0].shape[-1]
    # Each layer's matrix is (1/L + identity) / 2. The product of three keeps 1/8 where it was and spreads the rest.
    spread = 7 / 8 / tokens
    if model.config.pooling == "cls":
        expected = np.full((2, 5, 4), spread)
    elif kind in ("mean of all tokens", "map of all tokens"):
        expected = np.full((2, 5, 4), spread + 1 / 8 / tokens)
    elif kind == "class and mean":  # half of what is read are the patches
        expected = np.full((2, 5, 4), spread + 1 / 8 / 20 / 2)
    elif "max" in kind:
        read = shares_of_maxima(model, pixels).reshape(2, 5, 4)
        expected = spread + 1 / 8 * (read if kind == "max" else (read + 1 / 20) / 2)
    else:
        expected = np.full((2, 5, 4), spread + 1 / 8 / 20)
    np.testing.assert_allclose(attention_rollout(model, pixels), expected, rtol=1e-6)


def test_rollout_multiplies_the_layers_in_their_order() -> None:
    first, second = torch.tensor([[[0.25, 0.75], [0.0, 1.0]]]), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    # (first + 1) / 2 = [[5, 3], [0, 8]] / 8 and (second + 1) / 2 = [[3, 1], [2, 2]] / 4; second @ first:
    expected = torch.tensor([[[15.0, 17.0], [10.0, 22.0]]]) / 32
    torch.testing.assert_close(rollout([first, second]), expected, rtol=0, atol=0)


def test_rollout_discards_the_smallest_weights_and_keeps_rows_whole() -> None:
    weights = torch.tensor([[[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.0, 0.5, 0.5]]])
    # Four of nine go: 0, 0.1, 0.2 and one of the two 0.3.
    result = rollout([weights], discard=4 / 9)
    np.testing.assert_allclose(result[0, 0], [1 / 1.7, 0, 0.7 / 1.7], rtol=1e-6)
    np.testing.assert_allclose(result[0, 2], [0, 0.5 / 2, 1.5 / 2], rtol=1e-6)
    np.testing.assert_allclose(result.sum(-1), np.ones((1, 3)), rtol=1e-6)


@pytest.mark.parametrize("fusion, fuse", [("mean", np.mean), ("max", np.max), ("min", np.min)])
def test_rollout_joins_heads_over_all_branches_of_a_layer(fusion: Any, fuse: Callable) -> None:
    model = build("branches")
    pixels = images(model)
    layers = [torch.from_numpy(fuse(weights, axis=1)) for weights in attention_by_hand(model, pixels)]
    expected = rollout(layers)[:, 0, 1:].reshape(2, 5, 4)
    np.testing.assert_allclose(attention_rollout(model, pixels, head_fusion=fusion), expected, rtol=1e-5)


def read_by_hand(kind: str, model: Any, pixels: torch.Tensor) -> np.ndarray:
    """Return the weight of each token (B, L) in the logits."""
    layout = token_layout(model, pixels)
    read = np.zeros((2, layout.num_patches + len(layout.before) + len(layout.after)))
    patches = read[:, layout.patches]
    if "map" in kind or kind == "query":
        patches[:] = probe_attention(model, pixels).mean(axis=1).reshape(2, -1)
        if kind == "map of all tokens":
            read[:, 0] = 1 - patches.sum(axis=1)  # the class token's share
    elif kind == "class and mean":
        read[:, 0], patches[:] = 1 / 2, 1 / 40
    elif "max" in kind:
        patches[:] = shares_of_maxima(model, pixels)
        patches[:] = patches if kind == "max" else (patches + 1 / 20) / 2
    elif kind == "mean of all tokens":
        read[:] = 1 / read.shape[1]
    elif model.config.pooling == "mean":
        patches[:] = 1 / 20
    else:
        read[:, : 2 if kind == "distilled" else 1] = 1 / 2 if kind == "distilled" else 1
    return read


@every_kind
def test_rollout_reads_what_the_logits_read(kind: str) -> None:
    model = build(kind)
    pixels = images(model)
    total = rollout([torch.from_numpy(weights.mean(axis=1)) for weights in attention_by_hand(model, pixels)]).numpy()
    expected = np.einsum("bl,blm->bm", read_by_hand(kind, model, pixels), total)[:, token_layout(model, pixels).patches]
    np.testing.assert_allclose(attention_rollout(model, pixels), expected.reshape(2, 5, 4), rtol=2e-5)


def test_every_pooling_is_read_out_or_refused_by_name() -> None:
    assert READOUTS.keys() | NOT_READ_OUT.keys() == POOLERS.keys()
    assert not READOUTS.keys() & NOT_READ_OUT.keys()


def test_equal_patches_share_their_maximum() -> None:
    model = build("max")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # all patches are the same
    np.testing.assert_allclose(
        attention_rollout(model, images(model)), np.full((2, 5, 4), 1 / 8 / 20 + 7 / 8 / 21), rtol=1e-6
    )


@pytest.mark.parametrize("use_class_token", [True, False])
def test_rollout_reads_what_pooling_by_refinement_reads(use_class_token: bool) -> None:
    model = build(pooling="prr", use_class_token=use_class_token).eval()
    pixels = images(model)
    layout = token_layout(model, pixels)
    with torch.no_grad():
        heads = model.vit(pixels).last_hidden_state.unflatten(-1, (5, 4)).transpose(1, 2)
        weights = F.scaled_dot_product_attention(heads, heads, torch.eye(heads.shape[2]).expand(2, 5, -1, -1))
    readout = weights.mean(dim=1)[:, 0] if use_class_token else weights.mean(dim=(1, 2))
    total = rollout([torch.from_numpy(weights.mean(axis=1)) for weights in attention_by_hand(model, pixels)])
    expected = (readout[:, None] @ total)[:, 0, layout.patches].reshape(2, 5, 4)
    np.testing.assert_allclose(attention_rollout(model, pixels), expected, rtol=2e-5)


@every_kind
def test_gradient_rollout_follows_its_equations(kind: str) -> None:
    model = build(kind, attn_implementation="eager").eval()
    pixels = images(model)
    outputs = model(pixels, output_attentions=True)
    gradients = torch.autograd.grad(outputs.logits[:, 3].sum(), outputs.attentions)
    identity = torch.eye(outputs.attentions[0].shape[-1], dtype=torch.float64)
    total, branches = identity.expand(2, -1, -1), model.config.num_branches
    products = [
        (each * gradient).clamp(min=0).double() for each, gradient in zip(outputs.attentions, gradients, strict=True)
    ]
    for i in range(0, len(products), branches):
        total = total + torch.cat(products[i : i + branches], dim=1).mean(dim=1) @ total
    read = torch.from_numpy(read_by_hand(kind, model, pixels))
    # Pooled patches count only through attention: the identity would add the same to all patches.
    expected = (read[:, None] @ (total - identity).detach())[:, 0, token_layout(model, pixels).patches]
    result = gradient_rollout(build(kind), pixels, target=3)
    np.testing.assert_allclose(result, expected.reshape(2, 5, 4), rtol=1e-5, atol=1e-7)


# Attention distance


def test_identity_attention_has_distance_zero_and_a_step_has_its_length() -> None:
    pixels = torch.randn(2, 3, 12, 20)
    assert attention_distance(looking_at(lambda i: i), pixels).tolist() == [[[0.0]], [[0.0]]]
    # Down one row, the last row to the first: three rows of five step 3 pixels, the last one 9.
    down = attention_distance(looking_at(lambda i: (i + 5) % 20), pixels)
    np.testing.assert_allclose(down, np.full((2, 1, 1), (3 * 3 + 9) / 4), rtol=1e-6)
    # One column to the right, the last column to the first: four columns step 4 pixels, the last one 16.
    right = attention_distance(looking_at(lambda i: i // 5 * 5 + (i + 1) % 5), pixels)
    np.testing.assert_allclose(right, np.full((2, 1, 1), (4 * 4 + 16) / 5), rtol=1e-6)


@with_uniform_attention
def test_uniform_attention_has_the_mean_distance_of_the_grid(kind: str) -> None:
    model = uniform(build(kind))
    distances = [
        math.hypot(3 * (a - c), 4 * (b - d)) for a in range(5) for b in range(4) for c in range(5) for d in range(4)
    ]
    heads = 10 if kind == "branches" else 5
    result = attention_distance(model, images(model))
    np.testing.assert_allclose(result, np.full((2, 3, heads), np.mean(distances)), rtol=1e-5)


def test_patch_distances_are_in_pixels_of_each_side() -> None:
    distances = patch_distances((2, 3), (5, 7))
    assert distances.shape == (6, 6)
    assert distances[0].tolist() == pytest.approx([0, 7, 14, 5, math.hypot(5, 7), math.hypot(5, 14)])


# Gradients


@every_kind
def test_grad_cam_follows_its_equations(kind: str) -> None:
    model = build(kind)
    pixels = images(model)
    maps = grad_cam(model, pixels, target=[6, 2])
    layout = token_layout(model, pixels)
    seen: list[torch.Tensor] = []
    hook = grad_cam_layer(model).register_forward_hook(lambda *call: seen.append(call[2]))
    logits = model.eval()(pixels).logits
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[0, 6] + logits[1, 2], seen)
    weights = gradient[:, layout.patches].mean(dim=1, keepdim=True)
    expected = (weights * seen[0][:, layout.patches]).sum(-1).relu().reshape(2, 5, 4).detach()
    assert expected.max() > 0
    np.testing.assert_allclose(maps, expected, rtol=1e-5, atol=1e-7)


@every_kind
def test_the_layer_of_grad_cam_still_has_gradients_in_every_patch(kind: str) -> None:
    model = build(kind).eval()
    pixels = images(model)
    layout = token_layout(model, pixels)
    seen: list[torch.Tensor] = []
    grad_cam_layer(model).register_forward_hook(lambda *call: seen.append(call[2]))
    (gradient,) = torch.autograd.grad(model(pixels).logits[:, 1].sum(), seen)
    assert (gradient[:, layout.patches].norm(dim=-1) > 0).all()


def test_integrated_gradients_of_a_linear_model_are_exact() -> None:
    # No layers, no norm, mean pooling: the score is a linear function, and its gradient is the same everywhere.
    model = build("registers last", num_hidden_layers=0, final_norm="none")
    pixels, baseline = images(model), images(model, batch=1)
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.eval()(leaf).logits[:, 4].sum(), leaf)
    result = integrated_gradients(model, pixels, target=4, baseline=baseline, steps=3)
    np.testing.assert_allclose(result, gradient * (pixels - baseline), rtol=1e-4, atol=1e-7)  # captum's step weights


@pytest.mark.parametrize("kind", ["distilled", "map", "post norm"])
def test_integrated_gradients_add_up_to_the_change_of_the_score(kind: str) -> None:
    model = build(kind).eval()
    pixels = images(model)
    result = integrated_gradients(model, pixels, target=[5, 0], steps=100)
    with torch.no_grad():
        change = model(pixels).logits - model(torch.zeros_like(pixels)).logits
    # The quadrature of a path of 100 steps.
    np.testing.assert_allclose(result.sum(axis=(1, 2, 3)), [change[0, 5], change[1, 0]], rtol=2e-2, atol=2e-2)


def test_integrated_gradients_of_too_few_steps_are_warned_about() -> None:
    model = build("parallel")
    with torch.no_grad():
        model.classifier.weight.mul_(1000)
    with pytest.warns(UserWarning, match=r"contributions of image \d sum to .*: use more steps"):
        integrated_gradients(model, images(model), steps=1)


# Layer by layer


@every_kind
def test_the_logit_lens_reads_a_layer_as_a_model_cut_off_there_would(kind: str) -> None:
    model = build(kind)
    pixels = images(model)
    logits = logit_lens(model, pixels)
    assert logits.shape == (2, 4, 7)
    for depth in range(4):
        cut = build(kind, num_hidden_layers=depth).eval()
        cut.load_state_dict({name: t for name, t in model.state_dict().items() if name in cut.state_dict()})
        with torch.no_grad():
            np.testing.assert_allclose(logits[:, depth], cut(pixels).logits, rtol=1e-5, atol=1e-6)


@every_kind
def test_token_norms_are_those_of_the_hidden_states(kind: str) -> None:
    model = build(kind)
    pixels = images(model)
    norms = token_norms(model, pixels)
    with torch.no_grad():
        states = model.eval()(pixels, output_hidden_states=True).hidden_states
    for layer in range(3):  # transformers' last hidden state may be after the final norm
        np.testing.assert_allclose(norms[:, layer], states[layer].norm(dim=-1), rtol=1e-6)
    assert norms.shape == (2, 4, states[0].shape[1])


# Filters and positions


@pytest.mark.parametrize("fields", [{}, {"patch_projection": "linear"}, {"num_channels": 5}, {"num_channels": 1}])
def test_patch_filters_are_the_directions_in_which_filters_were_made_to_differ(fields: dict[str, Any]) -> None:
    model = build(**fields)
    channels = model.config.num_channels
    projection = model.vit.embeddings.patch_embeddings.projection
    directions = torch.linalg.qr(torch.randn(channels * 12, 3))[0].T  # orthonormal, in the order channel, row, column
    strengths = torch.tensor([[5.0], [3.0], [1.0]])
    codes = torch.linalg.qr(torch.randn(20, 4) - torch.randn(20, 4).mean(0))[0][:, :3]
    codes = torch.linalg.qr(codes - codes.mean(0))[0].T  # orthonormal, each of mean 0
    filters = codes.T @ (strengths * directions) + 7.0
    if model.config.patch_projection == "linear":
        filters = filters.reshape(20, channels, 3, 4).permute(0, 2, 3, 1).flatten(1)
    projection.weight.data = filters.reshape(projection.weight.shape)
    result = patch_filters(model, count=3)
    assert result.components.shape == (3, channels, 3, 4)
    np.testing.assert_allclose(result.explained_variance, np.array([25, 9, 1]) / 35, rtol=1e-4)
    for component, direction in zip(result.components.reshape(3, -1), directions.numpy(), strict=True):
        sign = np.sign(direction[np.abs(direction).argmax()])
        np.testing.assert_allclose(component, sign * direction, atol=1e-4)


def test_no_more_components_come_than_a_patch_has_values() -> None:
    assert patch_filters(build("one channel, norms, gains")).components.shape == (12, 1, 3, 4)


def test_position_similarity_is_the_cosine_and_sets_prefix_tokens_apart() -> None:
    model = build("distilled")
    table = model.vit.embeddings.position_embeddings.weight.detach().numpy()
    result = position_similarity(model)
    assert (result.patches.shape, result.prefix.shape) == ((4, 5, 4, 5), (4, 4, 5))
    cosine = table @ table.T / np.outer(np.linalg.norm(table, axis=1), np.linalg.norm(table, axis=1))
    np.testing.assert_allclose(result.patches[2, 3], cosine[4 + 13, 4:].reshape(4, 5), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.prefix, cosine[:4, 4:].reshape(4, 4, 5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["table", "mlp"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_bias_is_what_its_distance_adds_to_the_score(kind: str, shared: bool) -> None:
    fields = {"relative_position_bias": {"type": kind, "shared": shared}, "block_type": "branches"}
    model = build(num_branches=2, **fields)
    biases = relative_position_biases(model, (5, 4))
    layers, heads = 2 * model.config.num_hidden_layers, model.config.num_attention_heads
    assert biases.shape == (1 if shared else layers, heads, 9, 7)
    assert model.training
    for module in model.modules():  # queries of zero leave the biases alone
        if hasattr(module, "q_proj"):
            nn.init.zeros_(module.q_proj.weight)
            nn.init.zeros_(module.q_proj.bias)
    weights = np.concatenate(attention_by_hand(model, images(model)), axis=1)[0].reshape(layers, heads, 21, 21)
    scores = np.log(weights[:, :, 1:, 1:]).reshape(layers, heads, 5, 4, 5, 4)
    found = np.broadcast_to(biases, (layers, heads, 9, 7))
    for (row, column), (down, across) in (((2, 1), (-2, 2)), ((4, 0), (-3, 1)), ((0, 3), (4, -3))):
        differences = scores[:, :, row, column, row + down, column + across] - scores[:, :, row, column, row, column]
        expected = found[:, :, 4 + down, 3 + across] - found[:, :, 4, 3]
        np.testing.assert_allclose(differences, expected, rtol=1e-4, atol=1e-5)


def test_computed_positions_have_a_similarity_on_any_grid() -> None:
    result = position_similarity(build("sin-cos, dense patches"), grid_size=(7, 2))
    assert (result.patches.shape, result.prefix.shape) == ((7, 2, 7, 2), (0, 7, 2))
    # Rows and columns are coded apart, in waves whose products depend on the distance alone.
    np.testing.assert_allclose(result.patches[1, 0, 4, 1], result.patches[5, 1, 2, 0], rtol=1e-5)
    np.testing.assert_allclose(np.einsum("abab->ab", result.patches), np.ones((7, 2)), rtol=1e-6)


def test_resampled_positions_are_those_that_the_model_adds() -> None:
    model = build()
    result = resampled_positions(model, (15, 16))
    assert (result.before.shape, result.after.shape) == ((4, 5, 20), (5, 4, 20))
    embeddings = model.vit.embeddings
    np.testing.assert_array_equal(result.before.reshape(20, 20), embeddings.position_embeddings.weight.detach()[1:])
    nn.init.zeros_(embeddings.patch_embeddings.projection.weight)
    nn.init.zeros_(embeddings.patch_embeddings.projection.bias)
    tokens = embeddings.eval()(images(model)).detach()[0, 1:]
    np.testing.assert_allclose(result.after.reshape(20, 20), tokens, rtol=1e-6)


def test_hybrids_count_distances_in_pixels_of_the_image_and_have_no_filters_over_pixels() -> None:
    model = build(resnet_stem={"depths": (1,)}, image_size=(16, 24), patch_size=(8, 12))
    pixels = images(model, size=(24, 36))
    layout = token_layout(model, pixels)
    assert (layout.grid_size, layout.patch_size) == ((3, 3), (8, 12))
    expected = np.full((2, 3, 5), patch_distances((3, 3), (8, 12)).mean())
    np.testing.assert_allclose(attention_distance(uniform(model), pixels), expected, rtol=1e-5)
    with pytest.raises(AnalysisError, match="no filters over pixels"):
        patch_filters(model, count=2)
    assert grad_cam(model, pixels).shape == (2, 3, 3)


# Data sets, results


def test_an_average_over_batches_is_the_average_over_images() -> None:
    model = build()
    pixels = images(model, batch=7)
    whole = attention_distance(model, pixels).mean(axis=0)
    batches = ({"pixel_values": batch} for batch in pixels.split(3))  # a stream: it can be read once
    np.testing.assert_allclose(
        average_over_images(attention_distance, model, batches, progress=False), whole, rtol=1e-6
    )
    part = average_over_images(attention_maps, model, pixels.split(3), limit=5, progress=False, layers=1, query=(0, 0))
    expected = attention_maps(model, pixels[:5], (0, 0), layers=1).mean(axis=0)
    np.testing.assert_allclose(part, expected, rtol=1e-5)


def test_an_average_reads_no_further_than_its_limit() -> None:
    model, read = build(), []

    def stream() -> Any:
        for i in range(10):
            read.append(i)
            yield images(model, batch=4)

    average_over_images(token_norms, model, stream(), limit=6, progress=False)
    assert read == [0, 1]


def test_an_average_leaves_out_what_is_not_a_number() -> None:
    def first_pixel(model: Any, pixel_values: torch.Tensor) -> np.ndarray:
        return pixel_values[:, 0, 0, :2].numpy()

    pixels = torch.tensor([[[[1.0, math.nan]]], [[[math.nan, math.nan]]], [[[3.0, math.nan]]]])
    result = average_over_images(first_pixel, build(), pixels.split(2), progress=False)
    np.testing.assert_array_equal(result, [2, math.nan])


def test_a_progress_bar_counts_images(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    average_over_images(token_norms, model, [images(model, batch=3)] * 2)
    assert "6 images" in capsys.readouterr().err


def test_pixel_batches_prepare_any_number_of_images() -> None:
    processor = PlainViTImageProcessor(size={"height": 12, "width": 20})
    pictures = [np.random.default_rng(i).integers(0, 256, (9, 11, 3), dtype=np.uint8) for i in range(5)]
    batches = list(pixel_batches(iter(pictures), processor, batch_size=2))
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 12, 20), (2, 3, 12, 20), (1, 3, 12, 20)]
    torch.testing.assert_close(torch.cat(batches), processor(pictures, return_tensors="pt")["pixel_values"])


def test_displayed_images_are_those_that_were_normalised() -> None:
    processor = PlainViTImageProcessor(
        size={"height": 6, "width": 5}, image_mean=(0.1, 0.5, 0.7), image_std=(0.2, 0.3, 0.9), do_resize=False
    )
    picture = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    shown = displayable(processor(picture, return_tensors="pt"), processor)
    np.testing.assert_allclose(shown[0], picture / 255, atol=1e-6)
    stretched = displayable(torch.tensor([[[[-3.0, 1.0], [0.0, 5.0]]]]))
    np.testing.assert_allclose(stretched, [[[0, 0.5], [0.375, 1]]])


def test_displayed_images_are_what_the_model_sees_of_them() -> None:
    model = build(drop_partial_patches=True, patch_projection="linear")
    pixels = images(model, size=(14, 19))
    shown = displayable(pixels, PlainViTImageProcessor(), model)
    h, w = attention_rollout(model, pixels).shape[1:]
    assert shown.shape == (2, 3 * h, 4 * w, 3) == (2, 12, 16, 3)
    np.testing.assert_array_equal(shown, displayable(pixels, PlainViTImageProcessor())[:, :12, :16])
    np.testing.assert_array_equal(displayable(pixels, model=model), displayable(pixels[..., :12, :16]))
    with pytest.raises(AnalysisError, match=r"\(14, 19\) pixels .* is not a multiple of patch_size \(3, 4\)"):
        displayable(pixels, model=build())


def test_a_confusion_matrix_counts_true_classes_down_and_predicted_ones_across() -> None:
    assert confusion_matrix([0, 0, 2, 1, 0], [0, 1, 2, 2, 1], 3).tolist() == [[1, 2, 0], [0, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("problem", "labels"),
    [("single_label_classification", 5)]
    + [(problem, labels) for problem in (None, "multi_label_classification") for labels in (1, 5)]
    + [("regression", labels) for labels in (1, 5) if HAS_REGRESSION],
)
def test_predictions_are_the_scores_of_the_pipeline(problem: Any, labels: int) -> None:
    model, image_processor = build(num_labels=labels, problem_type=problem), PlainViTImageProcessor()
    image_processor.size = {"height": model.config.image_shape[0], "width": model.config.image_shape[1]}
    pictures = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 8, 3), np.uint8)) for seed in range(3)]
    classify = pipeline("image-classification", model.eval(), image_processor=image_processor, top_k=labels)
    names = model.config.id2label
    expected = [{each["label"]: each["score"] for each in answer} for answer in classify(pictures)]
    got = predict(model.train(), image_processor(pictures, return_tensors="pt"))
    np.testing.assert_allclose(got, [[of[names[i]] for i in range(labels)] for of in expected], rtol=0, atol=1e-6)


# The state of the model is preserved

FUNCTIONS: list[Callable[..., np.ndarray]] = [
    attention_maps, attention_rollout, gradient_rollout, attention_distance, grad_cam, integrated_gradients, logit_lens,
    token_norms, predict, patch_features,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_model_is_left_as_it_was(function: Callable[..., np.ndarray]) -> None:
    model = build("distilled")
    model.vit.layers[1].eval()
    model.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    pixels = images(model)
    with torch.no_grad():  # as in an evaluation loop
        first, second = function(model, pixels), function(model, pixels)
    np.testing.assert_array_equal(first, second)  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert (model.config._attn_implementation, model.config.output_attentions) == ("sdpa", False)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert not pixels.requires_grad
    with pytest.raises(AnalysisError, match=r"\(15, 17\) pixels .* is not a multiple of patch_size \(3, 4\)"):
        function(model, images(model, size=(15, 17)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("half", ["weights", torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_half_precision_gives_float32_close_to_float32_models(function: Callable[..., np.ndarray], half: Any) -> None:
    model = build() if half == "weights" else build("map")
    pixels = images(model)
    options = {"target": 1} if "target" in function.__code__.co_varnames else {}
    expected = function(model, pixels, **options)
    if half == "weights":
        result = function(model.bfloat16(), pixels, **options)
    else:
        with torch.autocast("cpu", half):
            result = function(model, pixels, **options)
    assert result.dtype == np.float32
    # bf16 has 8 bits; over three layers gradients lose more precision than weights that sum to 1.
    assert np.abs(result - expected).max() < (0.2 if options else 0.05) * np.abs(expected).max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_models_on_a_gpu_give_the_same_arrays(function: Callable[..., np.ndarray]) -> None:
    model = build("map")
    pixels = images(model)
    expected = function(model, pixels)
    np.testing.assert_allclose(function(model.cuda(), pixels), expected, rtol=1e-3, atol=1e-5)  # other kernels


@pytest.mark.parametrize("function", FUNCTIONS)
def test_images_of_a_batch_do_not_touch_each_other(function: Callable[..., np.ndarray]) -> None:
    model = build("map")
    pixels = images(model, batch=3)
    whole = function(model, pixels)
    alone = np.concatenate([function(model, pixels[i : i + 1]) for i in range(3)])
    np.testing.assert_allclose(whole, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_prepared_model_shows_the_same_or_says_what_it_lacks(
    function: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "is_worth_packing", lambda dtype: dtype == torch.float32)
    model = build("one channel, norms, gains")
    prepared, pixels = prepare_for_inference(model), images(model)
    if "target" in function.__code__.co_varnames:
        with pytest.raises(AnalysisError, match="computes without gradients: give the model itself"):
            function(prepared, pixels)
    else:
        np.testing.assert_allclose(function(prepared, pixels), function(model, pixels), rtol=1e-4, atol=1e-5)
    dense = build("sin-cos, dense patches")
    filters = (patch_filters(each).components for each in (prepare_for_inference(dense), dense))
    np.testing.assert_array_equal(*filters)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_model_in_an_engine_has_nothing_to_show(function: Callable[..., np.ndarray]) -> None:
    model: Any = type("PlainViTForImageClassification", (EngineModel, PlainViTForImageClassification), {})
    graph = model.__new__(model)
    nn.Module.__init__(graph)
    graph.config = build().config
    with pytest.raises(AnalysisError, match="its pass is a graph in an engine: give the model itself"):
        function(graph, torch.zeros(1, 3, 12, 20))


# Bad input


@pytest.mark.parametrize(
    "function, options, message",
    [
        (attention_maps, {"layers": 3}, r"layer 3 is out of range: the model has 3, numbered 0 to 2 \(or -3 to -1"),
        (attention_maps, {"layers": [0, -4]}, "layer -4 is out of range"),
        (attention_maps, {"heads": 5}, "head 5 is out of range: the model has 5, numbered 0 to 4"),
        (attention_maps, {"query": (5, 0)}, r"query patch \(5, 0\) is outside the grid: expected a row from 0 to 4"),
        (attention_maps, {"query": (0, -1)}, r"query patch \(0, -1\) is outside the grid"),
        (attention_maps, {"query": "distillation"}, r"no token 'distillation': expected one of \['class', 'patches'\]"),
        (attention_rollout, {"head_fusion": "sum"}, "head_fusion is 'sum': expected one of"),
        (attention_rollout, {"discard": 1.0}, "discard is 1.0: expected a number in"),
        (grad_cam, {"target": 7}, r"target \[7, 7\] is out of range: the classes are 0 to 6"),
        (integrated_gradients, {"target": [0]}, "1 target classes for 2 images"),
        (gradient_rollout, {"target": [0, -1]}, "out of range"),
        (attention_maps, {"layers": 1.5}, "layer is 1.5: expected a whole number, or a sequence of them"),
        (attention_maps, {"layers": [True, False]}, r"layer is \[True, False\]: expected a whole number"),
        (attention_maps, {"heads": []}, "no head is chosen: give one or more"),
        (attention_maps, {"query": (0.5, 1)}, r"query patch is \(0.5, 1\): expected 2 whole numbers"),
        (attention_maps, {"query": 3}, "query patch is 3: expected 2 whole numbers"),
        (patch_features, {"layer": [0, 1]}, r"layer is \[0, 1\]: expected a whole number"),
        (grad_cam, {"target": "LABEL_2"}, "target is 'LABEL_2': expected a whole number"),
        (grad_cam, {"target": [torch.sum]}, "1 target functions for 2 images"),
        (grad_cam, {"target": lambda logits: 0.5}, "target returns a float: expected a tensor with one number"),
        (grad_cam, {"target": lambda logits: logits.detach()[0]}, "computes without gradients"),
        (grad_cam, {"target": [[1], [2, 3]]}, "expected a whole number, or a sequence of them"),
        (integrated_gradients, {"steps": 0}, "steps is 0: expected 1 or more"),
        (integrated_gradients, {"baseline": torch.zeros(1, 3, 12, 20)}, r"baseline has shape \(1, 3, 12, 20\)"),
        (attention_maps, {"pixel_values": np.zeros((1, 3, 12, 20), np.uint8)}, "pixels have dtype torch.uint8"),
        (gradient_rollout, {"pixel_values": np.zeros((1, 3, 12, 20), np.uint8)}, "pixels have dtype torch.uint8"),
        (probe_attention, {}, 'the model has pooling \'cls\': only pooling "map" and "query" have a probe'),
    ],
)
def test_what_the_model_does_not_have_is_refused(function: Callable, options: dict[str, Any], message: str) -> None:
    model = build()
    with pytest.raises(AnalysisError, match=message):
        function(model, **{"pixel_values": images(model), **options})


def test_models_without_what_is_asked_for_are_refused() -> None:
    pixels = torch.randn(2, 3, 12, 20)
    for call, message in (
        (lambda: attention_maps(build(num_hidden_layers=0), pixels), "the model has no layers"),
        (
            lambda: grad_cam(PlainViTModel(build().config), pixels),
            "returns no class scores .* give target a function of an image's pooled features",
        ),
        (lambda: predict(build(num_labels=0), pixels), "returns no class scores"),
        (lambda: grad_cam(PlainViTModel(build().config), pixels, torch.relu), r"target returns \(20,\)"),
        (lambda: grad_cam(PlainViTModel(build().config, add_pooling_layer=False), pixels, torch.sum), "pools nothing"),
        (lambda: predict(build(pooling="none"), pixels), 'whose pooling is not "none"'),
        (lambda: attention_maps(nn.Linear(3, 5), pixels), "got a Linear: expected a plain ViT"),
        (lambda: position_similarity(build(position_embedding_type="none")), "no position embeddings"),
        (lambda: resampled_positions(build(position_resampling="truncate"), (15, 20)), "cannot grow a table"),
        (
            lambda: resampled_positions(build(), (13, 20)),
            r"\(13, 20\) pixels .* is not a multiple of patch_size \(3, 4\)",
        ),
        (lambda: patch_filters(build(), count=0), "count is 0"),
        (lambda: patch_filters(build(patch_projection="shifted")), "reads five images"),
        (lambda: relative_position_biases(build("rotary")), "relative_position_bias=None"),
        (
            lambda: relative_position_biases(build(relative_position_bias={"type": "query"})),
            "each query has biases of its own",
        ),
    ):
        with pytest.raises(AnalysisError, match=message):
            call()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_type": "talking_heads", "pooling": "class_attention"}, "in several blocks"),
        ({"pooling": "query_block"}, "reads the patches with a query"),
        ({"pooling": "query_attention"}, "reads the patches with a query"),
    ],
)
def test_a_readout_in_blocks_has_no_gradient_rollout(fields: dict[str, Any], message: str) -> None:
    model = build(**fields, use_class_token=False)
    with pytest.raises(AnalysisError, match=message):
        gradient_rollout(model, images(model))
    assert grad_cam(model, images(model)).shape == (2, 5, 4)


@pytest.mark.parametrize("kind", SIGNED)
def test_attention_with_negative_weights_has_maps_and_no_rollout(kind: str) -> None:
    fields = {"pooling": "class_attention", "use_class_token": False} if kind == "talking_heads" else {}
    model = build(attention_type=kind, **fields)
    pixels = images(model)
    for function in (attention_rollout, attention_distance):
        with pytest.raises(AnalysisError, match=f"{kind!r} has negative ones"):
            function(model, pixels)
    weights = attention_by_hand(model, pixels)[1]
    rows = weights[:, :, 0, 1:] if model.config.use_class_token else weights.mean(axis=2)
    expected = rows.reshape(2, 5, 5, 4)
    np.testing.assert_allclose(attention_maps(model, pixels, layers=1)[:, 0], expected, rtol=1e-5)
    assert expected.min() < 0


def test_data_sets_that_cannot_be_averaged_are_refused() -> None:
    model = build()
    with pytest.raises(AnalysisError, match="there are no images"):
        average_over_images(token_norms, model, [], progress=False)
    sizes = [images(model, size=(12, 20)), images(model, size=(15, 20))]
    with pytest.raises(AnalysisError, match="resize all images to one size"):
        average_over_images(token_norms, model, sizes, progress=False)


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AnalysisError, match="label 3 is out of range: the classes are 0 to 2"):
        confusion_matrix([0, 3], [0, 1], 3)
    with pytest.raises(AnalysisError, match="2 labels and 3 predictions"):
        confusion_matrix([0, 1], [0, 1, 2], 3)
