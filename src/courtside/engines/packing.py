"""Passes without padding: sequences one behind the other in a single row.

Positions start again with every sequence, and attention stays inside each: the numbers are those of
passes of their own. No mask exists; where sequences end is handed to the attention itself, through
the model, so that a layer that is computed again in the backward pass finds it too.

Models that do anything special with attention take passes padded on the right, as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from courtside.engines.arithmetic import attended, uncast
from courtside.engines.attention import attention_of, special_attention, windows_of
from courtside.engines.batching import batches_by_length, full_batches, pad_right, placed
from courtside.engines.tried import away_from_alone, example_problem
from courtside.errors import ModelError

NAME = "courtside_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the sequences of a row of N ids lie, and where their keys in a row of K."""

    lengths: tuple[int, ...]
    ends_S: Tensor
    """0 and where each sequence ends, on the device: int32, as kernels want it."""
    key_lengths: tuple[int, ...]
    """As `lengths`, or longer: the ids of a sequence are then the last of those it looks at."""
    key_ends_S: Tensor

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)][:-1]


def packing_of(
    lengths: Sequence[int], key_lengths: Sequence[int] | None = None, *, device: torch.device
) -> Packing:
    """`key_lengths` = None: each sequence looks at its own ids only."""
    assert key_lengths is None or all(n <= k for n, k in zip(lengths, key_lengths, strict=True))
    keys = lengths if key_lengths is None else key_lengths
    ends = [[0, *accumulate(its)] for its in (lengths, keys)]
    ends_S, key_ends_S = placed(ends, dtype=torch.int32, device=device)
    return Packing(
        lengths=tuple(lengths), ends_S=ends_S, key_lengths=tuple(keys), key_ends_S=key_ends_S
    )


# ── attention ────────────────────────────────────────────────────────────────────────────────────


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """[1, heads, N, D] and [1, shared heads, K, D] to [1, N, heads, D]: causal in each sequence."""
    if packing is None:
        raise ModelError(f"{type(module).__name__} was not told where sequences end")
    if attention_mask is not None or settings.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} has a mask of its own, which packing ignores")
    window = settings.get("sliding_window")
    if window is not None and window < max(packing.key_lengths):
        raise ModelError(f"{type(module).__name__} looks through a window, which packing ignores")
    assert query.shape[0] == 1 and query.shape[2] == sum(packing.lengths)
    assert key.shape[2] == sum(packing.key_lengths)
    given = query.dtype
    query, key, value = attended(query, key, value)
    if not dropout and has_kernel(query, value):
        return _in_one(query, key, value, packing, scaling), None
    with uncast(query.device):
        found = _one_by_one(query, key, value, packing, scaling, dropout)
    return (found.to(given) if query.device.type == "cpu" else found), None


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether one kernel takes sequences of various lengths: in 16 bits, on a GPU."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return query.is_cuda and fits and query.dtype in (torch.float16, torch.bfloat16)


def _in_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    settings: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _takes(varlen_attn, "enable_gqa"):  # torch 2.11 does not have it
            settings["enable_gqa"] = True
        else:
            key, value = _repeated(query, key, value)
    query_NHD, key_NHD, value_NHD = (state[0].transpose(0, 1) for state in (query, key, value))
    found: Any = varlen_attn(
        query_NHD,
        key_NHD,
        value_NHD,
        packing.ends_S,
        packing.key_ends_S,
        max(packing.lengths),
        max(packing.key_lengths),
        scale=scaling,
        window_size=(-1, 0),  # everything before, nothing behind, counted from the last key
        **settings,
    )
    out: Tensor = found[None]
    return out


@cache
def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in signature(function).parameters


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:
        # Of a GPU's kernels for float32, none shares keys: scores of whole sequences would exist.
        key, value = _repeated(query, key, value)
        grouped = False
    sizes, key_sizes = list(packing.lengths), list(packing.key_lengths)
    parts = []
    for q, k, v in zip(
        query.split(sizes, dim=2), key.split(key_sizes, dim=2), value.split(key_sizes, dim=2),
        strict=True,
    ):  # fmt: skip
        # `is_causal` counts from the first key, which is the same where there are as many.
        seen = None if q.shape[2] == k.shape[2] else _seen(q.shape[2], k.shape[2], q.device)
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scaling,
            enable_gqa=grouped,
        )  # fmt: skip
        parts.append(found.transpose(1, 2))
    return torch.cat(parts, dim=1)


