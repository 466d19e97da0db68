"""What an engine takes and gives. Requests in, results in the same order out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from courtside.types import Sample


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


class Head:
    """Last hidden states to logits over the first `num_words` words, in float32 or better."""

    def __init__(self, module: nn.Module, *, num_words: int, softcap: float | None, scale: float):
        self.module = module
        self.num_words = num_words
        self.softcap = softcap
        self.scale = scale

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        weight: Any = self.module.weight
        bias: Any = getattr(self.module, "bias", None)
        weight = weight[: self.num_words]
        bias = None if bias is None else bias[: self.num_words]
        logits_NV = F.linear(hidden_ND.to(weight.dtype), weight, bias)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


class Engine(Protocol):
    """A model that can write and that can say how likely a text is."""

    name: str
    head: Head
    num_parameters: int

    def sample(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]: ...

    def score(
        self, requests: Sequence[ScoreRequest], *, hidden: bool = False, top_k: int = 0
    ) -> list[Scores]: ...
