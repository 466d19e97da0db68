"""One step of decoding for all rows at once, replayed as a CUDA graph: one launch a token instead
of a thousand.

The whole step is in the graph: model, head, draw, and writing the token where the next step reads
it. A row counts its own tokens and stops by itself, so rows may begin at any time. On a CPU the
step is simply called: the same logic, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from courtside.engines.base import Head, Sampling
from courtside.engines.ragged import ragged
from courtside.engines.sampling import draw, uniforms

LOOK_EVERY = 4
"""Tokens between looks at which rows have ended: a look waits for the GPU."""


class Decoder:
    """Rows that write, over keys and values that stay where they are."""

    def __init__(
        self,
        model: Any,
        head: Head,
        cache: Cache,
        length_B: Tensor,
        sampling: Sampling,
        eos: Sequence[int],
        pool: Any = None,
    ):
        self.model, self.head, self.cache, self.sampling = model, head, cache, sampling
        self.length_B = length_B
        """Ids in each row's keys and values, of the session."""
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
        self._replay: Callable[[], None] | None = None if self.device.type == "cuda" else self._step
        self._pool = pool

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def begin(self, rows: Sequence[int], hidden_BD: Tensor, seeds: Sequence[int]) -> None:
        """These rows have read their prompts: draw their first token and let them go on."""
        N = self.sampling.max_new_tokens
        where_B = torch.tensor(rows, device=self.device)
        uniform_BN = torch.stack([uniforms(seed, N) for seed in seeds]).to(self.device)
        ids_B, logp_B = drawn(self.head(hidden_BD), uniform_BN[:, 0], self.sampling)
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
            self._replay = self._capture()
        for _ in range(LOOK_EVERY):
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
        with ragged(self.model, self.length_B + 1):
            out = self.model.base_model(
                input_ids=self.ids_B1,
                attention_mask=self.mask,
                position_ids=self.length_B[:, None],
                past_key_values=self.cache,
                use_cache=True,
            )
        uniform_B = self.uniform_BN.gather(1, self.count_B[:, None])[:, 0]
        logits_BV = self.head(out.last_hidden_state[:, -1])
        ids_B, logp_B = drawn(logits_BV, uniform_B, self.sampling)
        last = self.sampling.max_new_tokens
        where_B1 = torch.where(self.active_B, self.count_B, last)[:, None]
        self.drawn_BN.scatter_(1, where_B1, ids_B[:, None])
        self.logp_BN.scatter_(1, where_B1, logp_B[:, None].float())
        self.ids_B1.copy_(torch.where(self.active_B, ids_B, self.ids_B1[:, 0])[:, None])
        self.length_B.add_(self.active_B)
        self.count_B.add_(self.active_B)
        self.active_B.logical_and_(~self._ends(ids_B) & (self.count_B < last))

    def _capture(self) -> Callable[[], None]:
        kept = [t.clone() for t in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # lazy initialisation must not be captured
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step()
        for tensor, before in zip(self._state(), kept, strict=True):
            tensor.copy_(before)
        return graph.replay

    def _state(self) -> list[Tensor]:
        """What trial steps change. Keys and values they write are written again, equal."""
        return [
            self.ids_B1, self.length_B, self.count_B, self.active_B, self.drawn_BN, self.logp_BN,
        ]  # fmt: skip


def drawn(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """`draw`, by a kernel where there is one for it."""
    if logits_BV.is_cuda and sampling.temperature > 0 and not sampling.truncates:
        from courtside.engines.decode_kernels import pick  # needs Triton, which CPUs do without

        return pick(logits_BV, uniform_B, sampling.temperature)
    return draw(logits_BV, uniform_B, sampling)
