"""The engine protocol: requests in, results in the same order out. Imports no torch.

`Engine` is all that a rollout, a reader or a teacher may ask for, so that a server can stand in for
the in-process model. `LocalEngine` in `engines/local.py` gives more (`InProcessEngine`). Sessions
and branch scoring come from `sample` and `score` alone where an engine has nothing better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast

from courtside.types import Branch, Sample, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from courtside.engines.lm_head import LMHead

Want = Literal["logp", "top_k", "hidden"]
"""What `score` gives in addition to the log-probs of the scored tokens: nothing, the k likeliest
tokens at each position, or the hidden states, of which an LM head makes whole distributions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    return_routed_experts: bool = False
    """Whether samples are to have `routed_experts`, where the model has any and the engine can."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled although the model gives them probability."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    prompt_ids: tuple[int, ...]
    seed: int
    """Seed of this sample alone: it does not depend on what else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSize:
    """Whether a prompt fits a model."""

    model: str
    num_tokens: int
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What follows the last scored token is left out: the last observation of an episode, which
    nobody answers, may not fit the context."""

    token_ids: tuple[int, ...]
    scored: tuple[bool, ...]
    """True for T tokens; never for the first, which nothing predicts."""
    temperature: float = 1.0
    given_ids: tuple[tuple[int, ...], ...] | None = None
    """For each of the T tokens: other ids at its position whose log-probs are asked for, as many
    for all; None: none are."""
    routed_experts: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    """Concatenated: experts of its first tokens, which a mixture's routers are to select."""

    def __post_init__(self) -> None:
        assert self.temperature > 0, "greedy decoding has no log-probs"
        assert self.given_ids is None or len(self.given_ids) == sum(self.scored)
        end = max((i for i, scored in enumerate(self.scored) if scored), default=0) + 1
        object.__setattr__(self, "token_ids", self.token_ids[:end])
        object.__setattr__(self, "scored", self.scored[:end])

    @classmethod
    def of_trajectory(cls, trajectory: Trajectory) -> ScoreRequest:
        """All completion tokens of a trajectory."""
        return cls(
            token_ids=trajectory.token_ids,
            scored=trajectory.completion_mask,
            temperature=trajectory.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of the T scored tokens of one request."""

    logp_T: Tensor
    hidden_TD: Tensor | None = None
    """Hidden state that predicts each token; `LMHead` makes logits of it."""
    top_ids_TK: Tensor | None = None
    top_logp_TK: Tensor | None = None
    given_logp_TK: Tensor | None = None
    """Of the request's `given_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRequest:
    """A trajectory and those of its turns that are scored again, each with a hint before it."""

    token_ids: tuple[int, ...]
    """The trunk: the trajectory without hints."""
    branches: tuple[Branch, ...]
    scored: tuple[bool, ...] | None = None
    """Tokens of the trunk that are scored in the same pass; None: none."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        assert self.scored is None or len(self.scored) == len(self.token_ids)
        assert self.token_ids and not (self.scored and self.scored[0]), "nothing predicts the first"
        for branch in self.branches:
            assert 0 <= branch.splice <= len(self.token_ids), "a branch leaves the trunk somewhere"
            assert branch.token_ids, "a branch without a token"
            assert branch.splice or not branch.scored[0], "nothing predicts the first token"

    @property
    def num_read(self) -> int:
        """Length of the trunk's prefix that any branch or scored token attends to."""
        last_scored = [i for i, is_scored in enumerate(self.scored or ()) if is_scored][-1:]
        return max([1, *last_scored, *(branch.splice for branch in self.branches)])

    def trunk(self) -> ScoreRequest:
        assert self.scored is not None
        return ScoreRequest(
            token_ids=self.token_ids, scored=self.scored, temperature=self.temperature
        )

    def sequence(self, branch: Branch, *, start: int = 0) -> ScoreRequest:
        """The branch as a separate sequence, after the trunk from `start` to the splice."""
        return ScoreRequest(
            token_ids=self.token_ids[start : branch.splice] + branch.token_ids,
            scored=(False,) * (branch.splice - start) + branch.scored,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchScores:
    trunk: Scores | None
    """None: not requested."""
    branches: tuple[Scores, ...]
    """In the order of the request."""
    note: str | None = None
    """Why each branch took a separate pass; None: tree scoring."""


class Session(Protocol):
    """Conversations that continue over several calls, one per row."""

    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """Append `prompt_ids` to each row's context and sample.

        The last token of a row's previous sample has not been through the model yet: the row's next
        prompt begins with it.
        """

    def restart(self, row: int) -> None:
        """End the row's conversation; its next prompt begins another."""


class IndependentSession(Session, Protocol):
    """A session whose rows do not wait for each other."""

    def begin(self, row: int, request: SampleRequest, sampling: Sampling) -> Future[Sample]:
        """`sample` for one row; the next call for this row must wait for its sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can give. Recipes that need more are refused when a run is assembled."""

    top_k: int
    """The largest k of `want="top_k"`; 0: none."""
    hidden_states: bool
    """Whether it is an `InProcessEngine`: `want="hidden"` and `head`."""
    branches: bool
    """Whether it has `score_branches`, which scores all hints of a trajectory in one pass."""
    weight_updates: bool
    """Whether `load_weights` makes it follow the student."""
    row_state_tokens: int = 0
    """Tokens whose keys and values take the memory of what a row has cached however short it is:
    recurrent and convolution states."""
    given_ids: int = 0
    """How many ids a position a request may name for their log-probs (`ScoreRequest.given_ids`)."""
    independent_rows: bool = False
    """Whether its sessions are `IndependentSession`s."""
    mixed_sampling: bool = False
    """Whether its model decodes token by token with another one (`engines/mixed_sampling.py`)."""


class Engine(Protocol):
    """A model that samples and scores, in this process or elsewhere."""

    name: str
    num_parameters: int
    eos_ids: frozenset[int]
    context_length: int
    max_batch_tokens: int
    """Tokens that its KV cache holds at once."""

    @property
    def capabilities(self) -> Capabilities: ...

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]: ...

    def score(
        self, requests: Sequence[ScoreRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[Scores]: ...

    def session(self, num_rows: int, *, row_capacity: int | None = None) -> Session:
        """`row_capacity`: KV cache positions that a row is expected to need, if that is known."""

    def load_weights(self, version: int) -> None:
        """Take over the student's weights after `version` optimizer steps."""

    def notes(self) -> Sequence[str]:
        """What a user should know: which optimizations this model does without, and why."""


class InProcessEngine(Engine, Protocol):
    """An engine whose hidden states and LM head are tensors of this process."""

    head: LMHead

    def score_branches(
        self, requests: Sequence[BranchRequest], *, want: Want = "logp", top_k: int = 0
    ) -> list[BranchScores]: ...


# ── for any engine ───────────────────────────────────────────────────────────────────────────────


class StatelessSession:
    """Sends the whole conversation with every turn: exact, and slower without a prefix cache."""

    def __init__(
        self,
        sample: Callable[[Sequence[SampleRequest], Sampling], list[Sample]],
        *,
        num_rows: int,
        note: str,
    ):
        self._sample = sample
        self.note = note
        """Why no KV cache is kept between turns."""
        self.contexts: list[tuple[int, ...]] = [()] * num_rows

    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        whole = [
            SampleRequest(prompt_ids=self.contexts[row] + request.prompt_ids, seed=request.seed)
            for row, request in zip(rows, requests, strict=True)
        ]
        samples = self._sample(whole, sampling)
        for row, request, sample in zip(rows, whole, samples, strict=True):
            self.contexts[row] = request.prompt_ids + sample.token_ids[:-1]
        return samples

    def restart(self, row: int) -> None:
        self.contexts[row] = ()


def score_branches(
    engine: Engine, requests: Sequence[BranchRequest], *, want: Want = "logp", top_k: int = 0
) -> list[BranchScores]:
    """Tree scoring where the engine has it, else one sequence per branch."""
    if engine.capabilities.branches:
        return cast(InProcessEngine, engine).score_branches(requests, want=want, top_k=top_k)
    note = f"{engine.name} has no tree scoring"
    return score_branches_separately(engine, requests, want=want, top_k=top_k, note=note)


def score_branches_separately(
    engine: Engine,
    requests: Sequence[BranchRequest],
    *,
    want: Want = "logp",
    top_k: int = 0,
    note: str | None = None,
) -> list[BranchScores]:
    """The scores of `score_branches` from one sequence per branch, for any engine and model."""
    sequences: list[ScoreRequest] = []
    for request in requests:
        sequences += [request.trunk()] if request.scored is not None else []
        sequences += [request.sequence(branch) for branch in request.branches]
    scores = iter(engine.score(sequences, want=want, top_k=top_k))
    return [
        BranchScores(
            trunk=next(scores) if request.scored is not None else None,
            branches=tuple(next(scores) for _ in request.branches),
            note=note,
        )
        for request in requests
    ]
