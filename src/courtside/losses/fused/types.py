"""What goes into `fused_linear_divergence` and what comes out.

π is the student and q the teacher, both softmax(logits / temperature) over the same vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from courtside.losses.divergences import Form, find_divergence
from courtside.losses.full_vocabulary import divergence
from courtside.losses.policy_gradient import SampledTokenLoss, sampled_token_coefficients
from courtside.losses.top_k import SupportOf, top_k_divergence
from courtside.types import LowRank

Backend = Literal["torch", "triton"]

CLOSED_FORMS = ("reverse_kl", "forward_kl", "jsd", "skew_forward_kl", "skew_reverse_kl")
"""Divergences over the whole vocabulary whose gradient both backends have in closed form."""


# ── distributions ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Hidden states and the LM head that makes logits of them.

    logits = cap(scale · (hidden·weightᵀ + bias)), cap(z) = softcap·tanh(z / softcap), in the
    weight's dtype. `low_rank` is added to hidden·weightᵀ.
    """

    hidden_ND: Tensor
    weight_VD: Tensor
    """May have more rows than the other side's: both are cut to the vocabulary they share."""
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    low_rank: LowRank | None = None
    """A LoRA adapter on the head, in the weight's dtype; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """The target q^λ·ref^(1−λ), normalized: λ > 1 goes beyond the teacher."""

    teacher: Projection
    reference: Projection
    lam: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKTarget:
    """A teacher of which only K tokens are known: its own most likely ones, then those of the
    student, each most likely first."""

    ids_NK: Tensor
    logp_NK: Tensor
    """Normalized over the full vocabulary, at the temperature of the row."""
    num_student: int = 0
    """How many of the K are the student's."""

    @property
    def num_teacher(self) -> int:
        return self.ids_NK.shape[-1] - self.num_student

    def __getitem__(self, rows: slice) -> TopKTarget:
        return replace(self, ids_NK=self.ids_NK[rows], logp_NK=self.logp_NK[rows])

    def select(self, k: int, of: SupportOf) -> tuple[Tensor, Tensor]:
        """(ids, logq) of a support; those of a joint one list the teacher's tokens first."""
        spans = {
            "teacher": slice(0, k),
            "student": slice(self.num_teacher, self.num_teacher + k),
        }
        sides = ("teacher", "student") if of == "joint" else (of,)
        return tuple(  # type: ignore[return-value]
            torch.cat([values_NK[:, spans[side]] for side in sides], dim=-1)
            for values_NK in (self.ids_NK, self.logp_NK)
        )


