"""A whole recipe that trains the run's student on the hints of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.report.folder import toml

Tree = dict[str, Any]


def hints_recipe(recipe: Recipe, *, run: Path, hints: Path) -> str:
    """TOML. The run's own trajectories with a hint train, and nothing is sampled; student,
    optimizer and divergences on hinted turns are those of the run.

    Recorded conversations stay the tasks, because their hints apply in every step.
    """
    tree: Tree = recipe.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    human = next((reader for reader in recipe.human_readers), None)
    settings = {} if human is None else human.model_dump(mode="json", exclude_defaults=True)
    tree["reader"] = {**settings, "kind": "human", "path": str(hints)}
    if recipe.tasks.kind != "conversations":
        tree["tasks"] = {"kind": "trajectories", "path": str(run), "select": "hinted"}
        tree["rollout"] = {"student_fraction": 0.0}
        tree.pop("evaluate", None)  # nothing answers the student there
    for name in ("drafts", "rewards", "takeover"):  # they are about samples of the student
        tree.pop(name, None)
    tree["teacher"] = _make_teacher(recipe, tree)
    tree["losses"] = _select_losses(recipe, tree)
    # Resamples are checked by an environment, and stored trajectories have none.
    dropped = ("resamples", "min_pass_rate")
    tree["hints"] = {k: v for k, v in tree.get("hints", {}).items() if k not in dropped}
    order = ["student", "tasks", "rollout", "reader", "hints", "teacher", "losses"]
    ordered = {name: tree[name] for name in (*order, *tree) if tree.get(name)}
    parse_recipe(ordered, name="the viewer's recipe")
    return toml.dumps(ordered)


def _make_teacher(recipe: Recipe, tree: Tree) -> Tree:
    """The run's teacher without another context than the hint; else the student itself."""
    if not recipe.model_teachers:
        return {"kind": "self", "weights": "live"}
    teacher = {name: value for name, value in tree["teacher"].items() if name != "context"}
    if "routes" in teacher:
        teacher["routes"] = {
            tag: {name: value for name, value in route.items() if name != "context"}
            for tag, route in teacher["routes"].items()
        }
    return teacher


def _select_losses(recipe: Recipe, tree: Tree) -> list[Tree]:
    """Divergences on hinted turns, and those that hold the other turns where they are."""
    losses = [
        dumped
        for loss, dumped in zip(recipe.losses, tree["losses"], strict=True)
        if loss.kind == "divergence" and loss.on in ("hinted_turns", "unhinted_turns")
    ]
    if any(loss["on"] == "hinted_turns" for loss in losses):
        return losses
    return [{"kind": "divergence", "on": "hinted_turns"}, *losses]
