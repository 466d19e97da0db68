"""Data as others write it: fine-tuning lines of chat APIs, ShareGPT, TRL's columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_runs import small_recipe, write_jsonl
from support.tiny_model import save_tiny, tiny_tokenizer
from unit.chat.templates import TOOLS_TEMPLATE

from courtside.api import rescore, train
from courtside.chat.api_messages import parse_tools
from courtside.errors import TaskError
from courtside.tasks.chat_logs import read_chat_logs
from courtside.tasks.layouts import KEYS
from courtside.tasks.parsing import Record, parse_tasks, read_jsonl_tasks
from courtside.types import Task

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}  # fmt: skip
USER = {"role": "user", "content": "Weather in Rome?"}
ANSWER = {"role": "assistant", "content": "Sunny."}


def read(tmp_path: Path, line: dict[str, Any]) -> Task:
    (task,) = read_jsonl_tasks(write_jsonl(tmp_path / "tasks.jsonl", [line]))
    return task


def prompt_of(task: Task) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in task.messages]


def test_a_fine_tuning_line_as_it_comes(tmp_path: Path) -> None:
    line = {
        "messages": [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Weather "},
                                         {"type": "text", "text": "in Rome?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ANSWER | {"weight": 1},
        ],
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "metadata": {"source": "logs"},
    }  # fmt: skip
    task = read(tmp_path, line)
    assert prompt_of(task) == [
        ("system", "Be short."), ("user", "Weather in Rome?"), ("assistant", ""),
        ("tool", "sunny"),
    ]  # fmt: skip
    assert task.completion == "Sunny."
    assert json.loads(task.messages[0].tools) == [TOOL]
    call = json.loads(task.messages[2].extra)["tool_calls"][0]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert json.loads(task.messages[3].extra) == {"tool_call_id": "c1"}
    other = read(tmp_path, {**line, "tools": [TOOL | {"function": {"name": "forecast"}}]})
    assert other.id != task.id, "other tools are another task"


HI = {"role": "user", "content": "Hi"}
BETTER, WORSE = ({"role": "assistant", "content": text} for text in "AB")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"},
                                   {"from": "gpt", "value": "A"}]},
    "ShareGPT with roles": {"conversations": [{"role": "user", "content": "Hi"},
                                              {"role": "assistant", "content": "A"}]},
    "prompt/completion": {"prompt": "Hi", "completion": "A"},
    "conversational": {"prompt": [HI], "completion": [BETTER]},
    "one message": {"prompt": "Hi", "completion": BETTER},
    "preference": {"prompt": "Hi", "chosen": "A", "rejected": "B"},
    "conversational preference": {"prompt": [HI], "chosen": [BETTER], "rejected": [WORSE]},
    "implicit prompt": {"chosen": [HI, BETTER], "rejected": [HI, WORSE]},
    "both": {"prompt": "Hi", "chosen": [HI, BETTER], "rejected": [HI, WORSE]},
}  # fmt: skip


@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_is_the_same_task(tmp_path: Path, line: dict[str, Any]) -> None:
    task = read(tmp_path, line)
    assert prompt_of(task) == [("user", "Hi")] and task.completion == "A"
    assert task.rejected == ("B" if "rejected" in line else None)


def test_sharegpt_with_system_tools_and_calls(tmp_path: Path) -> None:
    line = {
        "system": "Be short.",
        "tools": json.dumps([TOOL["function"]]),
        "conversations": [
            {"from": "human", "value": "Weather in Rome?"},
            {
                "from": "function_call",
                "value": '{"name": "weather", "arguments": {"city": "Rome"}}',
            },
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "Sunny."},
        ],
    }
    task = read(tmp_path, line)
    assert [m.role for m in task.messages] == ["system", "user", "assistant", "tool"]
    assert json.loads(task.messages[0].tools) == [TOOL] or "weather" in task.messages[0].tools
    assert "tool_calls" in task.messages[2].extra and task.completion == "Sunny."
    (log,) = read_chat_logs(write_jsonl(tmp_path / "talks.jsonl", [line]))
    assert [m["role"] for m in log.conversation] == ["assistant", "tool", "assistant"]
    assert log.messages[0].tools == task.messages[0].tools


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}]},
         r"messages\[0\].content\[1\] is a part of type 'image_url'; courtside trains on text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         r"messages\[0\].content\[0\].text must be a text"),
        ({"messages": [USER, {"role": "assistant", "content": None}]},
         r"messages\[1\].content is null or missing, and there are no tool_calls"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
         r"the last message calls tools.*tasks.kind = 'conversations'"),
        ({"messages": [USER | {"tool_calls": [CALL]}]}, "Only assistants call tools"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, r"messages\[1\].weight = 0"),
        ({"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
         r"function_call is the format before tool_calls"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, r"tools\[0\] must be a schema"),
        ({"messages": [USER], "tools": "weather"}, "`tools` is no JSON"),
        ({"messages": [USER], "tools": "[" * 10**5}, "`tools` is no JSON"),
        ({"conversations": [{"from": "function_call", "value": "[" * 10**5}]}, "must be JSON with"),
        ({"messages": [USER], "parallel_tool_calls": "no"}, "must be true or false"),
        ({"messages": [USER], "functions": []}, "unknown key 'functions'"),
        ({"messages": [USER], "conversations": []}, "both `messages` and `conversations`"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, r"ons\[0\].from = 'alien'"),
        ({"conversations": [{"from": "human", "value": 3}]}, r"conversations\[0\].value must be"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "must be JSON with name"),
        ({"conversations": [{"from": "function_call", "value": "3"}]}, "must be JSON with name"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, USER]},
         "`system`, and `messages` begins with one"),
        ({"prompt": "a", "chosen": "b"}, "`chosen` needs a `rejected`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"},
         "both `completion` and `chosen`"),
        ({"chosen": "b", "rejected": "c"}, "no `prompt`"),
        ({"chosen": [USER, ANSWER], "rejected": [USER | {"content": "Other?"}, ANSWER]},
         "differ before their last message"),
        ({"prompt": "Other?", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
         "`prompt` is not how the conversations of the pair begin"),
        ({"prompt": "a", "completion": [USER]}, "the last message of `completion` must be"),
        ({"prompt": [ANSWER], "completion": "x"}, "keep one of them"),
        ({"prompt": {"text": "a"}}, "`prompt` must be a text .*not an object"),
        ({"prompt": "a", "id": 7}, "`id` must be a text"),
        ({"prompt": "a", "id": " "}, "`id` is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    with pytest.raises(TaskError, match=reason) as caught:
        read(tmp_path, line)
    assert str(caught.value).startswith(f"{tmp_path / 'tasks.jsonl'}, line 1: ")


def test_two_tasks_of_one_id_are_refused_with_both_lines(tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": "1"}, {"prompt": "2"}, {"id": "a", "prompt": "3"}]
    with pytest.raises(TaskError, match=r"line 3: id = 'a' is also at .*line 1, on another task"):
        read_jsonl_tasks(write_jsonl(tmp_path / "tasks.jsonl", lines))


def test_the_same_task_twice_is_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    file = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": "1"}, {"prompt": "2"}] * 2)
    assert len(read_jsonl_tasks(file, notes=notes)) == 2
    assert notes == [
        f"{file}, line 3 is the task of {file}, line 1, and 1 more such; each task is used once"
    ]
    talks = write_jsonl(tmp_path / "talks.jsonl", [{"messages": [USER, ANSWER]}] * 2)
    notes = []
    assert len(read_chat_logs(talks, notes)) == 1
    assert notes == [f"{talks}, line 2 is the conversation of {talks}, line 1; it is used once"]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "privileged": {"x": "1", "x": "2"}}', "x"),
        ('{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, line: str, key: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    for reader in (read_jsonl_tasks, read_chat_logs):
        with pytest.raises(TaskError, match=rf"line \d: (the key {key!r} is there twice|unknown)"):
            reader(file)
    with pytest.raises(TaskError, match=rf"line 2: the key {key!r} is there twice.*remove one"):
        read_jsonl_tasks(file)


@pytest.mark.parametrize("reader", ["read_jsonl_tasks", "read_chat_logs"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, reader: str) -> None:
    """In a process of its own: what blocks would block the tests."""
    os.mkfifo(tmp_path / "pipe")
    module = "courtside.tasks.parsing" if "jsonl" in reader else "courtside.tasks.chat_logs"
    code = f"from {module} import {reader} as read; from pathlib import Path; read(Path('pipe'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "tasks.path = 'pipe': cannot be read (it is a pipe, not a regular file)" in done.stderr


def test_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="it is a device or socket, not a regular file"):
        read_jsonl_tasks(Path("/dev/zero"))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
NAMES = st.sampled_from(["user", "assistant", "tool", "human", "gpt", "function_call", "text"])
MESSAGE_KEYS = st.sampled_from(
    ["role", "content", "from", "value", "tool_calls", "tool_call_id", "name", "weight", "type",
     "text", "function", "arguments"]
)  # fmt: skip
TREES = st.recursive(
    PLAIN | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MESSAGE_KEYS, inner, max_size=4),
    max_leaves=12,
)


MESSAGES = st.lists(st.dictionaries(MESSAGE_KEYS, TREES, min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*KEYS, "id", "split"]), MESSAGES | TREES, max_size=5))
def test_whatever_a_line_holds_it_is_a_task_or_a_task_error(line: dict[str, Any]) -> None:
    record = Record(where="line 1", fields=line)
    try:
        (task,) = parse_tasks("jsonl", [record])
    except TaskError as error:
        assert str(error).startswith("line 1: ")
        return
    assert task.messages[-1].role in ("user", "tool")
    assert all(isinstance(message.content, str) for message in task.messages)


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose chat template renders tools and calls."""
    folder = save_tiny(tmp_path_factory.mktemp("tools"))
    tiny_tokenizer(template=TOOLS_TEMPLATE).save_pretrained(folder)
    return folder


