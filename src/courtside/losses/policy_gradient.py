"""Policy gradient on sampled tokens: π student, μ the sampler, A an advantage.

An advantage must depend on which token was sampled. A divergence summed over the vocabulary does
not, and as an advantage has an expected gradient of zero: it belongs into a loss of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

GroupBaseline = Literal["mean", "leave_one_out"]
GateDirection = Literal["endorsed", "rejected"]


def teacher_gap(
    teacher_logp_T: Tensor,
    sampler_logp_T: Tensor,
    *,
    baseline_T: Tensor | None = None,
    reference_logp_T: Tensor | None = None,
    lam: float = 1.0,
) -> Tensor:
    """A = λ·log q + (1 − λ)·log ref − log μ − V of each token, detached.

    `baseline_T` is V, what A is on average: −KL(π‖q) at the position, over the whole vocabulary or
    a top-k. It leaves the expected gradient alone, as anything does that does not depend on the
    sampled token. It always lowers the mean square of A, and the variance of the gradient where
    the student is spread over many tokens; where it is nearly certain of one, it can raise that.
    λ > 1 extrapolates beyond the teacher, away from the reference.

    Where μ = π this makes the policy gradient that of KL(π‖q). With an older sampler, importance
    ratios make it that of KL(π‖q) − KL(π‖μ): the same only as far as the student has not moved.
    """
    target_T = teacher_logp_T
    if lam != 1:
        if reference_logp_T is None:
            raise ValueError(f"lam = {lam} extrapolates from a reference: give reference_logp_T")
        target_T = lam * teacher_logp_T + (1 - lam) * reference_logp_T
    advantage_T = target_T - sampler_logp_T
    if baseline_T is not None:
        advantage_T = advantage_T - baseline_T
    return advantage_T.detach()


def hint_contrast(hinted_logp_T: Tensor, wrong_logp_T: Tensor) -> Tensor:
    """A = log q(y|hint) − log q(y|wrong hint) of each token, detached.

    What both hints say alike (that there is a hint, its tone) cancels. Where μ = π the expected
    policy gradient is that of KL(π‖q(·|hint)) − KL(π‖q(·|wrong hint)), which has no minimum inside:
    it ends at the token with the largest ratio. With `teacher_gap` in addition, γ times this is
    that of the KL to q(·|hint)·(q(·|hint)/q(·|wrong hint))^γ, normalized.
    """
    return (hinted_logp_T - wrong_logp_T).detach()


def reference_penalty(sampler_logp_T: Tensor, reference_logp_T: Tensor, *, weight: float) -> Tensor:
    """−weight · (log μ − log ref) of each token, detached: what a KL to a reference adds to A.

    Where μ = π its expected policy gradient is that of weight · KL(π‖ref) at each prefix. Its mean
    is an unbiased estimate of −weight · KL(μ‖ref) ("k1"), which single tokens miss in both
    directions.
    """
    return (-weight * (sampler_logp_T - reference_logp_T)).detach()


def gap_gate(
    teacher_logp_T: Tensor,
    sampler_logp_T: Tensor,
    *,
    temperature: float,
    direction: GateDirection,
) -> Tensor:
    """σ(±(log q − log μ) / temperature) of each sampled token, detached: a weight in (0, 1).

    "endorsed" weighs tokens up that the teacher finds likelier than the sampler did; "rejected"
    those that it finds less likely.
    """
    gap_T = (teacher_logp_T - sampler_logp_T).detach()
    sign = 1.0 if direction == "endorsed" else -1.0
    return (sign * gap_T / temperature).sigmoid()


def unlikely_advantage(sampler_logp_T: Tensor, *, below: float) -> Tensor:
    """A = −1 where the sampler's probability of the token is less than `below`, else 0.

    The expected gradient of the policy gradient is that of the mass of all such tokens, which it
    lowers. No teacher is involved: what a teacher is worth shows against this control.
    """
    return -(sampler_logp_T < math.log(below)).to(sampler_logp_T.dtype)


def policy_gradient(
    student_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    sampler_logp_T: Tensor | None = None,
    truncate: float | None = None,
    ratio_gate: tuple[float, float] | None = None,
    clip: tuple[float, float] | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Surrogate per token; only its gradient means something, its value is not a KL or a reward.

    - without `sampler_logp_T`: −A·log π, for tokens drawn from the student as it is;
    - with it: −sg[r]·A·log π, r = π/μ. Its gradient is that of −r·A exactly;
    - `truncate` = c: −sg[min(r, c)]·A·log π. A truncated token weighs less and still has gradient,
      which clamping r inside −r·A would take away;
    - `ratio_gate` = (low, high): as with truncation, but a token with r outside has neither value
      nor gradient: what sampler and student disagree about so much is noise more than signal;
    - `clip` = (low, high): −min(r·A, clamp(r, 1 − low, 1 + high)·A), whose gradient does stop once
      the ratio has moved that far in the advantage's direction. high > low ("clip-higher") gives
      unlikely tokens more way up;
    - `dual_clip` = c > 1, with `clip`: where A < 0 the surrogate above is bounded, −max(…, c·A). A
      token that became c times as likely although A < 0 would weigh r·A without a limit; beyond c
      it has the value −c·A and no gradient.
    """
    advantage_T = advantage_T.detach()
    if sampler_logp_T is None:
        if any(option is not None for option in (truncate, ratio_gate, clip, dual_clip)):
            raise ValueError(
                "truncate, ratio_gate, clip and dual_clip act on the ratio π/μ: give sampler_logp_T"
            )
        return -advantage_T * student_logp_T
    if sum(option is not None for option in (truncate, ratio_gate, clip)) > 1:
        raise ValueError("truncate, ratio_gate and clip exclude each other: give one of them")
    if dual_clip is not None and clip is None:
        raise ValueError("dual_clip bounds the clipped surrogate: give clip, too")
    ratio_T = (student_logp_T - sampler_logp_T.detach()).exp()
    if clip is not None:
        low, high = clip
        clipped_T = ratio_T.clamp(1 - low, 1 + high)
        surrogate_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
        if dual_clip is not None:
            bounded_T = torch.maximum(surrogate_T, dual_clip * advantage_T)
            surrogate_T = torch.where(advantage_T < 0, bounded_T, surrogate_T)
        return -surrogate_T
    limit = math.inf if truncate is None else truncate
    weight_T = ratio_T.detach().clamp(max=limit)
    if ratio_gate is not None:
        low, high = ratio_gate
        weight_T = torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0.0)
    return -weight_T * advantage_T * student_logp_T


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokenLoss:
    """A policy gradient on N sampled tokens as plain tensors, before the student's log-probs exist.

    Cross-entropy is the case A = 1 without a ratio; a preference loss has its coefficient as −A.
    """

    weight_N: Tensor
    """Denominator included; the other tensors may be NaN where it is 0."""
    advantage_N: Tensor
    sampler_logp_N: Tensor | None = None
    """None: no importance ratio."""
    truncate: float | None = None
    ratio_gate: tuple[float, float] | None = None
    clip: tuple[float, float] | None = None
    dual_clip: float | None = None
    baseline: bool = False
    """Whether −KL(π‖q) at the position is subtracted from the advantage."""

    @property
    def needs_statistics(self) -> bool:
        """Whether ∂loss/∂log π depends on the student's distribution."""
        return self.sampler_logp_N is not None or self.baseline

    def select_rows(self, rows: slice) -> SampledTokenLoss:
        sampler_logp_N = None if self.sampler_logp_N is None else self.sampler_logp_N[rows]
        return replace(
            self,
            weight_N=self.weight_N[rows],
            advantage_N=self.advantage_N[rows],
            sampler_logp_N=sampler_logp_N,
        )

    def per_token(self, student_logp_N: Tensor, reverse_kl_N: Tensor | None) -> Tensor:
        """`policy_gradient` of each token, not weighted; 0 where the weight is."""
        on_N = self.weight_N > 0

        def mask(values_N: Tensor) -> Tensor:
            # Before the loss: a NaN that is masked afterwards is still NaN in the gradient.
            return torch.where(on_N, values_N, 0.0)

        advantage_N = mask(self.advantage_N)
        if self.baseline:
            assert reverse_kl_N is not None, "a baseline needs the teacher's whole distribution"
            advantage_N = advantage_N + mask(reverse_kl_N)
        sampler_logp_N = None if self.sampler_logp_N is None else mask(self.sampler_logp_N)
        return policy_gradient(
            mask(student_logp_N), advantage_N, sampler_logp_T=sampler_logp_N,
            truncate=self.truncate, ratio_gate=self.ratio_gate, clip=self.clip,
            dual_clip=self.dual_clip,
        )  # fmt: skip


