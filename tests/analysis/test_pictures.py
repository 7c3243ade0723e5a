"""The pictures and the sheet: each figure shows its array, and the page needs nothing else.

The look of pictures is judged by eye; these tests read back colours, labels and limits.
"""

import base64
import os
import re
from functools import partial
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from ipykernel.inprocess.manager import InProcessKernelManager
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.analysis import (
    PatchFilters,
    PositionSimilarity,
    ResampledPositions,
    attention_distance,
    attention_maps,
    attention_rollout,
    average_over_images,
    grad_cam,
    gradient_rollout,
    patch_filters,
    position_similarity,
    predict,
    resampled_positions,
    token_layout,
    token_norms,
)
from plain_vit.analysis.plots import (
    percent,
    plot_attention_distance,
    plot_attention_heads,
    plot_confusion_matrix,
    plot_contributions,
    plot_logit_lens,
    plot_maps_over_images,
    plot_patch_filters,
    plot_position_similarity,
    plot_predictions,
    plot_prefix_similarity,
    plot_relative_position_biases,
    plot_resampled_positions,
    plot_token_norms,
    plot_top_classes,
    plot_training_curves,
)
from plain_vit.analysis.sheet import SECTIONS, draw_sheet
from plain_vit.analysis.words import class_labels
from plain_vit.errors import AnalysisError, DataError, OutputExistsError
from plain_vit.image_processing_plain_vit import PlainViTImageProcessor
from tests import ROOT
from tests.conftest import randomize_
from tests.processes import in_a_process, server
from tests.tiny import VARIATIONS, tiny_config

NAMES = ["ant", "bee", "cow, ox", "a class whose name is far too long", "e", "f", "g"]


def build(kind: type = PlainViTForImageClassification, **fields: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 23,
        "image_size": (12, 20), "patch_size": (3, 4), "num_labels": 7,
    }  # fmt: skip
    config = PlainViTConfig(**{**sizes, **fields})
    config.id2label = dict(enumerate(NAMES))
    return randomize_(kind(config))


def processor(**settings: Any) -> PlainViTImageProcessor:
    return PlainViTImageProcessor(**{"size": {"height": 15, "width": 16}, **settings})


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


def text_of(figure: Figure) -> str:
    """Return all text in a figure, line by line."""
    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))  # type: ignore[attr-defined]


def shown(figure: Figure) -> list[np.ndarray]:
    """Return the arrays drawn as images, without colour scales."""
    return [np.asarray(image.get_array()) for axis in figure.axes for image in axis.get_images()]


# Figures


def test_a_map_lies_over_its_whole_image() -> None:
    images, maps = random(3, 15, 16, 3), random(3, 5, 4)
    figure = plot_maps_over_images(images, maps, titles=["one", "two", "three"], meaning="rollout")
    pictures = [axis.get_images() for axis in figure.axes if axis.get_images()]
    assert [len(layers) for layers in pictures] == [1, 2] * 3
    for i, (grey, tint) in enumerate(pictures[1::2]):
        np.testing.assert_array_equal(np.asarray(tint.get_array()), maps[i])
        assert tuple(tint.get_extent()) == tuple(grey.get_extent())
        assert tint.get_clim() == (0, maps.max())  # one scale for all
    ranges = {f"{a_map.min():.2g} to {a_map.max():.2g}" for a_map in maps}
    assert {"one", "two", "three", "0", f"{maps.max():.2g}", *ranges} <= set(text_of(figure).split("\n"))


def test_noise_next_to_signal_looks_like_noise() -> None:
    maps = random(2, 5, 4)
    maps[1] *= 1e-3
    figure = plot_maps_over_images(random(2, 15, 16, 3), maps)
    tints = [axis.get_images()[1] for axis in figure.axes if len(axis.get_images()) == 2]
    strong, weak = (tint.to_rgba(tint.get_array())[..., 3] for tint in tints)
    assert strong.max() > 0.85
    assert weak.max() < 0.01


