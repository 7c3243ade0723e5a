"""Rotary embeddings and relative position biases: what they compute, and which tokens they apply to."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import resize_rel_pos_bias_table
from torch import nn

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.attention_plain_vit import PlainViTAttention
from plain_vit.conversion import to_checkpoint
from plain_vit.errors import ExportError
from plain_vit.modeling_plain_vit import build_layer
from plain_vit.packed_plain_vit import Places
from plain_vit.positions_plain_vit import (
    RELATIVE_POSITION_BIASES,
    AxialRotaryEmbedding,
    Distances,
    MixedRotaryEmbedding,
    QueryRelativePositionBias,
    Rotation,
    distances_of,
    resample_distances,
    resample_positions,
    rotary_embedding,
    windows_of,
)
from tests.conftest import randomize_
from tests.tiny import VARIATIONS, difference, pixels, tiny_config

ROTARY = [name for name in VARIATIONS if name.startswith("rotary")]


def rotations(config: PlainViTConfig, grid: tuple[int, int] = (3, 4)) -> list[Rotation]:
    module = randomize_(rotary_embedding(config)).eval()
    return module(grid, torch.zeros(1), None)


def rotated_by_complex_numbers(heads: torch.Tensor, angles: torch.Tensor, halves: bool) -> torch.Tensor:
    """Multiply pairs of channels, as complex numbers, by e ** (i angle); shapes (B heads L d) and (..., L, d / 2)."""
    pairs = heads.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else heads.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.polar(torch.ones(()).double(), angles.double())
    turned = torch.view_as_real(turned)
    return (turned.transpose(-1, -2) if halves else turned).flatten(-2).float()


@pytest.mark.parametrize("name", ROTARY)
def test_rotation_multiplies_pairs_of_channels_as_complex_numbers(name: str) -> None:
    config = tiny_config(**VARIATIONS[name])
    module = randomize_(rotary_embedding(config)).eval()
    assert isinstance(module, AxialRotaryEmbedding)
    heads, prefix = torch.randn(2, 5, config.num_prefix_tokens + 12, 8), config.num_prefix_tokens
    angles = module.angles(module.coordinates((3, 4), torch.device("cpu")))
    found = module((3, 4), torch.zeros(1), None)
    own = name in ("rotary_mixed", "rotary_alternating")  # learned: of each block, or of tokens before the patches
    assert len(angles) == (3 if own else 1)
    of_prefix = torch.zeros(prefix, 4) if module.prefix_angles is None else module.prefix_angles.detach()
    halves = config.group("rope_parameters")["pairs"] == "halves"
    for rotation, one in zip(found, angles * (3 // len(angles)), strict=True):
        turned = rotation.rotate(heads)
        of_all = torch.cat((of_prefix.expand(*one.shape[:-2], -1, -1), one), dim=-2)
        assert difference(turned, rotated_by_complex_numbers(heads, of_all, halves)) < 1e-6
        assert module.prefix_angles is not None or torch.equal(turned[:, :, :prefix], heads[:, :, :prefix])
        assert torch.equal(rotation.rotate(heads[:, :, :5]), turned[:, :, :5])  # the first tokens only


def test_axial_angles_are_those_of_row_and_column() -> None:
    config = tiny_config(
        rope_parameters={"rope_type": "axial", "rope_theta": 100.0}, use_class_token=False, pooling="mean"
    )
    angles = rotations(config)[0].cos.acos()  # small positive angles
    for patch in (0, 5, 11):
        row, column = divmod(patch, 4)
        expected = [row, row, row / 10, row / 10, column, column, column / 10, column / 10]
        assert torch.allclose(angles[patch], torch.tensor(expected, dtype=torch.float32), atol=2e-4)


def test_centered_coordinates_span_the_image_at_any_grid() -> None:
    config = tiny_config(**VARIATIONS["rotary_centered"])
    module = AxialRotaryEmbedding(config)
    coordinates = module.coordinates((2, 4), torch.device("cpu"))
    assert torch.allclose(coordinates[:, 0].view(2, 4), torch.tensor([[-0.5], [0.5]]).expand(2, 4))
    assert torch.allclose(coordinates[:, 1].view(2, 4), torch.tensor([-0.75, -0.25, 0.25, 0.75]).expand(2, 4))


def test_scores_depend_on_distances_alone() -> None:
    fields = {"use_class_token": False, "pooling": "mean", "position_embedding_type": "none"}
    outputs = []
    for offset, theta in ((0.0, 100.0), (3.0, 100.0), (0.0, 50.0)):
        config = tiny_config(rope_parameters={"rope_type": "axial", "offset": offset, "rope_theta": theta}, **fields)
        model = randomize_(PlainViTModel(config).eval())
        outputs.append(model(pixels()).pooler_output.detach())
    assert difference(outputs[1], outputs[0]) < 1e-5
    assert difference(outputs[2], outputs[0]) > 1e-4


def test_a_model_without_blocks_has_no_rotations() -> None:
    for kind in ("axial", "mixed"):
        config = tiny_config(rope_parameters={"rope_type": kind}, num_hidden_layers=0)
        assert PlainViTModel(config)(pixels()).last_hidden_state.isfinite().all()


def test_positions_are_seen() -> None:
    """Without positions, swapping two patches would only swap their tokens."""
    image = pixels(height=24, width=56)
    exchanged = torch.cat((image[..., 28:], image[..., :28]), dim=-1)
    for name, sees in (("no_positions", False), ("rotary_centered", True)):
        model = randomize_(PlainViTModel(tiny_config(**VARIATIONS[name])).eval())
        before, after = (model(x).pooler_output.detach() for x in (image, exchanged))
        assert (difference(after, before) > 1e-3) == sees


@pytest.mark.parametrize("name", ROTARY)
def test_dropped_patches_leave_the_rotations_of_the_others(name: str) -> None:
    config = tiny_config(**VARIATIONS[name], patch_dropout_prob=0.6)
    model = randomize_(PlainViTModel(config).train())
    seen: list[tuple[torch.Tensor, Rotation]] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append((args[0], args[2].rotation)))
    kept: list[torch.Tensor] = []
    model.patch_dropout.register_forward_hook(lambda module, args, output: kept.append(output))
    whole = model.eval()(pixels(), output_hidden_states=True).hidden_states[0]
    seen.clear()
    model.train()(pixels())
    prefix = config.num_prefix_tokens
    assert kept[-1].shape == (2, prefix + 4)
    for (tokens, rotation), full in zip(seen, model.rotary_embedding((3, 4), whole, None), strict=True):
        for image, numbers in enumerate(kept[-1]):
            assert torch.equal(rotation.cos[image].squeeze(0), full.cos[..., numbers, :])
            assert torch.equal(rotation.sin[image].squeeze(0), full.sin[..., numbers, :])
            if tokens is seen[0][0]:
                assert torch.equal(tokens[image], whole[image, numbers])


def test_coordinates_move_in_training_alone_and_within_their_limits() -> None:
    config = tiny_config(rope_parameters={"rope_type": "axial", "coordinates": "centered"})
    fixed = AxialRotaryEmbedding(config).coordinates((2, 4), torch.device("cpu"))
    limits = {"shift": 0.25, "jitter": 1.5, "rescale": 2.0}
    for name, limit in limits.items():
        config = tiny_config(rope_parameters={"coordinates": "centered", name: limit})
        module = AxialRotaryEmbedding(config)
        assert torch.equal(module.eval().coordinates((2, 4), torch.device("cpu")), fixed)
        drawn = torch.stack([module.train().coordinates((2, 4), torch.device("cpu")) for _ in range(300)])
        moved = drawn - fixed if name == "shift" else (drawn / fixed).log()
        most = limit if name == "shift" else math.log(limit)
        assert torch.allclose(moved, moved[:, :1].expand_as(moved), atol=1e-5)  # the same for all patches
        assert 0.9 * most < moved.abs().max() <= most * 1.0001
        both = torch.allclose(moved[..., 0], moved[..., 1], atol=1e-5)
        assert both == (name == "rescale")


def test_mixed_frequencies_start_axial_and_turned() -> None:
    torch.manual_seed(1)
    config = tiny_config(rope_parameters={"rope_type": "mixed", "rope_theta": 10.0})
    frequencies = PlainViTModel(config).rotary_embedding.frequencies.detach()
    assert frequencies.shape == (2, 3, 5, 4)
    lengths = frequencies.norm(dim=0)
    expected = torch.tensor([1.0, 10**-0.5] * 2).expand(3, 5, 4)
    assert torch.allclose(lengths, expected, atol=1e-6)
    dots = (frequencies[..., :2] * frequencies[..., 2:]).sum(dim=0)
    assert dots.abs().max() < 1e-6  # the two halves of the channels are orthogonal
    assert len(torch.unique(frequencies[0, :, :, 0])) == 15


def test_mixed_frequencies_learn() -> None:
    config = tiny_config(**VARIATIONS["rotary_mixed"])
    model = randomize_(PlainViTModel(config))
    model(pixels()).pooler_output.square().sum().backward()
    module = model.rotary_embedding
    assert isinstance(module, MixedRotaryEmbedding)
    assert module.frequencies.grad is not None
    assert (module.frequencies.grad[:, :, :, :].abs().amax(dim=(0, 3)) > 0).all()


def test_only_the_dtype_of_the_weights_rounds_cosines() -> None:
    for dtype, expected in (("weights", torch.bfloat16), ("float32", torch.float32)):
        config = tiny_config(rope_parameters={"rope_type": "axial", "dtype": dtype})
        rotation = AxialRotaryEmbedding(config)((3, 4), torch.zeros(1, dtype=torch.bfloat16), None)[0]
        assert rotation.cos.dtype == rotation.sin.dtype == expected
        assert rotation.rotate(torch.randn(1, 5, 13, 8).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rope_parameters": {"rope_type": "axial"}, "attention_type": "differential"}, "differential"),
        ({"rope_parameters": {"rope_type": "axial"}, "head_dim": 6}, "multiple of 4"),
        (
            {"rope_parameters": {"rope_type": "axial"}, "num_register_tokens": 2, "register_tokens_last": True},
            "put the registers first",
        ),
        ({"rope_parameters": {"rope_type": "mixed", "coordinates": "centered"}}, '"mixed" rotation learns'),
        ({"rope_parameters": {"coordinates": "centered", "reference_grid": (3, 4)}}, "the same for every grid"),
        ({"rope_parameters": {"rope_theta": 0}}, "a positive number"),
        ({"rope_parameters": {"jitter": 0.5}}, "at least 1"),
        ({"rope_parameters": {"reference_grid": [3]}}, "expected patches"),
        ({"rope_parameters": {"reference_grid": (0, 4)}}, "expected patches"),
    ],
)
def test_rotations_without_a_meaning_are_refused(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiny_config(**fields)


# Relative positions

TABLES = ["relative_table", "relative_shared"]
BY_QUERY = ["relative_query", "relative_windows"]
RELATIVE = [name for name in VARIATIONS if name.startswith("relative") and name not in BY_QUERY]


def on(config: PlainViTConfig, grid_size: tuple[int, int] = (3, 4)) -> Distances:
    """Return the distances between the tokens of a config on a grid."""
    found = distances_of(config, grid_size, torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.parametrize("name", RELATIVE)
def test_a_bias_belongs_to_a_distance_and_a_head(name: str) -> None:
    config = tiny_config(**VARIATIONS[name])
    bias = (
        randomize_(RELATIVE_POSITION_BIASES[config.group("relative_position_bias")["type"]](config))
        .eval()(on(config))
        .detach()
    )
    prefix = config.num_prefix_tokens
    assert bias.shape == (5, prefix + 12, prefix + 12)
    found: dict[tuple[int, int], torch.Tensor] = {}
    for query in range(12):
        for key in range(12):
            distance = query // 4 - key // 4, query % 4 - key % 4
            score = bias[:, prefix + query, prefix + key]
            assert torch.equal(found.setdefault(distance, score), score)
    assert len(torch.unique(torch.stack(list(found.values())), dim=0)) == 5 * 7  # all distances differ


def test_the_class_token_has_three_biases_of_its_own() -> None:
    config = tiny_config(**VARIATIONS["relative_table"])
    module = randomize_(RELATIVE_POSITION_BIASES["table"](config))
    bias = module(on(config)).detach()
    to_patches, from_patches, itself = module.table.detach()[-3:]
    assert torch.equal(bias[:, 0, 1:], to_patches[:, None].expand(5, 12))
    assert torch.equal(bias[:, 1:, 0], from_patches[:, None].expand(5, 12))
    assert torch.equal(bias[:, 0, 0], itself)


@pytest.mark.parametrize("name", RELATIVE)
def test_attention_adds_the_bias_to_its_scores(name: str) -> None:
    """The weights equal those without a bias, times the bias's exponential, renormalised."""
    config = tiny_config(**VARIATIONS[name], num_hidden_layers=1)
    model = randomize_(PlainViTModel(config)).eval()
    module = model.relative_position_bias or model.layers[0].attention.relative_position_bias
    weights = model(pixels(), output_attentions=True).attentions[0].detach()
    bias = module(on(config)).detach()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    plain = model(pixels(), output_attentions=True).attentions[0].detach()
    expected = plain * bias.exp()
    assert difference(weights, expected / expected.sum(-1, keepdim=True)) < 1e-5


