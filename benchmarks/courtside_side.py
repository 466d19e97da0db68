"""The benchmark's step as courtside does it (see `workload` for the contract).

This is `courtside.loop.train_loop` without output: what a step records and stores on disk is in
its time. Only the checkpoint after the last step is left out, as on the other side.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from workload import (
    BETAS,
    CHECKED_TENSORS,
    CLIP_NORM,
    LEARNING_RATE,
    LORA_ALPHA_PER_RANK,
    LORA_RANK,
    NEW_TOKENS,
    PROMPTS,
    SEED,
    TEMPERATURE,
    CheckResult,
    PhaseClock,
    SideResult,
    StepResult,
    StepTimer,
    peak_rss,
    prompts_hash,
    side_parser,
    write_json,
)

import courtside
from courtside.assemble import assemble
from courtside.chat.messages import make_trajectory
from courtside.loop import train_loop
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.report.console import RunConsole
from courtside.report.folder.folder import RunFolder
from courtside.run import Run
from courtside.runtime import Runtime
from courtside.training.loss_terms import make_loss_terms
from courtside.training.metrics import MetricAccumulator
from courtside.training.shards import gather_whole
from courtside.types import Message, Sample, Scored, Task, Trajectory, Update


class TimedRun(Run):
    """A run that also records the phases of each step."""

    def __init__(self, parts: Runtime, folder: RunFolder) -> None:
        self.clock = PhaseClock()
        self.steps: list[StepResult] = []
        self.prompt_ids: list[tuple[int, ...]] = []
        self.load_peak_rss = 0
        self.timer = StepTimer()
        super().__init__(parts, folder, RunConsole())

    def remaining_steps(self) -> Iterator[int]:
        for step in super().remaining_steps():
            if not self.steps:
                self.load_peak_rss = peak_rss()
                self.timer.start()
            yield step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.clock(name), super().phase(name):
            yield

    def record(self, step: int, scored: Sequence[Scored], update: Update, *counts: Any) -> None:
        super().record(step, scored, update, *counts)
        times = self.timer.lap()
        phases = self.clock.take()
        phases["update"] = times["seconds"] - phases["rollout"] - phases["teacher"]
        self.prompt_ids = [s.trajectory.turns[0].token_ids for s in scored]
        self.steps.append(
            StepResult(
                **times,
                phases=phases,
                loss=update.loss,
                num_trained_tokens=update.num_tokens["divergence"],
                peak_rss=peak_rss(),
            )
        )

    def _save(self) -> None:
        """The other side is told to write no checkpoint either."""


def recipe(args: Any, prompts_file: Path) -> Recipe:
    rank = LORA_RANK[args.config]
    student: dict[str, Any] = {"model": str(args.student), "dtype": args.dtype, "device": "cpu"}
    if rank is not None:
        student["lora"] = {"rank": rank, "alpha": LORA_ALPHA_PER_RANK * rank, "dropout": 0.0}
    lines = [json.dumps({"prompt": prompt, "split": "train"}) for prompt in PROMPTS]
    prompts_file.write_text("\n".join(lines))
    steps = args.warmup + args.repeats
    return parse_recipe(
        {
            "student": student,
            "tasks": {"kind": "jsonl", "path": str(prompts_file)},
            "rollout": {
                "samples_per_prompt": 1,
                "max_new_tokens": NEW_TOKENS,
                "temperature": TEMPERATURE,
            },
            "teacher": {"kind": "model", "model": str(args.teacher), "dtype": args.dtype},
            "losses": [
                {"kind": "divergence", "divergence": "reverse_kl", "support": {"kind": "full"}}
            ],
            "train": {
                "steps": steps,
                "prompts_per_step": len(PROMPTS),
                "learning_rate": LEARNING_RATE[args.config],
                "betas": list(BETAS),
                "max_grad_norm": CLIP_NORM,
                "weight_decay": 0.0,
            },
            "run": {"checkpoint_every": steps + 1},
            "seed": SEED,
        }
    )


def measure(args: Any, work: Path) -> None:
    plan = recipe(args, work / "prompts.jsonl")
    with RunFolder.open(work / "run", plan) as folder:
        parts = assemble(plan)
        run = TimedRun(parts, folder)
        train_loop(parts, run)
    trained = parts.student.weights.trained.values()
    write_json(
        args.out,
        SideResult(
            side="courtside",
            config=args.config,
            dtype=args.dtype,
            num_warmup=args.warmup,
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
                "optimizer": type(parts.student.optimizer).__name__,
                "chunk_tokens": parts.student.chunk,
                "micro_batch_tokens": plan.train.micro_batch_tokens,
                "trainable_dtypes": sorted({str(p.dtype) for p in trained}),
            },
        ),
    )


def check(args: Any, work: Path) -> None:
    """Loss and gradient of the batch, by the student's own step up to the optimizer."""
    parts = assemble(recipe(args, work / "prompts.jsonl"))
    rows = json.loads(args.check.read_text())
    trajectories = given_answers(parts, PROMPTS, [row["completion"] for row in rows])
    for trajectory, row in zip(trajectories, rows, strict=True):
        ids = trajectory.turns[0].token_ids
        assert ids == tuple(row["prompt"]), f"{trajectory.id}: its prompt is rendered otherwise"
    write_json(args.out, loss_and_gradients(parts, trajectories, CHECKED_TENSORS))


def given_answers(
    parts: Runtime, prompts: Sequence[str], completions: Sequence[Sequence[int]]
) -> list[Trajectory]:
    """Trajectories whose answers were not sampled now."""
    trajectories = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        messages = (Message(role="user", content=prompt),)
        trajectories.append(
            make_trajectory(
                Task(id=f"check-{index}", split="train", messages=messages),
                parts.renderer.prompt_ids(messages),
                Sample(token_ids=tuple(completion), logp=(), stop="dataset", text=""),
                id=f"check-{index}",
                source="dataset",
                policy_version=None,
                temperature=TEMPERATURE,
                grade=None,
            )
        )
    return trajectories


def loss_and_gradients(
    parts: Runtime, trajectories: Sequence[Trajectory], names: Sequence[str]
) -> CheckResult:
    """Of the recipe's divergence; the gradients stay in place."""
    scored = parts.teacher(trajectories)
    streams = make_loss_terms(parts.recipe.losses, parts.recipe.loss_names(), scored)
    metrics = MetricAccumulator()
    parts.student.accumulate(0, scored, streams, metrics)
    gradients = {
        name: gather_whole(parameter.grad)
        for name, parameter in parts.student.weights.trained.items()
        if parameter.grad is not None
    }
    return CheckResult(
        side="courtside",
        loss=metrics.losses["divergence"],
        num_tokens=streams[0].denominator,
        gradient_norm=float(torch.stack([g.norm() for g in gradients.values()]).norm()),
        gradient_norms={name: float(gradients[name].norm()) for name in names},
    )


def main() -> None:
    args = side_parser("One distillation step, by courtside.").parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="courtside-side-") as folder:
        if args.check is not None:
            check(args, Path(folder))
        else:
            measure(args, Path(folder))


if __name__ == "__main__":
    main()
