"""A teacher continues the student's drafts from a fork: single answers, or episodes.

What precedes the fork are the student's ids verbatim, after the teacher's own prompt; none of them
train. Only the teacher's tokens do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import nan
from typing import Protocol

from courtside.chat.template import ChatTemplate
from courtside.engines.base import Engine, SampleRequest
from courtside.environments.base import EpisodeRequest, HostedEpisode
from courtside.environments.guard import EnvironmentFault, FaultMonitor
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe.rollout import LimitsConfig, RolloutConfig
from courtside.rollout.episode_state import cut_messages
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.single_turn import make_sampling
from courtside.seeds import seed_for
from courtside.types import Grade, Sample, StopReason, Task, Trajectory, Turn


class SamplingTeacher(Protocol):
    """A teacher that can be in the student's place."""

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def weights(self) -> Callable[[], AbstractContextManager[None]]:
        """Puts the teacher's weights in place."""

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """The task's prompt with this teacher's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where a draft is left: before token `num_tokens` of an assistant turn."""

    draft: Trajectory
    turn: int
    num_tokens: int = 0

    @property
    def trunk(self) -> tuple[Turn, ...]:
        """The turns before the fork's, masked: they do not train."""
        return tuple(turn.as_context() for turn in self.draft.turns[: self.turn])

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Of the fork's turn: the student's ids that stay."""
        return self.draft.turns[self.turn].token_ids[: self.num_tokens]

    def teacher_ids(self, teacher: SamplingTeacher) -> tuple[int, ...]:
        """All that the teacher continues."""
        turns = self.draft.turns[1 : self.turn]
        earlier_ids = tuple(i for turn in turns for i in turn.token_ids)
        return teacher.prompt_ids(self.draft.task) + earlier_ids + self.prefix_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What a teacher made of a fork."""

    trajectory: Trajectory | None
    """None: it did not sample a token."""
    num_input_tokens: int = 0
    num_sampled_tokens: int | None = None
    """By the teacher's own tokenizer; None: those of the trajectory that train."""
    num_requests: int = 0
    """To a server of texts."""
    drop_reason: str | None = None
    """Why it cannot train; None: its grade decides."""


def finish_turn(fork: Fork, sample: Sample, text: str) -> Turn:
    """The student's prefix, masked, then the sampled ids, or those of a text."""
    prefix_ids = fork.prefix_ids
    is_text = not sample.logp
    return Turn(
        role="assistant",
        text=text,
        token_ids=prefix_ids + sample.token_ids,
        completion_mask=(False,) * len(prefix_ids) + (True,) * len(sample.token_ids),
        sampler_logp=None if is_text else (nan,) * len(prefix_ids) + sample.logp,
    )


# ── single answers ───────────────────────────────────────────────────────────────────────────────


@dataclass(kw_only=True)
class AnswerContinuation:
    """The teacher finishes answers, which are at most `rollout.max_new_tokens` long as a whole."""

    template: ChatTemplate
    config: RolloutConfig
    grade: Callable[[Task, str], Grade | None]
    context_length: int
    """The student's."""
    seed: int
    progress: ProgressMeter = field(default_factory=ProgressMeter)

    def __call__(self, teacher: SamplingTeacher, forks: Sequence[Fork]) -> list[Continuation]:
        """In the order of `forks`."""
        ids = [fork.teacher_ids(teacher) for fork in forks]
        context_length = min(self.context_length, teacher.engine.context_length)
        limits = {
            i: min(
                self.config.max_new_tokens - fork.num_tokens,
                context_length - max(len(ids[i]), _count_student_tokens(fork)),
            )
            for i, fork in enumerate(forks)
        }
        results = {
            i: Continuation(trajectory=None, drop_reason="too_long")
            for i, limit in limits.items()
            if limit < 1
        }
        waiting = {i: limit for i, limit in limits.items() if limit >= 1}
        self.progress.phase = PhaseProgress(
            total=len(waiting), unit="take-overs", max_tokens=max(waiting.values(), default=0)
        )
        with teacher.weights():
            while waiting:
                # A call has one limit: those that it would take out of the context wait for a
                # smaller one. Shorter limits are cut below.
                longest = max(waiting.values())
                batch = [i for i in waiting if len(ids[i]) + longest <= context_length]
                sampling = replace(make_sampling(self.config), max_new_tokens=longest)
                requests = [
                    SampleRequest(
                        prompt_ids=ids[i], seed=seed_for(self.seed, "takeover", forks[i].draft.id)
                    )
                    for i in batch
                ]
                for i, sample in zip(batch, teacher.engine.sample(requests, sampling), strict=True):
                    limit = waiting.pop(i)
                    results[i] = self._finish(forks[i], sample, limit, len(ids[i]))
        return [results[i] for i in range(len(forks))]

    def _finish(
        self, fork: Fork, sample: Sample, limit: int, num_input_tokens: int
    ) -> Continuation:
        stop: StopReason = "length" if len(sample.token_ids) > limit else sample.stop
        sample = replace(sample, token_ids=sample.token_ids[:limit], logp=sample.logp[:limit])
        text = self.template.text(fork.prefix_ids + sample.token_ids)
        ends = [text.find(string) for string in self.config.stop if string in text]
        text = text[: min(ends)] if ends else text
        trajectory = replace(
            fork.draft,
            turns=(*fork.trunk, finish_turn(fork, sample, text)),
            stop=stop,
            grade=self.grade(fork.draft.task, text),
        )
        return Continuation(trajectory=trajectory, num_input_tokens=num_input_tokens)


