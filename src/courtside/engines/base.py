"""What an engine takes and gives. Requests in, results in the same order out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from courtside.types import Branch, LowRank, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether some words cannot be drawn although the model gives them a chance."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    prompt_ids: tuple[int, ...]
    seed: int
    """The random numbers of the sample; they do not depend on what else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    token_ids: tuple[int, ...]
    scored: tuple[bool, ...]
    """T of them are True; never the first, which nothing predicts."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of the T scored tokens of one request."""

    logp_T: Tensor
    hidden_TD: Tensor | None = None
    """Hidden state that predicts each token: `Engine.head` makes logits of it."""
    top_ids_TK: Tensor | None = None
    top_logp_TK: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRequest:
    """A trajectory and the turns of it that are scored again, each with its own hint above it."""

    token_ids: tuple[int, ...]
    """The trunk: the trajectory as it was."""
    branches: tuple[Branch, ...]
    scored: tuple[bool, ...] | None = None
    """What of the trunk itself is scored in the same pass; None: nothing."""
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
        """How much of the trunk any branch or scored token looks at."""
        scored = [i for i, wanted in enumerate(self.scored or ()) if wanted]
        return max([1, *scored[-1:], *(branch.splice for branch in self.branches)])

    def trunk(self) -> ScoreRequest:
        assert self.scored is not None
        return ScoreRequest(
            token_ids=self.token_ids, scored=self.scored, temperature=self.temperature
        )

    def sequence(self, branch: Branch, *, start: int = 0) -> ScoreRequest:
        """The branch as a sequence of its own: the trunk from `start` to its splice, and it."""
        return ScoreRequest(
            token_ids=self.token_ids[start : branch.splice] + branch.token_ids,
            scored=(False,) * (branch.splice - start) + branch.scored,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchScores:
    trunk: Scores | None
    """None: not asked for."""
    branches: tuple[Scores, ...]
    """In the order of the request's."""
    note: str | None = None
    """Why the branches took a pass each; None: they shared one."""


class LMHead:
    """Last hidden states to logits over the first `vocab_size` words, in float32 or better.

    A linear map, to which a LoRA adapter of the model may add another of low rank.
    """

    def __init__(self, module: nn.Module, *, vocab_size: int, softcap: float | None, scale: float):
        self.module = module
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.scale = scale
        self.linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self._fixed_low_rank: tuple[LowRank | None] | None = None
        """None: `low_rank` follows the module's adapter."""

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the words that count."""
        weight: Any = self.module.weight
        bias: Any = getattr(self.module, "bias", None)
        return weight[: self.vocab_size], None if bias is None else bias[: self.vocab_size]

    @property
    def adapter(self) -> LowRank | None:
        """On or off: its parameters, of all words. None: the head has none."""
        layer: Any = self.module
        if not hasattr(layer, "lora_A"):
            return None
        (name,) = layer.active_adapters
        return LowRank(
            down_RD=layer.lora_A[name].weight,
            up_VR=layer.lora_B[name].weight,
            scale=float(layer.scaling[name]),
        )

    def low_rank(self) -> LowRank | None:
        """What the adapter adds to the words that count; None: it is off, or there is none."""
        if self._fixed_low_rank is not None:
            return self._fixed_low_rank[0]
        adapter: Any = None if getattr(self.module, "disable_adapters", False) else self.adapter
        return None if adapter is None else replace(adapter, up_VR=adapter.up_VR[: self.vocab_size])

    def as_now(self) -> LMHead:
        """This head with the adapter that is in place now, or without one while it is off,
        whatever is in place later: for a teacher whose words are looked at when it has spoken."""
        if self.adapter is None:
            return self
        now = self.low_rank()
        if now is not None:
            now = replace(now, down_RD=now.down_RD.detach(), up_VR=now.up_VR.detach())
        head = copy(self)
        head._fixed_low_rank = (now,)
        return head

    def products(self, hidden_ND: Tensor) -> Tensor:
        """Logits before scale and cap, in the numbers that they are multiplied in."""
        weight, bias = self.parameters()
        logits_NV = self.linear(hidden_ND.to(weight.dtype), weight, bias)
        low = self.low_rank()
        return logits_NV if low is None else _added(logits_NV, hidden_ND, low)

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self.products(hidden_ND)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


def _added(logits_NV: Tensor, hidden_ND: Tensor, low: LowRank) -> Tensor:
    """In the numbers that the model's own adapters are multiplied in, and rounded once."""
    dtype = logits_NV.dtype
    if not torch.is_autocast_enabled(logits_NV.device.type):
        dtype = torch.promote_types(dtype, low.up_VR.dtype)
    # Turned into them here: autocast would keep what it first rounded without a graph.
    down_RD, up_VR = low.down_RD.to(dtype), low.up_VR.to(dtype)
    reduced_NR = F.linear(hidden_ND.to(dtype), down_RD) * low.scale
    return torch.addmm(logits_NV.to(dtype), reduced_NR, up_VR.t())


class Session(Protocol):
    """Conversations of one model that go on over several calls, one a row."""

    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """Each row reads `prompt_ids` behind what it has read and written, and writes on.

        The last token that a row wrote nobody has read yet: its next prompt begins with that.
        """

    def restart(self, row: int) -> None:
        """Its conversation is over; its next prompt begins another."""


class Engine(Protocol):
    """A model that can write and that can say how likely a text is."""

    name: str
    head: LMHead
    num_parameters: int
    max_batch_tokens: int
    """Places of keys and values that it holds at once."""

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]: ...

    def score(
        self, requests: Sequence[ScoreRequest], *, hidden: bool = False, top_k: int = 0
    ) -> list[Scores]: ...

    def score_branches(
        self, requests: Sequence[BranchRequest], *, hidden: bool = False, top_k: int = 0
    ) -> list[BranchScores]: ...

    def session(self, num_rows: int, *, row_capacity: int | None = None) -> Session:
        """`row_capacity`: KV cache positions that a row is expected to need, if that is known."""
