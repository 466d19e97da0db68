"""Passes without padding: sequences one behind the other in a single row.

Positions start again with every sequence, and attention stays inside each: the numbers are those of
passes of their own. No mask exists; where sequences end is handed to the attention itself, through
the model, so that a layer that is computed again in the backward pass finds it too.

Sequences that begin alike share their beginning (`prefixes.py`): it lies in the row once, and the
attention lays its keys before those of every rest. Their gradients come back summed.

This is the attention and the row; how sequences become passes is in `passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from courtside.engines.forward.prefix_sharing import PackedBatch
from courtside.engines.patches.patch import apply_patches, patch_attention
from courtside.engines.precision import cast_attention_inputs, disable_cpu_autocast
from courtside.engines.probes import attn_implementation
from courtside.engines.transfer import tensor_on
from courtside.errors import ModelError

VARLEN_ATTENTION = "courtside_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenLayout:
    """Where the parts of a row of N ids lie, and where their keys in a row of K."""

    lengths: tuple[int, ...]
    ends_S: Tensor
    """0 and where each part ends, on the device: int32, as kernels want it."""
    key_lengths: tuple[int, ...]
    """As `lengths`, or longer: the ids of a part are then the last of those it looks at."""
    key_ends_S: Tensor
    joined: tuple[int, ...] | None = None
    """Which parts' keys, one behind the other, are the row of K; None: they come as that."""
    shown: Any = None
    """Of `joined`, what kernels want to know (`shown_rows.GatherIndex`); None: there are none."""
    corners: dict[torch.dtype, Tensor] = field(default_factory=dict)
    """What `_corner` made: the same for all layers, which would each keep their own."""


def make_varlen_layout(
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    *,
    joined: Sequence[int] | None = None,
    device: torch.device,
) -> VarlenLayout:
    """`key_lengths` = None: each part looks at its own ids only."""
    assert key_lengths is None or all(n <= k for n, k in zip(lengths, key_lengths, strict=True))
    keys = lengths if key_lengths is None else key_lengths
    ends = [[0, *accumulate(its)] for its in (lengths, keys)]
    ends_S, key_ends_S = tensor_on(ends, dtype=torch.int32, device=device)
    return VarlenLayout(
        lengths=tuple(lengths),
        ends_S=ends_S,
        key_lengths=tuple(keys),
        key_ends_S=key_ends_S,
        joined=None if joined is None else tuple(joined),
        shown=None if joined is None else _shown(lengths, joined, device),
    )


def make_packed_layout(row: PackedBatch, *, device: torch.device) -> VarlenLayout:
    """A part looks at its own ids, and before them at the beginning that it goes on from."""
    if all(part.prefix is None for part in row.parts):
        return make_varlen_layout([len(part.ids) for part in row.parts], device=device)
    joined: list[int] = []
    key_lengths: list[int] = []
    for number, part in enumerate(row.parts):
        its = [number] if part.prefix is None else [part.prefix, number]
        joined += its
        key_lengths.append(sum(len(row.parts[i].ids) for i in its))
    return make_varlen_layout(
        [len(part.ids) for part in row.parts], key_lengths, joined=joined, device=device
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
    packing: VarlenLayout | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """[1, heads, N, D] and [1, shared heads, K, D] to [1, N, heads, D]: causal in each part.

    Keys and values are [1, shared heads, N, D] where they have to be laid out first.
    """
    if packing is None:
        raise ModelError(f"{type(module).__name__} was not told where sequences end")
    if attention_mask is not None or settings.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} has a mask of its own, which packing ignores")
    window = settings.get("sliding_window")
    if window is not None and window < max(packing.key_lengths):
        raise ModelError(f"{type(module).__name__} looks through a window, which packing ignores")
    assert query.shape[0] == 1 and query.shape[2] == sum(packing.lengths)
    given = query.dtype
    query, key, value = cast_attention_inputs(query, key, value)
    if packing.joined is not None:
        key, value = (gather_segments(state, packing) for state in (key, value))
    assert key.shape[2] == sum(packing.key_lengths)
    if not dropout and has_kernel(query, value):
        return _in_one(query, key, value, packing, scaling), None
    with disable_cpu_autocast(query.device):
        found = _one_by_one(query, key, value, packing, scaling, dropout)
    return (found.to(given) if query.device.type == "cpu" else found), None


def gather_segments(state: Tensor, packing: VarlenLayout) -> Tensor:
    """Keys or values [1, heads, N, D] of a row, to [1, heads, K, D] as its parts look at them."""
    if packing.shown is None:
        return _joined(state, packing)
    from courtside.engines.kernels import prefix_gather

    found_KHD = prefix_gather.gather_rows(_flat(state), packing.shown)
    return found_KHD.transpose(0, 1)[None]


def _shown(lengths: Sequence[int], joined: Sequence[int], device: torch.device) -> Any:
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from courtside.engines.kernels import prefix_gather

    return prefix_gather.make_gather_index(lengths, joined, device=device)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, packing: VarlenLayout) -> Tensor:
        assert packing.joined is not None
        ctx.packing = packing
        # Along the layout in memory, where a part is one piece.
        parts = state.transpose(1, 2).split(list(packing.lengths), dim=1)
        return torch.cat([parts[i] for i in packing.joined], dim=1).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        packing: VarlenLayout = ctx.packing
        assert packing.joined is not None
        (gradient,) = gradients
        sizes = [packing.lengths[i] for i in packing.joined]
        found: list[list[Tensor]] = [[] for _ in packing.lengths]
        parts = gradient.transpose(1, 2).split(sizes, dim=1)
        for i, part in zip(packing.joined, parts, strict=True):
            found[i].append(part)
        return torch.cat([_summed(its) for its in found], dim=1).transpose(1, 2), None


