from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from courtside.engines.base import Sampling
from courtside.errors import TaskError
from courtside.teacher.routing import RoutedTeachers
from courtside.types import Sample, Target, Task, Trajectory

Make = Callable[..., Any]


class Stub:
    """A teacher that signs everything with its name."""

    def __init__(self, name: str):
        self.name, self.scored_ids = name, []

    def score(self, trajectories: Sequence[Trajectory]) -> dict[str, Target]:
        self.scored_ids.append([t.id for t in trajectories])
        silent = "silent" in self.name
        return {
            t.id: Target(
                teacher=self.name, context=None, logp_T=torch.zeros(t.num_completion_tokens)
            )
            for t in trajectories
            if not silent
        }

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        return [
            Sample(token_ids=(1,), logp=(0.0,), stop="eos", text=f"{self.name} {task.id} {seed}")
            for task, seed in zip(tasks, seeds, strict=True)
        ]


def routed(*tags: str, default: str | None = None) -> Any:
    return RoutedTeachers({tag: Stub(tag) for tag in tags}, default)  # type: ignore[dict-item]


def test_the_first_tag_with_a_route_decides(make_task: Make) -> None:
    teachers = routed("maths", "code")
    assert teachers.route(make_task(tags=("maths",))) == "maths"
    assert teachers.route(make_task(tags=("code", "maths"))) == "code"
    assert teachers.route(make_task(tags=("easy", "maths", "code"))) == "maths"


def test_the_default_takes_what_fits_no_route(make_task: Make) -> None:
    teachers = routed("maths", "code", default="code")
    assert teachers.route(make_task(tags=("poems",))) == "code"
    assert teachers.route(make_task()) == "code"
    assert teachers.route(make_task(tags=("maths",))) == "maths"


def test_without_default_a_task_without_route_is_an_error(
    make_task: Make, make_trajectory: Make
) -> None:
    teachers, task = routed("maths", "code"), make_task("odd", tags=("poems",))
    with pytest.raises(TaskError, match=r"task odd: none of its tags \['poems'\] has a route"):
        teachers.route(task)
    with pytest.raises(TaskError):
        teachers.score([make_trajectory("a", task)])
    with pytest.raises(TaskError):
        teachers.write([task], Sampling(max_new_tokens=1), [0])


def test_each_trajectory_is_scored_by_its_teacher_in_one_call(
    make_task: Make, make_trajectory: Make
) -> None:
    teachers = routed("maths", "code", "silent")
    batch = [
        make_trajectory(id, make_task(id, tags=(tag,)))
        for id, tag in [("a", "code"), ("b", "maths"), ("c", "silent"), ("d", "code")]
    ]
    targets = teachers.score(batch)
    assert {id: target.teacher for id, target in targets.items()} == {
        "a": "code",
        "b": "maths",
        "d": "code",
    }
    assert teachers.routes["code"].scored_ids == [["a", "d"]]


def test_answers_come_back_in_order_with_their_own_seeds(make_task: Make) -> None:
    teachers = routed("maths", "code")
    tasks = [
        make_task(id, tags=(tag,)) for id, tag in zip("abcd", ["code", "maths"] * 2, strict=True)
    ]
    samples = teachers.write(tasks, Sampling(max_new_tokens=1), [10, 11, 12, 13])
    assert [s.text for s in samples] == ["code a 10", "maths b 11", "code c 12", "maths d 13"]
