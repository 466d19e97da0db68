"""A run and the hints of the person who reads it: what the page can ask, as plain trees.

Answers one question at a time, from whichever thread. Errors have the status of their answer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import RLock

from courtside.errors import UserError
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import HintLimits, hints_file_id
from courtside.report.folder.parquet import StoredTrajectory
from courtside.report.summary import summarize_recipe
from courtside.viewer.hints import HintsEditor
from courtside.viewer.serialize import Tree, conversation, mine_tree
from courtside.viewer.steps import StoredSteps


class Refused(Exception):
    """Something that cannot be answered: a status of HTTP, and what to do instead."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


def recipe_lines(folder: RunFolder, hints: Path) -> str:
    """What a recipe says to train on the run's trajectories under the hints of this file; for
    recorded conversations, whose hints hold wherever they come up, to have it read."""
    reader = {"reader": {"kind": "human", "path": str(hints)}}
    if folder.recipe().tasks.kind == "conversations":
        return toml.dumps(reader)
    tasks = {"kind": "trajectories", "path": str(folder.path), "select": "hinted"}
    return toml.dumps({"tasks": tasks, "rollout": {"student_fraction": 0.0}, **reader})


class RunService:
    def __init__(self, folder: RunFolder, hints: Path) -> None:
        recipe = folder.recipe()
        self._lock = RLock()
        self._steps = StoredSteps(folder)
        self._own = HintsEditor(hints, HintLimits.of(recipe))
        self._recipe_lines = recipe_lines(folder, hints)
        self._about: Tree = {
            "name": folder.path.resolve().name,
            "path": str(folder.path),
            "summary": summarize_recipe(recipe),
        }

    def run(self) -> Tree:
        """Cheap enough to be asked every few seconds: only new files are read."""
        with self._lock:
            own = Counter(id for id, _ in self._own.read())
            steps = []
            for number in self._steps.numbers():
                try:
                    rows = self._steps.rows(number)
                except (UserError, FileNotFoundError) as error:
                    # One that a resumed run has just removed, or that is broken.
                    steps.append({"step": number, "problem": str(error)})
                    continue
                steps.append(
                    {
                        "step": number,
                        "trajectories": len(rows),
                        "errors": sum(row["errors"] > 0 for row in rows),
                        "hints": sum(row["hints"] > 0 for row in rows),
                        "mine": sum(own[row["hinted_id"]] > 0 for row in rows),
                    }
                )
            return {**self._about, "steps": steps, "own": self._status()}

    def step(self, number: int) -> Tree:
        with self._lock:
            own = Counter(id for id, _ in self._own.read())
            rows = self._rows(number)
            return {
                "step": number,
                "trajectories": [{**row, "mine": own[row["hinted_id"]]} for row in rows],
            }

    def search(self, number: int, words: str) -> Tree:
        with self._lock:
            self._rows(number)
            return {"step": number, "ids": self._steps.containing(number, words)}

    def trajectory(self, step: int, id: str) -> Tree:
        with self._lock:
            stored = self._stored(step, id)
            mine = self._own.about(hints_file_id(stored.trajectory))
            return {**conversation(stored, mine), "own": self._status()}

    def write(self, step: int, id: str, turn: int, text: str) -> Tree:
        with self._lock:
            place = self._place(step, id, turn)
            try:
                hint = self._own.write(place, turn, text)
            except UserError as error:
                raise Refused(422, str(error)) from None
            return {"mine": mine_tree(hint), "own": self._status()}

    def remove(self, step: int, id: str, turn: int) -> Tree:
        with self._lock:
            place = self._place(step, id, turn)
            try:
                self._own.remove(place, turn)
            except UserError as error:
                raise Refused(422, str(error)) from None
            return {"mine": None, "own": self._status()}

    def _status(self) -> Tree:
        """Of the hints file."""
        hints = self._own.read()
        return {
            "path": str(self._own.path),
            "count": len(hints),
            "version": self._own.version,
            "problem": self._own.problem,
            "recipe": self._recipe_lines,
            "max_chars": self._own.limits.max_chars,
            "max_hints": self._own.limits.max_hints,
        }

    def _rows(self, step: int) -> list[Tree]:
        try:
            return self._steps.rows(step)
        except (UserError, FileNotFoundError) as error:
            raise Refused(404, str(error)) from None

    def _stored(self, step: int, id: str) -> StoredTrajectory:
        try:
            stored = self._steps.one(step, id)
        except (UserError, FileNotFoundError) as error:
            raise Refused(404, str(error)) from None
        if stored is None:
            raise Refused(404, f"step {step} has no trajectory {id!r}. Choose one from the list")
        return stored

    def _place(self, step: int, id: str, turn: int) -> str:
        """What the hints file calls the trajectory, where a hint can be written above this turn."""
        trajectory = self._stored(step, id).trajectory
        own = [n for n, one in enumerate(trajectory.turns) if one.role == "assistant"]
        if turn not in own:
            has = f"the assistant's are {', '.join(map(str, own))}" if own else "it has none"
            raise Refused(
                422, f"turn {turn} of {id} is no assistant's turn; {has}. Hints go above those"
            )
        self._own.read()
        if self._own.problem is not None:
            raise Refused(409, self._own.problem)
        return hints_file_id(trajectory)
