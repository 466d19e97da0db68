"""Nested phases count each second once; FLOPs follow the formulas."""

from __future__ import annotations

import pytest

from courtside.chat.messages import make_trajectory
from courtside.report.costs import (
    CostMeter,
    ModelSizes,
    PhaseCost,
    StepCost,
    forward_flops,
    training_flops,
)
from courtside.types import Message, Sample, Scored, Task, TokenUsage, Update


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_flops():
    assert forward_flops(10, 3) == 60
    # All weights trained: three times a forward pass. Few trained: about twice.
    assert training_flops(10, 3, trainable=10) == 180
    assert training_flops(10, 3, trainable=1) == 126


def test_a_nested_phase_pauses_the_outer_one():
    clock = Clock()
    meter = CostMeter(clock)
    with meter.phase("evaluate"):
        clock.now += 1
        assert meter.current_phase == "evaluate"
        with meter.phase("rollout"):
            clock.now += 10
        clock.now += 2
    clock.now += 50  # between phases
    with meter.phase("rollout"):
        clock.now += 4
    assert {name: cost.seconds for name, cost in meter.totals().items()} == {
        "evaluate": 3.0,
        "rollout": 14.0,
    }
    assert meter.current_phase is None


def test_a_phase_that_raises_is_charged():
    clock = Clock()
    meter = CostMeter(clock)
    with pytest.raises(KeyError), meter.phase("update"):
        clock.now += 3
        raise KeyError
    assert meter.totals()["update"].seconds == 3.0


def test_laps_sum_to_the_totals_after_a_restore():
    clock = Clock()
    meter = CostMeter(clock)
    meter.restore({"rollout": PhaseCost(seconds=7.0, output_tokens=5), "teacher": PhaseCost()})
    assert meter.lap() == {}
    with meter.phase("rollout"):
        clock.now += 2
    meter.add("rollout", input_tokens=3, output_tokens=4, flops=6.0)
    assert meter.lap() == {"rollout": 2.0}
    with meter.phase("update"):
        clock.now += 1
        assert meter.lap() == {"update": 1.0}
        clock.now += 1
    assert meter.lap() == {"update": 1.0}
    assert meter.totals()["rollout"] == PhaseCost(
        seconds=9.0, input_tokens=3, output_tokens=9, flops=6.0
    )


def test_readers_and_drafts_are_part_of_a_step():
    meter = CostMeter(Clock())
    update = Update(step=0, loss=0.0, components={}, metrics={}, num_tokens={}, student_logp={})
    cost = meter.add_step(
        [],
        update,
        {"model/input_tokens": 10, "model/output_tokens": 5},
        sizes=ModelSizes(student=100, trained=100, teachers={"large": 1000}, reader=100),
        is_recorded=False,
        draft_usage={
            "large": TokenUsage(input_tokens=7, output_tokens=2),
            "endpoint": TokenUsage(input_tokens=3, output_tokens=1),
        },
    )
    totals = meter.totals()
    assert totals["drafts"] == PhaseCost(
        input_tokens=10, output_tokens=3, flops=forward_flops(1000, 9)
    )
    assert totals["reader"].flops == forward_flops(100, 15)
    assert cost == StepCost(
        student_tokens=0, teacher_tokens=13, flops=forward_flops(1000, 9) + forward_flops(100, 15)
    )


@pytest.mark.parametrize(
    ("teachers", "route", "size"),
    [
        ({"large": 1000}, None, 1000),
        ({"math:large": 1000, "code:larger": 2000}, "code", 2000),
        ({}, None, 100),
    ],
)
def test_a_teacher_that_scores_nothing_writes_at_its_own_size(
    teachers: dict[str, int], route: str | None, size: int
) -> None:
    task = Task(id="t", split="train", messages=(Message(role="user", content="?"),))
    answer = make_trajectory(
        task, (1, 2), Sample(text="x", token_ids=(3,), logp=(0.0,), stop="eos"),
        id="a", source="teacher", policy_version=0, temperature=1.0, grade=None,
    )  # fmt: skip
    sizes = ModelSizes(
        student=100, trained=100, teachers=teachers, reader=0, route_of=lambda tags: route
    )
    meter = CostMeter(Clock())
    update = Update(step=0, loss=0.0, components={}, metrics={}, num_tokens={}, student_logp={})
    cost = meter.add_step(
        [Scored(trajectory=answer, target=None)], update, {}, sizes=sizes, is_recorded=False
    )
    assert cost == StepCost(student_tokens=0, teacher_tokens=3, flops=forward_flops(size, 3))
    assert "teacher" not in meter.totals()
