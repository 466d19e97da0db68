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
MIXED: dict[str, Any] = {"mixed_sampling": {"top_k": 20}}


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
                "teacher": {"kind": "self", "context": {"kind": "critique"}},
                "drafts": [{"kind": "criticize"}],
            },
            "teacher.context.kind = 'critique' differs between a draft",
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
        ({"losses": [PREFER]}, "or [takeover] with pair = true"),
        (
            {"takeover": {"pair": True}, "losses": [PREFER | {"on": "teacher"}]},
            "on = 'teacher': a pair trains as a whole",
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


# ── takeover.endpoint ────────────────────────────────────────────────────────────────────────────

SERVER = {"base_url": "http://localhost:8000/v1", "model": "big"}


def text_tree(takeover: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Of a recipe without another teacher."""
    sections: dict[str, Any] = {"teacher": None, "tasks": TOOLBOX}
    return tree(takeover={"endpoint": SERVER} | (takeover or {}), **(sections | changes))


SELF = {"kind": "self", "context": {"kind": "system", "text": "Be brief."}}
ANSWERS = {"tasks": {"kind": "arithmetic"}}
SCORE = {"kind": "divergence", "on": "teacher"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"takeover": {"at": "first_error", "select": "errors", "pair": True}, "losses": [PREFER]},
        {"takeover": {"at": "reader"}, "reader": READER},
        {"takeover": {"context": {"kind": "field", "field": "tools"}, "max_new_tokens": 4096,
                      "temperature": 0.0, "max_failure_fraction": 1.0}},
        {"takeover": {"at": 0}, **ANSWERS},
        {"takeover": {"at": 0.5, "can_continue": True}, **ANSWERS},
        {"takeover": {"can_continue": True}, **ANSWERS},
        {"teacher": SELF, "losses": [SCORE]},
        {"teacher": SELF, "losses": [IMITATE, {"kind": "divergence", "on": "student"}]},
        {"teacher": {"kind": "custom", "path": "a:B"},
         "losses": [IMITATE, {"kind": "policy_gradient", "on": "student"}]},
        {"train": {"max_teacher_tokens": 1000}},
        {"drafts": [{"kind": "choose"}], "losses": [IMITATE, PREFER]},
    ],
)  # fmt: skip
def test_what_an_endpoint_can_do(changes: dict[str, Any]) -> None:
    parse_recipe(text_tree(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (ANSWERS, "takeover.at = 'random' is a token inside an answer, and a chat server begins"),
        (ANSWERS | {"takeover": {"at": 3}}, "Set at = 0, where it answers in the draft's place"),
        ({"takeover": {"can_continue": True}}, "takeover.can_continue is of forks inside"),
        ({"losses": [SCORE]}, "as takeover.endpoint gives text and no log-probs, or use kind ="),
        (
            {"losses": [IMITATE, {"kind": "divergence", "on": "student"}]},
            "add a [teacher] section, as takeover.endpoint gives text and no log-probs",
        ),
        ({"rollout": {"stop": ["</s>"]}}, "takeover.endpoint: rollout.stop ends answers"),
        (
            {"teacher": {"kind": "self", "context": {"kind": "feedback"}}, "losses": [SCORE]},
            "takeover.endpoint: teacher.context.kind = 'feedback' is about drafts",
        ),
        ({"teacher": SELF}, "teacher: no loss uses it"),
        (
            {"rollout": {"student_fraction": 0.5, "off_policy_source": "teacher"}},
            "needs a [teacher] to sample from",
        ),
        (
            ANSWERS | {"takeover": {"at": 0}, "rollout": MIXED},
            "no [teacher] to replace tokens (an endpoint gives text, no distributions)",
        ),
        ({"takeover": {"context": {"kind": "feedback"}}}, "takeover.context"),
        ({"takeover": {"endpoint": SERVER | {"base_url": "big"}}}, "takeover.endpoint.base_url"),
        (
            {"takeover": {"endpoint": SERVER | {"extra_body": {"temperature": 1}}}},
            "temperature beside the endpoint",
        ),
    ],
)
def test_what_text_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text_tree(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "field",
    [{"context": SELF["context"]}, {"max_new_tokens": 9}, {"temperature": 0.5},
     {"can_continue": True}, {"keep_thoughts": True}, {"max_failure_fraction": 1.0}],
)  # fmt: skip
def test_fields_of_the_endpoint_need_it(field: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=f"{next(iter(field))} belongs to takeover.endpoint"):
        parse_recipe(tree(takeover=field))


# ── rollout.mixed_sampling ───────────────────────────────────────────────────────────────────────


def mixed_tree(rollout: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {"takeover": None, "losses": [{"kind": "divergence"}]}
    return tree(rollout=MIXED | (rollout or {}), **(sections | changes))


REWARD = {"kind": "policy_gradient", "advantage": "reward"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout": {"mixed_sampling": {"fraction": {"start": 1.0, "end": 0.0, "steps": 10}}}},
        {"rollout": {"student_fraction": 0.5}},
        {"losses": [REWARD]},
        {"takeover": {}, "losses": [IMITATE]},
    ],
)
def test_mixed_sampling_that_works(changes: dict[str, Any]) -> None:
    parse_recipe(mixed_tree(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": TOOLBOX}, "tasks.kind = 'toolbox' has episodes"),
        (
            {
                "tasks": {"kind": "conversations", "path": "logs.jsonl"},
                "rollout": {"student_fraction": 0},
            },
            "nothing is sampled with tasks.kind = 'conversations'",
        ),
        ({"rollout": {"student_fraction": 0}}, "rollout.student_fraction = 0 has none"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p truncates the student's proposals"),
        ({"rollout": {"top_k": 5}}, "rollout.top_k truncates the student's proposals"),
        ({"rollout": {"min_p": 0.1}}, "rollout.min_p truncates the student's proposals"),
        ({"teacher": None, "losses": [REWARD]}, "no [teacher] to replace tokens"),
        ({"teacher": {"kind": "custom", "path": "a:B"}}, "cannot decode with the student"),
        (
            {"teacher": {"kind": "self", "context": {"kind": "sibling"}}},
            "teacher.context.kind = 'sibling' is known after an answer",
        ),
        ({"losses": [{"kind": "policy_gradient"}]}, "advantage = 'teacher_gap' takes the sampler"),
        (
            {"losses": [{"kind": "divergence", "gate": {}}]},
            "losses[0]: gate compares the teacher with",
        ),
        ({"losses": [REWARD | {"ratio": "none"}]}, "Use ratio = 'importance'"),
        ({"rollout": {"mixed_sampling": {"top_k": 0}}}, "rollout.mixed_sampling.top_k"),
        ({"rollout": {"mixed_sampling": {"fraction": 1.2}}}, "rollout.mixed_sampling.fraction"),
    ],
)
def test_mixed_sampling_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(mixed_tree(**changes))
    assert message in str(caught.value)
