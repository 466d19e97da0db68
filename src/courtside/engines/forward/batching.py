"""Grouping sequences into passes, so that little is wasted and memory stays bounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from courtside.engines.transfer import tensor_on


def default_pass_tokens(device: torch.device) -> int:
    """Tokens of one forward pass that keep the device busy. On a CPU more are somewhat faster
    still, but a pass that trains keeps something of each."""
    return 16384 if device.type == "cuda" else 512


def batch_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in groups of similar length, each of at most `max_tokens` with its padding.

    Longest first, so that a run that will not fit in memory fails at once. A sequence longer than
    the budget gets a group of its own.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def batch_by_size(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in groups whose sizes add up to at most `max_tokens`: each goes, largest first, into
    the first group with room for it. What is larger than the budget gets a group of its own.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        place = next((g for g, left in enumerate(room) if size <= left), None)
        if place is None:
            groups.append([])
            room.append(max_tokens)
            place = len(groups) - 1
        groups[place].append(index)
        room[place] -= size
    return groups


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    """Under causal attention no real token sees what stands to its right: no mask is needed."""
    longest = max(len(ids) for ids in sequences)
    rows = [list(ids) + [pad_id] * (longest - len(ids)) for ids in sequences]
    return tensor_on(rows, dtype=torch.long, device=device)


def pad_left(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids and mask, aligned at the end, where decoding goes on."""
    longest = max(len(ids) for ids in sequences)
    rows = [[pad_id] * (longest - len(ids)) + list(ids) for ids in sequences]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]
    return (
        torch.tensor(rows, dtype=torch.long, device=device),
        torch.tensor(mask, dtype=torch.long, device=device),
    )
