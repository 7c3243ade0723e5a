"""Untrusted names of files and classes in figures are drawn literally and stay different."""

import copy
import pickle
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import hypothesis
import matplotlib
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from hypothesis import strategies
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from safetensors.torch import save_file
from vit_pytorch import ViT

from plain_vit.analysis import (
    Correspondences,
    PatchComponents,
    PositionSimilarity,
    dense_plots,
    plots,
    words,
)
from plain_vit.analysis.inspection import TokenLayout
from plain_vit.analysis.words import class_labels, distinct_labels, drawable, lacking_letters, plain_figure
from plain_vit_command import main
from tests.sizes import draws

RAREST = "\U00012000"  # a cuneiform sign, which the fonts of matplotlib do not have
HOSTILE = [
    "cost $5 and $6", r"$\frac$", r"\$5 and \$6", "$", "a_b^c", "_hidden", "", " ", "a\nb", "tab\t", "\x00\x1b[2J",
    "\u202egnp.cod", "שלום עולם", "مرحبا", "猫", "👩‍👩‍👧", "e\u0301" * 50, "\u0301", "x" * 5000, "\udcff",
    "😀", "\ud800", "%d {} {0}", "<b>&amp;", "\\", "'\"", "ﷺ", RAREST, "a, b", ",", "🇩🇪", "\u200b", "\ufeff",
    "a" * 30 + "1", "a" * 30 + "2",
]  # fmt: skip
NAMES = strategies.lists(
    strategies.one_of(
        strategies.sampled_from(HOSTILE),
        strategies.text(strategies.characters(), max_size=40),
        strategies.text("$\\_^{}%&#~", max_size=12),
    ),
    min_size=3,
    max_size=3,
)
ROWS = 3
IMAGES = np.zeros((ROWS, 6, 5, 3), dtype=np.float32)
MAPS = np.linspace(0, 1, ROWS * 3 * 2, dtype=np.float32).reshape(ROWS, 3, 2)
PROBABILITIES = np.eye(ROWS, dtype=np.float32) * 0.5 + 1 / 6
LAYOUT = TokenLayout((3, 2), (2, 2), ("class",), ())

# Every function that draws names, called with three names.
DRAWN: dict[str, Callable[[list[str]], Figure]] = {
    "maps": lambda names: plots.plot_maps_over_images(IMAGES, MAPS, titles=names, meaning=names[0]),
    "heads": lambda names: plots.plot_attention_heads(
        IMAGES, np.stack([MAPS] * 3, axis=1), row_names=names, column_names=names
    ),
    "top classes": lambda names: plots.plot_top_classes(IMAGES, PROBABILITIES, names, titles=names),
    "predictions": lambda names: plots.plot_predictions(IMAGES, PROBABILITIES, names, [0, 2, 1]),
    "training batch": lambda names: plots.plot_training_batch(IMAGES, np.eye(ROWS) * 0.5 + 1 / 6, names),
    "confusion": lambda names: plots.plot_confusion_matrix(np.eye(ROWS, dtype=int), names),
    "pairs": lambda names: plots.plot_confused_pairs([2, 1], [0.5, 0.1], [(names[0], names[1]), (names[1], names[2])]),
    "lens": lambda names: plots.plot_logit_lens(IMAGES, np.stack([PROBABILITIES] * 2, axis=1), names, titles=names),
    "contributions": lambda names: plots.plot_contributions(
        IMAGES, np.ones((ROWS, 3, 6, 5), dtype=np.float32), titles=names, unit=names[0]
    ),
    "components": lambda names: plots.plot_patch_components(
        IMAGES,
        PatchComponents(
            values=np.stack([MAPS] * 3, axis=-1),
            foreground=MAPS > 0.2,
            explained_variance=np.full(3, 0.1),
            mean=np.zeros(2),
            directions=np.zeros((2, 3)),
            side=np.zeros((2, 2)),
            limits=np.stack([np.zeros(3), np.ones(3)]),
        ),
        titles=names,
    ),
    "similarity": lambda names: plots.plot_patch_similarity(IMAGES, MAPS, (1, 1), titles=names),
    "correspondences": lambda names: plots.plot_correspondences(
        IMAGES[0],
        IMAGES[1],
        Correspondences(np.array([[0, 1]]), np.array([[2, 0]]), np.array([0.5]), ((3, 2), (3, 2))),
        titles=(names[0], names[1]),
    ),
    "prefix": lambda names: plots.plot_prefix_similarity(PositionSimilarity(np.ones((3, 2, 3, 2)), MAPS), names),
    "reliability": lambda names: plots.plot_reliability(
        np.ones(ROWS, dtype=int), np.full(ROWS, 0.5), np.full(ROWS, 0.4), of=names[0], x=names[1]
    ),
    "numbers": lambda names: plots.plot_predicted_numbers(np.eye(ROWS), np.eye(ROWS) * 0.9, names),
    "steps": lambda names: plots.plot_step_times({name: [1.0, 2.0] for name in names}),
    "curves": lambda names: plots.plot_training_curves(
        [{names[0] + "x": 1, f"loss {name}": 2.0, f"accuracy {name}": 0.5} for name in names], x=names[0] + "x"
    ),
}


