"""Take-over: the teacher plays on from a state that the student reached (DAgger's states).

The student's drafts are selected and each is left at a fork; the teacher continues it there, and
the task's own grade decides which continuations train.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Generic, Literal, Protocol, TypeVar

from courtside.recipe.takeover import TakeoverConfig
from courtside.rollout.continuations import Continuation, Fork
from courtside.seeds import seed_for
from courtside.types import Hint, TakeoverOutcome, Task, Trajectory


class NamedTeacher(Protocol):
    @property
    def name(self) -> str: ...


AnyTeacher = TypeVar("AnyTeacher", bound=NamedTeacher)
Continue = Callable[[AnyTeacher, Sequence[Fork]], list[Continuation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover(Generic[AnyTeacher]):
    config: TakeoverConfig
    choose_teacher: Callable[[Task], AnyTeacher]
    continue_drafts: Continue[AnyTeacher]
    has_episodes: bool
    """Whether drafts are left between turns, not between the tokens of an answer."""
    seed: int

    def __call__(
        self, trajectories: Sequence[Trajectory], hints: Sequence[Hint]
    ) -> tuple[list[Trajectory], Mapping[str, TakeoverOutcome]]:
        """What trains, and the outcome of each selected draft by its id."""
        outcomes: dict[str, TakeoverOutcome] = {}
        forks: dict[str, list[Fork]] = {}
        """By the teacher's name."""
        teachers: dict[str, AnyTeacher] = {}
        for draft in trajectories:
            if not is_selected(draft, self.config):
                continue
            fork = self._locate(clear_marks(draft), hints)
            if isinstance(fork, str):
                outcomes[draft.id] = TakeoverOutcome(turn=None, drop_reason=fork)
                continue
            teacher = self.choose_teacher(draft.task)
            teachers[teacher.name] = teacher
            forks.setdefault(teacher.name, []).append(fork)
        trained: list[Trajectory] = []
        for name, group in forks.items():
            continuations = self.continue_drafts(teachers[name], group)
            for fork, continuation in zip(group, continuations, strict=True):
                outcome = judge_takeover(fork, continuation, name, self.config)
                outcomes[fork.draft.id] = outcome
                if outcome.drop_reason is None:
                    trained += make_trajectories(fork, continuation, pair=self.config.pair)
        return trained, outcomes

    def _locate(self, draft: Trajectory, hints: Sequence[Hint]) -> Fork | str:
        """The fork, or why there is none."""
        draw = random.Random(seed_for(self.seed, "fork", draft.id))
        if self.has_episodes:
            return locate_turn(draft, self.config.at, hints, draw)
        return locate_token(draft, self.config.at, draw)


def is_selected(draft: Trajectory, config: TakeoverConfig) -> bool:
    """Only what the student sampled to its end can be taken over."""
    if draft.source != "student" or draft.is_pair_copy or draft.fault is not None:
        return False
    if config.select == "failed":
        return draft.grade is not None and not draft.grade.passed
    return config.select == "all" or any(turn.events for turn in draft.turns)


def clear_marks(draft: Trajectory) -> Trajectory:
    """The draft without what other stages noted on it, which does not hold for its take-over."""
    return replace(draft, preference=None, pair=None, critique=None, num_replaced=None, rewards={})


# ── forks ────────────────────────────────────────────────────────────────────────────────────────


def locate_turn(
    draft: Trajectory, at: str | int | float, hints: Sequence[Hint], draw: random.Random
) -> Fork | str:
    turns = [i for i, turn in enumerate(draft.turns) if turn.role == "assistant"]
    located: int | None
    if isinstance(at, int):
        if at >= len(turns):
            return "draft_ended"
        located = turns[at]
    elif at == "first_error":
        located = next((i for i in turns if draft.turns[i].events), None)
    elif at == "reader":
        located = min((hint.turn for hint in hints if hint.trajectory == draft.id), default=None)
    else:
        located = draw.choice(turns) if turns else None
    return "not_located" if located is None else Fork(draft=draft, turn=located)


def locate_token(draft: Trajectory, at: str | int | float, draw: random.Random) -> Fork | str:
    """A fork inside the answer; its end token is never part of the prefix."""
    size = len(draft.turns[1].token_ids)
    if isinstance(at, str):
        num_tokens = draw.randrange(size)
    else:
        num_tokens = at if isinstance(at, int) else int(at * size)
    if num_tokens >= size:
        return "draft_ended"
    return Fork(draft=draft, turn=1, num_tokens=num_tokens)


# ── what trains ──────────────────────────────────────────────────────────────────────────────────


def judge_takeover(
    fork: Fork, continuation: Continuation, teacher: str, config: TakeoverConfig
) -> TakeoverOutcome:
    trajectory, num_sampled = continuation.trajectory, continuation.num_sampled_tokens
    if trajectory is None:
        return TakeoverOutcome(
            turn=fork.turn,
            teacher=teacher if num_sampled else None,
            num_input_tokens=continuation.num_input_tokens,
            num_sampled_tokens=num_sampled or 0,
            num_requests=continuation.num_requests,
            drop_reason=continuation.drop_reason,
        )
    if num_sampled is None:
        num_sampled = trajectory.num_completion_tokens
    return TakeoverOutcome(
        turn=fork.turn,
        teacher=teacher,
        num_input_tokens=continuation.num_input_tokens,
        num_sampled_tokens=num_sampled,
        num_requests=continuation.num_requests,
        stop=trajectory.stop,
        grade=trajectory.grade,
        drop_reason=continuation.drop_reason or find_failure(fork.draft, trajectory, config),
    )


def find_failure(draft: Trajectory, takeover: Trajectory, config: TakeoverConfig) -> str | None:
    """Why a finished take-over does not train; None: it does."""
    if config.require == "none":
        return None
    if takeover.grade is None:
        return "not_graded"
    if config.require == "passed":
        return None if takeover.grade.passed else "not_passed"
    before = 0.0 if draft.grade is None else draft.grade.score
    return None if takeover.grade.score > before else "not_better"


def make_trajectories(fork: Fork, continuation: Continuation, *, pair: bool) -> list[Trajectory]:
    """What the teacher sampled; with `pair` also the two sides of the fork."""
    assert continuation.trajectory is not None
    draft_id = fork.draft.id
    whole = replace(
        continuation.trajectory.as_teacher(),
        id=f"{draft_id}+takeover",
        draft=draft_id,
        correction="takeover",
    )
    if not pair:
        return [whole]
    better = make_side(fork, whole, "better")
    return [whole, better, make_side(fork, fork.draft, "worse")]


def make_side(
    fork: Fork, trajectory: Trajectory, preference: Literal["better", "worse"]
) -> Trajectory:
    """The fork's turn of `trajectory` after the masked trunk; only what follows the fork trains."""
    turn = trajectory.turns[fork.turn]
    mask = (False,) * fork.num_tokens + turn.completion_mask[fork.num_tokens :]
    logp = turn.sampler_logp  # None: of a text
    if logp is not None:
        logp = (nan,) * fork.num_tokens + logp[fork.num_tokens :]
    return replace(
        trajectory,
        id=f"{fork.draft.id}+{preference}",
        turns=(*fork.trunk, replace(turn, completion_mask=mask, sampler_logp=logp)),
        preference=preference,
        pair=f"{fork.draft.id}+takeover",
        draft=fork.draft.id,
        correction="takeover",
    )
