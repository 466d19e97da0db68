"""Whether a model supports packed batches and a KV cache: by its config, and on a small example.

A model may ignore the position ids, mask or cache that it is given, so every optimization is
compared with a plain forward pass before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from courtside.engines.patches.attention import (
    attn_implementation,
    cached_attention_patches,
    masks_by_layer_kind,
)
from courtside.engines.patches.attention_variants import (
    PROBE_WINDOW,
    find_layer_kinds,
    needs_own_softmax,
    shrink_window,
)
from courtside.engines.patches.patch import apply_patches, eval_mode, patch_attention
from courtside.engines.probe_inputs import PROBE_ERRORS, probe_ids
from courtside.engines.rope import LENGTH_DEPENDENT, find_rope_types, is_rope_fixed
from courtside.engines.routing import Routers, find_routers

SPARSE_ATTENTION_FIELDS = (
    "attention_window", "attention_window_size", "index_topk", "keep_window_size",
    "local_attention", "sliding_windows", "window_size",
)  # fmt: skip
"""Config fields by which some models restrict attention in a way of their own."""

MAX_ERROR = 2e-3
"""Relative, of float32 hidden states: rounding leaves 1e-5, TF32 on a GPU 1e-3."""


def find_unsupported_attention(model: Any) -> str | None:
    """Why the config rules out packed batches and a plain KV cache; None: it does not.

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2))
    >>> find_unsupported_attention(model)
    'it takes no position ids'
    """
    config = model.config.get_text_config()
    if attn_implementation(model) not in ("sdpa", "eager"):
        return f"attn_implementation = {attn_implementation(model)!r} takes no 4D mask"
    if "position_ids" not in signature(model.base_model.forward).parameters:
        return "it takes no position ids"
    kinds = set(find_layer_kinds(model) or ())
    if not kinds and getattr(config, "attention_chunk_size", None) is not None:
        kinds = {"chunked_attention"}
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        return f"it has layers of the kind {unknown[0]!r}"
    if attn_implementation(model) == "sdpa" and needs_own_softmax(model):
        return "attn_implementation = 'sdpa' leaves out its soft cap or sinks; 'eager' has them"
    sparse = [name for name in SPARSE_ATTENTION_FIELDS if getattr(config, name, None)]
    if sparse:
        return f"its {sparse[0]} restricts attention"
    if getattr(config, "cross_attention_layers", None):
        return "its cross-attention layers have no keys of the text"
    dynamic = sorted(find_rope_types(config) & set(LENGTH_DEPENDENT))
    if dynamic and not is_rope_fixed(model):
        return f"its RoPE depends on the sequence length (rope_type = {dynamic[0]!r})"
    return None


@torch.no_grad()
def run_probe(
    model: Any,
    compute_error: Callable[[], float],
    *,
    max_error: float = MAX_ERROR,
    max_error_16bit: float = 0.05,
    shrinks_window: bool = True,
) -> str | None:
    """What is wrong with an example whose relative error is `compute_error()`; None: nothing.
    `max_error`: in float32. `shrinks_window`: windows are small meanwhile, so that the example
    crosses them."""
    limit = max_error_16bit if is_16bit(model) else max_error
    try:
        with eval_mode(model):
            if shrinks_window and not window_is_in_effect(model):
                return "its sliding window cannot be made smaller for a small example"
            with apply_patches(shrink_window(model) if shrinks_window else ()):
                error = compute_error()
                if not error < limit and isinstance(routers := find_routers(model), Routers):
                    # Rounding may have sent tokens to other experts: once more without a choice.
                    with routers.fix_experts():
                        error = compute_error()
    except torch.OutOfMemoryError:
        raise
    except PROBE_ERRORS as e:
        return f"a small example fails ({type(e).__name__}: {e})"
    if not error < limit:
        return "on a small example its hidden states are not those of separate passes"
    return None


def is_16bit(model: Any) -> bool:
    return torch.is_autocast_enabled(model.device.type) or model.dtype.itemsize < 4


def window_is_in_effect(model: Any) -> bool:
    """Whether plain forward passes follow `shrink_window`, as far as there is a window."""
    patches = list(shrink_window(model))
    if not patches:
        return True
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(3 * PROBE_WINDOW, device=model.device)[None] % vocab_size
    outputs = []
    for active in ([], patches):
        with apply_patches(active):
            outputs.append(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])
    return not torch.equal(*outputs)


def distance_from_plain_forward(model: Any, ids: list[int], hidden_ND: Tensor) -> float:
    """Relative error of the last N hidden states against a forward pass over these ids alone."""
    out = model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    plain_ND = out.last_hidden_state[0, -len(hidden_ND) :].float()
    norm_N = plain_ND.norm(dim=-1)
    # A padding token's state may be zero throughout.
    error_N = (hidden_ND.float() - plain_ND).norm(dim=-1) / norm_N.clamp(min=0.1 * norm_N.mean())
    # In 16 bits the median: rounding may send a single token to another expert.
    return float(error_N.median() if is_16bit(model) else error_N.max())


# ── batches and causality ────────────────────────────────────────────────────────────────────────

PROBE_LENGTHS = (3, 21, 44, 9)
"""Of sequences in one batch."""
BLOCK_FIELDS = (
    "compress_rates", "index_block_size", "index_topk", "indexer_budget", "local_attn_chunk_length",
)  # fmt: skip
"""Config fields of attention to blocks or selected tokens, where padding may take the place of a
token. In a large model only a longer sequence than a probe's would show it."""


