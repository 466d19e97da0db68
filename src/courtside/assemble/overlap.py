"""Rollouts ahead of the update (`rollout.server.max_staleness`).

They run in a thread of their own, so they have a tokenizer, templates and progress of their own,
too: none of these may be used by two threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from courtside.assemble.chat_templates import make_student_template
from courtside.assemble.inputs import Inputs
from courtside.chat.incremental import IncrementalTemplate
from courtside.engines.served.student import ServedStudent
from courtside.progress import ProgressMeter
from courtside.ranks import Ranks
from courtside.recipe import Recipe
from courtside.rollout.overlapped import Generated, OverlappedRollout
from courtside.rollout.shares import take_share
from courtside.tasks.base import TaskSource
from courtside.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutThread:
    """What a rollout in the thread takes in place of the parts of the main thread."""

    engine: ServedStudent
    template: IncrementalTemplate
    progress: ProgressMeter
    main_engine: ServedStudent
    main_progress: ProgressMeter
    recipe: Recipe
    tasks: TaskSource
    ranks: Ranks
    rollouts: list[OverlappedRollout[Any]] = field(default_factory=list)

    def overlap(
        self,
        generate: Callable[[Mapping[int, Task], int], Generated],
        grade: Callable[[Generated], list[Trajectory]],
    ) -> OverlappedRollout[Generated]:
        """`generate` is of a rollout that was made with these parts; `grade` runs in the main
        thread."""
        train = self.recipe.train
        rollout = OverlappedRollout(
            generate=generate,
            finish=lambda generated: sorted(grade(generated), key=attrgetter("id")),
            batch=lambda step: take_share(
                self.tasks.batch(step, train.prompts_per_step), self.ranks
            ),
            sampler=self.engine,
            find_weights=lambda: self.main_engine.weights,
            close_sampler=self.engine.pool.close,
            num_steps=train.steps,
            max_staleness=self.recipe.max_staleness,
            progress=self.main_progress,
            ahead=self.progress,
        )
        self.rollouts.append(rollout)
        return rollout

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.close()


def make_rollout_thread(
    recipe: Recipe,
    inputs: Inputs,
    engine: ServedStudent,
    *,
    progress: ProgressMeter,
    ranks: Ranks,
) -> RolloutThread:
    tokenizer, own_progress = deepcopy(inputs.tokenizer), ProgressMeter()
    fork = engine.fork(own_progress)
    fork.tokenizer = tokenizer
    template = make_student_template(recipe, tokenizer, engine.eos_ids)
    return RolloutThread(
        engine=fork,
        template=IncrementalTemplate(template),
        progress=own_progress,
        main_engine=engine,
        main_progress=progress,
        recipe=recipe,
        tasks=inputs.tasks,
        ranks=ranks,
    )
