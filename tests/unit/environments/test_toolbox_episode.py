"""Episodes: what is solved, what is reported, what cannot be talked into a reward."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from courtside.environments.tool_calls import CallFormat, format_call
from courtside.environments.toolbox.environment import Toolbox, make_plan
from courtside.environments.toolbox.episode import Plan, ToolboxEpisode
from courtside.environments.toolbox.tools.base import Request
from courtside.environments.toolbox.tools.names import NAMES
from courtside.recipe.tasks import CapabilityName, ToolboxTasks
from courtside.types import Message, Observation, Task

ALL = get_args(CapabilityName)


def config(**changes: Any) -> ToolboxTasks:
    return ToolboxTasks.model_validate({"kind": "toolbox", "tool_call_format": "plain", **changes})


def played(episode: ToolboxEpisode) -> list[Observation]:
    """By the expert."""
    observations = []
    while not episode.done:
        observations.append(episode.step(episode.expert_call()))
    return observations


REQUESTS = {
    "weather": Request(capability="weather", text="Weather in Oslo?", arguments={"city": "Oslo"}),
    "calculate": Request(
        capability="calculate", text="What is 6 / 3?", arguments={"expression": "6 / 3"}
    ),
    "write": Request(
        capability="write_note", text="Note a: milk.", arguments={"title": "a", "text": "milk"}
    ),
    "append": Request(
        capability="append_note", text="Add eggs.", arguments={"title": "a", "text": "eggs"}
    ),
    "read": Request(capability="read_note", text="What does a say?", arguments={"title": "a"}),
    "delete": Request(capability="delete_note", text="Delete a.", arguments={"title": "a"}),
}
TOOLS = {
    "weather": "meteo", "calculate": "calc", "write_note": "save_note", "append_note": "note_add",
    "read_note": "open_note", "delete_note": "drop_note",
}  # fmt: skip


def episode_of(*names: str, **changes: Any) -> ToolboxEpisode:
    """An episode of known requests, tools and notes."""
    planned = Plan(
        split="train",
        tools=TOOLS,
        notes={"old": "x"},
        requests=tuple(REQUESTS[name] for name in names),
    )
    return ToolboxEpisode(planned, config(**changes))


def kinds(observation: Observation) -> list[str]:
    return [event.kind for event in observation.events]


# ── the expert ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call_format", get_args(CallFormat))
@pytest.mark.parametrize(("turns", "count"), [(4, 150), (200, 4)])
@pytest.mark.parametrize("reward", ["share", "all"])
def test_the_expert_solves_every_episode(
    call_format: CallFormat, turns: int, count: int, reward: str
) -> None:
    box = Toolbox(config(capabilities=ALL, num_tools=6, turns=turns, tool_call_format=call_format,
                         reward=reward, names="all"))  # fmt: skip
    for number in range(count):
        episode = box.start(box.task(number))
        observations = played(episode)
        assert len(observations) == turns
        assert not any(observation.events for observation in observations)
        assert [observation.done for observation in observations] == [False] * (turns - 1) + [True]
        grade = episode.grade()
        assert (grade.score, grade.passed, grade.feedback) == (1.0, True, "")


@pytest.mark.parametrize("capability", ALL)
def test_the_expert_solves_two_hundred_of_a_kind(capability: str) -> None:
    with_write = capability in ("delete_note", "write_note")
    box = Toolbox(
        config(capabilities=["delete_note", "write_note"] if with_write else [capability],
               num_tools=2 if with_write else 1, turns=200)
    )  # fmt: skip
    episode = box.start(box.task(5))
    played(episode)
    assert episode.grade().passed


def test_an_episode_starts_again_from_its_stored_task() -> None:
    box = Toolbox(config(turns=6))
    task = box.task(11)
    system = (Message(role="system", content="Be kind."), *task.messages)
    stored = replace(task, messages=system, grader_args=json.loads(json.dumps(task.grader_args)))
    first, repeated = (
        played(Toolbox(config(turns=6)).start(observation)) for observation in (task, stored)
    )
    assert first == repeated


def test_the_first_request_is_in_the_prompt_and_the_others_follow() -> None:
    box = Toolbox(config(turns=3))
    task, planned = box.task(2), make_plan(box.config, 2)
    observations = played(box.start(task))
    request_texts = [
        task.messages[-1].content,
        *(observation.messages[-1].content for observation in observations[:-1]),
    ]
    assert request_texts == [request.text for request in planned.requests]
    assert [m.role for m in observations[0].messages] == ["tool", "user"]
    assert [m.role for m in observations[-1].messages] == ["tool"]


def test_without_a_tool_role_results_are_the_users() -> None:
    episode = episode_of("calculate", "weather", tool_role=False)
    first = episode.step('calc(expression="6 / 3")')
    assert first.messages == (Message(role="user", content="Result: 2\n\nWeather in Oslo?"),)
    last = episode.step('meteo(city="Oslo")')
    assert last.done and [m.role for m in last.messages] == ["user"]


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        ("It is sunny.", "no_call",
         'Could not parse a tool call: the reply has no name(argument="value")'),
        ("", "no_call", 'Could not parse a tool call: the reply has no name(argument="value")'),
        ("meteo(Oslo)", "unparsable_call",
         "Could not parse a tool call: expected argument=value before 'Oslo)'"),
        ('get_weather(city="Oslo")', "tool_not_found", "Tool not found: get_weather"),
        ('Meteo(city="Oslo")', "tool_not_found", "Tool not found: Meteo"),
        ('meteo(place="Oslo")', "invalid_arguments",
         "Invalid arguments for meteo: unexpected argument 'place' (takes city)"),
        ("meteo()", "invalid_arguments",
         "Invalid arguments for meteo: missing argument 'city' (takes city)"),
        ('meteo(city="Atlantis")', "tool_error", "Error: no weather station for 'Atlantis'"),
        ('calc(expression="1 / 0")', "tool_error", "Error: division by zero"),
        ('calc(expression="1")', "wrong_tool", "1"),
        ('meteo(city="Rome")', "wrong_result", "Rome: "),
    ],
)  # fmt: skip
def test_each_mistake_has_its_event(reply: str, kind: str, message: str) -> None:
    episode = episode_of("weather", "calculate")
    observation = episode.step(reply)
    assert kinds(observation) == [kind]
    assert observation.messages[0].role == "tool"
    assert observation.messages[0].content.startswith(message)
    assert observation.messages[1] == Message(role="user", content="What is 6 / 3?")
    details = observation.events[0].details
    assert details["message"] == observation.messages[0].content
    assert details["request"] == "Weather in Oslo?"
    assert (details["capability"], details["listed"]) == ("weather", "meteo")
    assert details["common"] == "get_weather"
    assert details["tools"] == "meteo, calc, save_note, note_add, open_note, drop_note"
    assert details["correct"] == 'meteo(city="Oslo")'
    assert ("tool" in details) == (kind not in ("no_call", "unparsable_call"))
    episode.step(episode.expert_call())
    assert episode.grade().score == 0.5 and not episode.grade().passed
    assert episode.grade().feedback == "1 of 2 requests were solved. Not solved: request 1."


def test_events_name_the_call() -> None:
    [event] = episode_of("weather").step('get_weather(city="Oslo")').events
    assert event.details["tool"] == "get_weather"
    assert event.details["arguments"] == '{"city": "Oslo"}'


def test_another_way_to_the_same_result_counts() -> None:
    for reply in ('calc(expression="1 + 1")', 'Well: calc(expression="2").'):
        episode = episode_of("calculate")
        assert not episode.step(reply).events
        assert episode.grade().passed


def test_a_repeated_call_that_does_not_help_is_told() -> None:
    episode = episode_of("weather", "calculate", "weather")
    assert kinds(episode.step('get_weather(city="Oslo")')) == ["tool_not_found"]
    assert kinds(episode.step('get_weather(city="Oslo")')) == ["tool_not_found", "repeated_call"]
    assert not episode.step('meteo(city="Oslo")').events
    repeated = episode_of("weather", "weather")
    assert not repeated.step('meteo(city="Oslo")').events
    assert not repeated.step('meteo(city="Oslo")').events, "asked twice, answered twice"


def test_of_several_calls_the_first_is_run() -> None:
    episode = episode_of("write", "read")
    observation = episode.step('save_note(title="a", text="milk") drop_note(title="a")')
    assert kinds(observation) == ["extra_calls"]
    assert observation.messages[0].content == "Saved 'a'.\n(Only the first of 2 calls was run.)"
    assert episode.step('open_note(title="a")').messages[0].content == "milk"
    assert episode.grade().passed


def test_long_results_are_cut_with_a_note() -> None:
    text = "y" * 300
    episode = episode_of("write", "read", max_result_chars=100)
    episode.step(f'save_note(title="a", text="{text}")')
    result = episode.step('open_note(title="a")').messages[0].content
    assert result == "y" * 100 + "… [300 characters in all]"
    long_name = (
        episode_of("weather", max_result_chars=100).step(f'{"n" * 99}(a="{text}")').events[0]
    )
    assert all(len(value) < 200 for value in long_name.details.values())


# ── notes ────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_text_of_the_right_length_is_not_solved() -> None:
    episode = episode_of("write")
    observation = episode.step('save_note(title="a", text="silk")')
    assert observation.messages[0].content == "Saved 'a'."
    assert kinds(observation) == ["wrong_result"]
    assert episode.grade().score == 0.0


def test_an_earlier_mistake_is_not_blamed_on_a_later_turn() -> None:
    episode = episode_of("write", "read", "append", "read")
    assert kinds(episode.step('write_note(title="a", text="milk")')) == ["tool_not_found"]
    lost = episode.step('open_note(title="a")')
    assert lost.messages[0].content == "Error: no note called 'a'"
    assert kinds(lost) == ["earlier_failure"]
    assert kinds(episode.step('open_note(title="b")')) == ["tool_error"], "this one is its own"
    assert kinds(episode.step('open_note(title="a")')) == ["earlier_failure"]
    assert episode.grade().score == 0.0


def test_the_note_as_it_is_decides() -> None:
    episode = episode_of("write", "append", "read")
    episode.step('save_note(title="a", text="silk")')
    assert kinds(episode.step('note_add(title="a", text="eggs")')) == ["earlier_failure"]
    assert kinds(episode.step('open_note(title="a")')) == ["earlier_failure"]
    assert episode.grade().score == 0.0


def test_side_effects_of_solved_requests_count_in_the_end_state() -> None:
    for reward, score in (("share", 1.0), ("all", 0.0)):
        episode = episode_of("calculate", retries=1, reward=reward)
        episode.step('drop_note(title="old")')
        assert not episode.step('calc(expression="2")').events
        grade = episode.grade()
        assert (grade.score, grade.passed) == (score, False)
        assert grade.feedback.endswith("The notes are not as they should be.")


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reward", ["share", "all"])
def test_words_earn_nothing(reward: str) -> None:
    answer = "Oslo: 21 °C, rain"
    for text in (
        answer, f"Result: {answer}", f'{{"result": "{answer}"}}', "passed: true, score: 1.0",
        "2", "<tool_response>2</tool_response>", 'Tool result of meteo(city="Oslo"',
    ):  # fmt: skip
        episode = episode_of("weather", "calculate", reward=reward)
        while not episode.done:
            episode.step(text)
        assert episode.grade().score == 0.0


def test_the_result_of_another_tool_earns_nothing() -> None:
    episode = episode_of("calculate")
    episode.step('save_note(title="a", text="2")')
    assert episode.grade().score == 0.0
    repeated = episode_of("write", "calculate")
    repeated.step('save_note(title="a", text="2")')
    assert kinds(repeated.step('open_note(title="a")')) == ["wrong_tool"], "it does say 2"
    assert repeated.grade().score == 0.0


def test_grades_before_the_end() -> None:
    episode = episode_of("weather", "calculate", "read")
    assert episode.grade().score == 0.0
    assert episode.grade().feedback == "0 of 3 requests were solved. Not reached: 3."
    episode.step(episode.expert_call())
    assert episode.grade().score == pytest.approx(1 / 3)
    unfinished = episode_of("weather", "calculate", reward="all")
    unfinished.step(unfinished.expert_call())
    assert unfinished.grade().score == 0.0


def test_all_or_nothing() -> None:
    episode = episode_of("weather", "calculate", reward="all")
    episode.step("What?")
    episode.step(episode.expert_call())
    assert (episode.grade().score, episode.grade().passed) == (0.0, False)


def test_after_the_end_nothing_happens() -> None:
    episode = episode_of("write")
    episode.step(episode.expert_call())
    assert episode.step('drop_note(title="a")') == Observation(messages=(), done=True)
    assert episode.grade().passed


# ── retries ──────────────────────────────────────────────────────────────────────────────────────


def test_a_retry_can_still_solve_a_request() -> None:
    episode = episode_of("weather", "calculate", retries=2)
    first = episode.step('get_weather(city="Oslo")')
    assert [m.role for m in first.messages] == ["tool"], "the error speaks for itself"
    second = episode.step('meteo(city="Rome")')
    assert second.messages[-1] == Message(
        role="user", content="That is not what I asked for. Weather in Oslo?"
    )
    assert not episode.step('meteo(city="Oslo")').events
    assert [kinds(episode.step("no")) for _ in range(3)] == [["no_call"]] * 3
    assert episode.done and episode.grade().score == 0.5


def test_without_retries_the_next_request_follows() -> None:
    episode = episode_of("weather", "calculate")
    assert episode.step("no").messages[-1].content == "What is 6 / 3?"
    assert episode.step("no").done


# ── any text ─────────────────────────────────────────────────────────────────────────────────────

FRAGMENTS = st.sampled_from(
    ['meteo(city="', '")', "<tool_call>", '{"name": "', '", "arguments": {', "}}", "</tool_call>",
     'calc(expression="9**9**9")', 'save_note(title="a", text="', "\ud800", "\x00", "|im_end|>",
     'convert_units(value=1e9, unit="km", to="m")', '"city": "Oslo"', "note_add(", "title=", "1",
     *(name for observation in NAMES.values() for name in observation.seen_names[:2])]
)  # fmt: skip
REPLIES = st.lists(st.lists(st.one_of(FRAGMENTS, st.text(max_size=5)), max_size=12).map("".join),
                   min_size=1, max_size=6)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(replies=REPLIES, number=st.integers(0, 10**11), changes=st.fixed_dictionaries({
    "tool_call_format": st.sampled_from(["json", "plain"]), "tool_role": st.booleans(),
    "retries": st.integers(0, 2), "reward": st.sampled_from(["share", "all"]),
}))  # fmt: skip
def test_no_reply_raises(replies: list[str], number: int, changes: dict[str, Any]) -> None:
    box = Toolbox(config(capabilities=ALL, num_tools=6, **changes))
    episode = box.start(box.task(number))
    for reply in replies:
        was_done = episode.done
        observation = episode.step(reply)
        assert observation.messages or was_done
        json.dumps([m.content for m in observation.messages], ensure_ascii=False).encode()
        json.dumps([dict(e.details) for e in observation.events], ensure_ascii=False).encode()
        assert all(isinstance(v, str) for e in observation.events for v in e.details.values())
        assert 0.0 <= episode.grade().score <= 1.0


@settings(max_examples=60, deadline=None)
@given(arguments=st.dictionaries(
    st.sampled_from(["city", "expression", "title", "text", "value", "unit", "to", "date", "days"]),
    st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.none(), st.just("2024-01-01")),
    max_size=4,
), call_format=st.sampled_from(["json", "plain"]), number=st.integers(0, 1000))  # fmt: skip
def test_no_call_raises(arguments: dict[str, Any], call_format: CallFormat, number: int) -> None:
    box = Toolbox(config(capabilities=ALL, num_tools=8, tool_call_format=call_format))
    for name in make_plan(box.config, number).tools.values():
        episode = box.start(box.task(number))
        assert episode.step(format_call(name, arguments, call_format)).messages


def test_what_tools_and_users_say_is_never_run() -> None:
    inner = 'drop_note(title="old")'
    episode = episode_of("write", "read", "calculate")
    episode.step(format_call("save_note", {"title": "a", "text": inner}, "plain"))
    assert episode.step('open_note(title="a")').messages[0].content == inner
    assert not episode.step(episode.expert_call()).events
    assert "old" in episode._state.notes


def test_a_task_needs_no_number_of_another_kind() -> None:
    task = Task(id="x", split="train", messages=(), grader_args={"number": "3"})
    with pytest.raises(ValueError, match="not one of this toolbox"):
        Toolbox(config()).start(task)
