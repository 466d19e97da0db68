"""Tiny models whose batches can be packed, and CPU references of the GPU varlen kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from support.tiny_model import tiny_model
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from courtside.engines.forward.varlen import VarlenBackend, VarlenLayout
from courtside.engines.forward.varlen_softmax import FlashAttention
from courtside.types import Branch

SHAPE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.3, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


def qwen3() -> Any:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)).eval()


def gpt2() -> Any:
    """Absolute position embeddings: with RoPE a constant offset would not show."""
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=258, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"llama": tiny_model, "qwen3": qwen3, "gpt2": gpt2}


def make_branch(splice: int, ids: Sequence[int], scored: Iterable[int] | None = None) -> Branch:
    """By default all tokens but the first are scored."""
    indices = set(range(1, len(ids)) if scored is None else scored)
    return Branch(
        trajectory="t",
        turn=1,
        splice=splice,
        token_ids=tuple(ids),
        scored=tuple(i in indices for i in range(len(ids))),
    )


def _visible(cu_seq_q: Tensor, cu_seq_k: Tensor, before: int) -> Tensor:
    """[N, K]: `before` keys before its own that a token attends to; −1: all of its segment."""
    segment_N, segment_K = (
        torch.arange(len(ends) - 1).repeat_interleave(ends.diff()) for ends in (cu_seq_q, cu_seq_k)
    )
    # Distance from the end of the segment: queries are aligned with the last keys.
    to_end_N = cu_seq_q[1:].long()[segment_N] - torch.arange(len(segment_N))
    to_end_K = cu_seq_k[1:].long()[segment_K] - torch.arange(len(segment_K))
    distance_NK = to_end_K - to_end_N[:, None]
    is_visible_NK = (segment_N[:, None] == segment_K) & (distance_NK >= 0)
    return is_visible_NK & (distance_NK <= before) if before >= 0 else is_visible_NK


def reference_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """`varlen_attn` of torch 2.11 with a full score matrix; it takes no grouped queries."""
    before, after = window_size
    assert after == 0 and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    if query.shape[1:] != key.shape[1:] or key.shape != value.shape:
        raise RuntimeError("grouped-query attention is not supported")
    lengths, key_lengths = cu_seq_q.diff(), cu_seq_k.diff()
    assert max_q == int(lengths.max()) and int(cu_seq_q[-1]) == len(query)
    assert max_k == int(key_lengths.max()) and int(cu_seq_k[-1]) == len(key)
    mask_NK = _visible(cu_seq_q, cu_seq_k, before)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * (scale or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~mask_NK, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, value)


def reference_gqa_kernel(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Tensor:
    """`varlen_attn` of torch 2.13, with `enable_gqa`."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return reference_kernel(query, key, value, *args, **kwargs)


class ReferenceFlashAttention(FlashAttention):
    """Its two operators with a full score matrix, by the formulas of flash attention: the backward
    pass takes whatever output and log-sum-exp it is given."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        score_HNM = _masked_scores(query, key, layout, scale, window)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        output = torch.einsum("hnm,mhd->nhd", score_HNM.softmax(-1), value)
        return output, score_HNM.logsumexp(-1), torch.zeros(2)

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        rng_state: Tensor, layout: VarlenLayout, scale: float, window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        repeats = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(repeats, 1) for x in (key, value))
        score_HNM = _masked_scores(query, key, layout, scale, window)
        weight_HNM = (score_HNM - lse[..., None]).exp()
        weight_grad_HNM = torch.einsum("nhd,mhd->hnm", gradient, values)
        weighted_HN1 = (gradient * output).sum(-1).t()[..., None]
        score_grad_HNM = weight_HNM * (weight_grad_HNM - weighted_HN1) * scale
        query_grad = torch.einsum("hnm,mhd->nhd", score_grad_HNM, keys)
        key_grad = torch.einsum("hnm,nhd->mhd", score_grad_HNM, query)
        value_grad = torch.einsum("hnm,nhd->mhd", weight_HNM, gradient)
        key_grad, value_grad = (
            x.unflatten(1, (-1, repeats)).sum(2) for x in (key_grad, value_grad)
        )
        return query_grad, key_grad, value_grad


def _masked_scores(
    query: Tensor, key: Tensor, layout: VarlenLayout, scale: float, window: int
) -> Tensor:
    mask_NM = _visible(layout.cu_seqlens_S, layout.cu_key_lens_S, window)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    score_HNM = torch.einsum("nhd,mhd->hnm", query, key) * scale
    return score_HNM.masked_fill(~mask_NM, -torch.inf)


def first_key_kernel(
    query: Tensor, key: Tensor, value: Tensor, *cu_seqlens: Any, window_size: Any, **options: Any
) -> Tensor:
    """Aligns queries with the first keys: right for packed batches, wrong for prefixes."""
    cu_seq_q, cu_seq_k = cu_seqlens[:2]
    outputs = []
    for n in range(len(cu_seq_q) - 1):
        q, k, v = (
            state[ends[n] : ends[n + 1]].transpose(0, 1)
            for state, ends in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.get("scale"))
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def kernel_backend(kernel: Callable[..., Tensor]) -> VarlenBackend:
    """A backend that runs this kernel on any device and dtype."""
    return VarlenBackend(
        kernel=kernel,
        kernel_with_lse=ReferenceFlashAttention,
        supports_kernel=lambda *states: True,
    )


KERNEL_BACKENDS = [kernel_backend(reference_kernel), kernel_backend(reference_gqa_kernel)]
