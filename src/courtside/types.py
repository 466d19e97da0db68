"""The records that travel between stages. Frozen, without torch at run time, complete.

A record carries its own identity, policy version, teacher and context, so nothing is ever aligned
by its position in some other list. `None` means "never measured" and is not 0.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 1
"""Of the stored records; files with a newer one are refused."""

Split = Literal["train", "validation", "test"]
Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["student", "teacher", "dataset"]
Correction = Literal["choose", "rewrite", "takeover"]
"""The way of a recipe's `drafts` that made a trajectory a correction of another."""
StopReason = Literal["eos", "stop_string", "length", "dataset", "turns", "done", "time", "fault"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str
    extra: str = ""
    """Other keys of a chat API's message (`tool_calls`, `tool_call_id`, `name`,
    `reasoning_content`) as a JSON object, which the chat template renders; empty: none."""
    tools: str = ""
    """On the first message of a prompt: the tool schemas that the chat template renders, as JSON;
    empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A program's grade of one answer."""

    score: float
    """In [0, 1]; the reward of reinforcement learning."""
    passed: bool
    feedback: str = ""
    """The reason in a sentence, which may become a teacher's context; empty: none."""
    error: str | None = None
    """What a grader of the user's own raised; the score is 0 then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt and everything known about it.

    >>> Task(id="arithmetic-7f3a", split="train", messages=(Message(role="user", content="2+2"),),
    ...      answer="4", grader="number").answer
    '4'
    """

    id: str
    """A hash of the content: equal ids mean equal tasks, and the split follows from it."""
    split: Split
    messages: tuple[Message, ...]
    """The student's prompt. Ends with the message to be answered, or after it with one of the
    assistant: a response prefix, which the answer continues."""
    answer: str | None = None
    """Reference answer for the grader; the student never sees it."""
    completion: str | None = None
    """A text to imitate (off-policy distillation), without the response prefix."""
    rejected: str | None = None
    """The worse text of a preference pair; `completion` is the better one."""
    completion_thoughts: str = ""
    """What the model thinks before the completion, as the chat template renders it; empty: nothing,
    or the completion begins with it."""
    rejected_thoughts: str = ""
    privileged: Mapping[str, str] = field(default_factory=dict)
    """Named texts that only a teacher may see: a rule, a reference solution."""
    tags: tuple[str, ...] = ()
    """For routing to teachers and for breaking evaluation down."""
    grader: str | None = None
    """Name of a grader in `courtside.tasks.graders`; None: the task cannot be graded."""
    grader_args: Mapping[str, Any] = field(default_factory=dict)
    conversation: tuple[Mapping[str, Any], ...] = ()
    """Messages after the prompt of a recorded conversation, in the format of chat APIs."""

    @property
    def given_answers(self) -> tuple[tuple[str, str], ...]:
        """Text and thoughts of the completion and of the rejected one, as far as there are any."""
        answers = (
            (self.completion, self.completion_thoughts),
            (self.rejected, self.rejected_thoughts),
        )
        return tuple((text, thoughts) for text, thoughts in answers if text is not None)


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a sample that were sampled with one version of the weights."""

    start: int
    end: int
    version: int
    """Optimizer steps of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled completion."""

    token_ids: tuple[int, ...]
    """Sampled ids, the end token included."""
    logp: tuple[float, ...]
    """Under the distribution that each token was sampled from."""
    stop: StopReason
    text: str
    """Without special tokens, cut before a stop string."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """The weights of each token, where the engine reports them; empty: one version for all."""
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    """[tokens, layers, experts per token], small integers: the experts of a mixture that each token
    went to, of the request's prompt and then of all sampled tokens but the last, which has not been
    through the model. None: not asked for, or not recorded by the engine."""

    def oldest_version(self, requested: int) -> int:
        """`requested`: the version that the engine had when the sample was requested."""
        return min((span.version for span in self.policy_versions), default=requested)

    def version_spans(self, requested: int) -> tuple[VersionSpan, ...]:
        """Of all tokens; `requested` as above."""
        return self.policy_versions or (VersionSpan(0, len(self.token_ids), requested),)


class TokenUsage(NamedTuple):
    """Tokens of one model in a stage."""

    input_tokens: int = 0
    """Prompts, and sequences that were scored."""
    output_tokens: int = 0
    """Sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An error in one assistant turn, as its environment reports it."""

    kind: str
    """E.g. "tool_not_found"."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Named facts for a reader's templates, any JSON values: the tool, its arguments, the error
    message."""

    def detail(self, name: str) -> str:
        """A detail as text: JSON unless it is a string; empty if there is none."""
        value = self.details.get(name, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of a trajectory with one author."""

    role: Literal["prompt", "assistant", "environment"]
    text: str
    """For people. Training uses `token_ids`."""
    token_ids: tuple[int, ...]
    """Exactly the ids in the model's context; never re-tokenized from text."""
    completion_mask: tuple[bool, ...]
    """True where the turn's author chose the token. Only these can train."""
    sampler_logp: tuple[float, ...] | None = None
    """Per token, under the distribution it was sampled from (temperature and truncation applied).
    None: not sampled by us. NaN where `completion_mask` is False."""
    messages: tuple[Message, ...] = ()
    """The environment's messages of this turn; a prompt's are those of its task."""
    num_generation_prompt_tokens: int = 0
    """How many of the last ids are the template's generation prompt."""
    events: tuple[Event, ...] = ()
    """Errors of an assistant turn."""
    decision: str | None = None
    """What the environment calls the decision that an assistant turn made; see `Observation`."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """The student's weights that sampled each span of `token_ids`; empty: it sampled none."""
    routed_experts: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    """Concatenated: the experts of its first tokens when the student sampled, as in `Sample`. They
    are in memory until the step has trained, and in no file."""

    def __post_init__(self) -> None:
        assert self.num_routed <= len(self.token_ids)
        assert len(self.completion_mask) == len(self.token_ids) >= self.num_generation_prompt_tokens
        assert all(span.end <= len(self.token_ids) for span in self.policy_versions)
        assert self.sampler_logp is None or len(self.sampler_logp) == len(self.token_ids)

    @property
    def num_routed(self) -> int:
        """How many of its first tokens have their experts recorded."""
        return sum(map(len, self.routed_experts))

    def with_experts(self, experts: Tensor) -> Turn:
        """`experts`: of the tokens that follow those whose experts it has."""
        return replace(self, routed_experts=(*self.routed_experts, experts))

    def as_context(self) -> Turn:
        """The same ids, of which none trains."""
        mask = (False,) * len(self.token_ids)
        return replace(self, completion_mask=mask, sampler_logp=None, policy_versions=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What happened on one task. Concatenated turns are exactly the sequence that is trained."""

    id: str
    task: Task
    turns: tuple[Turn, ...]
    source: Source
    """Who chose the completion tokens."""
    policy_version: int | None
    """Optimizer steps of the (oldest) student that sampled it; None: not sampled by the student."""
    temperature: float
    """The sampler's; student and teacher are compared at this temperature."""
    stop: StopReason
    grade: Grade | None = None
    fault: str | None = None
    """The bug in the environment that ended the episode (`stop` is "fault", and there is no grade);
    it says nothing about the student."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """By the name of the recipe's reward, not weighted; None: user code raised. Empty: the recipe
    has no [[rewards]], and the grade is the reward."""
    preference: Literal["better", "worse"] | None = None
    """Set on the two members of a preference pair, which share their task."""
    pair: str | None = None
    """Names the preference pair of this member; None: the two answers of a data set to one task."""
    num_replaced: int | None = None
    """Tokens of the student that the teacher replaced in mixed sampling; None: not sampled so."""
    draft: str | None = None
    """Id of the student's trajectory that this one corrects or is preferred to; None: of none."""
    correction: Correction | None = None
    """How it corrects `draft`: it ranks above it (`choose`), repairs it (`rewrite`), or plays on
    from one of its states (`takeover`)."""
    critique: str | None = None
    """What a critic wrote about it, for a teacher's context."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(i for turn in self.turns for i in turn.token_ids)

    @property
    def completion_mask(self) -> tuple[bool, ...]:
        return tuple(c for turn in self.turns for c in turn.completion_mask)

    @property
    def num_completion_tokens(self) -> int:
        return sum(sum(turn.completion_mask) for turn in self.turns)

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """T ids, T = num_completion_tokens: the tokens that can train, in order."""
        return tuple(compress(self.token_ids, self.completion_mask))

    @property
    def turn_of(self) -> tuple[int, ...]:
        """Of each of the T completion tokens: the index of its turn."""
        return tuple(i for i, turn in enumerate(self.turns) for c in turn.completion_mask if c)

    @property
    def sampler_logp(self) -> tuple[float, ...] | None:
        """T log-probs of the completion tokens; None unless every one was sampled by us."""
        logps: list[float] = []
        for turn in self.turns:
            if turn.sampler_logp is not None:
                logps += compress(turn.sampler_logp, turn.completion_mask)
            elif any(turn.completion_mask):
                return None
        return tuple(logps)

    @property
    def token_versions(self) -> tuple[int | None, ...]:
        """Of each of the T completion tokens: optimizer steps of the student that sampled it; None:
        the student did not."""
        versions: list[int | None] = []
        for turn in self.turns:
            of_turn: list[int | None] = [None] * len(turn.token_ids)
            for start, end, version in turn.policy_versions:
                of_turn[start:end] = [version] * (end - start)
            versions += compress(of_turn, turn.completion_mask)
        return tuple(versions)

    @property
    def routed_experts(self) -> tuple[Tensor, ...]:
        """Concatenated: the experts of its first tokens, up to the first that has none recorded."""
        parts: list[Tensor] = []
        for turn in self.turns:
            parts += turn.routed_experts
            if turn.num_routed < len(turn.token_ids):
                break
        return tuple(parts)

    def without_experts(self) -> Trajectory:
        turns = tuple(replace(turn, routed_experts=()) for turn in self.turns)
        return replace(self, turns=turns)

    def as_teacher(self) -> Trajectory:
        """The same, as a teacher sampled it: no weights of the student had a part in it."""
        turns = tuple(replace(turn, policy_versions=(), routed_experts=()) for turn in self.turns)
        return replace(self, source="teacher", policy_version=None, turns=turns)

    @property
    def hintable_turns(self) -> tuple[int, ...]:
        """Indices of turns that can get a hint: assistant turns with completion tokens."""
        turns = enumerate(self.turns)
        return tuple(i for i, t in turns if t.role == "assistant" and any(t.completion_mask))

    def author_of(self, turn: int) -> Source:
        """Who wrote an assistant turn: what precedes a take-over is the student's."""
        is_trunk = self.correction == "takeover" and not any(self.turns[turn].completion_mask)
        return "student" if is_trunk else self.source

    @property
    def is_pair_copy(self) -> bool:
        """Whether it repeats one turn of another trajectory as a member of a preference pair, and
        trains in no other loss."""
        if self.preference is None or self.correction is None:
            return False
        return self.correction == "takeover" or self.preference == "worse"

    @property
    def response(self) -> str:
        """Text of the last assistant turn, for graders."""
        return next((t.text for t in reversed(self.turns) if t.role == "assistant"), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's answer to one assistant turn."""

    messages: tuple[Message, ...]
    """Appended to the student's context; at least one unless `done`."""
    done: bool = False
    events: tuple[Event, ...] = ()
    """Errors of the turn that is answered."""
    decision: str | None = None
    """Kind of decision that this turn made, whether it went well or not, e.g. `date/habit_wrong`.
    Errors are measured by kind; None: the turn is not told apart from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A short text for a teacher's context only, inserted before one turn of a trajectory."""

    trajectory: str
    turn: int
    """Id of the trajectory, and index of one of its assistant turns."""
    text: str
    source: str
    """The reader that gave it, e.g. "rules:tool_not_found", "model", "human"."""
    reason: str = ""
    """Why, for people."""
    confidence: float | None = None
    bad_span: str | None = None
    """The part of the turn's text that the hint is against, where the reader can name it."""
    wrong_text: str | None = None
    """A hint that is not meant for this turn, where `hints.contrast` asks for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintOutcome:
    """A hint and what it did to the turn that follows it."""

    hint: Hint
    shift: float | None
    """Nats by which the turn's tokens became less likely under the hint; None: not measured."""
    bad_span_shift: float | None = None
    """The same of the tokens that `hint.bad_span` covers; None: there are none."""
    pass_rate: float | None = None
    """Share of replies sampled under the hint that the environment accepts; None: none were."""
    drop_reason: str | None = None
    """Why it does not train, e.g. "harmful", "shift", "too_long"; None: it trains."""

    @property
    def is_harmful(self) -> bool:
        """Whether the turn became more likely under the hint."""
        return self.shift is not None and self.shift < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverOutcome:
    """What became of a draft that was selected for a take-over by the teacher."""

    turn: int | None
    """Index of the turn in which the teacher takes over; None: no turn was located."""
    teacher: str | None = None
    """Name of the teacher; None: it never sampled."""
    num_input_tokens: int = 0
    """What the teacher was given: its prompt, the student's tokens and the environment's."""
    num_sampled_tokens: int = 0
    num_requests: int = 0
    """To a server of texts; 0: the teacher is none."""
    stop: StopReason | None = None
    grade: Grade | None = None
    """Of the answer or episode that the teacher finished."""
    drop_reason: str | None = None
    """Why it does not train, e.g. "not_passed", "replay"; None: it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A turn with a hint before it: what follows the trunk's first `splice` ids."""

    trajectory: str
    turn: int
    splice: int
    """How many ids of the trajectory (the trunk) precede the branch."""
    token_ids: tuple[int, ...]
    """The hint, the generation prompt, then the turn's ids verbatim."""
    scored: tuple[bool, ...]
    """True on the completion ids of the turn."""

    def __post_init__(self) -> None:
        assert len(self.scored) == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A teacher's scores of the completion tokens of one trajectory. Its distributions are `head`
    of `hidden_TD`, or the K likeliest tokens; neither, where the losses need only `logp_T`."""

    teacher: str
    """Name of the teacher, e.g. "self:live" or a model's name."""
    context: str | None
    """The privileged text in the teacher's context; None: the same context as the student."""
    logp_T: Tensor
    """Log-probability of each completion token, at the trajectory's temperature."""
    hidden_TD: Tensor | None = None
    head: Any = None
    """The teacher's `engines.lm_head.LMHead`, the same object for all targets of one teacher."""
    top_ids_TK: Tensor | None = None
    top_logp_TK: Tensor | None = None
    """Log-probabilities of `top_ids_TK` over the whole vocabulary, the likeliest first."""
    num_student_ids: int = 0
    """How many of `top_ids_TK`, the last ones, are the student's likeliest tokens before the step
    in place of the teacher's."""
    wrong_logp_T: Tensor | None = None
    wrong_hidden_TD: Tensor | None = None
    """The same under a wrong hint, where `hints.contrast` asks for it."""
    num_context_tokens: int = 0
    """By how many tokens the teacher's sequence is longer than the student's."""
    token_indices: tuple[int, ...] | None = None
    """Which completion tokens are scored, one row of the tensors each, in order; None: all."""

    def to_record(self) -> Target:
        """Without the distributions, which stay in the process that trains on them."""
        return replace(
            self,
            logp_T=self.logp_T.cpu(),
            wrong_logp_T=None if self.wrong_logp_T is None else self.wrong_logp_T.cpu(),
            hidden_TD=None, wrong_hidden_TD=None, head=None, top_ids_TK=None, top_logp_TK=None,
        )  # fmt: skip

    def without_turns(self, trajectory: Trajectory, turns: Collection[int]) -> Target | None:
        """The target of the other turns alone; None: there are none."""
        turn_of = trajectory.turn_of
        indices = range(len(turn_of)) if self.token_indices is None else self.token_indices
        rows = [row for row, i in enumerate(indices) if turn_of[i] not in turns]
        names = (
            "logp_T", "hidden_TD", "top_ids_TK", "top_logp_TK", "wrong_logp_T", "wrong_hidden_TD",
        )  # fmt: skip
        tensors = {n: v[rows] for n in names if (v := getattr(self, n)) is not None}
        remaining = tuple(indices[row] for row in rows)
        return replace(self, token_indices=remaining, **tensors) if rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredTarget:
    """Hint branches that the update scores in its own forward pass, as the student is the teacher;
    `judge_hints` then completes the outcomes of the hints."""

    teacher: str
    branches: tuple[Branch, ...]
    """One for each hinted turn, in order."""
    token_indices: tuple[int, ...]
    """Which of the trajectory's completion tokens the branches score, in order."""
    bad_tokens: Mapping[int, tuple[int, ...]]
    """By turn: which of its completion tokens `hint.bad_span` covers, where it names any."""
    num_context_tokens: int
    needs_hidden: bool
    """Whether the losses need whole distributions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What a LoRA adapter adds to a linear map: scale · (x·downᵀ)·upᵀ."""

    down_RD: Tensor
    up_VR: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A trajectory with what the losses need to know about it."""

    trajectory: Trajectory
    target: Target | None
    """None: no teacher scored it (an RL or SFT recipe, a counted drop), or the update will."""
    deferred: DeferredTarget | None = None
    """Instead of a target: what the update scores itself. It stays when the target is there."""
    reference: Target | None = None
    """The student before training, where a loss needs it (extrapolation, preference)."""
    hints: tuple[HintOutcome, ...] = ()
    """Hints for this trajectory, also those that were dropped."""
    takeover: TakeoverOutcome | None = None
    """What became of this draft's take-over; None: it was not selected for one."""

    @property
    def hint_context(self) -> str:
        """The hints that train, as the context of a target."""
        return "\n\n".join(o.hint.text for o in self.hints if o.drop_reason is None)

    @property
    def harmful_turns(self) -> frozenset[int]:
        """Turns whose hints were measured before the update and dropped as harmful."""
        return frozenset(o.hint.turn for o in self.hints if o.drop_reason == "harmful")

    def to_record(self) -> Scored:
        target, reference = (t and t.to_record() for t in (self.target, self.reference))
        trajectory = self.trajectory.without_experts()
        return replace(self, trajectory=trajectory, target=target, reference=reference)

    @property
    def has_target(self) -> bool:
        return self.target is not None or self.deferred is not None

    @property
    def target_mask(self) -> tuple[bool, ...]:
        """True for those of the trajectory's completion tokens that a teacher scores."""
        scored = self.target or self.deferred
        if scored is None or scored.token_indices is None:
            return (scored is not None,) * self.trajectory.num_completion_tokens
        indices = set(scored.token_indices)
        return tuple(i in indices for i in range(self.trajectory.num_completion_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The outcome of one optimizer step."""

    step: int
    loss: float
    """Weighted sum of the components: what was differentiated."""
    components: Mapping[str, float]
    """Value of each loss component over its own denominator."""
    metrics: Mapping[str, float]
    """Diagnostics: KL, entropies, support masses, gradient norm, learning rate…"""
    num_tokens: Mapping[str, int]
    """Trained tokens of each component in this step."""
    student_logp: Mapping[str, tuple[float, ...]]
    """By trajectory id: log-probs of its completion tokens under the student before the step; NaN
    where the update did not compute them."""
    teacher_logp: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By trajectory id: the `logp_T` of deferred targets, which the update scored."""
    harmful_turns: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """By trajectory id: turns that trained nothing, as the update measured that their hints make
    them more likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Grades of answers to held-out tasks."""

    step: int
    """Optimizer steps of the weights that answered."""
    policy: str
    """`student`, or `teacher` for the teacher with its context (the gate)."""
    split: Split
    scores: Mapping[str, float]
    """By task id: mean score over its samples. Evaluations of the same tasks compare in pairs."""
    mean_score: float
    ci_low: float
    ci_high: float
    """Mean over tasks, and the ends of its 95% interval."""
    metrics: Mapping[str, float]
    """Mean length, truncated share…"""
    samples: tuple[Trajectory, ...] = ()
    """A few answers, for people."""
