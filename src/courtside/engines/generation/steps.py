"""The two steps that continuous batching replays as CUDA graphs: decode and short prefill.

A decode step is everything for one token of every row: model, LM head, sampling, and the sampled
token as the next step's input. Rows count their own tokens and stop by themselves, so they may
start at any time. Shapes and addresses never change. On a CPU steps run eagerly, for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from courtside.engines.base import Sampling
from courtside.engines.forward.batching import tensor_on
from courtside.engines.generation.cuda_graphs import CudaGraphs, StepGraph
from courtside.engines.generation.sampler import sample_from_hidden, stack_uniforms
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.attention import DECODE_ATTENTION, RowLengths
from courtside.engines.patches.patch import apply_patches, patch_attention

if TYPE_CHECKING:
    from courtside.engines.generation.kv_cache import KVCache

STEPS_PER_SYNC = 4
"""Decode steps between checks for finished rows: a check waits for the GPU."""


class DecodeStep:
    """One token of every row of a KV cache, with the buffers of their outputs."""

    def __init__(
        self,
        model: Any,
        head: LMHead,
        cache: KVCache,
        sampling: Sampling,
        eos: Sequence[int],
        graphs: CudaGraphs | None = None,
    ):
        self.model, self.head, self.sampling = model, head, sampling
        # Not the KV cache itself, which holds its steps: a cycle would outlive both until the
        # garbage collector runs.
        self.hf_cache, self.length_B = cache.hf_cache, cache.length_B
        self.prefixes = {
            "prefix_row_B": cache.prefix_row_B, "prefix_length_B": cache.prefix_length_B,
        }  # fmt: skip
        self.device = cache.length_B.device
        B, N = cache.num_rows, sampling.max_new_tokens
        self.ids_B1 = self._zeros(B, 1)
        self.count_B = self._zeros(B)
        """Tokens that each row has sampled."""
        self.active_B = self._zeros(B, dtype=torch.bool)
        # One column more than tokens: inactive rows write there.
        self.uniform_BN = self._zeros(B, N + 1, dtype=torch.float64)
        self.sampled_BN = self._zeros(B, N + 1)
        self.logp_BN = self._zeros(B, N + 1, dtype=torch.float32)
        self.eos_E = torch.tensor(sorted(eos), device=self.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        """Keeps models from building one; decode attention masks by length."""
        self._state = [
            self.ids_B1, self.length_B, self.count_B, self.active_B, self.sampled_BN, self.logp_BN,
        ]  # fmt: skip
        """What a step advances."""
        self._graph = StepGraph(graphs)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def start(self, rows: Sequence[int], hidden_BD: Tensor, seeds: Sequence[int]) -> None:
        """Sample the first token of rows after prefill, from their last hidden states."""
        N = self.sampling.max_new_tokens
        row_B = torch.tensor(rows, device=self.device)
        uniform_BN = stack_uniforms(seeds, N, self.device)
        ids_B, logp_B = sample_from_hidden(self.head, hidden_BD, uniform_BN[:, 0], self.sampling)
        self.uniform_BN[row_B, :N] = uniform_BN
        self.sampled_BN[row_B, 0] = ids_B
        self.logp_BN[row_B, 0] = logp_B.float()
        self.ids_B1[row_B, 0] = ids_B
        self.count_B[row_B] = 1
        self.active_B[row_B] = ~self._is_eos(ids_B) if N > 1 else False

    def stop(self, rows: Sequence[int] | None = None) -> None:
        """Deactivate rows; None: all of them."""
        if rows is None:
            self.active_B.zero_()
        elif rows:
            self.active_B[torch.tensor(rows, device=self.device)] = False

    def run(self) -> list[bool]:
        """A few tokens for every active row; returns which rows are still active."""
        for _ in range(STEPS_PER_SYNC):
            self._graph.run(self._step, self._state)
        is_active: list[bool] = self.active_B.tolist()
        return is_active

    def outputs(self, rows: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probs of each row so far."""
        if not rows:
            return []
        row_B = torch.tensor(rows, device=self.device)
        counts = self.count_B[row_B].tolist()
        longest = max(counts)
        ids = self.sampled_BN[row_B, :longest].tolist()
        logps = self.logp_BN[row_B, :longest].tolist()
        return [(i[:n], p[:n]) for i, p, n in zip(ids, logps, counts, strict=True)]

    def _is_eos(self, ids_B: Tensor) -> Tensor:
        return (ids_B[:, None] == self.eos_E).any(-1)

    def _step(self) -> None:
        with apply_patches([patch_attention(self.model, DECODE_ATTENTION)]):
            out = self.model.base_model(
                input_ids=self.ids_B1,
                attention_mask=self.mask,
                position_ids=self.length_B[:, None],
                past_key_values=self.hf_cache,
                use_cache=True,
                row_lengths=RowLengths(length_B=self.length_B + 1, **self.prefixes),
            )
        uniform_B = self.uniform_BN.gather(1, self.count_B[:, None])[:, 0]
        hidden_BD = out.last_hidden_state[:, -1]
        ids_B, logp_B = sample_from_hidden(self.head, hidden_BD, uniform_B, self.sampling)
        last = self.sampling.max_new_tokens
        column_B1 = torch.where(self.active_B, self.count_B, last)[:, None]
        self.sampled_BN.scatter_(1, column_B1, ids_B[:, None])
        self.logp_BN.scatter_(1, column_B1, logp_B[:, None].float())
        self.ids_B1.copy_(torch.where(self.active_B, ids_B, self.ids_B1[:, 0])[:, None])
        self.length_B.add_(self.active_B)
        self.count_B.add_(self.active_B)
        self.active_B.logical_and_(~self._is_eos(ids_B) & (self.count_B < last))


