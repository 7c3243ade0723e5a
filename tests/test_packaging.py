"""What is declared, and the wheel: its content, its metadata, its use where the checkout is out of reach."""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from email import message_from_bytes
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import plain_vit

ROOT = Path(__file__).parent.parent

# The packages whose models are converted: imported where a live model of theirs is at hand or asked for.
SOURCES = {"timm", "vit-pytorch"}
# One test runs where it is installed by hand: it slows every start of transformers down.
BY_HAND = {"torchao"}


def declared(*extras: str) -> set[str]:
    """The requirements that `pip install plain-vit[EXTRAS]` brings."""
    requirements = [Requirement(line) for line in requires("plain-vit") or []]
    named = [
        r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
    ]
    return {canonicalize_name(requirement.name) for requirement in named}


def imported(path: Path) -> set[str]:
    """The distributions that hold what a file imports, be it at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module.partition(".")[0])
    installed = packages_distributions()
    scripts = (script.stem for script in (ROOT / "examples").glob("*.py"))
    here = {"plain_vit", "plain_vit_command", "tests", "tools", "examples", "benchmarks", *scripts}
    return {canonicalize_name(installed.get(name, [name])[0]) for name in names - sys.stdlib_module_names - here}


@pytest.mark.parametrize(
    ("pattern", "extras"),
    [
        ("plain_vit/*.py", ()),
        ("plain_vit/conversion/**/*.py", ()),
        ("plain_vit/files/*.py", ()),
        ("plain_vit/training/*.py", ("train",)),
        ("plain_vit/analysis/*.py", ("analysis",)),
        ("examples/*.py", ("train", "analysis")),
        ("benchmarks/*.py", ("train", "analysis", "test")),
        ("tests/*.py", ("train", "analysis", "test")),
    ],
)
def test_every_import_is_a_declared_requirement(pattern: str, extras: tuple[str, ...]) -> None:
    allowed = declared(*extras) | SOURCES | (BY_HAND if pattern == "tests/*.py" else set())
    undeclared = {path.name: imported(path) - allowed for path in ROOT.glob(pattern)}
    assert undeclared
    assert not {name: missing for name, missing in undeclared.items() if missing}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, its standard output being the result; what it says is shown where it fails."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools writes build/ and *.egg-info beside the sources, and packs what an old build/ holds.
    source = tmp_path_factory.mktemp("wheel") / "source"
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=leave_out)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", source, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
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
    sources = {name for name in package if "__pycache__" not in name} | {"plain_vit_command.py"}
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
