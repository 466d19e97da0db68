"""A teacher that gives text alone continues the student's drafts from a fork.

What goes wrong with a reply is the reason of a counted drop. Only a large share of failures stops
the run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.openai_client import Ask
from courtside.chat.reply_failures import Failure, FailureMonitor
from courtside.environments.base import EpisodeRequest
from courtside.environments.guard import EnvironmentFault, NameMonitor, call_all
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe.rollout import RolloutConfig
from courtside.rollout.continuations import Continuation, Fork, finish_turn, replay
from courtside.rollout.episode_state import EpisodeSettings, EpisodeState
from courtside.rollout.episodes import EpisodeRollout
from courtside.rollout.independent import run_independently
from courtside.rollout.text_teacher import TextTeacher
from courtside.seeds import seed_for
from courtside.types import Grade, Sample, Task, Turn

T = TypeVar("T")
Play = Generator[Future[Any], Any, T]
"""Yields what it waits for: see `run_independently`."""


def drop(reason: str) -> Continuation:
    return Continuation(trajectory=None, drop_reason=reason)


@dataclass(slots=True, kw_only=True)
class Dialog:
    """The requests of one take-over."""

    fork: Fork
    teacher: TextTeacher
    ask: Ask
    num_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them; 0: it does not."""
    failure: Failure | None = None

    def request(self, turns: Sequence[Turn], prefix: str = "") -> Play[Sample | Continuation]:
        """The teacher's reply after `turns`, or the drop that it comes to."""
        task = self.fork.draft.task
        reply = yield self.ask(self.teacher.make_prompt(task, turns, prefix))
        self.num_requests += 1
        self.input_tokens += getattr(reply, "input_tokens", 0)
        self.output_tokens += getattr(reply, "output_tokens", 0)
        sample = self.teacher.read_reply(reply, task, turns, prefix)
        if isinstance(sample, Failure):
            self.failure = sample
            return drop(sample.kind)
        return sample

    def add_costs(self, continuation: Continuation) -> Continuation:
        return replace(
            continuation,
            num_input_tokens=self.input_tokens,
            num_sampled_tokens=self.output_tokens or None,
            num_requests=self.num_requests,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextContinuation:
    play: Callable[[Dialog], Play[Continuation]]
    monitor: FailureMonitor
    progress: ProgressMeter = field(default_factory=ProgressMeter)

    def __call__(self, teacher: TextTeacher, forks: Sequence[Fork]) -> list[Continuation]:
        """In the order of `forks`, each by itself: none waits for another one's reply."""
        phase = self.progress.phase = PhaseProgress(total=len(forks), unit="take-overs")
        max_failures = self.monitor.max_failures(len(forks))
        failures: list[Failure | None] = []

        with teacher.client.connect() as ask:

            def play(index: int, slot: int) -> Play[Continuation]:
                if sum(failure is not None for failure in failures) > max_failures:
                    return drop("no_answer")  # the run stops in any case
                dialog = Dialog(fork=forks[index], teacher=teacher, ask=ask)
                continuation = yield from self.play(dialog)
                if dialog.num_requests:
                    failures.append(dialog.failure)
                phase.finished += 1
                return dialog.add_costs(continuation)

            num_slots = min(len(forks), teacher.client.endpoint.max_concurrency)
            continuations = run_independently(play, len(forks), num_slots=num_slots)
        self.monitor.check(failures)
        return continuations


# ── single answers ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswers:
    template: IncrementalTemplate
    config: RolloutConfig
    grade: Callable[[Task, str], Grade | None]
    context_length: int
    """The student's."""

    def __call__(self, dialog: Dialog) -> Play[Continuation]:
        fork = dialog.fork
        prefix = dialog.teacher.find_prefix(fork.prefix_ids)
        if prefix is None:
            return drop("no_text")
        sample = yield from dialog.request((), prefix)
        if isinstance(sample, Continuation):
            return sample
        num_tokens = fork.num_tokens + len(sample.token_ids)
        num_prompt = sum(len(turn.token_ids) for turn in fork.trunk)
        if num_tokens > min(self.config.max_new_tokens, self.context_length - num_prompt):
            return drop("too_long_for_student")
        text = self.template.renderer.text(fork.prefix_ids + sample.token_ids)
        trajectory = replace(
            fork.draft,
            turns=(*fork.trunk, finish_turn(fork, sample, text)),
            stop="eos",
            grade=self.grade(fork.draft.task, text),
        )
        return Continuation(trajectory=trajectory)


# ── episodes ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEpisodes:
    """Replayed up to the fork, then the teacher's turns, within the limits of the student's."""

    episodes: EpisodeRollout
    """The student's."""
    threads: ThreadPoolExecutor
    """Environments answer in them."""

    def __call__(self, dialog: Dialog) -> Play[Continuation]:
        fork, rollout = dialog.fork, self.episodes
        template, limits, names = rollout.template, rollout.limits, NameMonitor()
        try:
            episode = rollout.start(fork.draft.task)
            if replay(episode, fork, limits) is not None:
                return drop("replay")
        except EnvironmentFault:
            return drop("fault")
        state = self._make_state(fork)
        settings = EpisodeSettings(
            sampling=rollout.sampling,
            policy_version=0,
            max_turns=limits.final_turns,
            max_seconds=limits.seconds,
            max_tokens=rollout.max_tokens,
        )
        while True:
            state.check_limits(settings)
            if state.stop is not None:
                break
            sample = yield from dialog.request(state.turns[1:])
            if isinstance(sample, Continuation):
                return sample
            if len(sample.token_ids) > rollout.sampling.max_new_tokens:
                return drop("too_long_for_student")
            observation = yield self._begin(partial(episode.begin_step, sample.text))
            if isinstance(observation, EnvironmentFault) or names.find_fault(observation):
                return drop("fault")
            state.add_turn(sample, observation, template, limits)
        if state.num_assistant_turns == sum(t.role == "assistant" for t in fork.trunk):
            return drop("too_long")
        grade = yield self._begin(episode.begin_grade)
        if isinstance(grade, EnvironmentFault):
            return drop("fault")
        state.grade = grade
        return Continuation(trajectory=state.finish(settings))

    def _make_state(self, fork: Fork) -> EpisodeState:
        draft, rollout = fork.draft, self.episodes
        request = EpisodeRequest(
            id=draft.id,
            task=draft.task,
            seed=seed_for(rollout.seed, "takeover", draft.id),
            start=rollout.start,
            turns=fork.trunk,
        )
        return EpisodeState.make(0, request, rollout.template)

    def _begin(self, begin: Callable[[], Callable[[], T]]) -> Future[T | EnvironmentFault]:
        return self.threads.submit(lambda: call_all([begin])[0])
