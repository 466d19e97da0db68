"""Reverse KL from the sampled tokens alone: one log-probability per position and side.

Strictly on-policy: the tokens were drawn from the student itself. `policy_gradient` has the form
for tokens of a slightly older student, with an importance ratio.
"""

from __future__ import annotations

from torch import Tensor


def sampled_reverse_kl(student_logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """Surrogate: its expected gradient is that of KL(student ‖ teacher) at each prefix.

    The value is not the KL; the mean of `kl_estimate` estimates that. Differentiating the log-ratio
    itself would give ∇log π, whose expectation is zero whatever the teacher says.
    """
    gap_T = (student_logp_T - teacher_logp_T).detach()
    return gap_T * student_logp_T


def kl_estimate(sampler_logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """log μ − log q of each token, detached: its mean over samples of μ estimates KL(μ‖q).

    Unbiased, but a single token's value can be negative.
    """
    return (sampler_logp_T - teacher_logp_T).detach()