@pytest.mark.parametrize("name", [*RELATIVE, *BY_QUERY])
def test_blocks_share_a_bias_or_have_their_own(name: str) -> None:
    model = PlainViTModel(tiny_config(**VARIATIONS[name]))
    paths = {path.partition("relative_position_bias")[0] for path in model.state_dict() if "relative" in path}
    own = {f"layers.{index}.attention." for index in range(3)}
    assert paths == ({""} if "shared" in name else own)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"window_attention": {"size": 257}}, "at most 256"),  # one window would be padded to millions of tokens
        ({"window_attention": {"global_layers": [3]}}, "numbers of the 3 blocks"),
        ({"window_attention": {"global_layers": [-1]}}, "numbers of the 3 blocks"),
        ({"window_attention": {}, "use_class_token": True, "pooling": "cls"}, "use_class_token=False"),
        ({"window_attention": {}, "num_register_tokens": 1, "register_tokens_last": True}, "num_register_tokens=0"),
        ({"window_attention": {}, "patch_dropout_prob": 0.5}, "patch_dropout_prob=0"),
        ({"window_attention": {}, "rope_parameters": {}}, 'padding="masked"'),
        ({"window_attention": {"padding": "masked"}}, 'padding="attended"'),
        ({"window_attention": {}, "relative_position_bias": {"type": "table"}}, 'type="decomposed"'),
        ({"relative_position_bias": {"type": "decomposed", "shared": True}}, "shared=False"),
    ],
)
def test_windows_that_no_source_has_are_refused(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiny_config(**{"use_class_token": False, "pooling": "mean", **fields})


def test_a_block_with_windows_sees_each_window_as_an_image_padded_with_zeros() -> None:
    """A window alone, as tokens of a model whose grid is one window, gives the same attention."""
    config = tiny_config(**VARIATIONS["relative_windows"], num_hidden_layers=2)  # windows of 2 x 2 on 3 x 4 patches
    attention = randomize_(build_layer(config, 0)).attention.eval()
    tokens, grid = torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(3)), torch.zeros(2, 4, 4, 40)
    grid[:, :3] = tokens.unflatten(1, (3, 4))
    places = Places(windows=windows_of(config, (3, 4), tokens.device))
    found, weights = attention(tokens, None, places, output_attentions=True)
    alone = tiny_config(**{**VARIATIONS["relative_windows"], "window_attention": None}, image_size=(16, 28))
    plain = build_layer(alone, 0).attention.eval()
    plain.load_state_dict(attention.state_dict())
    for top, left in ((0, 0), (0, 2), (2, 0), (2, 2)):
        window = grid[:, top : top + 2, left : left + 2].flatten(1, 2)
        expected, maps = plain(window, None, Places(distances=on(alone, (2, 2))), output_attentions=True)
        rows = [row * 4 + column for row in range(top, min(top + 2, 3)) for column in (left, left + 1)]
        assert difference(found[:, rows], expected[:, : len(rows)]) < 1e-6
        assert difference(weights[:, :, rows][..., rows], maps[:, :, : len(rows), : len(rows)]) < 1e-6
        assert not weights[:, :, rows][..., [key for key in range(12) if key not in rows]].any()