def _seen(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which keys each of the last `num_queries` places may look at."""
    every_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return every_QK.tril(num_keys - num_queries)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


# No mask is registered under the name: none is made then, also where positions start again.
AttentionInterface.register(NAME, packed_attention)


# ── passes ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How sequences become passes of one model."""

    model: Any
    pad_id: int
    problem: str | None
    """Why they are padded; None: they are packed."""

    def size(self, lengths: Sequence[int]) -> int:
        """Tokens that a pass computes for these sequences."""
        return sum(lengths) if self.problem is None else len(lengths) * max(lengths)

    def batches(self, sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Indices by pass, each of at most `max_tokens`; longest first."""
        cut = full_batches if self.problem is None else batches_by_length
        return cut(sizes, max_tokens)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """What `hidden` wants around it, and around a backward pass through what it gave."""
        if self.problem is not None:
            yield
            return
        with switched(self.model):
            yield

    def hidden(
        self, sequences: Sequence[Sequence[int]], *, kept: Cache | None = None
    ) -> tuple[Tensor, list[int]]:
        """Last hidden states [positions, D] of one pass, and where each sequence begins there.

        `kept` gets the keys and values of a packed pass: see `engines/kept.py`.
        """
        if self.problem is None:
            return read_packed(self.model, sequences, kept)
        assert kept is None, "those of a padded pass lie elsewhere"
        ids_BL = pad_right(sequences, self.pad_id, self.model.device)
        out = self.model.base_model(input_ids=ids_BL, use_cache=False)
        longest = ids_BL.shape[1]
        return out.last_hidden_state.flatten(0, 1), [row * longest for row in range(len(ids_BL))]


@contextmanager
def switched(model: Any) -> Iterator[None]:
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def read_packed(
    model: Any, sequences: Sequence[Sequence[int]], kept: Cache | None = None
) -> tuple[Tensor, list[int]]:
    lengths = [len(ids) for ids in sequences]
    packing = packing_of(lengths, device=model.device)
    ids = [token for ids in sequences for token in ids]
    position = [place for length in lengths for place in range(length)]
    return read_row(model, ids, position, packing, kept), packing.starts


def read_row(
    model: Any, ids: Sequence[int], position: Sequence[int], packing: Packing, cache: Cache | None
) -> Tensor:
    """Last hidden states [N, D] of one packed row."""
    assert attention_of(model) == NAME, "packed passes stand inside `Passes.attention`"
    ids_N, position_N = placed([ids, position], dtype=torch.long, device=model.device)
    keeping: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    out = model.base_model(
        input_ids=ids_N[None],
        position_ids=position_N[None],
        use_cache=cache is not None,
        packing=packing,
        **keeping,
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


# ── tried on a small example ─────────────────────────────────────────────────────────────────────


def packing_problem(model: Any) -> str | None:
    """Why passes of this model are padded; None: they can be packed.

    Beside the settings a tiny example is tried, because a model may do as it likes with what it is
    given. The model must not be in training mode: dropout would act.
    """
    why = special_attention(model)
    if why is not None:
        return why
    if attention_of(model) != "sdpa":
        return f"attn_implementation = {attention_of(model)!r} was asked for"
    if any(window is not None for window in windows_of(model).values()):
        return "it looks through a window"
    assert not model.training, "dropout would act"
    return example_problem(model, lambda: _example_error(model))


@torch.no_grad()
def _example_error(model: Any) -> float:
    """How far the hidden states of packed sequences are from those of passes of their own."""
    num_words = model.get_input_embeddings().weight.shape[0]
    sequences = [[(7 * i + n) % num_words for i in range(1, n + 1)] for n in (5, 1, 12, 24)]
    with switched(model):
        packed_ND, starts = read_packed(model, sequences)
    return max(
        away_from_alone(model, ids, packed_ND[start : start + len(ids)])
        for start, ids in zip(starts, sequences, strict=True)
    )
