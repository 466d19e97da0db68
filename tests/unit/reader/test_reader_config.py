"""The reader's section refuses what cannot work, with the reason and the fix."""

from __future__ import annotations

import json
import tomllib
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from courtside.recipe.hints import HintsConfig
from courtside.recipe.reader import (
    CombinedReaderConfig,
    EndpointConfig,
    ReaderConfig,
    RuleReaderConfig,
)
from courtside.recipe.rules import HINTS, SLOTS, Detect, Rule, parse_slots
from courtside.report.folder import toml

READER: TypeAdapter[Any] = TypeAdapter(ReaderConfig)


def parsed(tree: dict[str, Any]) -> Any:
    """As a recipe is read: strictly, from JSON."""
    return READER.validate_json(json.dumps(tree), strict=True)


def problem(tree: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        parsed(tree)
    errors = caught.value.errors()
    if len(errors) > 1:  # an invalid entry is not counted, so its list seems too short as well
        errors = [error for error in errors if error["type"] != "too_short"]
    [error] = errors
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def rule(**fields: Any) -> dict[str, Any]:
    return {"kind": "rules", "rules": [fields]}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (rule(detect="pattern", hint="x"), "needs a `pattern`"),
        (rule(detect="pattern", pattern="x"), "needs a `hint`"),
        (rule(detect="tool_error", hint=" "), "needs a `hint`"),
        (rule(detect="pattern", pattern="(", hint="x"), "is no regular expression"),
        (rule(detect="tool_error", pattern="x"), "use detect = 'pattern'"),
        (rule(detect="tool_error", within="reply"), "within belongs to detect = 'pattern'"),
        (rule(detect="tool_error", max_tokens=3), "max_tokens belongs to detect = 'over_length'"),
        (rule(detect="tool_error", lookup_field="x"), "lookup_field belongs to detect"),
        (rule(detect="event", hint="x"), "event names the kind"),
        (rule(detect="no_call", event="x"), "event names the kind"),
        (rule(detect="answer_without_lookup"), "must know which tasks need a lookup"),
        (rule(detect="answer_without_lookup", lookup_field="x", pattern="y"), "and not both"),
        (rule(detect="over_length", hint="{tool}"), "has no {tool}; it has {turn}, {tokens}"),
        (rule(detect="tool_error", hint="{match}"), "has no {match}"),
        (rule(detect="tool_error", hint="{"), "write a brace that is meant as one twice"),
        (rule(detect="tool_error", hint="{0}"), "a slot is a plain name"),
        (rule(detect="tool_error", hint="{}"), "a slot is a plain name"),
        (rule(detect="tool_error", hint="{tool.upper}"), "a slot is a plain name"),
        (rule(detect="tool_error", hint="{tool!r}"), "a slot is a plain name"),
        (rule(detect="tool_error", hint="{tool:>9}"), "a slot is a plain name"),
        ({"kind": "rules", "rules": []}, "at least 1"),
        ({"kind": "rules", "error_pattern": "["}, "is no regular expression"),
        ({**rule(detect="tool_error"), "false_positive_rate": 0.1}, "add a rule whose hint uses"),
        ({"kind": "rules", "min_confidence": 0.5}, "Extra inputs"),
        ({"kind": "model", "window_chars": 2000, "overlap_chars": 1500},
         "at most half of window_chars"),
        ({"kind": "model", "min_confidence": 1.5}, "less than or equal to 1"),
        ({"kind": "human"}, "Field required"),
        ({"kind": "combined", "readers": [{"kind": "rules"}]}, "at least 2"),
        (
            {"kind": "combined", "readers": [{"kind": "rules"}, {"kind": "model",
             "control": "all_turns"}]},
            "set reader.control, not a member's",
        ),
        ({"kind": "rules", "control": "random"}, "'random_turn'"),
    ],
)  # fmt: skip
def test_refused(tree: dict[str, Any], message: str) -> None:
    assert message in problem(tree)


def test_a_group_of_the_pattern_is_a_slot() -> None:
    assert parsed(rule(detect="pattern", pattern="(?P<tool>x)", hint="{tool}")).rules[0].hint


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://x/v1?a=b"])
def test_addresses(url: str) -> None:
    with pytest.raises(ValidationError, match="must be the address of a server"):
        EndpointConfig(base_url=url, model="m")
    assert EndpointConfig(base_url="http://x:8000/v1/", model="m").base_url == "http://x:8000/v1"


@pytest.mark.parametrize(
    ("field", "value"), [("base_url", "http://me:sekret@x/v1"), ("api_key_env", "sk-sekret-1")]
)
def test_a_key_in_the_recipe_is_refused_and_not_repeated(field: str, value: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EndpointConfig.model_validate({"base_url": "http://x/v1", "model": "m", field: value})
    [error] = caught.value.errors()
    assert error["type"] == "value_error", "recipe_problems repeats the input of other types"
    assert "sekret" not in error["msg"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("temperature", "a field of its own"), ("messages", "set for each request")],
)
def test_a_body_leaves_the_readers_fields_alone(name: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EndpointConfig(base_url="http://x/v1", model="m", extra_body={name: 1})


def test_the_resolved_recipe_says_the_words_and_reads_back() -> None:
    trees: list[dict[str, Any]] = [
        {"kind": "rules"},
        {"kind": "human", "path": "hints.jsonl"},
        {"kind": "model", "endpoint": {"base_url": "http://x/v1", "model": "m",
         "extra_body": {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}}}},
        {"kind": "combined", "readers": [{"kind": "rules"}, {"kind": "model"}]},
    ]  # fmt: skip
    for tree in trees:
        whole = parsed(tree)
        dumped = whole.model_dump(mode="json")
        assert parsed(tomllib.loads(toml.dumps(dumped))) == whole
    message = [item["hint"] for item in RuleReaderConfig(kind="rules").model_dump()["rules"]]
    assert "Reminder: the tools here are {tools}." in message


def test_every_default_hint_is_well_formed() -> None:
    for name, hint in HINTS.items():
        assert parse_slots(hint) is not None and name in SLOTS
    assert SLOTS.keys() == set(get_args(Detect))
    assert str(Rule(detect="no_call")) == '{ detect = "no_call" }'


def test_hints_are_put_somewhere() -> None:
    assert HintsConfig() == HintsConfig(
        position="before_turn", role=None, min_shift=None, cumulative=False
    )
    assert HintsConfig(role="system").role == "system"
    for place in ("last_message", "system"):
        with pytest.raises(ValidationError, match="remove role"):
            HintsConfig.model_validate({"position": place, "role": "user"})


def test_members_keep_their_own_limits() -> None:
    several = parsed({"kind": "combined", "readers": [{"kind": "rules", "max_hints": 1},
                      {"kind": "human", "path": "x"}]})  # fmt: skip
    assert isinstance(several, CombinedReaderConfig)
    assert [item.max_hints for item in several.readers] == [1, 8]
