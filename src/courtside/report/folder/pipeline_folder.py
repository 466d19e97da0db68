"""The folder of a pipeline: `stages/01-NAME/`, an ordinary run folder each, and what was done.

`stages/01-NAME.json` says what a stage was started with and whether it is done; it counts only as
long as its run folder is there, so deleting or renaming that folder is enough to begin again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.files import read_regular_file
from courtside.report.evaluation_pairs import Difference
from courtside.report.folder.files import (
    TEMPORARY,
    encode_json,
    explain_write_errors,
    replace_file,
)
from courtside.report.folder.locking import RECIPE, LockedFolder, acquire_lock, create_folder
from courtside.report.summary import format_points
from courtside.report.versions import collect_versions
from courtside.types import SCHEMA_VERSION

PIPELINE = "pipeline.json"
STAGES = "stages"
PROMOTED = "promoted"
STAGE_FOLDER = re.compile(r"(\d{2,})-(.+)")
FEW_TASKS = 30
"""Below so many, a bootstrap interval is too narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    """The paired difference of a suite's scores since the student's start, and the verdict."""

    suite: str
    max_loss: float
    num_tasks: int
    mean: float
    low: float
    high: float
    p_value: float
    passed: bool

    @property
    def difference(self) -> Difference:
        return Difference(self.mean, self.low, self.high, self.p_value)

    def __str__(self) -> str:
        text = (
            f"gate {'passed' if self.passed else 'failed'}: {self.suite} "
            f"{format_points(self.mean)} points since the start (95% interval "
            f"{format_points(self.low)} to {format_points(self.high)}, {self.num_tasks} tasks); "
            f"the lower end may be {format_points(-self.max_loss)}"
        )
        if self.num_tasks < FEW_TASKS:
            text += f". With fewer than {FEW_TASKS} tasks the interval is too narrow"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    recipe: Mapping[str, Any]
    """With `stage:NAME` where the stage uses an earlier one."""
    inputs: Mapping[str, str]
    """SHA-256 by what it is of: `stage:NAME` (its last checkpoint), or a data file."""
    root: str | None = None
    """Folder name of the stage in which the student began; None: in this one."""
    is_done: bool = False
    checkpoint: str | None = None
    """Checksum of the last checkpoint, once it is done."""
    gate: GateDecision | None = None


class PipelineFolder(LockedFolder):
    """`open` locks the folder for writing until `close`; `read` opens it read-only."""

    @classmethod
    def open(cls, path: Path, stage_names: Sequence[str]) -> PipelineFolder:
        """`stage_names`: folder names of all stages, in order."""
        _refuse_foreign_folder(path)
        lock = acquire_lock(path)
        folder = cls(path, lock)
        try:
            folder._refuse_renumbered(stage_names)
            with explain_write_errors(path):
                (path / STAGES).mkdir(exist_ok=True)
            folder._write(stages=list(stage_names), environment=collect_versions())
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def read(cls, path: Path) -> PipelineFolder:
        if not is_pipeline_folder(path):
            raise UserError(f"{path}: not the folder of a pipeline (it has no {PIPELINE})")
        return cls(path, None)

    @property
    def stage_names(self) -> list[str]:
        """Folder names of all stages, in order, also of those that have not begun."""
        return [str(name) for name in self._state().get("stages", ())]

    @property
    def threads(self) -> int | None:
        """Of the first process: stages in later ones take as many, as another number rounds
        otherwise."""
        return self._state().get("threads")

    def record_threads(self, number: int) -> None:
        if self.threads is None:
            self._write(threads=number)

    @property
    def environment(self) -> Mapping[str, Any]:
        environment: Mapping[str, Any] = self._state().get("environment", {})
        return environment

    def stage_path(self, name: str) -> Path:
        return self.path / STAGES / name

    def read_record(self, name: str) -> StageRecord | None:
        """None: the stage has not begun, or its folder is gone."""
        path = self._record_path(name)
        if not path.is_file() or not (self.stage_path(name) / RECIPE).is_file():
            return None
        try:
            tree = json.loads(read_regular_file(path))
            if tree.pop("schema_version") > SCHEMA_VERSION:
                raise UserError(f"{path}: written by a newer courtside. Update courtside")
            gate = tree.pop("gate")
            return StageRecord(**tree, gate=None if gate is None else GateDecision(**gate))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{path}: damaged ({error}). Restore it from a copy, or rename "
                f"{self.stage_path(name)} to train the stage again"
            ) from None

    def write_record(self, name: str, record: StageRecord) -> None:
        tree = {"schema_version": SCHEMA_VERSION, **asdict(record)}
        replace_file(self._record_path(name), encode_json(tree, indent=2))

    def promote(self, target: Path) -> Path:
        """Point `promoted` to an export; a later promotion replaces the link at once."""
        link = self.path / PROMOTED
        relative = os.path.relpath(target, self.path)
        if link.is_symlink() and os.readlink(link) == relative:
            return link
        if link.exists() and not link.is_symlink():
            raise UserError(f"{link}: is no link that courtside made. Rename it")
        temporary = link.with_name(PROMOTED + TEMPORARY)
        with explain_write_errors(link):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(relative)
            os.replace(temporary, link)
        return link

    def _record_path(self, name: str) -> Path:
        return self.path / STAGES / f"{name}.json"

    def _state(self) -> dict[str, Any]:
        path = self.path / PIPELINE
        if not path.is_file():
            return {}
        try:
            state: dict[str, Any] = json.loads(read_regular_file(path))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: damaged ({error}). Restore it from a copy") from None
        return state

    def _write(self, **changes: Any) -> None:
        state = {"schema_version": SCHEMA_VERSION, **self._state(), **changes}
        replace_file(self.path / PIPELINE, encode_json(state, indent=2))

    def _refuse_renumbered(self, stage_names: Sequence[str]) -> None:
        """A stage that was moved would be trained again, and its old folder forgotten."""
        names = {_stage_name(name): name for name in stage_names}
        if not (self.path / STAGES).is_dir():
            return
        for entry in sorted((self.path / STAGES).iterdir()):
            if not (entry / RECIPE).is_file() or not STAGE_FOLDER.fullmatch(entry.name):
                continue
            new_name = names.get(_stage_name(entry.name), entry.name)
            if new_name != entry.name:
                raise UserError(
                    f"{entry}: the pipeline was edited, and this stage is now {new_name}. Delete "
                    f"or rename {entry} to train it in its new place, or put the stages back in "
                    "their old order"
                )


def is_pipeline_folder(path: str | Path) -> bool:
    return (Path(path) / PIPELINE).is_file()


def _stage_name(folder_name: str) -> str:
    match = STAGE_FOLDER.fullmatch(folder_name)
    return match[2] if match else folder_name


def _refuse_foreign_folder(path: Path) -> None:
    if foreign := create_folder(path, marker=PIPELINE, expected=(STAGES,)):
        what = "is a run folder" if RECIPE in foreign else "has other files"
        raise UserError(f"{path}: {what}, and a pipeline needs one of its own. Give another folder")