def sampled_token_coefficients(
    losses: Sequence[SampledTokenLoss], student_logp_N: Tensor, reverse_kl_N: Tensor | None
) -> Tensor:
    """∂/∂log π of the weighted sum of all `losses`, at each sampled token."""
    with torch.enable_grad():
        leaf_N = student_logp_N.detach().requires_grad_()
        total = sum((loss.weight_N * loss.per_token(leaf_N, reverse_kl_N)).sum() for loss in losses)
    assert isinstance(total, Tensor)
    (coefficient_N,) = torch.autograd.grad(total, leaf_N)
    return coefficient_N


def group_advantage(
    rewards_N: Tensor,
    group_N: Tensor,
    *,
    scale_by_std: bool,
    baseline: GroupBaseline = "mean",
) -> Tensor:
    """Each reward minus a baseline of its group, detached; equal `group_N` means the same prompt.

    - "mean": of all n rewards of the group, its own included. That shrinks the expected gradient to
      (n − 1)/n of the reward's;
    - "leave_one_out": of the n − 1 others, r_i − Σ_{j≠i} r_j/(n − 1) = n/(n − 1)·(r_i − mean). No
      bias, so groups of different sizes weigh the same.

    `scale_by_std` divides by the group's (population) standard deviation. A group of one, or of
    equal rewards, does not tell which sample was better: exactly 0 either way.
    """
    _, member_N = torch.unique(group_N, return_inverse=True)
    rewards_N = rewards_N.detach()
    advantage_N = torch.zeros_like(rewards_N)
    for group in range(int(member_N.max()) + 1 if member_N.numel() else 0):
        in_group_N = member_N == group
        rewards_M = rewards_N[in_group_N]
        # By comparison, not by a zero spread: the mean of equal floats may be an ulp off.
        if bool((rewards_M == rewards_M[0]).all()):
            continue
        centered_M = rewards_M - rewards_M.mean()
        spread = centered_M.square().mean().sqrt() if scale_by_std else 1.0
        if baseline == "leave_one_out":
            centered_M = centered_M * (len(rewards_M) / (len(rewards_M) - 1))
        advantage_N[in_group_N] = centered_M / spread
    return advantage_N
