"""Lengths and speed of an earlier run, in place of defaults.

A run's seconds by phase, over those that the defaults give for its recipe and lengths, are the
factors of a plan. They carry the device's real utilisation to other sizes of the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from courtside.errors import PlanError
from courtside.planning.corrections import ranks_by_teacher
from courtside.planning.estimate import estimate
from courtside.planning.flops import (
    add_flops,
    rollout_flops,
    takeover_flops,
    teacher_flops,
    update_flops,
)
from courtside.planning.gpus import Device
from courtside.planning.lengths import KnownLengths, MeasuredTasks, choose_lengths
from courtside.planning.models import resolve_shapes
from courtside.planning.rates import list_used_rates, make_rates, read_rates
from courtside.planning.workload import Lengths, Workload, plan_models
from courtside.recipe import Recipe
from courtside.report.folder.folder import RunFolder

PHASES = ("rollout", "drafts", "reader", "teacher", "update")


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
    rates: Mapping[str, float]
    """Of its corrections."""

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

    def choose_rates(self, recipe: Recipe) -> dict[str, float]:
        """The run's rates where the tasks are the same, those that the recipe uses."""
        if recipe.tasks != self.recipe.tasks:
            return {}
        names = list_used_rates(recipe)
        return {name: value for name, value in self.rates.items() if name in names}

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
    drafts = costs.get("drafts")
    question_tokens = None
    if drafts is not None and not ranks_by_teacher(work):  # whose tokens are among them
        question_tokens = (drafts.input_tokens, drafts.output_tokens)
    work = replace(work, rates=make_rates(read_rates(work, rows, question_tokens)))
    work = _solve_lengths(folder, work)
    rates = {name: getattr(work.rates, name) for name in list_used_rates(recipe)}
    lengths = KnownLengths(
        prompt_tokens=work.lengths.prompt,
        new_tokens=work.lengths.new,
        turns=1.0,
        observation_tokens=0.0,
        context_tokens=work.lengths.context,
        source=f"of {path.name}",
    )
    chosen, _ = choose_lengths(recipe, lengths, _never)
    work = replace(work, lengths=chosen)
    result = estimate(work)
    factors, utilisation = {}, {}
    for phase in result.phases:
        seconds = [row[f"seconds/{phase.name}"] for row in rows if f"seconds/{phase.name}" in row]
        if phase.name in PHASES and seconds and phase.seconds:
            measured = median(seconds)
            factors[phase.name] = measured / phase.seconds
            utilisation[phase.name] = phase.flops.executed / (measured * device.flops)
    if "evaluate" in costs and costs["evaluate"].seconds and result.evaluation.seconds:
        tokens = costs["evaluate"].output_tokens / result.evaluation.flops.output_tokens
        factors["evaluate"] = costs["evaluate"].seconds / (tokens * result.evaluation.seconds)
    return MeasuredRun(
        path=path, recipe=recipe, num_steps=len(rows), lengths=lengths, factors=factors,
        utilisation=utilisation, rates={k: v for k, v in rates.items() if v is not None},
    )  # fmt: skip


_SHORTEST = KnownLengths(
    prompt_tokens=1, new_tokens=1, turns=1, observation_tokens=0, context_tokens=0
)


def _never() -> MeasuredTasks:
    raise AssertionError("all lengths of a run are known")


def _solve_lengths(folder: RunFolder, work: Workload) -> Workload:
    """The workload with the lengths for which it counts the tokens that the run counted.

    An environment's messages count as prompt. What the teacher read beyond that is its context or,
    where it has none, the tokens of drafts before take-overs.
    """
    costs, rows = folder.read_costs(), folder.metrics()
    mean_new = mean(row["length/mean"] for row in rows)
    is_sampled = "rollout" in costs and costs["rollout"].output_tokens
    has_context = work.recipe.reader is not None or any(
        teacher.context for teacher in work.recipe.model_teachers
    )

    def vary(prompt: float, other: float) -> Workload:
        lengths = Lengths(prompt=prompt, new=mean_new, trained=work.lengths.trained)
        takeover = work.recipe.takeover
        if takeover is None or takeover.endpoint is not None or has_context:
            return replace(work, lengths=replace(lengths, context=other))
        return replace(work, lengths=lengths, rates=replace(work.rates, prefix_tokens=other))

    def count(prompt: float, other: float) -> tuple[float, float]:
        """Input tokens of the phase that tells the prompt's length, and of the teacher's."""
        varied = vary(prompt, other)
        first = rollout_flops(varied) if is_sampled else update_flops(varied)
        second = add_flops(takeover_flops(varied), teacher_flops(varied))
        return first.input_tokens, second.input_tokens

    # Repeated steps of a resumed run are in the costs and not in the metrics: ratios hold.
    num_steps = float(len(rows))
    if is_sampled:
        sampled = work.num_student_rows + work.num_teacher_rows
        num_steps = max(num_steps, costs["rollout"].output_tokens / (sampled * mean_new))
    measured = [
        costs[phase].input_tokens / num_steps if phase in costs else 0.0
        for phase in ("rollout" if is_sampled else "update", "teacher")
    ]
    base, by_prompt, by_other = count(1.0, 0.0), count(2.0, 0.0), count(1.0, 1.0)
    # Both are linear in both unknowns.
    (a, b), (c, d) = ((by_prompt[i] - base[i], by_other[i] - base[i]) for i in range(2))
    differences = [measured[i] - base[i] for i in range(2)]
    if a * d - b * c > 0:
        prompt = (differences[0] * d - b * differences[1]) / (a * d - b * c)
        other = (a * differences[1] - c * differences[0]) / (a * d - b * c)
    else:  # nothing scores
        prompt, other = differences[0] / a if a else 0.0, 0.0
    return vary(max(1.0, 1 + prompt), max(0.0, other))