def test_the_scale_has_the_colours_that_the_map_shows() -> None:
    figure = plot_maps_over_images(np.full((1, 15, 16), 0.5, dtype=np.float32), random(1, 5, 4))
    figure.draw_without_rendering()
    grey, tint = figure.axes[1].get_images()
    ends = tint.cmap([0.0, 0.5, 1.0])
    level = grey.to_rgba(np.array([[0.5]]))[0, 0, :3]
    over = ends[:, 3:] * ends[:, :3] + (1 - ends[:, 3:]) * level
    bar = figure.axes[-1].collections[-1].cmap([0.0, 0.5, 1.0])[:, :3]
    np.testing.assert_allclose(bar, over, atol=0.01)


def test_heads_are_columns_and_layers_rows() -> None:
    maps = random(2, 3, 5, 4)
    figure = plot_attention_heads(random(15, 16), maps)
    tints = [axis.get_images()[1] for axis in figure.axes if axis.get_images()]
    for tint, weights in zip(tints, maps.reshape(6, 5, 4), strict=True):
        np.testing.assert_array_equal(np.asarray(tint.get_array()), weights)
        assert tint.get_clim() == (0, weights.max())
    below = [axis.get_xlabel() for axis in figure.axes if axis.get_images()]
    assert below == [f"{weights.max():.2g}" for weights in maps.reshape(6, 5, 4)]
    assert figure.axes[3].get_ylabel() == "layer 1"
    assert [axis.get_title() for axis in figure.axes[:3]] == ["head 0", "head 1", "head 2"]
    rows = plot_attention_heads(random(2, 15, 16, 3), maps, row_names=["x", "y"])
    greys = [axis.get_images()[0] for axis in rows.axes if axis.get_images()]
    assert not np.array_equal(np.asarray(greys[0].get_array()), np.asarray(greys[3].get_array()))


def test_right_and_wrong_predictions_differ_in_mark_and_colour() -> None:
    probabilities = np.zeros((3, 7))
    probabilities[0, 2], probabilities[1, 3], probabilities[2, 0] = 0.999, 0.512, 1.0
    figure = plot_predictions(random(3, 8, 8), probabilities, NAMES, labels=[2, 1, 0])
    titles = [axis.title for axis in figure.axes[:3]]
    assert [title.get_text() for title in titles] == ["✓ cow: >99%", "✗ a class who…: 51%\nis bee", "✓ ant: 100%"]
    assert titles[0].get_color() == titles[2].get_color() != titles[1].get_color()
    assert "✓" not in text_of(plot_predictions(random(3, 8, 8), probabilities, NAMES))


def test_a_confusion_matrix_is_coloured_by_the_share_of_its_row() -> None:
    figure = plot_confusion_matrix(np.array([[3, 1], [0, 0]]), ["yes", "no"])
    np.testing.assert_array_equal(shown(figure)[0], [[0.75, 0.25], [0, 0]])
    assert "3 of 4 right (75.0%)" in text_of(figure)
    many = plot_confusion_matrix(np.eye(100, dtype=int), [str(i) for i in range(100)])
    assert max(many.get_size_inches()) < 14


def test_training_curves_draw_what_was_logged() -> None:
    rows = [{"step": 1, "loss": 2.0, "learning_rate": 0.1}, {"step": 2, "loss": 1.0},
            {"step": 2, "validation_accuracy": 0.5, "validation_loss": None}]  # fmt: skip
    figure = plot_training_curves(rows)
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss (nats)", "validation accuracy", "learning rate"]
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xydata(), [[1, 2], [2, 1]])
    rows.append({"step": 3, "train_accuracy": 0.4, "test_loss": 1.5, "test_accuracy": 0.6, "train_loss": 0.3})
    colours: dict[str, set[str]] = {"train": {figure.axes[2].lines[0].get_color()}}
    drawn = ["loss", "test", "train"], ["test", "train", "validation"]
    for axis, names in zip(plot_training_curves(rows).axes, drawn, strict=False):
        for line, name in zip(axis.lines, names, strict=True):
            colours.setdefault(name.replace("loss", "train"), set()).add(line.get_color())
    assert [len(each) for each in colours.values()] == [1, 1, 1]  # one colour for each, in all panels
    assert len(set.union(*colours.values())) == 3
    with pytest.raises(ValueError, match="none of 1 rows has 'step'"):
        plot_training_curves([{"epoch": 1, "loss": 3.0}])


