"""Generated tasks that do not fit: an error, or passed over and counted."""

from __future__ import annotations

import pytest

from courtside.errors import TaskError
from courtside.recipe.tasks import ArithmeticTasks, InstructionTasks
from courtside.tasks.base import PromptLimit
from courtside.tasks.loading import make_task_source
from courtside.types import Task


def length(task: Task) -> int:
    return len(task.messages[-1].content)


def lengths(config: InstructionTasks, limit: PromptLimit | None) -> list[int]:
    source = make_task_source(config, 0, limit)
    tasks = [*source.batch(0, 40), *source.held_out("test", 40)]
    return [length(task) for task in tasks]


def test_those_that_fit_take_the_place_of_the_others() -> None:
    config = InstructionTasks(kind="instructions", overlong_prompts="drop")
    free = sorted(lengths(config, None))
    limit = PromptLimit(length=length, max_tokens=free[len(free) // 2])
    source = make_task_source(config, 0, limit)
    tasks = [*source.batch(0, 40), *source.held_out("test", 40)]
    assert len(tasks) == 80 and max(map(length, tasks)) <= limit.max_tokens
    assert source.num_dropped > 0
    assert [*source.batch(0, 40), *source.held_out("test", 40)] == tasks


def test_an_error_by_default() -> None:
    limit = PromptLimit(length=length, max_tokens=60)
    with pytest.raises(TaskError, match="overlong_prompts = 'drop'"):
        make_task_source(InstructionTasks(kind="instructions"), 0, limit).batch(0, 40)


def test_a_space_in_which_nothing_fits_is_given_up() -> None:
    config = ArithmeticTasks(kind="arithmetic", digits=9, overlong_prompts="drop")
    with pytest.raises(TaskError, match="1000 tasks in a row do not fit"):
        make_task_source(config, 0, PromptLimit(length=length, max_tokens=3)).batch(0, 4)
