"""What the page can request of a run and its hints file, as plain trees.

One request at a time, from any thread. Errors carry their HTTP status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import RLock
from typing import TypeVar

from courtside.errors import UserError
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import HintLimits, hints_file_id
from courtside.report.folder.outlines import StepTable, read_outlines, read_texts
from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.summary import summarize_recipe
from courtside.viewer.batches import (
    Batch,
    RequestError,
    choose_start,
    find_batch,
    held_out_batches,
    is_wrong,
    training_batches,
)
from courtside.viewer.hints import HintsEditor
from courtside.viewer.hints_recipe import hints_recipe
from courtside.viewer.serialize import (
    Tree,
    find_related,
    serialize_conversation,
    serialize_outline,
    serialize_user_hint,
)

Value = TypeVar("Value")
Cache = dict[str, tuple[tuple[int, int], Value]]
"""By batch: modification time and size of the file, and the value computed from it."""

NUM_TABLES = 2
"""Batches whose whole tables are cached."""


class RunService:
    def __init__(self, folder: RunFolder, hints: Path) -> None:
        recipe = folder.recipe()
        self._lock = RLock()
        self._folder = folder
        self._hints = HintsEditor(hints, HintLimits.of(recipe))
        self._hints_recipe = hints_recipe(recipe, run=folder.path, hints=hints)
        self._about: Tree = {
            "name": folder.path.resolve().name,
            "path": str(folder.path),
            "summary": summarize_recipe(recipe),
        }
        self._outlines: Cache[list[Tree]] = {}
        self._tables: Cache[StepTable] = {}
        self._texts: Cache[dict[str, str]] = {}

    @property
    def max_chars(self) -> int:
        """Of a hint."""
        return self._hints.limits.max_chars

    def run(self) -> Tree:
        """Cheap enough to poll: only new files are read."""
        with self._lock:
            num_hints = Counter(id for id, _ in self._hints.read())
            batches = [self._describe_batch(batch, num_hints) for batch in self._list_batches()]
            return {
                **self._about,
                "batches": batches,
                "start": choose_start(batches),
                "hints_file": self._describe_hints_file(),
            }

    def batch(self, key: str) -> Tree:
        with self._lock:
            num_hints = Counter(id for id, _ in self._hints.read())
            rows = [
                {**row, "user_hints": num_hints[row["hints_file_id"]]}
                for row in self._read_outlines(find_batch(self._folder, key))
            ]
            return {"key": key, "trajectories": rows}

    def search(self, key: str, query: str) -> Tree:
        """Ids of the trajectories whose turns contain every word of the query, in any case."""
        with self._lock:
            texts = self._cached(
                self._texts, 1, find_batch(self._folder, key), lambda b: _read_lower_texts(b.path)
            )
            terms = query.lower().split()
            ids = [id for id, text in texts.items() if all(term in text for term in terms)]
            return {"key": key, "ids": ids}

    def trajectory(self, key: str, id: str) -> Tree:
        with self._lock:
            batch = find_batch(self._folder, key)
            stored = self._find(batch, id)
            user_hints = self._hints.of_trajectory(hints_file_id(stored.trajectory))
            return {
                **serialize_conversation(stored, {} if batch.is_held_out else user_hints),
                "related": find_related(self._read_outlines(batch), id),
                "key": key,
                "batch": batch.title,
                "held_out": batch.is_held_out,
                "hints_file": self._describe_hints_file(),
            }

    def write(self, key: str, id: str, turn: int, text: str) -> Tree:
        with self._lock:
            target = self._check_turn(key, id, turn)
            try:
                hint = self._hints.write(target, turn, text)
            except UserError as error:
                raise RequestError(422, str(error)) from None
            return {
                "user_hint": serialize_user_hint(hint),
                "hints_file": self._describe_hints_file(),
            }

    def remove(self, key: str, id: str, turn: int) -> Tree:
        with self._lock:
            target = self._check_turn(key, id, turn)
            try:
                self._hints.remove(target, turn)
            except UserError as error:
                raise RequestError(422, str(error)) from None
            return {"user_hint": None, "hints_file": self._describe_hints_file()}

    def _describe_hints_file(self) -> Tree:
        hints = self._hints.read()
        return {
            "path": str(self._hints.path),
            "count": len(hints),
            "version": self._hints.version,
            "problem": self._hints.problem,
            "recipe": self._hints_recipe,
            "max_chars": self._hints.limits.max_chars,
            "max_hints": self._hints.limits.max_hints,
        }

    def _list_batches(self) -> list[Batch]:
        return [*training_batches(self._folder), *held_out_batches(self._folder)]

    def _describe_batch(self, batch: Batch, num_hints: Mapping[str, int]) -> Tree:
        tree = {"key": batch.key, "title": batch.title, "held_out": batch.is_held_out}
        try:
            rows = self._read_outlines(batch)
        except RequestError as error:
            # A resumed run has just removed the file, or it is broken.
            return {**tree, "problem": error.detail}
        return {
            **tree,
            "trajectories": len(rows),
            "errors": sum(row["errors"] > 0 for row in rows),
            "failed": sum(is_wrong(row) for row in rows),
            "hints": sum(row["hints"] > 0 for row in rows),
            "user_hints": 0
            if batch.is_held_out
            else sum(num_hints[row["hints_file_id"]] > 0 for row in rows),
        }

    def _read_outlines(self, batch: Batch) -> list[Tree]:
        """Small enough to cache all batches."""
        return self._cached(
            self._outlines, None, batch,
            lambda b: [serialize_outline(outline) for outline in read_outlines(b.path, b.step)],
        )  # fmt: skip

    def _find(self, batch: Batch, id: str) -> StoredTrajectory:
        table = self._cached(self._tables, NUM_TABLES, batch, lambda b: StepTable(b.path, b.step))
        stored = table.find(id)
        if stored is None:
            raise RequestError(
                404, f"{batch.title} has no trajectory {id!r}. Choose one from the list"
            )
        return stored

    def _check_turn(self, key: str, id: str, turn: int) -> str:
        """The id of the trajectory in the hints file, if a hint can be written for this turn."""
        batch = find_batch(self._folder, key)
        trajectory = self._find(batch, id).trajectory
        if batch.is_held_out:
            raise RequestError(
                422, f"{id} is a held-out answer: a hint would train on what is evaluated"
            )
        turns = [n for n, t in enumerate(trajectory.turns) if t.role == "assistant"]
        if turn not in turns:
            has = f"the assistant's are {', '.join(map(str, turns))}" if turns else "it has none"
            raise RequestError(
                422, f"turn {turn} of {id} is no assistant turn; {has}. Hints go before those"
            )
        self._hints.read()
        if self._hints.problem is not None:
            raise RequestError(409, self._hints.problem)
        return hints_file_id(trajectory)

    def _cached(
        self, cache: Cache[Value], limit: int | None, batch: Batch, read: Callable[[Batch], Value]
    ) -> Value:
        """The value of a batch, read again if its file changed; the last `limit` used are kept."""
        key = batch.key
        try:
            stat = batch.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if key not in cache or cache[key][0] != stamp:
                cache[key] = (stamp, read(batch))
        except FileNotFoundError:
            raise RequestError(404, f"{batch.path}: is gone. Reload the page") from None
        except OSError as error:
            raise RequestError(404, f"{batch.path}: cannot be read ({error.strerror})") from None
        except UserError as error:
            raise RequestError(404, str(error)) from None
        cache[key] = cache.pop(key)  # the most recently used is last
        while limit is not None and len(cache) > limit:
            del cache[next(iter(cache))]
        return cache[key][1]


def _read_lower_texts(path: Path) -> dict[str, str]:
    return {id: f"{id}\n{text}".lower() for id, text in read_texts(path).items()}
