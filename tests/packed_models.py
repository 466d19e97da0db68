"""Models whose passes can be packed, and stand-ins for the kernel that a GPU has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny import tiny_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.3, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


def qwen3() -> Any:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)).eval()


def gpt2() -> Any:
    """Its positions are absolute: rotated ones would not show that a sequence begins at another."""
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=258, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"llama": tiny_model, "qwen3": qwen3, "gpt2": gpt2}


def stand_in(
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
    """As in torch 2.11: whole scores, and a mask of who may see whom."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    if query.shape[1:] != key.shape[1:] or key.shape != value.shape:
        raise RuntimeError("no shared heads here")
    lengths, key_lengths = cu_seq_q.diff(), cu_seq_k.diff()
    assert max_q == int(lengths.max()) and int(cu_seq_q[-1]) == len(query)
    assert max_k == int(key_lengths.max()) and int(cu_seq_k[-1]) == len(key)
    owner, key_owner = (
        torch.arange(len(lengths)).repeat_interleave(its) for its in (lengths, key_lengths)
    )
    # How far each stands from the end of its own: where lengths differ, ends are aligned.
    left = cu_seq_q[1:].long()[owner] - torch.arange(len(query))
    key_left = cu_seq_k[1:].long()[key_owner] - torch.arange(len(key))
    seen = (owner[:, None] == key_owner) & (left[:, None] <= key_left)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * (scale or query.shape[-1] ** -0.5)
    weight = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weight, value)


def newer_stand_in(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Tensor:
    """As in torch 2.13."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return stand_in(query, key, value, *args, **kwargs)