RUN = {
    "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                 {"role": "tool", "tool_call_id": "c1", "content": "sunny"}, ANSWER],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
}  # fmt: skip
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Sunny."},
    ],
    "tools": RUN["tools"],
}
PAIR = {"chosen": [HI, BETTER], "rejected": [HI, WORSE], "tools": RUN["tools"]}
IMITATE = [{"kind": "cross_entropy", "on": "dataset"}]
RUNS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "fine-tuning line": ("jsonl", RUN, IMITATE),
    "whole conversation": ("conversations", RUN, IMITATE),
    "ShareGPT": ("jsonl", SHAREGPT, IMITATE),
    "whole ShareGPT conversation": ("conversations", SHAREGPT, IMITATE),
    "preference": ("jsonl", PAIR, [{"kind": "preference"}]),
}


@pytest.mark.parametrize(("kind", "line", "losses"), RUNS.values(), ids=RUNS)
def test_a_run_trains_on_it_and_stores_it(
    tool_folder: Path, tmp_path: Path, kind: str, line: Any, losses: Any
) -> None:
    lines = [line if kind == "conversations" else line | {"split": "train"}]
    file = write_jsonl(tmp_path / "data.jsonl", lines)
    recipe = small_recipe(
        tool_folder,
        tasks={"kind": kind, "path": str(file)},
        rollout={"student_fraction": 0.0, "max_new_tokens": 40},
        losses=losses,
        train={"steps": 1, "prompts_per_step": 1},
    )
    run = train(recipe, tmp_path / "run")
    (row,) = run.metrics()
    assert row["grad_norm"] > 0
    trajectories = [stored.trajectory for stored in run.trajectories(0)]
    first = trajectories[0]
    assert first.task.messages[0].tools == parse_tools(line["tools"], "here")
    text = tiny_tokenizer().decode(first.token_ids)
    assert "# Tools" in text and '"name": "weather"' in text
    if "call" in json.dumps(line):
        assert '<tool_call>weather {"city": "Rome"}</tool_call>' in text
    if kind == "conversations":
        num_tokens = sum(len(turn.token_ids) for turn in first.turns if turn.role == "assistant")
        assert sum(row[key] for key in row if key.startswith("tokens/")) == num_tokens
    (rescored,) = rescore(run.path)
    assert rescored["loss/" + losses[0]["kind"]] is not None
