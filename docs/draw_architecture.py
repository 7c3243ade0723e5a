"""The picture of architecture.md: the rooms of the package, and what imports what, read from the source.

python docs/draw_architecture.py
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "plain_vit"
PICTURE = ROOT / "docs" / "pictures" / "architecture.png"

# Files that are one room together; every other file is a room by itself, and so is every folder.
ROOM_OF_FILE = {
    **{f"{name}_plain_vit": "model" for name in ("configuration", "layers", "heads", "attention", "modeling")},
    "image_processing_plain_vit": "image processor",
    "model_card": "hub",
    "markdown": "hub",
}
# Where a room is drawn, from left to right; others share their row out.
COLUMNS = {
    "training": 1.4,
    "analysis": 0.9,
    "cli": 6.6,
    "hub": 6.6,
    "conversion": 6.6,
    "conversion/google": 5.0,
    "conversion/timm": 3.2,
    "conversion/torchvision": 5.2,
    "conversion/transformers": 7.3,
    "conversion/vit_pytorch": 9.3,
    "conversion/tables": 6.6,
    "files": 3.6,
    "model": 2.4,
    "image processor": 6.6,
}
# Files of conversion that every source is made with.
TABLES = ("engine", "format", "infer", "compare_modules", "pixels")
OUTSIDE = (
    "__init__",
    "adapters",
    "environment",
    "errors",
    "extras",
    "inference",
)  # imported by nearly all, or by users alone


def room_of(module: str) -> str | None:
    """Return the room of a module such as "conversion.timm.source"; None for what belongs to none."""
    first, *rest = module.split(".")
    if first in OUTSIDE:
        return None
    if first == "conversion" and rest and (PACKAGE / "conversion" / rest[0]).is_dir():
        return f"conversion/{rest[0]}"
    if first == "conversion" and rest and rest[0] in (*TABLES, "google"):
        return "conversion/google" if rest[0] == "google" else "conversion/tables"
    return ROOM_OF_FILE.get(first, first)


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return the rooms that each room imports, at the top of a file or inside a function."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        room = room_of(module)
        if room is None:
            continue
        package = parts[:-1]
        others = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                for target in _targets(node, package):
                    other = room_of(target)
                    if other is not None and other != room:
                        others.add(other)
    return {room: frozenset(others & found.keys()) for room, others in found.items()}


def _targets(node: ast.ImportFrom, package: tuple[str, ...]) -> list[str]:
    """Return the modules of the package that a statement imports."""
    if node.level == 0:
        first, *rest = (node.module or "").split(".")
        base = rest if first == "plain_vit" else None
    else:
        base = [*package[: len(package) - node.level + 1], *((node.module or "").split(".") if node.module else [])]
    if base is None:
        return []
    return [".".join(base)] if base else [alias.name for alias in node.names]


def layers(graph: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Return how many steps each room is above those that import nothing.

    Raises:
        ValueError: Rooms import each other in a circle.
    """
    heights: dict[str, int] = {}

    def height(room: str, path: tuple[str, ...]) -> int:
        if room in path:
            raise ValueError(f"rooms import each other in a circle: {' -> '.join((*path, room))}")
        if room not in heights:
            heights[room] = 1 + max((height(other, (*path, room)) for other in graph[room]), default=-1)
        return heights[room]

    for room in graph:
        height(room, ())
    return heights


def draw(graph: Mapping[str, frozenset[str]]) -> Figure:
    """Draw rooms as boxes, each above all that it imports, and an arrow to each that no other arrow leads to."""
    heights = layers(graph)
    rows: dict[int, list[str]] = {}
    for room in sorted(graph):
        rows.setdefault(heights[room], []).append(room)
    figure = Figure(figsize=(9, 0.95 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = {
        room: (COLUMNS.get(room, (number + 0.5) / len(row) * 10), 1.6 * level)
        for level, row in rows.items()
        for number, room in enumerate(row)
    }
    for room, others in graph.items():
        through = {further for other in others for further in _reached(graph, other)}
        for other in sorted(others - through):
            (x, y), (to_x, to_y) = places[room], places[other]
            arrow = FancyArrowPatch(
                (x, y - 0.32), (to_x, to_y + 0.32), arrowstyle="-|>", mutation_scale=11, color="#8a93a6", lw=1
            )
            axes.add_patch(arrow)
    for room, (x, y) in places.items():
        name = room.removeprefix("conversion/") if room != "conversion/tables" else "tables of conversion"
        width = 0.1 * len(name) + 0.45
        axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - 0.28), width, 0.56, boxstyle="round,pad=0.04", fc="#e8eefc", ec="#3b5bdb"
            )
        )
        axes.text(x, y, name, ha="center", va="center", fontsize=10)
    axes.set_xlim(0, 10.5)
    axes.set_ylim(-0.6, 1.6 * (len(rows) - 1) + 0.6)
    axes.set_axis_off()
    return figure


def _reached(graph: Mapping[str, frozenset[str]], room: str) -> set[str]:
    """Return all rooms that a room imports, directly or through others."""
    reached = set(graph[room])
    for other in graph[room]:
        reached |= _reached(graph, other)
    return reached


if __name__ == "__main__":
    draw(imports()).savefig(PICTURE, dpi=130)
    print(f"written: {PICTURE.relative_to(ROOT)}")
