"""The rooms of the package: imports go one way, without exceptions, and docs/architecture.md names all rooms."""

import ast
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tools import draw_architecture as architecture


def test_files_import_each_other_in_no_circle() -> None:
    architecture.heights(architecture.imports())


def test_rooms_import_only_rooms_beneath_them() -> None:
    rooms = architecture.rooms(architecture.imports())
    architecture.heights(rooms)  # raises on a circle
    beneath = {room: architecture.reached(rooms, room) for room in rooms}
    assert beneath["model"] == set()  # it is saved with every checkpoint, and so is the image processor
    assert beneath["image processor"] == {"model"}  # the check of releases
    assert not beneath["conversion"] & {"training", "inference", "analysis", "hub"}
    assert not beneath["analysis"] & {"conversion", "training", "inference", "hub"}
    assert not {room for room, others in beneath.items() if "command" in others}


def test_a_circle_is_found() -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"})}
    with pytest.raises(ValueError, match="a -> b -> c -> a"):
        architecture.heights(graph)


@pytest.mark.parametrize("name", ["'plain_vit.hub'", "'.hub'", "f'.{room}'", "name"])
def test_an_import_by_name_is_found(name: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"import importlib\nimportlib.import_module({name})\n")
    with pytest.raises(ValueError, match="write an import statement"):
        list(architecture.imported("plain_vit.module", file, {}))
    file.write_text("importlib.import_module(f'vit_pytorch.{name}')\n")
    assert not list(architecture.imported("plain_vit.module", file, {}))


def test_every_room_is_described() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in architecture.rooms(architecture.imports()) if f"**{room}**" not in text] == []


PLACEHOLDERS = {"plain_vit.errors.nothing", "plain_vit.examples.NAME", "plain_vit.module"}


def test_every_name_of_the_package_in_any_file_exists() -> None:
    """A program in a string, a command or a page names modules too, and only a run shows that one has moved."""
    written = re.compile(r"from (plain_vit[\w.]*) import \(?([\w, ]+)|(?<![\w/.-])(plain_vit(?:\.\w+)+)")
    named: dict[str, str] = {}
    for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        try:
            text = (ROOT / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for room, names, whole in written.findall(text):
            named |= {whole or f"{room}.{name.split(' as ')[0].strip()}": file for name in names.split(",")}

    def exists(name: str) -> bool:
        try:
            pkgutil.resolve_name(name.replace("plain_vit.examples", "examples"))
        except (ImportError, AttributeError):
            return False
        return True

    assert {name: file for name, file in named.items() if name not in PLACEHOLDERS and not exists(name)} == {}


@pytest.mark.slow
def test_images_are_opened_in_one_place_which_limits_their_size() -> None:
    def opens(path: Path) -> bool:
        return any(
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("Image.open", "PIL.Image.open")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )

    opening = [path.relative_to(ROOT).as_posix() for path in (ROOT / "plain_vit").rglob("*.py") if opens(path)]
    # The image processor travels with checkpoints, and opens what its caller names, as the sources' loaders do.
    assert sorted(opening) == ["plain_vit/files/images.py", "plain_vit/image_processing_plain_vit.py"]
