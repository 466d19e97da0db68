"""Episodes of many turns, as many at a time as the KV cache holds.

Each episode has a row of the engine's session, whose KV cache persists over turns, so a turn costs
its own tokens. A finished episode's row goes to the next request (continuous batching). In this
process a turn is one batch of all episodes; on servers each goes on by itself. A bug in
the environment ends its own episode, without a grade and without an event: it is no mistake of the
student.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.base import (
    Engine,
    IndependentSession,
    Sampling,
    Session,
)
from courtside.environments.base import EpisodeRequest, HostedEpisode
from courtside.environments.guard import (
    EnvironmentFault,
    FaultMonitor,
    NameMonitor,
    call_all,
)
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe.rollout import RolloutConfig
from courtside.rollout.episode_state import EpisodeSettings, EpisodeState
from courtside.rollout.independent import run_independently
from courtside.rollout.shares import index_tasks
from courtside.rollout.single_turn import make_sampling
from courtside.seeds import seed_for, trajectory_id
from courtside.types import (
    Grade,
    Observation,
    Sample,
    Task,
    Trajectory,
)

T = TypeVar("T")

EXPECTED_OBSERVATION = 96
"""Tokens of an environment's answer, for sizing the KV cache; an estimate, not a limit."""
EXPECTED_TURNS = 16