@pytest.fixture(autouse=True)
def _warns_anew() -> None:
    words._warn_of.cache_clear()


def texts_of(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text()]


def assert_drawn_plainly(figure: Figure) -> None:
    assert type(figure) is Figure  # libraries know it by the name of its class
    figure.draw_without_rendering()
    for text in texts_of(figure):
        if not re.fullmatch(r"[−\d.e+]+", text.get_text()):  # a tick label, not a name
            assert not text.get_parse_math()
            assert not text.get_usetex()
        assert all(line.isprintable() for line in text.get_text().split("\n"))
        assert len(text.get_text()) <= 250


@pytest.mark.slow(quick=["training batch", "contributions"])
@pytest.mark.filterwarnings("ignore:no installed font has")
@pytest.mark.parametrize("case", DRAWN)
@hypothesis.settings(max_examples=draws(3, nightly=200))
@hypothesis.given(names=NAMES)
def test_every_picture_draws_names_as_they_are(case: str, names: list[str]) -> None:
    assert_drawn_plainly(DRAWN[case](names))


def test_every_function_that_takes_names_is_among_those_tried() -> None:
    source = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (plots, dense_plots))
    assert source.count("\ndef plot_") == len(DRAWN) + 7  # seven draw no names
    assert "Figure(" not in source  # but `plain_figure`


@pytest.mark.slow(quick=["none"])
@pytest.mark.parametrize("layout", ["constrained", "none"])
def test_words_are_plain_in_a_layout_of_the_caller_and_in_a_copy(layout: str) -> None:
    names = ["cost $5 and $6", r"\$5 and \$6", r"$\frac$"]
    figure = DRAWN["maps"](names)
    figure.set_layout_engine(layout)
    for drawn in (figure, copy.deepcopy(figure), pickle.loads(pickle.dumps(figure))):
        drawn.savefig(BytesIO())
        assert_drawn_plainly(drawn)
        assert {*names} <= {text.get_text() for text in texts_of(drawn)}


@pytest.mark.slow(quick=["text.usetex"])
@pytest.mark.parametrize("setting", ["axes.formatter.use_mathtext", "text.usetex"])
def test_whatever_matplotlib_is_set_to_words_are_plain(setting: str) -> None:
    with matplotlib.rc_context({setting: True}):  # type: ignore[dict-item]
        for case in ("top classes", "lens", "confusion"):
            figure = DRAWN[case](["$5 and $6", "b", "c"])
            figure.savefig(BytesIO())
            assert_drawn_plainly(figure)
            assert not any("mathdefault" in text.get_text() for text in texts_of(figure))


def test_a_name_that_begins_with_an_underscore_is_in_the_legend() -> None:
    (legend, *_) = [axis.get_legend() for axis in DRAWN["lens"](["_a", "_b", "_c"]).axes if axis.get_legend()]
    assert sorted(text.get_text()[:2] for text in legend.get_texts()) == ["_a", "_b", "_c"]


@pytest.mark.filterwarnings("ignore:no installed font has")
@hypothesis.given(strategies.lists(NAMES, min_size=1, max_size=8), strategies.integers(10, 18))
def test_labels_fit_and_differ(lists: list[list[str]], length: int) -> None:
    names = [name for some in lists for name in some]
    labels = class_labels(names, length)
    assert len(set(labels)) == len(names)
    for label in labels:
        assert label.isprintable()
        assert sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in label) <= length + 8


def test_names_that_would_be_truncated_equally_show_where_they_differ() -> None:
    names = [
        "German shepherd", "German shorthaired pointer", "crane, bird", "crane, machine", "maillot", "maillot",
        "tench, fish", "photograph of the yard 1", "photograph of the yard 2",
    ]  # fmt: skip
    assert class_labels(names) == [
        "German shep…", "German shor…", "crane, bird", "crane, mach…", "maillot (4)", "maillot (5)", "tench",
        "photog…ard 1", "photog…ard 2",
    ]  # fmt: skip
    assert len(set(class_labels(["x (1)", "x", "x"]))) == 3
    assert distinct_labels(["1", "1"], ["a/1.png", "b/1.png"], 18) == ["a/1.png", "b/1.png"]


# Fonts


