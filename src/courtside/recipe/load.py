"""Recipes from TOML files, overrides and plain trees.

Types are strict: `steps = "5"` or `seed = true` is an error, not 5 or 1.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from courtside.errors import RecipeError, UserError
from courtside.files import BOM, read_regular_file
from courtside.recipe import Recipe
from courtside.recipe.builtin import find_recipe
from courtside.recipe.error_messages import describe_problems
from courtside.recipe.tasks import TasksConfig
from courtside.sanitize import truncate

RECIPE_PATH = "a TOML file as str or Path, or the name of a built-in recipe"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, or a built-in one by its name, and apply overrides.

    Each override is `section.key=value`.

    Values are TOML, or strings without quotes; entries of lists are addressed by index, as in
    `losses.0.weight=2`; `section.key=null` removes a key or an entry.
    """
    require_overrides(overrides)
    path = find_recipe(str(require_path(path, "load_recipe: path", RECIPE_PATH)))
    tree = read_tree(path)
    for override in overrides:
        apply_override(tree, override)
    return parse_recipe(tree, name=str(path))


def require_path(value: object, where: str, what: str) -> Path:
    """An argument of a call from Python as a path. `where` names it, `what` says what it takes."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UserError(f"{where} = {truncate(repr(value), 60)}; give {what}")
    return Path(value)


def require_overrides(overrides: object) -> None:
    if isinstance(overrides, str):
        raise RecipeError(f"overrides = {overrides!r} is one text; give a list of them")
    if not isinstance(overrides, Sequence) or not all(isinstance(text, str) for text in overrides):
        raise RecipeError(
            f"overrides = {truncate(repr(overrides), 60)}; give a list of texts, each "
            "section.key=value"
        )


def parse_recipe(tree: Mapping[str, Any], *, name: str = "recipe") -> Recipe:
    """Validate a plain tree; a RecipeError lists all problems, each with its field."""
    if not isinstance(tree, Mapping):
        raise RecipeError(f"{name}: is of type {type(tree).__name__}; give a dict of sections")
    if "stages" in tree:
        raise RecipeError(
            f"{name}: is a pipeline ([[stages]]), and a single recipe is needed here. `courtside "
            "train` runs a pipeline; give one of the recipes in its stages"
        )
    # From JSON, strict validation still accepts a list for a tuple and a string for a path.
    try:
        text = json.dumps(tree, default=_to_plain)
    except RecipeError:
        raise
    except (TypeError, ValueError, RecursionError) as error:  # of a tree from Python
        raise RecipeError(f"{name}: cannot be written as JSON ({error})") from None
    try:
        return Recipe.model_validate_json(text, strict=True)
    except ValidationError as error:
        lines = describe_problems(error.errors(include_url=False))
        raise RecipeError(f"{name}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def parse_tasks_section(tasks: dict[str, Any], overrides: Sequence[str]) -> TasksConfig:
    """A [tasks] section alone, with overrides of its fields: `settings.high=50`."""
    for override in overrides:
        apply_override(tasks, override)
    try:
        section: TasksConfig = TypeAdapter(TasksConfig).validate_json(
            json.dumps(tasks, default=_to_plain), strict=True
        )
    except ValidationError as error:
        details: Any = [
            {**problem, "loc": ("tasks", *problem["loc"])}
            for problem in error.errors(include_url=False)
        ]
        raise RecipeError("\n".join(describe_problems(details))) from None
    return section


def read_tree(path: Path) -> dict[str, Any]:
    try:
        # Universal newlines, as reading in text mode has.
        text = read_regular_file(path).removeprefix(BOM).decode()
        return tomllib.loads(text.replace("\r\n", "\n"))
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such recipe. `courtside recipes` lists the built-in ones"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # also an integer of 5,000 digits
        raise RecipeError(f"{path}: not valid TOML: {error}") from None


def _to_plain(value: Any) -> Any:
    match value:
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return dict(value)
        case BaseModel():
            return value.model_dump(mode="json", exclude_unset=True)
        case date() | time():
            return value.isoformat()
    raise RecipeError(f"{value!r} of type {type(value).__name__} is not allowed in a recipe")


def apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    # Messages write losses[0].weight, so an override may.
    *parents, last = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
    if not separator or not text.strip() or not all((*parents, last)):
        raise RecipeError(f"override {override!r}: write it as section.key=value")
    remove = text.strip() == "null"
    node: Any = tree
    for i, name in enumerate(parents):
        if isinstance(node, dict) and name not in node and not remove:
            node[name] = {}
        node = _child(node, name, where=".".join(parents[:i]), override=override)
    if isinstance(node, dict) and not remove:
        node[last] = _parse_value(text)
        return
    _child(node, last, where=".".join(parents), override=override)
    key_or_index = last if isinstance(node, dict) else int(last)
    if remove:
        del node[key_or_index]
    else:
        node[key_or_index] = _parse_value(text)


def _child(node: Any, name: str, *, where: str, override: str) -> Any:
    if isinstance(node, dict):
        if name not in node:
            at = f"{where} of the recipe" if where else "the recipe"
            raise RecipeError(f"override {override!r}: {at} has no {name} to remove")
        return node[name]
    if not isinstance(node, list):
        raise RecipeError(f"override {override!r}: {where} is a value, not a section")
    if not name.isdecimal():
        raise RecipeError(
            f"override {override!r}: {where} is a list; name an entry by its index, as in {where}.0"
        )
    if int(name) >= len(node):
        raise RecipeError(
            f"override {override!r}: {where} has {len(node)} entries, counted from 0; "
            f"there is no {where}.{name}"
        )
    return node[int(name)]


def _parse_value(text: str) -> Any:
    try:
        tree = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break in the text could add keys; then it is a string.
    return tree["value"] if tree.keys() == {"value"} else text
