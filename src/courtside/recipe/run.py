"""[run]: checkpoints, stored trajectories and trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from courtside.recipe.base import Section


class RunConfig(Section):
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    trajectories_every: PositiveInt = 1
    """Steps between stored batches of trajectories."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "courtside"
    """Name of the project in W&B and trackio."""
