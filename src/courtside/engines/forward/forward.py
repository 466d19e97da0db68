"""Forward passes of token sequences, and the log-probs of their tokens.

Four strategies, the first that works: packed batches with shared prefixes (`batching.py`), packed
batches (`varlen.py`), right-padded batches, one sequence at a time. All but the last are compared
with plain forward passes on a small example. Log-probs are computed from last hidden states, one
chunk of logits at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from courtside.engines.base import ScoreRequest, Scores, Want
from courtside.engines.forward.batching import (
    MIN_PREFIX_TOKENS,
    SequenceSpan,
    batch_by_length,
    batch_by_prefix,
    batch_by_size,
    pack_sequences,
    pad_right,
    tensor_on,
)
from courtside.engines.forward.varlen import (
    DEFAULT_BACKEND,
    VARLEN_ATTENTION,
    VarlenBackend,
    VarlenLayout,
    forward_varlen,
    make_packed_layout,
    make_varlen_layout,
)
from courtside.engines.lm_head import LMHead
from courtside.engines.patches.attention import attn_implementation
from courtside.engines.patches.attention_variants import needs_own_softmax
from courtside.engines.patches.fused_layers import FusedLayers
from courtside.engines.patches.patch import Patch, apply_patches, eval_mode, patch_attention
from courtside.engines.probe_inputs import probe_ids
from courtside.engines.probes import (
    PROBE_LENGTHS,
    distance_from_plain_forward,
    find_batch_problem,
    find_unsupported_attention,
    run_probe,
)
from courtside.engines.routing import ExpertRecord, Routers, make_sharing_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPasses:
    """Plans batches of sequences and runs one model on them: `plan_batches`, then `forward` on
    each batch inside `patch_model`."""

    model: Any
    pad_id: int
    padding_reason: str | None
    """Why batches are padded; None: they are packed."""
    unshared_reason: str | None = None
    """Why packed batches share no prefixes; None: they do."""
    separate_reason: str | None = None
    """Where batches are not packed: why each sequence takes a pass of its own; None: they are
    padded."""
    fused_layers: FusedLayers | None = None
    backend: VarlenBackend = DEFAULT_BACKEND
    routers: Routers | None = None
    """Of a mixture of experts whose routing can be compared and replayed."""

    def plan_batches(
        self,
        units: Sequence[Sequence[Sequence[int]]],
        max_tokens: int,
        *,
        max_shared_tokens: int | None = None,
        for_backward: bool = False,
    ) -> list[list[int]]:
        """Indices by batch of units, whose sequences must share a batch; longest first.

        A batch computes at most `max_tokens`, or more to share a prefix: see `batch_by_prefix`.
        """
        if self.padding_reason is not None:
            sizes = [len(unit) * max(len(ids) for ids in unit) for unit in units]
            return batch_by_length(sizes, max_tokens)
        if self.unshared_reason is not None:
            return batch_by_size([sum(len(ids) for ids in unit) for unit in units], max_tokens)
        return batch_by_prefix(
            units, max_tokens, max_shared_tokens=max_shared_tokens, for_backward=for_backward
        )

    def sharing_keys(
        self, sequences: Sequence[Sequence[int]], records: Sequence[ExpertRecord], *, replays: bool
    ) -> Sequence[Sequence[int]]:
        """For `plan_batches`, in place of the ids: sequences whose experts are replayed share no
        more than what went to the same experts."""
        is_routed = self.routers is not None and self.unshared_reason is None and any(records)
        return make_sharing_keys(sequences, records) if replays and is_routed else sequences

    @contextmanager
    def patch_model(self, patches: Iterable[Patch] = ()) -> Iterator[None]:
        """Must enclose `forward` and the backward pass through its result. `patches`: in
        addition to those of packed attention and fused layers."""
        patches = [*patches]
        if self.fused_layers is not None:
            patches += self.fused_layers.patches
        if self.padding_reason is None:
            patches.append(patch_attention(self.model, VARLEN_ATTENTION))
        if self.routers is not None:
            patches += self.routers.patches()
        try:
            with apply_patches(patches):
                yield
        finally:
            if self.routers is not None:
                self.routers.current = None

    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        cache: Cache | None = None,
        records: Sequence[ExpertRecord] | None = None,
        replays: bool = False,
    ) -> tuple[Tensor, Sequence[SequenceSpan]]:
        """Last hidden states [positions, D] of one batch, and the span of each sequence there.

        `cache` retains the keys and values of a packed batch for tree scoring. `records`: the
        experts of each sequence's first tokens, which the pass is compared with and, if it
        `replays`, uses (`routers.current`); None: routers run as they are.
        """
        if self.routers is not None:
            self.routers.current = None
        if self.padding_reason is not None:
            assert cache is None, "tree scoring needs a packed batch"
            if self.separate_reason is not None:
                return self._forward_separately(sequences)
            ids_BL = pad_right(sequences, self.pad_id, self.model.device)
            longest = ids_BL.shape[1]
            spans = [SequenceSpan(start=row * longest) for row in range(len(ids_BL))]
            self._start_routing(ids_BL.numel(), spans, sequences, records, replays)
            out = self.model.base_model(input_ids=ids_BL, use_cache=False)
            return out.last_hidden_state.flatten(0, 1), spans
        batch = pack_sequences(
            sequences,
            share_prefixes=self.unshared_reason is None,
            sharing_keys=self.sharing_keys(sequences, records or (), replays=replays),
        )
        layout = make_packed_layout(batch, device=self.model.device, backend=self.backend)
        ids = [token for segment in batch.segments for token in segment.ids]
        positions = [s.first_position + n for s in batch.segments for n in range(len(s.ids))]
        self._start_routing(len(ids), batch.spans, sequences, records, replays)
        return self._forward_packed(ids, positions, layout, cache), batch.spans

    def _start_routing(
        self,
        num_positions: int,
        spans: Sequence[SequenceSpan],
        sequences: Sequence[Sequence[int]],
        records: Sequence[ExpertRecord] | None,
        replays: bool,
    ) -> None:
        if self.routers is not None and records is not None:
            lengths = [len(ids) for ids in sequences]
            self.routers.start_pass(
                num_positions, spans, records, lengths,
                replays=replays, device=self.model.device,
            )  # fmt: skip

    def _forward_separately(
        self, sequences: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Sequence[SequenceSpan]]:
        hidden = []
        for ids in sequences:
            ids_1L = tensor_on([list(ids)], dtype=torch.long, device=self.model.device)
            out = self.model.base_model(input_ids=ids_1L, use_cache=False)
            hidden.append(out.last_hidden_state[0])
        starts = accumulate((len(ids) for ids in sequences[:-1]), initial=0)
        return torch.cat(hidden), [SequenceSpan(start=start) for start in starts]

    def forward_on_cache(
        self,
        sequences: Sequence[Sequence[int]],
        first_positions: Sequence[int],
        cache: Cache,
    ) -> Tensor:
        """Last hidden states [positions, D] of packed sequences that continue others: each attends
        to the `first_positions` keys before it that the cache returns, and to itself. In eval
        mode: dropout would score other tokens, and gradient checkpointing discards the cache."""
        lengths = [len(ids) for ids in sequences]
        layout = make_varlen_layout(
            lengths,
            [first + length for first, length in zip(first_positions, lengths, strict=True)],
            device=self.model.device,
            backend=self.backend,
        )
        rows = zip(first_positions, lengths, strict=True)
        suspended = nullcontext() if self.routers is None else self.routers.suspend()
        with eval_mode(self.model), suspended:
            return self._forward_packed(
                [token for ids in sequences for token in ids],
                [first + n for first, length in rows for n in range(length)],
                layout,
                cache,
            )

    def _forward_packed(
        self, ids: list[int], positions: list[int], layout: VarlenLayout, cache: Cache | None
    ) -> Tensor:
        ids_N, position_N = tensor_on([ids, positions], dtype=torch.long, device=self.model.device)
        return forward_varlen(self.model, ids_N, position_N, layout, cache)


# ── log-probs ────────────────────────────────────────────────────────────────────────────────────


def default_chunk_size(vocab_size: int, device: torch.device) -> int:
    """Positions per chunk: 16 MiB of float32 logits on a CPU (small caches), 256 on a GPU."""
    elements = 2**26 if device.type == "cuda" else 2**22
    return max(16, elements // vocab_size)


def score_positions(
    head: LMHead,
    hidden_ND: Tensor,
    spans: Sequence[SequenceSpan],
    requests: Sequence[ScoreRequest],
    *,
    want: Want,
    top_k: int = 0,
    chunk_size: int | None = None,
    uses_kernel: bool | None = None,
) -> list[Scores]:
    """Scores of each request, whose sequence is at `spans` in `hidden_ND`. `uses_kernel` = None:
    log-probs are computed by a Triton kernel on a GPU.

    Positions of all requests go through the head together, because sequences may be short.
    """
    if not requests:
        return []
    assert (want == "top_k") == (top_k > 0), "k belongs to want = 'top_k'"
    device = hidden_ND.device
    positions = [[i for i, scored in enumerate(r.scored) if scored] for r in requests]
    counts = [len(request_positions) for request_positions in positions]
    # The hidden state before a token predicts it.
    source_T, ids_T = tensor_on(
        [
            [*chain(*(s.indices(i - 1 for i in p) for s, p in zip(spans, positions, strict=True)))],
            [r.token_ids[i] for r, p in zip(requests, positions, strict=True) for i in p],
        ],
        dtype=torch.long,
        device=device,
    )
    hidden_TD = hidden_ND[source_T]
    temperature_T = tensor_on(
        [r.temperature for r, count in zip(requests, counts, strict=True) for _ in range(count)],
        dtype=torch.promote_types(hidden_ND.dtype, torch.float32),
        device=device,
    )
    size = chunk_size or default_chunk_size(head.vocab_size, device)
    logp_chunks: list[Tensor] = []
    top_chunks: list[tuple[Tensor, Tensor]] = []
    if uses_kernel is None:  # it computes in float32: not where hidden states are float64
        uses_kernel = device.type == "cuda" and temperature_T.dtype == torch.float32
    for chunk_ND, ids_N, temperature_N in zip(
        hidden_TD.split(size), ids_T.split(size), temperature_T.split(size), strict=True
    ):
        if uses_kernel and not top_k and head.softcap is None:
            from courtside.engines.kernels.decode import token_logps  # needs Triton

            scale_N = head.scale / temperature_N
            logp_chunks.append(token_logps(head.raw_logits(chunk_ND), ids_N, scale_N))
            continue
        logits_NV = head(chunk_ND) / temperature_N[:, None]
        logsumexp_N1 = logits_NV.logsumexp(-1, keepdim=True)
        logp_chunks.append((logits_NV.gather(-1, ids_N[:, None]) - logsumexp_N1).squeeze(-1))
        if top_k:
            top = logits_NV.topk(top_k, dim=-1)
            top_chunks.append((top.indices, top.values - logsumexp_N1))
    columns: list[Sequence[Any]] = [torch.cat(logp_chunks).split(counts)]
    columns.append(hidden_TD.split(counts) if want == "hidden" else [None] * len(counts))
    columns += [torch.cat(top).split(counts) for top in zip(*top_chunks, strict=True)]
    names = ("logp_T", "hidden_TD", "top_ids_TK", "top_logp_TK")[: len(columns)]
    return [Scores(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


# ── probes ───────────────────────────────────────────────────────────────────────────────────────


def probe_forward_passes(
    model: Any,
    *,
    pad_id: int,
    fused_layers: FusedLayers | None = None,
    uses_dropout: bool = False,
    backend: VarlenBackend = DEFAULT_BACKEND,
    routers: Routers | None = None,
) -> ForwardPasses:
    """The best strategy for this model. `uses_dropout`: the passes run in training mode with it."""
    padding_reason = probe_packing(model, backend)
    unshared_reason = separate_reason = None
    if padding_reason is not None:
        separate_reason = probe_padding(model, pad_id=pad_id)
    elif uses_dropout:
        # A shared prefix has one dropout mask, where separate samples have one each.
        unshared_reason = "dropout acts on each sample"
    else:
        unshared_reason = probe_prefix_sharing(model, backend)
    return ForwardPasses(
        model=model,
        pad_id=pad_id,
        padding_reason=padding_reason,
        unshared_reason=unshared_reason,
        separate_reason=separate_reason,
        fused_layers=fused_layers,
        backend=backend,
        routers=routers,
    )


def probe_packing(model: Any, backend: VarlenBackend = DEFAULT_BACKEND) -> str | None:
    """Why batches of this model are padded; None: they can be packed."""
    reason = find_unsupported_attention(model)
    if reason is not None:
        return reason
    if attn_implementation(model) != "sdpa" and not needs_own_softmax(model):
        return f"attn_implementation = {attn_implementation(model)!r} was asked for"
    return run_probe(model, lambda: _packing_error(model, (5, 1, 12, 24), 0, backend))


def probe_padding(model: Any, *, pad_id: int) -> str | None:
    """Why each sequence of this model takes a pass of its own; None: batches can be padded."""
    reason = find_batch_problem(model)
    # Whatever its window: no token attends to padding after it.
    return reason or run_probe(model, lambda: _padding_error(model, pad_id), shrinks_window=False)


def _padding_error(model: Any, pad_id: int) -> float:
    """Distance of sequences in one padded batch from separate forward passes."""
    sequences = [probe_ids(model, length, seed) for seed, length in enumerate(PROBE_LENGTHS)]
    passes = ForwardPasses(model=model, pad_id=pad_id, padding_reason="probed")
    hidden_ND, spans = passes.forward(sequences)
    return max(
        distance_from_plain_forward(model, ids, hidden_ND[span.indices(range(len(ids)))])
        for span, ids in zip(spans, sequences, strict=True)
    )


def probe_prefix_sharing(model: Any, backend: VarlenBackend = DEFAULT_BACKEND) -> str | None:
    """Why packed batches of this model share no prefixes; None: they can."""
    num_prefix = MIN_PREFIX_TOKENS + 3
    return run_probe(model, lambda: _packing_error(model, (0, 1, 6, 30), num_prefix, backend))


def _packing_error(
    model: Any, lengths: Sequence[int], num_prefix: int, backend: VarlenBackend
) -> float:
    """Distance of packed sequences from separate forward passes. The sequences share `num_prefix`
    ids, followed by `lengths` of their own."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    prefix = [(11 * i + 2) % vocab_size for i in range(num_prefix)]
    sequences = [[*prefix, *((7 * i + n) % vocab_size for i in range(1, n + 1))] for n in lengths]
    passes = ForwardPasses(model=model, pad_id=0, padding_reason=None, backend=backend)
    with passes.patch_model():
        hidden_ND, spans = passes.forward(sequences)
    assert len(hidden_ND) == num_prefix + sum(lengths)
    return max(
        # Suffixes only: an error there would not show in the median over a long prefix.
        distance_from_plain_forward(
            model, ids, hidden_ND[span.indices(range(num_prefix if n else 0, len(ids)))]
        )
        for span, ids, n in zip(spans, sequences, lengths, strict=True)
    )
