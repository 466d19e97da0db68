"""Trajectories stored by another run as tasks: one each, under the trajectory's id.

Only outlines are held in memory; token ids are loaded when their step comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from courtside.errors import TaskError, UserError
from courtside.recipe.tasks import TrajectoryTasks
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import hints_file_id
from courtside.report.folder.outlines import Outline
from courtside.tasks.base import FiniteSource
from courtside.types import Source, Task, Trajectory


class ReplaySource(FiniteSource):
    """Tasks that stand for stored trajectories; `load` returns the trajectories."""

    def __init__(
        self, outlines: Sequence[Outline], folder: RunFolder, *, seed: int, limit: int | None
    ) -> None:
        # Samples of one prompt share their task, so the trajectory's id identifies a task.
        trajectories = [outline.trajectory for outline in outlines]
        tasks = [replace(t.task, id=t.id, split="train") for t in trajectories]
        super().__init__(tasks, name=f"tasks.path = {str(folder.path)!r}", seed=seed, limit=limit)
        self._folder = folder
        self._step = {outline.trajectory.id: outline.step for outline in outlines}
        self.sources: frozenset[Source] = frozenset(t.source for t in trajectories[:limit])
        """Who chose their tokens."""
        self.assistant_turns: dict[str, list[int]] = {}
        """By the ids that a hints file may name."""
        self.trajectories_of: dict[str, list[str]] = {}
        """The same: ids of trajectories."""
        self.event_kinds = {
            event.kind for t in trajectories for turn in t.turns for event in turn.events
        }
        for t in trajectories[:limit]:
            turns = [i for i, turn in enumerate(t.turns) if turn.role == "assistant"]
            for name in {t.id, hints_file_id(t)}:
                self.assistant_turns.setdefault(name, turns)
                self.trajectories_of.setdefault(name, []).append(t.id)

    def batch(self, step: int, size: int) -> tuple[Task, ...]:
        """No duplicates, since records are matched by id; fewer than `size` where an epoch ends
        within the batch."""
        tasks = super().batch(step, size)
        return tuple({task.id: task for task in tasks}.values())

    def load(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories in the order of the ids; each step's file is opened once."""
        by_id: dict[str, Trajectory] = {}
        for step in sorted({self._step[id] for id in ids}):
            step_ids = {id for id in ids if self._step[id] == step}
            stored = self._folder.trajectories(step, step_ids)
            by_id |= {s.trajectory.id: s.trajectory for s in stored}
        if missing := sorted(set(ids) - by_id.keys()):
            raise TaskError(
                f"{self._name}: trajectory {missing[0]} is gone from step "
                f"{self._step[missing[0]]}: the run was trained again meanwhile. Start again when "
                "it is done"
            )
        return [by_id[id] for id in ids]


def make_replay_source(
    config: TrajectoryTasks,
    *,
    seed: int,
    max_tokens: int | None = None,
    hinted: Collection[str] = frozenset(),
) -> ReplaySource:
    """`max_tokens`: of a trajectory; None: no limit. `hinted`: ids that hints name, of trajectories
    or of chat logs."""
    folder = open_stored_run(config.path)
    outlines = _outlines(folder, config.steps)
    if config.select == "hinted":
        outlines = _with_hints(outlines, hinted, config.path)
    fitting = [
        outline for outline in outlines if max_tokens is None or outline.num_tokens <= max_tokens
    ]
    if len(fitting) < len(outlines) and (config.overlong_prompts == "error" or not fitting):
        longest = max(outlines, key=lambda outline: outline.num_tokens)
        raise TaskError(
            f"tasks.path = {str(config.path)!r}: trajectory {longest.trajectory.id} has "
            f"{longest.num_tokens} tokens and the model takes {max_tokens}. Set "
            "tasks.overlong_prompts = "
            "'drop' to leave such trajectories out and count them; nothing is cut silently"
        )
    source = ReplaySource(fitting, folder, seed=seed, limit=config.limit)
    source.num_dropped = len(outlines) - len(fitting)
    return source


def open_stored_run(path: Path) -> RunFolder:
    try:
        return RunFolder.read(path)
    except UserError as error:
        raise TaskError(f"tasks.path: {error}") from None


def list_stored_steps(folder: RunFolder, steps: Sequence[int] | None) -> list[int]:
    """The steps that were asked for, or all; a TaskError where one has no trajectories."""
    stored_steps = folder.trajectory_steps()
    where = f"tasks.path = {str(folder.path)!r}"
    if not stored_steps:
        raise TaskError(
            f"{where}: the run has stored no trajectories yet. Let it train a step, or name another"
        )
    if missing := sorted(set(steps or ()) - set(stored_steps)):
        raise TaskError(
            f"tasks.steps: {where} has no trajectories of step {missing[0]}; stored are "
            f"{len(stored_steps)} steps, {stored_steps[0]} to {stored_steps[-1]}. Name those, or "
            "leave `steps` out; run.trajectories_every of that run decides which are kept"
        )
    return sorted(steps or stored_steps)


def _outlines(folder: RunFolder, steps: Sequence[int] | None) -> list[Outline]:
    where = f"tasks.path = {str(folder.path)!r}"
    # A run that replayed trajectories itself has stored the same ones in every epoch.
    by_id: dict[str, Outline] = {}
    for step in list_stored_steps(folder, steps):
        for outline in folder.outlines(step):
            by_id.setdefault(outline.trajectory.id, outline)
    if not by_id:
        raise TaskError(f"{where}: the stored steps are empty. Name another run")
    return list(by_id.values())


def _with_hints(outlines: Sequence[Outline], hinted: Collection[str], path: Path) -> list[Outline]:
    names = set(hinted)
    chosen = [
        outline
        for outline in outlines
        if names & {outline.trajectory.id, hints_file_id(outline.trajectory)}
    ]
    if not chosen:
        raise TaskError(
            f"tasks.select = 'hinted': the hints name {len(names)} trajectories, and none of the "
            f"{len(outlines)} of {path}. Write a hint for one of them (`trajectory` is its id), or "
            "use select = 'all'"
        )
    return chosen
