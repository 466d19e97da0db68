"""Imitation of given text, one log-probability per token."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(student_logp_T: Tensor) -> Tensor:
    """−log π of each token of the text."""
    return -student_logp_T
