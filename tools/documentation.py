"""MkDocs hooks that add the README, changelog and contributing guide, and API pages of all public names.

MkDocs calls `on_files` and `on_page_markdown`. The package is read, never imported.
"""

import ast
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["plain-vit"]["address"]
# Pages of the site from files in the root of the checkout.
TAKEN_OVER = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^()#]+)(?P<place>#[^)]*)?\)")
LEGEND = (
    "Shapes: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches, `L` tokens, `D` hidden size. "
    "Sizes are (height, width)."
)
TRAINING = sorted((ROOT / "plain_vit" / "training").rglob("[!_]*.py"))
# transformers generates the constructor of a config from its fields; the source contains none.
UNCHECKED = "\n    options:\n      docstring_options: {warn_unknown_params: false, warn_missing_types: false}"
OPTIONS = {"plain_vit.PlainViTConfig": UNCHECKED}
# API pages: titles, and the modules whose public names they list.
REFERENCE = {
    "api/models.md": ("Models", ["plain_vit"]),
    "api/inference.md": ("Inference", ["plain_vit.inference", "plain_vit.inference.adapters"]),
    "api/conversion.md": ("Conversion", ["plain_vit.conversion", "plain_vit.conversion.parity"]),
    "api/analysis.md": ("Analysis", ["plain_vit.analysis", "plain_vit.analysis.plots", "plain_vit.analysis.sheet"]),
    "api/browse.md": ("Pages of many images", ["plain_vit.browse"]),
    "api/training.md": (
        "Training",
        [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in TRAINING],
    ),
    "api/hub.md": (
        "Hub and tools",
        ["plain_vit.hub", "plain_vit.hub.card", "plain_vit.system.environment"],
    ),
    "api/errors.md": ("Errors", ["plain_vit.errors"]),
}


def public_names(module: str) -> list[str]:
    """Return the public names of a module: its `__all__`, or else its definitions without an underscore."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    statements = ast.parse(source.read_text(encoding="utf-8")).body
    for statement in statements:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [found.name for found in statements if isinstance(found, kinds) and not found.name.startswith("_")]


def reference_page(title: str, modules: list[str]) -> str:
    """Return the API page of these modules, with the description and source of each public name."""
    names = [f"{module}.{name}" for module in modules for name in public_names(module)]
    return "\n\n".join([f"# {title}", LEGEND, *(f"::: {name}{OPTIONS.get(name, '')}" for name in names)])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    pages = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in TAKEN_OVER.items()}
    pages |= {page: reference_page(title, modules) for page, (title, modules) in REFERENCE.items()}
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **known: Any) -> str:
    """Rewrite the links of a page to their targets on the site."""
    sources = {page: name for name, page in TAKEN_OVER.items()}
    here = ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(link: re.Match[str]) -> str:
        path = (here.parent / link["path"]).resolve().relative_to(ROOT).as_posix()
        place = link["place"] or ""
        target = TAKEN_OVER.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if target:
            relative = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
            return f"{link['picture']}[{link['text']}]({relative}{place})"
        return f"[{link['text']}]({ADDRESS}/blob/main/{path}{place})" if ADDRESS else link["text"]

    return markdown if page.file.src_uri in REFERENCE else LINK.sub(led, markdown)
