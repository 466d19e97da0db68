"""Warm starts: the expert's conversations, and those of an expert with a habit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.tiny_model import tiny_tokenizer

from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.hint_splicing import splice_hint, splice_hints_cumulatively
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.environments.tool_calls import ToolCall, parse_call
from courtside.environments.toolbox.demonstrations import demonstration_rows
from courtside.environments.toolbox.environment import REMINDERS, Toolbox, make_plan
from courtside.environments.toolbox.tools.names import NAMES
from courtside.recipe.rules import DEFAULT_RULES
from courtside.recipe.tasks import ToolboxTasks
from courtside.tasks.parsing import read_jsonl_tasks
from courtside.types import Hint, Message, Task, Trajectory


def toolbox(**changes: Any) -> Toolbox:
    return Toolbox(ToolboxTasks.model_validate({"kind": "toolbox", **changes}))


def demonstrations(
    box: Toolbox,
    indices: Iterable[int],
    habit_fraction: float = 0.0,
    reminder_fraction: float = 0.0,
) -> list[list[Message]]:
    tasks = (box.task(index) for index in indices)
    return [box.demonstrate(task, habit_fraction, reminder_fraction) for task in tasks]


def test_conversations_are_whole_and_the_same_again() -> None:
    box = toolbox()
    conversations = demonstrations(box, range(20), habit_fraction=0.4)
    assert conversations == demonstrations(toolbox(), range(20), habit_fraction=0.4)
    for number, conversation in enumerate(conversations):
        roles = [message.role for message in conversation]
        assert roles == ["system", "user", *["assistant", "tool", "user"] * 3, "assistant"]
        assert tuple(conversation[:2]) == box.task(number).messages


def test_without_a_habit_no_call_goes_wrong() -> None:
    for conversation in demonstrations(toolbox(turns=10), range(30)):
        assert not any("not found" in message.content for message in conversation)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_habit_makes_exactly_the_errors_of_unlisted_common_names(share: float) -> None:
    box = toolbox(common_name_fraction=0.5, turns=(3, 6))
    num_calls = num_unlisted = num_habits = 0
    for number, conversation in enumerate(demonstrations(box, range(200), habit_fraction=share)):
        planned = make_plan(box.config, number)
        calls = [parse_call(m.content, "json") for m in conversation if m.role == "assistant"]
        answers = [m.content for m in conversation if m.role == "tool"]
        for request, call, text in zip(planned.requests, calls, [*answers, None], strict=True):
            assert isinstance(call, ToolCall)
            listed, common = planned.tools[request.capability], NAMES[request.capability].common
            assert call.name in (listed, common) and call.arguments == request.arguments
            if text is not None:
                # An error exactly where the habit said something else than the list.
                assert (text == f"Tool not found: {common}") == (call.name != listed)
            num_calls += 1
            num_unlisted += listed != common
            num_habits += call.name != listed
    assert num_unlisted / num_calls == pytest.approx(0.5, abs=0.06)
    assert num_habits / num_unlisted == pytest.approx(share, abs=0.06)


def test_a_habitual_call_has_a_missing_tool_event() -> None:
    box = toolbox(common_name_fraction=0.0)
    episode = box.start(box.task(0))
    while not episode.done:
        [event, *more] = episode.step(episode.habitual_call()).events
        assert event.kind == "tool_not_found" and event.details["tool"] == event.details["common"]
        assert all(event.kind == "repeated_call" for event in more)
    assert episode.grade().score == 0.0


def test_with_a_larger_share_habits_are_added_and_none_is_lost() -> None:
    box = toolbox(turns=6)
    few, many = (demonstrations(box, range(40), share) for share in (0.2, 0.6))
    habits = [
        {i for i, m in enumerate(conversation) if m.content.startswith("Tool not found")}
        for conversations in (few, many)
        for conversation in conversations
    ]
    for less, more in zip(habits[:40], habits[40:], strict=True):
        assert less <= more


def roles_of(conversation: list[Message]) -> str:
    """One letter a message, with r for a reminder."""
    forms = (".+".join(map(re.escape, form.split("{tools}"))) for form in REMINDERS)
    is_reminder = re.compile("|".join(forms))
    return "".join("r" if is_reminder.fullmatch(m.content) else m.role[0] for m in conversation)


def test_reminders_stand_right_above_calls_that_are_right() -> None:
    box = toolbox(common_name_fraction=0.2, turns=(3, 6))
    num_reminded = num_others = num_habits = 0
    for number, conversation in enumerate(demonstrations(box, range(150), 0.5, 0.4)):
        planned = make_plan(box.config, number)
        roles = roles_of(conversation)
        assert re.fullmatch("sur?a(tur?a)*", roles), roles
        requests = iter(planned.requests)
        for place, role in enumerate(roles):
            if role != "a":
                continue
            request, text = next(requests), conversation[place - 1].content
            call = parse_call(conversation[place].content, "json")
            assert isinstance(call, ToolCall)
            right = call.name == planned.tools[request.capability]
            if roles[place - 1] == "r":
                assert right and ", ".join(planned.tools.values()) in text
            else:
                num_others += 1
                num_habits += not right
            num_reminded += roles[place - 1] == "r"
    assert num_reminded / (num_reminded + num_others) == pytest.approx(0.4, abs=0.05)
    assert num_habits / num_others == pytest.approx(0.5 * 0.8, abs=0.07)


def test_a_recipe_asks_for_reminders_and_more_of_them_only_add() -> None:
    few, many = (
        toolbox(turns=6, habit_fraction=0.5, reminder_fraction=share) for share in (0.3, 0.7)
    )
    for number in range(40):
        task = few.task(number)
        assert task == many.task(number), "what the student is asked does not depend on it"
        less, more = few.demonstrate(task), many.demonstrate(task)
        assert less == few.demonstrate(task)
        reminded = [{m.content for m in c if roles_of([m]) == "r"} for c in (less, more)]
        assert reminded[0] <= reminded[1]
        assert few.demonstrate(task, 0.0, 0.0) == toolbox(turns=6).demonstrate(task)


def test_reminders_vary_and_none_is_the_words_of_a_rule() -> None:
    box = toolbox(turns=6, reminder_fraction=0.5)
    conversations: set[str] = set()
    for task in map(box.task, range(40)):
        tools = task.privileged["tools"]
        for message in box.demonstrate(task):
            if message.role == "user":
                conversations.add(message.content.replace(tools, "{tools}"))
    assert set(REMINDERS) <= conversations
    assert not set(REMINDERS) & {rule.template for rule in DEFAULT_RULES}


@pytest.mark.parametrize("tool_role", [True, False])
def test_a_reminded_call_is_token_for_token_a_hinted_turn(tool_role: bool) -> None:
    """The same conversation without its reminders, with each put in again as a hint."""
    tokenizer = tiny_tokenizer()
    template = IncrementalTemplate(
        ChatTemplate(tokenizer, name="tiny", eos_ids=[tokenizer.eos_token_id])
    )
    box = toolbox(turns=6, reminder_fraction=0.5, habit_fraction=0.5, tool_role=tool_role)

    def trajectory(task: Task, conversation: list[Message]) -> Trajectory:
        first = next(i for i, m in enumerate(conversation) if m.role == "assistant")
        log = [{"role": m.role, "content": m.content} for m in conversation]
        begun = replace(task, messages=tuple(conversation[:first]))
        return trajectory_from_chat_log(begun, log, template, id=task.id)

    num_hints = 0
    for task in map(box.task, range(12)):
        conversation = box.demonstrate(task)
        roles = roles_of(conversation)
        plain = [m for m, role in zip(conversation, roles, strict=True) if role != "r"]
        trunk, whole = trajectory(task, plain), trajectory(task, conversation)
        # An assistant's turn and what answers it: call n is turn 2n + 1.
        hints = [
            Hint(
                trajectory=task.id,
                turn=2 * roles[:place].count("a") + 1,
                text=conversation[place].content,
                source="demonstration",
            )
            for place, role in enumerate(roles)
            if role == "r"
        ]
        assert splice_hints_cumulatively(
            trunk, hints, template, role="user", max_tokens=400
        ).token_ids == (whole.token_ids)
        num_hints += len(hints)
        if hints:  # The first one alone, as hints are by default.
            event = splice_hint(
                trunk, hints[0], template, place="before_turn", role="user", max_tokens=400
            )
            ids = trunk.token_ids[: event.splice] + event.token_ids
            assert ids == whole.token_ids[: len(ids)] and len(ids) > len(event.token_ids)
    assert num_hints > 12


def test_rows_are_tasks_with_the_call_to_imitate(tmp_path: Path) -> None:
    box = toolbox(turns=3)
    train = [number for number in range(40) if box.split(number) == "train"]
    rows = list(demonstration_rows(box, train))
    assert len(rows) == 3 * len(train)
    file = tmp_path / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = read_jsonl_tasks(file)
    assert len(tasks) == len(rows) and {task.split for task in tasks} == {"train"}
    for row, task in zip(rows, tasks, strict=True):
        assert task.completion == row["completion"] and task.messages[-1].role == "user"
    for before, after in pairwise(rows[:3]):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["messages"][len(before["messages"])]["content"] == before["completion"]
