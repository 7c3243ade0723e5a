"""Declared dependencies, and the wheel: its content, metadata, and use without the checkout."""

import ast
import functools
import json
import os
import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import plain_vit
from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.training.run.folder import read_log
from tests import ROOT
from tests.project.conftest import ADDRESS, build, copy_sources, files_below, run

RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)([^)]*)\)")

# The packages whose models are converted: imported where a live model of theirs is at hand or asked for.
SOURCES = {"open-clip-torch", "timm", "vit-pytorch"}
# What is imported only where it is there: `plain_vit.inference.adapters` fills tables of peft on request, and one test
# runs with torchao, which is installed by hand: it slows every start of transformers down.
# Ray, and paths of stores of objects, are for those who have such.
WHERE_IT_IS = {
    "plain_vit/inference/*.py": {"peft", "universal-pathlib"}, "examples/*.py": {"ray", "optuna"},
    "tests/**/*.py": {"torchao", "opencv-python-headless"},
}  # fmt: skip


TINY = {"image_size": (8, 12), "patch_size": 4, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 20, "num_labels": 10}  # fmt: skip


def declared(*extras: str) -> set[str]:
    """Return the requirements that `pip install plain-vit[EXTRAS]` installs."""
    requirements = [Requirement(line) for line in requires("plain-vit") or []]
    named = [
        r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
    ]
    return {canonicalize_name(requirement.name) for requirement in named}


installed_packages = functools.cache(packages_distributions)  # reads the file lists of all distributions


def imported(path: Path) -> set[str]:
    """The distributions that hold what a file imports, be it at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module.partition(".")[0])
    installed = installed_packages()
    scripts = (script.stem for script in (ROOT / "examples").glob("*.py"))
    here = {"plain_vit", "plain_vit_command", "tests", "tools", "examples", "benchmarks", "studies", *scripts}
    return {canonicalize_name(installed.get(name, [name])[0]) for name in names - sys.stdlib_module_names - here}


@pytest.mark.slow(quick=["plain_vit/inference/*_runtime.py-extras4"])
@pytest.mark.parametrize(
    ("pattern", "extras"),
    [
        ("plain_vit/*.py", ()),
        ("plain_vit/conversion/**/*.py", ()),
        ("plain_vit/system/*.py", ()),
        ("plain_vit/inference/*.py", ("train",)),
        ("plain_vit/inference/*_runtime.py", ("engines",)),
        ("plain_vit/files/*.py", ("gguf",)),
        ("plain_vit/hub/*.py", ()),
        ("plain_vit/training/**/*.py", ("train",)),
        ("plain_vit/browse/*.py", ("train", "umap")),
        ("plain_vit/analysis/*.py", ("analysis",)),
        ("examples/*.py", ("train", "analysis")),
        ("examples/serve/*.py", ("serve",)),
        ("benchmarks/*.py", ("train", "analysis", "test")),
        ("studies/*.py", ("train", "analysis", "test")),
        ("tests/**/*.py", ("train", "analysis", "serve", "test")),
    ],
)
def test_every_import_is_a_declared_requirement(pattern: str, extras: tuple[str, ...]) -> None:
    allowed = declared(*extras) | SOURCES | WHERE_IT_IS.get(pattern, set())
    engines = pattern.endswith("_runtime.py")  # these have their own extra
    paths = [path for path in ROOT.glob(pattern) if path.name.endswith("_runtime.py") == engines]
    undeclared = {path: imported(path) - allowed for path in paths}
    assert undeclared
    assert not {name: missing for name, missing in undeclared.items() if missing}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel alone; what it needs comes from the environment of the tests."""
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "plain_vit").rglob("*") if path.is_file()}
    examples = {f"plain_vit/{path.relative_to(ROOT).as_posix()}" for path in files_below(ROOT / "examples")}
    sources = {name for name in package if "__pycache__" not in name} | {"plain_vit_command.py"} | examples
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == sources


@pytest.mark.slow
def test_metadata_is_accepted_by_package_indexes(wheel: Path) -> None:
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", wheel, cwd=wheel.parent)