def test_masked_padding_is_as_if_the_last_windows_were_smaller() -> None:
    """Each window gives the same attention alone, with the rotation of its place in the image."""
    config = tiny_config(**VARIATIONS["masked_windows"], num_hidden_layers=2)  # windows of 2 x 2 on 3 x 4 patches
    attention, tokens = randomize_(build_layer(config, 0)).attention.eval(), torch.randn(2, 12, 40)
    rotation = rotary_embedding(config)((3, 4), tokens, None)[0]
    places = Places(rotation, windows=windows_of(config, (3, 4), tokens.device))
    found, weights = attention(tokens, None, places, output_attentions=True)
    for top, left in ((0, 0), (0, 2), (2, 0), (2, 2)):
        rows = [row * 4 + column for row in range(top, min(top + 2, 3)) for column in (left, left + 1)]
        alone = Places(rotation._replace(cos=rotation.cos[rows], sin=rotation.sin[rows]))
        expected, maps = PlainViTAttention.forward(attention, tokens[:, rows], None, alone, output_attentions=True)
        assert difference(found[:, rows], expected) < 1e-6
        assert difference(weights[:, :, rows][..., rows], maps) < 1e-6
        assert not weights[:, :, rows][..., [key for key in range(12) if key not in rows]].any()


@pytest.mark.parametrize("resampling", ["bilinear", "geometric"])
@pytest.mark.parametrize("grid", [(5, 6), (2, 3), (3, 9), (1, 4)])
def test_tables_of_other_grids_keep_the_distances_of_the_class_token(resampling: str, grid: tuple[int, int]) -> None:
    config = tiny_config(relative_position_bias={"resampling": resampling}, position_embedding_type="none")
    module = randomize_(RELATIVE_POSITION_BIASES["table"](config))
    bias = module(on(config, grid)).detach()
    assert bias.shape == (5, 1 + grid[0] * grid[1], 1 + grid[0] * grid[1])
    assert torch.equal(bias[:, 0, 0], module.table.detach()[-1])
    patches = module.table.detach()[:-3]
    assert bias[:, 1:, 1:].amax() <= patches.amax() + 1e-6
    assert bias[:, 1:, 1:].amin() >= patches.amin() - 1e-6


