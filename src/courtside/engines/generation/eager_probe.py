"""How a model whose KV cache is not a standard one decodes: the first of three ways that computes
what plain forward passes do, on a small example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from courtside.engines.generation.left_padded import LeftPaddedBatch
from courtside.engines.generation.uncached import DecodeBatch, SeparateRows
from courtside.engines.probe_inputs import probe_ids
from courtside.engines.probes import distance_from_plain_forward, find_batch_problem, run_probe

DecodePath = Literal["left_padded", "separate_rows", "uncached"]
MAX_STEPS = 13
PROMPT_LENGTHS = (3, 21, 9)


def choose_decode_path(model: Any, *, pad_id: int) -> tuple[DecodePath, str | None]:
    """The fastest path that is right, and why the one before it is not."""

    def left_padded(prompts: Sequence[tuple[int, ...]]) -> DecodeBatch:
        return LeftPaddedBatch(model, prompts, pad_id=pad_id)

    def separate_rows(prompts: Sequence[tuple[int, ...]]) -> DecodeBatch:
        return SeparateRows(prompts, left_padded)

    reason = _find_offset_problem(model) or find_batch_problem(model)
    reason = reason or _probe_batch(model, left_padded)
    if reason is None:
        return "left_padded", None
    separate_reason = _probe_batch(model, separate_rows)
    return ("separate_rows", reason) if separate_reason is None else ("uncached", separate_reason)


def _find_offset_problem(model: Any) -> str | None:
    """Why padding on the left would change a model: it counts slots of the cache, not positions. A
    probe would have to be longer to see it."""
    scale = getattr(model.config.get_text_config(), "floor_scale", None)
    return None if scale is None else "its floor_scale takes padding for positions"


def _probe_batch(
    model: Any, make_batch: Callable[[Sequence[tuple[int, ...]]], DecodeBatch]
) -> str | None:
    return run_probe(model, lambda: _decoding_error(model, make_batch))


def _decoding_error(
    model: Any, make_batch: Callable[[Sequence[tuple[int, ...]]], DecodeBatch]
) -> float:
    """Prompts of several lengths, two of them equal, which leave the batch one after another."""
    prompts = [probe_ids(model, length, length) for length in PROMPT_LENGTHS]
    prompts.append(prompts[-1])
    new_ids = [probe_ids(model, MAX_STEPS - 3 * i, 50 + i) for i in range(len(prompts))]
    batch = make_batch([tuple(ids) for ids in prompts])
    hidden = dict(zip(batch.order, ([state] for state in batch.prefill()), strict=True))
    for step in range(MAX_STEPS):
        next_ids = {i: new_ids[i][step] for i in batch.order if step < len(new_ids[i])}
        if not next_ids:
            break
        order, hidden_BD = batch.advance(next_ids)
        for i, hidden_D in zip(order, hidden_BD, strict=True):
            hidden[i].append(hidden_D)
    return max(
        distance_from_plain_forward(model, [*prompts[i], *new_ids[i]], torch.stack(hidden[i]))
        for i in range(len(prompts))
    )
