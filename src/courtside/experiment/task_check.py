"""Arms of a variant answer the same test tasks, or they are not compared."""

from __future__ import annotations

from itertools import product

from courtside.errors import RecipeError
from courtside.experiment.plan import Plan
from courtside.experiment.schedule import load_arm_recipe
from courtside.recipe import Recipe


def check_tasks(plan: Plan) -> None:
    """Refuses arms whose test tasks have other ids than the first arm's, unless they are named in
    `unpaired`. Tasks of environments in files of their own are not made for it: without the same
    ids their runs are compared without pairing."""
    for variant in plan.variants:
        arms = [arm for arm in plan.arms.values() if variant in arm.variants]
        paired = [arm for arm in arms if arm.name not in plan.design.unpaired]
        recipes = {arm.name: load_arm_recipe(plan, arm, variant) for arm in paired}
        for (first, recipe), (name, other) in product(list(recipes.items())[:1], recipes.items()):
            _compare(recipe, other, first, f"arms.{name}" + (f" in {variant}" if variant else ""))


def _compare(first: Recipe, other: Recipe, first_name: str, where: str) -> None:
    num_tasks = [recipe.evaluate.num_tasks for recipe in (first, other)]
    if first.tasks == other.tasks and num_tasks[0] == num_tasks[1]:
        return
    if any(
        recipe.tasks.kind == "environment" or recipe.tasks.is_recorded for recipe in (first, other)
    ):
        return
    ids = [_test_ids(recipe) for recipe in (first, other)]
    if ids[0] != ids[1]:
        unmatched = sorted(ids[0] ^ ids[1])
        raise RecipeError(
            f"{where}: its test tasks are not those of {first_name} ({len(unmatched)} are in one "
            f"of them only, such as {unmatched[0]!r}), so their scores do not compare. Give both "
            "the same [tasks] and evaluate.num_tasks, make them variants, or name the arm in "
            "`unpaired`"
        )


def _test_ids(recipe: Recipe) -> set[str]:
    from courtside.tasks.loading import make_task_source

    source = make_task_source(recipe.tasks, recipe.seed)
    return {task.id for task in source.held_out("test", recipe.evaluate.num_tasks)}
