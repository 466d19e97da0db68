"""Episodes of many turns, as many at a time as the KV cache holds.

Each episode has a row of the engine's session, whose KV cache persists over turns, so a turn costs
its own tokens. A finished episode's row goes to the next request (continuous batching). An
environment that raises, hangs or returns too much text affects its own episode, never the run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Generic, TypeVar

from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.base import Engine, SampleRequest, Sampling, Session
from courtside.environments.base import Episode, EpisodeRequest
from courtside.progress import ProgressMeter
from courtside.recipe.rollout import LimitsConfig, RolloutConfig
from courtside.rollout.single_turn import make_sampling
from courtside.seeds import seed_for, trajectory_id
from courtside.types import (
    Event,
    Grade,
    Message,
    Observation,
    Role,
    Sample,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

EXPECTED_OBSERVATION = 96
"""Tokens of an environment's answer, for sizing the KV cache; an estimate, not a limit."""
EXPECTED_TURNS = 16
NO_ANSWER = Grade(score=0.0, passed=False, feedback="The environment did not answer.")

T = TypeVar("T")


@dataclass(kw_only=True)
class EpisodeRollout:
    engine: Engine
    template: IncrementalTemplate
    config: RolloutConfig
    start: Callable[[Task], Episode]
    context_length: int
    seed: int
    progress: ProgressMeter = field(default_factory=ProgressMeter)

    def __post_init__(self) -> None:
        self.limits = self.config.limits
        self.max_tokens = min(self.limits.tokens or self.context_length, self.context_length)
        self.sampling = make_sampling(self.config)
        self._expected_turns: float | None = None
        """Of the episodes that finished last."""

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return sorted(self.sample(dict(enumerate(tasks)), step), key=lambda t: t.id)

    def sample(self, tasks: Mapping[int, Task], step: int) -> list[Trajectory]:
        """`tasks`: by their index in the batch, which ids and seeds follow."""
        requests = [
            EpisodeRequest(
                id=trajectory_id(step, index, n),
                task=task,
                seed=seed_for(self.seed, "student", step, index, n),
                start=self.start,
            )
            for index, task in tasks.items()
            for n in range(self.config.samples_per_prompt)
        ]
        return self.run_episodes(requests, self.sampling, step)

    def run_episodes(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, policy_version: int
    ) -> list[Trajectory]:
        """A trajectory for each request, in their order."""
        if not requests:
            return []
        row_capacity = self._row_capacity(requests, sampling)
        num_rows = min(len(requests), max(1, self.engine.max_batch_tokens // row_capacity))
        session = self.engine.session(num_rows, row_capacity=row_capacity)
        waiting, free_rows = deque(enumerate(requests)), deque(range(num_rows))
        running: dict[int, EpisodeState] = {}
        """By row of the session."""
        finished: dict[int, Trajectory] = {}
        self.progress.begin(len(requests), "episodes")
        while waiting or running:
            while waiting and free_rows:
                session.restart(row := free_rows.popleft())
                running[row] = EpisodeState.start(*waiting.popleft(), self.template)
            for row, state in list(running.items()):
                state.check_limits(
                    self.limits,
                    max_new_tokens=sampling.max_new_tokens,
                    max_tokens=self.max_tokens,
                )
                if state.stop is not None:
                    finished[state.index] = state.finish(
                        temperature=sampling.temperature, policy_version=policy_version
                    )
                    free_rows.append(row)
                    del running[row]
            if running and not (waiting and free_rows):
                self._run_turn(session, running, sampling)
                self._report_progress(len(requests), finished.values(), running.values())
        return [finished[index] for index in range(len(requests))]

    def _run_turn(
        self, session: Session, running: Mapping[int, EpisodeState], sampling: Sampling
    ) -> None:
        """One sample per row, and the environments' answers."""
        states = list(running.values())
        requests = [
            SampleRequest(
                prompt_ids=state.pending_ids,
                seed=seed_for(state.request.seed, "turn", state.num_assistant_turns),
            )
            for state in states
        ]
        samples = session.sample(list(running), requests, sampling)
        results = call_all_with_timeout(
            [
                partial(state.episode.step, sample.text)
                for state, sample in zip(states, samples, strict=True)
            ],
            seconds=self.limits.step_seconds,
        )
        for state, sample, result in zip(states, samples, results, strict=True):
            state.add_turn(sample, result, self.template, self.limits)

    def _report_progress(
        self, total: int, finished: Collection[Trajectory], running: Collection[EpisodeState]
    ) -> None:
        """Episodes under way count by their turns, once it is known how many there may be."""
        num_ended = len(finished) + sum(state.stop is not None for state in running)
        fraction = num_ended / total
        if finished:
            turns = [t.role == "assistant" for episode in finished for t in episode.turns]
            self._expected_turns = sum(turns) / len(finished)
        if limit := self.limits.turns or self._expected_turns:
            shares = [min(s.num_assistant_turns / limit, 1.0) for s in running if s.stop is None]
            fraction += sum(shares) / total
        self.progress.set_finished(num_ended, fraction)

    def _row_capacity(self, requests: Sequence[EpisodeRequest], sampling: Sampling) -> int:
        """Expected tokens of the longest episode, within the context length."""
        longest_prompt = max(
            len(self.template.render_prompt(request.task.messages).token_ids)
            for request in requests
        )
        turns = self.limits.turns or EXPECTED_TURNS
        expected = longest_prompt + turns * (sampling.max_new_tokens + EXPECTED_OBSERVATION)
        return min(expected, self.max_tokens)


# ── one episode ──────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class EpisodeState:
    index: int
    """Among the requests."""
    request: EpisodeRequest
    episode: Episode
    turns: list[Turn]
    pending_ids: tuple[int, ...]
    """Ids that the session has not processed yet: the next prompt of its row."""
    num_tokens: int
    stop: StopReason | None = None
    start_time: float = field(default_factory=monotonic)
    timed_out: bool = False
    oldest_version: int | None = None
    """Of the weights of its samples, where the engine reports them."""

    @classmethod
    def start(
        cls, index: int, request: EpisodeRequest, template: IncrementalTemplate
    ) -> EpisodeState:
        prompt = template.prompt_turn(request.task)
        return cls(
            index=index,
            request=request,
            episode=request.start(request.task),
            turns=[prompt],
            pending_ids=prompt.token_ids,
            num_tokens=len(prompt.token_ids),
        )

    @property
    def num_assistant_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    def check_limits(self, limits: LimitsConfig, *, max_new_tokens: int, max_tokens: int) -> None:
        """Sets `stop` where a limit leaves no further turn."""
        if self.stop is not None:
            return
        if limits.turns is not None and self.num_assistant_turns >= limits.turns:
            self.stop = "turns"
        elif self.num_tokens + max_new_tokens > max_tokens:
            self.stop = "length"
        elif limits.seconds is not None and monotonic() - self.start_time > limits.seconds:
            self.stop = "time"

    def add_turn(
        self,
        sample: Sample,
        result: CallResult[Observation],
        template: IncrementalTemplate,
        limits: LimitsConfig,
    ) -> None:
        """Appends the student's turn and the environment's answer to it."""
        versions = [span.version for span in sample.policy_versions]
        if self.oldest_version is not None:
            versions.append(self.oldest_version)
        self.oldest_version = min(versions, default=None)
        observation = self._observe(result, limits)
        self._append(template.assistant_turn(sample, observation.events))
        if observation.done:
            self.stop = "time" if result.timed_out else "done"
            return
        answer = template.environment_turn(
            observation.messages, add_end_of_turn=not template.is_ended(sample.token_ids)
        )
        self._append(answer)
        self.pending_ids = sample.token_ids[-1:] + answer.token_ids

    def finish(self, *, temperature: float, policy_version: int) -> Trajectory:
        assert self.stop is not None
        # A thread may still run in an episode that timed out, so its grade is not asked for.
        return Trajectory(
            id=self.request.id,
            task=self.request.task,
            turns=tuple(self.turns),
            source="student",
            policy_version=policy_version if self.oldest_version is None else self.oldest_version,
            temperature=temperature,
            stop=self.stop,
            grade=NO_ANSWER if self.timed_out else self.episode.grade(),
        )

    def _append(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.num_tokens += len(turn.token_ids)

    def _observe(self, result: CallResult[Observation], limits: LimitsConfig) -> Observation:
        """The environment's answer, cut to its limit; its failures as an error message."""
        if result.timed_out:
            self.timed_out = True
            text = f"Error: no answer within {limits.step_seconds:g} seconds"
            return Observation(messages=(), done=True, events=(_failure("hung", text),))
        observation, problem = result.value, None
        if result.error is not None or observation is None:
            problem = f"Error: {type(result.error).__name__}: {result.error}"
        elif not observation.messages and not observation.done:
            problem = "Error: the environment said nothing"
        if observation is None or problem is not None:
            text = _cut(problem or "", limits.observation_chars)
            return Observation(
                messages=(Message(role=self._environment_role(), content=text),),
                events=(_failure("environment_error", text),),
            )
        messages = tuple(
            replace(message, content=_cut(message.content, limits.observation_chars))
            for message in observation.messages
        )
        return replace(observation, messages=messages)

    def _environment_role(self) -> Role:
        """A role that the environment uses itself, which the chat template is known to accept."""
        roles = {m.role for turn in self.turns if turn.role == "environment" for m in turn.messages}
        return "tool" if "tool" in roles else "user"


def _failure(kind: str, message: str) -> Event:
    return Event(kind=kind, details={"message": message})


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text) - limit} more characters]"


