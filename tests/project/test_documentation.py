"""Pages that need no training do what they say, here, in this environment; the menu and a table are complete.

`tests/project/test_documentation_installed.py` runs the README, and nightly every page, as a newcomer does.
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

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    entries = [
        one for entry in menu for value in entry.values() for one in ([value] if isinstance(value, str) else value)
    ]
    listed = {one if isinstance(one, str) else next(iter(one.values())) for one in entries}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed


def test_the_readme_says_what_each_format_is_written_as() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| a (folder|file)(?:: ([^|]+))? \|", readme, re.MULTILINE)
    said = {
        name: tuple(re.findall(r"\.[a-z]+", suffixes))
        for names, _, suffixes in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert said == {name: format_named(name).suffixes for name in FORMATS} | dict.fromkeys(ENGINES, ())


@pytest.mark.slow
@pytest.mark.parametrize("page", few(["model", "vit_pytorch", "transformers", "look_inside"], 2))
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    for kind, code in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(code, f"{page}.md", "exec"), names)
        elif kind == "bash":
            for line in code.replace("\\\n", "").splitlines():
                program, *words = shlex.split(line, comments=True)
                assert program in ("pip", "plain-vit")
                if program == "plain-vit":
                    assert main(words) == 0, line
