"""Pipelines from TOML: merging, repetition, references, and what is refused at once."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from courtside.errors import RecipeError
from courtside.pipeline.overlap import describe_overlap
from courtside.recipe.load import load_recipe, parse_recipe
from courtside.recipe.pipeline import is_pipeline, load_pipeline, parse_pipeline
from courtside.recipe.pipeline_sections import (
    GateConfig,
    LoopConfig,
    PipelineConfig,
    StageConfig,
)
from courtside.recipe.recipe import Recipe
from courtside.types import Message, Task

Tree = dict[str, Any]
BASE: Tree = {
    "student": {"model": "smollm2-135m", "lora": {"rank": 4}},
    "tasks": {"kind": "arithmetic", "digits": 2},
    "losses": [{"kind": "policy_gradient", "advantage": "reward"}],
    "evaluate": {"suites": {"minus": {"kind": "arithmetic", "operation": "subtract"}}},
}


def pipeline_of(*stages: Tree, base: Tree = BASE) -> Any:
    return parse_pipeline({"base": base, "stages": list(stages)})


def changed(tree: Tree, path: str, value: Any) -> Tree:
    tree = copy.deepcopy(tree)
    *parents, last = path.split(".")
    node = tree
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return tree


def test_a_stage_is_its_changes_over_the_base() -> None:
    first, second = pipeline_of(
        {"name": "a", "train": {"steps": 7}},
        {"name": "b", "remove": ["student.lora"], "tasks": {"kind": "instructions"},
         "student": {"model": "stage:a"}, "seed": 5},
    ).stages  # fmt: skip
    assert first.recipe == parse_recipe(BASE | {"train": {"steps": 7}})
    assert second.recipe.tasks.kind == "instructions" and second.recipe.seed == 5
    assert second.recipe.student.lora is None and second.parent == "a"
    assert [s.folder_name for s in (first, second)] == ["01-a", "02-b"]
    assert second.resolve({("student", "model"): "some/where"}).student.model == "some/where"


def test_a_model_that_was_handed_over_is_not_pruned_or_adapted_twice() -> None:
    base = changed(BASE, "student", {"model": "m", "adapter": "warm", "keep_layers": [0, 2]})
    first, second = pipeline_of(
        {"name": "a"}, {"name": "b", "student": {"model": "stage:a"}}, base=base
    ).stages
    assert first.recipe.student.keep_layers == (0, 2)
    assert second.recipe.student.keep_layers is None and second.recipe.student.adapter is None


def test_a_stage_of_a_repetition_leaves_fields_out_too() -> None:
    loop = {"repeat": 2, "stages": [{"name": "learn", "remove": ["student.lora"]}]}
    stages = pipeline_of(loop).stages
    assert [stage.name for stage in stages] == ["learn-1", "learn-2"]
    assert all(stage.recipe.student.lora is None for stage in stages)


def test_a_repetition_has_numbers_and_goes_on_from_the_stage_before() -> None:
    loop = {
        "repeat": 2,
        "stages": [
            {"name": "learn", "student": {"model": "stage:previous"},
             "tasks": {"kind": "jsonl", "path": "day-{iteration}.jsonl"}},
            {"name": "recover-{iteration}", "student": {"model": "stage:learn"}},
        ],
    }  # fmt: skip
    stages = pipeline_of(loop, {"name": "end", "student": {"model": "stage:learn"}}).stages
    assert [s.name for s in stages] == ["learn-1", "recover-1", "learn-2", "recover-2", "end"]
    assert [s.parent for s in stages] == [None, "learn-1", "recover-1", "learn-2", "learn-2"]
    assert stages[0].recipe.student.model == "smollm2-135m"
    assert [str(stages[i].recipe.tasks.path) for i in (0, 2)] == ["day-1.jsonl", "day-2.jsonl"]


@pytest.mark.parametrize("is_repeated", [False, True])
def test_sections_of_a_stage_stand_in_the_stage_itself(is_repeated: bool) -> None:
    stage = {"name": "a", "changes": {"train": {"steps": 3}}}
    with pytest.raises(RecipeError, match=r"changes: unknown key; a stage has name, recipe"):
        pipeline_of({"repeat": 2, "stages": [stage]} if is_repeated else stage)


def test_prefixes_come_from_the_run_of_an_earlier_stage() -> None:
    stages = pipeline_of(
        {"name": "draft"},
        {"name": "rl", "tasks": {"kind": "prefixes", "path": "stage:draft"}},
    ).stages
    assert [(r.field, r.stage, r.kind) for r in stages[1].references] == [
        ("tasks.path", "draft", "run")
    ]


def test_students_and_teachers_have_roots() -> None:
    pipeline = pipeline_of(
        {"name": "sft"},
        {"name": "rl", "student": {"model": "other"}},
        {"name": "distil", "student": {"adapter": "stage:sft"},
         "teacher": {"kind": "model", "model": "stage:rl"}, "losses": [{"kind": "divergence"}]},
    )  # fmt: skip
    sft, rl, distil = pipeline.stages
    assert pipeline.root_of(distil) is sft and pipeline.root_of(rl) is rl
    assert {(r.field, r.stage, r.kind) for r in distil.references} == {
        ("student.adapter", "sft", "adapter"),
        ("teacher.model", "rl", "model"),
    }


def test_recipes_next_to_the_file_and_overrides_by_name(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sft.toml").write_text(
        'student = { model = "m" }\ntasks = { kind = "arithmetic" }\n'
        'losses = [{ kind = "policy_gradient", advantage = "reward" }]\n'
    )
    file = tmp_path / "pipeline.toml"
    file.write_text(
        '[[stages]]\nname = "sft"\nrecipe = "recipes/sft.toml"\n'
        '[[stages]]\nname = "more"\nrecipe = "recipes/sft.toml"\n'
        'student = { model = "stage:sft" }\n'
    )
    assert is_pipeline(file) and not is_pipeline(tmp_path / "recipes" / "sft.toml")
    pipeline = load_pipeline(file, ["stages.more.train.steps=3", "stages.0.seed=4"])
    assert pipeline.stages[1].recipe.train.steps == 3 and pipeline.stages[0].recipe.seed == 4
    with pytest.raises(RecipeError, match=r"is a pipeline \(\[\[stages\]\]\)"):
        load_recipe(file)


GATED = {"name": "a", "gate": {"suite": "minus", "max_loss": 0.1}}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages: .*at least 1"),
        ([{"train": {"steps": 1}}], r"stages\[0\].name: is required"),
        ([{"name": "a b"}], r"stages\[0\].name: use letters, digits, - and _"),
        ([{"name": "a", "trian": {}}], r"stages\[0\].trian: unknown key; a stage has name, recipe"),
        ([{"name": "a"}, {"name": "a"}], "stage 'a': the name is there twice"),
        ([{"name": "a", "train": {"step": 1}}], "train.step: unknown key; did you mean 'steps'"),
        ([{"name": "a", "remove": ["teacher"]}], r"remove = \['teacher'\]: its recipe has no"),
        ([{"name": "a", "student": {"model": "stage:b"}}, {"name": "b"}],
         "student.model = 'stage:b': no such stage before this one; there are none"),
        ([{"name": "a"}, {"name": "b", "tasks": {"kind": "jsonl", "path": "stage:a"}}],
         "tasks.path = 'stage:a': a stage can be named in student.model"),
        ([{"name": "a", "remove": ["student.lora"]},
          {"name": "b", "student": {"adapter": "stage:a"}}],
         "that stage trains all weights and has no adapter"),
        ([{"name": "a", "student": {"lora": {"base_dtype": "nf4"}}},
          {"name": "b", "student": {"adapter": "stage:a"}}],
         r"the adapter belongs to the base in 4 bits .* Name it in student\.model"),
        ([{"name": "a", "train": {"steps": 1}, "tasks": {"kind": "jsonl", "path": "{iteration}"}}],
         "is the number of a repetition, and this stage is in none"),
        ([{"repeat": 0, "stages": [{"name": "a"}]}], r"stages\[0\].repeat: must be greater than 0"),
        ([{"repeat": 1000, "stages": [{"name": "a"}]}], "1000 stages; use at most 999"),
        ([changed(GATED, "gate.suite", "none")], "gate.suite = 'none': stage 'a' has no such"),
        ([changed(GATED, "gate.max_loss", 1.5)], r"gate.max_loss: must be less than or equal to 1"),
        ([{"name": "s", "evaluate": {"num_tasks": 5}}, GATED | {"student": {"model": "stage:s"}}],
         r"evaluate.num_tasks differs between stages 's' and 'a' \(5 and 64\)"),
        ([{"name": "s", "evaluate": {"before": False}}, GATED | {"student": {"model": "stage:s"}}],
         "stage 's' has evaluate.before = false"),
        ([{"name": "s", "evaluate": {"suites": {"minus": {"kind": "arithmetic", "digits": 1}}}},
          GATED | {"student": {"model": "stage:s"}}], "evaluate.suites.minus differs"),
    ],
)  # fmt: skip
def test_refused_with_field_reason_and_fix(stages: list[Tree], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        pipeline_of(*stages)
    assert re.search(message, str(error.value)), str(error.value)


def test_base_is_a_recipe_or_its_sections() -> None:
    stages = parse_pipeline({"base": "shared-rule", "stages": [{"name": "a"}]}).stages
    assert stages[0].recipe == load_recipe("shared-rule")
    with pytest.raises(RecipeError, match=r"train: unknown key; a pipeline has base, stages"):
        parse_pipeline({"train": {"steps": 1}, "stages": [{"name": "a"}]})


def test_the_reference_has_the_keys_of_the_file() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "pipeline.md"
    rows = re.findall(r"^\| (`.*?`) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    sections = (PipelineConfig, StageConfig, LoopConfig, GateConfig)
    keys = {key for section in sections for key in section.model_fields} - {"changes"}
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == keys | Recipe.model_fields.keys()


def test_overlap_is_words_in_a_row_whatever_their_case() -> None:
    documents = ["The red door of the mill opened at ten.\nNobody came."]
    prompts = [
        Task(id=str(n), split="train", messages=(Message(role="user", content=text),))
        for n, text in enumerate(
            ["Is it so: THE red door, of the mill?", "the red door of a mill opened", "Hi"]
        )
    ]
    note = describe_overlap(documents, prompts, learned_in="learn")
    assert note.startswith("1 of its 3 prompts share 6 words in a row with the documents of learn")
    assert "'THE red door, of the mill' (task 0)" in note
    assert describe_overlap(documents, prompts[1:], learned_in="learn") == (
        "none of its 2 prompts shares 6 words in a row with the documents of learn"
    )
