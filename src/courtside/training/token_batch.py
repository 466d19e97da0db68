"""The trained positions of a micro-batch as flat tensors, one row a position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from courtside.engines.transfer import tensor_on
from courtside.training.loss_terms import LossTerm
from courtside.types import Scored, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """N positions that share a teacher."""

    hidden_ND: Tensor
    """The student's, with its graph or as a leaf."""
    ids_N: Tensor
    temperature_N: Tensor
    sampler_logp_N: Tensor
    """NaN where the token was not sampled by us."""
    by_student_N: Tensor
    teacher_logp_N: Tensor
    """NaN where no teacher spoke."""
    reference_logp_N: Tensor
    teacher_hidden_ND: Tensor | None
    reference_hidden_ND: Tensor | None
    weight_CN: Mapping[str, Tensor]
    """By component: how much the position counts in its mean; 0 where it does not train."""
    advantage_CN: Mapping[str, Tensor]
    """By component: the advantage from rewards, or a preference's coefficient."""
    teacher_head: Any
    reference_head: Any

    def __len__(self) -> int:
        return len(self.ids_N)

    def split(self, size: int) -> Iterator[TokenBatch]:
        for start in range(0, len(self), size):
            yield self.cut(start, start + size)

    def cut(self, start: int, end: int) -> TokenBatch:
        return self._pick(slice(start, end))

    def only(self, on_N: Tensor) -> TokenBatch:
        """The rows where `on_N` is True, or those at the places that it names."""
        return self._pick(on_N)

    def _pick(self, which: slice | Tensor) -> TokenBatch:
        parts: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and not (field.name == "hidden_ND" and not len(value)):
                parts[field.name] = value[which]
            elif isinstance(value, Mapping):
                parts[field.name] = {key: v[which] for key, v in value.items()}
        return replace(self, **parts)


def make_token_batch(
    group: Sequence[Scored],
    components: Sequence[LossTerm],
    hidden_ND: Tensor,
    trained: Mapping[str, tuple[bool, ...]],
) -> TokenBatch:
    """Rows of the trained tokens of trajectories with one teacher, in order; `hidden_ND` is already
    of those and in that order."""
    device = hidden_ND.device
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    counts = [s.trajectory.num_chosen for s in group]
    # Columns are made on the host and travel together: a GPU is waited for nowhere here.
    columns = _columns(group, components, counts)
    values_KN = tensor_on(list(columns.values()), dtype=dtype, device=device)
    column = dict(zip(columns, values_KN.unbind(), strict=True))
    ids = [token for s in group for token in s.trajectory.chosen_ids]
    targets = [s.target for s in group]
    references = [s.reference for s in group]
    rows = TokenBatch(
        hidden_ND=hidden_ND[:0],  # put in when the others are picked
        ids_N=tensor_on(ids, dtype=torch.long, device=device),
        temperature_N=column["temperature", ""],
        sampler_logp_N=column["sampler", ""],
        by_student_N=column["by_student", ""] > 0,
        teacher_logp_N=_logps(targets, counts, device).to(dtype),
        reference_logp_N=_logps(references, counts, device).to(dtype),
        teacher_hidden_ND=_hiddens(targets, counts, device),
        reference_hidden_ND=_hiddens(references, counts, device),
        weight_CN={name: v for (kind, name), v in column.items() if kind == "weight"},
        advantage_CN={name: v for (kind, name), v in column.items() if kind == "advantage"},
        teacher_head=_head(targets),
        reference_head=_head(references),
    )
    wanted = [wanted for s in group for wanted in trained[s.trajectory.id]]
    if not all(wanted):
        kept = [i for i, looked_at in enumerate(wanted) if looked_at]
        rows = rows.only(tensor_on(kept, dtype=torch.long, device=device))
    return replace(rows, hidden_ND=hidden_ND)


def _columns(
    group: Sequence[Scored], components: Sequence[LossTerm], counts: Sequence[int]
) -> dict[tuple[str, str], list[float]]:
    """Numbers of all chosen tokens, by what they are and, where it has one, its component."""

    def spread(values: list[float]) -> list[float]:
        """One value a trajectory to one a position."""
        pairs = zip(values, counts, strict=True)
        return [value for value, count in pairs for _ in range(count)]

    def stream(values: Mapping[str, tuple[float, ...]], missing: float = 0.0) -> list[float]:
        """Values by trajectory, one a position."""
        found: list[float] = []
        for s, count in zip(group, counts, strict=True):
            found += values.get(s.trajectory.id) or [missing] * count
        return found

    sampled = {
        s.trajectory.id: tuple(s.trajectory.sampler_logp)
        for s in group
        if s.trajectory.sampler_logp
    }
    columns = {
        ("temperature", ""): spread([s.trajectory.temperature for s in group]),
        ("sampler", ""): stream(sampled, missing=float("nan")),
        ("by_student", ""): spread([float(s.trajectory.source == "student") for s in group]),
    }
    for c in components:
        columns["weight", c.name] = stream(c.weight)
        if c.advantage:
            columns["advantage", c.name] = stream(c.advantage)
    return columns


def _logps(targets: Sequence[Target | None], counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.cat(
        [
            torch.full((count,), float("nan"), device=device)
            if target is None
            else _spread(target.logp_T.to(device), target.token_indices, count, float("nan"))
            for target, count in zip(targets, counts, strict=True)
        ]
    )


def _hiddens(
    targets: Sequence[Target | None], counts: Sequence[int], device: torch.device
) -> Tensor | None:
    parts = [
        (target, count)
        for target, count in zip(targets, counts, strict=True)
        if target is not None and target.hidden_TD is not None
    ]
    assert len(parts) in (0, len(targets)), "a group has one teacher"
    if not parts:
        return None
    # Zeros where the teacher says nothing: finite, and no loss looks there.
    return torch.cat(
        [_spread(t.hidden_TD.to(device), t.token_indices, n, 0.0) for t, n in parts]  # type: ignore[union-attr]
    )


def _spread(values: Tensor, where: tuple[int, ...] | None, count: int, fill: float) -> Tensor:
    """Values of some of `count` positions, at their places among all of them."""
    if where is None:
        assert len(values) == count
        return values
    spread = values.new_full((count, *values.shape[1:]), fill)
    spread[tensor_on(where, dtype=torch.long, device=values.device)] = values
    return spread


def _head(targets: Sequence[Target | None]) -> Any:
    return next((t.head for t in targets if t is not None), None)
