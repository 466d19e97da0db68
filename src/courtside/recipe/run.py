"""[run]: checkpoints, stored trajectories, trackers, logs and the metrics endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from courtside.recipe.base import Section

CHECKPOINT_STEPS = 10
"""Between checkpoints, where the recipe does not say it and saving is quick."""


class RunConfig(Section):
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints; the last step is always saved. Unset: 10, or 20, 30, … where
    saving would take more than a tenth of the time: a kill costs about ten times a save at most."""
    keep_checkpoints: PositiveInt = 2
    trajectories_every: PositiveInt = 1
    """Steps between stored batches of trajectories."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "courtside"
    """Name of the project in W&B and trackio."""
    log_format: Literal["text", "json"] = "text"
    """json: events as JSON lines on standard error, in place of what the console shows."""
    log_file: Path | None = None
    """File that events are appended to as JSON lines, whatever the console shows. Ranks other than
    0 append to `FILE.rank-N`."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics (Prometheus) and /health while the run trains; 0: any free one, which the
    console names. Unset: none is opened."""
    metrics_host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all of this machine's. There is no password and no TLS."""
    stall_minutes: PositiveFloat = 30.0
    """How long nothing may progress before /health says 503; or six times the usual time of the
    phase, if that is longer. The first three times of a phase are never a stall."""
