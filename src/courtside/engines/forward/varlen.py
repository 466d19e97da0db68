"""Packed (varlen) batches: sequences concatenated in one row, without padding and without a mask.

Position ids start anew with every sequence and attention stays inside each, so the hidden states
are those of separate forward passes. The layout (cu_seqlens) reaches the attention as a keyword
argument of the model, so that a layer recomputed under gradient checkpointing gets it again.

A shared prefix (`batching.py`) is in the row once; its keys and values are gathered before
those of every suffix, and their gradients summed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from courtside.engines.forward.batching import PackedBatch
from courtside.engines.forward.key_segments import gather_segments, squeeze_batch
from courtside.engines.forward.varlen_softmax import (
    FlashAttention,
    attend_in_blocks,
    attend_with_sinks,
)
from courtside.engines.patches.attention import (
    attn_implementation,
    cast_attention_inputs,
    disable_cpu_autocast,
)
from courtside.engines.patches.attention_variants import AttentionVariant
from courtside.errors import ModelError

VARLEN_ATTENTION = "courtside_varlen"


# ── layout ───────────────────────────────────────────────────────────────────────────────────────


def supports_varlen_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """16 bits on a GPU, with head sizes that the kernel takes."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return query.is_cuda and fits and query.dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenBackend:
    """One attention kernel for all segments where it is supported, else SDPA on each segment."""

    kernel: Callable[..., Any] = varlen_attn
    kernel_with_lse: type[FlashAttention] = FlashAttention
    """For attention with sinks."""
    supports_kernel: Callable[[Tensor, Tensor, Tensor], bool] = supports_varlen_kernel
    query_block: int = 512
    """Queries that share an SDPA mask, so that its size is linear in the number of keys."""


DEFAULT_BACKEND = VarlenBackend()


class VarlenLayout:
    """Segments of a row of N tokens, and of the K keys that they attend to.

    No dataclass: FSDP looks for tensors with gradients in every field, and every item of a tuple,
    of the dataclasses that a layer is given."""

    def __init__(
        self,
        *,
        lengths: tuple[int, ...],
        cu_seqlens_S: Tensor,
        key_lengths: tuple[int, ...],
        cu_key_lens_S: Tensor,
        key_segments: tuple[int, ...] | None = None,
        gather_index: Any = None,
        backend: VarlenBackend = DEFAULT_BACKEND,
    ):
        self.lengths = lengths
        self.cu_seqlens_S = cu_seqlens_S
        """0 and the end of each segment, on the device: int32, as kernels take it."""
        self.key_lengths = key_lengths
        """At least `lengths`: the queries of a segment are aligned with the last of its keys."""
        self.cu_key_lens_S = cu_key_lens_S
        self.key_segments = key_segments
        """Segments whose keys, concatenated, are the K keys; None: the keys come concatenated."""
        self.gather_index = gather_index
        """A `prefix_gather.GatherIndex` of `key_segments`; None: torch concatenates them."""
        self.backend = backend
        self.masks: dict[tuple[torch.dtype, int | None], Tensor] = {}
        """By dtype and window, made by `mask` once for all layers."""

    def query_blocks(self, window: int | None) -> Iterator[tuple[slice, slice]]:
        """`segment_blocks` of all segments, as slices of the row and of the K keys."""
        query_start = key_start = 0
        for length, key_length in zip(self.lengths, self.key_lengths, strict=True):
            for q, k in self.segment_blocks(length, key_length, window):
                yield (
                    slice(query_start + q.start, query_start + q.stop),
                    slice(key_start + k.start, key_start + k.stop),
                )
            query_start, key_start = query_start + length, key_start + key_length

    def segment_blocks(
        self, length: int, key_length: int, window: int | None
    ) -> Iterator[tuple[slice, slice]]:
        """Queries of a segment, a block at a time, and the keys that any of them attends to."""
        cached, block = key_length - length, self.backend.query_block
        for start in range(0, length, block):
            end = min(start + block, length)
            first = 0 if window is None else max(0, cached + start - window + 1)
            yield slice(start, end), slice(first, cached + end)

    def mask(self, like: Tensor, queries: slice, keys: slice, window: int | None) -> Tensor:
        """Additive mask of a block of `query_blocks`, in dtype and on the device of `like`."""
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        if (like.dtype, window) not in self.masks:
            self.masks[like.dtype, window] = self._make_mask(like, window)
        # Queries are aligned with the last of their keys, so that smaller masks are its corners.
        return self.masks[like.dtype, window][-num_queries:, -num_keys:]

    def _make_mask(self, like: Tensor, window: int | None) -> Tensor:
        num_queries = min(self.backend.query_block, max(self.lengths))
        num_keys = max(self.key_lengths)
        if window is not None:
            num_keys = min(num_keys, num_queries + window - 1)
        query_Q1 = torch.arange(num_keys - num_queries, num_keys, device=like.device)[:, None]
        distance_QK = query_Q1 - torch.arange(num_keys, device=like.device)
        is_hidden_QK = distance_QK < 0
        if window is not None:
            is_hidden_QK |= distance_QK >= window
        mask_QK = like.new_zeros(num_queries, num_keys)
        return mask_QK.masked_fill_(is_hidden_QK, -torch.inf)