def find_batch_problem(model: Any) -> str | None:
    """Why the config rules out batches of sequences of different lengths; None: it does not."""
    config = model.config.get_text_config()
    names = [name for name in BLOCK_FIELDS if getattr(config, name, None)]
    return f"its {names[0]} selects blocks or tokens, which padding may change" if names else None


MAX_ROUNDING = 5.0
"""Times the limit of 16 bits: how far passes of different lengths differ in some trained models."""
MAX_LEAK = 5e-4
"""Relative: what later tokens change in passes of one shape, which round alike."""


def probe_causality(model: Any) -> str | None:
    """Why no sequence can be sampled and scored alike; None: later tokens change nothing."""
    probe = partial(run_probe, model, shrinks_window=False)
    reason = probe(lambda: _causality_error(model))
    if reason is None or not is_16bit(model):
        return reason
    # Rounding, or a model that sees what follows? Passes of one shape tell.
    if probe(lambda: _leak(model), max_error_16bit=MAX_LEAK) is not None:
        return reason
    return probe(lambda: _causality_error(model) / MAX_ROUNDING)


def _causality_error(model: Any) -> float:
    """Distance of the first tokens of one pass from passes over these alone. Blocks of attention
    end at some of the lengths and not at others."""
    ids = probe_ids(model, max(PROBE_LENGTHS), 1)
    out = model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    return max(
        distance_from_plain_forward(model, ids[:length], out.last_hidden_state[0, :length])
        for length in (3, 10, 21, 24, 31)
        if length < len(ids)
    )


def _leak(model: Any) -> float:
    """How far other tokens at the end change the hidden states before them."""
    ids, endings = (probe_ids(model, max(PROBE_LENGTHS), seed) for seed in (1, 2))
    hidden = []
    for length in (len(ids), 31, 21, 10, 3):
        mixed = ids[:length] + endings[length:]
        out = model.base_model(
            input_ids=torch.tensor([mixed], device=model.device), use_cache=False
        )
        hidden.append(out.last_hidden_state[0].float())
    expected = hidden[0]
    return max(
        float((changed - expected)[:length].norm() / expected[:length].norm())
        for length, changed in zip((31, 21, 10, 3), hidden[1:], strict=True)
    )


# ── KV cache ─────────────────────────────────────────────────────────────────────────────────────


def probe_kv_cache(model: Any) -> str | None:
    """Why a plain KV cache with masked slots cannot serve this model; None: it can."""
    reason = find_unsupported_attention(model)
    if reason is None and not _uses_attention_interface(model):
        reason = "its attention is not one of transformers' AttentionInterface"
    return reason or run_probe(model, lambda: _kv_cache_error(model))


class _AttentionReached(Exception):
    """Raised by the attention of `_uses_attention_interface`."""


def _raise_reached(*states: Any, **settings: Any) -> Any:
    raise _AttentionReached


PROBE_ATTENTION = "courtside_probe"
AttentionInterface.register(PROBE_ATTENTION, _raise_reached)


@torch.no_grad()
def _uses_attention_interface(model: Any) -> bool:
    """Whether a layer's attention can be replaced by another implementation."""
    ids = torch.tensor([probe_ids(model, 3, 0)], device=model.device)
    with eval_mode(model), apply_patches([patch_attention(model, PROBE_ATTENTION)]):
        try:
            model.base_model(input_ids=ids, use_cache=False)
        except _AttentionReached:
            return True
        except PROBE_ERRORS:
            return False
    return False


def _kv_cache_error(model: Any, num_cached: int = 8, num_valid: int = 5) -> float:
    """Prefill, then a second pass that must not attend to the last slots of the first."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = [1 + (7 * i * i) % (vocab_size - 1) for i in range(20)]
    new = ids[num_cached:]
    cache = DynamicCache()
    prompt = torch.tensor([ids[:num_cached]], device=model.device)
    model.base_model(input_ids=prompt, past_key_values=cache, use_cache=True)
    slot_K = torch.arange(num_cached + len(new), device=model.device)
    causal_QK = (slot_K >= num_cached) & (slot_K <= slot_K[num_cached:, None])
    is_visible = ((slot_K < num_valid) | causal_QK)[None, None]
    position_BN = torch.arange(num_valid, num_valid + len(new), device=model.device)[None]
    slot_position_K = torch.where(slot_K < num_cached, slot_K, slot_K - num_cached + num_valid)
    with apply_patches(cached_attention_patches(model)):
        out = model.base_model(
            input_ids=torch.tensor([new], device=model.device),
            attention_mask=masks_by_layer_kind(model, is_visible, position_BN, slot_position_K),
            position_ids=position_BN,
            past_key_values=cache,
            use_cache=True,
        )
    return distance_from_plain_forward(model, ids[:num_valid] + new, out.last_hidden_state[0])
