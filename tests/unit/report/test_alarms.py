from __future__ import annotations

from collections.abc import Sequence

import pytest

from courtside.report.alarms import (
    UNHEEDED_HINTS,
    RunAlarms,
    check_few_repairs,
    check_harmful_hints,
    check_nothing_trained,
    check_unheeded_hints,
)
from courtside.report.console import RunConsole
from courtside.types import Hint, HintOutcome


def test_a_run_that_trained_something_has_no_alarm() -> None:
    assert check_nothing_trained([{"tokens/divergence": 0}, {"tokens/divergence": 3}]) is None


def test_one_that_trained_nothing_says_what_became_of_the_hints() -> None:
    rows = [
        {"hints/trained": 0, "hints/dropped/harmful": 1, "reader/accepted": 0,
         "reader/dropped/no_other_hint": n, "tokens/kl": 0}
        for n in (2, 5)
    ]  # fmt: skip
    message = check_nothing_trained(rows)
    assert message is not None and "none of the 2 steps trained a single token" in message
    assert "dropped/no_other_hint 7" in message and "accepted" not in message
    assert "hints/dropped/harmful 2" in message


def test_without_a_reader_it_points_to_the_losses() -> None:
    assert "see `on` of the losses" in (check_nothing_trained([{"step": 0}]) or "")


@pytest.mark.parametrize(("num_tokens", "what"), [(0, "a single token"), (9, "had a gradient")])
def test_equal_rewards_are_the_reason_where_those_of_all_prompts_are(
    num_tokens: int, what: str
) -> None:
    row = {"tokens/policy_gradient": num_tokens, "grad_norm": 0.0,
           "reward/groups": 2, "reward/zero_variance_groups": 2}  # fmt: skip
    message = check_nothing_trained([row, row])
    assert message is not None and what in message and "of the losses" not in message
    assert "each of 4 prompts had equal rewards" in message
    varied = check_nothing_trained([row, row | {"reward/zero_variance_groups": 1}])
    assert "equal rewards" not in (varied or "")
    assert check_nothing_trained([row, row | {"tokens/kl": 5, "grad_norm": 0.1}]) is None


def test_rules_that_never_fired_are_told_with_the_events_that_occurred() -> None:
    rows = [{"hints/trained": 0, "tokens/kl": 0, "events/no_call": 0.5, "events/bad": 0.1}]
    message = check_nothing_trained(rows)
    assert message is not None and "The reader proposed no hint in any step" in message
    assert "events of kind bad, no_call, and no rule detects one of them" in message
    quiet = check_nothing_trained([{"hints/trained": 0, "tokens/kl": 0}])
    assert quiet is not None and "no event was reported and no text matched" in quiet


def outcome(shift: float | None, reason: str | None = None) -> HintOutcome:
    hint = Hint(trajectory="a", turn=1, text="Look.", source="human")
    return HintOutcome(hint=hint, shift=shift, drop_reason=reason)


def test_hints_that_teach_the_mistake_are_an_alarm() -> None:
    dropped = [outcome(shift, "harmful") for shift in (-0.7, -4.5, -2.0)]
    message = check_harmful_hints(dropped)
    assert message is not None
    assert message.startswith("3 of 3 hints make their turn more likely (mean shift -2.40 nats)")
    assert "and did not train" in message
    trained = check_harmful_hints([outcome(-1.0), outcome(2.0), outcome(None, "merge")])
    assert trained is not None and "1 of 2 hints make their turn more likely" in trained
    assert "1 of these trained, as hints.harmful = 'train' says" in trained


def test_a_few_harmful_hints_among_many_are_none() -> None:
    assert check_harmful_hints([]) is None
    assert check_harmful_hints([outcome(None, "merge")]) is None
    assert check_harmful_hints([outcome(-1.0, "harmful"), outcome(1.0), outcome(1.0)]) is None


def rows_with_shifts(shifts: Sequence[float | None]) -> list[dict[str, float | None]]:
    return [{"step": step, "hints/shift": shift} for step, shift in enumerate(shifts)]


TURNED_OVER = [6.20, 9.17, 8.47, 6.80, 5.85, 5.52, 2.07, 2.04, 0.78, 0.43, 0.13]
"""Of a run whose live teacher stopped heeding its hints at steps 7 to 9."""
TO_AND_FRO = [6.41, 7.56, 5.69, 7.03, 6.32, 4.66, 2.54, 4.44, 0.64, 0.96, 0.66, 0.45, 1.41, 2.67]
"""Of one that came back."""


def test_a_teacher_that_no_longer_heeds_its_hints_is_an_alarm() -> None:
    message = check_unheeded_hints(rows_with_shifts(TURNED_OVER))
    assert message is not None and "by +0.45 nats now, where it was +7.95" in message
    assert "weights = 'live'" in message and "'frozen'" in message
    assert check_unheeded_hints(rows_with_shifts(TURNED_OVER[:-1])) is None, "not yet"


@pytest.mark.parametrize(
    "shifts",
    [
        TO_AND_FRO,
        [6.0, 6.0, 6.0, 0.1, 0.1],
        [6.0, None, 0.1, None, 0.1, 0.1],
        [0.5, 0.4, 0.6, 0.0, 0.0, 0.0],
        [4.1, 4.6, 4.6, None, 5.7, 4.4, 5.7],
    ],
    ids=["it comes back", "too few", "steps without hints", "never heeded", "heeded"],
)
def test_other_shifts_are_none(shifts: list[float | None]) -> None:
    for length in range(len(shifts) + 1):
        assert check_unheeded_hints(rows_with_shifts(shifts[:length])) is None


class FolderInMemory:
    def __init__(self, rows: list[dict[str, float | None]]) -> None:
        self.rows, self.recorded = rows, list[dict[str, object]]()

    def metrics(self) -> list[dict[str, float | None]]:
        return self.rows

    def alarms(self) -> list[dict[str, object]]:
        return self.recorded

    def record_alarm(self, alarm: dict[str, object]) -> None:
        self.recorded.append(alarm)


class Lines(RunConsole):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


def test_the_alarm_comes_again_after_some_steps_and_not_in_each() -> None:
    folder, console = FolderInMemory(rows_with_shifts(TURNED_OVER)), Lines()
    alarms = RunAlarms(folder, console)  # type: ignore[arg-type]
    for step in range(10, 31):
        alarms.check_shifts(step)
    assert [alarm["step"] for alarm in folder.recorded] == [10, 20, 30]
    assert {alarm["kind"] for alarm in folder.recorded} == {UNHEEDED_HINTS}
    assert console.lines[0].startswith("step 11: hints move their turns by +0.45 nats now")


def rewrite_row(requests: int, repairs: int) -> dict[str, int]:
    return {
        "drafts/rewrite/requests": requests,
        "drafts/rewrite/repairs": repairs,
        "drafts/rewrite/dropped/no_better": requests - repairs,
    }


def test_questions_that_give_hardly_any_repair_are_an_alarm() -> None:
    message = check_few_repairs([rewrite_row(84, 50), rewrite_row(40, 2), rewrite_row(40, 1)])
    assert message is not None  # the first step is not among the last 64 questions
    assert message.startswith("3 of the last 80 questions for a repair gave one that is used")
    assert "no_better 77" in message and "drafts.prompt" in message


@pytest.mark.parametrize(
    "rows",
    [[], [rewrite_row(63, 0)], [rewrite_row(40, 4), rewrite_row(40, 4)], [{"loss": 1.0}] * 9],
)
def test_enough_repairs_or_few_questions_are_none(rows: list[dict[str, int]]) -> None:
    assert check_few_repairs(rows) is None
