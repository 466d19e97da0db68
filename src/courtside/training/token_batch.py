"""The trained tokens of a micro-batch as flat tensors, one row per position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from courtside.engines.forward.batching import SequenceSpan, tensor_on
from courtside.losses.policy_gradient import (
    SampledTokenLoss,
    gap_gate,
    hint_contrast,
    reference_penalty,
    teacher_gap,
    unlikely_advantage,
)
from courtside.training.loss_terms import LossTerm, TrainedTokens
from courtside.types import Scored, Target, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """N positions that share a teacher."""

    hidden_ND: Tensor
    """The student's hidden states that predict the tokens, with or without their graph."""
    ids_N: Tensor
    temperature_N: Tensor
    sampler_logp_N: Tensor
    """NaN where the token was not sampled by us."""
    by_student_N: Tensor
    """Whether the student alone sampled the token."""
    teacher_logp_N: Tensor
    """NaN where the teacher did not score the token."""
    reference_logp_N: Tensor
    teacher_hidden_ND: Tensor | None
    reference_hidden_ND: Tensor | None
    weight_CN: Mapping[str, Tensor]
    """By loss term: how much the position counts in its mean; 0 where it does not train."""
    advantage_CN: Mapping[str, Tensor]
    """By loss term: the advantage from rewards, or a preference's coefficient."""
    teacher_head: Any
    reference_head: Any
    teacher_top_ids_NK: Tensor | None = None
    """The teacher's most likely tokens in place of its hidden states, most likely first."""
    teacher_top_logp_NK: Tensor | None = None
    num_student_ids: int = 0
    """How many of these, the last ones, are the student's."""
    wrong_logp_N: Tensor | None = None
    wrong_hidden_ND: Tensor | None = None
    """The teacher's under wrong hints; None: no loss contrasts two hints."""
    gate_CN: Mapping[str, Tensor] = field(default_factory=dict)
    """By loss term with a gate: the factor of its weights; NaN where it does not train."""

    def __len__(self) -> int:
        return len(self.ids_N)

    def select(self, index_M: Tensor) -> TokenBatch:
        """The positions at these indices, or where a mask is True."""
        parts: dict[str, Any] = {}
        for name in (column.name for column in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                parts[name] = value[index_M]
            elif isinstance(value, Mapping):
                parts[name] = {key: v[index_M] for key, v in value.items()}
        return replace(self, **parts)

    def apply_gates(self, terms: Sequence[LossTerm]) -> TokenBatch:
        """With the weights of gated losses multiplied by their gates."""
        gates, weights = {}, dict(self.weight_CN)
        for term in terms:
            gate = getattr(term.loss, "gate", None)
            if gate is not None:
                gates[term.name] = gate_N = gap_gate(
                    self.teacher_logp_N,
                    self.sampler_logp_N,
                    temperature=gate.temperature,
                    direction=gate.direction,
                )
                weight_N = weights[term.name]
                weights[term.name] = torch.where(weight_N > 0, weight_N * gate_N, 0.0)
        return replace(self, weight_CN=weights, gate_CN=gates) if gates else self

    def sampled_loss(self, term: LossTerm) -> SampledTokenLoss:
        """A recipe's loss on sampled tokens; its weight has the term's denominator in it."""
        loss = term.loss
        weight_N = self.weight_CN[term.name] * (loss.weight / term.denominator)
        if loss.kind == "cross_entropy":
            return SampledTokenLoss(weight_N=weight_N, advantage_N=torch.ones_like(weight_N))
        advantage_N = self.advantage_CN.get(term.name)
        if loss.kind == "preference":
            # The coefficient carries the sign: `preference` computes it for whole sequences.
            assert advantage_N is not None
            return SampledTokenLoss(weight_N=weight_N, advantage_N=-advantage_N)
        assert loss.kind == "policy_gradient"
        if loss.advantage == "teacher_gap":
            advantage_N = teacher_gap(
                self.teacher_logp_N,
                self.sampler_logp_N,
                reference_logp_T=self.reference_logp_N if loss.extrapolate != 1.0 else None,
                lam=loss.extrapolate,
            )
        elif loss.advantage == "hint_contrast":
            assert self.wrong_logp_N is not None, "the recipe asks for wrong hints"
            advantage_N = hint_contrast(self.teacher_logp_N, self.wrong_logp_N)
        elif loss.unlikely_below is not None:
            advantage_N = unlikely_advantage(self.sampler_logp_N, below=loss.unlikely_below)
        assert advantage_N is not None
        if term.rewards is not None and term.rewards.reference_kl:
            advantage_N = advantage_N + reference_penalty(
                self.sampler_logp_N, self.reference_logp_N, weight=term.rewards.reference_kl
            )
        return SampledTokenLoss(
            weight_N=weight_N,
            advantage_N=advantage_N,
            sampler_logp_N=self.sampler_logp_N if loss.ratio == "importance" else None,
            truncate=loss.truncate,
            ratio_gate=loss.ratio_gate,
            clip=loss.clip,
            dual_clip=loss.dual_clip,
            baseline=loss.baseline,
        )


def forward_ids(s: Scored, trained: TrainedTokens) -> tuple[int, ...]:
    """The trajectory up to the last id that predicts a trained one."""
    return s.trajectory.token_ids[: _trained_positions(s, trained)[-1]]


def gather_trained(
    hidden_ND: Tensor,
    spans: Sequence[SequenceSpan],
    micro: Sequence[Scored],
    trained: TrainedTokens,
) -> Tensor:
    """Of a pass over `micro`: the hidden states that predict the trained tokens, in order."""
    positions = [_trained_positions(s, trained) for s in micro]
    assert all(p[0] > 0 for p in positions), "nothing predicts the first token"
    rows = (span.indices(i - 1 for i in p) for span, p in zip(spans, positions, strict=True))
    rows_N = tensor_on([*chain(*rows)], dtype=torch.long, device=hidden_ND.device)
    return hidden_ND.index_select(0, rows_N)


def _trained_positions(s: Scored, trained: TrainedTokens) -> list[int]:
    """Indices of its trained tokens among all ids of the trajectory."""
    positions = (i for i, is_completion in enumerate(s.trajectory.completion_mask) if is_completion)
    return [i for i, trains in zip(positions, trained[s.trajectory.id], strict=True) if trains]


def make_token_batch(
    group: Sequence[Scored],
    terms: Sequence[LossTerm],
    hidden_ND: Tensor,
    trained: TrainedTokens,
) -> TokenBatch:
    """The trained tokens of trajectories with one teacher, in order; `hidden_ND` has only those."""
    device = hidden_ND.device
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    masks = [trained[s.trajectory.id] for s in group]
    # Columns are made on the host and copied together, without synchronizing with a GPU.
    columns = _columns(group, terms, masks)
    values_KN = tensor_on(list(columns.values()), dtype=dtype, device=device)
    column = dict(zip(columns, values_KN.unbind(), strict=True))
    ids = chain(*map(compress, (s.trajectory.completion_ids for s in group), masks))

    def gather(targets: Sequence[Target | None], name: str, fill: float = 0.0) -> Tensor | None:
        return _gather(targets, masks, name, fill, device)

    def logprobs(targets: Sequence[Target | None]) -> Tensor:
        logp_N = gather(targets, "logp_T", math.nan)
        return torch.full_like(values_KN[0], math.nan) if logp_N is None else logp_N.to(dtype)

    targets = [s.target for s in group]
    references = [s.reference for s in group]
    wrong_logp_N = gather(targets, "wrong_logp_T", math.nan)
    return TokenBatch(
        hidden_ND=hidden_ND,
        ids_N=tensor_on([*ids], dtype=torch.long, device=device),
        temperature_N=column["temperature", ""],
        sampler_logp_N=column["sampler", ""],
        by_student_N=column["by_student", ""] > 0,
        teacher_logp_N=logprobs(targets),
        reference_logp_N=logprobs(references),
        teacher_hidden_ND=gather(targets, "hidden_TD"),
        reference_hidden_ND=gather(references, "hidden_TD"),
        weight_CN={name: v for (kind, name), v in column.items() if kind == "weight"},
        advantage_CN={name: v for (kind, name), v in column.items() if kind == "advantage"},
        teacher_head=next((target.head for target in targets if target is not None), None),
        reference_head=next((target.head for target in references if target is not None), None),
        teacher_top_ids_NK=gather(targets, "top_ids_TK"),
        teacher_top_logp_NK=gather(targets, "top_logp_TK"),
        num_student_ids=max((t.num_student_ids for t in targets if t is not None), default=0),
        wrong_logp_N=None if wrong_logp_N is None else wrong_logp_N.to(dtype),
        wrong_hidden_ND=gather(targets, "wrong_hidden_TD"),
    )


def is_own_sample(trajectory: Trajectory) -> bool:
    return trajectory.source == "student" and trajectory.num_replaced is None


def _columns(
    group: Sequence[Scored], terms: Sequence[LossTerm], masks: Sequence[Sequence[bool]]
) -> dict[tuple[str, str], list[float]]:
    """Numbers of the trained tokens, by (kind, name of the loss term or "")."""

    def column(values: Iterable[Sequence[float] | float | None], missing: float) -> list[float]:
        """From a value of each trajectory, or one of each of its completion tokens."""
        result: list[float] = []
        for value, mask in zip(values, masks, strict=True):
            if isinstance(value, Sequence):
                result += compress(value, mask)
            else:
                result += [missing if value is None else value] * sum(mask)
        return result

    trajectories = [s.trajectory for s in group]
    columns = {
        ("temperature", ""): column((t.temperature for t in trajectories), math.nan),
        ("sampler", ""): column((t.sampler_logp or None for t in trajectories), math.nan),
        ("by_student", ""): column((float(is_own_sample(t)) for t in trajectories), 0.0),
    }
    for term in terms:
        columns["weight", term.name] = column((term.weight.get(t.id) for t in trajectories), 0.0)
        if term.advantage:
            advantages = (term.advantage.get(t.id) for t in trajectories)
            columns["advantage", term.name] = column(advantages, 0.0)
    return columns


def _gather(
    targets: Sequence[Target | None],
    masks: Sequence[Sequence[bool]],
    name: str,
    fill: float,
    device: torch.device,
) -> Tensor | None:
    """A tensor of the targets at the trained tokens, `fill` at those that a target does not score
    (no loss uses it there); None: no target has it."""
    tensors = [None if target is None else getattr(target, name) for target in targets]
    like = next((tensor for tensor in tensors if tensor is not None), None)
    if like is None:
        return None
    parts = []
    for target, tensor, mask in zip(targets, tensors, masks, strict=True):
        indices = [i for i, is_trained in enumerate(mask) if is_trained]
        scored: Sequence[int] = ()
        if target is not None and tensor is not None:
            scored = range(len(mask)) if target.token_indices is None else target.token_indices
            assert len(tensor) == len(scored)
            if [*scored] == indices:
                parts.append(tensor.to(device))
                continue
        part = torch.full((len(indices), *like.shape[1:]), fill, dtype=like.dtype, device=device)
        row_of = {i: row for row, i in enumerate(scored)}
        pairs = [(n, row_of[i]) for n, i in enumerate(indices) if i in row_of]
        if tensor is not None and pairs:
            to_M, from_M = tensor_on([*zip(*pairs, strict=True)], dtype=torch.long, device=device)
            part[to_M] = tensor.to(device)[from_M]
        parts.append(part)
    return torch.cat(parts)
