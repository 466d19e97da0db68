"""One running episode: its turns so far, its limits, and how environment failures become turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic

from courtside.chat.incremental import IncrementalTemplate
from courtside.environments.base import Episode
from courtside.recipe import LimitsConfig
from courtside.rollout.timeouts import CallResult
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

NO_ANSWER = Grade(score=0.0, passed=False, feedback="The environment did not answer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """An episode to run."""

    id: str
    task: Task
    seed: int
    start: Callable[[Task], Episode]


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
