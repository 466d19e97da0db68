"""The columns of a step with episodes and hints."""

import math
from dataclasses import replace

import pytest
from unit.report.made_up import make_batch, make_update
from unit.report.played import hinted, make_episode, make_hinted_batch, make_hinted_update

from courtside.report.folder.folder import RunFolder
from courtside.report.metrics import compute_metrics, event_metrics, hint_metrics
from courtside.report.page.curves import metric_figures
from courtside.types import Event

NEW = ("turns", "error_rate", "events/", "hints/", "reader/")


def new_columns(row):
    return {key: value for key, value in row.items() if key.startswith(NEW)}


def test_answers_of_one_turn_have_none_of_these_columns():
    batch = make_batch(0)
    assert new_columns(compute_metrics(batch, make_update(0, batch), {})) == {}


def test_shares_are_of_assistant_turns():
    # Five turns with one error, seven with three: 4 of 12.
    first, other = make_episode("0-0", wrong=(1,)), make_episode("0-1", wrong=(0, 1, 2))
    assert event_metrics([first, other]) == {
        "turns": 6.0,
        "error_rate": 4 / 12,
        "events/tool_not_found": 4 / 12,
    }


def test_a_turn_with_several_events_is_one_turn():
    episode = make_episode("0-0", wrong=(0,), num=1)
    event = Event(kind="repeated_call")
    first = replace(episode.turns[1], events=(*episode.turns[1].events, event, event))
    both = replace(episode, turns=(episode.turns[0], first, *episode.turns[2:]))
    assert event_metrics([both]) == {
        "turns": 2.0,
        "error_rate": 0.5,
        "events/repeated_call": 0.5,
        "events/tool_not_found": 0.5,
    }


def test_an_episode_of_one_turn_counts_once_something_was_wrong_with_it():
    clean = make_episode("0-0", wrong=(), num=1)
    assert event_metrics([clean]) == {}
    wrong = replace(
        clean, turns=(clean.turns[0], replace(clean.turns[1], events=(Event(kind="no_call"),)))
    )
    assert event_metrics([clean, wrong]) == {"turns": 1.0, "error_rate": 0.5, "events/no_call": 0.5}


def test_demonstrations_do_not_dilute_the_students_errors():
    sampled, demonstrated = make_episode("0-0", wrong=(0,), num=1), make_episode("0-1", wrong=())
    demonstration = replace(demonstrated, source="dataset")
    assert event_metrics([sampled, demonstration]) == event_metrics([sampled])
    assert event_metrics([demonstration]) == {}


def test_hints_are_counted_by_what_became_of_them():
    batch = make_hinted_batch(0)
    row = hint_metrics([hint_outcomes for s in batch for hint_outcomes in s.hints])
    shifts = [j.shift for s in batch for j in s.hints if j.shift is not None]
    assert row == {
        "hints/trained": 4,
        "hints/dropped/merge": 1,
        "hints/dropped/shift": 1,
        "hints/harmful": 0,
        "hints/shift": pytest.approx(sum(shifts) / 5),
    }


def test_harmful_hints_are_counted_whether_they_train_or_not():
    [outcome] = hinted(make_episode("0-0")).hints
    outcomes = [
        replace(outcome, shift=-2.0),
        replace(outcome, shift=-1.0, drop_reason="harmful"),
        replace(outcome, shift=-0.5, drop_reason="shift"),
        replace(outcome, shift=1.5),
        replace(outcome, shift=None, drop_reason="merge"),
    ]
    assert hint_metrics(outcomes) == {
        "hints/trained": 2,
        "hints/dropped/harmful": 1,
        "hints/dropped/merge": 1,
        "hints/dropped/shift": 1,
        "hints/harmful": 3,
        "hints/shift": -0.5,
    }


def test_a_shift_that_was_never_measured_is_not_zero():
    [outcome] = hinted(make_episode("0-0")).hints
    assert hint_metrics([replace(outcome, shift=None)]) == {"hints/trained": 1}
    row = hint_metrics([replace(outcome, shift=None), replace(outcome, shift=2.0)])
    assert row == {"hints/trained": 2, "hints/harmful": 0, "hints/shift": 2.0}


def test_a_row_of_a_run_with_a_reader(tmp_path, recipe):
    with RunFolder.open(tmp_path / "run", recipe()) as folder:
        batch, counts = make_hinted_batch(0), {"rules/tool_not_found": 6, "dropped/budget": 0}
        row = folder.record(
            0,
            batch,
            make_hinted_update(0, batch),
            seconds={},
            store_trajectories=False,
            reader_counts=counts,
        )
        nothing = [s for s in make_hinted_batch(1) if not s.hints]
        quiet = folder.record(
            1,
            nothing,
            make_hinted_update(1, nothing),
            seconds={},
            store_trajectories=False,
            reader_counts={},
        )
        assert folder.metrics() == [row, quiet]
    assert row["reader/rules/tool_not_found"] == 6 and row["reader/dropped/budget"] == 0
    assert row["hints/trained"] == 4 and row["error_rate"] == pytest.approx(6 / 30)
    # A reader that found nothing is told from no reader.
    assert new_columns(quiet) == {"turns": 4.0, "error_rate": 0.0, "hints/trained": 0}


def test_a_shift_that_is_not_finite_is_null(tmp_path, recipe):
    s = hinted(make_episode("0-0"))
    s = replace(s, hints=(replace(s.hints[0], shift=math.inf),))
    with RunFolder.open(tmp_path / "run", recipe()) as folder:
        update = make_hinted_update(0, [s])
        row = folder.record(0, [s], update, seconds={}, store_trajectories=True)
        assert row["hints/shift"] is None
        assert folder.trajectories(0)[0].hints[0].shift == math.inf


def test_a_kind_that_did_not_occur_in_a_step_is_plotted_as_zero():
    rows = [
        {"step": 0, "error_rate": 0.5, "events/no_call": 0.5, "hints/trained": 2},
        {"step": 1, "error_rate": 0.0, "hints/trained": 0, "hints/dropped/shift": 3},
        {"step": 2, "loss": 1.0},  # nobody looked
    ]
    figures = {
        title: next(f for f in metric_figures(rows)[0] if title in f)
        for title in ("Errors in training", "<b>Hints</b>")
    }
    assert "no call at 0: 0.5" in figures["Errors in training"]
    assert "no call at 1: 0" in figures["Errors in training"]
    assert "at 2:" not in figures["Errors in training"]
    assert "dropped: shift at 0: 0" in figures["<b>Hints</b>"]
    assert "dropped: shift at 1: 3" in figures["<b>Hints</b>"]
