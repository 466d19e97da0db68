"""The plan: tokens, FLOPs, memory and seconds of a recipe on a device, put together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from courtside.planning.flops import (
    PhaseFlops,
    add_flops,
    drafts_flops,
    evaluation_flops,
    reader_flops,
    rollout_flops,
    takeover_flops,
    teacher_flops,
    update_flops,
)
from courtside.planning.gpus import Device
from courtside.planning.memory import PhaseMemory, host_bytes, kv_cache_tokens, phase_memories
from courtside.planning.servers import ServerPlan, list_teacher_places, plan_servers
from courtside.planning.timing import (
    Utilisation,
    default_utilisation,
    estimate_seconds,
)
from courtside.planning.workload import Workload
from courtside.report.budget import TRAINING_PHASES
from courtside.report.summary import format_number

STEP_PHASES = ("rollout", "drafts", "reader", "teacher", "update", "record")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """One phase: of a step, or all evaluations of the run."""

    name: str
    flops: PhaseFlops
    seconds: float
    num_gpus: int
    """That compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a workload costs on its device."""

    steps: int
    """Fewer than the recipe's where a budget ends the run."""
    budget_end: str | None
    """Which one, and what a step takes of it. None: all steps are made."""
    phases: tuple[PhaseEstimate, ...]
    """Of one step."""
    evaluation: PhaseEstimate
    """Of all evaluations together."""
    num_evaluations: int
    memory: tuple[PhaseMemory, ...]
    """Of one GPU, by phase."""
    host_bytes: float
    """Main memory for offloaded moments."""
    kv_cache_tokens: int
    servers: tuple[ServerPlan, ...]
    overlaps: bool
    """Whether servers sample the next step while this one trains (rollout.server.max_staleness)."""

    @property
    def step_seconds(self) -> float:
        return sum_seconds(self.phases, overlaps=self.overlaps)

    @property
    def seconds(self) -> float:
        """Of the whole run, without loading models."""
        return self.steps * self.step_seconds + self.evaluation.seconds

    @property
    def step_flops(self) -> PhaseFlops:
        total = PhaseFlops()
        for phase in self.phases:
            total = add_flops(total, phase.flops)
        return total

    @property
    def flops(self) -> PhaseFlops:
        """Of the whole run."""
        return add_flops(self.evaluation.flops, self.step_flops, self.steps)

    @property
    def peak(self) -> PhaseMemory:
        return max(self.memory, key=lambda phase: phase.total)

    def fits(self, device: Device) -> bool:
        return self.peak.total <= device.memory and all(plan.fits for plan in self.servers)


def sum_seconds(phases: Iterable[PhaseEstimate], *, overlaps: bool) -> float:
    """Of a step. `overlaps`: its rollout goes on while another step does all else."""
    seconds = {phase.name: phase.seconds for phase in phases}
    if not overlaps:
        return sum(seconds.values())
    rollout = seconds.pop("rollout", 0.0)
    return max(rollout, sum(seconds.values()))


def samples_ahead(work: Workload) -> bool:
    return work.recipe.max_staleness > 0 and work.rollout_servers is not None


def estimate(
    work: Workload,
    use: Utilisation | None = None,
    factors: Mapping[str, float] | None = None,
) -> Estimate:
    """`factors`: by phase, measured seconds over those that `use` gives (of an earlier run)."""
    factors, use = factors or {}, use or default_utilisation(work)
    num_steps, budget_end = find_last_step(work, use, factors)
    work = replace(work, num_steps=num_steps)
    evaluation, num_evaluations = _estimate_evaluations(work, num_steps, use)
    factor = factors.get("evaluate", factors.get("rollout", 1.0))
    return Estimate(
        steps=num_steps,
        budget_end=budget_end,
        phases=estimate_phases(work, use, factors),
        evaluation=replace(evaluation, seconds=evaluation.seconds * factor),
        num_evaluations=num_evaluations,
        memory=phase_memories(work),
        host_bytes=host_bytes(work),
        kv_cache_tokens=kv_cache_tokens(work),
        servers=tuple(plan_servers(work)),
        overlaps=samples_ahead(work),
    )


def estimate_phases(
    work: Workload, use: Utilisation, factors: Mapping[str, float]
) -> tuple[PhaseEstimate, ...]:
    """Of one step."""
    seconds = estimate_seconds(work, use).phases
    flops = {
        "rollout": rollout_flops(work),
        "drafts": drafts_flops(work),
        "reader": reader_flops(work),
        "teacher": add_flops(takeover_flops(work), teacher_flops(work)),
        "update": update_flops(work),
        "record": PhaseFlops(),
    }
    return tuple(
        PhaseEstimate(
            name=name,
            flops=flops[name],
            seconds=seconds.get(name, 0.0) * factors.get(name, 1.0),
            num_gpus=count_gpus(work, name),
        )
        for name in STEP_PHASES
        if seconds.get(name) or flops[name].num_tokens
    )


