"""Sequences grouped into batches of bounded size with little padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from courtside.engines.transfer import tensor_on


def default_pass_tokens(device: torch.device) -> int:
    """Tokens of one forward pass that keep the device busy. A CPU would gain a little from more,
    at the price of more activations in a training step."""
    return 16384 if device.type == "cuda" else 512


def batch_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in padded batches of similar length, each of at most `max_tokens` with padding.

    Longest first, so that a run that does not fit in memory fails at once. A sequence longer than
    the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def batch_by_size(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in batches whose sizes add up to at most `max_tokens`: first-fit decreasing.

    An item larger than the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    free_tokens: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        target = next((b for b, free in enumerate(free_tokens) if size <= free), None)
        if target is None:
            batches.append([])
            free_tokens.append(max_tokens)
            target = len(batches) - 1
        batches[target].append(index)
        free_tokens[target] -= size
    return batches


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    """Causal attention never attends to padding on the right, so no mask is needed."""
    longest = max(len(ids) for ids in sequences)
    rows = [list(ids) + [pad_id] * (longest - len(ids)) for ids in sequences]
    return tensor_on(rows, dtype=torch.long, device=device)


def pad_left(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, aligned at the end, where decoding continues."""
    longest = max(len(ids) for ids in sequences)
    rows = [[pad_id] * (longest - len(ids)) + list(ids) for ids in sequences]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]
    return (
        torch.tensor(rows, dtype=torch.long, device=device),
        torch.tensor(mask, dtype=torch.long, device=device),
    )
