"""Forward passes that continue sequences from saved states, for recurrent and hybrid models.

Pads would enter a recurrent or convolution state, so rows of a pass have equally many new tokens.
Their pasts may differ: the mask hides what pads the keys of shorter ones. A probe finds out what a
model's passes can do: not every kind continues a state by more than one token at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from courtside.engines.forward.batching import find_prefix_groups
from courtside.engines.patches.patch import Patch, apply_patches
from courtside.engines.row_states import RowState, StateLayout

Batching = Literal["any lengths", "equal lengths", "one row"]
"""Which rows a pass that continues states may have together. Some kinds mask wrongly what pads the
keys of shorter rows, and RWKV's layers mix the rows of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePasses:
    """Runs a model on the new tokens of sequences whose earlier tokens are in their states."""

    model: Any
    layout: StateLayout
    cache_argument: str
    takes_positions: bool
    continues_by_chunks: bool = False
    """Whether a pass over several tokens starts from the state; if not, tokens follow singly."""
    batching: Batching = "any lengths"
    patches: tuple[Patch, ...] = ()
    """For passes over single tokens."""
    advances_in_place: bool = False
    """Whether passes over single tokens write to recurrent states themselves, and not by the
    cache's `update_recurrent_state`."""
    example: RowState | None = None
    """Of some sequence: the shapes and dtypes of a row's states."""
    row_state_tokens: int = 0
    """Tokens whose keys and values take the memory of a row's other states."""

    def extend(
        self,
        rows: Sequence[tuple[RowState | None, Sequence[int]]],
        *,
        max_tokens: int,
        last_only: bool = False,
    ) -> list[tuple[RowState, Tensor]]:
        """The state after each row's new tokens, and their last hidden states [N, D], or [1, D] of
        the last token. Rows without a state are new sequences. A pass has at most `max_tokens`, or
        one row."""
        states = [state for state, _ in rows]
        pending = [tuple(ids) for _, ids in rows]
        hidden: list[list[Tensor]] = [[] for _ in rows]

        def store(indices: Iterable[int], results: Iterable[tuple[RowState, Tensor]]) -> None:
            for i, (state, hidden_ND) in zip(indices, results, strict=True):
                states[i] = state
                hidden[i] = [hidden_ND[-1:]] if last_only else [*hidden[i], hidden_ND]

        while self.continues_by_chunks and (groups := _find_shared_prefixes(states, pending)):
            prefixes = [(states[g[0]], pending[g[0]][:num_shared]) for g, num_shared in groups]
            # Prefixes of several groups may begin alike in turn.
            shared = self.extend(prefixes, max_tokens=max_tokens, last_only=last_only)
            for (members, num_shared), result in zip(groups, shared, strict=True):
                store(members, [result] * len(members))
                for i in members:
                    pending[i] = pending[i][num_shared:]
        if not self.continues_by_chunks:
            singly = [i for i, state in enumerate(states) if state and len(pending[i]) > 1]
            if singly:
                store(singly, self._extend_singly([(states[i], pending[i]) for i in singly]))
                for i in singly:
                    pending[i] = ()
        may_split = self.continues_by_chunks and self.batching == "any lengths"
        for step in plan_steps(
            [len(ids) for ids in pending],
            [state is None for state in states],
            max_tokens=0 if self.batching == "one row" else max_tokens,
            may_split=may_split,
        ):
            parts = [(states[i], pending[i][: step.num_tokens]) for i in step.rows]
            store(step.rows, self._extend_equal(parts))
            for i in step.rows:
                pending[i] = pending[i][step.num_tokens :]
        assert not any(pending)
        return [
            (state, torch.cat(pieces))
            for state, pieces in zip(states, hidden, strict=True)
            if state is not None
        ]

    def _extend_equal(
        self, rows: Sequence[tuple[RowState | None, Sequence[int]]]
    ) -> list[tuple[RowState, Tensor]]:
        """In one pass: all rows are new or none is, with equally many new tokens."""
        ids_BN = self._tensor([ids for _, ids in rows])
        states = [state for state, _ in rows if state is not None]
        if states:
            batch = StateBatch(self, states)
            hidden_BND = batch.forward(ids_BN)
            return list(zip(batch.states(range(len(states))), hidden_BND, strict=True))
        hidden_BND, cache = self.forward(ids_BN, None, [0] * len(rows))
        num_tokens = ids_BN.shape[1]
        return [
            (self.layout.copy_row(cache, row, num_tokens), hidden_ND)
            for row, hidden_ND in enumerate(hidden_BND)
        ]

    def _extend_singly(
        self, rows: Sequence[tuple[RowState | None, Sequence[int]]]
    ) -> list[tuple[RowState, Tensor]]:
        """Token by token, all rows together; a row leaves after its last token."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][1]))
        batch = StateBatch(self, [state for i in order if (state := rows[i][0]) is not None])
        states: dict[int, RowState] = {}
        hidden: dict[int, list[Tensor]] = defaultdict(list)
        for n in range(len(rows[order[0]][1])):
            num_running = sum(len(rows[i][1]) > n for i in order)
            if num_running < len(order):
                states |= zip(
                    order[num_running:], batch.states(range(num_running, len(order))), strict=True
                )
                order = order[:num_running]
                batch.select(range(num_running))
            hidden_B1D = batch.forward(self._tensor([[rows[i][1][n]] for i in order]))
            for i, hidden_1D in zip(order, hidden_B1D, strict=True):
                hidden[i].append(hidden_1D)
        states |= zip(order, batch.states(range(len(order))), strict=True)
        return [(states[i], torch.cat(hidden[i])) for i in range(len(rows))]

    def forward(self, ids_BN: Tensor, cache: Any, num_tokens: Sequence[int]) -> tuple[Tensor, Any]:
        """Last hidden states [B, N, D] of the next tokens of rows with `num_tokens` in the cache
        (None: new sequences), and the cache with them."""
        num_new, device = ids_BN.shape[1], ids_BN.device
        arguments: dict[str, Any] = {} if cache is None else {self.cache_argument: cache}
        past_B1 = torch.tensor(num_tokens, device=device)[:, None]
        if self.takes_positions:
            arguments["position_ids"] = past_B1 + torch.arange(num_new, device=device)
        longest = max(num_tokens)
        if self.layout.has_kv and min(num_tokens) < longest:
            slot_L = torch.arange(longest + num_new, device=device)
            arguments["attention_mask"] = (slot_L >= longest - past_B1).long()
        with apply_patches(self.patches):
            out = self.model.base_model(input_ids=ids_BN, use_cache=True, **arguments)
        hidden_BND: Tensor = out.last_hidden_state
        return hidden_BND, getattr(out, self.cache_argument)

    def _tensor(self, ids: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in ids], device=self.model.device)


def _find_shared_prefixes(
    states: Sequence[RowState | None], pending: Sequence[tuple[int, ...]]
) -> list[tuple[list[int], int]]:
    """Rows that continue one state, or none, and begin alike; and for how many tokens. All but the
    last token may be shared: every row continues after it."""
    by_state: dict[int, list[int]] = defaultdict(list)
    for row, state in enumerate(states):
        by_state[id(state)].append(row)
    return [
        ([rows[member] for member in group.members], group.num_tokens)
        for rows in by_state.values()
        for group in find_prefix_groups([pending[row][:-1] for row in rows])
    ]


class Step(NamedTuple):
    """One pass: the next tokens of some rows, equally many of each."""

    rows: Sequence[int]
    num_tokens: int


def plan_steps(
    num_tokens: Sequence[int], is_new: Sequence[bool], *, max_tokens: int, may_split: bool
) -> list[Step]:
    """Passes that process `num_tokens` of each row without padding; new rows are apart from those
    that continue a state.

    Rows of equal length share a pass. Where lengths are many, each row is split into powers of two
    instead: in order, rows then meet in a pass for every bit of the longest.
    """
    num_bits = max(num_tokens, default=0).bit_length()
    equal: dict[tuple[bool, int], list[int]] = defaultdict(list)
    by_bit: dict[tuple[int, bool], list[int]] = {
        (1 << bit, new): [] for bit in reversed(range(num_bits)) for new in (True, False)
    }
    for row, (count, new) in enumerate(zip(num_tokens, is_new, strict=True)):
        if count:
            equal[new, count].append(row)
        for size in (1 << bit for bit in reversed(range(count.bit_length()))):
            if count & size:
                by_bit[size, new].append(row)
                new = False
    whole = [step for (_, n), rows in equal.items() for step in _split_rows(rows, n, max_tokens)]
    split = [step for (n, _), rows in by_bit.items() for step in _split_rows(rows, n, max_tokens)]
    # Half as many at least: every pass copies the states of its rows.
    return split if may_split and 2 * len(split) <= len(whole) else whole


def _split_rows(rows: Sequence[int], num_tokens: int, max_tokens: int) -> list[Step]:
    size = max(1, max_tokens // num_tokens)
    return [Step(rows[i : i + size], num_tokens) for i in range(0, len(rows), size)]


@dataclass(slots=True)
class _Group:
    """Rows of a batch that share a cache."""

    rows: list[int]
    cache: Any
    num_tokens: list[int]


class StateBatch:
    """Sequences that continue together, each from its own state."""

    def __init__(self, passes: StatePasses, states: Sequence[RowState], *, padding: float = 0.0):
        self._passes = passes
        groups: dict[int, list[int]] = defaultdict(list)
        for row, state in enumerate(states):
            keys = {"any lengths": 0, "equal lengths": state.num_tokens, "one row": row}
            groups[keys[passes.batching]].append(row)
        self._groups = [
            _Group(
                rows,
                passes.layout.join([states[row] for row in rows], padding=padding),
                [states[row].num_tokens for row in rows],
            )
            for rows in groups.values()
        ]

    def forward(self, ids_BN: Tensor) -> Tensor:
        """Hidden states [B, N, D] of the next tokens of all rows."""
        hidden: dict[int, Tensor] = {}
        for group in self._groups:
            hidden_BND, group.cache = self._passes.forward(
                ids_BN[group.rows], group.cache, group.num_tokens
            )
            group.num_tokens = [count + ids_BN.shape[1] for count in group.num_tokens]
            if len(self._groups) == 1:
                return hidden_BND
            hidden |= zip(group.rows, hidden_BND, strict=True)
        return torch.stack([hidden[row] for row in range(len(hidden))])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, which are in ascending order, and number them anew."""
        new_rows = {row: index for index, row in enumerate(rows)}
        for group in self._groups:
            keep = [index for index, row in enumerate(group.rows) if row in new_rows]
            num_tokens = [group.num_tokens[index] for index in keep]
            if keep and len(keep) < len(group.rows):
                index_B = torch.tensor(keep, device=self._passes.model.device)
                self._passes.layout.select(group.cache, index_B, num_tokens)
            group.rows = [new_rows[group.rows[index]] for index in keep]
            group.num_tokens = num_tokens
        self._groups = [group for group in self._groups if group.rows]

    def states(self, rows: Iterable[int]) -> list[RowState]:
        """Copies of the states of these rows."""
        places = {
            row: (group, index) for group in self._groups for index, row in enumerate(group.rows)
        }
        copies = []
        for row in rows:
            group, index = places[row]
            copies.append(self._passes.layout.copy_row(group.cache, index, group.num_tokens[index]))
        return copies
