"""Without an extra, every module, script and command says in one line what is missing and what to install."""

import ast
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from plain_vit.analysis.gradients import integrated_gradients
from plain_vit.errors import MissingPackageError, PlainViTError, TrainingError
from plain_vit.system.extras import needs
from plain_vit.training.arguments import SCRIPTS as OPTIONS_OF
from tests import ROOT
from tests.sizes import few

NEED_NOTHING = "convert_your_own.py"
SCRIPTS = [
    str(path.relative_to(ROOT / "examples"))
    for path in sorted((ROOT / "examples").rglob("*.py"))
    if path.name != NEED_NOTHING
]
IMPORTED_AS = {"scikit-learn": "sklearn", "vit-pytorch": "vit_pytorch", "pyyaml": "yaml", "pillow": "PIL"}
# A process in which these packages are only in the folder of the script.
HIDING = """
import importlib.machinery, os, sys
hidden, find = set(os.environ["HIDDEN"].split()), importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    if name in hidden:
        path = [folder for folder in sys.path if "site-packages" not in folder]
    return find(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
"""


def requirements(extra: str) -> set[str]:
    """Return the names under which what an extra brings is imported; those of the package alone for ""."""
    found = map(Requirement, importlib.metadata.requires("plain-vit") or [])
    names = {
        requirement.name
        for requirement in found
        if (requirement.marker.evaluate({"extra": extra}) if requirement.marker else not extra)
    }
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


OPTIONAL = requirements("train") | requirements("analysis") | {"fastapi", "gradio", "timm", "uvicorn", "vit_pytorch"}


def without(hidden: set[str], folder: Path, *words: str | Path) -> subprocess.CompletedProcess:
    """Run a Python program where these packages are not installed."""
    (folder / "sitecustomize.py").write_text(HIDING)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "HIDDEN": " ".join(sorted(hidden)),
    }
    return subprocess.run([sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True)


def named(text: str) -> str:
    """Return the package that this one line says is missing; what it says to install brings that package."""
    (line,) = text.splitlines()
    ((package, words),) = re.findall(r"the package (\w+) is not installed: pip install (.+)", line)
    extras = re.findall(r'"plain-vit\[(\w+)\]"', words)
    brought = set().union(*map(requirements, extras)) | {IMPORTED_AS.get(word, word) for word in words.split()}
    assert package in brought, line
    return package


DRIVER = """
import importlib, json, os, pkgutil, runpy, sys
import plain_vit, plain_vit.conversion, plain_vit.hub, plain_vit.hub.card
from plain_vit.errors import PlainViTError

modules, programs = {}, []
for module in pkgutil.walk_packages(plain_vit.__path__, "plain_vit."):
    try:
        importlib.import_module(module.name)
    except PlainViTError as error:
        modules[module.name] = str(error)
for path, *words in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 2)
        sys.argv, sys.path[0] = [path, *words], os.path.dirname(path)
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as left:
            os._exit(left.code or 0)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        programs.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read()])
print("\\n" + json.dumps([modules, programs]))
"""


def outcomes_without(hidden: set[str], folder: Path) -> tuple[dict[str, str], dict[str, tuple[int, str]]]:
    """Return the messages of modules that lack a package, and exit codes and stderr of the scripts and of `show`."""
    (folder / "image.png").touch()
    (folder / "model").mkdir()
    show = [ROOT / "plain_vit_command.py", "show", "image.png", "--model", "model", "--out", "out"]
    (folder / "served" / "onnx").mkdir(parents=True)
    (folder / "served" / "onnx" / "model.onnx").touch()
    # The scripts answer --help without any package, and this as soon as all their imports are done.
    begun = ["--model", "m", "--dataset", "digits", "--num_processes", "2"]
    words = {
        name: [*begun, *(["--output_dir", "o"] * (name != "evaluate_image_classification"))] for name in OPTIONS_OF
    }
    # With all packages these would start a cluster, a training run, a demo, a service.
    others = {"ray_features": ["--model", "m", "--images", "i", "--output_dir", "o"], "demo": [], "space/app": [],
              "train_vit_pytorch_on_glyphs": ["--output_dir", "o"], "serve/app": ["served"]}  # fmt: skip
    words |= others if hidden == OPTIONAL else {name: ["--help"] for name in others}
    programs = [*([ROOT / "examples" / name, *words[name[:-3]]] for name in SCRIPTS), show]
    run = without(hidden, folder, "-c", DRIVER, json.dumps(programs, default=str))
    assert run.returncode == 0, run.stderr
    modules, outcomes = json.loads(run.stdout.splitlines()[-1])
    return modules, dict(zip([*SCRIPTS, "show"], map(tuple, outcomes), strict=True))


@pytest.mark.slow
def test_every_module_and_script_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    modules, programs = outcomes_without(OPTIONAL, tmp_path)
    for name, message in modules.items():
        assert named(message) in OPTIONAL, name
    lacking = {name.removeprefix("plain_vit.") for name in modules}
    assert {"analysis.plots", "analysis.sheet", "training.data", "training.reports.report"} <= lacking
    assert not {"analysis", "analysis.attention", "training.losses", "cli"} & lacking
    for name, (code, said) in programs.items():
        assert code == MissingPackageError.exit_code, (name, said)
        assert said.startswith("plain-vit: MissingPackageError: ")
        assert named(said) in OPTIONAL


@pytest.mark.slow
@pytest.mark.parametrize("package", few(["matplotlib", "accelerate", "datasets", "evaluate", "sklearn"], 1))
def test_a_package_that_alone_is_missing_is_named(package: str, tmp_path: Path) -> None:
    modules, programs = outcomes_without({package}, tmp_path)
    assert {named(message) for message in modules.values()} <= {package}
    for name, (code, said) in programs.items():
        if code == MissingPackageError.exit_code:
            assert named(said) == (package if name != "space/app.py" else "gradio")
        elif name != "show":  # whose folder is no model
            tries = name[:-3] in OPTIONS_OF and name != "ray_features.py"
            assert code == (TrainingError.exit_code if tries else 0), said
    if package == "matplotlib":
        assert programs["show"][1].endswith(': pip install "plain-vit[analysis]"\n')


def test_integrated_gradients_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(MissingPackageError, match=r'captum is not installed: pip install "plain-vit\[analysis\]"'):
        integrated_gradients(None, None)


def test_a_folder_of_the_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "missing_here").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    says = "the package missing_here is not installed: pip install it"
    with pytest.raises(MissingPackageError, match=says) as caught, needs("it"):
        importlib.import_module("missing_here.part")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, PlainViTError)


