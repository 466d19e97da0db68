"""What another run has stored: a task for each trajectory, named by the trajectory's own id.

Only what a step's file says of its trajectories is held; a trajectory is read when its step comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from courtside.config import TrajectoryTasks
from courtside.errors import TaskError, UserError
from courtside.report.folder import RunFolder
from courtside.report.parquet import Entry
from courtside.tasks.base import FiniteSource
from courtside.types import Source, Task, Trajectory


class StoredSource(FiniteSource):
    """Tasks that stand for stored trajectories: `read` gives those."""

    def __init__(
        self, entries: Sequence[Entry], folder: RunFolder, *, seed: int, limit: int | None
    ) -> None:
        # Samples of one prompt share their task, so a task goes by its trajectory's id here.
        tasks = [replace(entry.task, id=entry.id, split="train") for entry in entries]
        super().__init__(tasks, name=f"tasks.path = {str(folder.path)!r}", seed=seed, limit=limit)
        self._folder = folder
        self._step = {entry.id: entry.step for entry in entries}
        self.sources: frozenset[Source] = frozenset(entry.source for entry in entries[:limit])
        """Who wrote them."""

    def batch(self, step: int, size: int) -> tuple[Task, ...]:
        """Never the same one twice: things are matched by id. Where an epoch ends within a batch,
        or the batch is larger than all of them, it has fewer."""
        drawn = super().batch(step, size)
        return tuple({task.id: task for task in drawn}.values())

    def read(self, ids: Sequence[str]) -> list[Trajectory]:
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


def stored_source(
    config: TrajectoryTasks,
    *,
    seed: int,
    max_tokens: int | None = None,
    hinted: Collection[str] = frozenset(),
) -> StoredSource:
    """`max_tokens`: how long a trajectory may be; None: not asked. `hinted`: the ids that hints
    name, of trajectories or of recorded conversations."""
    folder = _folder(config.path)
    entries = _entries(folder, config.steps)
    if config.only == "hinted":
        entries = _with_hints(entries, hinted, config.path)
    fitting = [e for e in entries if max_tokens is None or e.num_tokens <= max_tokens]
    if len(fitting) < len(entries) and (config.overlong == "error" or not fitting):
        longest = max(entries, key=lambda entry: entry.num_tokens)
        raise TaskError(
            f"tasks.path = {str(config.path)!r}: trajectory {longest.id} has {longest.num_tokens} "
            f"tokens and the model takes {max_tokens}. Set tasks.overlong = 'drop' to leave such "
            "trajectories out and count them; nothing is cut silently"
        )
    source = StoredSource(fitting, folder, seed=seed, limit=config.limit)
    source.num_dropped = len(entries) - len(fitting)
    return source


def _folder(path: Path) -> RunFolder:
    try:
        return RunFolder.read(path)
    except UserError as error:
        raise TaskError(f"tasks.path: {error}") from None


def _entries(folder: RunFolder, steps: Sequence[int] | None) -> list[Entry]:
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
    found: dict[str, Entry] = {}
    for step in sorted(steps or stored):
        for entry in folder.entries(step):
            found.setdefault(entry.id, entry)
    if not found:
        raise TaskError(f"{where}: the stored steps are empty. Name another run")
    return list(found.values())


def _with_hints(entries: Sequence[Entry], hinted: Collection[str], path: Path) -> list[Entry]:
    chosen = [
        entry
        for entry in entries
        if entry.id in hinted or (entry.source == "dataset" and entry.task.id in hinted)
    ]
    if not chosen:
        raise TaskError(
            f"tasks.only = 'hinted': the hints name {len(hinted)} trajectories, and none of the "
            f"{len(entries)} of {path}. Write a hint for one of them (`trajectory` is its id), or "
            "use only = 'all'"
        )
    return chosen
