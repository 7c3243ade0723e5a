"""Figure of architecture.md: the components of the package and their imports, read from the source.

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

# Files that form one component together; every other file and every folder is a component of its own.
COMPONENT_OF_FILE = {
    **{
        f"{name}_plain_vit": "model"
        for name in ("configuration", "layers", "heads", "attention", "packed", "positions", "modeling")
    },
    "image_processing_plain_vit": "image processor",
    "licenses": "hub",
    "model_card": "hub",
    "markdown": "hub",
}
# Horizontal position of each component; components not listed are spread evenly over their row.
COLUMNS = {
    "training": 1.4,
    "analysis": 0.9,
    "cli": 6.6,
    "hub": 6.6,
    "conversion": 6.6,
    "conversion/google": 6.4,
    "conversion/open_clip": 4.5,
    "conversion/timm": 3.2,
    "conversion/torchvision": 5.2,
    "conversion/transformers": 7.3,
    "conversion/vit_pytorch": 9.3,
    "conversion/tables": 6.6,
    "files": 3.6,
    "model": 2.4,
    "image processor": 6.6,
}
# Modules of conversion that all sources build on.
TABLES = ("engine", "format", "infer", "compare_modules", "pixels")
OUTSIDE = (
    "__init__",
    "adapters",
    "csv_files",
    "cuda_graphs",
    "environment",
    "errors",
    "extras",
    "image_files",
    "inference",
    "packing",
    "place_names",
    "releases_plain_vit",
    "scores",
    "system",
)  # imported by nearly every component, or only by users


def component_of(module: str) -> str | None:
    """Return the component of a module such as "conversion.timm.source"; None if it belongs to none."""
    first, *rest = module.split(".")
    if first in OUTSIDE:
        return None
    if first == "conversion" and rest and (PACKAGE / "conversion" / rest[0]).is_dir():
        return f"conversion/{rest[0]}"
    if first == "conversion" and rest and rest[0] in (*TABLES, "google"):
        return "conversion/google" if rest[0] == "google" else "conversion/tables"
    return COMPONENT_OF_FILE.get(first, first)


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return the components that each component imports, at the top of a file or inside a function."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        component = component_of(module)
        if component is None:
            continue
        package = parts[:-1]
        others = found.setdefault(component, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                for target in _targets(node, package):
                    other = component_of(target)
                    if other is not None and other != component:
                        others.add(other)
    return {component: frozenset(others & found.keys()) for component, others in found.items()}


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
    """Return the height of each component: 0 if it imports none, else one more than the highest that it imports.

    Raises:
        ValueError: Rooms import each other in a circle.
    """
    heights: dict[str, int] = {}

    def height(component: str, path: tuple[str, ...]) -> int:
        if component in path:
            raise ValueError(f"components import each other in a circle: {' -> '.join((*path, component))}")
        if component not in heights:
            heights[component] = 1 + max((height(other, (*path, component)) for other in graph[component]), default=-1)
        return heights[component]

    for component in graph:
        height(component, ())
    return heights


def draw(graph: Mapping[str, frozenset[str]]) -> Figure:
    """Draw components as boxes above everything they import, with arrows for the imports that are not transitive."""
    heights = layers(graph)
    rows: dict[int, list[str]] = {}
    for component in sorted(graph):
        rows.setdefault(heights[component], []).append(component)
    figure = Figure(figsize=(9, 0.95 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = {
        component: (COLUMNS.get(component, (number + 0.5) / len(row) * 10), 1.6 * level)
        for level, row in rows.items()
        for number, component in enumerate(row)
    }
    for component, others in graph.items():
        through = {further for other in others for further in _reached(graph, other)}
        for other in sorted(others - through):
            (x, y), (to_x, to_y) = places[component], places[other]
            arrow = FancyArrowPatch(
                (x, y - 0.32), (to_x, to_y + 0.32), arrowstyle="-|>", mutation_scale=11, color="#8a93a6", lw=1
            )
            axes.add_patch(arrow)
    for component, (x, y) in places.items():
        name = component.removeprefix("conversion/") if component != "conversion/tables" else "tables of conversion"
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


def _reached(graph: Mapping[str, frozenset[str]], component: str) -> set[str]:
    """Return all components that a component imports, directly or through others."""
    reached = set(graph[component])
    for other in graph[component]:
        reached |= _reached(graph, other)
    return reached


if __name__ == "__main__":
    draw(imports()).savefig(PICTURE, dpi=130)
    print(f"written: {PICTURE.relative_to(ROOT)}")
