from __future__ import annotations

from courtside.report.alarms import check_harmful_hints, check_nothing_trained
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