def test_geometric_resampling_is_timms() -> None:
    config = tiny_config(relative_position_bias={"resampling": "geometric"}, position_embedding_type="none")
    module = randomize_(RELATIVE_POSITION_BIASES["table"](config))
    for h, w in ((5, 6), (7, 12), (2, 3), (3, 9)):
        shape = (2 * h - 1) * (2 * w - 1) + 3, 5
        expected = resize_rel_pos_bias_table(module.table.detach(), (h, w), shape, (3, 4))
        assert difference(resample_distances(module.table, (3, 4), (h, w), "geometric").detach(), expected) < 1e-5


@pytest.mark.parametrize("fields", [{}, {"use_class_token": False, "pooling": "mean"}])
def test_the_papers_bias_is_the_product_of_query_and_offset(fields: dict) -> None:
    config = tiny_config(relative_position_bias={"type": "query"}, **fields)
    module = randomize_(QueryRelativePositionBias(config))
    prefix, table = config.num_prefix_tokens, module.table.detach()
    query = torch.randn(2, 5, prefix + 12, config.attention_shape[1])
    found = module(on(config), query, 0.3).detach()
    expected = torch.zeros(2, 5, prefix + 12, prefix + 12)
    for place in range(prefix + 12):
        for key in range(prefix + 12):
            if place < prefix or key < prefix:  # from the class token to a patch, from a patch to it, from it to itself
                row = -1 if place == key else -3 if place < prefix else -2
            else:
                row = place - key + 11
            expected[:, :, place, key] = 0.3 * query[:, :, place] @ table[row]
    assert difference(found, expected) < 1e-6
    first = module(on(config), query[:, :, :1], 0.3).detach()  # as in the last block if only the class token is pooled
    assert difference(first, expected[:, :, :1]) < 1e-6


