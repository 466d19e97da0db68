"""Which sequences share their beginning, where their positions lie, and which go together."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from courtside.engines.forward import prefix_sharing
from courtside.engines.forward.prefix_sharing import (
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


def group_of(num_prompt: int, *rests: int, seed: int = 0) -> Sequences:
    prompt = ids(num_prompt, seed=seed)
    return [prompt + ids(n, seed=100 * seed + i + 1) for i, n in enumerate(rests)]


# ── which ────────────────────────────────────────────────────────────────────────────────────────


def test_samples_of_two_prompts_and_one_of_neither() -> None:
    one, other = group_of(30, 5, 9, 0), group_of(40, 3, 4, seed=1)
    sequences = [one[0], other[0], one[1], ids(50, seed=9), other[1], one[2]]
    assert sorted(find_prefix_groups(sequences), key=lambda g: g.size) == [
        PrefixGroup(members=(0, 2, 5), size=30),
        PrefixGroup(members=(1, 4), size=40),
    ]


def test_equal_sequences_share_all() -> None:
    assert find_prefix_groups([ids(20)] * 3) == [PrefixGroup(members=(0, 1, 2), size=20)]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (20, [(0, 1, 2), (3, 4, 5)]),  # 2 · 2 · 60 saved by questions, 5 · 20 by the system prompt
        (200, [(0, 1, 2, 3, 4, 5)]),  # 2 · 2 · 240 against 5 · 200
    ],
)
def test_of_what_all_share_and_what_some_do_the_better_is_taken(
    system: int, expected: list[tuple[int, ...]]
) -> None:
    common = ids(system, seed=77)
    questions = [*group_of(40, 8, 8, 8, seed=1), *group_of(40, 8, 8, 8, seed=2)]
    found = find_prefix_groups([common + question for question in questions])
    assert sorted(group.members for group in found) == expected


def test_too_little_in_common_is_not_shared() -> None:
    assert find_prefix_groups(group_of(15, 3, 4)) == []
    assert find_prefix_groups(group_of(16, 3, 4)) == [PrefixGroup(members=(0, 1), size=16)]
    # One of them goes on for so long that laying out its keys costs more than its prompt.
    assert find_prefix_groups(group_of(16, 3, 241, 4)) == [PrefixGroup(members=(0, 2), size=16)]
    assert find_prefix_groups(group_of(16, 3, 240)) == [PrefixGroup(members=(0, 1), size=16)]
    assert find_prefix_groups([]) == find_prefix_groups([ids(99)]) == []


def common(sequences: Sequences) -> int:
    columns = zip(*sequences, strict=False)
    return next((i for i, c in enumerate(columns) if len(set(c)) > 1), min(map(len, sequences)))


def most_saved(sequences: Sequences) -> int:
    """By all of them as one group, or by those that go on with the same id."""
    size = common(sequences)
    branches: dict[int, Sequences] = {}
    for sequence in sequences:
        if len(sequence) > size:
            branches.setdefault(sequence[size], []).append(sequence)
    inside = sum(most_saved(its) for its in branches.values() if len(its) > 1)
    return max((len(sequences) - 1) * size, inside)


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=9))
def test_all_or_those_that_go_on_alike_whichever_saves_more(sequences: Sequences) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_sharing, "MIN_PREFIX_TOKENS", 1)
        patch.setattr(prefix_sharing, "MIN_PREFIX_FRACTION", 0)
        found = find_prefix_groups(sequences)
    members = [i for group in found for i in group.members]
    assert len(members) == len(set(members))
    for group in found:
        assert group.size == common([sequences[i] for i in group.members])
    assert sum(group.saved for group in found) == most_saved(sequences)


# ── where ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shared", [False, True])
def test_every_position_is_found_where_its_id_lies(shared: bool) -> None:
    sequences = [*group_of(30, 5, 0, 9), ids(12, seed=5), *group_of(17, 1, 1, seed=1), ids(1)]
    row = pack_sequences(sequences, shared=shared)
    laid = [i for part in row.parts for i in part.ids]
    total = sum(map(len, sequences))
    assert len(laid) == row.num_tokens == total - (2 * 30 + 17) * shared
    for place, sequence in zip(row.places, sequences, strict=True):
        assert [laid[i] for i in place.of(range(len(sequence)))] == sequence
        for count in range(len(sequence) + 1):
            slices = place.slices(count)
            assert [i for its in slices for i in laid[its]] == sequence[:count]
            assert all(its.stop > its.start for its in slices)
    for part in row.parts:
        assert part.ids, "kernels are given no empty parts"
        assert part.first == (0 if part.prefix is None else len(row.parts[part.prefix].ids))


# ── together ─────────────────────────────────────────────────────────────────────────────────────


def sizes_of(units: list[Sequences], batches: list[list[int]]) -> list[int]:
    """Tokens that each pass will compute."""
    return [
        pack_sequences([s for i in batch for s in units[i]], shared=True).num_tokens
        for batch in batches
    ]


def alone(sequences: Sequences) -> list[Sequences]:
    return [[sequence] for sequence in sequences]


def test_a_group_that_fits_goes_together() -> None:
    one, other = group_of(100, 40, 30, 20, 10), group_of(100, 40, 30, 20, 10, seed=1)
    units = alone([s for pair in zip(one, other, strict=True) for s in pair])
    batches = batch_by_prefix(units, 200, max_shared_tokens=200)
    assert sorted(map(sorted, batches)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sizes_of(units, batches) == [200, 200]
    assert len(batch_by_prefix(units, 400, max_shared_tokens=400)) == 1


def test_a_group_that_does_not_fit_is_cut_and_each_piece_has_its_prompt() -> None:
    units = alone(group_of(100, *[20] * 10))
    batches = batch_by_prefix(units, 180, max_shared_tokens=180)
    assert sizes_of(units, batches) == [180, 180, 140]
    assert sorted(i for batch in batches for i in batch) == list(range(10))


def test_a_long_prompt_is_shared_unless_that_is_forbidden() -> None:
    """A CPU's passes are of 256 tokens: a longer prompt would never be shared."""
    units = alone(group_of(600, *[64] * 20))
    free = batch_by_prefix(units, 256, max_shared_tokens=None)
    assert sizes_of(units, free) == [600 + MAX_SUFFIX_TOKENS, 600 + 4 * 64]
    units = units[:5]
    assert sizes_of(units, batch_by_prefix(units, 256, max_shared_tokens=730)) == [728, 728, 664]
    assert sizes_of(units, batch_by_prefix(units, 256, max_shared_tokens=256)) == [664] * 5
    assert sizes_of(units, batch_by_prefix(units, 1, max_shared_tokens=1)) == [664] * 5


def test_a_pass_that_is_kept_grows_by_what_the_prompt_repays() -> None:
    units = alone(group_of(200, *[100] * 6))
    assert sizes_of(units, batch_by_prefix(units, 256, max_shared_tokens=None)) == [800]
    kept = batch_by_prefix(units, 256, max_shared_tokens=None, for_backward=True)
    assert sizes_of(units, kept) == [600, 400]


def test_units_stay_whole_also_over_two_prompts() -> None:
    one, other = group_of(50, 5, 5), group_of(40, 7, 7, seed=1)
    units = [[one[0], other[0]], [one[1]], [other[1]]]
    batches = batch_by_prefix(units, 150, max_shared_tokens=150)
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2]
    assert max(sizes_of(units, batches)) <= 150


@given(st.data())
def test_no_pass_is_larger_than_planned(data: st.DataObject) -> None:
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
    for batch, size in zip(batches, sizes_of(units, batches), strict=True):
        assert size <= budget or len(batch) == 1
