"""Recorded conversations as tasks, and a run on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import small_recipe, write_jsonl
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.api import train
from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.local import LocalEngine
from courtside.errors import RecipeError, TaskError
from courtside.evaluate.surprise import surprise
from courtside.tasks.chat_logs import read_chat_logs
from courtside.types import Message, Task, Trajectory, Turn


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "c1", "type": "function", "function": function}


def talk(city: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", city=city)]},
            {"role": "tool", "tool_call_id": "c1", "content": "Error: Tool not found: weather"},
            {"role": "assistant", "content": "I do not know."},
        ],
        "privileged": {"tools": "meteo"},
    }


CITIES = ("Rome", "Oslo", "Lima", "Bonn", "Kyiv", "Graz", "Bern", "Nice", "York", "Cork", "Metz")


def test_what_stands_before_the_first_answer_is_the_prompt(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "talks.jsonl", [talk(city) for city in (*CITIES, "Rome")])
    tasks = read_chat_logs(file)
    assert len(tasks) == len(CITIES)  # the same one twice is one
    assert tasks[0].messages == (Message(role="user", content="Weather in Rome?"),)
    assert [m["role"] for m in tasks[0].conversation] == ["assistant", "tool", "assistant"]
    assert tasks[0].privileged == {"tools": "meteo"}
    assert tasks == read_chat_logs(file)
    assert {task.split for task in tasks} == {"train"}  # nothing could be measured on the others


def test_a_conversation_may_have_an_id(tmp_path: Path) -> None:
    lines = [talk("Rome") | {"id": "first"}, talk("Rome") | {"id": "again"}, talk("Oslo")]
    tasks = read_chat_logs(write_jsonl(tmp_path / "talks.jsonl", lines))
    assert [task.id for task in tasks[:2]] == ["first", "again"]  # named apart, they are two
    assert tasks[2].id.startswith("conversation-")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, r"line 1: .*nothing to learn from"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, r"needs a message to answer"),
        ({"messages": "Hi"}, r"messages must be a list"),
        ({"messages": [], "prompt": "x"}, r"unknown key 'prompt'"),
        (talk("Rome") | {"tags": "x"}, r"`tags` must be a list of texts"),
        (talk("Rome") | {"id": 7}, r"line 1: `id` must be a text"),
        (talk("Rome") | {"id": " "}, r"`id` is empty"),
        (talk("Rome") | {"privileged": {"a": 1}}, r"privileged: `a` must be a text, not a number"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_chat_logs(write_jsonl(tmp_path / "talks.jsonl", [line]))


def test_two_conversations_of_one_id_are_refused(tmp_path: Path) -> None:
    lines = [talk("Rome") | {"id": "a"}, talk("Oslo"), talk("Lima") | {"id": "a"}]
    file = write_jsonl(tmp_path / "talks.jsonl", lines)
    with pytest.raises(TaskError, match=r"line 3: id = 'a' is also at .*line 1. Give each"):
        read_chat_logs(file)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text("\n")
    with pytest.raises(TaskError, match=r"the file is empty. Write one conversation a line"):
        read_chat_logs(tmp_path / "talks.jsonl")


def hint_recipe(folder: Path, file: Path, **changes: Any) -> Any:
    return small_recipe(
        folder,
        **{
            "tasks": {"kind": "conversations", "path": str(file)},
            "rollout": {"student_fraction": 0, "samples_per_prompt": 1, "max_new_tokens": 4},
            "reader": {
                "kind": "rules",
                "rules": [{"detect": "ignored_error", "hint": "The tools here are {tools}."}],
            },
            "hints": {"harmful": "train"},  # a random model likes every other hint
            "teacher": {"kind": "self", "weights": "live"},
            "losses": [{"kind": "divergence", "on": "hinted_turns"}],
            **changes,
        },
    )


def test_recorded_conversations_are_hinted_and_trained(tmp_path: Path, tiny_folder: Path) -> None:
    file = write_jsonl(tmp_path / "talks.jsonl", [talk(city) for city in CITIES])
    run = train(hint_recipe(tiny_folder, file), tmp_path / "run")
    rows = run.metrics()
    assert all(row["hints/trained"] == 2 and row["grad_norm"] > 0 for row in rows)
    stored = run.trajectories(step=0)[0]
    assert stored.trajectory.source == "dataset"
    assert '"name": "weather"' in stored.trajectory.turns[1].text
    assert (
        stored.hints[0].hint.turn == 3 and stored.hints[0].hint.text == "The tools here are meteo."
    )
    assert stored.trajectory.task.conversation  # enough to hint it again later


def test_a_hint_for_a_conversation_trains_in_every_epoch(tmp_path: Path, tiny_folder: Path) -> None:
    talks = [talk(city) | {"id": city.lower()} for city in ("Rome", "Oslo")]
    file = write_jsonl(tmp_path / "talks.jsonl", talks)
    hints = tmp_path / "hints.jsonl"
    write_jsonl(hints, [{"trajectory": "oslo", "turn": 3, "text": "The tool is meteo."}])
    recipe = hint_recipe(
        tiny_folder,
        file,
        reader={"kind": "human", "path": str(hints)},
        train={"steps": 3, "prompts_per_step": 2, "learning_rate": 1e-3},
    )
    run = train(recipe, tmp_path / "run")
    assert [row["hints/trained"] for row in run.metrics()] == [1, 1, 1]
    for step in range(3):
        (hinted,) = [stored for stored in run.trajectories(step) if stored.hints]
        assert hinted.trajectory.task.id == "oslo"
        assert hinted.hints[0].hint.trajectory == hinted.trajectory.id != "oslo"


def test_the_student_cannot_act_in_them(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"written elsewhere.*student_fraction = 0"):
        hint_recipe(tiny_folder, tmp_path / "x.jsonl", rollout={"samples_per_prompt": 1})


def test_surprise_is_zero_for_own_words_and_large_for_others() -> None:
    engine = LocalEngine(tiny_model(), tiny_tokenizer(), name="tiny")

    def make_trajectory(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Trajectory:
        turns = (
            Turn(role="prompt", text="", token_ids=prompt, completion_mask=(False,) * len(prompt)),
            Turn(role="assistant", text="", token_ids=ids, completion_mask=(True,) * len(ids)),
        )
        return Trajectory(
            id="x", task=Task(id="t", split="train", messages=()), turns=turns, source="dataset",
            policy_version=None, temperature=1.0, stop="dataset",
        )  # fmt: skip

    prompts = [(5 + n % 200, 9) for n in range(400)]
    requests = [SampleRequest(prompt_ids=p, seed=n) for n, p in enumerate(prompts)]
    samples = engine.sample(requests, Sampling(max_new_tokens=5))
    sampled = [make_trajectory(p, s.token_ids) for p, s in zip(prompts, samples, strict=True)]
    assert abs(surprise(sampled, engine)) < 0.1
    torch.manual_seed(0)
    random = [make_trajectory(p, tuple(torch.randint(2, 258, (5,)).tolist())) for p in prompts]
    assert surprise(random, engine) > 0.5
