"""The stored steps of a run, also of one that goes on: read again only when a file is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from courtside.report.folder.folder import RunFolder
from courtside.report.folder.outlines import StepTable, read_texts
from courtside.report.folder.parquet import StoredTrajectory
from courtside.viewer.serialize import Tree, listed

Stamp = tuple[int, int]
"""When a file was changed, and its size."""
Kept = TypeVar("Kept")

NUM_TABLES = 2
"""Steps that are held whole: the one that is read, and the one before it."""


class StoredSteps:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lists: dict[int, tuple[Stamp, list[Tree]]] = {}
        self._tables: dict[int, tuple[Stamp, StepTable]] = {}
        self._texts: dict[int, tuple[Stamp, dict[str, str]]] = {}

    def numbers(self) -> list[int]:
        return self._folder.trajectory_steps()

    def rows(self, step: int) -> list[Tree]:
        """The list of a step's trajectories; light enough to be kept of all steps."""
        return self._kept(
            self._lists,
            step,
            lambda: [listed(one) for one in self._folder.outlines(step)],
        )

    def one(self, step: int, id: str) -> StoredTrajectory | None:
        table = self._kept(
            self._tables, step, lambda: StepTable(self._folder.stored_file(step), step)
        )
        _forget(self._tables, NUM_TABLES)
        return table.find(id)

    def containing(self, step: int, words: str) -> list[str]:
        """Ids of the trajectories in which all these words occur, in any turn, in any case."""
        texts = self._kept(self._texts, step, lambda: _lower(self._folder, step))
        _forget(self._texts, 1)
        wanted = words.lower().split()
        return [id for id, text in texts.items() if all(word in text for word in wanted)]

    def _kept(
        self, store: dict[int, tuple[Stamp, Kept]], step: int, read: Callable[[], Kept]
    ) -> Kept:
        file = self._folder.stored_file(step).stat()
        stamp = (file.st_mtime_ns, file.st_size)
        if step not in store or store[step][0] != stamp:
            store[step] = (stamp, read())
        store[step] = store.pop(step)  # the last one used stands last
        return store[step][1]


def _forget(store: dict[int, Any], limit: int) -> None:
    while len(store) > limit:
        del store[next(iter(store))]


def _lower(folder: RunFolder, step: int) -> dict[str, str]:
    texts = read_texts(folder.stored_file(step))
    return {id: f"{id}\n{text}".lower() for id, text in texts.items()}
