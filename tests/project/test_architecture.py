"""The components of the package: imports flow one way, and docs/architecture.md names them all."""

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT


@pytest.fixture
def architecture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that draws the figure."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    return importlib.import_module("draw_architecture")


def test_imports_flow_one_way(architecture: ModuleType) -> None:
    graph = architecture.imports()
    architecture.layers(graph)  # raises on a circular import
    assert {component for component, others in graph.items() if not others} == {"model", "image processor"}
    assert graph["files"] == {"model"}  # only for the name of the config
    for source in (component for component in graph if component.startswith("conversion/")):
        assert not graph[source] & {"conversion", "training", "analysis", "hub", "cli"}, source
    assert not graph["conversion"] & {"training", "analysis", "hub", "cli"}
    assert not graph["analysis"] & {"conversion", "training", "hub", "cli"}
    assert not {component for component, others in graph.items() if "cli" in others}


def test_a_circular_import_is_found(architecture: ModuleType) -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"})}
    with pytest.raises(ValueError, match="a -> b -> c -> a"):
        architecture.layers(graph)


def test_every_component_is_described(architecture: ModuleType) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    components = {component.rpartition("/")[2] for component in architecture.imports()}
    assert {
        component for component in components if f"**{component}**" not in text and f"/{component}**" not in text
    } == set()


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
