"""What goes into the fused head and what comes out; see `fused`.

π is the student and q the teacher, both softmax(logits / temperature) over the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from courtside.losses.divergences import DivergenceName
from courtside.losses.top_k import Form, SupportOf
from courtside.types import LowRank

Backend = Literal["torch", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Hidden states and the head that makes logits of them.

    logits = cap(scale · (hidden·weightᵀ + bias)), cap(z) = softcap·tanh(z / softcap). Computed in
    the weight's dtype; a student in bfloat16 has logits in bfloat16. What `low_rank` adds is added
    to hidden·weightᵀ.
    """

    hidden_ND: Tensor
    weight_VD: Tensor
    """May hold more words than the other side's: both are cut to the words they share."""
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    low_rank: LowRank | None = None
    """An adapter's, in the weight's dtype and with its words; None: the head has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLogits:
    """hidden·weightᵀ + bias of some rows: before scale, cap and temperature."""

    values_NV: Tensor
    scale: float
    softcap: float | None


TeacherLogits = Iterable[tuple[slice, RawLogits]]
"""The teacher's logits a part of the rows at a time, made when they are asked for: (which rows,
their logits). The next part takes the memory of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """A few words in place of all; see `top_k` for what each form converges to."""

    k: int
    of: SupportOf
    form: Form
    clip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceSpec:
    """Which one; `beta` belongs to jsd, `alpha` to the skewed ones."""

    name: DivergenceName
    beta: float | None = None
    alpha: float | None = None
    support: Support | None = None
    """None: all words."""

    def __post_init__(self) -> None:
        if (self.beta is not None) != (self.name == "jsd"):
            raise ValueError(f"beta = {self.beta} with {self.name!r}: jsd needs a beta, no other")
        if (self.alpha is not None) != self.name.startswith("skew_"):
            raise ValueError(f"alpha = {self.alpha} with {self.name!r}: the skewed ones need one")
        for share in (self.beta, self.alpha):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"beta or alpha = {share}: must lie between 0 and 1")

    def without_ends(self) -> DivergenceSpec:
        """The same divergence, its ends as what they are: no mixture with a share of 0 or 1.

        What is left at α = 1 is KL of something to itself; see `is_zero`.
        """
        if self.name == "jsd" and self.beta in (0, 1):
            return DivergenceSpec(
                name="forward_kl" if self.beta == 0 else "reverse_kl", support=self.support
            )
        if self.alpha == 0:
            plain: DivergenceName = "forward_kl" if self.name == "skew_forward_kl" else "reverse_kl"
            return DivergenceSpec(name=plain, support=self.support)
        return self

    @property
    def is_zero(self) -> bool:
        return self.alpha == 1 and self.support is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """By-products of the softmax at each row, in float32 or better, detached."""

    student_logp_N: Tensor
    """log π of the sampled word."""
    student_entropy_N: Tensor
    teacher_logp_N: Tensor | None = None
    """The teacher's three are None where there is no teacher."""
    teacher_entropy_N: Tensor | None = None
    reverse_kl_N: Tensor | None = None
    """KL(π‖q), whatever divergence is minimised."""


Coefficient = Callable[[slice, TokenStatistics], Tensor]
"""(which rows, their statistics) → ∂loss/∂log π(sampled word) of each of those rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLossSpec:
    """The loss: Σ_n weight_n·divergence_n plus any function of the sampled words' log-probs."""

    ids_N: Tensor
    """The sampled words."""
    temperature_N: Tensor
    divergence: DivergenceSpec | None = None
    weight_N: Tensor | None = None
    """Of the divergence, with its denominator. 0: that row's teacher is not looked at, so it may
    be NaN."""
    sampled: Tensor | Coefficient | None = None
    """Gradient by the sampled words' log-probs, weight and denominator included; as a function
    where it depends on the log-probs themselves (an importance ratio, a baseline)."""

    def __post_init__(self) -> None:
        assert (self.divergence is None) == (self.weight_N is None), "a divergence has weights"

    def coefficient(self, rows: slice, statistics: TokenStatistics) -> Tensor | None:
        """`sampled` at those rows, whose statistics these are."""
        if self.sampled is None or isinstance(self.sampled, Tensor):
            return None if self.sampled is None else self.sampled[rows]
        return self.sampled(rows, statistics).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGradient:
    """Where the gradient of the student's head is added, in place. None: that part is frozen."""

    weight_VD: Tensor | None = None
    """float32 (or the head's own dtype): many chunks add up in it."""
    bias_V: Tensor | None = None
    down_RD: Tensor | None = None
    """The adapter's two, of the parameters themselves."""
    up_VR: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceStats:
    """What a divergence found at each row."""

    value_N: Tensor
    """Of the divergence, not weighted; 0 where its weight is 0."""
    student_mass_N: Tensor | None = None
    """The support's three are None for a divergence over all words."""
    teacher_mass_N: Tensor | None = None
    overlap_N: Tensor | None = None
    """Share of the teacher's k likeliest words that are the student's too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    hidden_gradient_ND: Tensor
    """∂loss/∂hidden of the student."""
    statistics: TokenStatistics
    found: DivergenceStats | None
    """None: no divergence was asked for."""


Part = TypeVar("Part", TokenStatistics, DivergenceStats)


def concatenate_fields(parts: list[Part]) -> Part:
    """Parts of the rows, one after the other."""
    together = {
        field.name: torch.cat([getattr(part, field.name) for part in parts])
        for field in fields(parts[0])
        if getattr(parts[0], field.name) is not None
    }
    return replace(parts[0], **together)
