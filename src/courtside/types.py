"""The records that travel between stages. Frozen, without torch at run time, complete.

A record carries its own identity, policy version, teacher and context, so nothing is ever aligned
by its position in some other list. `None` means "never measured" and is not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 2
"""Of the stored records; a reader refuses a newer one."""

Split = Literal["train", "validation", "test"]
Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["student", "teacher", "dataset"]
StopReason = Literal["eos", "stop_string", "length", "dataset", "turns", "done", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What a program says of one answer."""

    score: float
    """In [0, 1]; the reward of reinforcement learning."""
    passed: bool
    feedback: str
    """Why, in a sentence that a teacher may be shown. Empty when there is nothing to say."""


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
    """The prompt as the student sees it. Ends with the message to be answered."""
    answer: str | None = None
    """Reference answer for the grader; the student never sees it."""
    completion: str | None = None
    """A text to imitate (off-policy distillation)."""
    rejected: str | None = None
    """The worse text of a preference pair; `completion` is the better one."""
    privileged: Mapping[str, str] = field(default_factory=dict)
    """Named texts that only a teacher may see: a rule, a reference solution."""
    tags: tuple[str, ...] = ()
    """For routing to teachers and for breaking evaluation down."""
    grader: str | None = None
    """Name of a grader in `courtside.tasks.graders`; None: the task cannot be graded."""
    grader_args: Mapping[str, Any] = field(default_factory=dict)
    conversation: tuple[Mapping[str, Any], ...] = ()
    """What was said after `messages` when this was recorded elsewhere, as chat APIs write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a model wrote in answer to one prompt."""

    token_ids: tuple[int, ...]
    """What was drawn, the end token included."""
    logp: tuple[float, ...]
    """Under the distribution that each token was drawn from."""
    stop: StopReason
    text: str
    """Without special tokens, cut before a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that went wrong in one assistant turn, as its environment saw it.

    >>> Event(kind="tool_not_found", details={"tool": "weather"}).kind
    'tool_not_found'
    """

    kind: str
    details: Mapping[str, str] = field(default_factory=dict)
    """Named facts for a reader's templates: the tool, its arguments, the message that came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of a trajectory with one author."""

    role: Literal["prompt", "assistant", "environment"]
    text: str
    """For people. Training reads `token_ids`."""
    token_ids: tuple[int, ...]
    """Exactly the ids the model saw or wrote; never re-tokenised from text."""
    chosen: tuple[bool, ...]
    """True where the author of the turn picked the token. Only these can train."""
    sampler_logp: tuple[float, ...] | None = None
    """Per token, under the distribution it was drawn from (temperature and truncation applied).
    None: not sampled by us. NaN where `chosen` is False."""
    messages: tuple[Message, ...] = ()
    """What an environment said in this turn; a prompt's are those of its task."""
    num_generation_prompt_tokens: int = 0
    """How many of the last ids are the template's opening of the assistant's next message."""
    events: tuple[Event, ...] = ()
    """What went wrong in an assistant's turn."""

    def __post_init__(self) -> None:
        assert len(self.chosen) == len(self.token_ids) >= self.num_generation_prompt_tokens
        assert self.sampler_logp is None or len(self.sampler_logp) == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What happened on one task. Concatenated turns are exactly the sequence that is trained."""

    id: str
    task: Task
    turns: tuple[Turn, ...]
    source: Source
    """Who picked the chosen tokens."""
    policy_version: int | None
    """Optimiser steps behind the student that wrote it; None when it did not."""
    temperature: float
    """The sampler's; student and teacher are compared at this temperature."""
    stop: StopReason
    grade: Grade | None = None
    preference: Literal["better", "worse"] | None = None
    """Set on the two members of a preference pair, which share their task."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(i for turn in self.turns for i in turn.token_ids)

    @property
    def chosen(self) -> tuple[bool, ...]:
        return tuple(c for turn in self.turns for c in turn.chosen)

    @property
    def num_chosen(self) -> int:
        return sum(sum(turn.chosen) for turn in self.turns)

    @property
    def chosen_ids(self) -> tuple[int, ...]:
        """T ids, T = num_chosen: the tokens that can train, in order."""
        return tuple(i for t in self.turns for i, c in zip(t.token_ids, t.chosen, strict=True) if c)

    @property
    def turn_of(self) -> tuple[int, ...]:
        """Of each of the T chosen tokens: the index of its turn."""
        return tuple(i for i, turn in enumerate(self.turns) for c in turn.chosen if c)

    @property
    def sampler_logp(self) -> tuple[float, ...] | None:
        """T log-probs of the chosen tokens; None unless every chosen token was sampled by us."""
        logps: list[float] = []
        for turn in self.turns:
            if not any(turn.chosen):
                continue
            if turn.sampler_logp is None:
                return None
            pairs = zip(turn.sampler_logp, turn.chosen, strict=True)
            logps.extend(logp for logp, chosen in pairs if chosen)
        return tuple(logps)

    @property
    def response(self) -> str:
        """Text of the last assistant turn, which graders read."""
        return next((t.text for t in reversed(self.turns) if t.role == "assistant"), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment answers to one assistant turn."""

    messages: tuple[Message, ...]
    """Put before the student next; at least one unless `done`."""
    done: bool = False
    events: tuple[Event, ...] = ()
    """What was wrong with the turn that is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A few words that belong right above one turn of a trajectory. Only a teacher sees them."""

    trajectory: str
    """Its id."""
    turn: int
    """Index into its turns; an assistant's."""
    text: str
    source: str
    """Which reader wrote it, e.g. "rules:tool_not_found", "model", "human"."""
    reason: str = ""
    """Why, for people."""
    confidence: float | None = None
    bad_span: str | None = None
    """The words of the turn that the hint is against, where the reader can name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintOutcome:
    """A hint and what it did to the turn it stands above."""

    hint: Hint
    shift: float | None
    """How many nats the turn's tokens lost in sum under the hint; None: never measured."""
    bad_span_shift: float | None = None
    """The same of the tokens that `hint.bad_span` names; None: none named, or not found."""
    passed: float | None = None
    """Share of replies written under the hint that the environment accepts; None: not tried."""
    dropped: str | None = None
    """Why it does not train, e.g. "shift", "merge", "too_long"; None: it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One turn again, with a hint above it: what follows the trunk's first `splice` ids."""

    trajectory: str
    turn: int
    splice: int
    """How many ids of the trajectory (the trunk) the branch sees before its own."""
    token_ids: tuple[int, ...]
    """The hint, the opening of the assistant's message, the turn's ids: verbatim."""
    scored: tuple[bool, ...]
    """True on the ids of the turn that were chosen."""

    def __post_init__(self) -> None:
        assert len(self.scored) == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a teacher says about the T chosen tokens of one trajectory."""

    teacher: str
    """Name of the teacher, e.g. "self:live" or a model's name."""
    context: str | None
    """The privileged text the teacher saw; None: the same context as the student."""
    logp_T: Tensor
    """Log-probability of each chosen token, at the trajectory's temperature. NaN until `branches`
    have been read."""
    hidden_TD: Tensor | None = None
    """Last hidden states, where a loss needs whole distributions; `head` makes logits of them."""
    head: Any = None
    """The teacher's `engines.lm_head.LMHead`, the same object for all targets of one teacher."""
    num_context_tokens: int = 0
    """How many tokens longer the teacher's sequence is than the student's."""
    top_ids_TK: Tensor | None = None
    top_logp_TK: Tensor | None = None
    """The K likeliest tokens at each position in place of hidden states, where the teacher's engine
    has none."""
    token_indices: tuple[int, ...] | None = None
    """Which of the trajectory's chosen tokens are scored, in order; None: all. The tensors have one
    row for each."""
    branches: tuple[Branch, ...] = ()
    """Where the student is its own teacher: what the update reads over the keys and values of its
    own pass to fill this target, one a hinted turn and in their order. Empty: all is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to a linear map: scale · (x·downᵀ)·upᵀ."""

    down_RD: Tensor
    up_VR: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A trajectory with what the losses need to know about it."""

    trajectory: Trajectory
    target: Target | None
    """None: no teacher spoke on this one (an RL-only or SFT-only recipe, or a counted drop)."""
    reference: Target | None = None
    """The student before training, where a loss asks for it (extrapolation, preference)."""
    hints: tuple[HintOutcome, ...] = ()
    """Hints for this trajectory, also those that were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser step, as it happened."""

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
    """By trajectory id: log-probs of its chosen tokens under the student just before the step."""
    teacher_logp: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By trajectory id: the `logp_T` of targets whose branches were read in the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out tasks, answered and graded."""

    step: int
    """Optimiser steps behind the weights that answered."""
    who: str
    """`student`, or `teacher` for the teacher with its context (the gate)."""
    split: Split
    scores: Mapping[str, float]
    """By task id: mean score over the samples of that task. Two evaluations of the same tasks can
    be compared in pairs."""
    rate: float
    """Mean over tasks."""
    low: float
    high: float
    """Ends of the 95% interval of `rate`."""
    metrics: Mapping[str, float]
    """Mean length, truncated share…"""
    samples: tuple[Trajectory, ...] = ()
    """A few answers, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """What one phase (rollout, teacher, update, evaluate) has cost so far."""

    seconds: float = 0.0
    tokens_in: int = 0
    """Tokens read: prompts, contexts, scored or trained sequences."""
    tokens_out: int = 0
    """Tokens written by sampling."""
    flops: float = 0.0
    """2 · parameters · tokens for a forward pass, three times that for a trained one."""