@pytest.mark.parametrize("grid", [(5, 6), (2, 3), (3, 9), (1, 4)])
def test_vectors_of_offsets_are_resampled_by_distance(grid: tuple[int, int]) -> None:
    config = tiny_config(relative_position_bias={"type": "query"}, use_class_token=False, pooling="mean")
    module = randomize_(QueryRelativePositionBias(config))
    height, width = grid
    query = torch.randn(1, 5, height * width, config.attention_shape[1])
    found = module(on(config, grid), query, 1.0).detach()
    rows = [[4 * down + across + 11 for across in range(-3, 4)] for down in range(-2, 3)]
    image = module.table.detach()[torch.tensor(rows)].permute(2, 0, 1)[None]
    size = (2 * height - 1, 2 * width - 1)
    resampled = nn.functional.interpolate(image, size, mode="bilinear", align_corners=False)[0]
    for place in range(height * width):
        for key in range(height * width):
            down, across = place // width - key // width, place % width - key % width
            vector = resampled[:, down + height - 1, across + width - 1]
            assert difference(found[..., place, key], query[:, :, place] @ vector) < 1e-5


def test_vectors_of_offsets_are_resampled_geometrically_as_timm_does_it() -> None:
    config = tiny_config(relative_position_bias={"type": "query", "resampling": "geometric"})
    module = randomize_(QueryRelativePositionBias(config))
    width = config.attention_shape[1]
    rows = [4 * down + across + 11 for down in range(-2, 3) for across in range(-3, 4)]
    table = module.table.detach()[[*rows, -3, -2, -1]]
    for h, w in ((3, 4), (5, 6), (2, 3)):
        expected = resize_rel_pos_bias_table(table, (h, w), ((2 * h - 1) * (2 * w - 1) + 3, width), (3, 4))
        distances, query = on(config, (h, w)), torch.randn(1, 5, 1 + h * w, width)
        found = module(distances, query, 1.0).detach()
        for place, key in ((0, 0), (0, 2), (3, 0), (1, h * w), (h * w, 2)):
            vector = expected[distances.of_pairs[place, key]]
            assert difference(found[..., place, key], query[:, :, place] @ vector) < 1e-5