class PrefillStep:
    """Prefill of up to `num_tokens` tokens per row. All rows of the KV cache take part, so that the
    shape stays: rows without a prompt write to their last position only, which must be free."""

    def __init__(
        self, cache: KVCache, *, num_tokens: int, width: int, graphs: CudaGraphs | None = None
    ):
        """`width`: cached positions that tokens attend to at most."""
        self.num_tokens, self.width = num_tokens, width
        shape, device = (cache.num_rows, 2 + num_tokens), cache.length_B.device
        self.inputs_RT = torch.zeros(shape, dtype=torch.long, device=device)
        """Of each row: its cached length, the index of its last new token, and the new tokens."""
        self.hidden_RD: Tensor | None = None
        self._graph = StepGraph(graphs)

    def run(
        self, cache: KVCache, prompts: Mapping[int, Sequence[int]], lengths: Sequence[int]
    ) -> Tensor:
        """Hidden states [rows, D] of the last new token of each row with a prompt."""
        table = [[cache.row_capacity - 1, 0, *(0,) * self.num_tokens]] * cache.num_rows
        for row, ids in prompts.items():
            padding = (0,) * (self.num_tokens - len(ids))
            table[row] = [lengths[row], len(ids) - 1, *ids, *padding]
        self.inputs_RT.copy_(tensor_on(table, dtype=torch.long, device=self.inputs_RT.device))
        self._graph.run(lambda: self._step(cache))
        assert self.hidden_RD is not None
        return self.hidden_RD.clone()

    def _step(self, cache: KVCache) -> None:
        length_R1, last_R1, ids_RN = self.inputs_RT.split([1, 1, self.num_tokens], dim=1)
        ahead_N = torch.arange(self.num_tokens, device=ids_RN.device)
        position_RN = (length_R1 + ahead_N).clamp(max=cache.row_capacity - 1)
        hidden_RND = cache.prefill(None, ids_RN, position_RN, self.width)
        last_R1D = last_R1[:, :, None].expand(-1, -1, hidden_RND.shape[-1])
        hidden_RD = hidden_RND.gather(1, last_R1D)[:, 0]
        if self.hidden_RD is None:
            self.hidden_RD = torch.empty_like(hidden_RD)
        self.hidden_RD.copy_(hidden_RD)
