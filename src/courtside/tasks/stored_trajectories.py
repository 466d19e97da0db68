"""What another run has stored: a task for each trajectory, named by the trajectory's own id.

Only what a step's file says of its trajectories is held; a trajectory is read when its step comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from courtside.errors import TaskError, UserError
from courtside.recipe import TrajectoryTasks
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import hinted_id
from courtside.report.folder.outlines import Outline
from courtside.tasks.base import FiniteSource
from courtside.types import Source, Task, Trajectory


class ReplaySource(FiniteSource):
    """Tasks that stand for stored trajectories: `read` gives those."""

    def __init__(
        self, stored: Sequence[Outline], folder: RunFolder, *, seed: int, limit: int | None
    ) -> None:
        # Samples of one prompt share their task, so a task goes by its trajectory's id here.
        own = [one.trajectory for one in stored]
        tasks = [replace(t.task, id=t.id, split="train") for t in own]
        super().__init__(tasks, name=f"tasks.path = {str(folder.path)!r}", seed=seed, limit=limit)
        self._folder = folder
        self._step = {one.trajectory.id: one.step for one in stored}
        self.sources: frozenset[Source] = frozenset(t.source for t in own[:limit])
        """Who wrote them."""

    def batch(self, step: int, size: int) -> tuple[Task, ...]:
        """Never the same one twice: things are matched by id. Where an epoch ends within a batch,
        or the batch is larger than all of them, it has fewer."""
        drawn = super().batch(step, size)
        return tuple({task.id: task for task in drawn}.values())

    def load(self, ids: Sequence[str]) -> list[Trajectory]:
        """As they were stored, in the order of the ids; a step's file is opened once."""
        found: dict[str, Trajectory] = {}
        for step in sorted({self._step[id] for id in ids}):
            wanted = {id for id in ids if self._step[id] == step}
            stored = self._folder.trajectories(step, wanted)
            found |= {one.trajectory.id: one.trajectory for one in stored}
        if missing := sorted(set(ids) - found.keys()):
            raise TaskError(
                f"{self._name}: trajectory {missing[0]} is gone from step "
                f"{self._step[missing[0]]}: the run was trained again meanwhile. Start again when "
                "it is done"
            )
        return [found[id] for id in ids]


def make_replay_source(
    config: TrajectoryTasks,
    *,
    seed: int,
    max_tokens: int | None = None,
    hinted: Collection[str] = frozenset(),
) -> ReplaySource:
    """`max_tokens`: how long a trajectory may be; None: not asked. `hinted`: the ids that hints
    name, of trajectories or of recorded conversations."""
    folder = _folder(config.path)
    stored = _outlines(folder, config.steps)
    if config.select == "hinted":
        stored = _with_hints(stored, hinted, config.path)
    fitting = [one for one in stored if max_tokens is None or one.num_tokens <= max_tokens]
    if len(fitting) < len(stored) and (config.overlong_prompts == "error" or not fitting):
        longest = max(stored, key=lambda one: one.num_tokens)
        raise TaskError(
            f"tasks.path = {str(config.path)!r}: trajectory {longest.trajectory.id} has "
            f"{longest.num_tokens} tokens and the model takes {max_tokens}. Set "
            "tasks.overlong_prompts = "
            "'drop' to leave such trajectories out and count them; nothing is cut silently"
        )
    source = ReplaySource(fitting, folder, seed=seed, limit=config.limit)
    source.num_dropped = len(stored) - len(fitting)
    return source


def _folder(path: Path) -> RunFolder:
    try:
        return RunFolder.read(path)
    except UserError as error:
        raise TaskError(f"tasks.path: {error}") from None


def _outlines(folder: RunFolder, steps: Sequence[int] | None) -> list[Outline]:
    stored = folder.trajectory_steps()
    where = f"tasks.path = {str(folder.path)!r}"
    if not stored:
        raise TaskError(
            f"{where}: the run has stored no trajectories yet. Let it train a step, or name another"
        )
    if missing := sorted(set(steps or ()) - set(stored)):
        raise TaskError(
            f"tasks.steps: {where} has no trajectories of step {missing[0]}; stored are "
            f"{len(stored)} steps, {stored[0]} to {stored[-1]}. Name those, or leave `steps` out; "
            "run.trajectories_every of that run decides which are kept"
        )
    # A run that was itself trained on stored ones has the same again in every epoch.
    found: dict[str, Outline] = {}
    for step in sorted(steps or stored):
        for one in folder.outlines(step):
            found.setdefault(one.trajectory.id, one)
    if not found:
        raise TaskError(f"{where}: the stored steps are empty. Name another run")
    return list(found.values())


def _with_hints(stored: Sequence[Outline], hinted: Collection[str], path: Path) -> list[Outline]:
    names = set(hinted)
    chosen = [one for one in stored if names & {one.trajectory.id, hinted_id(one.trajectory)}]
    if not chosen:
        raise TaskError(
            f"tasks.select = 'hinted': the hints name {len(names)} trajectories, and none of the "
            f"{len(stored)} of {path}. Write a hint for one of them (`trajectory` is its id), or "
            "use only = 'all'"
        )
    return chosen
