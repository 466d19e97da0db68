"""`teacher.store`: scores of a teacher on disk."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveFloat

from courtside.recipe.base import Section


class ScoreStoreConfig(Section):
    """Scores by content: tokens with their context, teacher, temperature. What is there is not
    asked again, by this run or another one."""

    folder: Path
    """Any number of runs may share it, at the same time, too."""
    max_gb: PositiveFloat = 50.0
    """Of disk; what was not used for the longest time goes first. With k likeliest tokens, a token
    takes 8·k + 4 bytes."""
