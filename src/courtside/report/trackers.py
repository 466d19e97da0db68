"""Metrics to TensorBoard, W&B or trackio, in addition to the run folder.

A resumed run repeats the steps after its checkpoint. TensorBoard then shows the repeated ones; W&B
and trackio, which cannot delete a step, keep the first ones and get the steps after them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from courtside.errors import UserError
from courtside.report.folder.files import encode_json, replace_file

Numbers = Mapping[str, float | int | None]

STATE = "trackers.json"
"""File in the run folder: the id of the run in each service, and its next step."""


class Tracker(Protocol):
    def log(self, row: Numbers, step: int) -> None: ...

    def close(self) -> None: ...


def open_trackers(
    names: Sequence[str],
    folder: Path,
    *,
    project: str,
    run_name: str,
    first_step: int = 0,
) -> list[Tracker]:
    """Open the trackers of a recipe. `first_step` is 0, or the first step of a resumed run."""
    trackers: list[Tracker] = []
    for name in names:
        match name:
            case "tensorboard":
                trackers.append(TensorBoardTracker(folder, first_step))
            case "wandb":
                trackers.append(WandbTracker(folder, project, run_name))
            case "trackio":
                trackers.append(TrackioTracker(folder, project, run_name))
            case _:
                raise UserError(
                    f"run.trackers: {name!r} is not known; use 'tensorboard', 'wandb' or 'trackio'"
                )
    return trackers


class TensorBoardTracker:
    """Event files in the run folder: `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        module = _import_package("torch.utils.tensorboard", tracker="tensorboard")
        # Hides these steps of an interrupted process.
        purge = first_step if any((folder / "tensorboard").glob("*")) else None
        self._writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge)

    def log(self, row: Numbers, step: int) -> None:
        for name, value in _drop_missing(row).items():
            self._writer.add_scalar(name, value, step)
        # A kill must not lose rows from before the last checkpoint.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _ServiceTracker:
    """A service that resumes runs by id and cannot delete a step; `STATE` has both of each one."""

    _run: Any

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._name = folder / STATE, name
        state = self._read_states().get(name, {})
        self._identity: str | None = state.get("identity")
        self._next_step: int = state.get("next_step", 0)

    def log(self, row: Numbers, step: int) -> None:
        if step >= self._next_step:
            self._next_step = step + 1
            self._save_state()
            self._run.log(_drop_missing(row), step=step)

    def _save_state(self) -> None:
        state = {"identity": self._identity, "next_step": self._next_step}
        states = self._read_states() | {self._name: state}
        replace_file(self._path, encode_json(states, indent=2))

    def _read_states(self) -> dict[str, Any]:
        states: dict[str, Any] = json.loads(self._path.read_bytes()) if self._path.exists() else {}
        return states


class WandbTracker(_ServiceTracker):
    """Works offline too, with WANDB_MODE=offline."""

    def __init__(self, folder: Path, project: str, run_name: str) -> None:
        wandb = _import_package("wandb", tracker="wandb")
        super().__init__(folder, "wandb")
        self._identity = self._identity or uuid.uuid4().hex[:12]
        try:
            self._run = wandb.init(
                project=project,
                name=run_name,
                id=self._identity,
                dir=str(folder),
                resume="allow",
                # Every redraw of the live line would be recorded.
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise UserError(
                f"run.trackers: W&B did not start ({error}). Log in with `wandb login`, set "
                "WANDB_MODE=offline, or remove 'wandb' from run.trackers"
            ) from None
        self._save_state()

    def close(self) -> None:
        self._run.finish()


class TrackioTracker(_ServiceTracker):
    """Local by default; TRACKIO_SPACE_ID sends it to a Space."""

    def __init__(self, folder: Path, project: str, run_name: str) -> None:
        self._trackio = _import_package("trackio", tracker="trackio")
        super().__init__(folder, "trackio")
        # trackio resumes a run by its name, which must be unique.
        self._identity = self._identity or f"{run_name}-{uuid.uuid4().hex[:6]}"
        self._run = self._trackio.init(
            project=project, name=self._identity, resume="allow", embed=False
        )
        self._save_state()

    def close(self) -> None:
        self._trackio.finish()


def _drop_missing(row: Numbers) -> dict[str, float | int]:
    return {name: value for name, value in row.items() if value is not None and name != "step"}


def _import_package(name: str, *, tracker: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"run.trackers: {tracker!r} needs a package that is missing ({error.name}). Install it "
            f"with pip install -e '.[tracking]', or remove {tracker!r} from run.trackers"
        ) from None
