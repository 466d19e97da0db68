"""Whether a model continues sequences from saved states, and how: on small examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, get_args

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from courtside.engines.forward.state_passes import Batching, StateBatch, StatePasses
from courtside.engines.patches.patch import eval_mode
from courtside.engines.patches.time_steps import make_time_step_patches
from courtside.engines.probes import distance_from_plain_forward, run_probe
from courtside.engines.row_states import (
    RowState,
    StateLayout,
    has_recurrent_states,
    without_states,
)
from courtside.errors import ModelError

CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")
"""How models call the cache that they take and return."""
EXAMPLE_LENGTHS = (2, 9, 9, 70)
"""Two alike; shorter and longer than a convolution, and longer than a chunk of the delta rule."""


def probe_state_passes(model: Any) -> StatePasses | str | None:
    """How this model continues from saved states, or why it cannot; None: it has no recurrent or
    convolution states."""
    candidates: list[StatePasses | None] = []

    def find_states() -> float:
        candidates.append(_find_passes(model))
        return 0.0

    reason = run_probe(model, find_states, shrinks_window=False)
    if reason is not None or candidates[0] is None:
        return reason
    # Kernels of a GPU round float32 to TF32. In 16 bits the two forms of a recurrence differ by a
    # few percent a model; what is wrong with one does not: the examples compare bits, too.
    probe = partial(
        run_probe, model, max_error=0.001 if model.device.type == "cpu" else 0.01,
        max_error_16bit=0.15, shrinks_window=False,
    )  # fmt: skip
    for batching in get_args(Batching):
        passes = replace(candidates[0], batching=batching)
        reason = probe(partial(_decoding_error, passes))
        if reason is None:
            chunk_reason = probe(partial(_chunk_error, passes))
            return replace(passes, continues_by_chunks=chunk_reason is None)
    return reason


@torch.no_grad()
def _find_passes(model: Any) -> StatePasses | None:
    parameters = signature(model.base_model.forward).parameters
    names = [name for name in CACHE_ARGUMENTS if name in parameters]
    if not names:
        return None
    with eval_mode(model):
        ids = torch.tensor([_example_ids(model, 3)], device=model.device)
        out = model.base_model(input_ids=ids, use_cache=True)
        cache = getattr(out, names[0], None)
        if cache is None:
            _check_cache_is_filled(model, ids)
    if cache is None or not has_recurrent_states(cache):
        return None
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window and not any(
        hasattr(layer, "sliding_window") for layer in getattr(cache, "layers", ())
    ):
        raise ModelError("its cache does not know its sliding window")  # and examples are shorter
    layout = StateLayout(cache)
    row = layout.copy_row(cache, 0, len(ids[0]))
    bytes_per_token = layout.num_bytes(row, kv=True) // len(ids[0]) or token_bytes(model)
    return StatePasses(
        model=model,
        layout=layout,
        example=row,
        row_state_tokens=-(-layout.num_bytes(row, kv=False) // bytes_per_token),
        cache_argument=names[0],
        takes_positions="position_ids" in parameters,
        patches=tuple(make_time_step_patches(model)),
    )


def _check_cache_is_filled(model: Any, ids: Tensor) -> None:
    """For a model that returns no cache (Recurrent Gemma): its modules may have states instead."""
    cache = DynamicCache(config=model.config)
    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    if not all(layer.is_initialized for layer in getattr(cache, "layers", ())):
        raise ModelError("it keeps states outside of its cache")


def token_bytes(model: Any) -> int:
    """The unit of a memory budget for models without keys and values, where a token takes none:
    two hidden states in every layer."""
    config = model.config.get_text_config()
    return int(2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize)


def _example_ids(model: Any, count: int, *, start: int = 0) -> list[int]:
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return [1 + (7 * i * i + 3 * i) % (vocab_size - 1) for i in range(start, start + count)]


def _example_states(passes: StatePasses, num_new: int) -> tuple[list[list[int]], list[RowState]]:
    """Ids of some sequences, and their states after all but the last `num_new`."""
    rows = [
        _example_ids(passes.model, length + num_new, start=7 * row)
        for row, length in enumerate(EXAMPLE_LENGTHS)
    ]
    prompts = [(None, ids[:-num_new]) for ids in rows]
    return rows, [state for state, _ in passes.extend(prompts, max_tokens=1)]


def _decoding_error(passes: StatePasses, num_new: int = 4) -> float:
    """Distance from plain passes of rows that decode together, each after a prefill of its own."""
    model = passes.model
    rows, states = _example_states(passes, num_new)
    hidden = []
    for padding in (0.0, 1.0):  # if the mask hides padding, nothing depends on it
        batch = StateBatch(passes, states, padding=padding)
        steps = [
            batch.forward(torch.tensor([[ids[n]] for ids in rows], device=model.device))
            for n in range(-num_new, 0)
        ]
        hidden.append(torch.cat(steps, dim=1))
    if not torch.equal(*hidden):
        return torch.inf
    return max(
        distance_from_plain_forward(model, ids, hidden_ND)
        for ids, hidden_ND in zip(rows, hidden[0], strict=True)
    )


def _chunk_error(passes: StatePasses, num_new: int = 6) -> float:
    """Distance from plain passes of rows that continue from a state by several tokens at once."""
    model, layout = passes.model, passes.layout
    rows, states = _example_states(passes, num_new)
    passes = replace(passes, continues_by_chunks=True)

    def continue_from(states: Sequence[RowState]) -> list[Tensor]:
        chunks = [(s, ids[-num_new:]) for s, ids in zip(states, rows, strict=True)]
        return [hidden_ND for _, hidden_ND in passes.extend(chunks, max_tokens=num_new * len(rows))]

    hidden = continue_from(states)
    for kind in set(layout.kinds) - {"kv"}:
        # Some kinds silently start such a pass from zeros, which a long past may not show.
        zeroed = continue_from([without_states(state, layout, kind) for state in states])
        if all(torch.equal(a, b) for a, b in zip(hidden, zeroed, strict=True)):
            return torch.inf
    return max(
        distance_from_plain_forward(model, ids, hidden_ND)
        for ids, hidden_ND in zip(rows, hidden, strict=True)
    )
