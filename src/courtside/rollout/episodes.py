"""Episodes of many turns, as many at a time as there is room for.

The student writes, the environment answers, and what was read and written stays in the engine's
session, so a turn costs its own tokens. An episode that has ended makes way for one that waits. An
environment that raises, hangs or says too much ends its own turn or episode with an error that the
student sees, never the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from courtside.chat.incremental import PROBE_PROMPT, IncrementalTemplate
from courtside.engines.base import Engine, SampleRequest, Sampling, Session
from courtside.recipe import LimitsConfig, RolloutConfig
from courtside.rollout.mixing import choose_student_tasks, make_sampling, trajectory_id
from courtside.rollout.timeouts import CallResult, call_all_with_timeout
from courtside.seeds import seed_for
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
"""Tokens that an environment says in a turn, for planning memory; more only costs a larger room."""
EXPECTED_TURNS = 16


class Episode(Protocol):
    """See `tasks.environments.base`, where the whole contract is."""

    def step(self, reply: str) -> Observation: ...

    def grade(self) -> Grade: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """An episode that is to be played."""

    id: str
    task: Task
    seed: int
    begin: Callable[[Task], Episode]
    """A fresh episode of a task."""


@dataclass(slots=True)
class EpisodeState:
    number: int
    """Its place among those that are played."""
    start: EpisodeRequest
    episode: Episode
    turns: list[Turn]
    unread: tuple[int, ...]
    """What the student reads before it writes next."""
    num_tokens: int = 0
    stop: StopReason | None = None
    began: float = field(default_factory=monotonic)
    timed_out: bool = False
    oldest_version: int | None = None
    """Of the weights of its samples, where the engine reports them."""

    @property
    def num_written(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)


class EpisodeRollout:
    def __init__(
        self,
        *,
        engine: Engine,
        turns: IncrementalTemplate,
        config: RolloutConfig,
        begin: Callable[[Task], Episode],
        demonstrate: Callable[[Task, str], Trajectory] | None,
        context_length: int,
        seed: int,
    ):
        self.engine = engine
        self.turns = turns
        self.config = config
        self.limits: LimitsConfig = config.limits
        self.begin = begin
        self.demonstrate = demonstrate
        """The environment's own demonstration under an id, where off-policy text is asked for."""
        self.max_tokens = min(self.limits.tokens or context_length, context_length)
        self.seed = seed
        self.sampling = make_sampling(config)

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        own = choose_student_tasks(self.config, tasks, seed=self.seed, step=step)
        starts = [
            EpisodeRequest(
                id=trajectory_id(step, index, sample),
                task=tasks[index],
                seed=seed_for(self.seed, "student", step, index, sample),
                begin=self.begin,
            )
            for index in sorted(own)
            for sample in range(self.config.samples_per_prompt)
        ]
        trajectories = self.play(starts, self.sampling, version=step)
        if self.config.corrections:
            trajectories += [right for t in trajectories for right in self._corrected(t)]
        for index, task in enumerate(tasks):
            if index not in own:
                assert self.demonstrate is not None, "looked at when the parts were put together"
                trajectories.append(self.demonstrate(task, trajectory_id(step, index, 0)))
        return sorted(trajectories, key=lambda trajectory: trajectory.id)

    def play(
        self, starts: Sequence[EpisodeRequest], sampling: Sampling, *, version: int
    ) -> list[Trajectory]:
        """Episodes from their beginning to their end, in order."""
        if not starts:
            return []
        row_capacity = self._row_capacity(starts, sampling)
        num_rows = min(len(starts), max(1, self.engine.max_batch_tokens // row_capacity))
        session = self.engine.session(num_rows, row_capacity=row_capacity)
        waiting, free = deque(enumerate(starts)), deque(range(num_rows))
        playing: dict[int, EpisodeState] = {}
        """By row of the session."""
        played: dict[int, Trajectory] = {}
        while waiting or playing:
            while waiting and free:
                session.restart(row := free.popleft())
                playing[row] = self._begun(*waiting.popleft())
            for row, one in list(playing.items()):
                if not self._may_write(one, sampling):
                    played[one.number] = self._ended(one, sampling, version)
                    free.append(row)
                    del playing[row]
            if playing and not (waiting and free):
                self._turn(session, playing, sampling)
        return [played[number] for number in range(len(starts))]

    def _turn(
        self, session: Session, playing: Mapping[int, EpisodeState], sampling: Sampling
    ) -> None:
        """Of every row: the student writes, and the environment answers."""
        requests = [
            SampleRequest(
                prompt_ids=one.unread, seed=seed_for(one.start.seed, "turn", one.num_written)
            )
            for one in playing.values()
        ]
        written = session.sample(list(playing), requests, sampling)
        answers = call_all_with_timeout(
            [_step(one.episode, s) for one, s in zip(playing.values(), written, strict=True)],
            seconds=self.limits.step_seconds,
        )
        for one, sample, answer in zip(playing.values(), written, answers, strict=True):
            self._continue(one, sample, answer)

    def _corrected(self, played: Trajectory) -> Iterator[Trajectory]:
        """Each turn that went wrong, as the environment would have had it, where that is known."""
        for index, turn in enumerate(played.turns):
            texts = [e.details["correct"] for e in turn.events if "correct" in e.details]
            if not texts:
                continue
            before = tuple(
                replace(t, chosen=(False,) * len(t.token_ids), sampler_logp=None)
                for t in played.turns[:index]
            )
            ids = self.turns.renderer.completion_ids((PROBE_PROMPT,), texts[0])
            right = Sample(token_ids=ids, logp=(), stop="dataset", text=texts[0])
            yield replace(
                played,
                id=f"{played.id}+{index:03d}",
                turns=(*before, self.turns.assistant_turn(right)),
                source="dataset",
                policy_version=None,
                stop="dataset",
                grade=None,
            )

    def _row_capacity(self, starts: Sequence[EpisodeRequest], sampling: Sampling) -> int:
        """Ids that an episode is expected to have in the end, at most."""
        prompts = [len(self.turns.render_prompt(start.task.messages).token_ids) for start in starts]
        turns = self.limits.turns or EXPECTED_TURNS
        expected = max(prompts, default=0) + turns * (
            sampling.max_new_tokens + EXPECTED_OBSERVATION
        )
        return min(expected, self.max_tokens)

    def _begun(self, number: int, start: EpisodeRequest) -> EpisodeState:
        prompt = self.turns.prompt_turn(start.task)
        return EpisodeState(
            number=number,
            start=start,
            episode=start.begin(start.task),
            turns=[prompt],
            unread=prompt.token_ids,
            num_tokens=len(prompt.token_ids),
        )

    def _may_write(self, one: EpisodeState, sampling: Sampling) -> bool:
        """Notes why not, the first time it may not."""
        if one.stop is None:
            limits = self.limits
            if limits.turns is not None and one.num_written >= limits.turns:
                one.stop = "turns"
            elif one.num_tokens + sampling.max_new_tokens > self.max_tokens:
                one.stop = "length"
            elif limits.seconds is not None and monotonic() - one.began > limits.seconds:
                one.stop = "time"
        return one.stop is None

    def _continue(self, one: EpisodeState, sample: Sample, answer: CallResult[Observation]) -> None:
        for span in sample.policy_versions:
            one.oldest_version = min(span.version, one.oldest_version or span.version)
        observation = self._observed(one, answer)
        turn = self.turns.assistant_turn(sample, observation.events)
        one.turns.append(turn)
        one.num_tokens += len(turn.token_ids)
        if observation.done:
            one.stop = "time" if answer.timed_out else "done"
            return
        environment = self.turns.environment_turn(
            observation.messages, add_end_of_turn=not self.turns.is_ended(sample.token_ids)
        )
        one.turns.append(environment)
        one.num_tokens += len(environment.token_ids)
        one.unread = sample.token_ids[-1:] + environment.token_ids

    def _observed(self, one: EpisodeState, answer: CallResult[Observation]) -> Observation:
        if answer.timed_out:
            one.timed_out = True
            said = f"Error: no answer within {self.limits.step_seconds:g} seconds"
            return Observation(messages=(), done=True, events=(_failure("hung", said),))
        if answer.error is not None or answer.value is None:
            return self._error(one, f"Error: {type(answer.error).__name__}: {answer.error}")
        if not answer.value.messages and not answer.value.done:
            return self._error(one, "Error: the environment said nothing")
        messages = tuple(
            replace(message, content=self._cut(message.content))
            for message in answer.value.messages
        )
        return replace(answer.value, messages=messages)

    def _error(self, one: EpisodeState, said: str) -> Observation:
        return Observation(
            messages=(Message(role=self._role(one), content=self._cut(said)),),
            events=(_failure("environment_error", self._cut(said)),),
        )

    def _role(self, one: EpisodeState) -> Role:
        """As the environment speaks itself, which the template is known to take."""
        said = [m.role for turn in one.turns if turn.role == "environment" for m in turn.messages]
        return "tool" if "tool" in said else "user"

    def _cut(self, text: str) -> str:
        most = self.limits.observation_chars
        if len(text) <= most:
            return text
        return f"{text[:most]}\n[cut: {len(text) - most} more characters]"

    def _ended(self, one: EpisodeState, sampling: Sampling, version: int) -> Trajectory:
        assert one.stop is not None
        # A thread may still be at work in an episode that hung: nobody asks it anything any more.
        failed = Grade(score=0.0, passed=False, feedback="The environment did not answer.")
        return Trajectory(
            id=one.start.id,
            task=one.start.task,
            turns=tuple(one.turns),
            source="student",
            policy_version=version if one.oldest_version is None else one.oldest_version,
            temperature=sampling.temperature,
            stop=one.stop,
            grade=failed if one.timed_out else one.episode.grade(),
        )


def _step(episode: Episode, sample: Sample) -> Callable[[], Observation]:
    return lambda: episode.step(sample.text)


def _failure(kind: str, message: str) -> Event:
    return Event(kind=kind, details={"message": message})


def reply_passes(
    begin: Callable[[Task], Episode],
    trajectory: Trajectory,
    turn: int,
    reply: str,
    *,
    seconds: float,
) -> bool:
    """Whether `reply`, in place of that turn, goes without an error: the episode is played again up
    to there, as it follows from its task and what the student wrote."""
    before = [t.text for t in trajectory.turns[:turn] if t.role == "assistant"]

    def replay() -> Observation:
        episode = begin(trajectory.task)
        for text in before:
            episode.step(text)
        return episode.step(reply)

    (outcome,) = call_all_with_timeout([replay], seconds=seconds * (len(before) + 1))
    return outcome.value is not None and not outcome.value.events
