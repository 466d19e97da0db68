"""The GPU benchmark's step as courtside does it, or a step of an agent with targeted hints that
samples as many tokens.

`courtside.loop.train_loop` without output, as on the CPU; only weights are random instead of
loaded, and no row of a rollout ends early. The first step compiles, captures graphs and is not
counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from courtside_side import TimedRun, given_answers, loss_and_gradients
from fixed_episodes import OFF_COURSE, FixedEpisodes
from gpu_peaks import Peaks, wait_for_go
from opd_step_job import (
    NO_END,
    NUM_TURNS,
    Job,
    checked_tensors,
    load_random_model,
    read_job,
    read_lines,
)
from workload import (
    BETAS,
    CLIP_NORM,
    SEED,
    TEMPERATURE,
    CheckResult,
    PhaseClock,
    SideResult,
    prompts_hash,
    write_json,
)

import courtside
from courtside.assemble import assemble
from courtside.assemble import models as assembling
from courtside.engines.forward.batching import default_pass_tokens
from courtside.loop import train_loop
from courtside.ranks import connect
from courtside.recipe import Recipe
from courtside.recipe.load import load_recipe
from courtside.report.folder import toml
from courtside.report.folder.folder import RunFolder
from courtside.runtime import Runtime
from courtside.training import weights as student_weights
from courtside.types import Scored, Update

TIMEOUT = timedelta(minutes=2)
WORLD = f"{FixedEpisodes.__module__}:{FixedEpisodes.__name__}"
REVERSE_KL = {"kind": "divergence", "divergence": "reverse_kl", "support": {"kind": "full"}}


class GpuRun(TimedRun):
    """Synchronizes with the GPU where a phase ends, and records the memory it took."""

    def __init__(
        self, parts: Runtime, folder: RunFolder, *, profiled: str = "", file: Path | None = None
    ) -> None:
        """`profiled`: a phase; what it does in the last step is written to `file`."""
        self.profiled, self.file = profiled, file
        self.spent = PhaseClock()
        self.peaks = Peaks(parts.engine.device.type)
        super().__init__(parts, folder)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.spent(name), super().phase(name):
            is_profiled = name == self.profiled and self.num_steps == self.recipe.train.steps - 1
            file = self.file if is_profiled else None
            with profile_to(file) if file is not None else nullcontext():
                yield
                self.peaks.fence()
        self.peaks.close(name)

    def record(self, step: int, scored: Sequence[Scored], update: Update, *counts: Any) -> None:
        super().record(step, scored, update, *counts)
        self.peaks.close("record")
        # The remaining time is that of storing trajectories, metrics and costs.
        phases = self.spent.take()
        phases["record"] = self.steps[-1].seconds - sum(phases.values())
        self.steps[-1] = replace(
            self.steps[-1],
            phases=phases,
            gpu_peaks=self.peaks.take(),
            num_device_allocs=self.peaks.take_allocs(),
            num_sampled_tokens=sum(s.trajectory.num_completion_tokens for s in scored),
            num_hints=sum(outcome.drop_reason is None for s in scored for outcome in s.hints),
        )
        # Measuring memory is no part of the next step.
        self.timer.start()


@contextmanager
def profile_to(file: Path) -> Iterator[None]:
    """Tables of the operators by time on the device and on the host, and of the calls of CUDA."""
    from torch.profiler import profile

    with profile() as profiler:
        yield
    averages = profiler.key_averages()
    kinds = ("self_device_time_total", "self_cpu_time_total")
    tables = [averages.table(sort_by=k, row_limit=40, max_name_column_width=70) for k in kinds]
    file.write_text("\n".join(tables))


def recipe(job: Job, folder: Path, args: argparse.Namespace, work: Path) -> Recipe:
    steps = 1 + args.steps
    tree: dict[str, Any] = {
        "student": {
            "model": str(folder / "student"), "device": job.device, "dtype": job.dtype,
        },
        "rollout": {
            "samples_per_prompt": job.samples, "max_new_tokens": job.new_tokens,
            "temperature": TEMPERATURE,
        },
        "train": {
            "steps": steps, "prompts_per_step": job.prompts, "learning_rate": job.learning_rate,
            "betas": list(BETAS), "max_grad_norm": CLIP_NORM, "weight_decay": 0.0,
        },
        "run": {"checkpoint_every": steps + 1},
        "seed": SEED,
    }  # fmt: skip
    if args.side.startswith("hints"):
        settings = {"path": str(folder / "episodes.jsonl")}
        rule = {"detect": "event", "event": OFF_COURSE, "hint": "{advice}"}
        tree |= {
            "tasks": {"kind": "environment", "path": WORLD, "settings": settings},
            "reader": {"kind": "rules", "rules": [rule]},
            "hints": {"harmful": "train"},  # of random weights: all of the same work is done
            "teacher": {"kind": "self", "weights": "live"},
            "losses": [REVERSE_KL | {"on": "hinted_turns"}],
        }
        tree["rollout"] |= {
            "max_new_tokens": job.turn_tokens,
            "limits": {"turns": NUM_TURNS, "tokens": job.episode_tokens},
        }
    else:
        teacher = {"kind": "model", "model": str(folder / "teacher"), "dtype": job.dtype}
        tree |= {
            "tasks": {"kind": "jsonl", "path": str(folder / "prompts.jsonl")},
            "teacher": teacher,
            "losses": [REVERSE_KL],
        }
    file = work / "recipe.toml"
    file.write_text(toml.dumps(tree))
    return load_recipe(file, args.set)


def assemble_random(plan: Recipe) -> Runtime:
    with ExitStack() as stack:
        for module in (assembling, student_weights):
            stack.enter_context(patch.object(module, "load_model", load_random_model))
        parts = assemble(plan, ranks=connect(device=plan.student.device, timeout=TIMEOUT))
    parts.engine.eos_ids = frozenset({NO_END})
    return parts


def checked(parts: Runtime, shape: str, folder: Path) -> CheckResult:
    """Loss and gradients of the fixed batch; leaves no trace."""
    rows = read_lines(folder / "batch.jsonl")
    trajectories = given_answers(
        parts, [row["text"] for row in rows], [row["completion"] for row in rows]
    )
    result = loss_and_gradients(parts, trajectories, checked_tensors(shape))
    parts.student.optimizer.zero_grad(set_to_none=True)
    return result


CAPTURE_BEGIN = torch.cuda.CUDAGraph.capture_begin


def capture_with_an_empty_cache(graph: Any, *args: Any, **options: Any) -> None:
    torch.cuda.empty_cache()
    CAPTURE_BEGIN(graph, *args, **options)


def measure(args: argparse.Namespace, work: Path) -> SideResult:
    shape, job = read_job(args.job)
    plan = recipe(job, args.job, args, work)
    with RunFolder.open(work / "run", plan) as folder:
        parts = assemble_random(plan)
        check = None if args.side.startswith("hints") else checked(parts, shape, args.job)
        run = GpuRun(parts, folder, profiled=args.profile, file=args.out.with_suffix(".profile"))
        run.peaks.begin()
        train_loop(parts, run)
    trained = parts.student.weights.trained.values()
    return SideResult(
        side=args.side,
        config=shape,
        num_warmup=1,
        steps=tuple(run.steps),
        num_prompt_tokens=sum(map(len, run.prompt_ids)),
        prompts_hash=prompts_hash(run.prompt_ids),
        num_trainable=sum(p.numel() for p in trained),
        load_peak_rss=run.load_peak_rss,
        num_threads=torch.get_num_threads(),
        versions={
            "courtside": courtside.__version__,
            **{name: version(name) for name in ("torch", "transformers", "peft")},
        },
        settings={
            "overrides": args.set,
            "kv_cache_tokens": parts.engine.max_batch_tokens,
            "micro_batch_tokens": parts.student.micro_batch_tokens
            or default_pass_tokens(parts.engine.device),
            "gradient_checkpointing": parts.student.weights.uses_gradient_checkpointing,
            "optimizer": type(parts.student.optimizer).__name__,
            "trainable_dtypes": sorted({str(p.dtype) for p in trained}),
            "autocast": str(parts.student.weights.autocast),
            "notes": list(parts.notes),
        },
        check=check,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, required=True, help="folder that describes the job")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=1, help="steps that are counted")
    parser.add_argument(
        "--side", required=True,
        choices=("courtside", "courtside_lean", "courtside_sharded", "hints", "hints_lean"),
    )  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value of the recipe")
    parser.add_argument("--profile", default="", help="phase of the last step: update")
    parser.add_argument("--empty-cache", action="store_true", help="see opd_step_gpu.py")
    args = parser.parse_args()
    wait_for_go()
    with (
        patch.object(torch.cuda.CUDAGraph, "capture_begin", capture_with_an_empty_cache)
        if args.empty_cache
        else nullcontext(),
        tempfile.TemporaryDirectory(prefix="courtside-side-") as folder,
    ):
        write_json(args.out, measure(args, Path(folder)))


if __name__ == "__main__":
    main()
