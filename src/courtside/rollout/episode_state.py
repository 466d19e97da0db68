"""One episode on its way: its turns so far, and why it ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic

from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.base import SampleRequest, Sampling
from courtside.environments.base import EpisodeRequest, HostedEpisode
from courtside.recipe.rollout import LimitsConfig
from courtside.sanitize import truncate
from courtside.seeds import seed_for
from courtside.types import (
    Grade,
    Message,
    Observation,
    Sample,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """What all episodes of a batch have in common."""

    sampling: Sampling
    policy_version: int
    """That of the engine, where its samples do not report theirs."""
    max_turns: int | None
    max_seconds: float | None
    max_tokens: int


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

    def next_request(self) -> SampleRequest:
        """For the student's next turn."""
        seed = seed_for(self.request.seed, "turn", self.num_assistant_turns)
        return SampleRequest(prompt_ids=self.pending_ids, seed=seed)

    def check_limits(self, settings: EpisodeSettings) -> None:
        """Sets `stop` where a limit leaves no further turn."""
        if self.stop is not None:
            return
        seconds = monotonic() - self.start_time
        if settings.max_turns is not None and self.num_assistant_turns >= settings.max_turns:
            self.stop = "turns"
        elif self.num_tokens + settings.sampling.max_new_tokens > settings.max_tokens:
            self.stop = "length"
        elif settings.max_seconds is not None and seconds > settings.max_seconds:
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
        num_new = self._add_experts(sample)
        events = () if observation is None else observation.events
        decision = None if observation is None else observation.decision
        turn = template.assistant_turn(sample, events, decision)
        if num_new is not None and sample.routed_experts is not None:
            turn = turn.with_experts(sample.routed_experts[num_new:])
        self._append(turn)

    def _add_experts(self, sample: Sample) -> int | None:
        """To the turns that this sample's pass over `pending_ids` was the first to process: the
        last ones, and the last token of the turn before them. Returns how many tokens that were;
        None: the prompt was another model's."""
        experts = sample.routed_experts
        if experts is None or self.request.prompt_ids is not None:
            return None
        start, num_pending = 0, len(self.pending_ids)
        missing = [len(turn.token_ids) - turn.num_routed for turn in self.turns]
        assert sum(missing) == num_pending, "a token's experts are recorded once"
        for index, count in enumerate(missing):
            if count:
                self.turns[index] = self.turns[index].with_experts(experts[start : start + count])
                start += count
        return num_pending

    def finish(self, settings: EpisodeSettings) -> Trajectory:
        assert self.stop is not None
        version = settings.policy_version
        return Trajectory(
            id=self.request.id,
            task=self.request.task,
            turns=tuple(_add_versions(turn, version) for turn in self.turns),
            source="student",
            policy_version=version if self.oldest_version is None else self.oldest_version,
            temperature=settings.sampling.temperature,
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


def _add_versions(turn: Turn, policy_version: int) -> Turn:
    if turn.sampler_logp is None or turn.policy_versions:
        return turn
    span = VersionSpan(0, len(turn.token_ids), policy_version)
    return replace(turn, policy_versions=(span,))
