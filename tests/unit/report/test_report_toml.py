"""What is written as TOML reads back as the same tree, and a recipe as the same recipe."""

import math
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from courtside.recipe import Recipe
from courtside.report.folder.toml import dumps

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.sampled_from(["\x7f", 'quote " \\ end', "two\nlines\r\n", "\u2028", "é 漢 🎾", ""])
)
TREE = st.dictionaries(
    TEXT,
    st.recursive(
        PLAIN,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(TREE)
def test_trees_round_trip(tree):
    assert tomllib.loads(dumps(tree)) == tree


def test_nones_are_left_out_and_nan_stays():
    tree = tomllib.loads(dumps({"a": None, "b": {"c": None, "d": math.nan}, "e": [{"f": None}]}))
    assert "a" not in tree and tree["e"] == [{}]
    assert math.isnan(tree["b"]["d"]) and "c" not in tree["b"]


def test_what_has_no_place_in_toml_is_refused():
    with pytest.raises(TypeError, match="has no place in TOML"):
        dumps({"a": [1, None]})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"student": {"model": "m", "keep_layers": [0, 2], "lora": {"target_modules": ["q", "v"]}}},
        {
            "rollout": {
                "student_fraction": {"start": 1.0, "end": 0.5, "steps": 3},
                "stop": ["\n\n", '"'],
            },
            "losses": [{"kind": "divergence"}],
        },
        {"tasks": {"kind": "jsonl", "path": "folder/with space/tasks.jsonl"}},
        {
            "tasks": {
                "kind": "datasets",
                "path": "d",
                "columns": {"prompt": "q", "privileged.rule": "r"},
            }
        },
        {
            "teacher": {
                "kind": "routes",
                "default": "a b",
                "routes": {
                    "a b": {"kind": "self", "weights": "frozen"},
                    "code": {"kind": "model", "model": "x/y", "adapter": "z"},
                },
            }
        },
        {
            "losses": [
                {"kind": "divergence", "entropy_aware": {"threshold": 1.0}},
                {"kind": "policy_gradient", "clip": [0.2, 0.3], "name": "rl"},
            ]
        },
    ],
)
def test_recipes_round_trip(recipe, changes):
    parsed = recipe(**changes)
    text = dumps(parsed.model_dump(mode="json", exclude_none=True))
    assert Recipe.model_validate(tomllib.loads(text)) == parsed
