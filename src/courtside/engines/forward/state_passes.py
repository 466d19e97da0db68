"""Forward passes that continue sequences from saved states, for recurrent and hybrid models.

Pads would enter a recurrent or convolution state, so rows of a pass have equally many new tokens.
Their pasts may differ: the mask hides what pads the keys of shorter ones. A probe finds out what a
model's passes can do: not every kind continues a state by more than one token at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from courtside.engines.patches.patch import Patch, apply_patches, eval_mode
from courtside.engines.patches.time_steps import make_time_step_patches
from courtside.engines.probes import distance_from_plain_forward, run_probe
from courtside.engines.row_states import (
    RowState,
    StateLayout,
    has_recurrent_states,
    without_states,
)

Batching = Literal["any lengths", "equal lengths", "one row"]
"""Which rows a pass that continues states may have together. Some kinds mask wrongly what pads the
keys of shorter rows, and RWKV's layers mix the rows of a batch."""
CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")
"""How models call the cache that they take and return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePasses:
    """Runs a model on the new tokens of sequences whose earlier tokens are in their states."""

    model: Any
    layout: StateLayout
    cache_argument: str
    takes_positions: bool
    continues_by_chunks: bool = True
    """Whether a pass over several tokens starts from the state; if not, tokens follow singly."""
    batching: Batching = "any lengths"
    patches: tuple[Patch, ...] = ()
    """For passes over single tokens."""
    row_state_tokens: int = 0
    """Tokens whose keys and values take the memory of a row's other states."""

    def extend(
        self, rows: Sequence[tuple[RowState | None, Sequence[int]]], *, max_tokens: int
    ) -> list[tuple[RowState, Tensor]]:
        """The state after each row's new tokens, and their last hidden states [N, D]. Rows without
        a state are new sequences. A pass has at most `max_tokens`, or one row."""
        results: dict[int, tuple[RowState, Tensor]] = {}
        groups: dict[Any, list[int]] = defaultdict(list)
        singly: list[int] = []
        for index, (state, ids) in enumerate(rows):
            if state is None:
                groups[None, len(ids)].append(index)
            elif len(ids) > 1 and not self.continues_by_chunks:
                singly.append(index)
            else:
                groups[len(ids)].append(index)
        for members in groups.values():
            size = max(1, max_tokens // len(rows[members[0]][1]))
            for first in range(0, len(members), size):
                part = members[first : first + size]
                results |= zip(part, self._extend_equal([rows[i] for i in part]), strict=True)
        if singly:
            results |= zip(singly, self._extend_singly([rows[i] for i in singly]), strict=True)
        return [results[index] for index in range(len(rows))]

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


# ── probe ────────────────────────────────────────────────────────────────────────────────────────


def probe_state_passes(model: Any) -> StatePasses | str | None:
    """How this model continues from saved states, or why it cannot; None: it has no recurrent or
    convolution states."""
    candidates: list[StatePasses | None] = []

    def find_states() -> float:
        candidates.append(_find_passes(model))
        return 0.0

    reason = run_probe(model, find_states)
    if reason is not None or candidates[0] is None:
        return reason
    max_error = _max_error(model)
    for batching in get_args(Batching):
        passes = replace(candidates[0], batching=batching)
        reason = run_probe(model, partial(_decoding_error, passes), max_error=max_error)
        if reason is None:
            chunk_reason = run_probe(model, partial(_chunk_error, passes), max_error=max_error)
            return replace(passes, continues_by_chunks=chunk_reason is None)
    return reason


@torch.no_grad()
def _find_passes(model: Any) -> StatePasses | None:
    parameters = signature(model.base_model.forward).parameters
    names = [name for name in CACHE_ARGUMENTS if name in parameters]
    if not names:
        return None
    with eval_mode(model):
        ids = torch.tensor([_example_ids(model, 3)], device=model.device)
        out = model.base_model(input_ids=ids, use_cache=True)
    cache = getattr(out, names[0], None)
    if cache is None or not has_recurrent_states(cache):
        return None
    layout = StateLayout(cache)
    row = layout.copy_row(cache, 0, len(ids[0]))
    bytes_per_token = layout.num_bytes(row, kv=True) // len(ids[0]) or token_bytes(model)
    return StatePasses(
        model=model,
        layout=layout,
        row_state_tokens=-(-layout.num_bytes(row, kv=False) // bytes_per_token),
        cache_argument=names[0],
        takes_positions="position_ids" in parameters,
        patches=tuple(make_time_step_patches(model)),
    )


def token_bytes(model: Any) -> int:
    """The unit of a memory budget for models without keys and values, where a token takes none:
    two hidden states in every layer."""
    config = model.config.get_text_config()
    return int(2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize)


def _example_ids(model: Any, count: int, *, start: int = 0) -> list[int]:
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return [1 + (7 * i * i + 3 * i) % (vocab_size - 1) for i in range(start, start + count)]


def _max_error(model: Any) -> float:
    """In float32 on a CPU rounding is a hundred times smaller; kernels of a GPU round to TF32."""
    return 0.001 if model.device.type == "cpu" else 0.01


EXAMPLE_LENGTHS = (2, 9, 9, 70)
"""Two alike; shorter and longer than a convolution, and longer than a chunk of the delta rule."""


def _example_states(passes: StatePasses, num_new: int) -> tuple[list[list[int]], list[RowState]]:
    """Ids of some sequences, and their states after all but the last `num_new`."""
    rows = [
        _example_ids(passes.model, length + num_new, start=7 * row)
        for row, length in enumerate(EXAMPLE_LENGTHS)
    ]
    prompts = [(None, ids[:-num_new]) for ids in rows]
    return rows, [state for state, _ in passes.extend(prompts, max_tokens=1)]


def _decoding_error(passes: StatePasses, num_new: int = 4) -> float:
    """Distance from plain passes of rows that decode together, each after a prefill of its own."""
    model = passes.model
    rows, states = _example_states(passes, num_new)
    hidden = []
    for padding in (0.0, 1.0):  # if the mask hides padding, nothing depends on it
        batch = StateBatch(passes, states, padding=padding)
        steps = [
            batch.forward(torch.tensor([[ids[n]] for ids in rows], device=model.device))
            for n in range(-num_new, 0)
        ]
        hidden.append(torch.cat(steps, dim=1))
    if not torch.equal(*hidden):
        return torch.inf
    return max(
        distance_from_plain_forward(model, ids, hidden_ND)
        for ids, hidden_ND in zip(rows, hidden[0], strict=True)
    )


def _chunk_error(passes: StatePasses, num_new: int = 6) -> float:
    """Distance from plain passes of rows that continue from a state by several tokens at once."""
    model, layout = passes.model, passes.layout
    passes = replace(passes, continues_by_chunks=True)
    rows, states = _example_states(passes, num_new)

    def continue_from(states: Sequence[RowState]) -> list[Tensor]:
        chunks = [(s, ids[-num_new:]) for s, ids in zip(states, rows, strict=True)]
        return [hidden_ND for _, hidden_ND in passes.extend(chunks, max_tokens=num_new * len(rows))]

    hidden = continue_from(states)
    for kind in set(layout.kinds) - {"kv"}:
        # Some kinds silently start such a pass from zeros, which a long past may not show.
        zeroed = continue_from([without_states(state, layout, kind) for state in states])
        if all(torch.equal(a, b) for a, b in zip(hidden, zeroed, strict=True)):
            return torch.inf
    return max(
        distance_from_plain_forward(model, ids, hidden_ND)
        for ids, hidden_ND in zip(rows, hidden, strict=True)
    )