@pytest.mark.slow(quick=["1-4", "5-20"])
@pytest.mark.parametrize("channels, tiles", [(3, 4), (1, 4), (5, 20), (30, 48)])
def test_filters_are_drawn_for_any_number_of_channels(channels: int, tiles: int) -> None:
    components = random(4, channels, 3, 4) - 0.5
    figure = plot_patch_filters(PatchFilters(components, np.array([0.4, 0.3, 0.2, 0.05], dtype=np.float32)))
    pictures = shown(figure)
    assert len(pictures) == tiles
    scaled = (components[0] / np.abs(components[0]).max() + 1) / 2
    expected = scaled.transpose(1, 2, 0) if channels == 3 else scaled[0]
    np.testing.assert_allclose(pictures[0], expected, rtol=1e-6)
    assert "95.0% in total" in text_of(figure)
    assert (f" of {channels} channels" in text_of(figure)) == (channels == 30)  # of which there are too many


def test_similarities_are_at_the_positions_of_their_patches() -> None:
    similarity = PositionSimilarity(random(4, 3, 4, 3) * 2 - 1, random(2, 4, 3))
    (mosaic,) = shown(plot_position_similarity(similarity))
    assert mosaic.shape == (4 * 5 - 1, 3 * 4 - 1)  # one row and column between tiles
    np.testing.assert_array_equal(mosaic[10:14, 4:7], similarity.patches[2, 1])
    large = PositionSimilarity(random(20, 16, 20, 16), random(0, 20, 16))
    axis = plot_position_similarity(large).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()][::13] == ["0", "19"]  # 14 of 20, ends included
    prefix = plot_prefix_similarity(similarity, ["class", "register 0"])
    np.testing.assert_array_equal(shown(prefix)[1], similarity.prefix[1])
    with pytest.raises(ValueError, match="1 names for 2 tokens"):
        plot_prefix_similarity(similarity, ["class"])


@pytest.mark.slow
def test_biases_are_drawn_by_layer_and_head_on_one_scale() -> None:
    biases = random(10, 3, 7, 5) - 0.5
    biases[4, 1, 3, 2] = -2.0
    figure = plot_relative_position_biases(biases)
    pictures = shown(figure)
    assert len(pictures) == 8 * 3  # of ten layers
    np.testing.assert_array_equal(pictures[-1], biases[9, 2])
    assert {axis.images[0].get_clim() for axis in figure.axes[:-1]} == {(-2.0, 2.0)}
    text = text_of(figure)
    assert "layer 9" in text
    assert "head 2" in text
    assert "all layers" in text_of(plot_relative_position_biases(biases[:1]))


