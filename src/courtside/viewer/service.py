"""What the page can request of a run and its hints file, as plain trees.

One request at a time, from any thread. Errors carry their HTTP status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import TypeVar

from courtside.errors import UserError
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import HintLimits, hints_file_id
from courtside.report.folder.outlines import StepTable, read_texts
from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.summary import summarize_recipe
from courtside.viewer.hints import HintsEditor
from courtside.viewer.serialize import (
    Tree,
    serialize_conversation,
    serialize_outline,
    serialize_user_hint,
)

Value = TypeVar("Value")
Cache = dict[int, tuple[tuple[int, int], Value]]
"""By step: modification time and size of the file, and the value computed from it."""

NUM_TABLES = 2
"""Steps whose whole tables are cached."""


class RequestError(Exception):
    """A request that cannot be answered: HTTP status, and what to do instead."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


def recipe_lines(folder: RunFolder, hints: Path) -> str:
    """The sections of a recipe that trains on the run's trajectories with the hints of this file.

    For recorded conversations the reader alone: their hints apply in every step.
    """
    reader = {"reader": {"kind": "human", "path": str(hints)}}
    if folder.recipe().tasks.kind == "conversations":
        return toml.dumps(reader)
    tasks = {"kind": "trajectories", "path": str(folder.path), "select": "hinted"}
    return toml.dumps({"tasks": tasks, "rollout": {"student_fraction": 0.0}, **reader})


class RunService:
    def __init__(self, folder: RunFolder, hints: Path) -> None:
        recipe = folder.recipe()
        self._lock = RLock()
        self._folder = folder
        self._hints = HintsEditor(hints, HintLimits.of(recipe))
        self._recipe_lines = recipe_lines(folder, hints)
        self._about: Tree = {
            "name": folder.path.resolve().name,
            "path": str(folder.path),
            "summary": summarize_recipe(recipe),
        }
        self._outlines: Cache[list[Tree]] = {}
        self._tables: Cache[StepTable] = {}
        self._texts: Cache[dict[str, str]] = {}

    def run(self) -> Tree:
        """Cheap enough to poll: only new files are read."""
        with self._lock:
            num_hints = Counter(id for id, _ in self._hints.read())
            steps = []
            for step in self._folder.trajectory_steps():
                try:
                    rows = self._read_outlines(step)
                except RequestError as error:
                    # A resumed run has just removed the file, or it is broken.
                    steps.append({"step": step, "problem": error.detail})
                    continue
                steps.append(
                    {
                        "step": step,
                        "trajectories": len(rows),
                        "errors": sum(row["errors"] > 0 for row in rows),
                        "hints": sum(row["hints"] > 0 for row in rows),
                        "user_hints": sum(num_hints[row["hints_file_id"]] > 0 for row in rows),
                    }
                )
            return {**self._about, "steps": steps, "hints_file": self._describe_hints_file()}

    def step(self, step: int) -> Tree:
        with self._lock:
            num_hints = Counter(id for id, _ in self._hints.read())
            rows = [
                {**row, "user_hints": num_hints[row["hints_file_id"]]}
                for row in self._read_outlines(step)
            ]
            return {"step": step, "trajectories": rows}

    def search(self, step: int, query: str) -> Tree:
        """Ids of the trajectories whose turns contain every word of the query, in any case."""
        with self._lock:
            texts = self._cached(self._texts, 1, step, _read_lower_texts)
            terms = query.lower().split()
            ids = [id for id, text in texts.items() if all(term in text for term in terms)]
            return {"step": step, "ids": ids}

    def trajectory(self, step: int, id: str) -> Tree:
        with self._lock:
            stored = self._find(step, id)
            user_hints = self._hints.of_trajectory(hints_file_id(stored.trajectory))
            return {
                **serialize_conversation(stored, user_hints),
                "hints_file": self._describe_hints_file(),
            }

    def write(self, step: int, id: str, turn: int, text: str) -> Tree:
        with self._lock:
            target = self._check_turn(step, id, turn)
            try:
                hint = self._hints.write(target, turn, text)
            except UserError as error:
                raise RequestError(422, str(error)) from None
            return {
                "user_hint": serialize_user_hint(hint),
                "hints_file": self._describe_hints_file(),
            }

    def remove(self, step: int, id: str, turn: int) -> Tree:
        with self._lock:
            target = self._check_turn(step, id, turn)
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
            "recipe": self._recipe_lines,
            "max_chars": self._hints.limits.max_chars,
            "max_hints": self._hints.limits.max_hints,
        }

    def _read_outlines(self, step: int) -> list[Tree]:
        """Small enough to cache all steps."""
        return self._cached(
            self._outlines, None, step,
            lambda _: [serialize_outline(outline) for outline in self._folder.outlines(step)],
        )  # fmt: skip

    def _find(self, step: int, id: str) -> StoredTrajectory:
        table = self._cached(self._tables, NUM_TABLES, step, lambda path: StepTable(path, step))
        stored = table.find(id)
        if stored is None:
            raise RequestError(
                404, f"step {step} has no trajectory {id!r}. Choose one from the list"
            )
        return stored

    def _check_turn(self, step: int, id: str, turn: int) -> str:
        """The id of the trajectory in the hints file, if a hint can be written for this turn."""
        trajectory = self._find(step, id).trajectory
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
        self, cache: Cache[Value], limit: int | None, step: int, read: Callable[[Path], Value]
    ) -> Value:
        """The value of a step, read again if its file changed; the last `limit` used are kept."""
        try:
            path = self._folder.stored_file(step)
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if step not in cache or cache[step][0] != stamp:
                cache[step] = (stamp, read(path))
        except (UserError, FileNotFoundError) as error:
            raise RequestError(404, str(error)) from None
        cache[step] = cache.pop(step)  # the most recently used is last
        while limit is not None and len(cache) > limit:
            del cache[next(iter(cache))]
        return cache[step][1]


def _read_lower_texts(path: Path) -> dict[str, str]:
    return {id: f"{id}\n{text}".lower() for id, text in read_texts(path).items()}