def test_attention_adds_the_papers_bias_to_its_scores() -> None:
    config = tiny_config(**VARIATIONS["relative_query"], num_hidden_layers=1)
    model = randomize_(PlainViTModel(config)).eval()
    block = model.layers[0]
    with torch.no_grad():
        tokens = block.layernorm_before(model.embeddings(pixels()))
        layers = (block.attention.q_proj, block.attention.k_proj)
        query, key = (layer(tokens).unflatten(-1, (5, -1)).transpose(1, 2) for layer in layers)
        bias = block.attention.relative_position_bias(on(config), query, block.attention.scaling)
        expected = (query @ key.transpose(2, 3) * block.attention.scaling + bias).softmax(-1)
        eager = model(pixels(), output_attentions=True)
    assert bias.abs().max() > 0.1
    assert difference(eager.attentions[0], expected) < 1e-5
    assert difference(model(pixels()).last_hidden_state.detach(), eager.last_hidden_state) < 1e-5  # by torch's kernel


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("timm", "out"),
        ("transformers", "out"),
        ("vit_pytorch", "out.pt"),
        ("torchvision", "out.pth"),
        ("open_clip", "out.safetensors"),
        ("google", "out.npz"),
    ],
)
def test_no_package_has_the_papers_relative_positions(target: str, name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 80, "num_hidden_layers": 2}
    config = PlainViTConfig(image_size=32, patch_size=8, relative_position_bias={"type": "query"}, **sizes)
    kind = PlainViTModel if target == "open_clip" else PlainViTForImageClassification  # CLIP has no classifier
    model = kind(config)
    with pytest.raises(ExportError, match="relative_position_bias"):
        to_checkpoint(model, tmp_path / name, format=target)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_kernels_that_cannot_add_a_bias_are_refused(implementation: str) -> None:
    model = PlainViTModel(tiny_config(**VARIATIONS["relative_table"]))
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match="cannot add a relative position bias"):
        model(pixels())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attention_type": "differential"}, "differential"),
        ({"num_register_tokens": 2}, "rows for a class token only"),
        ({"patch_dropout_prob": 0.2}, "patch_dropout_prob=0"),
        ({"num_register_tokens": 2, "register_tokens_last": True}, "register_tokens_last"),
    ],
)
def test_biases_without_a_meaning_are_refused(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiny_config(relative_position_bias={"type": "table"}, **fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"relative_position_bias": {"type": "query", "shared": True}}, "vectors in each block"),
        ({"rope_parameters": {"rope_type": "axial"}}, "vectors in each block"),
        ({"num_register_tokens": 2}, "rows for a class token only"),
    ],
)
def test_the_papers_bias_is_refused_beside_what_no_source_combines_with_it(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiny_config(**{"relative_position_bias": {"type": "query"}, **fields})


# Added to the tokens


def test_rows_and_columns_have_half_of_the_channels_each() -> None:
    model: Any = randomize_(PlainViTModel(tiny_config(position_embedding_type="learned_2d")))
    module = model.embeddings.position_embeddings
    table = module((3, 4), torch.zeros(1)).detach()
    assert table.shape == (1 + 12, 40)
    assert torch.equal(table[:1], module.prefix)
    for patch in range(12):
        expected = torch.cat((module.rows[patch // 4], module.columns[patch % 4]))
        assert torch.equal(table[1 + patch], expected)


@pytest.mark.parametrize("mode", ["bicubic", "bicubic_antialias", "bilinear", "bilinear_align_corners"])
def test_tables_of_rows_and_columns_are_resampled_like_the_whole_table(mode: Any) -> None:
    fields = {"position_embedding_type": "learned_2d", "use_class_token": False, "pooling": "mean"}
    config = tiny_config(**fields, position_resampling=mode)
    model: Any = randomize_(PlainViTModel(config))
    module = model.embeddings.position_embeddings
    whole = module((3, 4), torch.zeros(1))
    for grid in ((5, 6), (2, 3), (3, 9)):
        assert difference(module(grid, torch.zeros(1)), resample_positions(whole, (3, 4), grid, mode)) < 1e-5


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"hidden_size": 45}, "must be even"), ({"position_resampling": "truncate"}, "not truncated by any source")],
)
def test_tables_of_rows_and_columns_without_a_meaning_are_refused(fields: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiny_config(position_embedding_type="learned_2d", **fields)
