"""Identity, splits and order: what all sources of tasks share."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from courtside.errors import TaskError
from courtside.hashing import choose, split_of, task_id
from courtside.tasks.base import (
    FiniteSource,
    GeneratedSource,
    TaskSpace,
    add_system_message,
    permute_index,
)
from courtside.types import Message, Split, Task


def numbered(number: int, split: Split | None = None) -> Task:
    content = f"task {number}"
    return Task(
        id=task_id("test", content),
        split=split or split_of(content),
        messages=(Message(role="user", content=content),),
    )


def numbers(size: int, *, period: int | None = None) -> TaskSpace:
    """Tasks 0 … size - 1; with a period, several numbers stand for the same task."""
    wrapped = period or size
    return TaskSpace(
        name="tasks.test",
        size=size,
        split=lambda index: split_of(f"task {index % wrapped}"),
        task=lambda index: numbered(index % wrapped),
    )


def ids(tasks: tuple[Task, ...]) -> list[str]:
    return [task.id for task in tasks]


def test_splits_are_fixed_for_ever() -> None:
    # A change here would move training problems into the test split of earlier runs.
    assert [split_of(f"task {i}") for i in (0, 1, 3, 11, 17)] == [
        "train", "train", "validation", "validation", "test",
    ]  # fmt: skip
    assert task_id("test", "task 0") == "test-d2b7b3015ed8"


def test_splits_have_their_shares() -> None:
    counts = Counter(split_of(f"content {i}") for i in range(10_000))
    assert abs(counts["train"] - 8000) < 200
    assert abs(counts["validation"] - 1000) < 150
    assert abs(counts["test"] - 1000) < 150


@given(st.integers(1, 300), st.text(max_size=5))
def test_a_shuffle_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permute_index(i, size, key) for i in range(size)) == list(range(size))


def test_a_shuffle_depends_on_its_key_and_is_even() -> None:
    first = Counter(permute_index(0, 5, str(key)) for key in range(5000))
    assert set(first) == set(range(5))
    assert max(first.values()) < 1.4 * min(first.values())
    assert permute_index(7, 10**24, "a") != permute_index(7, 10**24, "b")
    assert 0 <= permute_index(10**24 - 1, 10**24, "a") < 10**24


def test_choose_uses_all_options() -> None:
    assert {choose("abc", str(i)) for i in range(50)} == {"a", "b", "c"}


# ── finite sources ───────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 3))
def test_each_task_once_per_epoch(num_tasks: int, size: int, seed: int) -> None:
    tasks = [numbered(i, "train") for i in range(num_tasks)]
    source = FiniteSource(tasks, name="test", seed=seed, limit=None)
    stream = [task.id for step in range(3 * num_tasks) for task in source.batch(step, size)]
    for start in range(0, len(stream) - num_tasks + 1, num_tasks):
        assert len(set(stream[start : start + num_tasks])) == num_tasks


def test_epochs_and_seeds_have_their_own_order() -> None:
    tasks = [numbered(i, "train") for i in range(20)]
    source = FiniteSource(tasks, name="test", seed=0, limit=None)
    other = FiniteSource(tasks, name="test", seed=1, limit=None)
    assert source.batch(0, 20) != source.batch(1, 20)
    assert source.batch(0, 20) != other.batch(0, 20)
    assert set(ids(source.batch(0, 20))) == set(ids(other.batch(1, 20)))


def test_limit_takes_the_first_of_the_file() -> None:
    tasks = [numbered(i, "train") for i in range(20)]
    source = FiniteSource(tasks, name="test", seed=3, limit=2)
    assert Counter(ids(source.batch(5, 8))) == {tasks[0].id: 4, tasks[1].id: 4}


def test_limit_by_seed_takes_others_with_every_seed() -> None:
    tasks = [numbered(i, "train") for i in range(20)] + [numbered(99, "test")]

    def prompts(seed: int) -> set[str]:
        source = FiniteSource(tasks, name="test", seed=seed, limit=2, limit_by="seed")
        batch = ids(source.batch(0, 4) + source.batch(7, 4))
        assert set(batch) == set(ids(source.held_out("train", 9))), "those that train are evaluated"
        assert ids(source.held_out("test", 9)) == [tasks[-1].id]
        return set(batch)

    assert prompts(0) == prompts(0) and all(len(prompts(seed)) == 2 for seed in range(9))
    assert len(set().union(*map(prompts, range(9)))) > 9


def test_held_out_order_does_not_depend_on_the_file_or_seed() -> None:
    tasks = [numbered(i) for i in range(200)]
    source = FiniteSource(tasks, name="test", seed=0, limit=None)
    backwards = FiniteSource(tasks[::-1], name="test", seed=9, limit=1)
    assert source.held_out("test", 5) == backwards.held_out("test", 5)
    assert source.held_out("test", 5) == source.held_out("test", 9)[:5]
    everything = source.held_out("test", 10_000)
    assert set(ids(everything)) == {task.id for task in tasks if task.split == "test"}


def test_empty_splits_are_named() -> None:
    with pytest.raises(TaskError, match="file: holds no tasks"):
        FiniteSource([], name="file", seed=0, limit=None)
    with pytest.raises(TaskError, match=r"in the train split.*give some the split 'train'"):
        FiniteSource([numbered(0, "test")], name="file", seed=0, limit=None)
    source = FiniteSource([numbered(0, "train")], name="file", seed=0, limit=None)
    with pytest.raises(TaskError, match="in the validation split"):
        source.held_out("validation", 4)
    with pytest.raises(TaskError, match=r"tasks.limit = 3, but file has 1 train tasks"):
        FiniteSource([numbered(0, "train")], name="file", seed=0, limit=3)


# ── generated sources ────────────────────────────────────────────────────────────────────────────


def test_batch_is_a_pure_function_of_seed_step_and_size() -> None:
    space = numbers(10**20)
    source = GeneratedSource(space, seed=4, limit=None)
    later = [source.batch(step, 8) for step in (9, 3, 0)]
    fresh = GeneratedSource(space, seed=4, limit=None)
    assert later == [fresh.batch(step, 8) for step in (9, 3, 0)]
    assert source.batch(3, 8) != source.batch(4, 8)
    assert source.batch(3, 8) != GeneratedSource(space, seed=5, limit=None).batch(3, 8)
    assert source.batch(3, 4) == source.batch(3, 8)[:4]


@pytest.mark.parametrize("size", [50, 10**9])
def test_generated_batches_are_distinct_train_tasks(size: int) -> None:
    source = GeneratedSource(numbers(size), seed=0, limit=None)
    for step in range(50):
        batch = source.batch(step, 16)
        assert len(set(ids(batch))) == 16
        assert {task.split for task in batch} == {"train"}


def test_a_batch_larger_than_the_space_repeats_it_evenly() -> None:
    source = GeneratedSource(numbers(30, period=10), seed=0, limit=None)
    train = {numbered(i).id for i in range(10) if numbered(i).split == "train"}
    counts = Counter(ids(source.batch(0, 3 * len(train))))
    assert counts == dict.fromkeys(train, 3)


def test_generated_held_out_ends_and_is_seed_independent() -> None:
    space = numbers(1000)
    source = GeneratedSource(space, seed=0, limit=None)
    other = GeneratedSource(space, seed=1, limit=3)
    assert source.held_out("test", 7) == other.held_out("test", 7)
    assert source.held_out("test", 7) == source.held_out("test", 20)[:7]
    everything = source.held_out("validation", 10_000)
    expected = {numbered(i).id for i in range(1000) if numbered(i).split == "validation"}
    assert set(ids(everything)) == expected and len(everything) == len(expected)


def test_limit_of_a_generator() -> None:
    item = GeneratedSource(numbers(10**9), seed=0, limit=1)
    assert len(set(ids(item.batch(0, 6) + item.batch(7, 6)))) == 1
    five = GeneratedSource(numbers(10**9), seed=0, limit=5)
    assert set(ids(five.batch(0, 5))) == set(ids(five.batch(1, 5)))
    # The limited prompts do not depend on the seed, only their order does.
    assert set(ids(GeneratedSource(numbers(10**9), seed=8, limit=5).batch(0, 5))) == set(
        ids(five.batch(0, 5))
    )
    by_seed = [GeneratedSource(numbers(10**9), seed=seed, limit=1, limit_by="seed")
               for seed in (0, 0, 1, 2)]  # fmt: skip
    prompts = [set(ids(s.batch(0, 3) + s.batch(4, 3) + s.held_out("train", 3))) for s in by_seed]
    assert prompts[0] == prompts[1] and len(set().union(*prompts)) == 3
    assert all(s.held_out("test", 5) == item.held_out("test", 5) for s in by_seed)


def test_tiny_spaces_end_with_an_error() -> None:
    only_test = TaskSpace(
        name="tasks.test", size=3, split=lambda i: "test", task=lambda i: numbered(i, "test")
    )
    with pytest.raises(TaskError, match=r"tasks.test: none of its 3 tasks falls into the train"):
        GeneratedSource(only_test, seed=0, limit=None)
    source = GeneratedSource(numbers(2), seed=0, limit=None)
    with pytest.raises(TaskError, match=r"validation split. Choose a larger space"):
        source.held_out("validation", 1)
    with pytest.raises(TaskError, match=r"tasks.limit = 9, but tasks.test has 2 train tasks"):
        GeneratedSource(numbers(2), seed=0, limit=9)


def test_system_prompt_comes_first_and_once() -> None:
    task = add_system_message(numbered(0), "Be kind.")
    assert [m.role for m in task.messages] == ["system", "user"]
    assert task.messages[0].content == "Be kind."
    assert task.id == numbered(0).id
    assert add_system_message(numbered(0), None) == numbered(0)
    with pytest.raises(
        TaskError, match=r"tasks.system_prompt is set.*already has a system message"
    ):
        add_system_message(task, "Again.")


def test_two_tasks_of_one_id_are_refused() -> None:
    """Tasks are matched by id: the second would silently be left out."""
    space = TaskSpace(
        name="tasks.test",
        size=4,
        split=lambda _: "train",
        task=lambda index: replace(numbered(index, "train"), id="same"),
    )
    source = GeneratedSource(space, seed=0, limit=None)
    with pytest.raises(TaskError, match=r"task\(\d\) and task\(\d\) have one id, 'same'.*hash of"):
        source.batch(0, 4)


def test_held_out_sets_take_the_strata_in_turn() -> None:
    space = replace(numbers(3000), stratum=lambda index: index % 3, num_strata=3)
    source = GeneratedSource(space, seed=0, limit=None)
    number_of = {numbered(n).id: n for n in range(3000)}
    tasks = source.held_out("test", 60)
    assert [number_of[task.id] % 3 for task in tasks] == [0, 1, 2] * 20
    assert len(set(ids(tasks))) == 60 and {task.split for task in tasks} == {"test"}
    # Smaller sets are the first tasks of larger ones, and no stratum is ahead by more than one.
    assert source.held_out("test", 20) == tasks[:20]
    # Within a stratum the order is that of a space without strata.
    plain = GeneratedSource(numbers(3000), seed=0, limit=None).held_out("test", 400)
    for stratum in range(3):
        expected = [task for task in plain if number_of[task.id] % 3 == stratum][:20]
        assert [task for task in tasks if number_of[task.id] % 3 == stratum] == expected


def test_strata_stay_equally_large_where_one_runs_out() -> None:
    space = replace(numbers(200), stratum=lambda index: int(index < 20), num_strata=2)
    tasks = GeneratedSource(space, seed=0, limit=None).held_out("test", 100)
    number_of = {numbered(n).id: n for n in range(200)}
    num_rare = sum(split_of(f"task {n}") == "test" for n in range(20))
    assert sum(number_of[task.id] < 20 for task in tasks) == num_rare > 0
    assert len(tasks) == 2 * num_rare


def test_training_batches_know_no_strata() -> None:
    space = replace(numbers(3000), stratum=lambda index: index % 3, num_strata=3)
    sources = [GeneratedSource(s, seed=4, limit=None) for s in (space, numbers(3000))]
    assert sources[0].batch(2, 16) == sources[1].batch(2, 16)
