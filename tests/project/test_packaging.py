"""Declared dependencies, and the wheel: its content, its metadata, its use without the checkout."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
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

ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["plain-vit"]["address"]
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)([^)]*)\)")

# The packages whose models are converted: imported where a live model of theirs is at hand or asked for.
SOURCES = {"open-clip-torch", "timm", "vit-pytorch"}
# What is imported only where it is there: `plain_vit.adapters` fills tables of peft on request, and one test runs with
# torchao, which is installed by hand: it slows every start of transformers down.
WHERE_IT_IS = {"plain_vit/*.py": {"peft"}, "tests/**/*.py": {"torchao"}}


TINY = {"image_size": (8, 12), "patch_size": 4, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 20, "num_labels": 10}  # fmt: skip


def declared(*extras: str) -> set[str]:
    """The requirements that `pip install plain-vit[EXTRAS]` brings."""
    requirements = [Requirement(line) for line in requires("plain-vit") or []]
    named = [
        r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
    ]
    return {canonicalize_name(requirement.name) for requirement in named}


installed_packages = functools.cache(packages_distributions)  # reads the list of files of every distribution


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


@pytest.mark.slow(quick=["plain_vit/conversion/*_runtime.py-extras2"])
@pytest.mark.parametrize(
    ("pattern", "extras"),
    [
        ("plain_vit/*.py", ()),
        ("plain_vit/conversion/**/*.py", ()),
        ("plain_vit/conversion/*_runtime.py", ("engines",)),
        ("plain_vit/files/*.py", ()),
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
    engines = pattern.endswith("_runtime.py")  # these have an extra of their own
    paths = [path for path in ROOT.glob(pattern) if path.name.endswith("_runtime.py") == engines]
    undeclared = {path: imported(path) - allowed for path in paths}
    assert undeclared
    assert not {name: missing for name, missing in undeclared.items() if missing}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, its standard output being the result; what it says is shown where it fails."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LEFT_BY_TOOLS = ("__pycache__", "build", "dist", "runs", "site", "*.egg-info")


def files_below(folder: Path) -> list[Path]:
    """The files of a folder that are not left by Python."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def copy_sources(folder: Path) -> Path:
    """Copy the checkout: setuptools writes next to the sources, and packs leftovers of an old build/."""
    hidden = [path.name for path in ROOT.glob(".*") if path.name not in (".ci", ".github")]
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built, said = build(copy_sources(tmp_path_factory.mktemp("wheel")), "wheel")
    assert ("gives the project no address" in said) == (not ADDRESS)
    return built


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


@pytest.mark.slow
def test_installed_wheel_saves_and_opens_a_model_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    script = """
        import plain_vit, torch
        from transformers import AutoModelForImageClassification

        print(plain_vit.__file__)
        config = plain_vit.PlainViTConfig(
            image_size=(12, 20), patch_size=4, num_channels=2, num_labels=7,
            hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=40,
        )
        model = plain_vit.PlainViTForImageClassification(config).eval()
        model.save_pretrained("saved")
        opened = AutoModelForImageClassification.from_pretrained("saved").eval()
        pixel_values = torch.randn(5, 2, 12, 20)
        assert torch.equal(model(pixel_values).logits, opened(pixel_values).logits)
    """
    printed = run(sys.executable, "-c", textwrap.dedent(script), cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(printed.splitlines()[0]).is_relative_to(installed)


@pytest.mark.slow
def test_installed_command_opens_the_shipped_checkpoint_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    (checkpoint,) = (ROOT / "examples" / "checkpoints").glob("*.pt")
    source = shutil.copy(checkpoint, tmp_path)
    built = json.loads(checkpoint.with_suffix(".json").read_text())["constructor"]
    said = {"num-attention-heads": "heads", "image-size": "image_size", "patch-size": "patch_size"}
    words = [word for option, argument in said.items() for word in (f"--{option}", str(built[argument]))]
    run(
        installed / "bin" / "plain-vit", "convert", source, "converted", *words, cwd=tmp_path, PYTHONPATH=str(installed)
    )
    assert (tmp_path / "converted" / "model.safetensors").is_file()


@pytest.mark.slow
def test_installed_scripts_start_as_modules_by_the_command_and_copied_out_to_the_same_results(
    installed: Path, tmp_path: Path
) -> None:
    PlainViTForImageClassification(PlainViTConfig(**TINY)).save_pretrained(tmp_path / "model")
    PlainViTImageProcessor(size=TINY["image_size"]).save_pretrained(tmp_path / "model")
    lines = functools.partial(run, cwd=tmp_path, PYTHONPATH=str(installed))
    command = installed / "bin" / "plain-vit"
    shipped = Path(lines(command, "examples", "--path").strip())
    assert shipped.is_relative_to(installed)
    script = "finetune_image_classification"
    options = ["--model", "model", "--dataset", "digits", "--steps", "3", "--batch_size", "8", "--validation_fraction",
               "0.9", "--no_report"]  # fmt: skip
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    two = ["--config_file", str(shipped / "accelerate_configs" / "cpu_2_processes.yaml")]
    lines(command, "finetune", *options, "--output_dir", "by_command")
    lines(*launch, *two, "-m", f"plain_vit.examples.{script}", *options, "--output_dir", "as_module")
    text = (shipped / f"{script}.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.replace("def start(", "print('mine')\n\n\ndef start("), encoding="utf-8")
    assert lines(sys.executable, "mine.py", *options, "--output_dir", "mine").startswith("mine\n")
    losses = [
        [row["train_loss"] for row in read_log(tmp_path / name) if "train_loss" in row]
        for name in ("by_command", "as_module", "mine")
    ]
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
    assert f"]({address}/blob/v{plain_vit.__version__}/docs/model.md)" in page
    assert f"]({address}/raw/v{plain_vit.__version__}/docs/pictures/rollout.png)" in page
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
    tests = ("model/test_configuration", "model/test_golden", "sources/test_what_opens", "training/test_documentation",
             "cli/test_errors")  # fmt: skip
    words = [f"tests/{name}.py" for name in tests]
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
