"""Episodes of many turns, as many at a time as the KV cache holds.

Each episode has a row of the engine's session, whose KV cache persists over turns, so a turn costs
its own tokens. A finished episode's row goes to the next request (continuous batching). A bug in
the environment ends its own episode, without a grade and without an event: it is no mistake of the
student.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.base import Engine, SampleRequest, Sampling, Session
from courtside.environments.base import Episode, EpisodeRequest, HostedEpisode
from courtside.environments.guard import (
    EnvironmentFault,
    FaultMonitor,
    NameMonitor,
    call_all,
)
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.recipe.rollout import LimitsConfig, RolloutConfig
from courtside.rollout.shares import index_tasks
from courtside.rollout.single_turn import make_sampling
from courtside.sanitize import truncate
from courtside.seeds import seed_for, trajectory_id
from courtside.types import (
    Event,
    Grade,
    Message,
    Observation,
    Sample,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

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
        self.sampling = make_sampling(self.config)
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
                state.check_limits(
                    max_turns=turn_limit,
                    max_seconds=self.limits.seconds,
                    max_new_tokens=sampling.max_new_tokens,
                    max_tokens=self.max_tokens,
                )
            ended = {row: state for row, state in running.items() if state.stop is not None}
            self._grade(list(ended.values()))
            for row, state in ended.items():
                finished[state.index] = state.finish(
                    temperature=sampling.temperature, policy_version=policy_version
                )
                free_rows.append(row)
                del running[row]
            if running and not (waiting and free_rows):
                self._run_turn(session, running, sampling)
                self._count(progress, finished.values(), running.values(), turn_limit)
        trajectories = [finished[index] for index in range(len(requests))]
        self.faults.check([trajectory.fault for trajectory in trajectories])
        return trajectories

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
        requests = [
            SampleRequest(
                prompt_ids=state.pending_ids,
                seed=seed_for(state.request.seed, "turn", state.num_assistant_turns),
            )
            for state in states
        ]
        samples = session.sample(list(running), requests, sampling)
        results = call_all(
            [
                partial(state.require_episode().begin_step, sample.text)
                for state, sample in zip(states, samples, strict=True)
            ]
        )
        for state, sample, result in zip(states, samples, results, strict=True):
            fault: EnvironmentFault | None
            if isinstance(result, EnvironmentFault):
                fault = result
            else:
                fault = self.names.find_fault(result)
            if fault is not None:
                state.add_reply(sample, self.template)
                self._end(state, fault)
            elif isinstance(result, Observation):
                state.add_turn(sample, result, self.template, self.limits)

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
        if limit := turn_limit or self._expected_turns:
            shares = [min(s.num_assistant_turns / limit, 1.0) for s in running if s.stop is None]
            progress.partial = sum(shares)

    def _row_capacity(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, turn_limit: int | None
    ) -> int:
        """Expected tokens of the longest episode, within the context length."""
        longest_prompt = max(
            len(request.prompt_ids or self.template.render_prompt(request.task.messages).token_ids)
            for request in requests
        )
        turn_limits = [n for n in (turn_limit, self.max_turns) if n is not None]
        turns = min(turn_limits, default=EXPECTED_TURNS)
        # What the environment says after the last turn is not processed.
        expected = longest_prompt + turns * sampling.max_new_tokens
        expected += (turns - 1) * EXPECTED_OBSERVATION
        return min(expected, self.max_tokens)


# ── one episode ──────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class EpisodeState:
    index: int
    """Among the requests."""
    request: EpisodeRequest
    turns: list[Turn]
    pending_ids: tuple[int, ...]
    """Ids that the session has not processed yet: the next prompt of its row."""
    num_tokens: int
    episode: HostedEpisode | None = None
    """None before it was started, and after a fault."""
    stop: StopReason | None = None
    grade: Grade | None = None
    fault: str | None = None
    start_time: float = field(default_factory=monotonic)
    oldest_version: int | None = None
    """Of the weights of its samples, where the engine reports them."""

    @classmethod
    def make(
        cls, index: int, request: EpisodeRequest, template: IncrementalTemplate
    ) -> EpisodeState:
        turns = list(request.turns) or [template.prompt_turn(request.task)]
        ids = tuple(i for turn in turns for i in turn.token_ids)
        pending_ids = ids if request.prompt_ids is None else request.prompt_ids
        return cls(
            index=index,
            request=request,
            turns=turns,
            pending_ids=pending_ids,
            num_tokens=max(len(ids), len(pending_ids)),
        )

    def describe_position(self) -> str:
        """For a message: `task t-3, turn 2, reply 'No.'`."""
        last = self.turns[-1]
        reply = f", reply {truncate(last.text, 200)!r}" if last.role == "assistant" else ""
        return f"task {self.request.task.id}, turn {self.num_assistant_turns}{reply}"

    def require_episode(self) -> HostedEpisode:
        assert self.episode is not None
        return self.episode

    @property
    def num_assistant_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    def check_limits(
        self,
        *,
        max_turns: int | None,
        max_seconds: float | None,
        max_new_tokens: int,
        max_tokens: int,
    ) -> None:
        """Sets `stop` where a limit leaves no further turn."""
        if self.stop is not None:
            return
        if max_turns is not None and self.num_assistant_turns >= max_turns:
            self.stop = "turns"
        elif self.num_tokens + max_new_tokens > max_tokens:
            self.stop = "length"
        elif max_seconds is not None and monotonic() - self.start_time > max_seconds:
            self.stop = "time"

    def add_turn(
        self,
        sample: Sample,
        observation: Observation,
        template: IncrementalTemplate,
        limits: LimitsConfig,
    ) -> None:
        """Appends the student's turn and the environment's answer to it."""
        self.add_reply(sample, template, observation)
        if observation.done:
            self.stop = "done"
            return
        answer = template.environment_turn(
            cut_messages(observation, limits),
            add_end_of_turn=not template.is_ended(sample.token_ids),
            prompt=self.request.task.messages,
        )
        self._append(answer)
        self.pending_ids = sample.token_ids[-1:] + answer.token_ids

    def add_reply(
        self,
        sample: Sample,
        template: IncrementalTemplate,
        observation: Observation | None = None,
    ) -> None:
        """`observation`: None where the environment gave none."""
        versions = [span.version for span in sample.policy_versions]
        if self.oldest_version is not None:
            versions.append(self.oldest_version)
        self.oldest_version = min(versions, default=None)
        events = () if observation is None else observation.events
        decision = None if observation is None else observation.decision
        self._append(template.assistant_turn(sample, events, decision))

    def finish(self, *, temperature: float, policy_version: int) -> Trajectory:
        """`policy_version`: that of the engine, where its samples do not report theirs."""
        assert self.stop is not None
        return Trajectory(
            id=self.request.id,
            task=self.request.task,
            turns=tuple(_add_versions(turn, policy_version) for turn in self.turns),
            source="student",
            policy_version=policy_version if self.oldest_version is None else self.oldest_version,
            temperature=temperature,
            stop=self.stop,
            grade=self.grade,
            fault=self.fault,
        )

    def _append(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.num_tokens += len(turn.token_ids)


def cut_messages(observation: Observation, limits: LimitsConfig) -> tuple[Message, ...]:
    """The environment's messages as the student gets them."""
    return tuple(
        replace(message, content=_cut(message.content, limits.observation_chars))
        for message in observation.messages
    )


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text) - limit} more characters]"


