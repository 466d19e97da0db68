"""[tasks] kind `documents`: plain text to learn, without prompts and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from courtside.recipe.base import Section
from courtside.recipe.tasks_base import TasksBase


class BackgroundConfig(Section):
    """Other text, trained beside the documents so that less is forgotten."""

    path: Path
    """A text file or a folder of them."""
    fraction: Annotated[float, Field(gt=0, lt=1)]
    """Of the windows of a step, over many steps."""
    pattern: str = "*"


class DocumentTasks(TasksBase):
    """Documents, cut into windows of tokens that follow each other: next-token training."""

    kind: Literal["documents"]
    path: Path
    """A text file in UTF-8, or a folder of them (all files below it but hidden ones); also in a
    built-in recipe's folder (`continual/facts`)."""
    pattern: str = "*"
    """File names of a folder, such as `*.txt`."""
    max_tokens: Annotated[int, Field(ge=2)] = 512
    """Of a window. Short documents share one, and a long one is in several."""
    overlap: NonNegativeInt = 1
    """Tokens that a window repeats of the one before. Nothing predicts a window's first token, so
    with 1 every token trains exactly once an epoch."""
    separator: str | None = None
    """Text before, between and after documents. Unset: the tokenizer's end token."""
    background: BackgroundConfig | None = None
    invalid_documents: Literal["error", "drop"] = "error"
    """An empty, unreadable or binary document: stop, or drop and count it."""

    @property
    def is_recorded(self) -> bool:
        return True

    @property
    def data_paths(self) -> tuple[Path, ...]:
        return (self.path,) if self.background is None else (self.path, self.background.path)

    @model_validator(mode="after")
    def _check_windows(self) -> DocumentTasks:
        if self.overlap >= self.max_tokens:
            raise ValueError(
                f"overlap = {self.overlap}: a window of max_tokens = {self.max_tokens} would hold "
                "nothing new; use a smaller overlap"
            )
        if self.system_prompt is not None:
            raise ValueError("system_prompt: documents have no prompt; remove it")
        if self.overlong_prompts != "error":
            raise ValueError(
                "overlong_prompts: documents have no prompts, and long ones are cut into windows; "
                "remove it"
            )
        return self
