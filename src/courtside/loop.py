"""The algorithm. Everything else in this package serves these lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from courtside.run import Run
from courtside.runtime import Runtime

if TYPE_CHECKING:
    from courtside.follower import Follower


def train_loop(parts: Runtime, run: Run | Follower) -> None:
    """The student samples, the teacher scores the same tokens, the student is updated."""
    with run.handle_exit():
        for step in run.remaining_steps():
            train_step(parts, run, step)


def train_step(parts: Runtime, run: Run | Follower, step: int) -> None:
    """A function of its own, so that a teacher's hidden states, as large as the batch, are freed
    before the next step."""
    tasks = parts.tasks.batch(step, parts.recipe.train.prompts_per_step)
    with run.phase("rollout"):
        trajectories = parts.rollout(tasks, step)  # the student samples
    with run.phase("drafts"):
        drafts = parts.drafts(trajectories)  # ranked, repaired or criticized, where asked for
    with run.phase("reader"):
        reading = parts.reader(drafts.trajectories)  # hints, for a teacher's context only
    with run.phase("teacher"):
        scored = parts.teacher(drafts.trajectories, reading.hints)  # same tokens, other context
    with run.phase("update"), run.save_failed_batch(step, scored):
        update = parts.student.step(step, scored)  # one optimizer step, any mix of losses
        for average in parts.averages.values():
            average.update()  # a teacher that is a moving average of the student
        results = (step, scored, update, reading.counts, drafts)
        with run.save_if_servers_fail(*results):
            parts.engine.load_weights(step + 1)  # rollouts follow the student
    run.record(*results)
