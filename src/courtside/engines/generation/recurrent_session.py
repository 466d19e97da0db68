"""Sampling from recurrent and hybrid models, and their multi-turn sessions.

A padding token would enter a recurrent or convolution state, so prompts are prefilled without
padding, equal lengths together. Then all rows decode together, each from its own state. Between
turns a session has the state of every row, so that a turn costs its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.forward.batching import default_pass_tokens
from courtside.engines.forward.state_passes import StateBatch, StatePasses
from courtside.engines.generation.sampler import SampleBuffer
from courtside.engines.generation.session import decode
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.onednn_prepack import make_prepacked_patches
from courtside.engines.patches.patch import Patch, apply_patches
from courtside.engines.row_states import RowState
from courtside.types import Sample


class RecurrentBatch:
    """Prompts, each after the state of its conversation, that are decoded together."""

    def __init__(
        self,
        passes: StatePasses,
        prompts: Sequence[tuple[int, ...]],
        states: Sequence[RowState | None] | None = None,
        *,
        retain_states: bool = False,
    ):
        """`states`: after what precedes each prompt; None: nothing does."""
        self._passes, self._prompts = passes, prompts
        self._states = [None] * len(prompts) if states is None else list(states)
        self._retain_states = retain_states
        self.order = list(range(len(prompts)))
        """The prompt of each row of the batch."""
        self.final_states: dict[int, RowState] = {}
        """By prompt, of those that have left the batch, where they are retained."""

    def prefill(self) -> Tensor:
        """Hidden states [B, D] of the last prompt tokens. New conversations with equal prompts
        share a prefill, whose state is copied for each of them."""
        first: dict[tuple[int, ...], int] = {}
        sources = [
            row if state is not None else first.setdefault(ids, row)
            for row, (ids, state) in enumerate(zip(self._prompts, self._states, strict=True))
        ]
        unique = sorted(set(sources))
        extended = self._passes.extend(
            [(self._states[row], self._prompts[row]) for row in unique],
            max_tokens=default_pass_tokens(self._passes.model.device),
            last_only=True,
        )
        self._states.clear()  # the batch has copies
        states = dict(zip(unique, (state for state, _ in extended), strict=True))
        hidden = dict(zip(unique, (hidden_ND[-1] for _, hidden_ND in extended), strict=True))
        del extended
        self._batch = StateBatch(self._passes, [states[row] for row in sources])
        return torch.stack([hidden[row] for row in sources])

    def advance(self, next_ids: Mapping[int, int]) -> tuple[list[int], Tensor]:
        """One new token per prompt that goes on; the others leave the batch."""
        if len(next_ids) < len(self.order):
            rows = range(len(self.order))
            self._retain([row for row in rows if self.order[row] not in next_ids])
            remaining = [row for row in rows if self.order[row] in next_ids]
            self._batch.select(remaining)
            self.order = [self.order[row] for row in remaining]
        ids_B1 = torch.tensor(
            [[next_ids[prompt]] for prompt in self.order], device=self._passes.model.device
        )
        return self.order, self._batch.forward(ids_B1)[:, -1]

    def finish(self) -> None:
        """All prompts leave the batch."""
        self._retain(range(len(self.order)))
        self.order = []

    def _retain(self, rows: Sequence[int]) -> None:
        if self._retain_states:
            prompts = [self.order[row] for row in rows]
            self.final_states |= zip(prompts, self._batch.states(rows), strict=True)


class RecurrentSession:
    """Rows whose states persist from turn to turn.

    The model's weights must not change while a session is in use: they are prepacked once for all
    of its turns.
    """

    def __init__(
        self,
        passes: StatePasses,
        head: LMHead,
        *,
        num_rows: int,
        make_buffer: Callable[[int, Sampling], SampleBuffer],
        autocast_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        retain_states: bool = True,
    ):
        """`retain_states`: False for a single turn, whose states nobody continues."""
        self.passes, self.head, self.make_buffer = passes, head, make_buffer
        self.autocast_context, self.retain_states = autocast_context, retain_states
        self.states: list[RowState | None] = [None] * num_rows
        self.prepacked: list[Patch] = []

    @torch.no_grad()
    def sample(
        self, rows: Sequence[int], requests: Sequence[SampleRequest], sampling: Sampling
    ) -> list[Sample]:
        """Append each row's `prompt_ids` to its conversation, and generate.

        The last token that a row sampled is not in its state: its next prompt must start with it.
        """
        assert rows and len(set(rows)) == len(rows)
        prompts = [request.prompt_ids for request in requests]
        assert all(prompts), "a prompt needs at least one token"
        states = [self.states[row] for row in rows]
        for row in rows:
            self.states[row] = None  # a failed turn ends the conversation
        with self.autocast_context(), apply_patches(self._patches(sampling.max_new_tokens)):
            batch = RecurrentBatch(self.passes, prompts, states, retain_states=self.retain_states)
            del states
            samples = decode(
                batch.order, batch.prefill(), batch.advance, requests=requests, sampling=sampling,
                head=self.head, buffer=self.make_buffer(len(rows), sampling),
            )  # fmt: skip
            batch.finish()
        for index, state in batch.final_states.items():
            self.states[rows[index]] = state
        return samples

    def restart(self, row: int) -> None:
        self.states[row] = None

    def _patches(self, num_steps: int) -> list[Patch]:
        if not self.prepacked:
            self.prepacked = make_prepacked_patches(
                self.passes.model, self.head, num_steps=num_steps
            )
        return self.prepacked
