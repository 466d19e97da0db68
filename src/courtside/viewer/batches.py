"""What can be looked at in a run: the batches of its steps, and the answers of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.report.folder.evaluation_names import EvaluationName
from courtside.report.folder.folder import RunFolder

MAX_DIGITS = 12
"""Of a step's number in an address."""


class RequestError(Exception):
    """A request that cannot be answered: HTTP status, and what to do instead."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    key: str
    """In addresses: the number of a step, or the name of an evaluation's file."""
    title: str
    path: Path
    step: int
    is_held_out: bool


def training_batches(folder: RunFolder) -> list[Batch]:
    """By step."""
    batches = []
    for step in folder.trajectory_steps():
        with suppress(UserError):  # a resumed run has just removed it
            batches.append(_training_batch(folder, step))
    return batches


def held_out_batches(folder: RunFolder) -> list[Batch]:
    """By step, then policy."""
    return [
        Batch(
            key=name.file_name,
            title=_describe_evaluation(name),
            path=folder.evaluation_file(name),
            step=name.step,
            is_held_out=True,
        )
        for name in folder.stored_evaluations()
    ]


def find_batch(folder: RunFolder, key: str) -> Batch:
    if key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS:
        try:
            return _training_batch(folder, int(key))
        except UserError as error:
            raise RequestError(404, str(error)) from None
    if EvaluationName.parse(key) is not None:
        for batch in held_out_batches(folder):
            if batch.key == key:
                return batch
    raise RequestError(404, f"{key!r} is neither a stored step nor a stored evaluation")


def is_wrong(row: Mapping[str, Any]) -> bool:
    """Whether a row of the list has errors or a failing grade."""
    return row["errors"] > 0 or (row["grade"] is not None and not row["grade"]["passed"])


def choose_start(batches: Sequence[Mapping[str, Any]]) -> str | None:
    """The newest step where something went wrong, else the newest one, that can be read.

    None: nothing can be read.
    """
    readable = [batch for batch in batches if "problem" not in batch]
    in_training = [batch for batch in readable if not batch["held_out"]] or readable
    wrong = [batch for batch in in_training if batch["failed"]]
    last = (wrong or in_training)[-1:]
    return str(last[0]["key"]) if last else None


def _describe_evaluation(name: EvaluationName) -> str:
    """`test after 8 steps`, `test (held_out) after 8 steps`."""
    suite = name.policy.removeprefix("student").removeprefix(":")
    return f"{name.split}{f' ({suite})' if suite else ''} after {name.step} steps"


def _training_batch(folder: RunFolder, step: int) -> Batch:
    return Batch(
        key=str(step),
        title=f"step {step}",
        path=folder.stored_file(step),
        step=step,
        is_held_out=False,
    )
