"""What a stage hands on: its last checkpoint as a model folder or an adapter, in float32.

An export lies inside the run folder of its stage (`export/`, `export-adapter/`) and is renamed into
place when it is whole, so one that exists is complete.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from courtside.artifacts.export import write_export
from courtside.errors import UserError
from courtside.files import read_regular_file
from courtside.report.console import RunConsole
from courtside.report.folder.files import explain_write_errors
from courtside.report.folder.folder import RunFolder
from courtside.training import checkpoints

MODEL, ADAPTER = "export", "export-adapter"


def hand_over(run_path: Path, kind: str, console: RunConsole) -> Path:
    """The path that takes the place of a reference to this run; `kind` is a `Reference`'s."""
    if kind == "run":
        return run_path
    target = run_path / (ADAPTER if kind == "adapter" else MODEL)
    if target.is_dir():
        return target
    checkpoint = checkpoints.latest(RunFolder.read(run_path).checkpoints)
    if checkpoint is None:
        raise UserError(
            f"{run_path}: its checkpoints were deleted, and a later stage needs the weights. Put "
            f"them back, or delete or rename {run_path} to train the stage again"
        )
    with explain_write_errors(run_path):
        for leftover in run_path.glob(f".{target.name}-*"):  # of an export that was killed
            shutil.rmtree(leftover)
    console.phase("export")
    try:
        write_export(
            RunFolder.read(run_path), checkpoint, target, adapter=kind == "adapter", dtype="float32"
        )
    finally:
        console.finish()
    console.print_line(f"{target}: the weights in float32")
    return target


def checkpoint_sum(run_path: Path) -> str | None:
    """The checksum of the last checkpoint's contents; None: there is none."""
    path = checkpoints.latest(run_path / "checkpoints")
    if path is None:
        return None
    try:
        return str(json.loads(read_regular_file(path / "checkpoint.json"))["sum"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint {path} is damaged ({error}). Delete or rename {run_path} to train the "
            "stage again"
        ) from None
