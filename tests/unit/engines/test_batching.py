from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from courtside.engines.forward.batching import batch_by_length, batch_by_size, pad_left, pad_right

CPU = torch.device("cpu")


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_padded_batches_hold_everything_once_and_fit_the_budget(
    lengths: list[int], budget: int
) -> None:
    batches = batch_by_length(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert padded <= budget or len(batch) == 1
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True), (
        "a batch that does not fit in memory comes first"
    )


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=2, max_size=30), budget=st.integers(1, 200))
def test_padded_batches_are_full(lengths: list[int], budget: int) -> None:
    batches = batch_by_length(lengths, budget)
    for batch in batches[:-1]:
        assert max(lengths[i] for i in batch) * (len(batch) + 1) > budget


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_packed_batches_hold_everything_once_and_fit_the_budget(
    sizes: list[int], budget: int
) -> None:
    batches = batch_by_size(sizes, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in batch) for batch in batches]
    assert all(t <= budget or len(g) == 1 for t, g in zip(totals, batches, strict=True))
    largest = [sizes[batch[0]] for batch in batches]
    assert largest == sorted(largest, reverse=True), (
        "a batch that does not fit in memory comes first"
    )
    for before, batch in enumerate(batches):
        # Nothing is in a batch that would fit an earlier one, so no two are half empty.
        assert all(total + min(sizes[i] for i in batch) > budget for total in totals[:before])


def test_small_items_fill_batches() -> None:
    assert batch_by_size([3, 60, 21, 4, 20, 6], 45) == [[1], [2, 4, 3], [5, 0]]
    assert batch_by_size([], 45) == []


def test_padding_left_and_right() -> None:
    assert pad_right([[3, 4, 5], [6]], 9, CPU).tolist() == [[3, 4, 5], [6, 9, 9]]
    ids, mask = pad_left([[3, 4, 5], [6]], 9, CPU)
    assert ids.tolist() == [[3, 4, 5], [9, 9, 6]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
