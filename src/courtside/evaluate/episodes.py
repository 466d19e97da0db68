"""What went wrong in episodes, as shares of the student's turns."""

from __future__ import annotations

from collections.abc import Sequence

from courtside.engines.base import Engine, ScoreRequest
from courtside.evaluate.intervals import mean_interval
from courtside.types import Trajectory, Turn


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`errors`: the share of an episode's turns with any event, its mean over episodes and the 95%
    interval of that; `events/<kind>`: the same of one kind."""
    own = [[turn for turn in t.turns if turn.role == "assistant"] for t in trajectories]
    own = [turns for turns in own if turns]
    if not own:
        return {}
    rate, low, high = mean_interval([_share(turns, None) for turns in own])
    kinds = sorted({e.kind for turns in own for turn in turns for e in turn.events})
    return {
        "turns": sum(map(len, own)) / len(own),
        "errors": rate,
        "errors/low": low,
        "errors/high": high,
        **{
            f"events/{kind}": sum(_share(turns, kind) for turns in own) / len(own) for kind in kinds
        },
    }


def _share(turns: Sequence[Turn], kind: str | None) -> float:
    hit = [any(kind in (None, event.kind) for event in turn.events) for turn in turns]
    return sum(hit) / len(hit)


def drift(before: Sequence[Trajectory], engine: Engine) -> dict[str, float]:
    """KL(before ‖ now) per token, on what the student wrote before training: `drift` of the turns
    that were right, which nothing should have moved, and `drift/wrong` of the others.

    An estimate from the log-probs of that time. A kind of turn that did not occur is left out.
    """
    requests = [
        ScoreRequest(token_ids=t.token_ids, scored=t.chosen, temperature=t.temperature)
        for t in before
        if t.num_chosen
    ]
    gaps: dict[str, list[float]] = {"drift": [], "drift/wrong": []}
    written = (t for t in before if t.num_chosen)
    for trajectory, now in zip(written, engine.score(requests), strict=True):
        assert trajectory.sampler_logp is not None, "the student wrote it"
        for turn, then, logp in zip(
            trajectory.turn_of, trajectory.sampler_logp, now.logp_T.tolist(), strict=True
        ):
            wrong = bool(trajectory.turns[turn].events)
            gaps["drift/wrong" if wrong else "drift"].append(then - logp)
    return {name: sum(values) / len(values) for name, values in gaps.items() if values}
