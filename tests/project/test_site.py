"""The documentation as a site: built without a warning, complete, self-contained, readable on a phone."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: the extra `docs` has it")

from tests.project.conftest import served
from tools.documentation import REFERENCE, public_names

pytestmark = pytest.mark.slow

PAGES = (
    *("index", "reference/model", "guide/fine_tune", "guide/look_inside", "reference/what_opens", "notes/decisions"),
    *("api/models", "api/conversion"),
)


class Loaded(HTMLParser):
    """Collects what a page loads, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.anchors.add(known.get("id") or "")
        if tag in ("script", "img", "iframe", "source"):
            self.places.append(known.get("src") or "")
        elif tag == "link" and known.get("rel") not in ("canonical", "prev", "next"):
            self.places.append(known.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as address:
        yield address


def read(page: Path) -> Loaded:
    loaded = Loaded()
    loaded.feed(page.read_text(encoding="utf-8"))
    return loaded


def test_every_public_name_has_its_place_with_its_source(site: Path) -> None:
    listed = {module for _, modules in REFERENCE.values() for module in modules}
    for module in ("plain_vit", "plain_vit.conversion", "plain_vit.analysis", "plain_vit.inference.adapters"):
        assert module in listed
        assert set(public_names(module)) == set(importlib.import_module(module).__all__)
    for page, (_, modules) in REFERENCE.items():
        text = (site / page).with_suffix(".html").read_text(encoding="utf-8")
        names = [f"{module}.{name}" for module in modules for name in public_names(module)]
        assert {f"{name}" for name in names} <= read((site / page).with_suffix(".html")).anchors
        assert text.count("Source code in") >= len(names)


def test_no_page_loads_anything_from_elsewhere_and_all_that_it_loads_is_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        for place in read(page).places:
            assert not re.match(r"(https?:)?//", place), (page, place)
            path = place.partition("#")[0].partition("?")[0]
            if path and not path.startswith("data:") and page.name != "404.html":
                assert (page.parent / path).is_file(), (page, place)


@pytest.mark.parametrize("opened", ["as a folder", "from a server"])
def test_the_search_finds_a_name(opened: str, site: Path, address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}index.html" if opened == "from a server" else (site / "index.html").as_uri())
    page.locator("input.md-search__input").press_sequentially("attention_rollout")
    page.wait_for_selector("a.md-search-result__link", timeout=60_000)
    places = [found.get_attribute("href") for found in page.query_selector_all("a.md-search-result__link")]
    assert any(place.endswith("#plain_vit.analysis.attention_rollout") for place in places)


def test_no_page_scrolls_sideways(address: str, browser: Any) -> None:
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    # What a page still loads when it is left is aborted.
    page.on("requestfailed", lambda request: faults.extend([request.url] * ("ABORTED" not in request.failure)))
    for name in PAGES:
        page.goto(f"{address}{name}.html")
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(300)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} wide"
        assert page.evaluate("[...document.images].every(i => i.loading === 'lazy' || i.naturalWidth > 0)"), name
    assert faults == []
