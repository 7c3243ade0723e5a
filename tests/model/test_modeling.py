"""The model's forward pass: parity with its sources, any grid, every pooling, every dropout, every error."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.layers_plain_vit import StochasticDepth
from plain_vit.modeling_plain_vit import PlainViTEmbeddings
from plain_vit.packed_plain_vit import PLAIN
from plain_vit.positions_plain_vit import resample_positions
from tests.conftest import randomize_
from tests.releases import not_with_transformers
from tests.tiny import SIZES, VARIATIONS, difference, in_turn, pixels, tiny_config

# Sums are taken in a different order than in the source.
REORDERED = 1e-5


def randomized(config: PlainViTConfig, seed: int = 0) -> Any:
    """Return a classifier with random parameters."""
    model = PlainViTForImageClassification(config)
    randomize_(model, seed)
    return model.eval()


def beside_stock(**fields: Any) -> tuple[Any, Any]:
    """Return our classifier and transformers' own, with the same random weights."""
    stock = ViTForImageClassification(ViTConfig(**{**SIZES, "layer_norm_eps": 1e-3, **fields}))
    randomize_(stock)
    ours = PlainViTForImageClassification(tiny_config(layer_norm_eps=1e-3, **fields))
    weights = stock.state_dict()
    table = "vit.embeddings.position_embeddings"
    weights[f"{table}.weight"] = weights.pop(table)[0]
    ours.load_state_dict(weights)
    return ours.eval(), stock.eval()


OF_TODAY = not_with_transformers(5, 8, "other parameter names")

# The ladder: embeddings, one layer, the whole model, the loss and its gradient. The operations and their order are the
# same as in the stock ViT, so every difference is 0.


@OF_TODAY
def test_embeddings_are_those_of_the_stock_vit() -> None:
    ours, stock = beside_stock()
    assert difference(ours.vit.embeddings(pixels()), stock.vit.embeddings(pixels())) == 0


@OF_TODAY
def test_one_layer_is_that_of_the_stock_vit() -> None:
    ours, stock = beside_stock()
    tokens = torch.randn(2, 13, 40) * 30
    assert difference(ours.vit.layers[1](tokens), stock.vit.layers[1](tokens)) == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [{}, {"qkv_bias": False, "hidden_act": "gelu_pytorch_tanh"}], ids=str)
@OF_TODAY
def test_logits_are_those_of_the_stock_vit(attention: str, fields: dict[str, Any]) -> None:
    ours, stock = beside_stock(**fields)
    ours.set_attn_implementation(attention)
    stock.set_attn_implementation(attention)
    assert difference(ours(pixels()).logits, stock(pixels()).logits) == 0


@OF_TODAY
def test_loss_and_gradient_are_those_of_the_stock_vit() -> None:
    ours, stock = beside_stock()
    labels = torch.tensor([6, 2])
    for model in (ours, stock):
        model(pixels(), labels=labels).loss.backward()
    theirs = {name.replace("position_embeddings", "position_embeddings.weight"): p for name, p in
              stock.named_parameters()}  # fmt: skip
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert difference(parameter.grad, theirs[name].grad.view_as(parameter)) == 0, name
    assert ours(pixels(), labels=labels).loss == stock(pixels(), labels=labels).loss


@OF_TODAY
def test_bfloat16_is_the_stock_vit_s_bfloat16() -> None:
    ours, stock = beside_stock()
    with torch.no_grad():
        assert difference(ours.bfloat16()(pixels()).logits, stock.bfloat16()(pixels().bfloat16()).logits) == 0


# Positions


RESAMPLING = [
    "bicubic", "bicubic_antialias", "bicubic_align_corners",
    "bilinear", "bilinear_antialias", "bilinear_align_corners",
]  # fmt: skip


