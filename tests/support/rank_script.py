"""What the ranks of a test do, in processes of their own: `python rank_script.py JOBS.json`.

Jobs run one after the other. `train`: a recipe into a folder. What it raises is written beside the
folder, by rank. `raise`, `signal` and `kill` name a rank and a step in whose rollout that happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from courtside import ranks
from courtside.api import train
from courtside.engines import precision
from courtside.errors import TaskError
from courtside.recipe.load import parse_recipe
from courtside.rollout.single_turn import SingleTurnRollout


def main(jobs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    precision.has_native_bf16 = lambda: False  # as in the tests' own process
    rank = int(os.environ["RANK"])
    sample = SingleTurnRollout.sample
    for job in jobs:
        folder = Path(job["folder"])

        def disturb(self: Any, tasks: Any, step: int, job: dict[str, Any] = job) -> Any:
            place = [rank, step]
            if job.get("raise") == place:
                raise TaskError(f"nothing works in step {step}")
            if job.get("signal") == place:
                os.kill(os.getpid(), signal.SIGTERM)
            if job.get("kill") == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return sample(self, tasks, step)

        SingleTurnRollout.sample = disturb  # type: ignore[method-assign]
        try:
            train(parse_recipe(job["recipe"]), folder, quiet=True)
        except BaseException as error:
            reports = ranks.should_report(error)
            text = f"{type(error).__name__}: {error}"
            outcome = {"error": text, "reports": reports}
            folder.with_suffix(f".rank{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