def make_varlen_layout(
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    *,
    key_segments: Sequence[int] | None = None,
    device: torch.device,
    backend: VarlenBackend = DEFAULT_BACKEND,
) -> VarlenLayout:
    """`key_lengths` = None: each segment attends to itself only."""
    assert key_lengths is None or all(n <= k for n, k in zip(lengths, key_lengths, strict=True))
    key_lengths = lengths if key_lengths is None else key_lengths
    gather_index = None
    if key_segments is not None and device.type == "cuda" and find_spec("triton") is not None:
        from courtside.engines.kernels.prefix_gather import GatherIndex, make_gather_index

        index = make_gather_index(lengths, key_segments)
        gather_index = GatherIndex(
            *(tensor.pin_memory().to(device, non_blocking=True) for tensor in index)
        )
    # From pinned memory: a GPU is not waited for.
    cu_seqlens_S, cu_key_lens_S = torch.tensor(
        [[0, *accumulate(lengths)], [0, *accumulate(key_lengths)]],
        dtype=torch.int32,
        pin_memory=device.type == "cuda",
    ).to(device, non_blocking=True)
    return VarlenLayout(
        lengths=tuple(lengths),
        cu_seqlens_S=cu_seqlens_S,
        key_lengths=tuple(key_lengths),
        cu_key_lens_S=cu_key_lens_S,
        key_segments=None if key_segments is None else tuple(key_segments),
        gather_index=gather_index,
        backend=backend,
    )


def make_packed_layout(
    batch: PackedBatch, *, device: torch.device, backend: VarlenBackend = DEFAULT_BACKEND
) -> VarlenLayout:
    """A segment attends to its prefix, if it has one, and to itself."""
    lengths = [len(segment.ids) for segment in batch.segments]
    if all(segment.prefix is None for segment in batch.segments):
        return make_varlen_layout(lengths, device=device, backend=backend)
    attended = [[n] if s.prefix is None else [s.prefix, n] for n, s in enumerate(batch.segments)]
    return make_varlen_layout(
        lengths,
        [sum(lengths[i] for i in segments) for segments in attended],
        key_segments=[i for segments in attended for i in segments],
        device=device,
        backend=backend,
    )


