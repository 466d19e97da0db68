"""The run folder: all files of a run, enough to rebuild its report, re-score and resume it.

Steps are 0-based: after N optimizer steps there are metrics of steps 0 … N−1, and an evaluation of
those weights has step N. The contents of `checkpoints/` belong to the student.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from courtside.errors import RecipeError, UserError
from courtside.files import read_regular_file
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe, require_path
from courtside.report.costs import PhaseCost, StepCost
from courtside.report.folder import toml
from courtside.report.folder.evaluation_names import EvaluationName
from courtside.report.folder.files import (
    Row,
    append_line,
    encode_json,
    explain_write_errors,
    filter_lines,
    read_lines,
    replace_file,
    replace_non_finite,
)
from courtside.report.folder.frames import (
    Decode,
    make_evaluations_frame,
    make_metrics_frame,
    make_tokens_frame,
    make_trajectories_frame,
)
from courtside.report.folder.locking import (
    RECIPE,
    LockedFolder,
    acquire_lock,
    dump_recipe,
    find_differences,
    refuse_foreign_folder,
    refuse_other_recipe,
)
from courtside.report.folder.outlines import Outline, read_outlines
from courtside.report.folder.parquet import (
    StoredTrajectory,
    parse_evaluation,
    read_hints,
    read_trajectories,
    serialize_evaluation,
    serialize_trajectories,
    write_trajectories,
)
from courtside.report.metrics import compute_metrics
from courtside.report.versions import collect_versions
from courtside.types import Evaluation, HintOutcome, Scored, Trajectory, Update

if TYPE_CHECKING:
    from pandas import DataFrame

TRAJECTORIES = re.compile(r"step-(\d+)\.parquet")
FURTHER_EVALUATIONS = "further_evaluations.jsonl"


class RunFolder(LockedFolder):
    """`open` locks the folder for writing until `close`; `read` opens it read-only."""

    was_killed = False
    """Whether the last process that opened the folder for writing ended without a word."""

    @classmethod
    def open(cls, path: str | Path, recipe: Recipe) -> RunFolder:
        """Create the folder, or resume a run with the same recipe up to `CHANGEABLE_FIELDS`."""
        path = Path(path)
        refuse_foreign_folder(path)
        lock = acquire_lock(path)
        folder = cls(path, lock)
        try:
            with explain_write_errors(path):
                folder.was_killed = folder.mark_as_open()
            if folder._file(RECIPE).exists():
                refuse_other_recipe(path, folder.recipe(), recipe)
            with explain_write_errors(path):
                folder.checkpoints.mkdir(exist_ok=True)
                folder._file("trajectories").mkdir(exist_ok=True)
            for name in ("metrics", "evaluations", "alarms"):
                # Drops a last line that a kill cut off.
                filter_lines(folder._file(f"{name}.jsonl"), lambda row: True)
            folder._write_environment(collect_versions())
            # Last: a folder with a recipe is complete.
            replace_file(folder._file(RECIPE), toml.dumps(dump_recipe(recipe)).encode())
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def read(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run read-only, also while it is training."""
        path = require_path(path, "run", "the path of a run folder as str or Path")
        if (path / "pipeline.json").is_file() and not (path / RECIPE).is_file():
            raise UserError(
                f"{path}: is the folder of a pipeline. Give one of its stages, such as "
                f"{next(iter(sorted((path / 'stages').glob('*/'))), path / 'stages')}"
            )
        if not (path / RECIPE).is_file():
            raise UserError(
                f"{path}: not a run folder (it has no {RECIPE}). Give the folder that "
                "`courtside train` wrote"
            )
        return cls(path, None)

    @property
    def checkpoints(self) -> Path:
        return self._file("checkpoints")

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def recipe(self) -> Recipe:
        """The recipe of the run, with all defaults."""
        path = self._file(RECIPE)
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: not valid TOML: {error}") from None
        return parse_recipe(tree, name=str(path))

    def metrics(self) -> list[Row]:
        """One row per step; docs/metrics.md describes the keys."""
        return read_lines(self._file("metrics.jsonl"), "step", numbers_only=True)

    def evaluations(self) -> list[Evaluation]:
        """Those of the run itself, in their order."""
        return self._read_evaluations("evaluations.jsonl")

    def further_evaluations(self) -> list[Evaluation]:
        """Those that `courtside evaluate` or `evaluate_student` added afterwards."""
        return self._read_evaluations(FURTHER_EVALUATIONS)

    def _read_evaluations(self, name: str) -> list[Evaluation]:
        path = self._file(name)
        return [parse_evaluation(tree, where=str(path)) for tree in read_lines(path, "step")]

    def stored_evaluations(self) -> list[EvaluationName]:
        """Evaluations whose trajectories are stored, by step."""
        folder = self._file("evaluations")
        if not folder.is_dir():
            return []
        names = (EvaluationName.parse(path.name) for path in folder.iterdir())
        return sorted(name for name in names if name is not None)

    def evaluation_file(self, name: EvaluationName) -> Path:
        """The Parquet file with the trajectories of an evaluation."""
        return self._file("evaluations") / name.file_name

    def evaluation_trajectories(
        self, evaluation: Evaluation, ids: Collection[str] | None = None
    ) -> list[Trajectory]:
        """All answers or episodes of an evaluation of the run, in the order of its tasks; `ids`:
        only those."""
        path = self._stored_evaluation(evaluation)
        return [item.trajectory for item in read_trajectories(path, evaluation.step, ids)]

    def evaluation_outlines(self, evaluation: Evaluation) -> list[Outline]:
        """The same without texts and tokens, which is much cheaper."""
        return read_outlines(self._stored_evaluation(evaluation), evaluation.step)

    def _stored_evaluation(self, evaluation: Evaluation) -> Path:
        path = self.evaluation_file(EvaluationName.of(evaluation))
        if not path.exists():
            raise UserError(
                f"{path}: no such file, so the answers of this evaluation are not stored. Those of "
                "`courtside evaluate` and of older versions are not; a few are in its `samples`"
            )
        return path

    def alarms(self) -> list[Row]:
        """Rows with `step` and `message`."""
        return read_lines(self._file("alarms.jsonl"))

    def environment(self) -> dict[str, Any]:
        """Versions and platform of the last process that opened the folder for writing."""
        tree: dict[str, Any] = self._json("environment.json")
        return tree

    def recorded_threads(self) -> int | None:
        """Of the process that trained; None: none has."""
        threads: int | None = self.environment().get("threads")
        if threads is None or (type(threads) is int and threads > 0):
            return threads
        raise UserError(
            f"{self._file('environment.json')}: threads = {threads!r} is no number of threads. "
            "Correct it, or remove the file"
        )

    def read_costs(self) -> dict[str, PhaseCost]:
        """Seconds, tokens and FLOPs by phase."""
        tree = self._json("costs.json")
        try:
            return {phase: PhaseCost.parse(cost) for phase, cost in tree.items()}
        except (TypeError, ValueError) as error:
            path = self._file("costs.json")
            raise UserError(f"{path}: not as courtside writes it ({error}). Remove it") from None

    def trajectory_steps(self) -> list[int]:
        """Steps whose trajectories are stored, in order."""
        folder = self._file("trajectories")
        if not folder.is_dir():
            return []
        matches = (TRAJECTORIES.fullmatch(path.name) for path in folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def trajectories(self, step: int, ids: Collection[str] | None = None) -> list[StoredTrajectory]:
        """The stored trajectories of a step; `ids`: only those."""
        return read_trajectories(self.stored_file(step), step, ids)

    def outlines(self, step: int) -> list[Outline]:
        """The step's trajectories without texts and tokens, which is much cheaper."""
        return read_outlines(self.stored_file(step), step)

    def hints(self, step: int) -> list[HintOutcome]:
        """Hints of the step's trajectories, trained and dropped."""
        return read_hints(self.stored_file(step))

    def stored_file(self, step: int) -> Path:
        """The Parquet file of a step's trajectories; a UserError if the step was not stored."""
        if not isinstance(step, int):
            raise UserError(f"step = {step!r}; give an int")
        path = self._trajectory_file(step)
        if not os.path.lexists(path):  # a link that leads nowhere is there, and cannot be read
            stored = self.trajectory_steps()
            have = "none are stored in this run"
            if stored:
                have = f"stored are {len(stored)} steps, {stored[0]} to {stored[-1]}"
            raise UserError(
                f"{path}: no trajectories of step {step}; {have}. run.trajectories_every decides "
                "which steps are stored"
            )
        return path

    # ── pandas ───────────────────────────────────────────────────────────────────────────────────

    def metrics_frame(self) -> DataFrame:
        """`metrics` as a pandas DataFrame, indexed by step."""
        return make_metrics_frame(self.metrics())

    def evaluations_frame(self) -> DataFrame:
        """The run's evaluations, a row each, with a column for each of their metrics."""
        return make_evaluations_frame(self.evaluations())

    def trajectories_frame(self, step: int) -> DataFrame:
        """A row for each stored trajectory of a step: texts, grade, turns, errors, hints."""
        return make_trajectories_frame(self.trajectories(step))

    def tokens_frame(self, step: int, decode: Decode | None = None) -> DataFrame:
        """A row for each completion token of a step, with both log-probs and their gap.

        `decode`: texts of token ids, one each, for the column `text`.
        """
        return make_tokens_frame(self.trajectories(step), decode)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def record(
        self,
        step: int,
        scored: Sequence[Scored],
        update: Update,
        *,
        seconds: Mapping[str, float],
        store_trajectories: bool,
        reader_counts: Mapping[str, int] | None = None,
        cost: StepCost | None = None,
        draft_counts: Mapping[str, int] = MappingProxyType({}),
    ) -> Row:
        """Store one training step and return its row of metrics (None where not finite).

        `reader_counts` are the reader's counters of this step; None: there is no reader.
        `draft_counts`: those of the draft stages.
        """
        assert step == update.step
        self._check_writable()
        metrics = compute_metrics(scored, update, seconds, reader_counts, draft_counts, cost=cost)
        row: Row = replace_non_finite(metrics)
        if store_trajectories:
            # Who deletes trajectories/ to save space may go on.
            with explain_write_errors(self.path), suppress(FileExistsError):
                self._file("trajectories").mkdir()
            trajectories = serialize_trajectories(scored, update.student_logp)
            replace_file(self._trajectory_file(step), trajectories)
        append_line(self._file("metrics.jsonl"), row)
        return row

    def record_threads(self, number: int) -> None:
        """Threads of the process that trains: another number rounds otherwise."""
        self._check_writable()
        self._write_environment({**self.environment(), "threads": number})

    def record_evaluation(
        self, evaluation: Evaluation, trajectories: Sequence[Trajectory] = ()
    ) -> None:
        """`trajectories`: all answers, of which the evaluation itself holds a few."""
        self._check_writable()
        if trajectories:
            path = self.evaluation_file(EvaluationName.of(evaluation))
            with explain_write_errors(path):
                path.parent.mkdir(exist_ok=True)
            write_trajectories(path, [Scored(trajectory=t, target=None) for t in trajectories], {})
        append_line(self._file("evaluations.jsonl"), serialize_evaluation(evaluation))

    def open_further_evaluations(self, recipe: Recipe) -> Callable[[Evaluation], None] | None:
        """Stores evaluations with a recipe that may differ from the run's; None: not writable.

        Needs no lock: a run in progress has nothing to do with that file.
        """
        path = self._file(FURTHER_EVALUATIONS)
        if not os.access(path if path.exists() else self.path, os.W_OK):
            return None
        changes = list(find_differences(dump_recipe(self.recipe()), dump_recipe(recipe)))

        def store(evaluation: Evaluation) -> None:
            append_line(path, {**serialize_evaluation(evaluation), "changes": changes})

        return store

    def record_alarm(self, alarm: Mapping[str, Any]) -> None:
        self._check_writable()
        append_line(self._file("alarms.jsonl"), alarm)

    def write_costs(self, costs: Mapping[str, PhaseCost]) -> None:
        self._check_writable()
        tree = {phase: asdict(cost) for phase, cost in costs.items()}
        replace_file(self._file("costs.json"), encode_json(tree, indent=2))

    def rewind(self, step: int) -> None:
        """Delete what was recorded after a checkpoint of `step` optimizer steps, but not costs."""
        self._check_writable()
        filter_lines(self._file("metrics.jsonl"), lambda row: row["step"] < step, "step")
        filter_lines(self._file("evaluations.jsonl"), lambda row: row["step"] <= step, "step")
        filter_lines(self._file("alarms.jsonl"), lambda row: row.get("step", -1) < step)
        for name in self.stored_evaluations():
            if name.step > step:
                with explain_write_errors(self.evaluation_file(name)):
                    self.evaluation_file(name).unlink()
        for stored in self.trajectory_steps():
            if stored >= step:
                with explain_write_errors(self._trajectory_file(stored)):
                    self._trajectory_file(stored).unlink()

    def _write_environment(self, environment: Mapping[str, Any]) -> None:
        """An earlier process's number of threads stays until this one's is recorded."""
        threads = {key: n for key, n in self.environment().items() if key == "threads"}
        content = encode_json({**threads, **environment}, indent=2)
        replace_file(self._file("environment.json"), content)

    def _file(self, name: str) -> Path:
        return self.path / name

    def _trajectory_file(self, step: int) -> Path:
        return self.path / "trajectories" / f"step-{step:06d}.parquet"

    def _json(self, name: str) -> dict[str, Any]:
        path = self._file(name)
        if not path.exists():
            return {}
        try:
            tree = json.loads(read_regular_file(path))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not valid JSON ({error}). Remove the file") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if not isinstance(tree, dict):
            raise UserError(f"{path}: not a JSON object. Remove the file")
        return tree

    def _check_writable(self) -> None:
        assert self._lock is not None, "this RunFolder was opened with `read`, or is closed"
