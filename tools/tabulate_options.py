"""Write docs/reference/options.md and config.md: commands, options of the scripts, fields of the config.

python -m tools.tabulate_options
"""

import argparse
import dataclasses
import inspect
import itertools
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from plain_vit import PlainViTConfig
from plain_vit.configuration_plain_vit import GROUPS
from plain_vit.training.arguments import SCRIPTS as OPTIONS_OF
from plain_vit_command import COMMANDS, SCRIPTS, parser_of

ROOT = Path(__file__).parents[1]
OPTIONS, CONFIG = ROOT / "docs" / "reference" / "options.md", ROOT / "docs" / "reference" / "config.md"
WRITTEN = "Written by `python -m tools.tabulate_options`."
Row = tuple[str, str, str]  # name, default, meaning
# The first field of each section of the page, with its heading.
SECTIONS = {
    "hidden_size": "Sizes",
    "use_class_token": "Tokens",
    "patch_projection": "Patches and position embeddings",
    "rope_parameters": "Positions in the attention",
    "block_type": "Blocks",
    "final_norm": "Pooling and classifier",
    "hidden_dropout_prob": "Dropout and initial weights",
    "reconstruction_target": "Masked images",
    "apply_layernorm": "Backbone",
}


def options_page() -> str:
    """Return the page of the commands and of the options of the scripts."""
    parts = [
        "# Commands and options",
        f"{WRITTEN} `plain-vit COMMAND --help` and `python examples/SCRIPT.py --help` print the same. "
        f"{', '.join(f'`plain-vit {name}`' for name in SCRIPTS)} take the options of their scripts, below.",
    ]
    seen: set[Row] = set()
    for name in (name for name in COMMANDS if name not in SCRIPTS):
        command = parser_of(name)
        parts += [f"## plain-vit {name}", command.description, *_section(_arguments(command), seen)]
    for script, kind in OPTIONS_OF.items():
        hints = get_type_hints(kind)
        parts += [f"## {script}.py", *_section([_option(each, hints) for each in dataclasses.fields(kind)], seen)]
    service = runpy.run_path(str(ROOT / "examples" / "serve" / "app.py"))["parser"]()
    parts += ["## serve/app.py", *_section(_arguments(service), seen)]
    return "\n\n".join(parts) + "\n"


def _arguments(parser: argparse.ArgumentParser) -> list[Row]:
    return [_argument(action) for action in parser._actions if action.dest not in ("help", "debug")]


def _section(rows: Sequence[Row], seen: set[Row]) -> list[str]:
    """Return a table of the rows that no earlier table has, and a list of the names in the other rows."""
    new, known = [row for row in rows if row not in seen], [row[0] for row in rows if row in seen]
    seen.update(rows)
    return [_table("argument", new)] * bool(new) + [f"As above: {', '.join(known)}."] * bool(known)


def _argument(action: argparse.Action) -> Row:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest.upper()}`"
    return names, _default(action.default), _choices(action.choices or ()) + (action.help or "")


def _option(field: dataclasses.Field[Any], hints: dict[str, Any]) -> Row:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    text = _choices(_literal(hints[field.name])) + field.metadata["help"]
    return f"`--{field.name.replace('_', '-')}`", _default(default), text


def config_page() -> str:
    """Return the page of the fields of the config."""
    rows = _fields(PlainViTConfig)
    parts = [
        "# Config",
        f"{WRITTEN} The fields of `PlainViTConfig`, beside those that every config of transformers has "
        "(`num_labels`, `id2label`, `problem_type`, ...). Sizes are (height, width) in pixels; a number is a square. "
        "Saved configs bind: every later version opens them with the same numbers.",
    ]
    starts = [*(number for number, (name, *_) in enumerate(rows) if name.strip("`") in SECTIONS), len(rows)]
    for start, end in itertools.pairwise(starts):
        parts += [f"## {SECTIONS[rows[start][0].strip('`')]}", _table("field", rows[start:end])]
        for name, kind in GROUPS.items():
            if f"`{name}`" in (row[0] for row in rows[start:end]):
                text = inspect.cleandoc(kind.__doc__ or "").partition("\n\nArgs:")[0]
                parts += [f"### {name}", text, _table("key", _fields(kind))]
    return "\n\n".join(parts) + "\n"


def _fields(kind: type) -> list[Row]:
    """Return the fields of a dataclass, with their defaults and the text of its docstring."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    defaults = {field.name.lstrip("_"): field.default for field in dataclasses.fields(kind)}
    return [(f"`{name}`", _default(defaults[name]), " ".join(text.split())) for name, text in found]


def _literal(hint: Any) -> tuple[Any, ...]:
    """Return the choices in a type hint, such as `Literal["a", "b"] | None`."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next(filter(None, map(_literal, get_args(hint))), ())


def _choices(values: Any) -> str:
    return f"{', '.join(f'`{value}`' for value in values)}: " if values else ""


def _default(value: Any) -> str:
    if value in (dataclasses.MISSING, argparse.SUPPRESS):
        return "required"
    return "" if value is None or value in ([], ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(head: str, rows: Sequence[Row]) -> str:
    lines = [f"| {head} | default | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows])


def main() -> None:
    """Write both pages."""
    OPTIONS.write_text(options_page(), encoding="utf-8")
    CONFIG.write_text(config_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
