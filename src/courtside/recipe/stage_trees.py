"""Plain trees of stages: merging over a recipe, `{iteration}`, references to other stages."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from courtside.errors import RecipeError

PREFIX = "stage:"
REFERENCE = re.compile(r"stage:([\w-]+)")
"""Other texts that begin like this are no references: a prompt may."""
PREVIOUS = "previous"
"""`stage:previous` is the stage right before; in the first one, the model of its recipe."""
ITERATION = "{iteration}"
STUDENT_START = ("adapter", "average_with", "keep_layers")
"""Fields of [student] that are part of the model in `student.model`."""


def merge_stage(
    inherited: Mapping[str, Any],
    changes: Mapping[str, Any],
    remove: Sequence[str],
    *,
    where: str,
    is_first: bool,
) -> dict[str, Any]:
    """A stage's recipe: what it inherits without `remove`, and its own sections over that."""
    tree: dict[str, Any] = copy.deepcopy(dict(inherited))
    for field in remove:
        _remove_field(tree, field, where)
    model = changes.get("student", {}).get("model") if _is_table(changes.get("student")) else None
    student = tree.get("student")
    if isinstance(student, dict) and model is not None:
        if model == PREFIX + PREVIOUS and is_first:
            # Nothing came before: the loop begins with the recipe's own model.
            changes = {**changes, "student": {k: v for k, v in changes["student"].items()
                                              if k != "model"}}  # fmt: skip
        else:
            # They made the inherited model what it is; another model must not get them again.
            for name in STUDENT_START:
                student.pop(name, None)
    return merge_trees(tree, changes)


def merge_trees(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key, other values replaced; so is a table of another `kind`."""
    merged = dict(base)
    for key, value in changes.items():
        old: Any = merged.get(key)
        is_merged = _is_table(old) and _is_table(value)
        if is_merged and value.get("kind", old.get("kind")) == old.get("kind"):
            merged[key] = merge_trees(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def substitute_iteration(value: Any, iteration: int) -> Any:
    if isinstance(value, str):
        return value.replace(ITERATION, str(iteration))
    if isinstance(value, Mapping):
        return {
            substitute_iteration(k, iteration): substitute_iteration(v, iteration)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [substitute_iteration(item, iteration) for item in value]
    return value


def find_references(
    value: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys of every text `stage:NAME`, and the name."""
    if isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
        yield path, match[1]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_references(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from find_references(item, (*path, str(index)))


def replace_value(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def _remove_field(tree: dict[str, Any], field: str, where: str) -> None:
    *parents, last = field.split(".")
    node: Any = tree
    for key in parents:
        node = node.get(key) if _is_table(node) else None
    if not _is_table(node) or last not in node:
        raise RecipeError(
            f"{where}: remove = [{field!r}]: its recipe has no {field}. Leave it out of `remove`"
        )
    del node[last]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)
