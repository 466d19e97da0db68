"""What the leader tells the other ranks to do, and what they tell it of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from courtside.drafts.base import DraftOutcome, add_usage
from courtside.types import Split, TokenUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write a rank's shards of a checkpoint."""

    folder: Path
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    policies: tuple[str, ...]
    split: Split
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    stopped_by: int | None
    """The number of the signal that stopped the run."""
    has_failed: bool


Command = Step | Save | Evaluate | End


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """What one rank counted in a step; trajectories and metrics are gathered in the update."""

    reader_counts: Mapping[str, int]
    draft_counts: Mapping[str, int]
    draft_usage: Mapping[str, TokenUsage]
    interrupted_by: int | None
    """The number of a signal that asked this rank to stop."""


def add_rank_steps(steps: Sequence[RankStep]) -> tuple[dict[str, int], DraftOutcome]:
    """Counts of the reader and of the draft stages, over all ranks."""
    reader: Counter[str] = Counter()
    drafts: Counter[str] = Counter()
    usage: dict[str, TokenUsage] = {}
    for step in steps:
        reader.update(step.reader_counts)
        drafts.update(step.draft_counts)
        usage = add_usage(usage, step.draft_usage)
    return dict(reader), DraftOutcome(trajectories=(), counts=dict(drafts), usage=usage)
