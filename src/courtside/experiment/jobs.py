"""One run of an experiment: its recipe and where its files are. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from courtside.errors import UserError
from courtside.experiment.outcomes import Outcome
from courtside.recipe.load import load_recipe
from courtside.report.folder.files import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    """The folder of the experiment's runs: a run has the job's name, next to its log."""
    export: Path | None = None
    """Where the trained model goes; such a job is not measured."""
    keep: bool = True
    """Whether its checkpoints stay."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """What it must have spent in the end, by unit."""

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def outcome(self) -> Path:
        return self.folder / "outcomes" / f"{self.name}.json"

    def identity(self) -> str:
        """What decides its numbers: the recipe as it is written, overrides included."""
        recipe = load_recipe(self.recipe, self.overrides)
        return recipe.model_dump_json(exclude_unset=True, exclude={"run"})


def load_outcome(job: Job) -> Outcome | None:
    """What it measured, if it has; refuses what was measured with another recipe."""
    if not job.outcome.is_file() or (job.export is not None and not job.export.exists()):
        return None
    try:
        outcome: Outcome = json.loads(job.outcome.read_text())
    except ValueError as error:
        raise UserError(
            f"{job.outcome}: damaged ({error}). Delete it: the run in {job.run} is measured again"
        ) from None
    if outcome["recipe"] != job.identity():
        if "failed" in outcome:
            return None  # and is mended now, perhaps
        raise UserError(
            f"{job.outcome}: measured with other settings than the experiment's now. Delete it to "
            "run that again, or give another --out"
        )
    return outcome


def write_failure(job: Job, reason: str) -> None:
    """Stored, so that a summary knows what is missing; another start of the experiment tries the
    run again."""
    failure = {"recipe": job.identity(), "failed": reason}
    job.outcome.parent.mkdir(parents=True, exist_ok=True)
    replace_file(job.outcome, (json.dumps(failure) + "\n").encode())
