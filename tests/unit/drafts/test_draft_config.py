"""Recipes with drafts that cannot work are refused with field, reason and fix."""

from __future__ import annotations

from typing import Any

import pytest

from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe

CHOOSE = {"kind": "choose"}
PREFER = {"kind": "preference"}
TEACHER = {"kind": "model", "model": "models/teacher"}
BASE: dict[str, Any] = {
    "student": {"model": "smollm2-135m"},
    "tasks": {"kind": "arithmetic"},
    "losses": [PREFER],
    "drafts": [CHOOSE],
}


def parse(**changes: Any) -> Recipe:
    return parse_recipe({name: v for name, v in (BASE | changes).items() if v is not None})


ACCEPTED: dict[str, dict[str, Any]] = {
    "pairs": {},
    "rejection sampling": {"losses": [{"kind": "cross_entropy", "on": "chosen"}]},
    "by the teacher": {"drafts": [CHOOSE | {"by": "teacher_logp"}], "teacher": TEACHER},
    "a live teacher that only ranks": {
        "drafts": [CHOOSE | {"by": "teacher_logp"}],
        "teacher": {"kind": "self", "weights": "live"},
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_recipes_that_work(name: str) -> None:
    assert parse(**ACCEPTED[name]).drafts


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"samples_per_prompt": 1}}, r"drafts\[0\] \(choose\).*samples_per_prompt to 2"),
    ({"drafts": [CHOOSE | {"by": "teacher_logp"}]}, r"needs a \[teacher\]"),
    ({"losses": [{"kind": "cross_entropy", "on": "teacher"}]}, r"no loss uses its pairs"),
    ({"drafts": [CHOOSE, CHOOSE]}, r"two are of kind = 'choose'"),
    ({"rollout": {"student_fraction": 0}}, r"leaves no samples of the student"),
    ({"tasks": {"kind": "trajectories", "path": "runs/a"}}, r"was written elsewhere"),
    ({"drafts": [CHOOSE | {"reduce": "sum"}]}, r"reduce belongs to by = 'teacher_logp'"),
    ({"drafts": [CHOOSE | {"length_control": 0.5}]}, r"length_control"),
    ({"drafts": None, "losses": [{"kind": "cross_entropy", "on": "chosen"}]},
     r"on = 'chosen'.*add \[\[drafts\]\]"),
    ({"losses": [PREFER | {"on": "student"}]}, r"a pair trains as a whole"),
    ({"drafts": [{"kind": "chose"}]}, r"drafts\[0\].*choose"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_recipes_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=rf"(?s){message}"):
        parse(**changes)
