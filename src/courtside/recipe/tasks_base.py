"""What every [tasks] section has."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from courtside.recipe.base import Section


class TasksBase(Section):
    limit: PositiveInt | None = None
    """Train on this many prompts only, over and over (down to one). They are evaluated, too, beside
    the held-out ones. Unset: all of them."""
    limit_by: Literal["first", "seed"] = "first"
    """With limit: which prompts. first: the same in every run, of a file its first ones. seed:
    others with every seed, so that the seeds of an experiment are different prompts."""
    system_prompt: str | None = None
    """A system prompt that the student sees on every task."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """A prompt that does not fit the context: stop, or drop and count it."""

    @property
    def is_environment(self) -> bool:
        """Whether a task starts an episode, which the environment answers and grades."""
        return False

    @property
    def max_turns(self) -> int | None:
        """Assistant turns of the longest episode; None: the environment decides."""
        return None

    @property
    def data_paths(self) -> tuple[Path, ...]:
        """Files and folders that the tasks are read from."""
        return ()

    @property
    def is_recorded(self) -> bool:
        """Whether trajectories are given and not sampled, so that nothing answers the student."""
        return False
