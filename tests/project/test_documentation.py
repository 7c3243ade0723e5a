"""The code blocks of the README and of the model's page do what they say, here, in this environment.

`tests/project/test_documentation_installed.py` runs every page as a newcomer does; this is the part of it that is fast.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from plain_vit.cli import main
from plain_vit.conversion.export import ENGINES
from plain_vit.conversion.sources import FORMATS, format_named
from tests import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORTENED = ["--steps", "2", "--evaluations", "1"]  # what a test adds to a training run


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the examples of a clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_block_of_the_readme_runs_and_prints_what_it_shows(workplace: Path) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {kind for kind, _ in blocks} == {"bash", "console", "python", "text"}
    printed = ""
    for kind, code in blocks:
        if kind == "python":
            printed = run_python(code)
        elif kind == "text":
            assert printed == code
        elif kind == "bash":
            for line in code.replace("\\\n", "").splitlines():
                run_line(line)
        else:
            command, *shown = code.splitlines()
            assert run_command(command.removeprefix("$ "))[1].splitlines() == shown
    drawn, shown_below = (
        np.asarray(Image.open(path).convert("RGB"), dtype=float)
        for path in ("rollout.png", ROOT / "docs" / "pictures" / "rollout.png")
    )
    assert drawn.shape == shown_below.shape
    assert np.abs(drawn - shown_below).mean() < 1  # of 255; other characters or titles differ by more


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
def test_the_blocks_of_the_model_s_page_run_one_after_the_other(workplace: Path) -> None:
    names: dict[str, object] = {"__name__": "model"}
    for kind, code in BLOCK.findall((ROOT / "docs" / "model.md").read_text(encoding="utf-8")):
        assert kind == "python"
        exec(compile(code, "model.md", "exec"), names)


def run_python(code: str) -> str:
    """Run a block as a file of its own would run; return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return output.getvalue()


def run_line(line: str) -> None:
    """Run one line of a shell block; a training run is cut short, and what `pip` installs is here already."""
    words = shlex.split(line, comments=True)
    if words[0] == "plain-vit":
        code, output = run_command(line)
        assert code == 0, output
    elif words[0] == "pip":
        assert words[1] == "install"
    elif words[0] == "make":  # sets up another environment
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        words[0] = str(Path(sys.executable).with_name(words[0]))
        run = subprocess.run([*words, *SHORTENED], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def run_command(line: str) -> tuple[int, str]:
    """Run one `plain-vit` command in this process, its patterns of file names filled in; return all it printed."""
    words = [
        str(match)
        for word in shlex.split(line, comments=True)[1:]
        for match in (sorted(Path().glob(word)) if "*" in word else [word])
    ]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        code = main(words)
    return code, output.getvalue()
