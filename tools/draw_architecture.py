"""Figure of architecture.md: the rooms of the package and their imports, read from the source.

python -m tools.draw_architecture
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "plain_vit"
PICTURE = ROOT / "docs" / "pictures" / "architecture.png"

# Files at the top of the package that form a room with others.
ROOM_OF_FILE = {
    "image_processing_plain_vit": "image processor",
    **dict.fromkeys(("plain_vit", "plain_vit_command", "cli"), "command"),  # "plain_vit" is the package's own __init__
}
# Horizontal position of each room in the figure.
COLUMNS = {
    "command": 4.8, "browse": 3.2, "inference": 4.8, "training/reports": 5.2, "training/tasks": 7.2, "training": 7.2,
    "training/data": 7.2, "training/run": 9.2, "training/hardware": 9.2, "hub": 2.6, "conversion": 3.8,
    "conversion/sources": 3.8, "conversion/tables": 3.8, "analysis": 0.6, "files": 4.6, "image processor": 1.0,
    "model": 2.4, "system": 6.2, "errors": 6.2, "scores": 7.9, "packing": 9.4,
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Return the files of the package and its command by module name."""
    paths = [*sorted(PACKAGE.rglob("*.py")), ROOT / "plain_vit_command.py"]
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    return {".".join(names[:-1] if names[-1] == "__init__" else names): path for path, names in parts.items()}


def room_of(module: str) -> str:
    """Return the room of a module such as "plain_vit.conversion.sources.timm.source"."""
    first, *rest = module.removeprefix("plain_vit.").split(".")
    if rest and (PACKAGE / first / rest[0]).is_dir():
        return f"{first}/{rest[0]}"
    if first.endswith("_plain_vit") and first not in ROOM_OF_FILE:
        return "model"
    return ROOM_OF_FILE.get(first, first)


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return the modules that each module imports: at the top, inside a function, or by name with importlib.

    Raises:
        ValueError: A module uses importlib with a computed name, which might be a module of the package.
    """
    files = modules()
    return {module: frozenset(imported(module, path, files)) for module, path in files.items()}


def imported(module: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules among `files` that a module's file imports."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{whole}.{alias.name}" for alias in node.names]
            yield from {target if target in files else whole for target in targets} & files.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & files.keys()
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0]
            start: ast.expr = name.values[0] if isinstance(name, ast.JoinedStr) else name
            if not isinstance(start, ast.Constant) or str(start.value).startswith((".", "plain_vit")):
                raise ValueError(f"{module} imports {ast.unparse(name)} by name: write an import statement")


def rooms(graph: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return the rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        found.setdefault(room_of(module), set()).update(room_of(other) for other in others)
    return {room: frozenset(others - {room}) for room, others in found.items()}


def heights(graph: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Return the floor of each room or file: 0 if it imports nothing, otherwise one above the highest that it imports.

    Raises:
        ValueError: There is a circular import.
    """
    found: dict[str, int] = {}

    def height(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise ValueError(f"a circle of imports: {' -> '.join((*path, name))}")
        if name not in found:
            found[name] = 1 + max((height(other, (*path, name)) for other in graph[name]), default=-1)
        return found[name]

    for name in graph:
        height(name, ())
    return found


def draw(graph: Mapping[str, frozenset[str]]) -> Figure:
    """Draw rooms as boxes above everything they import, with arrows for the imports that are not transitive."""
    floors = heights(graph)
    figure = Figure(figsize=(9, 0.62 * (max(floors.values()) + 1)), layout="constrained")
    axes = figure.add_subplot()
    places = {room: (COLUMNS[room], 1.6 * floor) for room, floor in floors.items()}
    for room, others in graph.items():
        through = {further for other in others for further in reached(graph, other)}
        for other in sorted(others - through):
            (x, y), (to_x, to_y) = places[room], places[other]
            arrow = FancyArrowPatch(
                (x, y - 0.36), (to_x, to_y + 0.36), arrowstyle="-|>", mutation_scale=10, color="#8a93a6", lw=1
            )
            axes.add_patch(arrow)
    for room, (x, y) in places.items():
        width = 0.095 * len(room) + 0.4
        axes.add_patch(
            FancyBboxPatch((x - width / 2, y - 0.3), width, 0.6, boxstyle="round,pad=0.04", fc="#e8eefc", ec="#3b5bdb")
        )
        axes.text(x, y, room, ha="center", va="center", fontsize=9)
    axes.set_xlim(-0.1, 10.4)
    axes.set_ylim(-0.6, 1.6 * max(floors.values()) + 0.6)
    axes.set_axis_off()
    return figure


def reached(graph: Mapping[str, frozenset[str]], room: str) -> set[str]:
    """Return all rooms that a room imports, directly or through others."""
    found = set(graph[room])
    for other in graph[room]:
        found |= reached(graph, other)
    return found


if __name__ == "__main__":
    draw(rooms(imports())).savefig(PICTURE, dpi=130)
    print(f"written: {PICTURE.relative_to(ROOT)}")
