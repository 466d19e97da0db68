"""Plans of the switchboard: what follows from a number, and that held-out sets are balanced."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from courtside.environments.switchboard.environment import Switchboard
from courtside.environments.switchboard.plan import (
    FAULTS,
    MAX_MENTION_DISTANCE,
    NUM_CRITICAL,
    NUM_STRATA,
    Plan,
    make_plan,
    split_of_number,
    stratum_of,
)
from courtside.environments.switchboard.wording import (
    FILLERS,
    FRIENDLY,
    HABITUAL_DESK,
    HELD_OUT_DESKS,
    HELD_OUT_FORMATS,
    ISO,
    NO_SMALL_TALK,
    TRAINING_DESKS,
    TRAINING_FORMATS,
)
from courtside.errors import TaskError
from courtside.recipe.tasks import SwitchboardTasks
from courtside.tasks.loading import make_task_source
from courtside.types import Split

numbers = st.integers(0, Switchboard.size - 1)


def config(**changes: Any) -> SwitchboardTasks:
    return SwitchboardTasks.model_validate({"kind": "switchboard", **changes})


def first_numbers(split: Split, count: int) -> list[int]:
    return [n for n in range(100 * count) if split_of_number(n) == split][:count]


def notes_of(plan: Plan) -> tuple[str, str, str]:
    """Manner, date format and desk."""
    manner, _, book, call = plan.system.split("\n")
    return manner, book.removeprefix("book: date "), call.removeprefix("call: desk ")


# ── one plan ─────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150, deadline=None)
@given(numbers, st.sampled_from([8, 32, 128, (8, 48)]), st.sampled_from(["seen", "held_out"]))
def test_a_plan_follows_from_its_number_and_has_six_critical_requests(
    number: int, turns: Any, cues: str
) -> None:
    settings_of_tasks = config(turns=turns, cues=cues)
    plan = make_plan(settings_of_tasks, number)
    assert plan == make_plan(config(turns=turns, cues=cues), number)
    least, most = settings_of_tasks.turn_range
    assert least <= len(plan.requests) <= most
    faults = Counter(request.fault for request in plan.requests)
    assert sum(faults[fault] for fault in FAULTS) == NUM_CRITICAL
    assert all(faults[fault] in (1, 2) for fault in FAULTS), "each kind is in every episode"
    assert not any(request.fault for request in plan.requests[:2])
    for request in plan.requests:
        if request.fault is None:
            text = request.text.rpartition("important. ")[2]
            assert (request.tool, request.arguments) == FILLERS[text]
            assert request.arguments == request.habitual_arguments and not request.opening
            assert request.decision == "filler" and not request.habit_is_wrong


@settings(max_examples=150, deadline=None)
@given(numbers)
def test_every_fault_has_its_cue_in_the_context_and_is_right_without_it(number: int) -> None:
    plan = make_plan(config(), number)
    manner, date_format, desk = notes_of(plan)
    earlier_texts: list[str] = []
    for place, request in enumerate(plan.requests):
        match request.fault:
            case "date":
                assert request.habit_is_wrong == (date_format != ISO)
                digits = sorted(re.findall(r"\d+", request.arguments["date"]))
                assert digits == sorted(re.findall(r"\d+", request.habitual_arguments["date"]))
                separator = re.sub(r"\d", "", request.arguments["date"])
                assert separator == re.sub("[YMD]", "", date_format)
            case "desk":
                assert request.habit_is_wrong == (desk != HABITUAL_DESK)
                assert request.arguments["desk"] == desk
            case "talk":
                assert request.habit_is_wrong == (manner == NO_SMALL_TALK)
                assert manner in (NO_SMALL_TALK, FRIENDLY)
                assert request.opening == ("" if request.habit_is_wrong else "Sure! ")
            case "confirm":
                mention = f"My {request.arguments['title']} note is important."
                places = [n for n, text in enumerate(earlier_texts) if text.startswith(mention)]
                assert len(places) == request.habit_is_wrong
                assert all(
                    place - n <= MAX_MENTION_DISTANCE or place - n <= NUM_CRITICAL for n in places
                )
                assert request.arguments["confirm"] == ("yes" if places else "no")
        is_habit_right = request.arguments == request.habitual_arguments
        is_habit_right &= request.opening == request.habitual_opening
        assert is_habit_right == (not request.habit_is_wrong)
        earlier_texts.append(request.text)


def test_seen_and_held_out_cues_are_apart() -> None:
    assert not {*TRAINING_FORMATS, ISO} & set(HELD_OUT_FORMATS)
    assert not {*TRAINING_DESKS, HABITUAL_DESK} & set(HELD_OUT_DESKS)
    sixteen = {HABITUAL_DESK, *TRAINING_DESKS, *HELD_OUT_DESKS}
    assert len(sixteen) == 16 and len({*TRAINING_FORMATS, *HELD_OUT_FORMATS}) == 6
    seen_notes, held_out_notes = (
        [notes_of(make_plan(config(cues=cues), number)) for number in range(400)]
        for cues in ("seen", "held_out")
    )
    assert {date_format for _, date_format, _ in seen_notes} == {*TRAINING_FORMATS, ISO}
    assert {desk for _, _, desk in seen_notes} == {*TRAINING_DESKS, HABITUAL_DESK}
    assert {date_format for _, date_format, _ in held_out_notes} == {*HELD_OUT_FORMATS, ISO}
    assert {desk for _, _, desk in held_out_notes} == {*HELD_OUT_DESKS, HABITUAL_DESK}
    assert all(
        (a == ISO) == (b == ISO)
        for (_, a, _), (_, b, _) in zip(seen_notes, held_out_notes, strict=True)
    ), "the same decisions are on the same sides"


# ── many plans ───────────────────────────────────────────────────────────────────────────────────


def test_training_episodes_have_the_cues_as_often_as_they_should() -> None:
    plans = [make_plan(config(), number) for number in first_numbers("train", 1500)]
    notes = [notes_of(plan) for plan in plans]
    for is_cue, fraction in (
        ([date_format != ISO for _, date_format, _ in notes], 0.3),
        ([desk != HABITUAL_DESK for _, _, desk in notes], 0.5),
        ([manner == NO_SMALL_TALK for manner, _, _ in notes], 0.5),
    ):
        deviation = math.sqrt(fraction * (1 - fraction) / len(plans))
        assert abs(sum(is_cue) / len(plans) - fraction) < 4 * deviation
    places = Counter(
        place for plan in plans for place, r in enumerate(plan.requests) if r.fault is not None
    )
    assert set(places) == set(range(2, 32)), "anywhere after the second"
    assert max(places.values()) < 1.5 * min(places.values())


@pytest.mark.parametrize("cues", ["seen", "held_out"])
@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("size", [NUM_STRATA, 8 * NUM_STRATA])
def test_held_out_sets_have_as_many_decisions_in_every_cell(
    cues: str, split: Split, size: int
) -> None:
    tasks = make_task_source(config(cues=cues), 3).held_out(split, size)
    board = Switchboard(config(cues=cues))
    decisions = Counter(
        request.decision
        for task in tasks
        for request in board.plan(task).requests
        if request.fault is not None
    )
    assert len(tasks) == len({task.id for task in tasks}) == size
    cells = {f"{fault}/habit_{side}" for fault in FAULTS for side in ("wrong", "right")}
    assert decisions == dict.fromkeys(cells, NUM_CRITICAL * size // 8)
    assert {task.split for task in tasks} == {split}


def test_of_two_confirmations_either_side_comes_first() -> None:
    """Else a side would be mixed up with how early the turn is."""
    first_sides = Counter()
    for number in first_numbers("test", 400):
        sides = [
            r.habit_is_wrong for r in make_plan(config(), number).requests if r.fault == "confirm"
        ]
        if len(sides) == 2:
            assert sum(sides) == 1
            first_sides[sides[0]] += 1
    deviation = math.sqrt(first_sides.total()) / 2
    assert abs(first_sides[True] - first_sides.total() / 2) < 4 * deviation


def test_strata_are_even_and_cover_every_number() -> None:
    assert Counter(map(stratum_of, range(160))) == dict.fromkeys(range(NUM_STRATA), 10)


# ── arms of a seed share tasks ───────────────────────────────────────────────────────────────────

ARM_SETTINGS: list[dict[str, Any]] = [
    {"reward": "all"},
    {"habit_fraction": 0.9},
    {"reminder_fraction": 0.3, "wrong_reminder_fraction": 0.1},
]


@pytest.mark.parametrize("changes", ARM_SETTINGS, ids=lambda changes: next(iter(changes)))
def test_settings_of_an_arm_make_no_other_tasks(changes: dict[str, Any]) -> None:
    plain, arm = (make_task_source(config(**c), 5) for c in ({}, changes))
    assert plain.batch(2, 8) == arm.batch(2, 8)
    assert plain.held_out("test", 32) == arm.held_out("test", 32)


def test_another_fraction_of_date_cues_changes_only_the_dates() -> None:
    for number in first_numbers("train", 100):
        rare, common = (
            make_plan(config(date_cue_fraction=fraction), number) for fraction in (0.0, 1.0)
        )
        assert [r.text for r in rare.requests] == [r.text for r in common.requests]
        assert notes_of(rare)[0] == notes_of(common)[0]
        assert notes_of(rare)[1] == ISO != notes_of(common)[1]


@settings(max_examples=50, deadline=None)
@given(numbers)
def test_ids_follow_the_content(number: int) -> None:
    board, longer = Switchboard(config()), Switchboard(config(turns=40))
    task = board.task(number)
    assert task == Switchboard(config()).task(number)
    assert task.id != longer.task(number).id, "another episode"
    assert task.split == board.split(number)
    assert board.plan(task).requests[0].text == task.messages[-1].content
    with pytest.raises(TaskError, match="not one of this switchboard"):
        longer.start(task)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": 7}, "greater than or equal to 8"),
        ({"turns": [20, 10]}, "the least comes first"),
        ({"reminder_fraction": 0.7, "wrong_reminder_fraction": 0.4}, "add up to at most 1"),
        ({"system_prompt": "Hi."}, "system_prompt: the notes of an episode"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)