def interpolated(table: torch.Tensor, grid: tuple[int, int], mode: str) -> torch.Tensor:
    """Resample a table of 3 x 4 positions as timm and transformers do: in float32, channels last in memory."""
    kind, _, option = mode.partition("_")
    options = {"align_corners": option == "align_corners", "antialias": option == "antialias"}
    images = table.float().reshape(1, 3, 4, -1).permute(0, 3, 1, 2)
    return F.interpolate(images, size=grid, mode=kind, **options).flatten(2)[0].T.to(table.dtype)


@pytest.mark.parametrize("size", [(24, 56), (40, 28), (8, 14), (48, 112), (16, 98)])
@pytest.mark.parametrize("mode", RESAMPLING)
def test_positions_of_other_grids_are_those_of_torch_s_interpolation(mode: str, size: tuple[int, int]) -> None:
    model = randomized(tiny_config(position_resampling=mode)).vit.embeddings.position_embeddings
    grid = (size[0] // 8, size[1] // 14)
    for dtype in (torch.float32, torch.bfloat16):
        weight = model.to(dtype).weight
        with torch.autocast("cpu"):
            under_autocast = model(grid, weight)
        for found in (model(grid, weight), under_autocast):
            assert found.dtype == dtype
            assert torch.equal(found[1:], interpolated(weight[1:], grid, mode))
            assert torch.equal(found[:1], weight[:1])


@pytest.mark.parametrize("mode", RESAMPLING)
def test_positions_of_other_grids_are_trained_as_by_torch_s_interpolation(mode: str) -> None:
    model = randomized(tiny_config(position_resampling=mode)).vit.embeddings.position_embeddings
    weights = torch.randn(35, 40)
    (found,) = torch.autograd.grad((model((5, 7), model.weight)[1:] * weights).sum(), model.weight)
    (expected,) = torch.autograd.grad((interpolated(model.weight[1:], (5, 7), mode) * weights).sum(), model.weight)
    assert difference(found, expected) < REORDERED


def test_position_table_is_unchanged_at_its_own_grid() -> None:
    positions = randomized(tiny_config()).vit.embeddings.position_embeddings
    assert positions((3, 4), positions.weight) is positions.weight


@pytest.mark.parametrize("mode", ["bicubic_antialias", "bilinear", "truncate"])
def test_grids_of_as_many_patches_but_another_shape_get_other_positions(mode: str) -> None:
    config = tiny_config(image_size=(32, 224), position_resampling=mode)  # 4 x 16
    embeddings = randomized(config).vit.embeddings
    black = torch.zeros(1, 3, 64, 112)  # 8 x 8
    tokens = embeddings(black)[0, 1:] - embeddings.patch_embeddings(black)[0]
    table = embeddings.position_embeddings.weight[1:]
    expected = resample_positions(table, (4, 16), (8, 8), mode)
    assert difference(tokens, expected) < REORDERED
    assert torch.equal(expected, table) == (mode == "truncate")  # the first positions in raster order


def test_truncated_positions_are_the_first_in_raster_order() -> None:
    positions = randomized(tiny_config(position_resampling="truncate")).vit.embeddings.position_embeddings
    assert torch.equal(positions((2, 5), positions.weight), positions.weight[:11])
    with pytest.raises(
        ValueError, match=r"has 12 rows, but the image has 15 patches.*choose another mode or smaller images"
    ):
        positions((3, 5), positions.weight)


def test_a_transposed_image_is_not_the_same_image() -> None:
    model = randomized(tiny_config(patch_size=8, image_size=(24, 56)))
    assert difference(model(pixels(height=56, width=24)).logits, model(pixels()).logits) > 0.01


@pytest.mark.parametrize("name", sorted(VARIATIONS))
@pytest.mark.parametrize("size", [(8, 28), (40, 84)])
def test_any_size_that_the_patches_divide_gives_logits(name: str, size: tuple[int, int]) -> None:
    model = randomized(tiny_config(**VARIATIONS[name]))
    if name == "truncate" and size == (40, 84):
        with pytest.raises(ValueError, match="cannot grow a table"):
            model(pixels(1, *size))
        return
    logits = model(pixels(1, *size)).logits
    assert logits.shape[0] == 1
    assert logits.shape[-1] == 7
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_every_parameter_changes_the_output(name: str) -> None:
    model = randomized(tiny_config(**VARIATIONS[name]))
    model.vit.patch_dropout.rate = 0
    mask = torch.arange(12).expand(2, 12) % 2 == 0 if name == "mask_token" else None
    outputs = model.vit(pixels(), bool_masked_pos=mask)
    logits = model.classifier(outputs.pooler_output)
    if model.distillation_classifier is not None:
        logits = logits + model.distillation_classifier(outputs.last_hidden_state[:, 1])
    logits.square().sum().backward()
    # A bias of the keys adds a constant to all scores of a query, which the softmax removes.
    unread = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-6}
    assert {n for n in unread if not n.endswith(("k_proj.bias", "k_norm.bias"))} == set()