@pytest.fixture
def font_with(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Install a font with these letters, drawn as blocks, during a test, and return its name."""
    added: list[Any] = []

    def install(letters: str) -> str:
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for corner in ((0, 700), (500, 700), (500, 0)):
            pen.lineTo(corner)
        pen.closePath()
        glyphs = [".notdef", *(f"glyph{i}" for i in range(len(letters)))]
        builder = FontBuilder(1000, isTTF=True)
        builder.setupGlyphOrder(glyphs)
        builder.setupCharacterMap({ord(letter): glyphs[i + 1] for i, letter in enumerate(letters)})
        builder.setupGlyf(dict.fromkeys(glyphs, pen.glyph()))
        builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (600, 0)))
        builder.setupHorizontalHeader(ascent=800, descent=-200)
        builder.setupNameTable({"familyName": "Plain Blocks", "styleName": "Regular"})
        builder.setupOS2(usWeightClass=400)
        builder.setupPost()
        builder.save(tmp_path / "blocks.ttf")
        before = list(font_manager.fontManager.ttflist)
        font_manager.fontManager.addfont(str(tmp_path / "blocks.ttf"))
        added.extend(entry for entry in font_manager.fontManager.ttflist if entry not in before)
        forget()
        return "Plain Blocks"

    yield install
    for entry in added:
        font_manager.fontManager.ttflist.remove(entry)
    forget()


def forget() -> None:
    """Clear the caches of fonts."""
    words._installed_fonts.cache_clear()
    words._fallback_fonts.cache_clear()


def test_a_font_that_has_the_letters_is_used(font_with: Callable[[str], str], recwarn: pytest.WarningsRecorder) -> None:
    name = font_with(RAREST)
    figure = plots.plot_maps_over_images(IMAGES, MAPS, titles=[f"a{RAREST}b", "plain", "x"])
    picture = BytesIO()
    figure.savefig(picture)
    titles = {text.get_text(): text for text in texts_of(figure)}
    assert titles[f"a{RAREST}b"].get_fontfamily()[-1] == name
    assert name not in titles["plain"].get_fontfamily()
    assert not recwarn.list  # matplotlib warns of letters that it draws as boxes


def test_characters_that_no_font_has_are_shown_as_code_points_and_reported() -> None:
    forget()
    with pytest.warns(UserWarning, match=f"no installed font has the characters {RAREST}: .*such as Noto Sans CJK"):
        assert drawable(f"a{RAREST}b") == "a[U+12000]b"
    assert lacking_letters(["plain", f"{RAREST}"]) == RAREST
    figure = plots.plot_maps_over_images(IMAGES, MAPS, titles=[f"{RAREST}", "b", "c"])
    figure.savefig(BytesIO())
    assert "[U+12000]" in {text.get_text() for text in texts_of(figure)}


@pytest.mark.skipif(words.IGNORES_DIRECTION, reason="before 3.11, matplotlib has no direction")
def test_text_from_right_to_left_is_drawn_in_its_order() -> None:
    """The first letter of a Hebrew word is its rightmost: lamed, the tallest, is the second of these four."""

    def ink(text: str) -> np.ndarray:
        figure = plain_figure(2, 1)
        figure.text(0.5, 0.4, drawable(text), fontsize=30, ha="center")
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=100)
        dark = np.asarray(Image.open(picture).convert("L")) < 128
        return dark[:, dark.any(axis=0)]

    word = ink("אלאאא")
    highest = np.flatnonzero(word[word.any(axis=1).argmax()])
    assert highest.min() > 0.5 * word.shape[1]


def test_a_matplotlib_without_directions_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "IGNORES_DIRECTION", True)
    words._warn_of_direction.cache_clear()
    with pytest.warns(UserWarning, match="right-to-left text reversed: pip install"):
        drawable("a שלום")


@pytest.mark.slow
def test_the_command_draws_files_of_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "vit.safetensors"  # older releases of torch read no pickle safely
    vit = ViT(image_size=24, patch_size=8, num_classes=3, dim=20, depth=1, heads=2, mlp_dim=28)
    save_file(vit.state_dict(), model)
    files = []
    for i, name in enumerate((r"cost $5 and $6, $\frac$", "_x 猫 שלום", "a\nb\x1b[31m")):
        files.append(tmp_path / f"{name}.png")
        Image.new("RGB", (24, 24), (i * 20, 90, 200 - i * 9)).save(files[-1])
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(f"${i}$ {RAREST}" for i in range(3)), encoding="utf-8")
    known = ("--num-attention-heads", "2", "--image-size", "24", "--patch-size", "8", "--labels", labels)
    words = ["show", *files, "--model", model, "--out", tmp_path / "out", *known]
    with warnings.catch_warnings(action="default"):  # as users have it
        code = main(list(map(str, words)))
    said = capsys.readouterr().err
    assert code == 0, said
    assert "plain-vit: no installed font has the characters" in said
    assert "Traceback" not in said
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert r"cost $5 and $6, $\frac$.png" in page
    assert "No installed font has the characters" in page
