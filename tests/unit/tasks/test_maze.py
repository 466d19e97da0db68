from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny_model import tiny_tokenizer

from courtside.chat.template import ChatTemplate
from courtside.recipe.tasks import MazeTasks
from courtside.tasks.graders import grade
from courtside.tasks.loading import make_task_source
from courtside.tasks.maze import COLUMNS, ROWS, find_distances, make_map, maze_space
from courtside.types import Task

SEEDS = st.integers(1, 50)


def config(**fields: object) -> MazeTasks:
    return MazeTasks.model_validate({"kind": "maze", **fields})


def is_passed(task: Task, response: str) -> bool:
    result = grade(task, response)
    assert result is not None
    return result.passed


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_a_map_is_a_tree_over_all_cells(seed: int) -> None:
    """Connected with one edge fewer than cells, so every shortest way is the only one."""
    neighbors = make_map(seed)
    assert set(neighbors) == {column + row for column in COLUMNS for row in ROWS}
    edges = {frozenset((a, b)) for a, open_cells in neighbors.items() for b in open_cells}
    assert len(edges) == len(neighbors) - 1
    assert find_distances(seed, "A0").keys() == neighbors.keys()
    for a, b in edges:
        assert abs(COLUMNS.index(a[0]) - COLUMNS.index(b[0])) + abs(int(a[1]) - int(b[1])) == 1


@pytest.mark.parametrize("fields", [{}, {"noise": 0.2}, {"detour": 6}, {"path_lengths": [34, 38]}])
def test_every_completion_arrives_and_a_wrong_one_does_not(fields: dict[str, object]) -> None:
    source = make_task_source(config(**fields), seed=0)
    for task in (*source.batch(0, 30), *source.held_out("test", 10)):
        assert task.completion is not None and task.answer is not None
        assert is_passed(task, task.completion)
        cells = task.completion.split()
        assert not is_passed(task, " ".join(cells[:-1])), "it ends before the goal"
        assert not is_passed(task, f"{task.completion} {cells[-2] if len(cells) > 1 else 'A0'}")
        assert not is_passed(task, "")
        assert not is_passed(task, "nonsense")
        if len(cells) > 3:
            assert not is_passed(task, " ".join([*cells[:1], *cells[2:]])), "it jumps"


def test_a_wrong_turn_is_mended_by_coming_back_but_not_forever() -> None:
    task = make_task_source(config(), seed=0).batch(0, 1)[0]
    assert task.completion is not None
    first, second, *remaining = task.completion.split()
    assert is_passed(task, " ".join([first, second, first, second, *remaining]))
    assert not is_passed(task, " ".join([*[first, second] * 40, *remaining]))


def test_ways_have_the_lengths_that_were_asked_for() -> None:
    space = maze_space(config(path_lengths=[10, 14]))
    for index in range(0, space.size, 97):
        task = space.task(index)
        assert task.completion is not None
        assert 10 <= len(task.completion.split()) - 1 <= 14
        assert task.split == space.split(index)


def test_noise_leaves_the_way_and_finds_back() -> None:
    noisy = maze_space(config(noise=0.3))
    plain = maze_space(config())
    num_longer = 0
    for index in range(0, noisy.size, 301):
        task = noisy.task(index)
        assert task.completion is not None
        shortest = plain.task(index // 16).completion
        assert shortest is not None
        num_longer += len(task.completion) > len(shortest)
    assert num_longer > 0.5 * len(range(0, noisy.size, 301))


def test_a_detour_is_a_response_prefix_off_the_way_that_is_not_trained() -> None:
    space = maze_space(config(detour=6))
    num_off_the_way = 0
    for index in range(0, space.size, 301):
        task = space.task(index)
        response_prefix, goal = task.messages[-1], task.answer
        assert response_prefix.role == "assistant" and goal is not None
        cells = response_prefix.content.split()
        assert goal not in cells
        neighbors, distances = make_map(1), find_distances(1, goal)
        assert all(b in neighbors[a] for a, b in pairwise(cells))
        num_off_the_way += any(distances[b] > distances[a] for a, b in pairwise(cells))
        assert task.completion is not None and task.completion.startswith(" ")
    assert num_off_the_way > 10
    template = ChatTemplate(tiny_tokenizer(), name="tiny", eos_ids={1})
    prompt = template.text(template.prompt_ids(task.messages))
    assert prompt.endswith(response_prefix.content)


def test_a_held_out_pair_is_held_out_with_any_detour() -> None:
    plain = {t.messages[0].content for t in make_task_source(config(), 0).held_out("test", 500)}
    detours = make_task_source(config(detour=4), 0).batch(0, 400)
    assert not plain & {task.messages[0].content for task in detours}


def test_lengths_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="the least comes first"):
        config(path_lengths=[9, 3])
