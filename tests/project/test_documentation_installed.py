"""Run every block of the README and docs/ like a new user: in an empty folder, with the wheel.

The environment is new. Dependencies of plain-vit are taken from the environment of the tests: for the README those that
its lines have installed so far, for other pages all of them. The lines on the pages install the wheel over HTTP from an
index with one package; `pip install .` is replaced by the same line, because the wheel is built only once.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT
from tests.project.conftest import served
from tests.sizes import NIGHTLY, few

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("bash", "python")
SHOWN = ("text", "console", "js", "json", "")  # what a block prints, a command with that, and what is only shown

GPUS = "eight GPUs, or eight machines of them, and ImageNet"
CLONE = "these two set up an environment from the package registries, and run these tests"
LAUNCHED = "accelerate launch --config_file examples/accelerate_configs/"
# Blocks that are not run, by their beginning, with the reason. All other blocks are run.
NOT_RUN = {
    "make demo": CLONE,
    f"{LAUNCHED}gpus.yaml examples/finetune_image_classification.py --recipe vit-imagenet ": GPUS,
    f"{LAUNCHED}several_machines.yaml": GPUS,
    f"{LAUNCHED}gpus.yaml examples/finetune_image_classification.py --recipe vit-pretrain-": GPUS,
    f"{LAUNCHED}gpus.yaml examples/pretrain.py": GPUS,
}

# Runs the blocks of a page in order, Python blocks and the lines of "command" in one session, and writes the output of
# each.
SESSION = """
import contextlib, importlib, io, json, os, subprocess, sys
names = {"__name__": "__main__"}
printed = []
for kind, code in json.load(open(sys.argv[1])):
    if kind == "lend":
        for path in code:
            os.symlink(path, os.path.join(sys.argv[3], os.path.basename(path)))
    elif kind == "python":
        importlib.invalidate_caches()  # a block before it may have installed something
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, "block", "exec"), names)
        printed.append(output.getvalue())
    elif kind == "command":
        importlib.invalidate_caches()
        from plain_vit_command import main
        expanded = subprocess.run(["bash", "-c", "printf '%s\\\\0' " + code], stdout=subprocess.PIPE, text=True).stdout
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            failed = main(expanded.split("\\0")[1:-1])
        printed.append(output.getvalue())
        if failed:
            printed[-1] += f"plain-vit left with {failed}\\n"
    else:
        done = subprocess.run(["bash", "-e", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        printed.append(done.stdout + done.stderr)
        if kind == "bash" and done.returncode:
            sys.exit(f"{code}\\nfailed with {done.returncode}:\\n{done.stdout}{done.stderr}")
json.dump(printed, open(sys.argv[2], "w"))
"""


def blocks_of(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


OURS = ("plain_vit", "__editable__")
PIP_OF_CLONE = re.compile(r"^pip install \.$", re.MULTILINE)
PIP = re.compile(r'^pip install "?([\w.-]+)(?:\[([\w,]+)\])?"?$', re.MULTILINE)
TRAINING = re.compile(r"^python +examples/finetune.*$", re.MULTILINE)
TRAINING_AGAIN = re.compile(r"^accelerate launch .*$", re.MULTILINE)
SITE = Path(torch.__file__).parents[1]


def needed(name: str, extras: frozenset[str] = frozenset()) -> set[tuple[str, frozenset[str]]]:
    """Return a distribution and all that it requires with these extras, as installed here."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(canonicalize_name(name), extras)]
    while waiting:
        if (one := waiting.pop()) in found:
            continue
        found.add(one)
        for line in importlib.metadata.requires(one[0]) or []:
            requirement = Requirement(line)
            if any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in one[1] or {""}):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def places(name: str) -> set[Path]:
    """Return the files and folders of an installed distribution, right below site-packages."""
    parts = {Path(file).parts[0] for file in importlib.metadata.files(name) or []}
    return {SITE / part for part in parts if part not in ("..", "__pycache__")}


def with_what_is_lent(commands: list[tuple[str, Any]], extra_names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the blocks, before each that installs something the places of what it requires."""
    lent: set[Path] = set()
    complete: list[tuple[str, Any]] = []
    for kind, code in commands:
        wanted: set[tuple[str, frozenset[str]]] = {(canonicalize_name(name), frozenset()) for name in extra_names}
        for name, extras in PIP.findall(code) if kind == "bash" else ():
            wanted |= needed("plain-vit" if name == "." else name, frozenset(extras.split(",")) - {""})
        new = {path for name, _ in wanted if name != "plain-vit" for path in places(name)} - lent
        lent |= new
        complete += [("lend", sorted(map(str, new))), (kind, code)] if new else [(kind, code)]
    return complete


def line_by_line(blocks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the blocks in which each line of a shell is one, with one training run of two steps."""
    lines: list[tuple[str, str]] = []
    for kind, code in blocks:
        if kind != "bash":
            lines.append((kind, code))
            continue
        code = TRAINING_AGAIN.sub("", TRAINING.sub(r"\g<0> --steps 2 --evaluations 1", code))
        lines += [(kind, line) for line in code.replace("\\\n", "").splitlines() if line]
    return lines


def is_left_out(code: str) -> bool:
    return code.startswith(tuple(NOT_RUN))


def test_every_block_is_of_a_kind_that_is_run_or_shown_and_what_is_left_out_is_on_the_list() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert {kind for kind, _ in blocks} == {*RUN, *SHOWN}
    for start in NOT_RUN:
        assert len([code for _, code in blocks if code.startswith(start)]) == 1, start
    assert set(NOT_RUN.values()) == {GPUS, CLONE}


@pytest.fixture(scope="module")
def index(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve an index that has one package, and return its address."""
    root = tmp_path_factory.mktemp("index")
    (root / "plain-vit").mkdir()
    shutil.copy(wheel, root / "plain-vit")
    with served(root) as address:
        yield address


@pytest.fixture
def newcomer(index: str, tmp_path: Path) -> dict[str, str]:
    """Make an environment without plain-vit; return the variables with which a command runs in it."""
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    programs, ours = place / "bin", Path(sys.executable).parent
    (packages,) = place.glob("lib/python3*/site-packages")
    lent = tmp_path / "lent" / "site-packages"  # dill, by which datasets knows functions, tells libraries by that name
    lent.mkdir(parents=True)
    (packages / "lent.pth").write_text(f"{lent}\n")
    for name in ("pip", "accelerate"):  # a program starts the interpreter that its first line names
        program = (ours / name).read_text().split("\n", 1)[1]
        (programs / name).write_text(f"#!{programs / 'python'}\n{program}")
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {
        **kept, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PIP_INDEX_URL": index, "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub"), "PIP_CONFIG_FILE": os.devnull, "MPLBACKEND": "agg",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", few(PAGES, 1), ids=lambda page: page.stem)
def test_every_block_runs_as_written_in_an_empty_folder_with_the_installed_wheel(
    page: Path, newcomer: dict[str, str], tmp_path: Path
) -> None:
    kinds = (*RUN, "text", "console")
    blocks = [(kind, code) for kind, code in blocks_of(page) if kind in kinds and not is_left_out(code)]
    if not any(kind in RUN for kind, _ in blocks):
        return
    folder = tmp_path / "empty"
    folder.mkdir()
    if page.name == "README.md":  # its folder is the clone, of which the examples are needed
        first = next(i for i, (_, code) in enumerate(blocks) if code.startswith("pip install .\n"))
        install, rest = blocks[first][1].split("\n", 1)
        blocks[first : first + 1] = [("bash", f"{install}\nplain-vit examples"), ("bash", rest)]
    elif not any('pip install "plain-vit[' in code for _, code in blocks):
        blocks.insert(0, ("bash", "pip install plain-vit"))  # a page that begins after the README
    if not NIGHTLY:
        blocks = line_by_line(blocks)
    commands: list[tuple[str, Any]] = []
    for kind, code in blocks:
        code = code.splitlines()[0].removeprefix("$ ") if kind == "console" else code
        in_session = not NIGHTLY and code.startswith("plain-vit ")
        commands += [("command" if in_session else kind, code)] if kind != "text" else []
    if page.name == "README.md":
        commands = with_what_is_lent(commands, ("pip", "setuptools"))
    else:
        everything = [str(path) for path in SITE.iterdir() if not path.name.startswith(OURS)]
        commands.insert(0, ("lend", everything))
    commands = [(kind, PIP_OF_CLONE.sub("pip install plain-vit", code) if kind == "bash" else code)
                for kind, code in commands]  # fmt: skip
    (tmp_path / "blocks.json").write_text(json.dumps(commands))
    done = subprocess.run(
        ["python", "-c", SESSION, tmp_path / "blocks.json", tmp_path / "printed.json", tmp_path / "lent/site-packages"],
        cwd=folder, env=newcomer, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    printed = iter(json.loads((tmp_path / "printed.json").read_text()))
    last = ""
    for kind, code in blocks:
        if kind == "text":
            assert code in last
        else:
            last = next(printed)
        if kind == "console":
            assert last.partition("plain-vit left with ")[0].splitlines() == code.splitlines()[1:]
        elif kind == "bash":
            assert "plain-vit left with " not in last, last
    place = subprocess.run(
        ["python", "-c", "import plain_vit; print(plain_vit.__file__)"],
        cwd=folder, env=newcomer, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert Path(place).is_relative_to(tmp_path)