POSITIONS = {name: fields for name, fields in VARIATIONS.items() if name.startswith(("rotary", "relative"))}
# Sections that show added positions, and sections that need a class token.
OF_ADDED = {"position-similarity", "prefix-similarity"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", POSITIONS)
def test_every_figure_of_positions_in_the_attention_is_drawn_or_says_why_not(
    kind: str, tmp_path: Path, files: list[Path], request: pytest.FixtureRequest
) -> None:
    if kind != "relative_table":
        request.getfixturevalue("unrendered")
    fields = POSITIONS[kind]
    model = randomize_(PlainViTForImageClassification(tiny_config(**fields))).eval()
    prepare = processor(size={"height": 24, "width": 56})
    text = draw_sheet(files[:1], model, prepare, tmp_path / "out", progress=False).read_text(encoding="utf-8")
    names = {section.name for section in SECTIONS} - {"correspondences"}  # of which one image has none
    names -= set() if kind.startswith("relative") else {"relative-biases"}
    added = fields.get("position_embedding_type") != "none"
    prefix = model.config.num_prefix_tokens > 0
    missing = (set() if added else OF_ADDED) | (set() if prefix else {"prefix-similarity"})
    missing |= {"relative-biases"} if kind in ("relative_query", "relative_windows") else set()  # each query's own
    missing |= {"gradient-rollout"} if kind == "relative_windows" else set()
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == names - missing
    assert text.count("Nothing to draw: ") == len(missing)
    assert text.count("the model adds no position embeddings to its tokens") == (0 if added else 2)


def test_distances_are_drawn_in_pixels_by_layer() -> None:
    distances = random(3, 4) * 50
    axis = plot_attention_distance(distances, even=60).axes[0]
    np.testing.assert_allclose(axis.collections[2].get_offsets()[:, 1], distances[2])
    np.testing.assert_allclose(axis.lines[0].get_ydata(), distances.mean(axis=1))
    assert axis.get_ylabel() == "mean attention distance (pixels)"
    assert axis.get_ylim()[0] == 0
    assert axis.get_ylim()[1] > 60


def test_the_logit_lens_draws_probabilities_of_the_final_favourites() -> None:
    logits = np.log(np.array([[[0.2, 0.7, 0.1], [0.1, 0.3, 0.6]]]))
    figure = plot_logit_lens(random(1, 8, 8), logits, NAMES[:3], top=2)
    first, second = figure.axes[1].lines
    np.testing.assert_allclose(first.get_ydata(), [0.1, 0.6])
    np.testing.assert_allclose(second.get_ydata(), [0.7, 0.3])
    legend = figure.axes[1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["cow: 60%", "bee: 30%"]
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["emb.", "0"]


def test_several_labels_have_their_own_probabilities_and_a_regression_has_numbers_in_order() -> None:
    logits, shares = np.array([[[-1.0, 3.0, 0.5], [2.0, -4.0, 30.0]]]), np.array([[0.2, 0.9, 0.8]])
    several = plot_logit_lens(random(1, 8, 8), logits, NAMES[:3], top=2, problem_type="multi_label_classification")
    np.testing.assert_allclose(several.axes[1].lines[1].get_ydata(), 1 / (1 + np.exp([1.0, -2.0])))
    numbers = plot_logit_lens(random(1, 8, 8), logits, NAMES[:3], top=2, problem_type="regression").axes[1]
    np.testing.assert_allclose(numbers.lines[1].get_ydata(), [3, -4])
    assert [text.get_text() for text in numbers.get_legend().get_texts()] == ["ant: 2", "bee: -4"]
    assert numbers.get_ylim()[0] < -4
    bars = plot_top_classes(random(1, 8, 8), logits[:, 1], NAMES[:3], problem_type="regression").axes[1]
    assert [bar.get_width() for bar in bars.containers[0]] == [2, -4, 30]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["ant", "bee", "cow"]
    assert {"2", "-4", "30"} <= {text.get_text() for text in bars.texts}
    assert bars.get_xlim()[0] < -4
    assert bars.get_xlim()[1] > 30
    probable = plot_top_classes(random(1, 8, 8), shares, NAMES[:3], problem_type="multi_label_classification").axes[1]
    assert [bar.get_width() for bar in probable.containers[0]] == [0.9, 0.8, 0.2]


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_a_sheet_shows_what_a_model_of_several_labels_or_numbers_says(
    tmp_path: Path, files: list[Path], problem: str, unrendered: None
) -> None:
    model = build(problem_type=problem)
    draw_sheet(files, model, processor(), tmp_path / "sheet", progress=False)
    page = Page((tmp_path / "sheet" / "index.html").read_text(encoding="utf-8"))
    with torch.no_grad():
        logits = model.eval()(prepared(files)).logits
    said = [text for text in page.texts if text.startswith(("Bars of", "Lines of"))]
    assert len(said) == 2
    if problem == "regression":
        assert f"image <0>: ant {logits[0, 0]:.4g}, bee {logits[0, 1]:.4g}, cow {logits[0, 2]:.4g}" in said[0]
        assert not any("%" in text for text in said)
    else:
        best = logits[0].argmax()
        assert f"image <0>: {class_labels(NAMES, 18)[best]} {percent(logits[0, best].sigmoid().item())}" in said[0]


def test_norms_show_each_kind_of_token() -> None:
    model = build(num_register_tokens=1)
    pixels = torch.randn(1, 3, 15, 16)
    norms, layout = token_norms(model, pixels)[0], token_layout(model, pixels)
    figure = plot_token_norms(norms, layout, random(15, 16, 3))
    np.testing.assert_array_equal(shown(figure)[1], norms[-1, 2:].reshape(5, 4))
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    np.testing.assert_array_equal(lines["register 0"], norms[:, 1])
    np.testing.assert_array_equal(lines["class"], norms[:, 0])


def test_contributions_have_a_scale_with_zero_in_its_middle() -> None:
    contributions = random(2, 3, 6, 5) - 0.2
    figure = plot_contributions(random(2, 6, 5, 3), contributions)
    signed = figure.axes[1].get_images()[0]
    np.testing.assert_allclose(np.asarray(signed.get_array()), contributions[0].sum(axis=0))
    low, high = signed.get_clim()
    assert low == -high


def test_resampled_positions_are_drawn_along_the_directions_of_the_first_grid() -> None:
    before = np.zeros((4, 5, 6), dtype=np.float32)
    before[..., 2] = np.arange(4)[:, None] - 1.5  # only the row counts, in one feature
    after = np.zeros((7, 3, 6), dtype=np.float32)
    after[..., 2] = 1.0
    pictures = shown(plot_resampled_positions(ResampledPositions(before, after), count=1))
    np.testing.assert_allclose(np.abs(pictures[0]), np.abs(before[..., 2]), atol=1e-6)
    np.testing.assert_allclose(np.abs(pictures[1]), np.ones((7, 3)), atol=1e-6)


def test_no_figure_is_shown_or_kept() -> None:
    before = pyplot.get_fignums()
    figure = plot_top_classes(random(3, 8, 8), random(3, 7), NAMES)
    assert pyplot.get_fignums() == before
    buffer = BytesIO()
    figure.savefig(buffer)
    assert Image.open(buffer).size[0] > 100


# The sheet


class Page(HTMLParser):
    """Parse the content and the references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.sources.append(values["src"] or "")
            self.texts.append(values["alt"] or "")
        if tag == "a":
            self.links.append(values["href"] or "")
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for i, size in enumerate([(30, 20), (8, 8), (21, 33)]):
        path = tmp_path / f"image <{i}>.png"
        Image.fromarray((random(size[1], size[0], 3) * 255 * (i + 1) / 3).astype(np.uint8)).save(path)
        paths.append(path)
    return paths


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the figures of a sheet without rendering them, which would take most of the time."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, data, **options: data.write(b"PNG"))


def prepared(files: list[Path]) -> torch.Tensor:
    return processor()([Image.open(path) for path in files], return_tensors="pt")["pixel_values"]


SIZES = ("20 × 30", "8 × 8", "33 × 21")


@pytest.mark.slow
def test_a_sheet_holds_every_picture_and_every_array(tmp_path: Path, files: list[Path]) -> None:
    model, out = build(num_register_tokens=2), tmp_path / "sheet"
    assert draw_sheet(files, model, processor(), out, names=("a <model>", ""), progress=False) == out / "index.html"
    text = (out / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    drawn = [section for section in SECTIONS if section.name != "relative-biases"]  # which this model has not
    assert page.links == [f"{section.name}.png" for section in drawn]
    assert sorted(page.links) == sorted(path.name for path in out.glob("*.png"))
    embedded = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in page.sources]
    assert len(embedded) == 3 + len(drawn)  # thumbnails first
    assert page.texts[:3] == [f"The image image <{i}>.png, {size} pixels" for i, size in enumerate(SIZES)]
    likeliest = class_labels(NAMES, 18)[predict(model, prepared(files))[0].argmax()]
    assert f"image <0>: {likeliest} " in page.texts[3]
    assert len(set(page.texts)) == len(page.texts)  # each says what its own picture shows
    assert all(len(text) > 60 and re.search(r"\d", text) for text in page.texts[3:])
    assert embedded[3] == (out / "top-classes.png").read_bytes()
    assert not re.search(r"(src|href)=\"(https?:|//|/)", text)
    assert "a &lt;model&gt;" in text
    assert "20 × 30 pixels" in text
    table = text[text.index("<table>") : text.index("</table>")]
    assert {len(re.findall("<t[hd]>", row)) for row in table.split("<tr>")[1:]} == {2}  # head and rows alike
    with Image.open(out / "top-classes.png") as bars:
        assert bars.width <= 366  # a phone of 390 pixels, less the margins
    assert "prepared by the image processor as 15 × 16 pixels" in text

    pixels = prepared(files)
    arrays = np.load(out / "arrays.npz")
    for i, image in enumerate(pixels.split(1)):
        np.testing.assert_array_equal(arrays["rollout"][i], attention_rollout(model, image)[0])
        np.testing.assert_array_equal(arrays["grad_cam"][i], grad_cam(model, image)[0])
        np.testing.assert_array_equal(arrays["probabilities"][i], predict(model, image)[0])
        np.testing.assert_array_equal(arrays["attention_last_layer"][i], attention_maps(model, image, layers=1)[0, 0])
    np.testing.assert_array_equal(arrays["patch_filters"], patch_filters(model).components)
    np.testing.assert_array_equal(arrays["position_similarity"], position_similarity(model, (5, 4)).patches)
    expected = average_over_images(attention_distance, model, [pixels], progress=False)
    np.testing.assert_allclose(arrays["attention_distance"], expected, rtol=1e-6)


@pytest.mark.slow
def test_texts_tell_distances_apart_and_name_files_beside_classes(
    tmp_path: Path, files: list[Path], unrendered: None
) -> None:
    model = build()
    model.classifier.weight.data.zero_()  # all images are of one class
    draw_sheet(files, model, processor(), tmp_path / "sheet", progress=False)
    page = Page((tmp_path / "sheet" / "index.html").read_text(encoding="utf-8"))
    likeliest = NAMES[model.classifier.bias.argmax()]
    of_classes = [text for text in page.texts if f" as {likeliest}: row" in text]
    assert len(of_classes) == 2  # Grad-CAM and gradient rollout
    assert all(f"image <{i}> as {likeliest}: row" in text for text in of_classes for i in range(3))
    distances = np.load(tmp_path / "sheet" / "arrays.npz")["attention_distance"]
    (said,) = (text for text in page.texts if text.startswith("A point for each head"))
    assert f"goes from {distances[0].mean():.1f} pixels in layer 0 to {distances[-1].mean():.1f} in layer 1" in said
    assert f"shortest ({distances.min():.1f})" in said
    assert f"longest ({distances.max():.1f})" in said
    assert f"{distances.min():.1f}" != f"{distances.max():.1f}"
    assert f"{distances.min():.0f}" == f"{distances.max():.0f}"  # in whole pixels they would be the same


@pytest.mark.slow
def test_two_models_are_side_by_side_and_missing_figures_are_explained(
    tmp_path: Path, files: list[Path], unrendered: None
) -> None:
    other = build(PlainViTModel, pooling="mean", use_class_token=False, position_embedding_type="none")
    draw_sheet(
        files[:1], build(), processor(), tmp_path / "sheet", names=("one", "two"), progress=False,
        compare=(other, processor(size={"height": 12, "width": 20})),
    )  # fmt: skip
    text = (tmp_path / "sheet" / "index.html").read_text(encoding="utf-8")
    assert Page(text).open == []
    assert (tmp_path / "sheet" / "rollout-compared.png").exists()
    assert not (tmp_path / "sheet" / "grad-cam-compared.png").exists()
    assert text.count('class="row pair"') == text.count("<h2 ") > 5
    assert text.count("returns no class scores for an image") == 2
    assert text.count("the model has no labels, and there is no second image to compare with") == 2
    assert text.count("the model adds no position embeddings") == 2
    assert "grad_cam" not in np.load(tmp_path / "sheet" / "arrays-compared.npz")
    assert np.load(tmp_path / "sheet" / "arrays-compared.npz")["rollout"].shape == (1, 4, 5)


@pytest.mark.slow
def test_a_model_without_a_classifier_shows_what_makes_images_alike(
    tmp_path: Path, files: list[Path], unrendered: None
) -> None:
    model, image_processor = build(PlainViTModel), processor()
    draw_sheet(files[:3], model, image_processor, tmp_path / "sheet", progress=False)
    arrays, inputs = np.load(tmp_path / "sheet" / "arrays.npz"), image_processor([*map(Image.open, files[:3])])
    pooled = model.eval()(torch.stack([*inputs["pixel_values"]])).pooler_output.detach()
    targets = [partial(torch.cosine_similarity, pooled[other], dim=0) for other in (1, 0, 0)]
    for name, function in (("grad_cam", grad_cam), ("gradient_rollout", gradient_rollout)):
        expected = function(model, inputs, targets)
        assert expected.max() > 0
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_pixels_that_fill_no_patch_are_not_drawn(tmp_path: Path, files: list[Path], unrendered: None) -> None:
    model = build(drop_partial_patches=True)
    draw_sheet(files[:1], model, processor(size={"height": 14, "width": 19}), tmp_path / "sheet", progress=False)
    assert np.load(tmp_path / "sheet" / "arrays.npz")["rollout"].shape == (1, 4, 4)


def test_a_sheet_that_cannot_be_drawn_leaves_nothing(tmp_path: Path, files: list[Path]) -> None:
    model, out = build(), tmp_path / "sheet"
    broken = tmp_path / "broken.png"
    broken.write_bytes(files[0].read_bytes()[:200])
    text = tmp_path / "text.png"
    text.write_text("no image")
    missing = tmp_path / "missing.png"
    for path, message in (
        (broken, "cannot be read"),
        (text, "not an image of a known format"),
        (missing, "No such file"),
    ):
        with pytest.raises(DataError, match=message):
            draw_sheet([files[0], path], model, processor(), out)
    with pytest.raises(AnalysisError, match="there is no image to show"):
        draw_sheet([], model, processor(), out)
    with pytest.raises(AnalysisError, match="model has no image processor"):
        draw_sheet(files, model, None, out)
    with pytest.raises(AnalysisError, match="expected a plain ViT"):
        draw_sheet(files, torch.nn.Linear(2, 3), processor(), out)
    with pytest.raises(AnalysisError, match="is not a multiple of patch_size"):
        draw_sheet(files, model, processor(size={"height": 14, "width": 20}), out)
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(OutputExistsError):
        draw_sheet(files, model, processor(), out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_resampled_positions_of_a_model_can_be_drawn() -> None:
    figure = plot_resampled_positions(resampled_positions(build(), (15, 16)), count=3)
    assert sorted(picture.shape for picture in shown(figure)) == [(4, 5)] * 3 + [(5, 4)] * 3


def pictures_of(notebook: Path) -> int:
    """Run a notebook in a kernel in this process, and return the number of cells that show a picture."""
    manager = InProcessKernelManager()
    manager.start_kernel()
    shell = manager.kernel.shell
    os.chdir(notebook.parent)
    pictures = 0
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            done = shell.run_cell(cell.source)
            done.raise_error()
            pictures += "image/png" in shell.display_formatter.format(done.result)[0]
    return pictures


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    assert in_a_process(pictures_of, ROOT / "examples" / "look_inside.ipynb", context=server) == 12