def reply_passes(
    start: Callable[[Task], Episode],
    trajectory: Trajectory,
    turn: int,
    reply: str,
) -> bool:
    """Whether `reply`, in place of that turn, causes no event."""
    try:
        return not _replay(start, trajectory, turn, reply)[1].events
    except EnvironmentFault:
        return False


def replay_with_reply(
    start: Callable[[Task], Episode], trajectory: Trajectory, turn: int, reply: str
) -> tuple[tuple[Event, ...], Grade | None]:
    """Events of `reply` in place of that turn, and the grade where it was the episode's last; a
    fault of the environment is an event."""
    is_last = not any(t.role == "assistant" for t in trajectory.turns[turn + 1 :])
    try:
        episode, observation = _replay(start, trajectory, turn, reply)
        return observation.events, episode.grade() if is_last else None
    except EnvironmentFault as fault:
        return (Event(kind="environment_fault", details={"message": str(fault)}),), None


def _replay(
    start: Callable[[Task], Episode], trajectory: Trajectory, turn: int, reply: str
) -> tuple[Episode, Observation]:
    """The episode follows from its task and the student's replies up to that turn."""
    episode = start(trajectory.task)
    for text in [t.text for t in trajectory.turns[:turn] if t.role == "assistant"]:
        episode.step(text)
    return episode, episode.step(reply)


def _add_versions(turn: Turn, policy_version: int) -> Turn:
    if turn.sampler_logp is None or turn.policy_versions:
        return turn
    span = VersionSpan(0, len(turn.token_ids), policy_version)
    return replace(turn, policy_versions=(span,))
