"""Episodes of the switchboard: events of faults and their mirrors, grades, demonstrations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import date
from string import Formatter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_model import tiny_tokenizer

from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.hint_splicing import splice_hints_cumulatively
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.template import ChatTemplate
from courtside.environments.guard import GuardedEnvironment
from courtside.environments.loading import make_environment
from courtside.environments.switchboard.environment import Switchboard
from courtside.environments.switchboard.episode import (
    EVENT_DETAILS,
    EVENT_KINDS,
    SwitchboardEpisode,
    habitual_reply,
    right_reply,
)
from courtside.environments.switchboard.plan import FAULTS, Plan, Request, make_plan
from courtside.environments.switchboard.wording import (
    DESKS,
    FORMATS,
    REMINDERS,
    SURE,
    format_date,
)
from courtside.environments.tool_calls import ToolCall, format_call, parse_call
from courtside.recipe.tasks import SwitchboardTasks
from courtside.types import Hint, Message, Observation

numbers = st.integers(0, Switchboard.size - 1)


def config(**changes: Any) -> SwitchboardTasks:
    return SwitchboardTasks.model_validate({"kind": "switchboard", **changes})


def requests(kind: str, side: str) -> list[Request]:
    """Those of some episodes that make this decision."""
    decision = f"{kind}/habit_{side}"
    plans = (make_plan(config(), number) for number in range(60))
    return [r for plan in plans for r in plan.requests if r.decision == decision]


def answer(request: Request, reply: str) -> Observation:
    plan = Plan(split="train", system="", requests=(request,))
    return SwitchboardEpisode(plan, config()).step(reply)


def kinds(observation: Observation) -> list[str]:
    return [event.kind for event in observation.events]


def call_with(request: Request, **arguments: str) -> str:
    return request.opening + format_call(request.tool, {**request.arguments, **arguments}, "plain")


# ── events ───────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(numbers, st.sampled_from(["right", "habit"]))
def test_right_replies_cause_no_event_and_habits_one_where_they_are_wrong(
    number: int, who: str
) -> None:
    plan = make_plan(config(), number)
    episode = SwitchboardEpisode(plan, config())
    for n, request in enumerate(plan.requests):
        reply = right_reply(request) if who == "right" else habitual_reply(request)
        observation = episode.step(reply)
        is_wrong = who == "habit" and request.habit_is_wrong
        assert kinds(observation) == ([request.fault] if is_wrong else [])
        assert observation.decision == request.decision
        assert observation.done == (n == len(plan.requests) - 1)
        following = plan.requests[n + 1 : n + 2]
        assert [m.content for m in observation.messages] == [r.text for r in following]
    # Small talk is no part of the grade, so it does not count as unsolved.
    unsolved = sum(r.habit_is_wrong and r.fault != "talk" for r in plan.requests)
    solved = len(plan.requests) - (unsolved if who == "habit" else 0)
    assert episode.grade().score == pytest.approx(solved / len(plan.requests))
    assert episode.grade().passed == (solved == len(plan.requests))
    assert episode.step("lamp()") == Observation(messages=(), done=True)


def test_the_cure_where_the_habit_is_right_is_a_mirror_event() -> None:
    for request in requests("date", "right"):
        day = date.fromisoformat(request.arguments["date"])
        for other in FORMATS:
            assert kinds(answer(request, call_with(request, date=format_date(day, other)))) == [
                "date_mirror"
            ]
    for request in requests("desk", "right"):
        for desk in DESKS:
            assert kinds(answer(request, call_with(request, desk=desk))) == ["desk_mirror"]
    for request in requests("confirm", "right"):
        assert kinds(answer(request, call_with(request, confirm="yes"))) == ["confirm_mirror"]
    for request in requests("talk", "right"):
        assert kinds(answer(request, f"{request.tool}()")) == ["talk_mirror"]


@pytest.mark.parametrize("fault", FAULTS)
def test_where_the_habit_is_wrong_there_is_no_mirror_event(fault: str) -> None:
    """Another mistake there is a wrong call: neither the habit nor the cure."""
    wrong_requests = requests(fault, "wrong")
    assert len(wrong_requests) > 10
    for request in wrong_requests:
        assert kinds(answer(request, right_reply(request))) == []
        assert kinds(answer(request, habitual_reply(request))) == [fault]
    for request in requests("desk", "wrong"):
        other_desks = set(DESKS) - {request.arguments["desk"]}
        for desk in other_desks:
            assert kinds(answer(request, call_with(request, desk=desk))) == ["wrong_call"]


def test_a_call_that_is_neither_habit_nor_cure_is_a_wrong_call() -> None:
    (date_request, *_), (desk_request, *_) = requests("date", "right"), requests("desk", "right")
    assert kinds(answer(date_request, call_with(date_request, date="2020-02-30"))) == ["wrong_call"]
    assert kinds(answer(desk_request, call_with(desk_request, desk="E"))) == ["wrong_call"]
    assert kinds(answer(desk_request, call_with(desk_request, name="Nobody"))) == ["wrong_call"]
    assert kinds(answer(desk_request, 'book(desk="A")')) == ["wrong_call"]
    assert kinds(answer(desk_request, call_with(desk_request, more="x"))) == ["wrong_call"]


@pytest.mark.parametrize(
    ("reply", "events"),
    [
        ("Sure! {call}", "talk"),
        ("Of course. {call}", "talk"),
        ("{call} Done!", "extra_text"),
        ("{call} {call}", "extra_text"),
        ("{call} (done)", "extra_text"),
        ("Sure! lamp()", "wrong_call talk"),
        ("{call}", ""),
        (" {call}\n", ""),
        ("Sure!", "no_call"),
        ("", "no_call"),
        ("Sure! weather(now)", "unparsable_call"),
    ],
)
def test_text_around_a_call_where_small_talk_is_unwanted(reply: str, events: str) -> None:
    for request in requests("talk", "wrong"):
        text = reply.format(call=f"{request.tool}()")
        assert kinds(answer(request, text)) == events.split()


@pytest.mark.parametrize(
    ("reply", "events"),
    [
        ("Sure! {call}", ""),
        ("Sure!{call}", ""),
        ("{call}", "talk_mirror"),
        ("Of course! {call}", "extra_text"),
        ("Sure! {call} Have a nice day.", "extra_text"),
        ("Sure! I will. {call}", "extra_text"),
        ("lamp()", "wrong_call talk_mirror"),
    ],
)
def test_text_around_a_call_where_small_talk_is_wanted(reply: str, events: str) -> None:
    for request in requests("talk", "right"):
        text = reply.format(call=f"{request.tool}()")
        assert kinds(answer(request, text)) == events.split()


def test_small_talk_before_any_other_request_is_extra_text() -> None:
    plan = make_plan(config(), 3)
    for request in plan.requests:
        if request.fault != "talk":
            observation = answer(request, SURE + right_reply(request))
            assert kinds(observation) == ["extra_text"]


def test_quotes_and_spaces_of_a_call_are_free() -> None:
    (request, *_) = requests("desk", "wrong")
    name, desk = request.arguments["name"], request.arguments["desk"]
    assert kinds(answer(request, f"call(desk='{desk}',name='{name}')")) == []


@settings(max_examples=60, deadline=None)
@given(numbers, st.text(max_size=40))
def test_whatever_is_said_events_are_of_known_kinds_with_known_details(
    number: int, reply: str
) -> None:
    episode = SwitchboardEpisode(make_plan(config(turns=8), number), config(turns=8))
    for text in (reply, f"Sure! {reply}", f"book(date={reply!r})"):
        for event in episode.step(text).events:
            assert event.kind in EVENT_KINDS and set(event.details) <= EVENT_DETAILS
            assert event.detail("correct")


def test_events_tell_what_hints_and_corrections_say() -> None:
    slots = {"date": "date", "desk": "desk", "confirm": "confirm", "talk": "opening"}
    for fault, slot in slots.items():
        for request in requests(fault, "wrong"):
            (event,) = answer(request, habitual_reply(request)).events
            assert event.detail("correct") == right_reply(request)
            assert event.detail("request") == request.text
            right = "the call" if fault == "talk" else request.arguments[slot]
            assert event.detail(slot) == right
            assert kinds(answer(request, event.detail("correct"))) == []


# ── grades ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("reward", "score"), [("share", 31 / 32), ("all", 0.0)])
def test_one_unsolved_request(reward: str, score: float) -> None:
    plan = make_plan(config(), 11)
    episode = SwitchboardEpisode(plan, config(reward=reward))
    for n, request in enumerate(plan.requests):
        episode.step("lamp()" if n == 0 else right_reply(request))
    grade = episode.grade()
    assert (grade.score, grade.passed) == (pytest.approx(score), False)
    assert grade.feedback == "31 of 32 requests were solved."


def test_talk_is_in_no_grade() -> None:
    plan = make_plan(config(), 11)
    for opening in ("Sure! ", "Well, ", ""):
        episode = SwitchboardEpisode(plan, config(reward="all"))
        for request in plan.requests:
            episode.step(opening + format_call(request.tool, request.arguments, "plain"))
        assert episode.grade().score == 1.0


def test_it_is_hosted_as_other_environments_are() -> None:
    environment = make_environment(config())
    assert isinstance(environment, GuardedEnvironment)
    task = environment.task(5)
    episode = environment.start(task)
    plan = make_plan(config(), 5)
    observations = [episode.step(habitual_reply(request)) for request in plan.requests]
    assert [o.decision for o in observations] == [r.decision for r in plan.requests]


# ── demonstrations ───────────────────────────────────────────────────────────────────────────────


def demonstrated(
    board: Switchboard, number: int
) -> Iterator[tuple[Request, list[Message], Message]]:
    """Each request, the messages before its reply and the reply."""
    task = board.task(number)
    conversation = board.demonstrate(task)
    assert tuple(conversation[:2]) == task.messages
    messages = iter(conversation[1:])
    for request in board.plan(task).requests:
        before = [next(messages)]
        while (message := next(messages)).role != "assistant":
            before.append(message)
        assert before[0].content == request.text
        yield request, before, message
    assert next(messages, None) is None


def is_reminder_of(kind: str, text: str) -> bool:
    """Whether a template of that kind gives this text."""
    for template in REMINDERS[kind]:
        pieces = [literal for literal, *_ in Formatter().parse(template)]
        if text.startswith(pieces[0]) and text.endswith(pieces[-1]):
            return True
    return False


def within(count: int, total: int, fraction: float) -> bool:
    """Four standard deviations of a binomial."""
    return abs(count - fraction * total) <= 4 * math.sqrt(total * fraction * (1 - fraction)) + 1e-9


@pytest.mark.parametrize(
    ("habit", "reminder", "other"),
    [(0.97, 0.3, 0.1), (0.6, 0.3, 0.1), (0.5, 0.6, 0.3), (0, 0, 0), (1, 0, 1)],
)
def test_demonstrations_have_habits_and_reminders_as_often_as_asked(
    habit: float, reminder: float, other: float
) -> None:
    fractions = {
        "habit_fraction": habit,
        "reminder_fraction": reminder,
        "wrong_reminder_fraction": other,
    }
    board = Switchboard(config(turns=[8, 20], **fractions))
    counts: Counter[str] = Counter()
    for number in range(250):
        for request, before, reply in demonstrated(board, number):
            text = reply.content
            assert text in (right_reply(request), habitual_reply(request))
            if request.fault is None:
                assert len(before) == 1 and text == right_reply(request), "filler is never wrong"
                continue
            counts["critical"] += 1
            if len(before) == 1:
                kind = "none"
            else:
                (message,) = before[1:]
                assert message.role == "user"
                matches = [f for f in FAULTS if is_reminder_of(f, message.content)]
                assert len(matches) == 1
                kind = "heeded" if matches == [request.fault] else "other"
            counts[kind] += 1
            if kind == "heeded":
                assert text == right_reply(request)
            elif request.habit_is_wrong:
                counts[f"{kind} wrong"] += 1
                counts[f"{kind} habit"] += text == habitual_reply(request)
    assert within(counts["heeded"], counts["critical"], reminder)
    assert within(counts["other"], counts["critical"], other)
    for kind in ("none", "other"):
        assert within(counts[f"{kind} habit"], counts[f"{kind} wrong"], habit), kind


def test_reminders_tell_the_truth_and_are_no_hint_of_the_study() -> None:
    board = Switchboard(config(reminder_fraction=1.0))
    for number in range(60):
        for request, before, _ in demonstrated(board, number):
            if request.fault is None:
                continue
            text = before[1].content
            slot = {"talk": "opening"}.get(request.fault, request.fault)
            assert text in {t.format(**request.details) for t in REMINDERS[request.fault]}
            if any(t.format(**request.details) == text and "{" in t for t in
                   REMINDERS[request.fault]):  # fmt: skip
                assert request.details[slot] in text


def test_demonstrations_are_the_same_again_and_their_calls_parse() -> None:
    board = Switchboard(config(habit_fraction=0.5, reminder_fraction=0.3))
    second_board = Switchboard(config(habit_fraction=0.5, reminder_fraction=0.3))
    for number in range(20):
        conversation = board.demonstrate(board.task(number))
        assert conversation == second_board.demonstrate(second_board.task(number))
        for message in conversation:
            if message.role == "assistant":
                assert isinstance(parse_call(message.content, "plain"), ToolCall)


def test_a_reminded_call_is_token_for_token_a_hinted_turn() -> None:
    """The same conversation without its reminders, with each put in again as a hint."""
    tokenizer = tiny_tokenizer()
    template = IncrementalTemplate(
        ChatTemplate(tokenizer, name="tiny", eos_ids=[tokenizer.eos_token_id])
    )
    board = Switchboard(config(turns=10, reminder_fraction=0.4, wrong_reminder_fraction=0.2))
    num_hints = 0
    for number in range(8):
        task = board.task(number)
        whole = [task.messages[0]]
        plain = [task.messages[0]]
        hints: list[Hint] = []
        for n, (_, before, reply) in enumerate(demonstrated(board, number)):
            whole += [*before, reply]
            plain += [before[0], reply]
            hints += [
                Hint(trajectory=task.id, turn=2 * n + 1, text=message.content, source="reminder")
                for message in before[1:]
            ]
        trunk, expected = (
            trajectory_from_chat_log(
                task, [{"role": m.role, "content": m.content} for m in messages], template,
                id=task.id,
            )
            for messages in (plain, whole)
        )  # fmt: skip
        spliced = splice_hints_cumulatively(trunk, hints, template, role="user", max_tokens=400)
        assert spliced.token_ids == expected.token_ids
        num_hints += len(hints)
    assert num_hints > 10
