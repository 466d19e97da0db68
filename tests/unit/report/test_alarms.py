from __future__ import annotations

from courtside.report.metrics import check_nothing_trained


def test_a_run_that_trained_something_has_no_alarm() -> None:
    assert check_nothing_trained([{"tokens/divergence": 0}, {"tokens/divergence": 3}]) is None


def test_one_that_trained_nothing_says_what_became_of_the_hints() -> None:
    rows = [
        {"reader/accepted": 0, "reader/dropped/no_other_hint": n, "tokens/kl": 0} for n in (2, 5)
    ]
    message = check_nothing_trained(rows)
    assert message is not None and "none of the 2 steps trained a single token" in message
    assert "dropped/no_other_hint 7" in message and "accepted" not in message


def test_without_a_reader_it_points_to_the_losses() -> None:
    assert "see `on` of the losses" in (check_nothing_trained([{"step": 0}]) or "")
