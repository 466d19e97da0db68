"""Recipes with drafts that cannot work are refused with field, reason and fix."""

from __future__ import annotations

from typing import Any

import pytest

from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe

CHOOSE = {"kind": "choose"}
REWRITE: dict[str, Any] = {"kind": "rewrite"}
CRITICIZE = {"kind": "criticize"}
PREFER = {"kind": "preference"}
IMITATE = {"kind": "cross_entropy", "on": "teacher"}
CUSTOM = {"kind": "custom", "path": "mine:Teacher"}
ON_STUDENT = {"kind": "divergence", "on": "student"}
ENDPOINT = {"base_url": "http://localhost:8000/v1", "model": "big"}
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
    "a judge on a server": {"drafts": [CHOOSE | {"by": "judge", "endpoint": ENDPOINT}]},
    "repairs to imitate": {"drafts": [REWRITE | {"endpoint": ENDPOINT}], "losses": [IMITATE]},
    "repairs by the live student": {
        "drafts": [REWRITE],
        "losses": [IMITATE],
        "teacher": {"kind": "self", "weights": "live"},
    },
    "pairs of repairs": {"drafts": [REWRITE | {"endpoint": ENDPOINT, "pairs": True}]},
    "a repair as context": {
        "drafts": [REWRITE],
        "losses": [ON_STUDENT],
        "teacher": TEACHER | {"context": {"kind": "repair"}},
    },
    "a critique as context": {
        "drafts": [CRITICIZE],
        "losses": [ON_STUDENT],
        "teacher": TEACHER | {"context": {"kind": "critique"}},
    },
    "criticize, then rewrite": {
        "drafts": [CRITICIZE, REWRITE], "losses": [IMITATE], "teacher": TEACHER,
    },
    "turns of an environment": {
        "tasks": {"kind": "toolbox"},
        "drafts": [REWRITE | {"endpoint": ENDPOINT, "turn": "last"}],
        "losses": [IMITATE],
    },
}  # fmt: skip


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
    ({"drafts": [CHOOSE | {"endpoint": ENDPOINT}]}, r"endpoint belongs to by = 'judge'"),
    ({"drafts": [CHOOSE | {"by": "judge"}]}, r"add a \[teacher\] section, or name a server"),
    ({"drafts": [REWRITE], "losses": [IMITATE]}, r"\(rewrite\): asks a model; add a \[teacher\]"),
    ({"drafts": [CRITICIZE], "losses": [ON_STUDENT], "teacher": CUSTOM}, r"does not write"),
    ({"drafts": [REWRITE | {"endpoint": ENDPOINT}], "losses": [ON_STUDENT], "teacher": TEACHER},
     r"nothing uses its repairs"),
    ({"drafts": [CRITICIZE | {"endpoint": ENDPOINT}], "losses": [ON_STUDENT], "teacher": TEACHER},
     r"nothing reads its critiques"),
    ({"drafts": [REWRITE, CRITICIZE], "losses": [IMITATE], "teacher": TEACHER},
     r"nothing reads its critiques"),
    ({"drafts": [CHOOSE, REWRITE | {"pairs": True}], "teacher": TEACHER}, r"both make pairs"),
    ({"drafts": None, "losses": [ON_STUDENT],
      "teacher": TEACHER | {"context": {"kind": "repair"}}}, r"add \[\[drafts\]\].*'rewrite'"),
    ({"drafts": None, "losses": [ON_STUDENT],
      "teacher": TEACHER | {"context": {"kind": "critique"}}}, r"add \[\[drafts\]\].*'criticize'"),
    ({"drafts": [REWRITE], "losses": [ON_STUDENT], "tasks": {"kind": "toolbox"},
      "teacher": TEACHER | {"context": {"kind": "repair"}}}, r"above the whole episode"),
    ({"drafts": [CHOOSE | {"by": "teacher_logp"}, CRITICIZE], "losses": [PREFER, ON_STUDENT],
      "teacher": TEACHER | {"context": {"kind": "critique"}}}, r"another for each of them"),
    ({"drafts": [REWRITE], "losses": [IMITATE, {"kind": "policy_gradient"}], "teacher": TEACHER},
     r"policy gradient is defined on the student's own"),
    ({"drafts": [REWRITE | {"turn": "last"}], "losses": [IMITATE], "teacher": TEACHER},
     r"turn is of episodes"),
    ({"drafts": [REWRITE | {"reply": "whole"}], "losses": [IMITATE], "teacher": TEACHER},
     r"asks for tags, which would be part"),
    ({"drafts": [REWRITE | {"prompt": "Fix it."}], "losses": [IMITATE], "teacher": TEACHER},
     r"needs the slot \{draft\}"),
    ({"drafts": [REWRITE | {"prompt": "{draft} {answer}"}], "losses": [IMITATE],
      "teacher": TEACHER}, r"nothing fills \{answer\}"),
    ({"drafts": [REWRITE], "losses": [IMITATE, {"kind": "divergence", "on": "hinted_turns"}],
      "tasks": {"kind": "toolbox"}, "reader": {"kind": "rules"},
      "teacher": {"kind": "self", "weights": "live"}}, r"would give hints to repairs"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_recipes_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=rf"(?s){message}"):
        parse(**changes)
