"""Corrected drafts as JSON lines, and who can read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe
from typer.testing import CliRunner

import courtside
from courtside.cli.app import app
from courtside.errors import UserError
from courtside.report.folder.folder import RunFolder
from courtside.tasks.parsing import read_jsonl_tasks
from courtside.types import Message, Scored, Task, Trajectory, Turn, Update

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])


def turn(role: str, text: str, *, trains: bool = True, messages: Any = ()) -> Turn:
    ids = (3, 4) if text else (3,)
    mask = (role == "assistant" and trains,) * len(ids)
    return Turn(
        role=role, text=text, token_ids=ids, completion_mask=mask, messages=messages,  # type: ignore[arg-type]
    )  # fmt: skip


def trajectory(id: str, *turns: Turn, number: int = 0, **fields: Any) -> Trajectory:
    messages = (Message(role="system", content="Sum.", tools=TOOLS if number == 2 else ""),
                Message(role="user", content=f"{number}+2"))  # fmt: skip
    task = Task(id=f"t-{number}", split="train", messages=messages)
    return Trajectory(
        id=id, task=task, turns=(turn("prompt", "?"), *turns), temperature=1.0, stop="eos",
        **({"source": "student", "policy_version": 0} | fields),
    )  # fmt: skip


SAW = turn("environment", "", messages=(Message(role="user", content="No."),))
STEPS = [
    [  # a chosen pair, one with the same text twice, and one that has no text
        trajectory("a", turn("assistant", "2"), preference="better", pair="b+choose", draft="b",
                   correction="choose"),
        trajectory("b", turn("assistant", "1"), preference="worse", pair="b+choose"),
        trajectory("c", turn("assistant", "2"), preference="better", pair="d+choose", draft="d",
                   correction="choose"),
        trajectory("d", turn("assistant", "2"), preference="worse", pair="d+choose"),
        trajectory("e", turn("assistant", ""), preference="better", pair="f+choose", draft="f",
                   correction="choose"),
        trajectory("f", turn("assistant", "9"), preference="worse", pair="f+choose"),
        trajectory("g", turn("assistant", "7")),
    ],
    [  # a repair alone, and a repaired turn with its pair
        trajectory("h", turn("assistant", "4"), number=1, critique="It is 1+2."),
        trajectory("h+rewrite", turn("assistant", "3"), number=1, source="teacher",
                   policy_version=None, draft="h", correction="rewrite"),
        trajectory("i", turn("assistant", "5"), SAW, turn("assistant", "6"), number=2),
        trajectory("i+draft", turn("assistant", "5", trains=False), SAW, turn("assistant", "6"),
                   number=2, preference="worse", pair="i+rewrite", draft="i", correction="rewrite"),
        trajectory("i+rewrite", turn("assistant", "5", trains=False), SAW, turn("assistant", "4"),
                   number=2, source="teacher", policy_version=None, preference="better",
                   pair="i+rewrite", draft="i",
                   correction="rewrite"),
    ],
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path) -> Path:
    with RunFolder.open(tmp_path / "run", small_recipe(tiny_folder, tiny_folder)) as folder:
        for step, batch in enumerate(STEPS):
            update = Update(
                step=step, loss=0.0, components={}, metrics={}, num_tokens={}, student_logp={}
            )
            scored = [Scored(trajectory=t, target=None) for t in batch]
            folder.record(step, scored, update, seconds={}, store_trajectories=True)
    return tmp_path / "run"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replies(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text} for text in texts]


def test_pairs(run: Path, tmp_path: Path) -> None:
    done = courtside.export_corrections(run, tmp_path / "pairs.jsonl")
    assert (done.num_rows, done.num_skipped, done.steps) == (2, 2, (0, 1))
    first, second = read(done.path)
    assert first["prompt"] == [
        {"role": "system", "content": "Sum."}, {"role": "user", "content": "0+2"},
    ]  # fmt: skip
    assert (first["chosen"], first["rejected"]) == (replies("2"), replies("1"))
    assert first["metadata"] == {
        "step": 0, "task": "t-0", "correction": "choose", "chosen": "a", "rejected": "b",
    }  # fmt: skip
    assert [m["content"] for m in second["prompt"]] == ["Sum.", "2+2", "5", "No."]
    assert (second["chosen"], second["rejected"]) == (replies("4"), replies("6"))
    assert second["tools"] == json.loads(TOOLS)


def test_completions(run: Path, tmp_path: Path) -> None:
    done = courtside.export_corrections(run, tmp_path / "sft.jsonl", format="completions")
    rows = read(done.path)
    assert [row["completion"] for row in rows] == [replies(text) for text in ("2", "2", "3", "4")]
    assert [row["metadata"]["draft"] for row in rows] == ["b", "d", "h", "i"]
    assert [row["metadata"]["critique"] for row in rows] == [None, None, "It is 1+2.", None]
    assert done.num_skipped == 1


@pytest.mark.parametrize("format", ["pairs", "completions"])
def test_our_tasks_and_datasets_read_them(format: Any, run: Path, tmp_path: Path) -> None:
    done = courtside.export_corrections(run, tmp_path / "out.jsonl", format=format)
    tasks = read_jsonl_tasks(done.path)
    assert {(t.completion, t.rejected) for t in tasks} == {
        "pairs": {("2", "1"), ("4", "6")},
        "completions": {("2", None), ("3", None), ("4", None)},
    }[format]
    datasets = pytest.importorskip("datasets")
    table = datasets.load_dataset(
        "json", data_files=str(done.path), split="train", cache_dir=str(tmp_path / "cache")
    )
    names = {"pairs": {"chosen", "rejected"}, "completions": {"completion"}}[format]
    assert {"prompt", "metadata", "tools", *names} == {*table.column_names}
    for name in names:
        assert table[0][name][0]["role"] == "assistant"


def test_what_cannot_be_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(UserError, match="exists already"):
        courtside.export_corrections(run, tmp_path / "there.jsonl")
    with pytest.raises(UserError, match="format = 'dpo'"):
        courtside.export_corrections(run, tmp_path / "x.jsonl", format="dpo")  # type: ignore[arg-type]
    for path in (run / "trajectories").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"0 stored steps hold no preference pairs.*pair = true in"):
        courtside.export_corrections(run, tmp_path / "x.jsonl")
    with pytest.raises(UserError, match=r"hold no corrections.*'rewrite', or \[takeover\] in the"):
        courtside.export_corrections(run, tmp_path / "x.jsonl", format="completions")


def test_the_command(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["export-corrections", str(run), str(out)])
    assert result.exit_code == 0, result.output
    assert "2 rows of 2 stored steps" in result.output and "Left out: 2" in result.output
    result = CliRunner().invoke(app, ["export-corrections", str(run), str(out)])
    assert result.exit_code == 2 and "exists already" in result.output


def test_an_episode_that_is_preferred_is_a_conversation() -> None:
    from courtside.artifacts.corrections import split_conversation

    episode = trajectory("a", turn("assistant", "5"), SAW, turn("assistant", "4"), SAW)
    prompt, completion = split_conversation(replace(episode, preference="better"))
    assert [m.content for m in prompt] == ["Sum.", "0+2"]
    assert [(m.role, m.content) for m in completion] == [
        ("assistant", "5"), ("user", "No."), ("assistant", "4"),
    ]  # fmt: skip
