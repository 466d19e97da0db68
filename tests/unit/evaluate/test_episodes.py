"""Errors and drift of episodes, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.float64 import in_float64
from support.tiny_model import tiny_model, tiny_tokenizer

from courtside.engines.base import ScoreRequest
from courtside.engines.local import LocalEngine
from courtside.evaluate.episodes import episode_metrics, logp_drop
from courtside.report.metrics import event_metrics
from courtside.types import Event, Message, Task, Trajectory, Turn

TASK = Task(id="t", split="test", messages=(Message(role="user", content="Go."),))


def make_turn(logps: Sequence[float], *kinds: str) -> Turn:
    size = len(logps)
    return Turn(
        role="assistant", text="x", token_ids=(7,) * size, completion_mask=(True,) * size,
        sampler_logp=tuple(logps), events=tuple(Event(kind=kind) for kind in kinds),
    )  # fmt: skip


def played(*turns: Turn) -> Trajectory:
    prompt = Turn(role="prompt", text="", token_ids=(1, 2), completion_mask=(False, False))
    return Trajectory(
        id="e", task=TASK, turns=(prompt, *turns), source="student", policy_version=0,
        temperature=0.5, stop="eos",
    )  # fmt: skip


class Now:
    """An engine that gives the i-th scored token of a trajectory the log-prob −i."""

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []

    def score(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        self.requests += requests
        counts = [sum(request.scored or ()) for request in requests]
        return [SimpleNamespace(logp_T=-torch.arange(1.0, 1.0 + n)) for n in counts]


def no_model() -> Any:
    raise AssertionError("what was sampled has its log-probs: no untrained student is needed")


def test_drift_is_before_less_now_apart_by_whether_the_turn_was_right() -> None:
    """Log-probs before are −0.5 where the turn was right, −9 where it was wrong."""
    episode = played(
        make_turn([-0.5, -0.5]), make_turn([-9.0], "tool_not_found"), make_turn([-0.5])
    )
    silent = played()
    engine: Any = Now()
    drops = logp_drop([episode, silent, played(make_turn([-0.5]))], engine, no_model)
    # Right ones are tokens 1, 2 and 4 of the first episode and 1 of the last, now −1, −2, −4, −1.
    assert drops == {
        "logp_drop/clean_turns": pytest.approx((0.5 + 1.5 + 3.5 + 0.5) / 4),
        "logp_drop/error_turns": pytest.approx(-9.0 + 3.0),
    }
    assert [request.token_ids for request in engine.requests] == [(1, 2, 7, 7, 7, 7), (1, 2, 7)]
    assert {request.temperature for request in engine.requests} == {0.5}


def test_greedy_turns_are_compared_at_temperature_1() -> None:
    """With both students in float64, token by token: greedy decoding itself has no log-probs."""
    untrained, trained = tiny_model(), tiny_model(seed=1)
    prompt = Turn(role="prompt", text="", token_ids=(5, 6), completion_mask=(False, False))
    right, wrong = (replace(make_turn([0.0] * n, *kinds), token_ids=ids) for n, kinds, ids in
                    ((2, (), (7, 9)), (1, ("tool_error",), (30,))))  # fmt: skip
    episode = replace(played(right, wrong), turns=(prompt, right, wrong), temperature=0.0)
    trained_engine, untrained_engine = (
        LocalEngine(model, tiny_tokenizer(), name="tiny") for model in (trained, untrained)
    )
    drops = logp_drop([episode], trained_engine, lambda: untrained_engine)
    before, now = (
        in_float64(model)(torch.tensor([episode.token_ids])).logits[0].log_softmax(-1).detach()
        for model in (untrained, trained)
    )
    falls = [float((before - now)[i - 1, episode.token_ids[i]]) for i in (2, 3, 4)]
    assert drops == {
        "logp_drop/clean_turns": pytest.approx((falls[0] + falls[1]) / 2, abs=1e-5),
        "logp_drop/error_turns": pytest.approx(falls[2], abs=1e-5),
    }
    assert min(map(abs, falls)) > 0.01, "else nothing would be compared"


def test_a_kind_of_turn_that_did_not_occur_has_no_drift() -> None:
    engine: Any = Now()
    drops = logp_drop([played(make_turn([-0.5]))], engine, no_model)
    assert drops.keys() == {"logp_drop/clean_turns"}
    assert logp_drop([], engine, no_model) == {}


def test_errors_are_shares_of_an_episodes_turns() -> None:
    """An episode counts as much as any other, whatever its length; a turn once."""
    long = played(
        make_turn([-1.0], "no_call", "no_call"),
        make_turn([-1.0], "tool_error"),
        *(make_turn([-1.0]) for _ in range(2)),
    )
    metrics = episode_metrics([long, played(make_turn([-1.0])), played()])
    assert metrics["turns"] == 2.5
    assert metrics["error_rate"] == pytest.approx((0.5 + 0.0) / 2)
    assert metrics["events/no_call"] == metrics["events/tool_error"] == pytest.approx(0.125)
    assert metrics["error_rate/low"] <= metrics["error_rate"] <= metrics["error_rate/high"]
    assert metrics["environment_faults"] == 0
    assert episode_metrics([played()]) == {"environment_faults": 0}
    broken = replace(played(), stop="fault", fault="step(reply) raised KeyError")
    assert episode_metrics([broken, long])["environment_faults"] == 1


def test_a_last_observation_that_nobody_answers_is_not_scored() -> None:
    """It may make the episode longer than the context."""
    unanswered = Turn(role="environment", text="", token_ids=(3,) * 9, completion_mask=(False,) * 9)
    engine: Any = Now()
    logp_drop([played(make_turn([-0.5]), unanswered)], engine, no_model)
    assert [request.token_ids for request in engine.requests] == [(1, 2, 7)]
    assert [request.scored for request in engine.requests] == [(False, False, True)]


def test_decisions_have_an_error_rate_each_over_all_turns_that_made_them() -> None:
    """Whatever episode they are in; turns without a decision are in none of them."""
    date = partial(replace, decision="date/habit_wrong")
    episodes = [
        played(date(make_turn([-1.0], "date")), date(make_turn([-1.0])), make_turn([-1.0], "x")),
        played(date(make_turn([-1.0], "wrong_call", "talk"))),
        played(replace(make_turn([-1.0]), decision="filler")),
        replace(played(date(make_turn([-1.0], "date"))), stop="fault", fault="raised"),
    ]
    metrics = episode_metrics(episodes)
    decisions = {name: value for name, value in metrics.items() if name.startswith("decisions/")}
    assert decisions == {
        "decisions/date/habit_wrong": pytest.approx(2 / 3),
        "decisions/filler": 0.0,
    }
    row = event_metrics(episodes[:3])
    assert {name: row[name] for name in decisions} == decisions, "a step counts as they do"


def test_environments_without_decisions_have_no_such_metric() -> None:
    metrics = episode_metrics([played(make_turn([-1.0], "bad"))])
    assert not any(name.startswith("decisions/") for name in metrics)