@dataclass(kw_only=True)
class EpisodeRollout:
    engine: Engine
    template: IncrementalTemplate
    config: RolloutConfig
    start: Callable[[Task], HostedEpisode]
    context_length: int
    seed: int
    max_turns: int | None = None
    """Assistant turns of the longest episode, where the environment's settings tell it."""
    progress: ProgressMeter = field(default_factory=ProgressMeter)

    def __post_init__(self) -> None:
        self.limits = self.config.limits
        self.max_tokens = min(self.limits.tokens or self.context_length, self.context_length)
        self.sampling = replace(make_sampling(self.config), return_routed_experts=True)
        self.faults = FaultMonitor(max_fraction=self.limits.max_fault_fraction)
        self.names = NameMonitor()
        self._expected_turns: float | None = None
        """Of the episodes that finished last."""

    def with_engine(self, engine: Engine) -> EpisodeRollout:
        """The same episodes played by another model; they must fit both contexts."""
        context_length = min(self.context_length, engine.context_length)
        return replace(self, engine=engine, context_length=context_length)

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        return sorted(self.sample(index_tasks(tasks), step), key=lambda t: t.id)

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
        turn_limit = self.limits.turns_at(step)
        return self._run_episodes(requests, self.sampling, step, turn_limit)

    def run_episodes(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, policy_version: int
    ) -> list[Trajectory]:
        """A trajectory for each request, in their order, with the limits of an evaluation."""
        return self._run_episodes(requests, sampling, policy_version, self.limits.final_turns)

    def _run_episodes(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        policy_version: int,
        turn_limit: int | None,
    ) -> list[Trajectory]:
        if not requests:
            return []
        row_capacity = self._row_capacity(requests, sampling, turn_limit)
        row_tokens = row_capacity + self.engine.capabilities.row_state_tokens
        num_rows = min(len(requests), max(1, self.engine.max_batch_tokens // row_tokens))
        session = self.engine.session(num_rows, row_capacity=row_capacity)
        settings = EpisodeSettings(
            sampling=sampling,
            policy_version=policy_version,
            max_turns=turn_limit,
            max_seconds=self.limits.seconds,
            max_tokens=self.max_tokens,
        )
        if self.engine.capabilities.independent_rows:
            rows = cast(IndependentSession, session)
            trajectories = self._play_independently(requests, rows, num_rows, settings)
        else:
            trajectories = self._play_in_turns(requests, session, num_rows, settings)
        self.faults.check([trajectory.fault for trajectory in trajectories])
        return trajectories

    def _play_in_turns(
        self,
        requests: Sequence[EpisodeRequest],
        session: Session,
        num_rows: int,
        settings: EpisodeSettings,
    ) -> list[Trajectory]:
        """Each turn is one call of the session for all episodes under way."""
        waiting, free_rows = deque(enumerate(requests)), deque(range(num_rows))
        running: dict[int, EpisodeState] = {}
        """By row of the session."""
        finished: dict[int, Trajectory] = {}
        progress = self.progress.phase = PhaseProgress(total=len(requests), unit="episodes")
        while waiting or running:
            starting: dict[int, EpisodeState] = {}
            while waiting and free_rows:
                session.restart(row := free_rows.popleft())
                starting[row] = EpisodeState.make(*waiting.popleft(), self.template)
            self._start(list(starting.values()))
            running |= starting
            for state in running.values():
                state.check_limits(settings)
            ended = {row: state for row, state in running.items() if state.stop is not None}
            self._grade(list(ended.values()))
            for row, state in ended.items():
                finished[state.index] = state.finish(settings)
                free_rows.append(row)
                del running[row]
            if running and not (waiting and free_rows):
                self._run_turn(session, running, settings.sampling)
                self._count(progress, finished.values(), running.values(), settings.max_turns)
        return [finished[index] for index in range(len(requests))]

    def _play_independently(
        self,
        requests: Sequence[EpisodeRequest],
        session: IndependentSession,
        num_rows: int,
        settings: EpisodeSettings,
    ) -> list[Trajectory]:
        """No episode waits for another one's sample or environment."""
        finished: list[Trajectory] = []
        running: dict[int, EpisodeState] = {}
        progress = self.progress.phase = PhaseProgress(total=len(requests), unit="episodes")
        threads = ThreadPoolExecutor(num_rows, thread_name_prefix="environment")

        def call(begin: Callable[[], Callable[[], T]]) -> Future[T | EnvironmentFault]:
            return threads.submit(lambda: call_all([begin])[0])

        def play(index: int, row: int) -> Generator[Future[Any], Any, Trajectory]:
            session.restart(row)
            running[row] = state = EpisodeState.make(index, requests[index], self.template)
            self._start([state])
            while True:
                state.check_limits(settings)
                if state.stop is not None:
                    break
                sample = yield session.begin(row, state.next_request(), settings.sampling)
                episode = state.require_episode()
                result = yield call(partial(episode.begin_step, sample.text))
                self._add_turn(state, sample, result)
                self._count(progress, finished, running.values(), settings.max_turns)
            if state.fault is None:
                grade = yield call(state.require_episode().begin_grade)
                self._set_grade(state, grade)
            finished.append(trajectory := state.finish(settings))
            del running[row]
            self._count(progress, finished, running.values(), settings.max_turns)
            return trajectory

        try:
            return run_independently(play, len(requests), num_slots=num_rows)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, states: Sequence[EpisodeState]) -> None:
        for state in states:  # in order: `start` is a method of the object that all share
            try:
                state.episode = state.request.start(state.request.task)
            except EnvironmentFault as fault:
                self._end(state, fault)

    def _grade(self, states: Sequence[EpisodeState]) -> None:
        gradable = [state for state in states if state.fault is None]
        calls = [state.require_episode().begin_grade for state in gradable]
        for state, grade in zip(gradable, call_all(calls), strict=True):
            self._set_grade(state, grade)

    def _set_grade(self, state: EpisodeState, grade: Grade | EnvironmentFault) -> None:
        if isinstance(grade, EnvironmentFault):
            self._end(state, grade)
        else:
            state.grade = grade

    def _end(self, state: EpisodeState, fault: EnvironmentFault) -> None:
        """The episode is not used any more: a call that timed out may still run in it."""
        self.faults.print_first(fault, where=state.describe_position())
        state.fault, state.stop, state.episode = str(fault), "fault", None

    def _run_turn(
        self, session: Session, running: Mapping[int, EpisodeState], sampling: Sampling
    ) -> None:
        """One sample per row, and the environments' answers."""
        states = list(running.values())
        samples = session.sample(
            list(running), [state.next_request() for state in states], sampling
        )
        results = call_all(
            [
                partial(state.require_episode().begin_step, sample.text)
                for state, sample in zip(states, samples, strict=True)
            ]
        )
        for state, sample, result in zip(states, samples, results, strict=True):
            self._add_turn(state, sample, result)

    def _add_turn(
        self, state: EpisodeState, sample: Sample, result: Observation | EnvironmentFault
    ) -> None:
        if isinstance(result, Observation):
            fault = self.names.find_fault(result)
            if fault is None:
                state.add_turn(sample, result, self.template, self.limits)
                return
            result = fault
        state.add_reply(sample, self.template)
        self._end(state, result)

    def _count(
        self,
        progress: PhaseProgress,
        finished: Collection[Trajectory],
        running: Collection[EpisodeState],
        turn_limit: int | None,
    ) -> None:
        """Episodes under way count by their turns, once it is known how many there may be."""
        progress.finished = len(finished) + sum(state.stop is not None for state in running)
        if finished:
            turns = [t.role == "assistant" for episode in finished for t in episode.turns]
            self._expected_turns = sum(turns) / len(finished)
        if limit := self._known_limit(turn_limit) or self._expected_turns:
            shares = [min(s.num_assistant_turns / limit, 1.0) for s in running if s.stop is None]
            progress.partial = sum(shares)

    def _known_limit(self, turn_limit: int | None) -> int | None:
        """Of the turns of every episode: the recipe's, or what the environment's settings tell."""
        return min((n for n in (turn_limit, self.max_turns) if n is not None), default=None)

    def _row_capacity(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, turn_limit: int | None
    ) -> int:
        """Expected tokens of the longest episode, within the context length."""
        longest_prompt = max(
            len(request.prompt_ids or self.template.render_prompt(request.task.messages).token_ids)
            for request in requests
        )
        turns = self._known_limit(turn_limit) or EXPECTED_TURNS
        # What the environment says after the last turn is not processed.
        expected = longest_prompt + turns * sampling.max_new_tokens
        expected += (turns - 1) * EXPECTED_OBSERVATION
        return min(expected, self.max_tokens)
