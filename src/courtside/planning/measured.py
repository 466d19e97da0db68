"""Lengths and speed of an earlier run, in place of defaults.

A run's seconds by phase, over those that the defaults give for its recipe and lengths, are the
factors of a plan. They carry the device's real utilisation to other sizes of the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from courtside.errors import PlanError
from courtside.planning.estimate import estimate
from courtside.planning.gpus import Device
from courtside.planning.lengths import KnownLengths, MeasuredTasks, choose_lengths
from courtside.planning.models import resolve_shapes
from courtside.planning.workload import Workload, plan_models
from courtside.recipe import Recipe
from courtside.report.folder.folder import RunFolder

PHASES = ("rollout", "reader", "teacher", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    path: Path
    recipe: Recipe
    num_steps: int
    lengths: KnownLengths
    factors: Mapping[str, float]
    """By phase: measured seconds of a step (the median) over estimated ones."""
    utilisation: Mapping[str, float]
    """By phase: executed FLOPs over what the device could do in its seconds."""

    def fill(self, lengths: KnownLengths, recipe: Recipe) -> KnownLengths:
        """The run's lengths where none are given and the tasks are the same."""
        if recipe.tasks != self.recipe.tasks:
            return lengths
        measured = self.lengths
        new = measured.new_tokens
        if new is not None:
            new = min(new, float(recipe.rollout.max_new_tokens))
        return replace(
            lengths,
            prompt_tokens=_first(lengths.prompt_tokens, measured.prompt_tokens),
            new_tokens=_first(lengths.new_tokens, new),
            turns=_first(lengths.turns, measured.turns),
            observation_tokens=_first(lengths.observation_tokens, measured.observation_tokens),
            context_tokens=_first(lengths.context_tokens, measured.context_tokens),
            source=measured.source if lengths == KnownLengths() else f"given, or {measured.source}",
        )

    def describe(self) -> str:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.utilisation.items())
        return (
            f"times are those of {self.path.name} ({self.num_steps} steps), scaled; its share of "
            f"the device's FLOP/s: {shares}"
        )


def _first(value: float | None, other: float | None) -> float | None:
    return other if value is None else value


def read_run(path: Path, device: Device) -> MeasuredRun:
    """`device`: what the run ran on."""
    folder = RunFolder.read(path)
    recipe, rows = folder.recipe(), folder.metrics()
    costs = folder.read_costs()
    if not rows or "update" not in costs:
        raise PlanError(
            f"--from-run {path}: no step is recorded there. Give a run that has trained"
        )
    student, teachers = resolve_shapes(recipe, shape=None, teacher_shape=None)
    work = Workload(
        recipe=recipe,
        models=plan_models(recipe, student, teachers, device),
        lengths=choose_lengths(recipe, _SHORTEST, _never)[0],
        device=device,
    )
    lengths = _read_lengths(folder, work)
    chosen, _ = choose_lengths(recipe, lengths, _never)
    work = replace(work, lengths=chosen)
    result = estimate(work)
    factors, utilisation = {}, {}
    for phase in result.phases:
        seconds = [row[f"seconds/{phase.name}"] for row in rows if f"seconds/{phase.name}" in row]
        if phase.name in PHASES and seconds:
            measured = median(seconds)
            factors[phase.name] = measured / phase.seconds
            utilisation[phase.name] = phase.flops.executed / (measured * device.flops)
    if "evaluate" in costs and costs["evaluate"].seconds and result.evaluation.seconds:
        tokens = costs["evaluate"].output_tokens / result.evaluation.flops.output_tokens
        factors["evaluate"] = costs["evaluate"].seconds / (tokens * result.evaluation.seconds)
    return MeasuredRun(
        path=path, recipe=recipe, num_steps=len(rows), lengths=lengths, factors=factors,
        utilisation=utilisation,
    )  # fmt: skip


_SHORTEST = KnownLengths(
    prompt_tokens=1, new_tokens=1, turns=1, observation_tokens=0, context_tokens=0
)


def _never() -> MeasuredTasks:
    raise AssertionError("all lengths of a run are known")


def _read_lengths(folder: RunFolder, work: Workload) -> KnownLengths:
    """Means of a trajectory, from the tokens that the run counted."""
    costs, num_steps = folder.read_costs(), len(folder.metrics())
    num_rows = num_steps * work.num_rows
    new = folder.metrics()
    mean_new = sum(row["length/mean"] for row in new) / len(new)
    # Repeated steps of a resumed run are in the costs and not in the metrics: ratios hold.
    if "rollout" in costs and costs["rollout"].output_tokens:
        rollout = costs["rollout"]
        prompt = mean_new * rollout.input_tokens / rollout.output_tokens
    else:
        prompt = max(1.0, (costs["update"].input_tokens / num_rows) + 1 - mean_new)
    context = 0.0
    if "teacher" in costs and work.is_scored:
        repeated = (costs["update"].input_tokens / num_rows + 1) / (prompt + mean_new)
        trunk = 0.0 if work.defers_hints else prompt + mean_new
        context = costs["teacher"].input_tokens / num_rows / max(repeated, 1.0) - trunk
    return KnownLengths(
        prompt_tokens=prompt,
        new_tokens=mean_new,
        turns=1.0,
        observation_tokens=0.0,
        context_tokens=max(context, 0.0),
        source=f"of {folder.path.name}",
    )
