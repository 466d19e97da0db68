"""A plan as lines and rows, for a terminal and a page alike."""

from __future__ import annotations

from courtside.planning.estimate import PhaseEstimate
from courtside.planning.flops import PhaseFlops
from courtside.planning.gpus import GIB
from courtside.planning.pipeline import PipelinePlan
from courtside.planning.plan import CostPlan
from courtside.planning.servers import ServerPlan
from courtside.report.summary import format_duration, format_number

Rows = tuple[list[str], list[list[str]]]
"""Columns, and cells."""


def headline(plan: CostPlan) -> str:
    lines = [plan.recipe, _place(plan)]
    if plan.estimate.servers:
        lines.append(_describe_servers(plan))
    return "\n".join(lines)


def _place(plan: CostPlan | PipelinePlan) -> str:
    number = plan.num_all_gpus
    device = plan.device.name if number == 1 else f"{number} × {plan.device.name}"
    where = f"{device}, {plan.device.memory / GIB:,.0f} GiB"
    return f"on {where}{' each' if number > 1 else ''}{' (on paper)' if plan.is_on_paper else ''}"


def _describe_servers(plan: CostPlan) -> str:
    return "; ".join([f"{plan.num_gpus} to train", *map(_describe_server, plan.estimate.servers)])


def _describe_server(plan: ServerPlan) -> str:
    servers = plan.servers
    each = f" of {servers.tensor_parallel}" if servers.tensor_parallel > 1 else ""
    return f"{servers.num_gpus} for {servers.num_replicas} {plan.role} servers{each}"


def stage_rows(pipeline: PipelinePlan) -> Rows:
    """A stage each, then all of them."""
    columns = [
        "stage",
        "steps",
        "time",
        "tokens in",
        "tokens out",
        "FLOPs",
        "GiB",
        "in the",
        "fits",
    ]
    rows = []
    for name, plan in pipeline.stages.items():
        estimate, peak = plan.estimate, plan.estimate.peak
        steps, fits = f"{estimate.steps:,}", "yes" if plan.fits else "no"
        work = _work_cells(estimate.seconds, estimate.flops)
        rows.append([name, steps, *work, _gib(peak.total), peak.phase, fits])
    name, peak = pipeline.peak
    fits = "yes" if pipeline.fits else "no"
    work = _work_cells(pipeline.seconds, pipeline.flops)
    rows.append(["all stages", "", *work, _gib(peak.total), peak.phase, fits])
    return columns, rows


def _work_cells(seconds: float, flops: PhaseFlops) -> list[str]:
    counts = (flops.input_tokens, flops.output_tokens, flops.counted)
    return [format_duration(seconds), *map(_count, counts)]


def pipeline_headline(pipeline: PipelinePlan) -> str:
    return f"a pipeline of {len(pipeline.stages)} stages\n{_place(pipeline)}"


def pipeline_lines(pipeline: PipelinePlan) -> list[str]:
    name, peak = pipeline.peak
    verdict = "fits" if pipeline.fits else "DOES NOT FIT"
    return [
        f"{verdict}: {_gib(peak.total)} GiB at the most, in the {peak.phase} of stage {name}, of "
        f"{_gib(pipeline.device.memory)} GiB",
        *_cost_lines("all stages", pipeline),
    ]


def describe_models(plan: CostPlan) -> str:
    models = plan.models
    text = f"student {models.student.name}: {format_number(models.num_student)} parameters"
    if models.num_adapter is not None:
        text += f", {format_number(models.num_trained)} of them trained (LoRA)"
    for teacher in models.teachers:
        shape = teacher.shape
        text += f"; teacher {shape.name}: {format_number(shape.num_parameters)}, {teacher.dtype}"
    return text


def phase_rows(plan: CostPlan) -> Rows:
    """Of a step; then all steps, and the evaluations."""
    estimate = plan.estimate
    columns = ["a step", "time", "tokens in", "tokens out", "FLOPs", "executed", "of the peak"]
    rows = [_phase_row(phase.name, phase, plan) for phase in estimate.phases]
    gpus = plan.num_all_gpus
    step = PhaseEstimate(
        name="", flops=estimate.step_flops, seconds=estimate.step_seconds, num_gpus=gpus
    )
    rows.append(_phase_row("whole step", step, plan))
    steps = PhaseEstimate(
        name="",
        seconds=estimate.steps * step.seconds,
        flops=_times(step.flops, estimate.steps),
        num_gpus=gpus,
    )
    rows.append(_phase_row(f"{estimate.steps:,} steps", steps, plan))
    if estimate.num_evaluations:
        name = f"{estimate.num_evaluations} evaluations"
        rows.append(_phase_row(name, estimate.evaluation, plan))
    whole = PhaseEstimate(name="", flops=estimate.flops, seconds=estimate.seconds, num_gpus=gpus)
    rows.append(_phase_row("whole run", whole, plan))
    return columns, rows


