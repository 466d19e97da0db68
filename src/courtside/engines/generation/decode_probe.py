"""Whether decode attention computes what the model's own attention does, on a small example.

Sessions on a CPU need no such probe: there the model's own masks have the windows.
"""

from __future__ import annotations

from typing import Any

import torch

from courtside.engines.generation.kv_cache import KVCachePool, forward_new_tokens
from courtside.engines.patches.attention import RowLengths
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


def _decoding_error(model: Any, dtype: torch.dtype | None) -> float:
    """Two rows that begin alike: prefill, then one token after another."""
    device = model.device
    vocab_size = model.get_input_embeddings().weight.shape[0]
    new_N = torch.arange(1, NUM_NEW + 1)
    prompt = [(5 * i * i + 3) % vocab_size for i in range(NUM_PROMPT)]
    new_BN = torch.stack([(7 * new_N) % vocab_size, (3 * new_N * new_N + 1) % vocab_size])
    pool = KVCachePool(model, dtype, graphs=None)
    cache = pool.acquire(2, NUM_PROMPT + NUM_NEW)
    rows_B = torch.arange(2, device=device)
    ids_BN = torch.tensor([prompt, prompt], device=device)
    position_BN = torch.arange(NUM_PROMPT, device=device).expand(2, -1)
    cache.prefill(rows_B, ids_BN, position_BN, NUM_PROMPT)
    cache.length_B.fill_(1)  # the rows that are not used have one token
    cache.length_B[rows_B] = NUM_PROMPT
    cache.prefix_row_B[1] = 0
    cache.prefix_length_B[rows_B] = NUM_PROMPT
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    hidden = []
    for n in range(NUM_NEW):
        ids_B1 = torch.zeros(cache.num_rows, 1, dtype=torch.long, device=device)
        ids_B1[:2, 0] = new_BN[:, n].to(device)
        lengths = RowLengths(
            length_B=cache.length_B + 1,
            prefix_row_B=cache.prefix_row_B,
            prefix_length_B=cache.prefix_length_B,
        )
        hidden_BD = forward_new_tokens(
            model, cache.hf_cache, ids_B1, cache.length_B[:, None], lengths, mask
        )
        hidden.append(hidden_BD[:2])
        cache.length_B[rows_B] += 1
    return max(
        distance_from_plain_forward(model, prompt + ids, hidden_ND)
        for ids, hidden_ND in zip(new_BN.tolist(), torch.stack(hidden, dim=1), strict=True)
    )
