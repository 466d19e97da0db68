"""[tasks]: where the prompts come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from courtside.config.base import Part


class TasksBase(Part):
    limit: PositiveInt | None = None
    """Train on this many prompts only, over and over (down to one). Unset: all of them."""
    system: str | None = None
    """A system prompt that the student sees on every task."""
    overlong: Literal["error", "drop"] = "error"
    """A prompt that does not fit the context: stop, or leave it out and count it."""


class ArithmeticTasks(TasksBase):
    kind: Literal["arithmetic"]
    operation: Literal["add", "subtract", "multiply"] = "add"
    digits: Annotated[int, Field(ge=1, le=12)] = 3
    """Of each operand."""
    scratchpad: bool = True
    """The reference solution works digit by digit; otherwise it is the answer alone."""


CheckName = Literal[
    "lower_case", "upper_case", "word_count", "json", "bullets", "forbidden_word", "ending",
    "starts_with", "one_sentence",
]  # fmt: skip


class InstructionTasks(TasksBase):
    kind: Literal["instructions"]
    checks: Annotated[tuple[CheckName, ...], Field(min_length=1)] = ("lower_case",)
    """Which instructions are drawn from; one of them per task."""
    stated: bool = True
    """True: the prompt states the instruction. False: only the privileged field `rule` does, and
    the student must have internalised it."""


class JsonlTasks(TasksBase):
    kind: Literal["jsonl"]
    path: Path
    """One JSON object a line: prompt (or messages), and optionally answer, completion, rejected,
    privileged, tags, grader, grader_args, split. Tasks without a split get one by content hash."""


class DatasetTasks(TasksBase):
    kind: Literal["datasets"]
    path: str
    """What `datasets.load_dataset` takes, or a folder that `save_to_disk` wrote."""
    name: str | None = None
    split: str = "train"
    columns: Mapping[str, str] = Field(default_factory=lambda: {"prompt": "prompt"})
    """Field of a task → column of the data set: prompt or messages, answer, completion, rejected.
    `privileged.NAME` makes a privileged field."""
    grader: str | None = None


Tasks = Annotated[
    ArithmeticTasks | InstructionTasks | JsonlTasks | DatasetTasks, Field(discriminator="kind")
]