def _times(flops: PhaseFlops, number: int) -> PhaseFlops:
    fields = {name: getattr(flops, name) * number for name in PhaseFlops.__dataclass_fields__}
    return PhaseFlops(**fields)


def _phase_row(name: str, phase: PhaseEstimate, plan: CostPlan) -> list[str]:
    flops = phase.flops
    rate = plan.device.flops * phase.num_gpus * phase.seconds
    return [
        name,
        format_duration(phase.seconds) if phase.seconds else "–",
        _count(flops.input_tokens),
        _count(flops.output_tokens),
        _count(flops.counted),
        _count(flops.executed),
        f"{flops.executed / rate:.0%}" if flops.executed and rate else "–",
    ]


def _count(value: float) -> str:
    return format_number(value) if value else "–"


def memory_rows(plan: CostPlan) -> Rows:
    """A row for each part, a column for each phase, in GiB of one GPU."""
    phases = plan.estimate.memory
    names = list(dict.fromkeys(name for phase in phases for name in phase.parts))
    rows = [
        [name, *(_gib(phase.parts[name]) if name in phase.parts else "–" for phase in phases)]
        for name in names
    ]
    rows.append(["whole", *(_gib(phase.total) for phase in phases)])
    unit = "GiB of the machine" if not plan.device.is_gpu else "GiB of one GPU"
    return [unit, *(phase.phase for phase in phases)], rows


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"


def summary_lines(plan: CostPlan) -> list[str]:
    estimate = plan.estimate
    peak, memory = estimate.peak, plan.device.memory
    lines = [describe_models(plan)]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    trains = "training: " if estimate.servers else ""
    lines.append(
        f"{verdict}: {trains}{_gib(peak.total)} GiB at the most, in the {peak.phase}, of "
        f"{_gib(memory)} GiB"
    )
    for server in estimate.servers:
        lines.append(
            f"a {server.role} server's GPU: {_gib(server.weight_bytes)} GiB of {_gib(memory)} are "
            f"weights; a replica's KV cache holds {format_number(server.cache_tokens)} tokens, "
            f"{server.rows:,.0f} sequences of the planned length"
        )
    if estimate.overlaps:
        lines.append("the next step is sampled while this one trains: a step takes the longer one")
    if estimate.host_bytes:
        lines.append(f"main memory for AdamW's moments: {_gib(estimate.host_bytes)} GiB, pinned")
    if estimate.budget_end is not None:
        lines.append(f"ends after {estimate.steps:,} steps by its budget: {estimate.budget_end}")
    if estimate.step_flops.calls:
        calls, tokens = estimate.step_flops.calls, estimate.step_flops.endpoint_tokens
        lines.append(
            f"calls to endpoints: {_count(calls)} a step, {_count(calls * estimate.steps)} in all, "
            f"with {_count(tokens * estimate.steps)} tokens; their FLOPs and price are not here"
        )
    lines += [f"{name}: {rate}" for name, rate in _rates(plan)]
    lines += _cost_lines("whole run", plan)
    return lines


def _cost_lines(what: str, plan: CostPlan | PipelinePlan) -> list[str]:
    hours = f"{format_duration(3600 * plan.hours)} = {plan.hours:,.3g} h"
    if plan.num_all_gpus > 1:
        hours += f", {plan.gpu_hours:,.3g} GPU hours"
    money = "money: give --price-per-hour"
    if plan.cost is not None:
        cost = f"{plan.cost:,.2f}" if plan.cost >= 0.1 else f"{plan.cost:.2g}"
        money = f"money: {cost}, at {plan.price_per_hour:,.2f} a GPU and hour"
    return [f"{what}: {hours}, models loaded in addition", money]


def _rates(plan: CostPlan) -> list[tuple[str, str]]:
    rates = []
    for phase in plan.estimate.phases:
        is_sampling = phase.name == "rollout"
        tokens = phase.flops.output_tokens if is_sampling else phase.flops.num_tokens
        if tokens and phase.seconds:
            rates.append((phase.name, f"{format_number(tokens / phase.seconds)} tokens/s"))
    return rates


def change_rows(plan: CostPlan) -> Rows:
    columns = ["change", "GiB then", "in the", "a step", "fits"]
    rows = [
        [
            change.setting,
            _gib(change.peak_bytes),
            change.peak_phase,
            format_duration(change.step_seconds),
            "yes" if change.fits else "no",
        ]
        for change in plan.changes
    ]
    return columns, rows
