"""One step of decoding for all rows at once, replayed as a CUDA graph: one launch a token instead
of a thousand. And reading, where it is as short: what an environment says between two turns.

The whole step is in the graph: model, head, draw, and writing the token where the next step reads
it. A row counts its own tokens and stops by itself, so rows may begin at any time. On a CPU the
step is simply called: the same logic, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from courtside.engines.attention_masks import format_mask
from courtside.engines.base import Sampling
from courtside.engines.generation.decode_attention import use_decode_attention
from courtside.engines.generation.sampler import sample_tokens, uniforms_for
from courtside.engines.lm_head import LMHead
from courtside.engines.patches import layer_ops
from courtside.engines.transfer import tensor_on

STEPS_PER_SYNC = 4
"""Tokens between looks at which rows have ended: a look waits for the GPU."""


class DecodeStep:
    """Rows that write, over keys and values that stay where they are."""

    def __init__(
        self,
        model: Any,
        head: LMHead,
        cache: Cache,
        length_B: Tensor,
        leaders: tuple[Tensor, Tensor],
        sampling: Sampling,
        eos: Sequence[int],
        pool: Any = None,
    ):
        self.model, self.head, self.cache, self.sampling = model, head, cache, sampling
        self.length_B = length_B
        """Ids in each row's keys and values, of the session."""
        self.leaders = leaders
        """For each row one that began alike, and with how many ids."""
        self.device = length_B.device
        B, N = len(length_B), sampling.max_new_tokens
        self.ids_B1 = self._zeros(B, 1)
        self.count_B = self._zeros(B)
        """Tokens that a row has drawn."""
        self.active_B = self._zeros(B, dtype=torch.bool)
        # One column more than tokens: there rows write that have nothing to say.
        self.uniform_BN = self._zeros(B, N + 1, dtype=torch.float64)
        self.drawn_BN = self._zeros(B, N + 1)
        self.logp_BN = self._zeros(B, N + 1, dtype=torch.float32)
        self.eos_E = torch.tensor(sorted(eos), device=self.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        """For models that would build one; `ragged` looks at lengths instead."""
        self._replay: Callable[[], None] | None = None
        self._pool = pool

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def begin(self, rows: Sequence[int], hidden_BD: Tensor, seeds: Sequence[int]) -> None:
        """These rows have read their prompts: draw their first token and let them go on."""
        N = self.sampling.max_new_tokens
        where_B = torch.tensor(rows, device=self.device)
        uniform_BN = torch.stack([uniforms_for(seed, N) for seed in seeds]).to(self.device)
        ids_B, logp_B = sample_from_hidden(self.head, hidden_BD, uniform_BN[:, 0], self.sampling)
        self.uniform_BN[where_B, :N] = uniform_BN
        self.drawn_BN[where_B, 0] = ids_B
        self.logp_BN[where_B, 0] = logp_B.float()
        self.ids_B1[where_B, 0] = ids_B
        self.count_B[where_B] = 1
        self.active_B[where_B] = ~self._ends(ids_B) if N > 1 else False

    def stop(self, rows: Sequence[int] | None = None) -> None:
        """These rows write no more; all of them, if not said."""
        if rows is None:
            self.active_B.zero_()
        else:
            self.active_B[torch.tensor(rows, device=self.device)] = False

    def go(self) -> list[bool]:
        """A few tokens for every row that is active; says which still are."""
        if self._replay is None:
            self._replay = capture_step(self._step, self._state(), self._pool)
        for _ in range(STEPS_PER_SYNC):
            self._replay()
        going: list[bool] = self.active_B.tolist()
        return going

    def written(self, rows: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probs of each row so far."""
        where_B = torch.tensor(rows, device=self.device)
        counts = self.count_B[where_B].tolist()
        most = max(counts)
        ids, logps = self.drawn_BN[where_B, :most].tolist(), self.logp_BN[where_B, :most].tolist()
        return [(i[:n], p[:n]) for i, p, n in zip(ids, logps, counts, strict=True)]

    def _ends(self, ids_B: Tensor) -> Tensor:
        return (ids_B[:, None] == self.eos_E).any(-1)

    def _step(self) -> None:
        """Read each row's last token, draw the next, leave it where the next step reads it."""
        with use_decode_attention(self.model, self.length_B + 1, *self.leaders):
            out = self.model.base_model(
                input_ids=self.ids_B1,
                attention_mask=self.mask,
                position_ids=self.length_B[:, None],
                past_key_values=self.cache,
                use_cache=True,
            )
        uniform_B = self.uniform_BN.gather(1, self.count_B[:, None])[:, 0]
        hidden_BD = out.last_hidden_state[:, -1]
        ids_B, logp_B = sample_from_hidden(self.head, hidden_BD, uniform_B, self.sampling)
        last = self.sampling.max_new_tokens
        where_B1 = torch.where(self.active_B, self.count_B, last)[:, None]
        self.drawn_BN.scatter_(1, where_B1, ids_B[:, None])
        self.logp_BN.scatter_(1, where_B1, logp_B[:, None].float())
        self.ids_B1.copy_(torch.where(self.active_B, ids_B, self.ids_B1[:, 0])[:, None])
        self.length_B.add_(self.active_B)
        self.count_B.add_(self.active_B)
        self.active_B.logical_and_(~self._ends(ids_B) & (self.count_B < last))

    def _state(self) -> list[Tensor]:
        """What trial steps change."""
        return [
            self.ids_B1, self.length_B, self.count_B, self.active_B, self.drawn_BN, self.logp_BN,
        ]  # fmt: skip


class PrefillStep:
    """Rows read up to N tokens each behind what they have. All rows of the room take part, so that
    the shape stays: those that have nothing to read leave no trace but in their last place, which
    must be free."""

    def __init__(
        self,
        model: Any,
        cache: Cache,
        reading: Callable[[Tensor, int], AbstractContextManager[None]],
        *,
        shape: tuple[int, int],
        num_tokens: int,
        width: int,
        pool: Any = None,
    ):
        """`reading`: while the pass has these positions, and looks back so far. `shape` of the
        room: rows and places."""
        self.model, self.cache, self.reading = model, cache, reading
        self.num_rows, self.row_capacity = shape
        self.num_tokens, self.width = num_tokens, width
        device = model.device
        self.given_RT = torch.zeros(self.num_rows, 2 + num_tokens, dtype=torch.long, device=device)
        """Of each row: the ids it has, where the last new one stands, and those."""
        self.ahead_N = torch.arange(num_tokens, device=device)
        self.place_W = torch.arange(width, device=device)
        self.hidden_RD: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        self._pool = pool

    def read(self, reads: Mapping[int, Sequence[int]], has: Sequence[int]) -> Tensor:
        """Hidden states [rows, D] behind the last new id of each row that reads."""
        table = [[self.row_capacity - 1, 0, *(0,) * self.num_tokens]] * self.num_rows
        for row, ids in reads.items():
            padding = (0,) * (self.num_tokens - len(ids))
            table[row] = [has[row], len(ids) - 1, *ids, *padding]
        self.given_RT.copy_(tensor_on(table, dtype=torch.long, device=self.given_RT.device))
        if self._replay is None:
            self._replay = capture_step(self._step, (), self._pool)
        self._replay()
        assert self.hidden_RD is not None
        return self.hidden_RD.clone()

    def _step(self) -> None:
        has_R1, last_R1, ids_RN = self.given_RT.split([1, 1, self.num_tokens], dim=1)
        position_RN = (has_R1 + self.ahead_N).clamp(max=self.row_capacity - 1)
        mask = (self.place_W <= position_RN[:, :, None])[:, None]
        with self.reading(position_RN, self.width):
            out = self.model.base_model(
                input_ids=ids_RN,
                attention_mask=format_mask(self.model, mask),
                position_ids=position_RN,
                past_key_values=self.cache,
                use_cache=True,
            )
        hidden_RND = out.last_hidden_state
        last_R1D = last_R1[:, :, None].expand(-1, -1, hidden_RND.shape[-1])
        hidden_RD = hidden_RND.gather(1, last_R1D)[:, 0]
        if self.hidden_RD is None:
            self.hidden_RD = torch.empty_like(hidden_RD)
        self.hidden_RD.copy_(hidden_RD)


def capture_step(
    step: Callable[[], None], state: Sequence[Tensor], pool: Any
) -> Callable[[], None]:
    """`step` as a CUDA graph; on a CPU as it is. What trial steps change of `state` is put back;
    keys and values they write are written again, equal."""
    if pool is None:
        return step
    kept = [t.clone() for t in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # lazy initialisation must not be captured
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    for tensor, before in zip(state, kept, strict=True):
        tensor.copy_(before)
    return graph.replay


def sample_from_hidden(
    head: LMHead, hidden_BD: Tensor, uniform_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """`draw`, by a kernel where there is one for it, which reads the logits as they are."""
    if layer_ops.can_run_kernels(hidden_BD) and sampling.temperature > 0 and not sampling.truncates:
        from courtside.engines.kernels.decode import (
            sample_from_logits,  # needs Triton, which CPUs do without
        )

        if head.softcap is None:
            temperature = sampling.temperature / head.scale
            return sample_from_logits(head.raw_logits(hidden_BD), uniform_B, temperature)
        return sample_from_logits(head(hidden_BD), uniform_B, sampling.temperature)
    return sample_tokens(head(hidden_BD), uniform_B, sampling)
