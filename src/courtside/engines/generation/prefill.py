"""What prefill has in common on every device: batches of prompts, positions and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from courtside.engines.attention_masks import format_mask


def split_prefill(
    lengths: Sequence[int], rows: Sequence[int], max_tokens: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Neighboring rows in batches of at most `max_tokens`, padding included, each with the index
    of its first row.

    A row less than half as long as the longest of its batch starts another: its padding would cost
    as much as a forward pass of its own.
    """
    first, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        is_full = longest * (index - first + 1) > max_tokens
        if index > first and (is_full or 2 * length < longest):
            yield first, rows[first:index]
            first, longest = index, length
    if rows:
        yield first, rows[first:]


def new_positions(
    lengths: Sequence[int], num_new: int, *, capacity: int, device: torch.device
) -> tuple[Tensor, int]:
    """KV cache positions [B, N] of new tokens after `lengths` cached ones, and how many positions
    any of them attends to. Padding beyond the capacity shares the last position: nothing attends
    to it."""
    length_B = torch.tensor(lengths, device=device)
    position_BN = length_B[:, None] + torch.arange(num_new, device=device)
    return position_BN.clamp(max=capacity - 1), min(capacity, max(lengths) + num_new)


def cache_mask(model: Any, position_BN: Tensor, width: int) -> Tensor:
    """Each token attends to the cached positions up to its own. Padding is overwritten before a
    token attends to it, so no mask needs to be stored."""
    position_W = torch.arange(width, device=position_BN.device)
    return format_mask(model, (position_W <= position_BN[:, :, None])[:, None])
