"""Where top-k losses end on a real vocabulary, with one free distribution for each position.

    python recipes/top-k/fixed_points.py                       # results.json, then plots.py
    python recipes/top-k/fixed_points.py --seeds 1 --steps 50 --to DIR

States are those of recipes/pruned: a student with half of the layers writes answers, the whole
model scores them. At one token of each answer the student's logits become free parameters, and Adam
minimizes the losses that the package trains with. There is no network in between, so whatever
differs from the teacher at the end is the loss's doing. `near` starts four fifths of the way from
the student's logits to the teacher's, `far` at the student's.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from courtside.assemble import assemble
from courtside.engines.base import ScoreRequest
from courtside.experiment.arms import over_seeds
from courtside.experiment.results_json import format_json
from courtside.losses.divergences import Form
from courtside.losses.full_vocabulary import divergence
from courtside.losses.top_k import SupportOf, tail_logp, top_k_divergence, top_k_ids
from courtside.recipe.load import load_recipe

FORMS: tuple[Form, ...] = ("naive", "stop_gradient", "tail", "renormalized")
SIZES = (1, 5, 20, 64)
Start = Literal["far", "near"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    form: Form | None
    """None: the whole vocabulary."""
    k: int = 20
    of: SupportOf = "teacher"
    start: Start = "far"
    rate: float = 0.1

    @property
    def name(self) -> str:
        if self.form is None:
            return "full"
        parts = [self.form, f"k{self.k}"]
        parts += [self.of] * (self.of != "teacher") + [self.start] * (self.start != "far")
        return " ".join([*parts, *[f"rate {self.rate:g}"] * (self.rate != 0.1)])


def list_arms() -> Iterator[Arm]:
    yield Arm(form=None)
    for form in FORMS:
        for k in SIZES:
            yield Arm(form=form, k=k)
    for form in FORMS[:3]:
        for start in ("far", "near"):
            yield Arm(form=form, of="student", start=start)
        yield Arm(form=form, of="joint")
    yield Arm(form="naive", rate=0.01)
    yield Arm(form="naive", start="near", rate=0.01)


def measure_states(seeds: int, positions: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each seed: logits [T, V] of student and teacher, each row in the middle of another answer
    that the student wrote."""
    options = [f"train.prompts_per_step={positions}", "rollout.samples_per_prompt=1"]
    parts = assemble(load_recipe("pruned", [*options, "student.device='cpu'"]))
    for seed in range(seeds):
        tasks = parts.tasks.batch(seed, positions)
        trajectories = parts.rollout(tasks, seed)
        scored = parts.teacher(trajectories, ())
        own_scores = parts.engine.score(
            [ScoreRequest.of_trajectory(t) for t in trajectories], want="hidden"
        )
        student, teacher = [], []
        for s, scores in zip(scored, own_scores, strict=True):
            target = s.target
            assert target is not None and target.head is not None
            assert target.hidden_TD is not None and scores.hidden_TD is not None
            middle = len(target.hidden_TD) // 2
            student.append(parts.engine.head(scores.hidden_TD[middle]))
            teacher.append(target.head(target.hidden_TD[middle]))
        yield torch.stack(student).detach().float(), torch.stack(teacher).detach().float()


def loss_of(arm: Arm, student_logp_TV: Tensor, teacher_logp_TV: Tensor) -> Tensor:
    if arm.form is None:
        return divergence(student_logp_TV, teacher_logp_TV, name="reverse_kl")
    ids_TK, keep_TK = top_k_ids(student_logp_TV.detach(), teacher_logp_TV, k=arm.k, of=arm.of)
    tails = None
    if arm.form == "tail":
        absent_TK = ids_TK.where(keep_TK, ids_TK[:, :1])  # a token that is listed twice
        tails = tail_logp(student_logp_TV, absent_TK), tail_logp(teacher_logp_TV, absent_TK)
    return top_k_divergence(
        student_logp_TV.gather(-1, ids_TK),
        teacher_logp_TV.gather(-1, ids_TK),
        keep_TK,
        name="reverse_kl",
        form=arm.form,
        tails=tails,
    )


def minimize(arm: Arm, student_TV: Tensor, teacher_TV: Tensor, steps: int) -> dict[str, Any]:
    """Masses on the teacher's k likeliest tokens and the KL that is left, means over positions."""
    teacher_logp_TV = teacher_TV.log_softmax(-1)
    start_TV = student_TV if arm.start == "far" else 0.2 * student_TV + 0.8 * teacher_TV
    logits_TV = start_TV.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits_TV], lr=arm.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    top_TK = teacher_logp_TV.topk(arm.k, dim=-1).indices

    def measure() -> dict[str, float]:
        logp_TV = logits_TV.detach().double().log_softmax(-1)
        kl_T = divergence(logp_TV, teacher_logp_TV.double(), name="reverse_kl")
        mass_T = logp_TV.gather(-1, top_TK).exp().sum(-1)
        of_teacher_T = teacher_logp_TV.double().gather(-1, top_TK).exp().sum(-1)
        return {
            "mass": float(mass_T.mean()),
            "teacher_mass": float(of_teacher_T.mean()),
            "mass_ratio": float((mass_T / of_teacher_T).mean()),
            "kl": float(kl_T.mean()),
        }

    before = measure()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(arm, logits_TV.log_softmax(-1), teacher_logp_TV).sum().backward()
        optimizer.step()
        schedule.step()
    after = measure()
    return {f"{name}_before": value for name, value in before.items()} | {
        f"{name}_after": value for name, value in after.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--positions", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    began = time.monotonic()
    states = list(measure_states(options.seeds, options.positions))
    arms: dict[str, Any] = {}
    for arm in list_arms():
        rows = [minimize(arm, *state, options.steps) for state in states]
        arms[arm.name] = {key: over_seeds([row[key] for row in rows]) for key in rows[0]}
        ratio, kl = (arms[arm.name][key]["mean"] for key in ("mass_ratio_after", "kl_after"))
        minutes = (time.monotonic() - began) / 60
        print(f"{minutes:5.1f} min  {arm.name:32} mass ratio {ratio:.3f}, KL {kl:.3f}", flush=True)
    results = {
        "date": date.today().isoformat(),
        "arms": arms,
        "one_over_e": 1 / math.e,
        "seeds": options.seeds,
        "positions": options.positions,
        "steps": options.steps,
        "worker_minutes": (time.monotonic() - began) / 60,
        "environment": {"machine": platform.machine(), "torch": torch.__version__,
                        "threads": torch.get_num_threads()},
        "command": "python recipes/top-k/fixed_points.py",
    }  # fmt: skip
    options.to.mkdir(parents=True, exist_ok=True)
    (options.to / "results.json").write_text(format_json(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
