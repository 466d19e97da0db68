"""Errors and drift of episodes, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from courtside.engines.base import ScoreRequest
from courtside.evaluate.episodes import episode_metrics, logp_drop
from courtside.types import Event, Message, Task, Trajectory, Turn

TASK = Task(id="t", split="test", messages=(Message(role="user", content="Go."),))


def said(logps: Sequence[float], *kinds: str) -> Turn:
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
        self.asked: list[ScoreRequest] = []

    def score(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        self.asked += requests
        counts = [sum(request.scored or ()) for request in requests]
        return [SimpleNamespace(logp_T=-torch.arange(1.0, 1.0 + n)) for n in counts]


def test_drift_is_before_less_now_apart_by_whether_the_turn_was_right() -> None:
    """Log-probs before are −0.5 where the turn was right, −9 where it was wrong."""
    episode = played(said([-0.5, -0.5]), said([-9.0], "tool_not_found"), said([-0.5]))
    silent = played()
    engine: Any = Now()
    found = logp_drop([episode, silent, played(said([-0.5]))], engine)
    # Right ones are tokens 1, 2 and 4 of the first episode and 1 of the last, now −1, −2, −4, −1.
    assert found == {
        "logp_drop/clean_turns": pytest.approx((0.5 + 1.5 + 3.5 + 0.5) / 4),
        "logp_drop/error_turns": pytest.approx(-9.0 + 3.0),
    }
    assert [request.token_ids for request in engine.asked] == [(1, 2, 7, 7, 7, 7), (1, 2, 7)]
    assert {request.temperature for request in engine.asked} == {0.5}


def test_a_kind_of_turn_that_did_not_occur_has_no_drift() -> None:
    engine: Any = Now()
    assert logp_drop([played(said([-0.5]))], engine).keys() == {"logp_drop/clean_turns"}
    assert logp_drop([], engine) == {}


def test_errors_are_shares_of_an_episodes_turns() -> None:
    """An episode counts as much as any other, whatever its length; a turn once."""
    long = played(said([-1.0], "no_call", "no_call"), said([-1.0], "tool_error"), said([-1.0]),
                  said([-1.0]))  # fmt: skip
    found = episode_metrics([long, played(said([-1.0])), played()])
    assert found["turns"] == 2.5
    assert found["error_rate"] == pytest.approx((0.5 + 0.0) / 2)
    assert found["events/no_call"] == found["events/tool_error"] == pytest.approx(0.125)
    assert found["error_rate/low"] <= found["error_rate"] <= found["error_rate/high"]
    assert episode_metrics([played()]) == {}
