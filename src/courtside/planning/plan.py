"""`courtside.plan`: a recipe and a device in, a `CostPlan` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from courtside.errors import ModelError, PlanError
from courtside.planning.changes import Change, propose_changes
from courtside.planning.estimate import Estimate, estimate
from courtside.planning.gpus import Device, find_device
from courtside.planning.lengths import KnownLengths, MeasuredTasks, choose_lengths, measure_tasks
from courtside.planning.measured import MeasuredRun, read_run
from courtside.planning.models import resolve_shapes
from courtside.planning.rates import (
    describe_rates,
    list_used_rates,
    make_rates,
    refuse_unused_rates,
)
from courtside.planning.servers import find_rollout_servers, find_teacher_servers
from courtside.planning.shapes import ModelShape
from courtside.planning.timing import Utilisation, default_utilisation
from courtside.planning.workload import (
    Lengths,
    PlannedModels,
    ServerGpus,
    Workload,
    plan_models,
)
from courtside.recipe import Recipe
from courtside.recipe.load import RECIPE_PATH, load_recipe, require_path
from courtside.report.summary import summarize_recipe

PAPER_NOTE = (
    "several GPUs are on paper, and never measured: weights, gradients and moments are divided "
    "evenly (FSDP2), each rank has a whole sampler, and teachers as sharding.teachers says, "
    "weights are gathered in every pass without overlap, machines are linked at 50 GB/s a GPU"
)
SERVERS_NOTE = (
    "servers are on paper, and never measured: vLLM is planned with the speed of courtside's own "
    "decoding and matmuls, tensor parallelism within a replica, 0.9 of the memory; HTTP, log-probs "
    "as JSON and the weights' way to the servers are left out"
)
OTHER_GPU_NOTE = (
    "times were measured on an H200 and two CPU cores only; for this GPU they are scaled"
)
MIXED_SAMPLING_NOTE = (
    "mixed sampling decodes eagerly, with a pass of each model a token; its time was not measured"
)
HINTS_NOTE = "hints cost what their number and length are: assumed here, measured by a run"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPlan:
    """Estimates of a run that has not started."""

    recipe: str
    """In one line."""
    device: Device
    num_gpus: int
    """That train."""
    num_all_gpus: int
    """Those of the servers included, where they were given."""
    is_on_paper: bool
    """More GPUs than one, which nothing was measured on."""
    models: PlannedModels
    lengths: Lengths
    estimate: Estimate
    utilisation: Utilisation
    factors: Mapping[str, float]
    """By phase: seconds of an earlier run over those of the defaults. Empty: no run was given."""
    price_per_hour: float | None
    """Of one GPU."""
    changes: tuple[Change, ...]
    """What would make it fit; empty where it fits."""
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.estimate.fits(self.device)

    @property
    def hours(self) -> float:
        return self.estimate.seconds / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.num_all_gpus

    @property
    def cost(self) -> float | None:
        """In the currency of the price. None: no price was given."""
        return None if self.price_per_hour is None else self.gpu_hours * self.price_per_hour


def plan(
    recipe: Recipe | str | Path,
    *,
    gpu: str = "h200",
    num_gpus: int = 1,
    rollout_gpus: int | None = None,
    teacher_gpus: int | None = None,
    shape: str | None = None,
    teacher_shape: str | None = None,
    prompt_tokens: float | None = None,
    new_tokens: float | None = None,
    turns: float | None = None,
    observation_tokens: float | None = None,
    context_tokens: float | None = None,
    assume: Mapping[str, float] | None = None,
    price_per_hour: float | None = None,
    run: str | Path | None = None,
) -> CostPlan:
    """Memory, time and cost of a recipe on a device, before it runs; docs/plan.md explains them.

    `recipe`: also a TOML file, or the name of a built-in recipe. `shape`, `teacher_shape`: of
    models whose files are not at hand. Tokens that are not given are measured on the recipe's tasks
    or assumed, which the plan says; `new_tokens` and `observation_tokens` are those of one turn.
    `num_gpus`: that train; `rollout_gpus`, `teacher_gpus`: of all servers with that role together.
    `assume`: what only grades decide, by the names of `--assume`, e.g. `failed_fraction`. `run`: an
    earlier run on the same kind of device, whose lengths, rates and seconds replace defaults.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(require_path(recipe, "plan: recipe", f"a Recipe, {RECIPE_PATH}"))
    device = find_device(gpu, num_gpus)
    options = PlanOptions(
        device=device,
        num_gpus=num_gpus,
        rollout_gpus=rollout_gpus,
        teacher_gpus=teacher_gpus,
        lengths=KnownLengths(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            turns=turns,
            observation_tokens=observation_tokens,
            context_tokens=context_tokens,
        ),
        assume=assume or {},
        price_per_hour=price_per_hour,
    )
    folder = None if run is None else require_path(run, "plan: run", "the path of a run folder")
    return plan_run(recipe, options, shape=shape, teacher_shape=teacher_shape, run=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan is given, beside the recipe and the shapes of its models."""

    device: Device
    num_gpus: int = 1
    """That train."""
    rollout_gpus: int | None = None
    """Of all servers of `rollout.server` together. None: the training GPUs sample."""
    teacher_gpus: int | None = None
    """The same of a teacher behind servers. None: they are left out."""
    lengths: KnownLengths = field(default_factory=KnownLengths)
    assume: Mapping[str, float] = field(default_factory=dict)
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < 1e6:
            raise PlanError(
                f"--price-per-hour {self.price_per_hour:g}: give the price of a GPU and hour"
            )


def plan_run(
    recipe: Recipe,
    options: PlanOptions,
    *,
    shape: str | None = None,
    teacher_shape: str | None = None,
    run: Path | None = None,
) -> CostPlan:
    """As `plan`, with its arguments as records."""
    refuse_unused_rates(options.assume, [recipe])
    servers = find_teacher_servers(recipe, options.teacher_gpus, teacher_shape, options.device)
    local_shape = teacher_shape if servers is None else None
    shapes = resolve_shapes(recipe, shape=shape, teacher_shape=local_shape)
    measured = None if run is None else read_run(run, options.device)
    return plan_recipe(recipe, *shapes, options, teacher_servers=servers, measured=measured)


def plan_recipe(
    recipe: Recipe,
    student: ModelShape,
    teachers: Mapping[str, ModelShape],
    options: PlanOptions,
    *,
    teacher_servers: ServerGpus | None = None,
    measured: MeasuredRun | None = None,
    loadable: Recipe | None = None,
) -> CostPlan:
    """`teachers`: by `teacher.model`. `loadable`: where `recipe` names stages of a pipeline, the
    one whose tasks and tokenizer are measured."""
    device, num_gpus, lengths = options.device, options.num_gpus, options.lengths
    _check_device(recipe, device)
    models = plan_models(recipe, student, teachers, device)
    used_rates = list_used_rates(recipe)
    explicit = {name: rate for name, rate in options.assume.items() if name in used_rates}
    measured_rates = dict[str, float]()
    if measured is not None:
        lengths = measured.fill(lengths, recipe)
        measured_rates = measured.choose_rates(recipe)
    measure = partial(_measure_or_explain, loadable or recipe)
    chosen, assumptions = choose_lengths(recipe, lengths, measure)
    work = Workload(
        recipe=recipe,
        models=models,
        lengths=chosen,
        device=device,
        num_gpus=num_gpus,
        rollout_servers=find_rollout_servers(recipe, options.rollout_gpus, student, device),
        teacher_servers=teacher_servers,
        rates=make_rates({**measured_rates, **explicit}),
    )
    assumptions += describe_rates(
        work, explicit, measured_rates, "" if measured is None else measured.path.name
    )
    factors = {} if measured is None else _choose_factors(work, measured)
    run_estimate = partial(estimate, factors=factors)
    return CostPlan(
        recipe=summarize_recipe(recipe),
        device=device,
        num_gpus=num_gpus,
        num_all_gpus=work.num_all_gpus,
        is_on_paper=work.num_all_gpus > 1,
        models=models,
        lengths=chosen,
        estimate=run_estimate(work),
        utilisation=default_utilisation(work),
        factors=factors,
        price_per_hour=options.price_per_hour,
        changes=propose_changes(work, run_estimate),
        assumptions=tuple(assumptions),
        notes=tuple(_notes(work, measured)),
    )


def _check_device(recipe: Recipe, device: Device) -> None:
    device_kind = recipe.student.device
    if device_kind != "auto" and (device_kind == "cuda") != device.is_gpu:
        raise PlanError(
            f"student.device = {device_kind!r} and --gpu {device.name} contradict each other. Set "
            "student.device = 'auto'"
        )


def _choose_factors(work: Workload, measured: MeasuredRun) -> dict[str, float]:
    """Those of phases that the training GPUs compute: a run says nothing about planned servers."""
    served = set[str]()
    if work.rollout_servers is not None:
        served |= {"rollout", "evaluate"}
    if work.teacher_servers is not None:
        served |= {"drafts", "teacher"}
    return {name: factor for name, factor in measured.factors.items() if name not in served}


def _measure_or_explain(recipe: Recipe) -> MeasuredTasks:
    try:
        return measure_tasks(recipe)
    except ModelError as error:
        raise PlanError(
            f"the lengths of the tasks cannot be measured: {error}. Give --prompt-tokens"
        ) from error


def _notes(work: Workload, measured: MeasuredRun | None) -> list[str]:
    notes = []
    if work.num_gpus > 1:
        notes.append(PAPER_NOTE)
        notes += _refusals(work)
    if work.rollout_servers is not None or work.teacher_servers is not None:
        notes.append(SERVERS_NOTE)
    if work.device.name not in ("h200", "cpu") and measured is None:
        notes.append(OTHER_GPU_NOTE)
    if measured is not None:
        notes.append(measured.describe())
    if work.recipe.reader is not None:
        notes.append(HINTS_NOTE)
    if not work.recipe.model_teachers and work.recipe.teacher is not None:
        notes.append("a custom teacher's cost is not known and left out")
    if work.recipe.server_teachers and work.teacher_servers is None:
        notes.append(
            "a teacher behind servers takes no time here, and its FLOPs follow "
            "teacher.num_parameters; --teacher-gpus plans its servers, too"
        )
    if work.recipe.rollout.server is not None and work.rollout_servers is None:
        notes.append(
            "rollout.server samples elsewhere; the rollout is planned as if it were here. "
            "--rollout-gpus plans its servers"
        )
    if work.recipe.rollout.mixed_sampling is not None:
        notes.append(MIXED_SAMPLING_NOTE)
    return notes


def _refusals(work: Workload) -> list[str]:
    """What such a run would be refused for today."""
    from courtside.assemble.sharded import find_sharding_problems

    problems = find_sharding_problems(work.recipe, work.num_gpus)
    return [f"refused today with {work.num_gpus} processes: {problem}" for problem in problems]
