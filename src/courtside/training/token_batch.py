"""The trained tokens of a micro-batch as flat tensors, one row per position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from courtside.engines.forward.batching import SequenceSpan, tensor_on
from courtside.losses.policy_gradient import SampledTokenLoss, teacher_gap
from courtside.training.loss_terms import LossTerm, TrainedTokens
from courtside.types import Scored, Target


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

    def __len__(self) -> int:
        return len(self.ids_N)

    def select(self, index_M: Tensor) -> TokenBatch:
        """The positions at these indices, or where a mask is True."""
        parts: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                parts[field.name] = value[index_M]
            elif isinstance(value, Mapping):
                parts[field.name] = {key: v[index_M] for key, v in value.items()}
        return replace(self, **parts)

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
        assert advantage_N is not None
        return SampledTokenLoss(
            weight_N=weight_N,
            advantage_N=advantage_N,
            sampler_logp_N=self.sampler_logp_N if loss.ratio == "importance" else None,
            truncate=loss.truncate,
            clip=loss.clip,
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
    counts = [s.trajectory.num_completion_tokens for s in group]
    # Columns are made on the host and copied together, without synchronizing with a GPU.
    columns = _columns(group, terms, counts)
    values_KN = tensor_on(list(columns.values()), dtype=dtype, device=device)
    column = dict(zip(columns, values_KN.unbind(), strict=True))
    ids = [token for s in group for token in s.trajectory.completion_ids]

    def gather(targets: Sequence[Target | None], name: str, fill: float = 0.0) -> Tensor | None:
        return _gather(targets, counts, name, fill, device)

    def logprobs(targets: Sequence[Target | None]) -> Tensor:
        logp_N = gather(targets, "logp_T", float("nan"))
        return torch.full_like(values_KN[0], float("nan")) if logp_N is None else logp_N.to(dtype)

    targets = [s.target for s in group]
    references = [s.reference for s in group]
    tokens = TokenBatch(
        hidden_ND=values_KN.new_empty(len(ids), 0),  # replaced when the trained ones are selected
        ids_N=tensor_on(ids, dtype=torch.long, device=device),
        temperature_N=column["temperature", ""],
        sampler_logp_N=column["sampler", ""],
        by_student_N=column["by_student", ""] > 0,
        teacher_logp_N=logprobs(targets),
        reference_logp_N=logprobs(references),
        teacher_hidden_ND=gather(targets, "hidden_TD"),
        reference_hidden_ND=gather(references, "hidden_TD"),
        weight_CN={name: v for (kind, name), v in column.items() if kind == "weight"},
        advantage_CN={name: v for (kind, name), v in column.items() if kind == "advantage"},
        teacher_head=_head(targets),
        reference_head=_head(references),
        teacher_top_ids_NK=gather(targets, "top_ids_TK"),
        teacher_top_logp_NK=gather(targets, "top_logp_TK"),
    )
    mask = [is_trained for s in group for is_trained in trained[s.trajectory.id]]
    if not all(mask):
        indices = [i for i, is_trained in enumerate(mask) if is_trained]
        tokens = tokens.select(tensor_on(indices, dtype=torch.long, device=device))
    return replace(tokens, hidden_ND=hidden_ND)


def _columns(
    group: Sequence[Scored], terms: Sequence[LossTerm], counts: Sequence[int]
) -> dict[tuple[str, str], list[float]]:
    """Numbers of all completion tokens, by (kind, name of the loss term or "")."""

    def repeat(values: list[float]) -> list[float]:
        """From one value per trajectory to one per position."""
        pairs = zip(values, counts, strict=True)
        return [value for value, count in pairs for _ in range(count)]

    def concatenate(values: Mapping[str, tuple[float, ...]], missing: float = 0.0) -> list[float]:
        column: list[float] = []
        for s, count in zip(group, counts, strict=True):
            column += values.get(s.trajectory.id) or [missing] * count
        return column

    sampler_logp = {
        s.trajectory.id: tuple(s.trajectory.sampler_logp)
        for s in group
        if s.trajectory.sampler_logp
    }
    columns = {
        ("temperature", ""): repeat([s.trajectory.temperature for s in group]),
        ("sampler", ""): concatenate(sampler_logp, missing=float("nan")),
        ("by_student", ""): repeat([float(s.trajectory.source == "student") for s in group]),
    }
    for term in terms:
        columns["weight", term.name] = concatenate(term.weight)
        if term.advantage:
            columns["advantage", term.name] = concatenate(term.advantage)
    return columns


def _gather(
    targets: Sequence[Target | None],
    counts: Sequence[int],
    name: str,
    fill: float,
    device: torch.device,
) -> Tensor | None:
    """A tensor of the targets at all completion tokens, `fill` at those that a target does not
    score (no loss trains there); None: no target has it."""
    tensors = [None if target is None else getattr(target, name) for target in targets]
    like = next((tensor for tensor in tensors if tensor is not None), None)
    if like is None:
        return None
    parts = []
    for target, tensor, count in zip(targets, tensors, counts, strict=True):
        indices = None if target is None else target.token_indices
        if tensor is not None and indices is None:
            assert len(tensor) == count
            parts.append(tensor.to(device))
            continue
        part = torch.full((count, *like.shape[1:]), fill, dtype=like.dtype, device=device)
        if tensor is not None:
            index_M = tensor_on(indices or (), dtype=torch.long, device=device)
            part[index_M] = tensor.to(device)
        parts.append(part)
    return torch.cat(parts)


def _head(targets: Sequence[Target | None]) -> Any:
    return next((target.head for target in targets if target is not None), None)
