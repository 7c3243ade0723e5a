"""The rooms of the package: imports flow one way, and docs/architecture.md names them all."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def architecture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that draws the picture."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    return importlib.import_module("draw_architecture")


def test_imports_flow_one_way(architecture: ModuleType) -> None:
    graph = architecture.imports()
    architecture.layers(graph)  # or there is a circle
    assert {room for room, others in graph.items() if not others} == {"model", "image processor"}
    assert graph["files"] == {"model"}  # by the config's name alone
    for source in (room for room in graph if room.startswith("conversion/")):
        assert not graph[source] & {"conversion", "training", "analysis", "hub", "cli"}, source
    assert not graph["conversion"] & {"training", "analysis", "hub", "cli"}
    assert not graph["analysis"] & {"conversion", "training", "hub", "cli"}
    assert not {room for room, others in graph.items() if "cli" in others}


def test_a_circle_is_found(architecture: ModuleType) -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"})}
    with pytest.raises(ValueError, match="a -> b -> c -> a"):
        architecture.layers(graph)


def test_every_room_is_described(architecture: ModuleType) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {room.rpartition("/")[2] for room in architecture.imports()}
    assert {room for room in rooms if f"**{room}**" not in text and f"/{room}**" not in text} == set()
