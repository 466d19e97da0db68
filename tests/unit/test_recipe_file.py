"""Recipes from files, and the words that change them on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from courtside.errors import RecipeError
from courtside.recipe import Recipe
from courtside.recipe.load import load_recipe, parse_recipe

TEXT = """
[student]
model = "smollm2-135m"
lora = { rank = 8 }
[tasks]
kind = "arithmetic"
[teacher]
kind = "self"
context = { kind = "field", field = "solution" }
[[losses]]
kind = "divergence"
[[losses]]
kind = "policy_gradient"
clip = [0.2, 0.3]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def value(recipe: Recipe, path: str) -> Any:
    node: Any = recipe
    for name in path.split("."):
        node = node[int(name)] if name.isdecimal() else getattr(node, name)
    return node


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("train.steps=7", "train.steps", 7),
        ("train.learning_rate=3e-4", "train.learning_rate", 3e-4),
        ("student.gradient_checkpointing=true", "student.gradient_checkpointing", True),
        ("student.model=org/some-model", "student.model", "org/some-model"),
        ('student.model="quoted = too"', "student.model", "quoted = too"),
        ("tasks.system_prompt=Be brief, please.", "tasks.system_prompt", "Be brief, please."),
        ("tasks.system_prompt=a=b", "tasks.system_prompt", "a=b"),
        ("tasks.system_prompt=1\nlimit = 3", "tasks.system_prompt", "1\nlimit = 3"),
        ('tasks.system_prompt="null"', "tasks.system_prompt", "null"),
        ("rollout.stop=['a', 'b']", "rollout.stop", ("a", "b")),
        ("rollout.student_fraction={ start = 1, end = 1, steps = 3 }",
         "rollout.student_fraction.steps", 3),
        ("student.lora.rank=16", "student.lora.rank", 16),
        ("student.lora={ rank = 4 }", "student.lora.rank", 4),
        ("losses.0.weight=2", "losses.0.weight", 2.0),
        ("losses.0.support={ kind = 'top_k', k = 5 }", "losses.0.support.k", 5),
        ("losses.1.clip.1=0.5", "losses.1.clip", (0.2, 0.5)),
        (" seed =3", "seed", 3),
        # null gives the default back
        ("student.lora=null", "student.lora", None),
        ("teacher.context=null", "teacher.context", None),
        ("losses.1.clip=null", "losses.1.clip", None),
        ("losses.0=null", "losses.0.kind", "policy_gradient"),
    ],
)  # fmt: skip
def test_an_override_changes_one_value(file: Path, override: str, path: str, expected: Any) -> None:
    assert value(load_recipe(file, [override]), path) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("losses.1.clip.2=0.5", "losses.1.clip has 2 entries, counted from 0"),
        ("losses.2.weight=1", "losses has 2 entries, counted from 0; there is no losses.2"),
        ("losses.weight=1", "losses is a list; name an entry by its index, as in losses.0"),
        ("losses.-1.weight=1", "losses is a list; name an entry by its index"),
        ("student.model.x=1", "student.model is a value, not a section"),
        ("train.steps", "write it as section.key=value"),
        ("tasks.system_prompt=", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("train..steps=3", "write it as section.key=value"),
        ("train.steps=null", "the recipe has no train to remove"),
        ("student.lroa=null", "student of the recipe has no lroa to remove"),
    ],
)
def test_an_override_that_is_not_understood_is_refused(
    file: Path, override: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, [override])
    assert str(caught.value).startswith(f"override {override!r}: {message}")


def test_later_overrides_win_and_meet_the_same_checks_as_the_file(file: Path) -> None:
    assert load_recipe(file, ["train.steps=7", "train.steps=8"]).train.steps == 8
    with pytest.raises(RecipeError, match=r"mine\.toml:\n  train\.step: unknown key; did you mean"):
        load_recipe(file, ["train.step=7"])


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.toml: no such file\. `courtside recipes`"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match=r"is a folder, and has no recipe\.toml"):
        load_recipe(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[student\n")
    with pytest.raises(RecipeError, match=r"broken\.toml: not valid TOML: .*line 1"):
        load_recipe(broken)
    for content in (b"\xff\xfe", b"a = " + b"[" * 5000, b"seed = " + b"9" * 5000):
        broken.write_bytes(content)
        with pytest.raises(RecipeError, match=r"broken\.toml: not valid TOML"):
            load_recipe(broken)


def test_trees_from_python_that_are_no_json() -> None:
    endless: dict[str, Any] = {}
    endless["tasks"] = endless
    for tree in (endless, {("a", "b"): 1}, {"seed": 10**5000}):
        with pytest.raises(RecipeError, match="recipe: cannot be written as JSON"):
            parse_recipe(tree)  # type: ignore[arg-type]


def test_an_unknown_key_of_megabytes_is_cut() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"k" * 10**6: 1})
    assert len(str(caught.value)) < 1000
