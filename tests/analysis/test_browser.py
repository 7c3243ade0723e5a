"""The pages in a real browser, at two widths: only frames scroll sideways, and text keeps its size."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.analysis.page import html_page, html_table
from plain_vit.analysis.sheet import draw_sheet
from tests.conftest import randomize_

WIDTHS = (390, 1280)
LONG = "a" * 150


@pytest.fixture(scope="module")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draw six images, and two models of thirteen heads and layers side by side, with names of any length."""
    folder = tmp_path_factory.mktemp("sheets")
    files = []
    for i in range(6):
        files.append(folder / f"{i} {LONG}.png")
        Image.new("RGB", (40, 30), (40 * i, 90, 200)).save(files[-1])
    processor = PlainViTImageProcessor(size={"height": 12, "width": 20})

    def model(count: int) -> Any:
        config = PlainViTConfig(
            hidden_size=26, num_hidden_layers=count, num_attention_heads=count, intermediate_size=8,
            image_size=(12, 20), patch_size=(3, 4), num_labels=7, id2label={i: f"{LONG} {i}" for i in range(7)},
        )  # fmt: skip
        return randomize_(PlainViTForImageClassification(config)).eval()

    names = (f"/{LONG}/one", f"/{LONG}/two")
    small, large = (model(2), processor), (model(13), processor)
    return {
        "images": draw_sheet(files, *small, folder / "images", names=names, progress=False),
        "models": draw_sheet(files[:1], *large, folder / "models", names=names, compare=large, progress=False),
    }


def assert_readable(page: Any, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shrunk = page.evaluate(
        "[...document.querySelectorAll('.frame img')].filter(i => i.getBoundingClientRect().width < i.naturalWidth)"
        ".map(i => i.alt)"
    )
    assert shrunk == []
    outside = page.evaluate(
        "[...document.querySelectorAll('h1, h2, p, .frame, .thumbnails figure')].filter("
        "e => e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


@pytest.mark.slow
@pytest.mark.parametrize("which", ["images", "models"])
def test_sheets_can_be_read_at_any_width(browser: Any, sheets: dict[str, Path], which: str) -> None:
    page = browser.new_page()
    page.goto(sheets[which].as_uri())
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert_readable(page, width)
    frames = "[...document.querySelectorAll('.frame')].filter(f => f.scrollWidth > f.clientWidth)"
    assert page.evaluate(f"{frames}.map(f => f.ariaLabel)") == []  # everything fits a desk
    page.close()


@pytest.mark.slow(quick=["1280"])
@pytest.mark.parametrize("width", WIDTHS)
def test_tables_and_titles_of_any_length_stay_on_the_page(browser: Any, tmp_path: Path, width: int) -> None:
    rows = [(LONG, i, LONG, "0.5", "0.25", "x") for i in range(3)]
    table = html_table(("class", "images", "right", "recall", "precision", "F1"), rows, "every class")
    path = tmp_path / "index.html"
    body = f"<h2>{LONG}</h2><div class='row'><section>{table}</section></div>"
    path.write_text(html_page(LONG, body), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(path.as_uri())
    assert_readable(page, width)
    page.close()