# Attentions and hidden states


@pytest.mark.parametrize("name", ["plain", "registers", "differential", "branches"])
@pytest.mark.parametrize("by_config", [False, True])
def test_attentions_under_sdpa_are_the_real_ones(name: str, by_config: bool) -> None:
    config = tiny_config(**VARIATIONS[name], output_attentions=by_config)
    sdpa = randomized(config)
    sdpa.set_attn_implementation("sdpa")
    assert sdpa.config._attn_implementation == "sdpa"
    eager = randomized(tiny_config(**VARIATIONS[name], attn_implementation="eager"))
    found = sdpa(pixels()) if by_config else sdpa(pixels(), output_attentions=True)
    expected = eager(pixels(), output_attentions=True)
    tokens = 12 + config.num_prefix_tokens
    assert len(found.attentions) == 3 * config.num_branches
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert ours.shape == (2, 5, tokens, tokens)
        assert torch.equal(ours, theirs)
        if name != "differential":
            assert torch.allclose(ours.sum(-1), torch.ones(()))
    assert sdpa.config._attn_implementation == "sdpa"


def test_the_last_hidden_state_is_the_final_norm_of_the_last_of_all() -> None:
    model = randomized(tiny_config()).vit
    outputs = model(pixels(), output_hidden_states=True)
    assert len(outputs.hidden_states) == 4
    assert torch.equal(outputs.hidden_states[0], model.embeddings(pixels()))
    assert not torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)
    assert torch.equal(model.layernorm(outputs.hidden_states[-1]), outputs.last_hidden_state)


@pytest.mark.parametrize("reentrant, name", in_turn([False, True], quick=[
    "False-learned_2d", "False-prr", "False-rotary", "True-learned_2d", "True-prr", "True-representation",
]))  # fmt: skip
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool, name: str) -> None:
    model = randomized(tiny_config(**VARIATIONS[name], hidden_dropout_prob=0.1, drop_path_rate=0.2)).train()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        model(pixels().requires_grad_()).logits.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert dict(model.named_parameters()).keys() - plain.keys() <= {"vit.embeddings.mask_token"}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    calls: list[int] = []
    dense = next(module for name, module in model.vit.layers[0].named_modules() if name.endswith("fc1"))
    dense.register_forward_hook(lambda *_: calls.append(1))
    checkpointed = gradients()
    assert len(calls) == 2  # forward, and once more in the backward pass
    assert plain.keys() == checkpointed.keys()
    rounded = reentrant and name.startswith("relative")  # without gradients, torch adds a bias differently
    limit = 1e-5 * max(gradient.abs().max().item() for gradient in plain.values()) if rounded else 0
    for key in plain:
        assert (checkpointed[key] - plain[key]).abs().max() <= limit, key


# Dropouts and other operations that only happen in training


