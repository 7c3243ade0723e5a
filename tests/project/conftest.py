"""Fixtures for distributions (the wheel is built once for all tests) and for folders served over HTTP."""

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["plain-vit"]["address"]
LEFT_BY_TOOLS = ("__pycache__", "build", "dist", "htmlcov", "runs", "site", "*.egg-info")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, its standard output being the result; what it says is shown where it fails."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_below(folder: Path) -> list[Path]:
    """The files of a folder that are not left by Python."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def copy_sources(folder: Path) -> Path:
    """Copy the checkout: setuptools writes next to the sources, and packs leftovers of an old build/."""
    hidden = [path.name for path in ROOT.glob(".*") if path.name not in (".ci", ".github", ".pre-commit-config.yaml")]
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*LEFT_BY_TOOLS, *hidden))
    return folder / "source"


def build(source: Path, kind: str) -> tuple[Path, str]:
    """Build one distribution; return it, and what the build said."""
    done = subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", "dist", source],
        cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (built,) = (source / "dist").iterdir()
    return built, done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built, said = build(copy_sources(tmp_path_factory.mktemp("wheel")), "wheel")
    assert ("gives the project no address" in said) == (not ADDRESS)
    return built


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder over HTTP, and return their address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
