"""Mistakes in tasks, hints and sizes are told before any weights are read, with exit code 2."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, small_tree, write_jsonl
from typer.testing import CliRunner

from courtside.api import train
from courtside.assemble.inputs import Inputs, load_inputs
from courtside.cli.app import app
from courtside.errors import ModelError, RecipeError, TaskError, UserError
from courtside.recipe import Recipe
from courtside.recipe.load import load_recipe, parse_recipe, parse_tasks_section
from courtside.report.folder import toml

TALK = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": "I do not know."},
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": "No."},
]
GOOD = {"trajectory": "rome", "turn": 3, "text": "Use the tool."}


@pytest.fixture(scope="module")
def bare_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its weights: whatever reads them fails."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def check_inputs(recipe: Recipe) -> Inputs:
    return load_inputs(recipe, trains=True)


def hint_recipe(folder: Path, tmp_path: Path, *hints: Any, **changes: Any) -> Recipe:
    """Conversations with the hints of a person."""
    talks = write_jsonl(tmp_path / "talks.jsonl", [{"id": "rome", "messages": TALK}])
    lines = [hint if isinstance(hint, str) else json.dumps(hint) for hint in hints]
    (tmp_path / "hints.jsonl").write_text("".join(f"{line}\n" for line in lines))
    settings: dict[str, Any] = {
        "tasks": {"kind": "conversations", "path": str(talks)},
        "rollout": {"student_fraction": 0.0},
        "reader": {"kind": "human", "path": str(tmp_path / "hints.jsonl")},
        "teacher": {"kind": "self", "weights": "live"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}],
    }
    return small_recipe(folder, **(settings | changes))


# ── hints of a person ────────────────────────────────────────────────────────────────────────────

USELESS = {
    "no hint": ([], r"hints.jsonl': the file holds no hint. Write one"),
    "an unknown conversation": (
        [GOOD | {"trajectory": "roma"}],
        r"'roma': none of the 1 conversations or trajectories has this id; did you mean 'rome'",
    ),
    "turn 99": ([GOOD | {"turn": 99}], r"turn 99 of 'rome': that is no turn .* \[1, 3\]"),
    "a user's turn": ([GOOD | {"turn": 2}], r"that is no turn of the assistant"),
    "a megabyte": ([GOOD | {"text": "x" * 2**20}], r"1,048,576 characters, and reader.max_ch"),
}  # fmt: skip


@pytest.mark.parametrize(("hints", "reason"), USELESS.values(), ids=USELESS)
def test_a_file_without_a_useful_hint_is_refused(
    bare_folder: Path, tmp_path: Path, hints: list[Any], reason: str
) -> None:
    recipe = hint_recipe(bare_folder, tmp_path, *hints)
    with pytest.raises(RecipeError, match=rf"no hint could ever train.*\n.*{reason}"):
        train(recipe, tmp_path / "run")


@pytest.mark.parametrize(("hints", "reason"), list(USELESS.values())[1:], ids=list(USELESS)[1:])
def test_next_to_a_good_one_useless_hints_are_noted(
    bare_folder: Path, tmp_path: Path, hints: list[Any], reason: str
) -> None:
    inputs = check_inputs(hint_recipe(bare_folder, tmp_path, GOOD, *hints))
    (note,) = inputs.notes
    with pytest.raises(RecipeError, match=reason):
        raise RecipeError(note)


def test_a_last_line_that_is_cut_off_is_told(bare_folder: Path, tmp_path: Path) -> None:
    """It may be one that is being written, and as well a typing error."""
    recipe = hint_recipe(bare_folder, tmp_path, GOOD)
    with (tmp_path / "hints.jsonl").open("a") as file:
        file.write(json.dumps(GOOD | {"turn": 3})[:-1])
    (note,) = check_inputs(recipe).notes
    assert "hints.jsonl: the last line is no JSON and has no line break" in note


def test_a_hint_longer_than_the_context_is_told(bare_folder: Path, tmp_path: Path) -> None:
    reader = {"kind": "human", "path": str(tmp_path / "hints.jsonl"), "max_chars": 10**6}
    recipe = hint_recipe(bare_folder, tmp_path, GOOD | {"text": "x" * 600}, reader=reader)
    with pytest.raises(RecipeError, match="it has 600 tokens, and the model's context 512"):
        check_inputs(recipe)


@pytest.mark.parametrize("position", ["before_turn", "last_message", "system"])
def test_a_hint_that_overflows_with_its_conversation_is_told(
    bare_folder: Path, tmp_path: Path, position: str
) -> None:
    """Short enough alone, and for an earlier turn."""
    reader = {"kind": "human", "path": str(tmp_path / "hints.jsonl"), "max_chars": 10**6}
    hints = [GOOD | {"turn": 1}, GOOD | {"text": "x" * 432}]
    where = {"position": position}
    recipe = hint_recipe(bare_folder, tmp_path, *hints, reader=reader, hints=where)
    (note,) = check_inputs(recipe).notes
    assert "hint for turn 3 of 'rome': with it, the conversation has 5" in note
    assert "tokens up to the end of that turn, and the model's context 512; shorten it" in note
    with pytest.raises(RecipeError, match=r"no hint could ever train[^$]*with it, the conversatio"):
        check_inputs(hint_recipe(bare_folder, tmp_path, hints[1], reader=reader))
    fits = GOOD | {"turn": 1, "text": "x" * 432}
    assert not check_inputs(hint_recipe(bare_folder, tmp_path, fits, reader=reader)).notes


def test_hints_for_stored_trajectories_are_inserted_before_the_weights(
    tiny_folder: Path, bare_folder: Path, tmp_path: Path
) -> None:
    first = small_recipe(tiny_folder, tiny_folder, train={"steps": 1, "prompts_per_step": 2})
    train(first, tmp_path / "first")
    reader = {"kind": "human", "path": str(tmp_path / "hints.jsonl"), "max_chars": 10**6}
    hints = [
        {"trajectory": f"000000-00{n}-0", "turn": 1, "text": text}
        for n, text in enumerate(["Short.", "x" * 450])
    ]
    tasks = {"kind": "trajectories", "path": str(tmp_path / "first")}
    recipe = hint_recipe(bare_folder, tmp_path, *hints, tasks=tasks, reader=reader)
    (note,) = check_inputs(recipe).notes
    assert "hint for turn 1 of '000000-001-0': with it, the conversation has" in note


def test_a_conversation_that_cannot_be_rendered_is_told_before_the_weights(
    bare_folder: Path, tmp_path: Path
) -> None:
    """Also one of a late step; the longest can be left out."""
    recipe = hint_recipe(bare_folder, tmp_path, GOOD)
    long = [*TALK, {"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "Oh."}]
    talks = [{"id": "rome", "messages": TALK}, {"id": "long", "messages": long}]
    file = write_jsonl(tmp_path / "talks.jsonl", talks)
    with pytest.raises(TaskError, match=r"Weather in Rome\?'… \(task long\) has 7\d\d tok"):
        check_inputs(recipe)
    tasks = {"kind": "conversations", "path": str(file), "overlong_prompts": "drop"}
    inputs = check_inputs(recipe.model_copy(update={"tasks": parse_tasks_section(tasks, [])}))
    assert inputs.tasks.num_dropped == 1
    odd = [*TALK[:1], {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": "[1]"}}]}]  # fmt: skip
    write_jsonl(file, [talks[0], {"id": "odd", "messages": odd}])
    with pytest.raises(TaskError, match="a call of 'f' has arguments that are no JSON object"):
        check_inputs(recipe)


def test_many_useless_hints_are_counted(bare_folder: Path, tmp_path: Path) -> None:
    hints = [GOOD | {"turn": 10 + n} for n in range(9)]
    notes = check_inputs(hint_recipe(bare_folder, tmp_path, GOOD, *hints)).notes
    assert len(notes) == 6 and notes[-1].endswith("and 4 more hints that cannot train")


def test_a_loss_without_hints_may_train_alone(bare_folder: Path, tmp_path: Path) -> None:
    losses = [
        {"kind": "divergence", "on": "hinted_turns"},
        {"kind": "cross_entropy", "on": "dataset"},
    ]
    inputs = check_inputs(hint_recipe(bare_folder, tmp_path, losses=losses))
    assert any("the file holds no hint" in note for note in inputs.notes)


def test_hints_for_sampled_trajectories_have_their_ids(bare_folder: Path, tmp_path: Path) -> None:
    def recipe(id: str) -> Recipe:
        return hint_recipe(
            bare_folder,
            tmp_path,
            GOOD | {"trajectory": id, "turn": 1},
            tasks={"kind": "instructions"},
            rollout={"samples_per_prompt": 2, "max_new_tokens": 6},
        )

    assert not check_inputs(recipe("000004-001-1")).notes
    for id in ("000005-000-0", "000000-002-0", "000000-000-2", "rome"):
        with pytest.raises(RecipeError, match="up to 000004-001-1, and none gets this id"):
            check_inputs(recipe(id))


def test_a_pipe_of_hints_is_refused(bare_folder: Path, tmp_path: Path) -> None:
    recipe = hint_recipe(bare_folder, tmp_path, GOOD)
    (tmp_path / "hints.jsonl").unlink()
    os.mkfifo(tmp_path / "hints.jsonl")
    with pytest.raises(UserError, match="it is a pipe, not a regular file"):
        check_inputs(recipe)


def test_an_evaluation_needs_no_hints(bare_folder: Path, tmp_path: Path) -> None:
    assert not load_inputs(hint_recipe(bare_folder, tmp_path)).notes


def test_a_suite_that_cannot_work_is_told_before_the_weights(
    bare_folder: Path, tmp_path: Path
) -> None:
    rows = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": "Hi.", "split": "train"}])
    recipe = small_recipe(
        bare_folder,
        bare_folder,
        tasks={"kind": "jsonl", "path": str(rows)},
        evaluate={"num_tasks": 1, "suites": {"other": {"path": str(tmp_path / "none.jsonl")}}},
    )
    with pytest.raises(TaskError, match=r"evaluate.suites.other: .*none.jsonl': no such file"):
        check_inputs(recipe)


# ── rules ────────────────────────────────────────────────────────────────────────────────────────


def rule_recipe(folder: Path, *rules: dict[str, Any], **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "tasks": {"kind": "toolbox", "turns": 1, "num_tools": 1},
        "rollout": {"samples_per_prompt": 1, "max_new_tokens": 6},
        "reader": {"kind": "rules", "rules": list(rules)},
        "teacher": {"kind": "self", "weights": "live"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}],
    }
    return small_recipe(folder, **(settings | changes))


@pytest.fixture(scope="module")
def roomy_bare(bare_folder: Path) -> Path:
    folder = bare_folder.parent / "roomy"
    shutil.copytree(bare_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


TYPO = {"detect": "tool_not_found", "hint": "Use {gooood}."}
NEVER = {"detect": "event", "event": "tool_not_fond", "hint": "Look."}
FINE = {"detect": "no_call", "hint": "Use {tools}."}


def test_a_rule_that_can_give_no_hint_is_refused(roomy_bare: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"rules\[0\] \(tool_not_found\): nothing fills {gooood}"):
        train(rule_recipe(roomy_bare, TYPO), tmp_path / "run")
    with pytest.raises(RecipeError, match=r"no event is of kind 'tool_not_fond'.*'tool_not_found'"):
        train(rule_recipe(roomy_bare, NEVER), tmp_path / "run")
    (note,) = check_inputs(rule_recipe(roomy_bare, FINE, TYPO)).notes
    assert note.startswith("reader.rules[1] (tool_not_found): nothing fills {gooood}; it has {arg")
    details = {"detect": "wrong_tool", "hint": "Use {correct}."}
    event = {"detect": "event", "event": details["detect"], "hint": details["hint"]}
    assert not check_inputs(rule_recipe(roomy_bare, FINE, event)).notes
    assert not check_inputs(rule_recipe(roomy_bare, reader={"kind": "rules"})).notes


PENALTY: dict[str, Any] = {
    "losses": [{"kind": "policy_gradient", "advantage": "reward", "turn_penalty": 1.0,
                "penalized_events": ["date", "dsk"]}],
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
}  # fmt: skip


def test_a_penalty_on_events_that_never_occur_is_refused(roomy_bare: Path) -> None:
    for kind, unknown in (
        ("switchboard", "'dsk'; they are confirm, "),
        ("toolbox", "'date'; they"),
    ):
        recipe = small_recipe(roomy_bare, **PENALTY, tasks={"kind": kind})
        with pytest.raises(RecipeError, match=rf"losses\[0\].penalized_events.*{kind}.*{unknown}"):
            load_inputs(recipe)


def test_rules_of_the_switchboard_know_its_events(roomy_bare: Path) -> None:
    tasks = {"kind": "switchboard", "turns": 8}
    good = {"detect": "event", "event": "date", "hint": "Write {date}."}
    bad = {"detect": "event", "event": "dates", "hint": "Write {date}."}
    unfilled = {"detect": "event", "event": "desk", "hint": "Use {dsk}."}
    assert not check_inputs(rule_recipe(roomy_bare, good, tasks=tasks)).notes
    first, second = check_inputs(rule_recipe(roomy_bare, good, bad, unfilled, tasks=tasks)).notes
    assert "no event is of kind 'dates'" in first and "Did you mean 'date'" in first
    assert "nothing fills {dsk}" in second and "Did you mean 'desk'" in second


def test_slots_that_an_event_may_fill_are_noted(
    roomy_bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quiet_maze.py").write_text(
        "from courtside.hashing import task_id\n"
        "from courtside.types import Message, Task\n"
        "class Maze:\n"
        "    size = 20\n"
        "    def task(self, index):\n"
        "        messages = (Message(role='user', content=f'Go {index}'),)\n"
        "        return Task(id=task_id('maze', str(index)), split='train', messages=messages)\n"
        "    def start(self, task): ...\n"
    )
    tasks = {"kind": "environment", "path": "quiet_maze:Maze"}
    rules = ({"detect": "event", "event": "wall", "hint": "Go {way}."},)
    (note,) = check_inputs(rule_recipe(roomy_bare, *rules, tasks=tasks)).notes
    assert "{way} is no privileged field of the tasks (they have none)" in note


def test_events_of_recorded_conversations_never_occur(bare_folder: Path, tmp_path: Path) -> None:
    reader = {"kind": "rules", "rules": [NEVER | {"event": "wall"}]}
    recipe = hint_recipe(bare_folder, tmp_path, reader=reader)
    with pytest.raises(RecipeError, match="no event is of kind 'wall'; there are none here"):
        check_inputs(recipe)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────

HUGE = {
    "samples": ({"rollout": {"samples_per_prompt": 10**9}},
                r"rollout.samples_per_prompt = 2 × 1,000,000,000.*tokens, .*hours"),
    "prompts": ({"train": {"steps": 1, "prompts_per_step": 10**9}}, r"trajectories a step: about"),
    "evaluation": ({"evaluate": {"num_tasks": 10**9}}, r"evaluate.num_tasks × .*an evaluation"),
    "limit": ({"tasks": {"kind": "arithmetic", "limit": 10**9}}, r"tasks.limit = 1,000,000,000"),
    "seed": ({"seed": 2**70}, r"seed: must be less than 9223372036854775808"),
    "cold": ({"rollout": {"temperature": 1e-30}}, r"rollout.temperature: .* 0.001"),
    "cold evaluation": ({"evaluate": {"temperature": 1e-30}}, r"0.001 or more: smaller ones"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), HUGE.values(), ids=HUGE)
def test_what_no_machine_holds_is_refused_with_an_estimate(
    bare_folder: Path, changes: Any, reason: str
) -> None:
    with pytest.raises(RecipeError, match=reason):
        parse_recipe(small_tree(bare_folder, bare_folder, **changes))


def test_what_does_not_fit_the_model_is_refused(bare_folder: Path, tmp_path: Path) -> None:
    for changes, reason in (
        ({"student": {"model": str(bare_folder), "lora": {"rank": 100_000}}},
         r"student.lora.rank = 100,000: the layers of .* are 32 wide.*at most 32"),
        ({"rollout": {"max_new_tokens": 100_000}},
         r"rollout.max_new_tokens = 100,000: the context of .* is 512 tokens.*such as 256"),
        ({"evaluate": {"max_new_tokens": 512}}, r"evaluate.max_new_tokens = 512: the context"),
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=reason):
            train(small_recipe(bare_folder, bare_folder, **changes), tmp_path / "run")


# ── order ────────────────────────────────────────────────────────────────────────────────────────


def test_tasks_and_contexts_are_checked_before_weights_are_read(
    bare_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a", "prompt": "b"}\n')
    tasks = {"kind": "jsonl", "path": str(file)}
    with pytest.raises(TaskError, match="is there twice"):
        train(small_recipe(bare_folder, bare_folder, tasks=tasks), tmp_path / "run")
    context = {"kind": "field", "field": "nope"}
    teacher = {"kind": "self", "weights": "frozen", "context": context}
    with pytest.raises(TaskError, match="no such privileged field"):
        train(small_recipe(bare_folder, teacher=teacher), tmp_path / "run")
    with pytest.raises(ModelError, match="cannot be loaded"):
        train(small_recipe(bare_folder, bare_folder), tmp_path / "run")


def test_the_run_folder_is_checked_first(
    bare_folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    train(small_recipe(tiny_folder, tiny_folder, train={"steps": 1}), tmp_path / "run")
    other = small_recipe(bare_folder, bare_folder, train={"steps": 1})
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        train(other, tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, or lies below one"):
        train(other, tmp_path / "file" / "run")


def test_a_recipe_with_a_byte_order_mark_and_windows_lines(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    text = toml.dumps(small_tree(tiny_folder, tiny_folder)).replace("\n", "\r\n")
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_recipe(file) == small_recipe(tiny_folder, tiny_folder)


def test_the_command_ends_with_2(bare_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(toml.dumps(small_tree(bare_folder, bare_folder)))
    for change in ("rollout.samples_per_prompt=1000000000", "rollout.max_new_tokens=99999"):
        result = CliRunner().invoke(app, ["train", str(file), change, "--run", str(tmp_path / "r")])
        assert result.exit_code == 2 and change.split("=")[0] in result.output
