"""Every code block of the README does what it says."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from plain_vit.cli import main
from plain_vit.training.data import load_splits

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORTENED = ["--steps", "2", "--evaluations", "1"]  # what a test adds to a training run


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, and with digits as files."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    save_digits(load_splits("digits")["train"].select(range(40)), tmp_path / "digits" / "train")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_digits(split: Dataset, folder: Path) -> None:
    for number, (image, label) in enumerate(zip(split["image"][:], split["label"][:], strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        image.save(folder / str(label) / f"{number}.png")


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
            for line in code.splitlines():
                run_line(line)
        else:
            command, *shown = code.splitlines()
            assert run_command(command.removeprefix("$ "))[1].splitlines() == shown


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
    """Run one line of a shell block; a training run is cut short, and `make` is only asked what it would do."""
    words = shlex.split(line, comments=True)
    if words[0] == "plain-vit":
        code, output = run_command(line)
        assert code == 0, output
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    else:
        words[0] = str(Path(sys.executable).with_name(words[0]))
        run = subprocess.run([*words, *SHORTENED], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def run_command(line: str) -> tuple[int, str]:
    """Run one `plain-vit` command in this process, its patterns of file names filled in; return all it printed."""
    words = [
        str(match) for word in shlex.split(line)[1:] for match in (sorted(Path().glob(word)) if "*" in word else [word])
    ]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        code = main(words)
    return code, output.getvalue()