# ── calls of environments, which may raise or hang ───────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CallResult(Generic[T]):
    value: T | None = None
    error: Exception | None = None
    timed_out: bool = False
    """The call is still running; the objects it uses must not be used any more."""


def call_all_with_timeout(
    calls: Sequence[Callable[[], T]], *, seconds: float
) -> list[CallResult[T]]:
    """Runs all calls concurrently, each in a thread of its own; results in their order."""
    outcomes: list[CallResult[T]] = [CallResult(timed_out=True)] * len(calls)

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            outcomes[index] = CallResult(value=call())
        except Exception as error:  # user code: its errors become observations
            outcomes[index] = CallResult(error=error)

    # Daemon threads: a hanging call must not keep the process alive.
    threads = [
        threading.Thread(target=run, args=(index, call), daemon=True)
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    end = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
    return list(outcomes)


def reply_passes(
    start: Callable[[Task], Episode],
    trajectory: Trajectory,
    turn: int,
    reply: str,
    *,
    seconds: float,
) -> bool:
    """Whether `reply`, in place of that turn, causes no event. The episode is replayed up to that
    turn: it follows from its task and the student's replies."""
    earlier_replies = [t.text for t in trajectory.turns[:turn] if t.role == "assistant"]

    def replay() -> Observation:
        episode = start(trajectory.task)
        for text in earlier_replies:
            episode.step(text)
        return episode.step(reply)

    (result,) = call_all_with_timeout([replay], seconds=seconds * (len(earlier_replies) + 1))
    return result.value is not None and not result.value.events
