"""Warm starts: the expert's conversations, and those of an expert with a habit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from courtside.config import ToolboxTasks
from courtside.tasks.environments.calls import ToolCall, parse_call
from courtside.tasks.environments.toolbox.demonstrations import demonstration_rows, demonstrations
from courtside.tasks.environments.toolbox.names import NAMES
from courtside.tasks.environments.toolbox.plan import plan
from courtside.tasks.environments.toolbox.world import Toolbox
from courtside.tasks.jsonl import jsonl_tasks


def toolbox(**changes: Any) -> Toolbox:
    return Toolbox(ToolboxTasks.model_validate({"kind": "toolbox", **changes}))


def test_conversations_are_whole_and_the_same_again() -> None:
    box = toolbox()
    found = list(demonstrations(box, range(20), habit_share=0.4))
    assert found == list(demonstrations(toolbox(), range(20), habit_share=0.4))
    for number, conversation in enumerate(found):
        roles = [message.role for message in conversation]
        assert roles == ["system", "user", *["assistant", "tool", "user"] * 3, "assistant"]
        assert tuple(conversation[:2]) == box.task(number).messages


def test_without_a_habit_no_call_goes_wrong() -> None:
    for conversation in demonstrations(toolbox(turns=10), range(30)):
        assert not any("not found" in message.content for message in conversation)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_habit_makes_exactly_the_errors_of_unlisted_common_names(share: float) -> None:
    box = toolbox(common_share=0.5, turns=(3, 6))
    num_calls = num_unlisted = num_habits = 0
    for number, conversation in enumerate(demonstrations(box, range(200), habit_share=share)):
        planned = plan(box.config, number)
        calls = [parse_call(m.content, "json") for m in conversation if m.role == "assistant"]
        answers = [m.content for m in conversation if m.role == "tool"]
        for request, call, said in zip(planned.requests, calls, [*answers, None], strict=True):
            assert isinstance(call, ToolCall)
            listed, common = planned.tools[request.capability], NAMES[request.capability].common
            assert call.name in (listed, common) and call.arguments == request.arguments
            if said is not None:
                # An error exactly where the habit said something else than the list.
                assert (said == f"Tool not found: {common}") == (call.name != listed)
            num_calls += 1
            num_unlisted += listed != common
            num_habits += call.name != listed
    assert num_unlisted / num_calls == pytest.approx(0.5, abs=0.06)
    assert num_habits / num_unlisted == pytest.approx(share, abs=0.06)


def test_events_of_a_habit_are_tool_not_found() -> None:
    box = toolbox(common_share=0.0)
    episode = box.start(box.task(0))
    while not episode.done:
        [event, *more] = episode.step(episode.habitual()).events
        assert event.kind == "tool_not_found" and event.details["tool"] == event.details["common"]
        assert all(one.kind == "repeated_call" for one in more)
    assert episode.grade().score == 0.0


def test_with_a_larger_share_habits_are_added_and_none_is_lost() -> None:
    box = toolbox(turns=6)
    few, many = ([c for c in demonstrations(box, range(40), s)] for s in (0.2, 0.6))
    habits = [
        {i for i, m in enumerate(conversation) if m.content.startswith("Tool not found")}
        for conversations in (few, many)
        for conversation in conversations
    ]
    for less, more in zip(habits[:40], habits[40:], strict=True):
        assert less <= more


def test_rows_are_tasks_with_the_call_to_imitate(tmp_path: Path) -> None:
    box = toolbox(turns=3)
    train = [number for number in range(40) if box.split(number) == "train"]
    rows = list(demonstration_rows(box, train))
    assert len(rows) == 3 * len(train)
    file = tmp_path / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = jsonl_tasks(file)
    assert len(tasks) == len(rows) and {task.split for task in tasks} == {"train"}
    for row, task in zip(rows, tasks, strict=True):
        assert task.completion == row["completion"] and task.messages[-1].role == "user"
    for before, after in pairwise(rows[:3]):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["messages"][len(before["messages"])]["content"] == before["completion"]