def test_a_package_of_another_version_is_not_called_missing() -> None:
    says = r"an import failed \(cannot import name 'Nothing'.*pip install it"
    with pytest.raises(MissingPackageError, match=says), needs("it"):
        from json import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_faults_of_our_own_are_not_hidden() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'") as caught, needs("it"):
        from plain_vit.errors import nothing  # type: ignore[attr-defined]  # noqa: F401
    assert not isinstance(caught.value, MissingPackageError)


@pytest.mark.slow
def test_no_import_of_an_optional_package_is_left_without_its_remedy() -> None:
    known = requirements("") | {"plain_vit", "plain_vit_command"} | set(sys.stdlib_module_names)
    unguarded = set()
    for path in [*ROOT.glob("plain_vit/**/*.py"), *ROOT.glob("examples/**/*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guarded = {
            id(inner)
            for node in ast.walk(tree)
            if (isinstance(node, ast.With) and "needs(" in ast.unparse(node.items[0])) or isinstance(node, ast.Try)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )  # fmt: skip
            packages = {name.partition(".")[0] for name in names} - known
            if packages and id(node) not in guarded:
                unguarded |= {f"{path.relative_to(ROOT)}: {package}" for package in packages}
    # The conversion has its own message for missing packages when it compares, and an engine is asked what it needs.
    own = ("plain_vit/conversion/", "plain_vit/inference/onnx_runtime.py", "plain_vit/inference/openvino_runtime.py")
    assert {line for line in unguarded if not line.startswith(own)} == set()


def test_a_space_asks_for_the_releases_that_the_package_needs() -> None:
    declared = {without_marker(line) for line in importlib.metadata.requires("plain-vit") or []}
    asked = {without_marker(line) for line in (ROOT / "examples" / "space" / "requirements.txt").read_text().split()}
    assert asked <= declared


def without_marker(line: str) -> tuple[str, str]:
    """Return name and releases of a requirement, without the extra that brings it."""
    found = Requirement(line)
    return found.name, str(found.specifier)


@pytest.mark.slow
def test_the_tests_of_the_space_load_where_only_the_space_is_installed(tmp_path: Path) -> None:
    """`make test-space` has an environment of its own, and shares the fixtures of all tests."""
    hidden = OPTIONAL - requirements("space")
    done = without(
        hidden, tmp_path, "-m", "pytest", "--collect-only", "--assert=plain", "--rootdir", ROOT,
        "-c", ROOT / "pyproject.toml", ROOT / "tests" / "project" / "test_space.py",
    )  # fmt: skip
    assert "conftest" not in done.stderr, done.stderr
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: skipped whole, gradio is not here


def test_no_folder_of_the_examples_is_named_like_a_package() -> None:
    names = {path.stem if path.is_file() else path.name for path in (ROOT / "examples").rglob("*")}
    assert not names & (OPTIONAL | requirements(""))
