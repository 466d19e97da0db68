"""The plan: tokens, FLOPs, memory and seconds of a recipe on a device, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from courtside.planning.flops import (
    PhaseFlops,
    add_flops,
    evaluation_flops,
    reader_flops,
    rollout_flops,
    served_teacher_flops,
    teacher_flops,
    update_flops,
)
from courtside.planning.gpus import Device
from courtside.planning.memory import PhaseMemory, host_bytes, kv_cache_tokens, phase_memories
from courtside.planning.servers import ServerPlan, on_servers, plan_servers
from courtside.planning.timing import (
    Utilisation,
    default_utilisation,
    estimate_seconds,
    find_sampler,
)
from courtside.planning.workload import Workload

STEP_PHASES = ("rollout", "reader", "teacher", "update", "record")


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
        seconds = {phase.name: phase.seconds for phase in self.phases}
        if not self.overlaps:
            return sum(seconds.values())
        rollout = seconds.pop("rollout", 0.0)
        return max(rollout, sum(seconds.values()))

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


def estimate(
    work: Workload,
    use: Utilisation | None = None,
    factors: Mapping[str, float] | None = None,
) -> Estimate:
    """`factors`: by phase, measured seconds over those that `use` gives (of an earlier run)."""
    factors = factors or {}
    timing = estimate_seconds(work, use or default_utilisation(work))
    flops = {
        "rollout": rollout_flops(work),
        "reader": reader_flops(work),
        "teacher": teacher_flops(work),
        "update": update_flops(work),
        "record": PhaseFlops(),
    }
    places = {"rollout": find_sampler(work)}
    if work.teacher_servers is not None:
        flops["teacher"] = served_teacher_flops(work)
        places["teacher"] = on_servers(work, work.teacher_servers)
    phases = tuple(
        PhaseEstimate(
            name=name,
            flops=flops[name],
            seconds=timing.phases[name] * factors.get(name, 1.0),
            num_gpus=places.get(name, work).num_gpus,
        )
        for name in STEP_PHASES
        if name in timing.phases
    )
    evaluation, num_evaluations = _estimate_evaluations(
        work, timing.evaluation, timing.teacher_evaluation
    )
    factor = factors.get("evaluate", factors.get("rollout", 1.0))
    return Estimate(
        steps=work.recipe.train.steps,
        phases=phases,
        evaluation=PhaseEstimate(
            name="evaluate",
            flops=evaluation.flops,
            seconds=evaluation.seconds * factor,
            num_gpus=evaluation.num_gpus,
        ),
        num_evaluations=num_evaluations,
        memory=phase_memories(work),
        host_bytes=host_bytes(work),
        kv_cache_tokens=kv_cache_tokens(work),
        servers=tuple(plan_servers(work)),
        overlaps=work.recipe.max_staleness > 0 and work.rollout_servers is not None,
    )


def _estimate_evaluations(
    work: Workload, seconds: float, teacher_seconds: float
) -> tuple[PhaseEstimate, int]:
    """All that the recipe asks for: before, in between and after."""
    recipe = work.recipe
    flops, total, count = PhaseFlops(), 0.0, 0
    for step in {0, recipe.train.steps, *_validation_steps(work)}:
        for policies, _ in recipe.due_evaluations(step, is_last=step == recipe.train.steps):
            for policy in policies:
                by_teacher = policy == "teacher"
                if by_teacher and not teacher_seconds:
                    continue
                flops = add_flops(flops, evaluation_flops(work, by_teacher=by_teacher))
                total += teacher_seconds if by_teacher else seconds
                count += 1
    gpus = find_sampler(work).num_gpus
    return PhaseEstimate(name="evaluate", flops=flops, seconds=total, num_gpus=gpus), count


def _validation_steps(work: Workload) -> range:
    every, steps = work.recipe.evaluate.every, work.recipe.train.steps
    return range(0, steps + 1, every) if every else range(0)