# ── attention ────────────────────────────────────────────────────────────────────────────────────


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    varlen_layout: VarlenLayout | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Query [1, heads, N, D] to output [1, N, heads, D], causal in each segment.

    Keys and values are [1, KV heads, K, D], or [1, KV heads, N, D] where `key_segments` are to be
    gathered.
    """
    name = type(module).__name__
    if varlen_layout is None:
        raise ModelError(f"{name} did not get varlen_layout, which says where sequences end")
    if attention_mask is not None or settings.get("position_bias") is not None:
        raise ModelError(f"{name} has an attention mask or bias, which packed batches ignore")
    assert query.shape[0] == 1 and query.shape[2] == sum(varlen_layout.lengths)
    variant = AttentionVariant.of_call(module, settings, num_keys=max(varlen_layout.key_lengths))
    if dropout and variant.changes_softmax:
        raise ModelError(
            f"{name} has dropout in an attention with a soft cap or sinks. Set attention_dropout "
            "to 0 in the model's config.json"
        )
    dtype = query.dtype
    query, key, value = cast_attention_inputs(query, key, value)
    if varlen_layout.key_segments is not None:
        key, value = (gather_segments(state, varlen_layout) for state in (key, value))
    assert key.shape[2] == sum(varlen_layout.key_lengths)
    has_kernel = variant.softcap is None and not dropout
    if has_kernel and varlen_layout.backend.supports_kernel(query, key, value):
        return attend_with_kernel(query, key, value, varlen_layout, scaling, variant), None
    with disable_cpu_autocast(query.device):
        if variant.changes_softmax:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            out = attend_in_blocks(query, key, value, varlen_layout, scale, variant)
        else:
            out = _attend_by_segment(
                query, key, value, varlen_layout, scaling, dropout, variant.window
            )
    return (out.to(dtype) if query.device.type == "cpu" else out), None


# No mask function is registered under the name, so transformers makes no mask.
AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)


PLAIN_ATTENTION = AttentionVariant()


def attend_with_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: VarlenLayout,
    scaling: float | None,
    variant: AttentionVariant = PLAIN_ATTENTION,
) -> Tensor:
    """All segments in one kernel."""
    if variant.sinks_H is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = (squeeze_batch(state) for state in (query, key, value))
        return attend_with_sinks(query, key, value, layout, scale, variant)[None]
    kernel = layout.backend.kernel
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _has_parameter(kernel, "enable_gqa"):
            options["enable_gqa"] = True
        elif not supports_gqa(kernel, query.device, query.dtype):
            key, value = _repeat_kv(query, key, value)
    query_NHD, key_KHD, value_KHD = (squeeze_batch(state) for state in (query, key, value))
    out_NHD: Tensor = kernel(
        query_NHD,
        key_KHD,
        value_KHD,
        layout.cu_seqlens_S,
        layout.cu_key_lens_S,
        max(layout.lengths),
        max(layout.key_lengths),
        scale=scaling,
        # Causal, aligned at the last key. Positions before a token's own are counted.
        window_size=(-1 if variant.window is None else variant.window - 1, 0),
        **options,
    )
    return out_NHD[None]


@cache
def _has_parameter(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in signature(function).parameters


@cache
def supports_gqa(kernel: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel without `enable_gqa` (torch 2.11) supports grouped-query attention anyway:
    output and gradients of an example are compared with repeated keys and values."""
    with torch.enable_grad():
        states = [
            torch.linspace(-2, 3, 7 * heads * 16, device=device).sin().view(7, heads, 16)
            for heads in (4, 2, 2)
        ]
        q, k, v = ((shift + s).to(dtype).requires_grad_() for shift, s in enumerate(states))
        cu_seqlens_S = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
        results = []
        try:
            for repeats in (1, 2):
                inputs = (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
                out = kernel(
                    *inputs, cu_seqlens_S, cu_seqlens_S, 4, 4, scale=None, window_size=(-1, 0)
                )
                results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
            return all(
                bool(((grouped - repeated).norm() <= 0.02 * repeated.norm()).all())
                for grouped, repeated in zip(*results, strict=True)
            )
        except (RuntimeError, ValueError):  # also on the meta device, which has no numbers
            return False


def _attend_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: VarlenLayout,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """SDPA on one segment at a time, or on blocks of its queries where a mask is needed."""
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and query.is_cuda:
        # No float32 SDPA kernel of a GPU takes grouped queries: full score matrices would exist.
        key, value = _repeat_kv(query, key, value)
        is_grouped = False
    lengths, key_lengths = list(layout.lengths), list(layout.key_lengths)
    outputs = []
    for q, k, v in zip(
        query.split(lengths, dim=2), key.split(key_lengths, dim=2),
        value.split(key_lengths, dim=2), strict=True,
    ):  # fmt: skip
        num_queries, num_keys = q.shape[2], k.shape[2]
        # `is_causal` aligns queries with the first key: right only where there are as many keys.
        if num_queries == num_keys and (window is None or window >= num_keys):
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=is_grouped
            )
            outputs.append(out.transpose(1, 2))
            continue
        for queries, keys in layout.segment_blocks(num_queries, num_keys, window):
            mask_QK = _align_rows(layout.mask(query, queries, keys, window))
            out = F.scaled_dot_product_attention(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], attn_mask=mask_QK,
                dropout_p=dropout, scale=scaling, enable_gqa=is_grouped,
            )  # fmt: skip
            outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _align_rows(mask_QK: Tensor) -> Tensor:
    """GPU kernels load 16 mask entries at a time; torch aligns the row stride, not the start."""
    if not mask_QK.is_cuda:
        return mask_QK
    num_queries, num_keys = mask_QK.shape
    aligned_QK = mask_QK.new_empty(num_queries, -(-num_keys // 16) * 16)
    aligned_QK[:, :num_keys] = mask_QK
    return aligned_QK[:, :num_keys]


def _repeat_kv(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


# ── forward pass ─────────────────────────────────────────────────────────────────────────────────


def forward_varlen(
    model: Any, ids_N: Tensor, position_N: Tensor, layout: VarlenLayout, cache: Cache | None
) -> Tensor:
    """Last hidden states [N, D] of one packed row."""
    assert attn_implementation(model) == VARLEN_ATTENTION, "needs `ForwardPasses.patch_model`"
    options: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    out = model.base_model(
        input_ids=ids_N[None],
        position_ids=position_N[None],
        use_cache=cache is not None,
        varlen_layout=layout,
        **options,
    )
    hidden_ND: Tensor = out.last_hidden_state.squeeze(0)
    return hidden_ND
