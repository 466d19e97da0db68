"""Prefix groups, spans of sequences in a packed batch, and batches that keep groups together."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from courtside.engines.forward.batching import (
    MAX_SUFFIX_TOKENS,
    PrefixGroup,
    batch_by_prefix,
    find_prefix_groups,
    pack_sequences,
)

Sequences = list[list[int]]


def ids(count: int, *, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(count)]


def group_of(num_prompt: int, *suffixes: int, seed: int = 0) -> Sequences:
    prompt = ids(num_prompt, seed=seed)
    return [prompt + ids(n, seed=100 * seed + i + 1) for i, n in enumerate(suffixes)]


# ── groups ───────────────────────────────────────────────────────────────────────────────────────


def test_samples_of_two_prompts_and_one_other() -> None:
    first, second = group_of(30, 5, 9, 0), group_of(40, 3, 4, seed=1)
    sequences = [first[0], second[0], first[1], ids(50, seed=9), second[1], first[2]]
    assert sorted(find_prefix_groups(sequences), key=lambda g: g.num_tokens) == [
        PrefixGroup(members=(0, 2, 5), num_tokens=30),
        PrefixGroup(members=(1, 4), num_tokens=40),
    ]


def test_equal_sequences_share_everything() -> None:
    assert find_prefix_groups([ids(20)] * 3) == [PrefixGroup(members=(0, 1, 2), num_tokens=20)]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (20, [(0, 1, 2), (3, 4, 5)]),  # questions save 2 · 2 · 60, the system prompt 5 · 20
        (200, [(0, 1, 2, 3, 4, 5)]),  # 2 · 2 · 240 against 5 · 200
    ],
)
def test_the_prefix_that_saves_more_is_shared(system: int, expected: list[tuple[int, ...]]) -> None:
    system_prompt = ids(system, seed=77)
    questions = [*group_of(40, 8, 8, 8, seed=1), *group_of(40, 8, 8, 8, seed=2)]
    groups = find_prefix_groups([system_prompt + question for question in questions])
    assert sorted(group.members for group in groups) == expected


def test_short_prefixes_are_not_shared() -> None:
    assert find_prefix_groups(group_of(15, 3, 4)) == []
    assert find_prefix_groups(group_of(16, 3, 4)) == [PrefixGroup(members=(0, 1), num_tokens=16)]
    # Gathering the keys of a long sequence costs more than computing its prompt.
    assert find_prefix_groups(group_of(16, 3, 241, 4)) == [
        PrefixGroup(members=(0, 2), num_tokens=16)
    ]
    assert find_prefix_groups(group_of(16, 3, 240)) == [PrefixGroup(members=(0, 1), num_tokens=16)]
    assert find_prefix_groups([]) == find_prefix_groups([ids(99)]) == []


def common_length(sequences: Sequences) -> int:
    columns = zip(*sequences, strict=False)
    return next((i for i, c in enumerate(columns) if len(set(c)) > 1), min(map(len, sequences)))


def max_saved(sequences: Sequences) -> int:
    """By all of them as one group, or by those that continue with the same id."""
    size = common_length(sequences)
    branches: dict[int, Sequences] = {}
    for sequence in sequences:
        if len(sequence) > size:
            branches.setdefault(sequence[size], []).append(sequence)
    inner = sum(max_saved(group) for group in branches.values() if len(group) > 1)
    return max((len(sequences) - 1) * size, inner)


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=9))
def test_groups_save_as_much_as_possible(sequences: Sequences) -> None:
    groups = find_prefix_groups(sequences, min_tokens=1, min_fraction=0)
    members = [i for group in groups for i in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        assert group.num_tokens == common_length([sequences[i] for i in group.members])
    assert sum(group.saved_tokens for group in groups) == max_saved(sequences)


# ── packing ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_spans_give_the_ids_of_every_sequence(share_prefixes: bool) -> None:
    sequences = [*group_of(30, 5, 0, 9), ids(12, seed=5), *group_of(17, 1, 1, seed=1), ids(1)]
    batch = pack_sequences(sequences, share_prefixes=share_prefixes)
    row = [token for segment in batch.segments for token in segment.ids]
    total = sum(map(len, sequences))
    assert len(row) == batch.num_tokens == total - (2 * 30 + 17) * share_prefixes
    for span, sequence in zip(batch.spans, sequences, strict=True):
        assert [row[i] for i in span.indices(range(len(sequence)))] == sequence
        for count in range(len(sequence) + 1):
            slices = span.slices(count)
            assert [token for s in slices for token in row[s]] == sequence[:count]
            assert all(s.stop > s.start for s in slices)
    for segment in batch.segments:
        assert segment.ids, "kernels take no empty segments"
        prefix_length = 0 if segment.prefix is None else len(batch.segments[segment.prefix].ids)
        assert segment.first_position == prefix_length


# ── batches ──────────────────────────────────────────────────────────────────────────────────────


def num_tokens_of(units: list[Sequences], batches: list[list[int]]) -> list[int]:
    """Tokens that each batch computes."""
    return [
        pack_sequences([s for i in batch for s in units[i]], share_prefixes=True).num_tokens
        for batch in batches
    ]


def units_of(sequences: Sequences) -> list[Sequences]:
    return [[sequence] for sequence in sequences]


def test_a_group_that_fits_shares_a_batch() -> None:
    first, second = group_of(100, 40, 30, 20, 10), group_of(100, 40, 30, 20, 10, seed=1)
    units = units_of([s for pair in zip(first, second, strict=True) for s in pair])
    batches = batch_by_prefix(units, 200, max_shared_tokens=200)
    assert sorted(map(sorted, batches)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert num_tokens_of(units, batches) == [200, 200]
    assert len(batch_by_prefix(units, 400, max_shared_tokens=400)) == 1


def test_a_group_that_does_not_fit_is_split_and_each_part_has_the_prefix() -> None:
    units = units_of(group_of(100, *[20] * 10))
    batches = batch_by_prefix(units, 180, max_shared_tokens=180)
    assert num_tokens_of(units, batches) == [180, 180, 140]
    assert sorted(i for batch in batches for i in batch) == list(range(10))


def test_a_long_prompt_is_shared_up_to_max_shared_tokens() -> None:
    """Batches on a CPU are small: a longer prompt would never be shared."""
    units = units_of(group_of(600, *[64] * 20))
    batches = batch_by_prefix(units, 256, max_shared_tokens=None)
    assert num_tokens_of(units, batches) == [600 + MAX_SUFFIX_TOKENS, 600 + 4 * 64]
    units = units[:5]
    assert num_tokens_of(units, batch_by_prefix(units, 256, max_shared_tokens=730)) == [
        728,
        728,
        664,
    ]
    assert num_tokens_of(units, batch_by_prefix(units, 256, max_shared_tokens=256)) == [664] * 5
    assert num_tokens_of(units, batch_by_prefix(units, 1, max_shared_tokens=1)) == [664] * 5


def test_batches_for_a_backward_pass_grow_by_twice_the_prompt() -> None:
    units = units_of(group_of(200, *[100] * 6))
    assert num_tokens_of(units, batch_by_prefix(units, 256, max_shared_tokens=None)) == [800]
    batches = batch_by_prefix(units, 256, max_shared_tokens=None, for_backward=True)
    assert num_tokens_of(units, batches) == [600, 400]


def test_units_stay_whole_across_two_prompts() -> None:
    first, second = group_of(50, 5, 5), group_of(40, 7, 7, seed=1)
    units = [[first[0], second[0]], [first[1]], [second[1]]]
    batches = batch_by_prefix(units, 150, max_shared_tokens=150)
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2]
    assert max(num_tokens_of(units, batches)) <= 150


@given(st.data())
def test_no_batch_is_larger_than_planned(data: st.DataObject) -> None:
    draw = data.draw(st.randoms(use_true_random=False))
    starts = [ids(draw.choice([10, 20, 60]), seed=n) for n in range(3)]
    starts += [[*starts[0], *ids(30, seed=9)], [*starts[1], *ids(25, seed=8)]]
    sequences = [
        [*draw.choice(starts), *ids(draw.choice([0, 1, 5, 30, 400]), seed=draw.randrange(4))]
        for _ in range(draw.randrange(1, 12))
    ]
    cuts = sorted({0, len(sequences), *(draw.randrange(len(sequences)) for _ in range(5))})
    units = [sequences[a:b] for a, b in pairwise(cuts)]
    budget = draw.choice([1, 50, 150, 500, 5000])
    batches = batch_by_prefix(units, budget, max_shared_tokens=budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(units)))
    for batch, size in zip(batches, num_tokens_of(units, batches), strict=True):
        assert size <= budget or len(batch) == 1
