"""What the ranks of a test do, in processes of their own: `python rank_script.py JOBS.json`.

Jobs run one after the other, each with a `folder`. One with `recipe` trains it there; what it
raises is written beside the folder, by rank, or how many passes models in shards made. `raise`,
`signal` and `kill` name a rank and a step in whose rollout that happens; `full` a rank and the
checkpoint for which its disk has no space; `raise_in_teacher` and `signal_in_pass` a rank;
`raise_after_update` a rank and a step whose weights it has updated; `raise_in_adopt` a rank and the
number of steps of weights that another rank published. One with `command` runs the command line,
and writes what it prints.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from courtside import ranks
from courtside.api import train
from courtside.cli.app import app
from courtside.engines import precision
from courtside.engines.served.weight_sync import WeightSync
from courtside.engines.sharded import ForwardTurns
from courtside.errors import ServerError, TaskError
from courtside.recipe.load import parse_recipe
from courtside.recipe.pipeline import parse_pipeline
from courtside.rollout.single_turn import SingleTurnRollout
from courtside.teacher.teacher import TeacherStage
from courtside.training import checkpoints
from courtside.training.sharded_student import ShardedStudent
from courtside.training.shards import local_rows

take_turn, score_all = ForwardTurns.take, TeacherStage.score
train_step, adopt_weights = ShardedStudent.step, WeightSync._adopt


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

        def save(tensors: Any, file: Path, job: dict[str, Any] = job) -> None:
            if "full" in job and job["full"] == [rank, int(file.parent.name.split("-")[-1])]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            save_file(tensors, file)

        def score(self: Any, *args: Any, job: dict[str, Any] = job) -> Any:
            if job.get("raise_in_teacher") == rank:
                raise TaskError("nothing can be scored")
            return score_all(self, *args)

        def update(self: Any, step: int, scored: Any, job: dict[str, Any] = job) -> Any:
            result = train_step(self, step, scored)
            if job.get("raise_after_update") == [rank, step]:
                raise ServerError("nothing works after the update")
            return result

        def adopt(self: Any, publication: Any, job: dict[str, Any] = job) -> None:
            adopt_weights(self, publication)
            if job.get("raise_in_adopt") == [rank, publication.weights.version]:
                raise ServerError("nothing can be adopted")

        ShardedStudent.step = update  # type: ignore[method-assign]
        WeightSync._adopt = adopt  # type: ignore[method-assign]
        TeacherStage.score = score  # type: ignore[method-assign]
        checkpoints.save_file = save
        SingleTurnRollout.sample = disturb  # type: ignore[method-assign]
        if "command" in job:
            run_command(job["command"], folder.with_suffix(f".rank{rank}.json"))
            continue
        turns = count_turns(job.get("signal_in_pass") == rank)
        try:
            recipe = job["recipe"]
            parse: Any = parse_pipeline if "stages" in recipe else parse_recipe
            train(parse(recipe), folder, quiet=True)
            folder.with_suffix(f".turns{rank}.json").write_text(json.dumps(turns))
        except BaseException as error:
            reports = ranks.should_report(error)
            text = f"{type(error).__name__}: {error}"
            outcome = {"error": text, "reports": reports}
            folder.with_suffix(f".rank{rank}.json").write_text(json.dumps(outcome))


def count_turns(has_signal: bool) -> dict[str, float]:
    """Forward passes of models in shards from now on: all, those without tokens of this rank's own,
    and the largest part of a model's layers that this rank held before a pass. `has_signal`: one
    comes in the first."""
    counts = {"passes": 0, "idle": 0, "part": 0.0}

    @contextmanager
    def take(self: Any, model: Any) -> Any:
        with take_turn(self, model):
            if has_signal and self.is_open and not counts["passes"]:
                os.kill(os.getpid(), signal.SIGTERM)
            counts["passes"] += self.is_open
            counts["idle"] += self.is_open and self.in_step
            layers = list(model.base_model.layers.parameters())
            held = sum(local_rows(p).numel() for p in layers)
            if self.is_open:  # a probe may end within a layer
                counts["part"] = max(counts["part"], held / sum(p.numel() for p in layers))
            yield

    ForwardTurns.take = take  # type: ignore[method-assign]
    return counts


def run_command(arguments: list[str], file: Path) -> None:
    out, error, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(error):
        try:
            app(arguments, prog_name="courtside")
        except SystemExit as end:
            code = int(end.code or 0)
    outcome = {"code": code, "out": out.getvalue(), "error": error.getvalue()}
    file.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)  # as the command line ends: native threads may abort an interpreter that ends