Target = Projection | Extrapolation | TopKTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLogits:
    """hidden·weightᵀ + bias of some rows: before scale, cap and temperature."""

    values_NV: Tensor
    scale: float
    softcap: float | None

    def __getitem__(self, rows: slice) -> RawLogits:
        return replace(self, values_NV=self.values_NV[rows])


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The k most likely tokens instead of the vocabulary; `top_k` explains the forms."""

    k: int
    of: SupportOf
    form: Form


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceSpec:
    """A registered divergence with its parameters; see `losses/divergences`."""

    name: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    support: Support | None = None
    """None: the whole vocabulary."""
    clip: float | None = None
    """Cap on the term of one token at one position."""

    def __post_init__(self) -> None:
        divergence = find_divergence(self.name)
        divergence.check_parameters(self.parameters)
        if self.support is not None:
            divergence.check_form(self.support.form)

    @property
    def closed_form(self) -> str | None:
        """Which of `CLOSED_FORMS` it is; None: it is differentiated by autograd.

        At the ends of their ranges JSD and the skewed KLs are plain KLs, without a mixture.
        """
        has_terms_only = self.support is not None or self.clip is not None
        if has_terms_only or self.name not in CLOSED_FORMS:
            return None
        share = self.mixture_share
        if share is None or 0 < share < 1:
            return self.name
        if self.name == "jsd":
            return "forward_kl" if share == 0 else "reverse_kl"
        return self.name.removeprefix("skew_") if share == 0 else None

    @property
    def mixture_share(self) -> float | None:
        return self.parameters.get("beta" if self.name == "jsd" else "alpha")

    @property
    def log_mixture_shares(self) -> tuple[float, float]:
        """(log of the student's share of the mixture, log of the teacher's)."""
        share = self.mixture_share
        assert share is not None and 0 < share < 1
        shares = math.log(share), math.log1p(-share)
        return shares if self.name == "skew_reverse_kl" else (shares[1], shares[0])

    def value(
        self,
        student_NV: Tensor,
        teacher_NV: Tensor,
        keep_NK: Tensor | None,
        tails: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[N] from log-probs of the vocabulary, or of a support, which of it counts, and its tails
        on both sides."""
        if self.support is None:
            return divergence(
                student_NV, teacher_NV, name=self.name, clip=self.clip, **self.parameters
            )
        assert keep_NK is not None
        return top_k_divergence(
            student_NV, teacher_NV, keep_NK, name=self.name, form=self.support.form,
            tails=tails, clip=self.clip, **self.parameters,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """By-products of the softmax at each row, in float32 or better, detached."""

    student_logp_N: Tensor
    """log π of the sampled token."""
    student_entropy_N: Tensor
    teacher_logp_N: Tensor | None = None
    """The teacher's three are None without its whole distribution."""
    teacher_entropy_N: Tensor | None = None
    reverse_kl_N: Tensor | None = None
    """KL(π‖q), whatever divergence is minimized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLossSpec:
    """The loss: Σ_n weight_n·divergence_n plus losses of the sampled tokens' log-probs."""

    ids_N: Tensor
    """The sampled tokens."""
    temperature_N: Tensor
    divergence: DivergenceSpec | None = None
    weight_N: Tensor | None = None
    """Of the divergence, with its denominator. Where it is 0 the teacher may be NaN."""
    sampled: tuple[SampledTokenLoss, ...] = ()

    def __post_init__(self) -> None:
        assert (self.divergence is None) == (self.weight_N is None), "a divergence has weights"

    @property
    def needs_statistics(self) -> bool:
        """Whether the gradient by the sampled tokens depends on the pass over the vocabulary."""
        return any(loss.needs_statistics for loss in self.sampled)

    def coefficient(self, rows: slice, statistics: TokenStatistics | None) -> Tensor:
        """∂loss/∂log π of the sampled tokens at those rows."""
        losses = [loss.select_rows(rows) for loss in self.sampled]
        if statistics is None:
            assert not self.needs_statistics
            return sampled_token_coefficients(losses, torch.zeros_like(losses[0].weight_N), None)
        return sampled_token_coefficients(
            losses, statistics.student_logp_N, statistics.reverse_kl_N
        )


# ── the result ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGradient:
    """Where the gradient of the student's LM head is accumulated. None: that part is frozen."""

    weight_VD: Tensor | None = None
    """float32 (or the head's own dtype): many chunks add up in it."""
    bias_V: Tensor | None = None
    down_RD: Tensor | None = None
    """The LoRA adapter's two, of the parameters themselves."""
    up_VR: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceStats:
    """The divergence at each row."""

    value_N: Tensor
    """Not weighted; 0 where the weight is 0."""
    student_mass_N: Tensor | None = None
    """The support's three are None over the whole vocabulary."""
    teacher_mass_N: Tensor | None = None
    overlap_N: Tensor | None = None
    """Share of the teacher's k most likely tokens that are the student's too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    hidden_gradient_ND: Tensor
    """∂loss/∂hidden of the student."""
    statistics: TokenStatistics
    divergence: DivergenceStats | None
    """None: the spec has no divergence."""


RowStats = tuple[TokenStatistics, DivergenceStats | None]


class VocabularyPass(Protocol):
    """The pass over the vocabulary for one chunk of rows, made from the student's logits, the loss
    and which rows of the loss these are."""

    def run_part(self, rows: slice, target: RawLogits | TopKTarget | None) -> None:
        """Some rows of the chunk, in order. The next part takes the memory of this target."""

    def finish(self) -> list[RowStats]:
        """After all parts: the student's logits have been replaced by the gradient."""
