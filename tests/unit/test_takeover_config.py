"""Refusals of [takeover] name the field, the reason and the fix; what is left works."""

from __future__ import annotations

from typing import Any

import pytest

from courtside.errors import RecipeError
from courtside.recipe.load import parse_recipe

IMITATE = {"kind": "cross_entropy", "on": "teacher"}
PREFER = {"kind": "preference"}
TOOLBOX = {"kind": "toolbox"}
READER = {"kind": "rules"}


def tree(**changes: Any) -> dict[str, Any]:
    """A small recipe; a change to None removes the section."""
    whole = {
        "student": {"model": "smollm2-135m"},
        "tasks": {"kind": "arithmetic"},
        "teacher": {"kind": "model", "model": "models/teacher"},
        "takeover": {},
        "losses": [IMITATE],
    } | changes
    return {name: value for name, value in whole.items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"takeover": {"at": 3}},
        {"takeover": {"at": 0.25, "select": "all", "require": "none"}},
        {"tasks": TOOLBOX, "takeover": {"at": "first_error", "select": "errors"}},
        {"tasks": TOOLBOX, "takeover": {"at": 2}},
        {"tasks": TOOLBOX, "takeover": {"at": "reader"}, "reader": READER},
        {
            "tasks": TOOLBOX,
            "takeover": {"at": "reader"},
            "reader": READER,
            "losses": [{"kind": "divergence", "on": "teacher"}],
        },
        {"takeover": {"pair": True}, "losses": [PREFER]},
        {"takeover": {"pair": True}, "losses": [PREFER, IMITATE]},
        {"losses": [{"kind": "divergence"}]},
        {"losses": [IMITATE, {"kind": "policy_gradient", "on": "student"}]},
        {"teacher": {"kind": "self", "context": {"kind": "field", "field": "solution"}}},
    ],
)
def test_what_works(changes: dict[str, Any]) -> None:
    parse_recipe(tree(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "no [teacher] to take over"),
        ({"teacher": {"kind": "custom", "path": "a:B"}}, "scores and does not sample"),
        (
            {"teacher": {"kind": "self", "context": {"kind": "feedback"}}},
            "teacher.context.kind = 'feedback' differs between a draft",
        ),
        (
            {"teacher": {"kind": "self", "context": {"kind": "sibling"}}},
            "teacher.context.kind = 'sibling' differs between a draft",
        ),
        (
            {
                "tasks": {"kind": "conversations", "path": "logs.jsonl"},
                "rollout": {"student_fraction": 0},
            },
            "takeover: tasks.kind = 'conversations' was written elsewhere",
        ),
        (
            {"rollout": {"student_fraction": 0, "off_policy_source": "teacher"}},
            "rollout.student_fraction = 0 samples none",
        ),
        ({"takeover": {"at": "first_error"}}, "takeover.at = 'first_error' locates a turn"),
        ({"takeover": {"at": "reader"}}, "there is no reader"),
        ({"takeover": {"select": "errors"}}, "are events of an environment"),
        ({"takeover": {"at": 128}}, "nothing is left to take over"),
        ({"takeover": {"at": 0.5}, "tasks": TOOLBOX}, "a part of one answer's tokens"),
        ({"takeover": {"at": 1.5}}, "takeover.at"),
        ({"takeover": {"at": -1}}, "takeover.at"),
        ({"takeover": {"pair": True}}, "there is none. Add it, or remove pair"),
        ({"losses": [PREFER]}, "takeover.pair = true"),
        (
            {"takeover": {"pair": True}, "losses": [PREFER | {"on": "teacher"}]},
            "written by the student and the teacher",
        ),
        ({"losses": [{"kind": "divergence", "on": "student"}]}, "no loss trains on what the"),
        ({"losses": [IMITATE, {"kind": "policy_gradient"}]}, "the student's own samples"),
        (
            {
                "tasks": TOOLBOX,
                "takeover": {"at": "random"},
                "reader": READER,
            },
            "no loss has on = 'hinted_turns'",
        ),
        (
            {
                "tasks": TOOLBOX,
                "takeover": {"at": "reader"},
                "reader": READER,
                "losses": [IMITATE, {"kind": "divergence", "on": "student"}],
            },
            "the teacher scores hinted turns only",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(tree(**changes))
    assert message in str(caught.value)