def _count_student_tokens(fork: Fork) -> int:
    return sum(len(turn.token_ids) for turn in fork.trunk) + fork.num_tokens


# ── episodes ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(kw_only=True)
class EpisodeContinuation:
    """The teacher plays the remaining turns in the environment, within the episode's limits.

    An episode follows from its task and the replies, so it is replayed up to the fork; one that
    answers otherwise than it did is not continued.
    """

    episodes: EpisodeRollout
    """The student's."""

    def __call__(self, teacher: SamplingTeacher, forks: Sequence[Fork]) -> list[Continuation]:
        """In the order of `forks`."""
        rollout = self.episodes.with_engine(teacher.engine)
        # Faults and replays that differ are counted drops; the student's own episodes stop a run.
        rollout.faults = FaultMonitor(max_fraction=1.0, has_printed=True)
        different: set[str] = set()
        """Drafts whose replay differs."""
        requests = [
            EpisodeRequest(
                id=fork.draft.id,
                task=fork.draft.task,
                seed=seed_for(rollout.seed, "takeover", fork.draft.id),
                start=self._make_start(fork, different),
                turns=fork.trunk,
                prompt_ids=fork.teacher_ids(teacher),
            )
            for fork in forks
        ]
        with teacher.weights():
            trajectories = rollout.run_episodes(requests, rollout.sampling, 0)
        return [
            self._finish(trajectory, request, replay_differs=trajectory.id in different)
            for trajectory, request in zip(trajectories, requests, strict=True)
        ]

    def _make_start(self, fork: Fork, different: set[str]) -> Callable[[Task], HostedEpisode]:
        def start(task: Task) -> HostedEpisode:
            episode = self.episodes.start(task)
            if (difference := replay(episode, fork, self.episodes.limits)) is not None:
                different.add(fork.draft.id)
                raise EnvironmentFault(difference)
            return episode

        return start

    def _finish(
        self, trajectory: Trajectory, request: EpisodeRequest, *, replay_differs: bool
    ) -> Continuation:
        num_sampled = trajectory.num_completion_tokens
        reason = None
        if trajectory.fault is not None:
            reason = "replay" if replay_differs else "fault"
        elif not num_sampled:
            reason = "too_long"
        if not num_sampled:
            return Continuation(trajectory=None, drop_reason=reason)
        num_trunk = sum(len(turn.token_ids) for turn in request.turns)
        num_others = len(trajectory.token_ids) - num_trunk - num_sampled
        return Continuation(
            trajectory=trajectory,
            num_input_tokens=len(request.prompt_ids or ()) + num_others,
            drop_reason=reason,
        )


def replay(episode: HostedEpisode, fork: Fork, limits: LimitsConfig) -> str | None:
    """Steps an episode to the fork. How it differs from the draft; None: it does not."""
    turns = fork.draft.turns
    for index in range(1, fork.turn, 2):
        reply, answer = turns[index], turns[index + 1]
        assert (reply.role, answer.role) == ("assistant", "environment")
        observation = episode.step(reply.text)
        kinds, recorded_kinds = (
            [event.kind for event in events] for events in (observation.events, reply.events)
        )
        if observation.done:
            return f"a replay was done after turn {index}, where the student's episode went on"
        if cut_messages(observation, limits) != answer.messages or kinds != recorded_kinds:
            return f"a replay was answered otherwise after turn {index} than the student's episode"
    return None