@pytest.mark.slow
def test_metadata_gives_the_package_s_own_version_and_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    folder = f"plain_vit-{plain_vit.__version__}.dist-info"
    metadata = message_from_bytes(archive.read(f"{folder}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("plain-vit", plain_vit.__version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


# Runs scripts one after the other, each in processes that are forked from a server with the installed package.
RUNS = """
import json, sys
import plain_vit
from tests.processes import run_forked

print(plain_vit.__file__)
for words, count in json.loads(sys.argv[1]):
    print(run_forked(words, count))
"""


@pytest.mark.slow
def test_installed_scripts_start_as_modules_by_the_command_and_copied_out_to_the_same_results(
    installed: Path, tmp_path: Path
) -> None:
    PlainViTForImageClassification(PlainViTConfig(**TINY)).save_pretrained(tmp_path / "model")
    PlainViTImageProcessor(size=TINY["image_size"]).save_pretrained(tmp_path / "model")
    command = installed / "bin" / "plain-vit"
    shipped = Path(run(command, "examples", "--path", cwd=tmp_path, PYTHONPATH=str(installed)).strip())
    assert shipped.is_relative_to(installed)
    script = "finetune_image_classification"
    text = (shipped / f"{script}.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.replace("def start(", "print('mine')\n\n\ndef start("), encoding="utf-8")
    options = ["--model", "model", "--dataset", "digits", "--steps", "3", "--batch_size", "8", "--validation_fraction",
               "0.9", "--no_report", "--output_dir"]  # fmt: skip
    runs = {
        "by_command": ([str(command), "finetune"], 1),
        "as_module": (["-m", f"plain_vit.examples.{script}"], 2),
        "mine": (["mine.py"], 1),
    }
    words = json.dumps([([*start, *options, name], count) for name, (start, count) in runs.items()])
    places = os.pathsep.join(map(str, (installed, ROOT)))  # where `tests` is
    printed = run(sys.executable, "-c", RUNS, words, cwd=tmp_path, PYTHONPATH=places)
    assert printed.startswith(f"{installed}{os.sep}")
    assert "\nmine\n" in printed
    losses = [[row["train_loss"] for row in read_log(tmp_path / name) if "train_loss" in row] for name in runs]
    assert losses[0] == losses[2] != []
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def description(wheel: Path) -> str:
    """The page that a package index shows for a wheel."""
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(zipfile.ZipFile(wheel).read(name)).get_payload(decode=True).decode()


@pytest.mark.slow
def test_with_an_address_the_description_has_no_relative_link_and_without_one_it_is_the_readme(
    wheel: Path, tmp_path: Path
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not ADDRESS:
        assert description(wheel).strip() == readme.strip()
    source = copy_sources(tmp_path)
    settings = source / "pyproject.toml"
    address = "https://example.org/somebody/plain-vit"
    settings.write_text(settings.read_text().replace(f'address = "{ADDRESS}"', f'address = "{address}"'))
    built, said = build(source, "wheel")
    assert "no address" not in said
    page = description(built)
    assert len(RELATIVE_LINK.findall(readme)) > 10
    assert RELATIVE_LINK.findall(page) == []
    assert f"]({address}/blob/v{plain_vit.__version__}/docs/architecture.md)" in page
    assert f"]({address}/raw/v{plain_vit.__version__}/docs/pictures/trained_heads.png)" in page
    for path in RELATIVE_LINK.findall(readme):
        assert (ROOT / path.partition("#")[0]).exists()


@pytest.mark.slow
def test_the_source_distribution_holds_the_checkout_and_its_tests_run_there(tmp_path: Path) -> None:
    source = copy_sources(tmp_path)
    before = {path.relative_to(source).as_posix() for path in files_below(source)}
    built, _ = build(source, "sdist")
    empty = tmp_path / "empty"
    with tarfile.open(built) as archive:
        archive.extractall(empty, filter="data")
    (unpacked,) = empty.iterdir()
    packed = {path.relative_to(unpacked).as_posix() for path in files_below(unpacked)}
    assert before - packed == set()
    assert {name for name in packed - before if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}
    words = [f"tests/{name}.py" for name in ("model/test_golden", "cli/test_errors")]
    said = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, cwd=unpacked, PYTHONPATH=str(unpacked)
    )
    assert " passed" in said
    assert "failed" not in said


def test_every_action_is_pinned_by_the_hash_of_a_commit() -> None:
    pinned = re.compile(r"uses: [\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        lines = [line.strip().removeprefix("- ") for line in path.read_text(encoding="utf-8").splitlines()]
        uses = [line for line in lines if line.startswith("uses:")]
        assert uses
        assert [line for line in uses if not pinned.fullmatch(line)] == []


def test_the_citation_is_of_this_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert citation["version"] == plain_vit.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_hooks_before_a_commit_are_those_of_make_quality() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    entries = {hook["entry"].removesuffix(" --force-exclude") for repo in hooks for hook in repo["hooks"]}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nquality:")[2].partition("\n\n")[0]
    commands = {line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()[1:]}
    assert entries == commands


def test_the_workflows_and_the_templates_ask_for_what_there_is() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            for command in (step["run"] for step in job["steps"] if step.get("run", "").startswith(("make", ".ci"))):
                word, *target = command.split()
                assert f"\n{target[0]}:" in makefile if word == "make" else (ROOT / word).is_file()
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            asked = " ".join(field["attributes"]["label"] for field in form["body"])
            assert "`plain-vit inspect`" in asked
            assert "`plain-vit env`" in asked
