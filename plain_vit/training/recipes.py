"""Recipes: named sets of options from published runs, with the published results.

They are in `recipes.yaml`.
"""

import difflib
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import TrainingError


@dataclass(frozen=True)
class Recipe:
    """A named set of options.

    Args:
        description: one or two sentences.
        options: options of the training scripts, by name.
        source: where the numbers are published: a file of a repository, or a table of a paper.
        missing: parts of the published run that these options do not reproduce; empty if there are none.
        target: the published result and its model; empty if none is reported.
        script: the script in examples/ that the recipe is for.
    """

    description: str
    options: Mapping[str, Any]
    source: str = ""
    missing: str = ""
    target: str = ""
    script: str = "finetune_image_classification.py"


RECIPES = {
    name: Recipe(**fields)
    for name, fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[
        "recipes"
    ].items()
}


def recipe_options(name: str, known: Collection[str]) -> dict[str, Any]:
    """Return the options of a recipe.

    Args:
        name: one of `RECIPES`.
        known: the options of the script.

    Raises:
        TrainingError: The recipe does not exist or belongs to another script.
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(RECIPES)}."
        raise TrainingError(f"There is no recipe {name!r}: {hint} --list_recipes describes each.")
    recipe = RECIPES[name]
    if not recipe.options.keys() <= set(known):
        raise TrainingError(f"The recipe {name} is for examples/{recipe.script}.")
    return dict(recipe.options)


def describe_recipes() -> str:
    """Return the descriptions, published results, sources and options of all recipes, as text."""
    paragraphs = []
    for name, recipe in RECIPES.items():
        words = [
            f"--{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for option, value in recipe.options.items()
        ]
        lines = [
            f"examples/{recipe.script}. {recipe.description}",
            *([f"Published: {recipe.target}."] if recipe.target else []),
            *([f"Source: {recipe.source}."] if recipe.source else []),
            *([f"Not included: {recipe.missing}."] if recipe.missing else []),
            " ".join(words),
        ]
        wrapped = [
            textwrap.fill(line, 110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
            for line in lines
        ]
        paragraphs.append("\n".join([name, *wrapped]))
    return "\n\n".join(paragraphs)
