"""The protocol of draft stages: a step's trajectories in, the same with corrections out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from courtside.types import TokenUsage, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutcome:
    """What a stage made of a batch.

    Every draft or group that a stage took up is either in the trajectories, marked or with its
    correction, or counted under `dropped/` with the reason.
    """

    trajectories: Sequence[Trajectory]
    """All that came in, some of them marked, and those that were added; sorted by id."""
    counts: Mapping[str, int] = field(default_factory=dict)
    usage: Mapping[str, TokenUsage] = field(default_factory=dict)
    """By the name of the model that scored or wrote."""


DraftStage = Callable[[Sequence[Trajectory]], DraftOutcome]


def keep_drafts(trajectories: Sequence[Trajectory]) -> DraftOutcome:
    """The stage of a recipe without `drafts`."""
    return DraftOutcome(trajectories=trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStages:
    """Stages in the recipe's order: each sees what the ones before it marked and added."""

    stages: Mapping[str, DraftStage]
    """By kind, which begins the names of its counts."""
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around all stages, which may ask a teacher whose weights are in shards over the ranks."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> DraftOutcome:
        with self.together():
            return self._run(trajectories)

    def _run(self, trajectories: Sequence[Trajectory]) -> DraftOutcome:
        counts: Counter[str] = Counter()
        usage: dict[str, TokenUsage] = {}
        for kind, stage in self.stages.items():
            outcome = stage(trajectories)
            trajectories = outcome.trajectories
            counts.update({f"{kind}/{name}": n for name, n in outcome.counts.items()})
            usage = add_usage(usage, outcome.usage)
        assert len({t.id for t in trajectories}) == len(trajectories), "ids name trajectories"
        return DraftOutcome(trajectories=trajectories, counts=dict(sorted(counts.items())),
                            usage=usage)  # fmt: skip


def add_usage(
    first: Mapping[str, TokenUsage], second: Mapping[str, TokenUsage]
) -> dict[str, TokenUsage]:
    total = dict(first)
    for name, usage in second.items():
        before = total.get(name, TokenUsage())
        total[name] = TokenUsage(
            before.input_tokens + usage.input_tokens, before.output_tokens + usage.output_tokens
        )
    return total


def is_draft(trajectory: Trajectory) -> bool:
    """Whether the student sampled it in this step, and nothing but the student ended it."""
    return (
        trajectory.source == "student"
        and trajectory.fault is None
        and trajectory.correction != "rewrite"
        and trajectory.num_completion_tokens > 0
    )
