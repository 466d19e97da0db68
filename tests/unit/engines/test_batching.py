from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from courtside.engines.forward.batching import batch_by_length, batch_by_size, pad_left, pad_right

CPU = torch.device("cpu")


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_groups_hold_everything_once_and_fit_the_budget(lengths: list[int], budget: int) -> None:
    groups = batch_by_length(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[i] for i in group) * len(group)
        assert padded <= budget or len(group) == 1
    longest = [max(lengths[i] for i in group) for group in groups]
    assert longest == sorted(longest, reverse=True), "what will not fit in memory comes first"


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=2, max_size=30), budget=st.integers(1, 200))
def test_no_group_could_take_the_next_sequence_too(lengths: list[int], budget: int) -> None:
    groups = batch_by_length(lengths, budget)
    for group in groups[:-1]:
        assert max(lengths[i] for i in group) * (len(group) + 1) > budget


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_full_groups_hold_everything_once_and_fit_the_budget(sizes: list[int], budget: int) -> None:
    groups = batch_by_size(sizes, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in group) for group in groups]
    assert all(t <= budget or len(g) == 1 for t, g in zip(totals, groups, strict=True))
    largest = [sizes[group[0]] for group in groups]
    assert largest == sorted(largest, reverse=True), "what will not fit in memory comes first"
    for before, group in enumerate(groups):
        # Nothing stands in a group that an earlier one had room for, so two are never half empty.
        assert all(total + min(sizes[i] for i in group) > budget for total in totals[:before])


def test_groups_are_filled_up_with_what_is_small() -> None:
    assert batch_by_size([3, 60, 21, 4, 20, 6], 45) == [[1], [2, 4, 3], [5, 0]]
    assert batch_by_size([], 45) == []


def test_padding_on_either_side() -> None:
    assert pad_right([[3, 4, 5], [6]], 9, CPU).tolist() == [[3, 4, 5], [6, 9, 9]]
    ids, mask = pad_left([[3, 4, 5], [6]], 9, CPU)
    assert ids.tolist() == [[3, 4, 5], [9, 9, 6]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
