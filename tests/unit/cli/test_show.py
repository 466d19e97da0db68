"""`courtside show`: rendered prompts, contexts and hinted turns, without a model's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe, small_tree, write_jsonl
from support.tiny_model import tiny_tokenizer
from typer.testing import CliRunner

from courtside.api import show, train
from courtside.assemble import assemble
from courtside.assemble.preview import PreviewSequence
from courtside.cli.app import app
from courtside.errors import TaskError
from courtside.report.folder import toml

TOKENIZER = tiny_tokenizer()
LIVE = {"kind": "self", "weights": "live"}
HINTED = [{"kind": "divergence", "on": "hinted_turns"}]


@pytest.fixture(scope="module")
def bare_folder(roomy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its weights."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(roomy_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def text_of(sequence: PreviewSequence, *uses: str) -> str:
    ids = [token.id for token in sequence.tokens if not uses or token.use in uses]
    return str(TOKENIZER.decode(ids))


def test_a_prompt_and_the_context_of_the_teacher(bare_folder: Path, tmp_path: Path) -> None:
    line = {"prompt": "2+2?", "privileged": {"way": "Count."}, "split": "train"}
    tasks = {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", [line]))}
    context = {"kind": "field", "field": "way"}
    teacher = LIVE | {"context": context}
    student, taught = show(small_recipe(bare_folder, tasks=tasks, teacher=teacher)).sequences
    prompt = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(student) == prompt and not text_of(student, "trains", "added")
    assert text_of(taught, "context") == prompt and "Count." in text_of(taught, "added")


def test_what_a_server_is_told_that_takes_over(bare_folder: Path) -> None:
    recipe = small_recipe(
        bare_folder,
        tasks={"kind": "arithmetic"},
        takeover={
            "at": 0,
            "endpoint": {"base_url": "http://localhost:8000/v1", "model": "big"},
            "context": {"kind": "field", "field": "solution"},
        },
        losses=[{"kind": "cross_entropy", "on": "teacher"}],
    )
    student, endpoint = show(recipe).sequences
    assert endpoint.title == "take-over by big: prompt" and "localhost" in endpoint.about
    assert text_of(endpoint, "context") == text_of(student)
    assert "Answer" in text_of(endpoint, "added")


@pytest.mark.parametrize("kind", ["feedback", "sibling"])
def test_a_context_that_follows_from_answers_has_a_stand_in(bare_folder: Path, kind: str) -> None:
    teacher = LIVE | {"context": {"kind": kind}}
    tasks = {"kind": "arithmetic"}
    _, taught = show(small_recipe(bare_folder, tasks=tasks, teacher=teacher)).sequences
    assert f"stands for the {kind}" in taught.about and "…" in text_of(taught, "added")


def test_answers_from_data_train(bare_folder: Path, tmp_path: Path) -> None:
    line = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "split": "train"}
    recipe = small_recipe(
        bare_folder,
        tasks={"kind": "jsonl", "path": str(write_jsonl(tmp_path / "tasks.jsonl", [line]))},
        rollout={"student_fraction": 0.0},
        losses=[{"kind": "preference"}],
    )
    better, worse = show(recipe).sequences
    assert text_of(better, "trains") == "4<|im_end|>" and text_of(worse, "trains") == "5<|im_end|>"
    assert "prompt and completion" in better.title and "prompt and rejected" in worse.title


def hint_recipe(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "tasks": {"kind": "toolbox", "turns": 2, "num_tools": 2},
        "rollout": {"samples_per_prompt": 1, "max_new_tokens": 8},
        "reader": {"kind": "rules", "rules": [{"detect": "tool_not_found"}]},
        "teacher": LIVE,
        "losses": HINTED,
    }
    return small_recipe(folder, **(settings | changes))


@pytest.mark.parametrize("position", ["before_turn", "last_message", "system"])
def test_a_hinted_turn_of_an_environment(bare_folder: Path, position: str) -> None:
    preview = show(hint_recipe(bare_folder, hints={"position": position}))
    student, hinted = preview.sequences
    assert "hint of rules:tool_not_found" in hinted.about and not preview.notes
    assert "no_such_tool" in text_of(hinted, "trains")
    assert "Reminder: the tools here are" in text_of(hinted, "added")
    assert text_of(hinted, "context") == text_of(student)
    if position == "before_turn":
        added = text_of(hinted, "added")
        assert added.startswith("<|im_start|>user\nReminder") and added.endswith("<|im_end|>\n")


def test_an_environment_that_raises_is_named(
    bare_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shown_maze.py").write_text(
        "from courtside.hashing import task_id\n"
        "from courtside.types import Message, Task\n"
        "class Maze:\n"
        "    size = 20\n"
        "    def task(self, index):\n"
        "        messages = (Message(role='user', content=f'Go {index}'),)\n"
        "        return Task(id=task_id('maze', str(index)), split='train', messages=messages)\n"
        "    def start(self, task): return self\n"
        "    def step(self, reply): return {}['way']\n"
        "    def grade(self): return None\n"
    )
    tasks = {"kind": "environment", "path": "shown_maze:Maze"}
    with pytest.raises(TaskError, match=r"(?s)step.*KeyError.*reply 'I am not.*check-env"):
        show(hint_recipe(bare_folder, tasks=tasks, reader={"kind": "rules"}))


def test_a_reader_that_is_not_asked_has_an_example(bare_folder: Path) -> None:
    rules = [{"detect": "pattern", "pattern": "zebra", "hint": "No {match}."}]
    _, hinted = show(hint_recipe(bare_folder, reader={"kind": "rules", "rules": rules})).sequences
    assert "and so is the hint" in hinted.about and "No {match}." in text_of(hinted, "added")
    _, hinted = show(hint_recipe(bare_folder, reader={"kind": "model"})).sequences
    assert "Reminder: …" in text_of(hinted, "added")


def test_the_hinted_turn_is_what_the_run_scores(roomy_folder: Path, tmp_path: Path) -> None:
    """A conversation with a person's hint: the same ids as the teacher's branch."""
    talks = [
        {"id": city, "messages": [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "Sunny."},
        ]}
        for city in ("Rome", "Oslo", "Lima")
    ]  # fmt: skip
    hints = [{"trajectory": "Oslo", "turn": 3, "text": "Use the tool."}]
    recipe = hint_recipe(
        roomy_folder,
        tasks={"kind": "conversations", "path": str(write_jsonl(tmp_path / "talks.jsonl", talks))},
        rollout={"student_fraction": 0.0},
        reader={"kind": "human", "path": str(write_jsonl(tmp_path / "hints.jsonl", hints))},
        train={"steps": 1, "prompts_per_step": 3},
    )
    student, hinted = show(recipe).sequences
    assert "Oslo" in text_of(student) and not text_of(student, "trains")
    assert text_of(hinted, "trains") == "Sunny.<|im_end|>"
    parts = assemble(recipe)
    trajectories = parts.rollout(parts.tasks.batch(0, 3), 0)
    scored = parts.teacher(trajectories, parts.reader(trajectories).hints)
    (deferred,) = [s for s in scored if s.deferred]
    assert deferred.deferred is not None
    (branch,) = deferred.deferred.branches
    ids = deferred.trajectory.token_ids[: branch.splice] + branch.token_ids
    assert tuple(token.id for token in hinted.tokens) == ids
    mask = (*[False] * branch.splice, *branch.scored)
    assert tuple(token.use == "trains" for token in hinted.tokens) == mask
    run = train(recipe, tmp_path / "run")
    stored = {
        "tasks": {"kind": "trajectories", "path": str(run.path)},
        "rollout": {"student_fraction": 0.0},
        "reader": {"kind": "human", "path": str(tmp_path / "hints.jsonl")},
    }
    replayed = show(hint_recipe(roomy_folder, **stored)).sequences[1]
    assert replayed.tokens == hinted.tokens


def test_the_command_prints_boundaries_and_marks(bare_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    tree = small_tree(
        bare_folder,
        tasks={"kind": "toolbox", "turns": 2, "num_tools": 2},
        rollout={"samples_per_prompt": 1, "max_new_tokens": 8},
        reader={"kind": "rules", "rules": [{"detect": "tool_not_found"}]},
        teacher=LIVE,
        losses=HINTED,
    )
    file.write_text(toml.dumps(tree))
    result = CliRunner().invoke(app, ["show", str(file), "rollout.max_new_tokens=9"])
    assert result.exit_code == 0, result.output
    assert "turns of up to 9 tokens" in result.output and "more tokens (--all" in result.output
    assert "⟦" in result.output and "│↵│" in result.output
    whole = CliRunner().invoke(app, ["show", str(file), "--all"])
    assert "«<|im_start|>│u│s│e│r│↵│R│e│m" in whole.output and "more tokens" not in whole.output
    printed = json.loads(CliRunner().invoke(app, ["show", str(file), "--json"]).output)
    assert printed["sequences"][0]["title"] == "student: prompt"
    assert {t["use"] for s in printed["sequences"] for t in s["tokens"]} == {
        "context", "added", "trains",
    }  # fmt: skip
    bad = CliRunner().invoke(app, ["show", str(file), "tasks.turns=0"])
    assert bad.exit_code == 2
