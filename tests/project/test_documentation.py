"""The code on pages that need no training works in this environment; the menu and a table are complete.

`tests/project/test_documentation_installed.py` runs the README, and every page in the nightly run, like a new user.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from plain_vit.conversion.registry import FORMATS, format_named
from plain_vit.inference.engines import ENGINES
from plain_vit_command import main
from tests import ROOT
from tests.sizes import few
from tools import tabulate_options

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    "reference/model.md",
    "reference/vit_pytorch.md",
    "reference/transformers.md",
    "guide/look_inside.md",
    "reference/other_tools.md",
]


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    entries = [
        one for entry in menu for value in entry.values() for one in ([value] if isinstance(value, str) else value)
    ]
    listed = {one if isinstance(one, str) else next(iter(one.values())) for one in entries}
    docs = ROOT / "docs"
    assert {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} <= listed


def test_every_link_to_a_file_leads_somewhere() -> None:
    link = re.compile(r"\]\((?!https?://|#)([^()#]+)(?:#[^)]*)?\)")
    pages = [*ROOT.glob("*.md"), *(page for room in ("docs", "benchmarks") for page in (ROOT / room).rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages
        for path in link.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / path).exists()
    ]
    assert broken == []


def test_the_readme_is_short_and_its_first_screen_converts_a_model() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:40])
    for said in ("make demo", "make test", "pip install .", "from_module(vit)", "```text\n0.0\n```"):
        assert said in first


def test_the_page_of_commands_says_what_each_format_is_written_as() -> None:
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| a (folder|file)(?:: ([^|]+))? \|", page, re.MULTILINE)
    said = {
        name: tuple(re.findall(r"\.[a-z]+", suffixes))
        for names, _, suffixes in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert said == {name: format_named(name).suffixes for name in FORMATS} | dict.fromkeys(ENGINES, ())


def test_guides_are_short() -> None:
    lines = {page.name: page.read_text(encoding="utf-8").count("\n") for page in (ROOT / "docs" / "guide").glob("*.md")}
    assert {name: number for name, number in lines.items() if number >= 150} == {}


@pytest.mark.slow
def test_the_tables_of_options_and_fields_are_up_to_date() -> None:
    for path, page in ((tabulate_options.OPTIONS, "options_page"), (tabulate_options.CONFIG, "config_page")):
        text = path.read_text(encoding="utf-8")
        assert getattr(tabulate_options, page)() == text, "run `python -m tools.tabulate_options`"


@pytest.mark.slow
@pytest.mark.parametrize("page", few(PAGES, 3))
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    for kind, code in BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(code, page, "exec"), names)
        elif kind == "bash":
            for line in code.replace("\\\n", "").splitlines():
                program, *words = shlex.split(line, comments=True)
                assert program in ("pip", "plain-vit")
                if program == "plain-vit":
                    assert main(words) == 0, line
