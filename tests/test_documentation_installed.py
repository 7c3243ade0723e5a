"""Every block of the README and of docs/ as a new user runs it: in an empty folder, with the wheel.

The environment is a new one. What plain-vit requires is lent to it from the environment of the tests; the wheel itself
comes over HTTP from an index of one package, by the lines that the pages give.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.test_documentation import ROOT
from tests.test_packaging import wheel  # noqa: F401

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("bash", "python")
SHOWN = (
    "text",
    "console",
    "js",
    "json",
    "",
)  # what a block prints, a command with what it prints, and what is only shown

GPUS = "eight GPUs, or eight machines of them, and ImageNet"
LAUNCHED = "accelerate launch --config_file examples/accelerate_configs/"
# The blocks that do not run here, by their page and how they begin, each with the reason. No other block is left out.
NOT_RUN = {
    ("training.md", f"{LAUNCHED}gpus.yaml examples/finetune_image_classification.py --recipe vit-imagenet "): GPUS,
    ("training.md", f"{LAUNCHED}several_machines.yaml"): GPUS,
    ("training.md", f"{LAUNCHED}gpus.yaml examples/finetune_image_classification.py --recipe vit-pretrain-"): GPUS,
    ("training.md", f"{LAUNCHED}gpus.yaml examples/pretrain_masked_patches.py"): GPUS,
}

# Runs the blocks of one page one after the other, the Python ones in one session, and writes what each printed.
SESSION = """
import contextlib, importlib, io, json, subprocess, sys
names = {"__name__": "__main__"}
printed = []
for kind, code in json.load(open(sys.argv[1])):
    if kind == "python":
        importlib.invalidate_caches()  # a block before it may have installed something
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, "block", "exec"), names)
        printed.append(output.getvalue())
    else:
        done = subprocess.run(["bash", "-e", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        printed.append(done.stdout + done.stderr)
        if kind == "bash" and done.returncode:
            sys.exit(f"{code}\\nfailed with {done.returncode}:\\n{done.stdout}{done.stderr}")
json.dump(printed, open(sys.argv[2], "w"))
"""


def blocks_of(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def is_left_out(page: Path, code: str) -> bool:
    return any(page.name == name and code.startswith(start) for name, start in NOT_RUN)


def test_every_block_is_of_a_kind_that_is_run_or_shown_and_what_is_left_out_is_on_the_list() -> None:
    assert {kind for page in PAGES for kind, _ in blocks_of(page)} == {*RUN, *SHOWN}
    for name, start in NOT_RUN:
        found = [code for page in PAGES if page.name == name for _, code in blocks_of(page) if code.startswith(start)]
        assert len(found) == 1, start
    assert set(NOT_RUN.values()) == {GPUS}


@pytest.fixture(scope="module")
def index(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:  # noqa: F811
    """Serve an index that has one package, and return its address."""
    root = tmp_path_factory.mktemp("index")
    (root / "plain-vit").mkdir()
    shutil.copy(wheel, root / "plain-vit")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def newcomer(index: str, tmp_path: Path) -> dict[str, str]:
    """Make an environment without plain-vit; return the variables with which a command runs in it."""
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    programs, ours = place / "bin", Path(sys.executable).parent
    (packages,) = place.glob("lib/python3*/site-packages")
    lent = tmp_path / "lent" / "site-packages"  # dill, by which datasets knows functions, tells libraries by that name
    lent.mkdir(parents=True)
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(("plain_vit", "__editable__")):
            (lent / path.name).symlink_to(path)
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
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_as_written_in_an_empty_folder_with_the_installed_wheel(
    page: Path, newcomer: dict[str, str], tmp_path: Path
) -> None:
    blocks = [(kind, code) for kind, code in blocks_of(page) if kind not in ("", "js") and not is_left_out(page, code)]
    if not any(kind in RUN for kind, _ in blocks):
        return
    folder = tmp_path / "empty"
    folder.mkdir()
    if not any("pip install plain-vit\n" in code or 'pip install "plain-vit[' in code for _, code in blocks):
        blocks.insert(0, ("bash", "pip install plain-vit"))  # a page that begins after the README
    commands = [
        (kind, code.splitlines()[0].removeprefix("$ ") if kind == "console" else code)
        for kind, code in blocks
        if kind != "text"
    ]
    (tmp_path / "blocks.json").write_text(json.dumps(commands))
    done = subprocess.run(
        ["python", "-c", SESSION, tmp_path / "blocks.json", tmp_path / "printed.json"],
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
            assert last.splitlines() == code.splitlines()[1:]
    place = subprocess.run(
        ["python", "-c", "import plain_vit; print(plain_vit.__file__)"],
        cwd=folder, env=newcomer, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert Path(place).is_relative_to(tmp_path)