def count_gpus(work: Workload, phase: str) -> int:
    """That compute a phase: those that train, or servers, or both."""
    training, teachers = {"training": work.num_gpus}, dict[str, int]()
    for place in list_teacher_places(work):
        teachers |= {"teacher" if place.is_served else "training": place.work.num_gpus}
    gpus = training
    if phase in ("rollout", "evaluate"):
        has_teacher = work.recipe.evaluate.teacher if phase == "evaluate" else work.num_teacher_rows
        gpus = {} if work.rollout_servers is None else {"rollout": work.rollout_servers.num_gpus}
        gpus = {**(gpus or training), **(teachers if has_teacher else {})}
    elif phase == "drafts" and any(config.asks_teacher for config in work.recipe.drafts):
        gpus = teachers or training
    elif phase == "teacher":
        gpus = {**teachers, **(training if work.recipe.needs_reference else {})} or training
    return sum(gpus.values())


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────


def find_last_step(
    work: Workload, use: Utilisation, factors: Mapping[str, float]
) -> tuple[int, str | None]:
    """How many steps the run has, and the budget that ends it before `train.steps`, in words."""
    steps = work.recipe.train.steps
    if not work.recipe.train.budget:
        return steps, None

    def spend(num_steps: int) -> dict[str, float]:
        part = replace(work, num_steps=num_steps)
        phases = estimate_phases(part, use, factors)
        spent = _sum_spent(phases, overlaps=samples_ahead(work))
        return {unit: num_steps * value for unit, value in spent.items()}

    limits = work.recipe.train.budget
    numbers = range(1, steps + 1)
    # A run ends with the step that reaches a limit.
    last = bisect_left(numbers, True, key=lambda n: _is_spent(limits, spend(n)) is not None)
    if last == steps:
        return steps, None
    num_steps = numbers[last]
    unit = _is_spent(limits, spend(num_steps))
    assert unit is not None
    limit, spent = map(format_number, (limits[unit], spend(num_steps)[unit] / num_steps))
    return num_steps, f"train.max_{unit} = {limit}, of which a step takes {spent}"


def _is_spent(limits: Mapping[str, float], spent: Mapping[str, float]) -> str | None:
    """The first unit whose limit is reached."""
    return next((unit for unit, limit in limits.items() if spent[unit] >= limit), None)


def _sum_spent(phases: Iterable[PhaseEstimate], *, overlaps: bool) -> dict[str, float]:
    """By the units of budgets, which leave the record of a step out. Of a rollout that overlaps
    only the wait for it counts."""
    phases = list(phases)
    seconds = sum_seconds(phases, overlaps=overlaps)
    seconds -= sum(phase.seconds for phase in phases if phase.name not in TRAINING_PHASES)
    phases = [phase for phase in phases if phase.name in TRAINING_PHASES]
    return {
        "student_tokens": sum(phase.flops.student_tokens for phase in phases),
        "teacher_tokens": sum(phase.flops.teacher_tokens for phase in phases),
        "flops": sum(phase.flops.counted for phase in phases),
        "seconds": seconds,
    }


# ── evaluations ──────────────────────────────────────────────────────────────────────────────────


def _estimate_evaluations(
    work: Workload, num_steps: int, use: Utilisation
) -> tuple[PhaseEstimate, int]:
    """All that the recipe asks for: before, in between and after."""
    recipe, timing = work.recipe, estimate_seconds(work, use)
    flops, total, count = PhaseFlops(), 0.0, 0
    every = recipe.evaluate.every
    validated = range(0, num_steps + 1, every) if every else range(0)
    for step in {0, num_steps, *validated}:
        for policies, _ in recipe.due_evaluations(step, is_last=step == num_steps):
            for policy in policies:
                by_teacher = policy == "teacher"
                if by_teacher and not timing.teacher_evaluation:
                    continue
                if recipe.tasks.is_recorded and ":" not in policy:
                    continue  # nothing answers there; suites of other kinds are evaluated
                flops = add_flops(flops, evaluation_flops(work, by_teacher=by_teacher))
                total += timing.teacher_evaluation if by_teacher else timing.evaluation
                count += 1
    gpus = count_gpus(work, "evaluate")
    return PhaseEstimate(name="evaluate", flops=flops, seconds=total, num_gpus=gpus), count
