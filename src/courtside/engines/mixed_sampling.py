"""Mixed sampling: the student proposes tokens, the teacher replaces those outside its top-k.

Two models in this process decode the same tokens, each after its own prompt and with its own KV
cache. Decoding is eager, in left-padded batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from courtside.engines.base import Sampling
from courtside.engines.generation.sampler import sample_tokens, stack_uniforms
from courtside.engines.local import LocalEngine
from courtside.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRequest:
    prompt_ids: tuple[int, ...]
    teacher_prompt_ids: tuple[int, ...]
    """The prompt with the teacher's context."""
    seed: int


class MixedSample(NamedTuple):
    sample: Sample
    num_replaced: int
    """Tokens of the student that the teacher replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSampler:
    student: LocalEngine
    teacher: LocalEngine
    top_k: int
    teacher_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Puts the teacher's weights in place for its forward passes."""

    @torch.no_grad()
    def sample(self, requests: Sequence[MixedRequest], sampling: Sampling) -> list[MixedSample]:
        """In the order of the requests."""
        assert not sampling.truncates and sampling.temperature > 0, "the recipe was checked"
        for request in requests:
            self.student.check_length(len(request.prompt_ids) + sampling.max_new_tokens)
            self.teacher.check_length(len(request.teacher_prompt_ids) + sampling.max_new_tokens)
        num_state_tokens = self.student.row_state_tokens + self.teacher.row_state_tokens
        lengths = [  # of both KV caches
            num_state_tokens
            + len(r.prompt_ids)
            + len(r.teacher_prompt_ids)
            + 2 * sampling.max_new_tokens
            for r in requests
        ]
        # Longest first, and samples of one prompt as neighbors: they share its prefill.
        order = sorted(range(len(requests)), key=lambda i: (-lengths[i], requests[i].prompt_ids, i))
        samples: list[MixedSample] = []
        while len(samples) < len(order):
            start = len(samples)
            end = start + max(1, self.student.max_batch_tokens // lengths[order[start]])
            samples += self._sample_batch([requests[i] for i in order[start:end]], sampling)
        by_request = dict(zip(order, samples, strict=True))
        return [by_request[i] for i in range(len(requests))]

    def _sample_batch(
        self, requests: Sequence[MixedRequest], sampling: Sampling
    ) -> list[MixedSample]:
        student, teacher = self.student, self.teacher
        with student.autocast_context():
            student_batch = student.decode_batch([r.prompt_ids for r in requests])
        with self.teacher_weights(), teacher.autocast_context():
            teacher_batch = teacher.decode_batch([r.teacher_prompt_ids for r in requests])
        buffer = student.make_buffer(len(requests), sampling)
        num_replaced = [0] * len(requests)
        # Two random numbers a token: for the proposal, and for a replacement.
        uniform_BN2 = stack_uniforms(
            [r.seed for r in requests], 2 * sampling.max_new_tokens, student.device
        ).unflatten(-1, (-1, 2))
        order: Sequence[int] = range(len(requests))
        with student.autocast_context():
            student_BV = student.head(student_batch.prefill())
        with self.teacher_weights(), teacher.autocast_context():
            teacher_BV = teacher.head(teacher_batch.prefill())
        for n in range(sampling.max_new_tokens):
            ids_B, logp_B, replaced_B = sample_mixed_tokens(
                student_BV, teacher_BV, uniform_BN2[list(order), n], sampling, top_k=self.top_k
            )
            ids = ids_B.tolist()
            for row, replaced in zip(order, replaced_B.tolist(), strict=True):
                num_replaced[row] += replaced
            running = buffer.append(order, ids, logp_B.tolist())
            if not running or n + 1 == sampling.max_new_tokens:
                break
            next_ids = {order[i]: ids[i] for i in running}
            with student.autocast_context():
                order, hidden_BD = student_batch.advance(next_ids)
                student_BV = student.head(hidden_BD)
            with self.teacher_weights(), teacher.autocast_context():
                teacher_order, hidden_BD = teacher_batch.advance(next_ids)
                teacher_BV = teacher.head(hidden_BD)
            assert order == teacher_order
        return [*map(MixedSample, buffer.samples(), num_replaced)]


def sample_mixed_tokens(
    student_BV: Tensor, teacher_BV: Tensor, uniform_B2: Tensor, sampling: Sampling, *, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row from two models' logits, log P of it, and whether it was replaced.

    With S the teacher's top-k tokens, π the student and q_S the teacher renormalized on S, both at
    the sampling temperature, a token y ~ π outside S is replaced by one of q_S. So every token of S
    is sampled with P(y) = π(y) + (1 − π(S))·q_S(y), also where the student proposed it itself, and
    P is 0 outside S. An importance-weighted mean with π/P is therefore unbiased for the part of an
    expectation under π that lies on S; what π gives to tokens outside S is lost, and no weight can
    bring it back. At the fixed point, where π lies on S, nothing is lost.
    """
    proposed_B, _ = sample_tokens(student_BV, uniform_B2[:, 0], sampling)
    top_ids_BK, mixed_logp_BK, teacher_logp_BK = mix_distributions(
        student_BV, teacher_BV, temperature=sampling.temperature, top_k=top_k
    )
    is_proposed_BK = top_ids_BK == proposed_B[:, None]
    replaced_B = ~is_proposed_BK.any(-1)
    cdf_BK = teacher_logp_BK.double().exp().cumsum(-1)
    column_B1 = torch.searchsorted(cdf_BK, uniform_B2[:, 1:] * cdf_BK[:, -1:], right=True)
    column_B = torch.where(
        replaced_B, column_B1.squeeze(-1).clamp(max=top_k - 1), is_proposed_BK.int().argmax(-1)
    )[:, None]
    ids_B = top_ids_BK.gather(-1, column_B).squeeze(-1)
    return ids_B, mixed_logp_BK.gather(-1, column_B).squeeze(-1), replaced_B


def mix_distributions(
    student_BV: Tensor, teacher_BV: Tensor, *, temperature: float, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's top-k ids S, log P on S, and log q_S, from logits."""
    dtype = torch.promote_types(student_BV.dtype, torch.float32)
    teacher_BK, top_ids_BK = (teacher_BV.to(dtype) / temperature).topk(top_k, dim=-1)
    teacher_logp_BK = teacher_BK.log_softmax(-1)
    student_logp_BV = (student_BV.to(dtype) / temperature).log_softmax(-1)
    outside_BV = student_logp_BV.scatter(-1, top_ids_BK, -torch.inf)
    # Summed over the tokens outside S, as 1 − π(S) would round to 0 long before they vanish.
    outside_B1 = outside_BV.logsumexp(-1, keepdim=True)
    inside_BK = student_logp_BV.gather(-1, top_ids_BK)
    return top_ids_BK, torch.logaddexp(inside_BK, outside_B1 + teacher_logp_BK), teacher_logp_BK
