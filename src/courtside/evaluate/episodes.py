"""Error rates of episodes, and the drop in log-prob of what the student sampled before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from courtside.engines.base import Engine, ScoreRequest
from courtside.evaluate.intervals import mean_interval
from courtside.evaluate.untrained import measure_untrained
from courtside.report.metrics import error_by_decision
from courtside.types import Trajectory, Turn


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`error_rate`: the fraction of an episode's assistant turns with any event, averaged over
    episodes, with its 95% interval; `events/<kind>`: the same for one kind of event;
    `decisions/<kind>`: of all turns with that kind of decision, the fraction with any event;
    `environment_faults`: episodes that a bug in the environment ended, which are left out."""
    faults = {"environment_faults": sum(t.fault is not None for t in trajectories)}
    whole = [t for t in trajectories if t.fault is None]
    episodes = [[turn for turn in t.turns if turn.role == "assistant"] for t in whole]
    episodes = [turns for turns in episodes if turns]
    if not episodes:
        return {**faults}
    rate, low, high = mean_interval([_event_fraction(turns, None) for turns in episodes])
    kinds = sorted({e.kind for turns in episodes for turn in turns for e in turn.events})
    return {
        **faults,
        "turns": sum(map(len, episodes)) / len(episodes),
        "error_rate": rate,
        "error_rate/low": low,
        "error_rate/high": high,
        **{
            f"events/{kind}": sum(_event_fraction(turns, kind) for turns in episodes)
            / len(episodes)
            for kind in kinds
        },
        **{
            f"decisions/{name}": rate
            for name, rate in error_by_decision([t for turns in episodes for t in turns]).items()
        },
    }


def _event_fraction(turns: Sequence[Turn], kind: str | None) -> float:
    has_event = [any(kind in (None, event.kind) for event in turn.events) for turn in turns]
    return sum(has_event) / len(has_event)


def logp_drop(
    before: Sequence[Trajectory], engine: Engine, load_untrained: Callable[[], Engine]
) -> dict[str, float]:
    """Mean drop in log-prob, in nats per token, of tokens that the student wrote before training.

    `logp_drop/clean_turns` covers turns without an event, which training should leave alone, and
    `logp_drop/error_turns` the others; a group without turns is omitted. Over all sampled turns
    together the mean would estimate KL(before ‖ now). Each group alone does not: it is selected by
    outcome.

    Greedy decoding leaves no log-probs to compare with: the student chose each token with
    certainty. Both sides are then scored at temperature 1, and the untrained student is loaded.
    """
    answers = [t for t in before if t.num_completion_tokens]
    is_greedy = any(t.temperature == 0 for t in answers)
    if is_greedy:
        assert all(t.temperature == 0 for t in answers), "one evaluation has one temperature"
        answers = [replace(t, temperature=1.0) for t in answers]
    requests = [ScoreRequest.of_trajectory(t) for t in answers]
    if is_greedy:
        scores_before = measure_untrained(load_untrained, lambda engine: engine.score(requests))
        logps_before = [scores.logp_T.tolist() for scores in scores_before]
    else:
        logps_before = [[*(t.sampler_logp or ())] for t in answers]
    drops: dict[str, list[float]] = {"logp_drop/clean_turns": [], "logp_drop/error_turns": []}
    for trajectory, logp_before_T, scores in zip(
        answers, logps_before, engine.score(requests), strict=True
    ):
        for turn, logp_before, logp_now in zip(
            trajectory.turn_of, logp_before_T, scores.logp_T.tolist(), strict=True
        ):
            group = "error_turns" if trajectory.turns[turn].events else "clean_turns"
            drops[f"logp_drop/{group}"].append(logp_before - logp_now)
    return {name: sum(values) / len(values) for name, values in drops.items() if values}