def paper(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Compute the paper's model in training, written out (equations 1 to 8; dropouts as in appendix B.1)."""
    config, vit = model.config, model.vit

    def dropout(tensor: torch.Tensor) -> torch.Tensor:
        return F.dropout(tensor, config.hidden_dropout_prob)

    patches = vit.embeddings.patch_embeddings.projection(pixel_values).flatten(2).transpose(1, 2)
    z = torch.cat((vit.embeddings.cls_token.expand(len(patches), -1, -1), patches), dim=1)
    z = F.dropout(z + vit.embeddings.position_embeddings.weight, config.embedding_dropout_prob)
    for layer in vit.layers:
        attention, normed = layer.attention, layer.layernorm_before(z)
        q, k, v = (
            projection(normed).unflatten(-1, (5, 8)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        weights = F.dropout((q @ k.mT * 8**-0.5).softmax(-1), config.attention_probs_dropout_prob)
        z = z + dropout(attention.o_proj((weights @ v).transpose(1, 2).flatten(2)))
        hidden = dropout(layer.mlp.activation(layer.mlp.fc1(layer.layernorm_after(z))))
        z = z + dropout(layer.mlp.fc2(hidden))
    return model.classifier(F.dropout(vit.layernorm(z)[:, 0], config.classifier_dropout_prob))


def test_each_dropout_is_where_the_paper_has_it() -> None:
    config = tiny_config(
        hidden_dropout_prob=0.1, embedding_dropout_prob=0.2, attention_probs_dropout_prob=0.3,
        classifier_dropout_prob=0.4, attn_implementation="eager",
    )  # fmt: skip
    model = randomized(config).train()
    torch.manual_seed(5)
    found = model(pixels(), output_hidden_states=True).logits  # else the last block drops for the class token only
    torch.manual_seed(5)
    assert difference(found, paper(model, pixels())) == 0
    assert not torch.equal(found, model.eval()(pixels()).logits)


def test_dropout_of_the_embeddings_is_that_of_the_layers_unless_given() -> None:
    assert PlainViTEmbeddings(tiny_config(hidden_dropout_prob=0.3)).dropout.p == 0.3
    assert PlainViTEmbeddings(tiny_config(hidden_dropout_prob=0.3, embedding_dropout_prob=0.0)).dropout is None


def test_stochastic_depth_grows_as_in_timm() -> None:
    timm = VisionTransformer(img_size=32, embed_dim=40, depth=3, num_heads=5, drop_path_rate=0.3)
    model: Any = PlainViTModel(tiny_config(drop_path_rate=0.3))
    rates = [layer.drop_path.rate for layer in model.layers]
    assert rates == pytest.approx([getattr(block.drop_path1, "drop_prob", 0.0) for block in timm.blocks])


def test_stochastic_depth_leaves_whole_samples_out_and_scales_the_others() -> None:
    config = tiny_config(drop_path_rate=0.4)
    depth = StochasticDepth(config, 2)  # the last block, at the full rate
    out = depth(torch.ones(1000, 2, 3), PLAIN)
    kept = out[:, 0, 0] != 0
    assert torch.equal(out, (kept.float() / 0.6).view(-1, 1, 1).expand(-1, 2, 3))
    assert 0.55 < kept.float().mean() < 0.65
    assert torch.equal(depth.eval()(torch.ones(5, 2, 3), PLAIN), torch.ones(5, 2, 3))


def test_both_residual_branches_of_a_layer_are_left_out_on_their_own() -> None:
    model = randomized(tiny_config(drop_path_rate=0.5, num_hidden_layers=2)).train()
    layer = model.vit.layers[1]
    tokens = torch.randn(1, 13, 40).expand(400, 13, 40)
    kinds: list[torch.Tensor] = []
    for change in (layer(tokens) - tokens).detach():
        if not any(torch.allclose(change, kind, atol=1e-4) for kind in kinds):
            kinds.append(change)
    assert len(kinds) == 4  # kept: neither, attention, MLP, both


def first_tokens(model: PlainViTModel) -> torch.Tensor:
    """Return the input of the first block."""
    return model(pixels(), output_hidden_states=True).hidden_states[0]


def test_patch_dropout_keeps_a_share_of_the_patches_and_every_other_token() -> None:
    config = tiny_config(patch_dropout_prob=0.5, num_register_tokens=2)
    model = randomized(config).vit
    whole = first_tokens(model)
    model.train()
    dropped = first_tokens(model)
    assert dropped.shape == (2, 3 + 6, 40)
    assert torch.equal(dropped[:, :3], whole[:, :3])
    for kept, all_patches in zip(dropped[:, 3:], whole[:, 3:], strict=True):
        assert all((patch == all_patches).all(-1).any() for patch in kept)
        assert len(torch.unique(kept, dim=0)) == 6
    assert not torch.equal(first_tokens(model), dropped)


def test_patch_dropout_keeps_registers_after_the_patches() -> None:
    config = tiny_config(patch_dropout_prob=0.7, num_register_tokens=2, register_tokens_last=True)
    model = randomized(config).vit.train()
    tokens = first_tokens(model)
    assert tokens.shape == (2, 1 + 3 + 2, 40)
    assert torch.equal(tokens[:, -2:], model.embeddings.register_tokens.expand(2, -1, -1))


# Pooling


@pytest.mark.parametrize("name", ["registers_last", "registers", "deit"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "max", "mean_max", "cls", "none"])
def test_pooling_reads_the_tokens_it_says(name: str, whole: bool, pooling: str) -> None:
    fields = {**VARIATIONS[name], "pooling": pooling, "pool_prefix_tokens": whole, "use_distillation_token": False}
    model = randomized(tiny_config(**fields)).vit
    outputs = model(pixels())
    tokens = outputs.last_hidden_state
    read = tokens if whole else tokens[:, 1:-2] if name == "registers_last" else tokens[:, -12:]
    expected = {
        "mean": read.mean(1),
        "max": read.max(1).values,
        "mean_max": (read.mean(1) + read.max(1).values) / 2,
        "cls": tokens[:, 0],
        "none": tokens,
    }
    assert torch.equal(outputs.pooler_output, expected[pooling])


def test_map_pooling_is_timm_s_attention_pool() -> None:
    pooler = randomized(tiny_config(pooling="map", use_class_token=False, layer_norm_eps=1e-3)).vit.pooler
    norm: Any = partial(nn.LayerNorm, eps=1e-3)
    timm = AttentionPoolLatent(40, num_heads=5, mlp_ratio=52 / 40, norm_layer=norm)
    ours = pooler.state_dict()
    timm.load_state_dict({
        "latent": ours["probe"],
        **{f"kv.{part}": torch.cat((ours[f"k_proj.{part}"], ours[f"v_proj.{part}"])) for part in ("weight", "bias")},
        **{f"{theirs}.{part}": ours[f"{name}.{part}"] for part in ("weight", "bias") for name, theirs in (
            ("q_proj", "q"), ("o_proj", "proj"), ("layernorm", "norm"), ("fc1", "mlp.fc1"), ("fc2", "mlp.fc2"))},
    })  # fmt: skip
    tokens = torch.randn(2, 12, 40) * 3
    assert difference(pooler(tokens), timm(tokens)) < REORDERED


@pytest.mark.parametrize("place", ["before_pooling", "after_pooling", "both", "none"])
def test_the_final_norm_is_where_the_config_says(place: str) -> None:
    model = randomized(tiny_config(pooling="mean", final_norm=place)).vit
    outputs = model(pixels(), output_hidden_states=True)
    tokens = outputs.hidden_states[-1]
    if place in ("before_pooling", "both"):
        tokens = model.layernorm(tokens)
    pooled = tokens[:, 1:].mean(1)
    if place in ("after_pooling", "both"):
        pooled = model.pooled_layernorm(pooled)
    assert torch.equal(outputs.last_hidden_state, tokens)
    assert torch.equal(outputs.pooler_output, pooled)
    norms = sum(isinstance(m, nn.LayerNorm) for m in (model.layernorm, model.pooled_layernorm))
    assert norms == {"both": 2, "none": 0}.get(place, 1)


def test_the_representation_layer_is_between_pooling_and_classifier() -> None:
    model = randomized(tiny_config(representation_size=30))
    outputs = model.vit(pixels())
    dense = model.vit.representation[0]
    assert torch.equal(outputs.pooler_output, torch.tanh(dense(outputs.last_hidden_state[:, 0])))
    assert torch.equal(model(pixels()).logits, model.classifier(outputs.pooler_output))


def test_a_model_without_pooling_layer_gives_tokens_alone() -> None:
    model = PlainViTModel(tiny_config(pooling="map", use_class_token=False), add_pooling_layer=False)
    assert not any("pooler" in name for name, _ in model.named_parameters())
    assert model(pixels()).pooler_output is None


# Bad input


@pytest.mark.parametrize(
    "pixel_values, message",
    [
        (torch.zeros(3, 24, 56), r"has shape \(3, 24, 56\): expected \(batch, 3, height, width\)"),
        (torch.zeros(1, 2, 3, 24, 56), r"expected \(batch, 3, height, width\)"),
        (torch.zeros(2, 4, 24, 56), r"has shape \(2, 4, 24, 56\): expected \(batch, 3, height, width\)"),
        (torch.zeros(2, 24, 56, 3), r"expected \(batch, 3, height, width\)"),
        (torch.zeros(2, 3, 24, 60), r"image of \(24, 60\) pixels.*use \(24, 56\)"),
        (torch.zeros(2, 3, 36, 56), r"image of \(36, 56\) pixels.*use \(32, 56\)"),
        (torch.zeros(2, 3, 4, 56), r"use \(8, 56\)"),
        (torch.zeros(2, 3, 24, 56, dtype=torch.uint8), "dtype torch.uint8: expected normalised floats"),
        (torch.zeros(2, 3, 24, 56, dtype=torch.int64), "dtype torch.int64: expected normalised floats"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else str(tuple(value.shape)),
)
def test_pixels_that_do_not_fit_are_refused(pixel_values: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlainViTForImageClassification(tiny_config())(pixel_values)


def test_an_image_that_the_patches_do_not_divide_is_never_cropped() -> None:
    model = PlainViTForImageClassification(tiny_config(image_size=32, patch_size=8))
    with pytest.raises(ValueError, match=r"use \(32, 32\)"):
        model(torch.zeros(1, 3, 36, 36))


@pytest.mark.parametrize(
    "shape, message",
    [
        ((2, 11), r"has shape \(2, 11\).*\(3, 4\)"),
        ((2, 4, 3), r"has shape \(2, 4, 3\).*\(3, 4\)"),
        ((2, 13), r"has shape \(2, 13\)"),
    ],
)
def test_a_mask_of_another_grid_is_refused(shape: tuple[int, ...], message: str) -> None:
    model = PlainViTModel(tiny_config(use_mask_token=True))
    with pytest.raises(ValueError, match=message):
        model(pixels(), bool_masked_pos=torch.zeros(shape, dtype=torch.bool))


def test_a_mask_without_a_mask_token_is_refused() -> None:
    with pytest.raises(ValueError, match="build the model with use_mask_token=True"):
        PlainViTModel(tiny_config())(pixels(), bool_masked_pos=torch.zeros(2, 12, dtype=torch.bool))


def test_masked_patches_are_the_mask_token_and_others_are_not_touched() -> None:
    embeddings = randomized(tiny_config(use_mask_token=True)).vit.embeddings
    mask = torch.rand(2, 3, 4) > 0.5
    found = embeddings(pixels(), mask)[:, 1:] - embeddings.position_embeddings.weight[1:]
    patches = embeddings.patch_embeddings(pixels())
    expected = torch.where(mask.flatten(1).unsqueeze(-1), embeddings.mask_token, patches)
    assert difference(found, expected) < REORDERED
    assert torch.equal(embeddings(pixels(), mask.flatten(1)), embeddings(pixels(), mask))
