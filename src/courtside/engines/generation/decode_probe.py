"""Whether decode steps at fixed addresses compute what the model itself does, on a small example.

Sessions of windows on a CPU need no such probe: there the model's own masks have the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from courtside.engines.forward.state_passes import StatePasses
from courtside.engines.generation.cache_layers import find_static_problem, load_row, read_row
from courtside.engines.generation.cuda_graphs import CudaGraphs, StepGraph
from courtside.engines.generation.kv_cache import KVCache, KVCachePool, RowDecoder
from courtside.engines.patches.attention_variants import find_window, needs_own_softmax
from courtside.engines.probes import distance_from_plain_forward, run_probe

NUM_PROMPT = 7
NUM_NEW = 12


def probe_decoding(model: Any, dtype: torch.dtype | None = None) -> str | None:
    """Why a model with windows, soft caps or sinks cannot decode over `KVCache`; None: it can.

    `dtype`: that of the cache where it is not that of the weights."""
    if find_window(model) is None and not needs_own_softmax(model):
        return None
    return run_probe(model, lambda: _decoding_error(model, dtype))


def probe_state_decoding(
    passes: StatePasses, dtype: torch.dtype | None = None, graphs: CudaGraphs | None = None
) -> StatePasses | str:
    """How a recurrent or hybrid model decodes at fixed addresses, by `graphs` where there are some;
    or why it cannot."""
    reason = find_static_problem(passes)
    if reason is not None:
        return reason
    # The two forms of a recurrence differ as in `forward/state_probe.py`.
    probe = partial(
        run_probe, passes.model, max_error=0.001 if passes.model.device.type == "cpu" else 0.01,
        max_error_16bit=0.15, shrinks_window=False,
    )  # fmt: skip
    for advances_in_place in (False, True):
        passes = replace(passes, advances_in_place=advances_in_place)
        reason = probe(partial(_state_decoding_error, passes, dtype, graphs))
        if reason is None:
            return passes
    assert reason is not None
    return reason


def _decoding_error(model: Any, dtype: torch.dtype | None) -> float:
    """Two rows that begin alike: prefill, then one token after another."""
    prompt, new_BN = _example(model)
    device = model.device
    pool = KVCachePool(model, dtype, graphs=None)
    cache = pool.acquire(2, NUM_PROMPT + NUM_NEW)
    rows_B = torch.arange(2, device=device)
    ids_BN = torch.tensor([prompt, prompt], device=device)
    position_BN = torch.arange(NUM_PROMPT, device=device).expand(2, -1)
    cache.prefill(rows_B, ids_BN, position_BN, NUM_PROMPT)
    cache.prefix_row_B[1] = 0
    cache.prefix_length_B[rows_B] = NUM_PROMPT
    return _decode(model, cache, [prompt, prompt], new_BN)


def _state_decoding_error(
    passes: StatePasses, dtype: torch.dtype | None, graphs: CudaGraphs | None
) -> float:
    """Two rows of different lengths, and one that has ended, whose state must stay."""
    prompt, new_BN = _example(passes.model)
    prompts = [prompt, prompt[:3], prompt[:5]]
    pool = KVCachePool(passes.model, dtype, graphs=None, passes=passes)
    cache = pool.acquire(3, NUM_PROMPT + NUM_NEW)
    extended = passes.extend([(None, ids) for ids in prompts], max_tokens=NUM_PROMPT)
    for row, (state, _) in enumerate(extended):
        load_row(cache.hf_cache, row, state)
    before = read_row(cache.hf_cache, 2, len(prompts[2]))
    error = _decode(passes.model, cache, prompts, new_BN, graphs)
    after = read_row(cache.hf_cache, 2, len(prompts[2]))
    is_same = all(map(torch.equal, before.tensors, after.tensors))
    return error if is_same else float("inf")


def _example(model: Any) -> tuple[list[int], Tensor]:
    """A prompt, and the new tokens of two rows."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    new_N = torch.arange(1, NUM_NEW + 1)
    prompt = [(5 * i * i + 3) % vocab_size for i in range(NUM_PROMPT)]
    return prompt, torch.stack([(7 * new_N) % vocab_size, (3 * new_N * new_N + 1) % vocab_size])


def _decode(
    model: Any,
    cache: KVCache,
    prompts: Sequence[list[int]],
    new_BN: Tensor,
    graphs: CudaGraphs | None = None,
) -> float:
    """Error of the first rows, which decode the new tokens after their prompts."""
    device, num_rows = model.device, len(new_BN)
    decoder, step = RowDecoder(model, cache), StepGraph(graphs)
    cache.length_B.fill_(1)  # the rows that are not used have one token
    cache.length_B[: len(prompts)] = torch.tensor([len(ids) for ids in prompts], device=device)
    ids_B1 = torch.zeros(cache.num_rows, 1, dtype=torch.long, device=device)
    active_B = torch.zeros(cache.num_rows, dtype=torch.bool, device=device)
    active_B[:num_rows] = True
    hidden_BD = decoder.forward(ids_B1, torch.zeros_like(active_B))  # of the right shape
    state = [cache.length_B, *decoder.states("conv"), *decoder.states("recurrent")]

    def advance() -> None:
        hidden_BD.copy_(decoder.forward(ids_B1, active_B))
        cache.length_B.add_(active_B)

    hidden = []
    for n in range(NUM_NEW):
        ids_B1[:num_rows, 0] = new_BN[:, n].to(device)
        step.run(advance, state)
        hidden.append(hidden_BD[:num_rows].clone())
    return max(
        distance_from_plain_forward(model, ids + new, hidden_ND)
        for ids, new, hidden_ND in zip(
            prompts[:num_rows], new_BN.tolist(), torch.stack(hidden, dim=1), strict=True
        )
    )