_joined: Callable[[Tensor, VarlenLayout], Tensor] = _Joined.apply


def _summed(parts: Sequence[Tensor]) -> Tensor:
    """In float32 at least: in 16 bits every sample of a large group would be rounded away a bit."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _flat(state: Tensor) -> Tensor:
    """[1, heads, N, D] to [N, heads, D]. Squeezed, not indexed: the way back from an index makes
    zeros and copies the gradient into them."""
    return state.squeeze(0).transpose(0, 1)


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether one kernel takes sequences of various lengths: in 16 bits, on a GPU."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return query.is_cuda and fits and query.dtype in (torch.float16, torch.bfloat16)


def _in_one(
    query: Tensor, key: Tensor, value: Tensor, packing: VarlenLayout, scaling: float | None
) -> Tensor:
    settings: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _takes(varlen_attn, "enable_gqa"):
            settings["enable_gqa"] = True
        elif not _shares_heads(varlen_attn, query.device, query.dtype):
            key, value = _repeated(query, key, value)
    query_NHD, key_NHD, value_NHD = (_flat(state) for state in (query, key, value))
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


@cache
def _shares_heads(kernel: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel that does not say so (torch 2.11) lets heads share keys and values: tried on
    an example, there and back."""
    with torch.enable_grad():
        states = [
            torch.linspace(-2, 3, 7 * heads * 16, device=device).sin().view(7, heads, 16)
            for heads in (4, 2, 2)
        ]
        q, k, v = ((turn + s).to(dtype).requires_grad_() for turn, s in enumerate(states))
        ends_S = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
        found = []
        for times in (1, 2):
            shared = (q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
            try:
                out = kernel(*shared, ends_S, ends_S, 4, 4, scale=None, window_size=(-1, 0))
            except (RuntimeError, ValueError):
                return False
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    return all(
        bool(((ours - theirs).norm() <= 0.02 * theirs.norm()).all())
        for ours, theirs in zip(*found, strict=True)
    )


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: VarlenLayout,
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
        whole = q.shape[2] == k.shape[2]
        for end in [q.shape[2]] if whole else _block_ends(q.shape[2]):
            start = 0 if whole else (end - 1) // BLOCK * BLOCK
            num_keys = k.shape[2] - q.shape[2] + end
            seen = None if whole else _aligned(_corner(packing, q)[start - end :, -num_keys:])
            found = F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, :num_keys], v[:, :, :num_keys], attn_mask=seen,
                dropout_p=dropout, is_causal=whole, scale=scaling, enable_gqa=grouped,
            )  # fmt: skip
            parts.append(found.transpose(1, 2))
    return torch.cat(parts, dim=1)


BLOCK = 512
"""Queries that share a mask, so that it grows with the number of keys and not with its square."""


def _block_ends(num_queries: int) -> list[int]:
    return [*range(BLOCK, num_queries, BLOCK), num_queries]


def _corner(packing: VarlenLayout, query: Tensor) -> Tensor:
    """To be added to scores: 0 where a query may look, −∞ elsewhere. The last q rows of the last k
    columns are the mask of the last q places of k, for every q and k of this packing."""
    if query.dtype not in packing.corners:
        num_queries = min(BLOCK, max(packing.lengths))
        num_keys = max(packing.key_lengths)
        corner_QK = query.new_full((num_queries, num_keys), -torch.inf)
        packing.corners[query.dtype] = corner_QK.triu_(num_keys - num_queries + 1)
    return packing.corners[query.dtype]


def _aligned(seen_QK: Tensor) -> Tensor:
    """A GPU's kernels read a mask 16 numbers at a time, and torch makes sure of its rows only, not
    of where it begins."""
    if not seen_QK.is_cuda:
        return seen_QK
    num_queries, num_keys = seen_QK.shape
    room_QK = seen_QK.new_empty(num_queries, -(-num_keys // 16) * 16)
    room_QK[:, :num_keys] = seen_QK
    return room_QK[:, :num_keys]


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


# No mask is registered under the name: none is made then, also where positions start again.
AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)


# ── a row ─────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def use_varlen_attention(model: Any) -> Iterator[None]:
    with apply_patches([patch_attention(model, VARLEN_ATTENTION)]):
        yield


def forward_varlen(
    model: Any,
    ids: Sequence[int],
    position: Sequence[int],
    packing: VarlenLayout,
    cache: Cache | None,
) -> Tensor:
    """Last hidden states [N, D] of one packed row."""
    assert attn_implementation(model) == VARLEN_ATTENTION, (
        "packed passes need `ForwardPasses.patch_model`"
    )
    ids_N, position_N = tensor_on([ids, position], dtype=torch.long, device=model.device)
    keeping: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    out = model.base_model(
        input_ids=ids_N[None],
        position_ids=position_N[None],
        use_cache=cache is not None,
        packing=packing,
        **keeping,
    )
    hidden: Tensor = out.last_hidden_state.squeeze(0)
    return hidden
