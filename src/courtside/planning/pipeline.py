"""Plans of all stages of a pipeline: what one hands to the next has its shape and its lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from courtside.errors import PlanError
from courtside.planning.flops import PhaseFlops, add_flops
from courtside.planning.gpus import Device
from courtside.planning.lengths import KnownLengths
from courtside.planning.measured import MeasuredRun, read_run
from courtside.planning.memory import PhaseMemory
from courtside.planning.models import prune_shape, read_shape
from courtside.planning.plan import CostPlan, PlanOptions, plan_recipe
from courtside.planning.presets import find_preset
from courtside.planning.rates import refuse_unused_rates
from courtside.planning.servers import find_teacher_servers
from courtside.planning.shapes import ModelShape
from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe
from courtside.recipe.pipeline import Pipeline, Stage
from courtside.recipe.prefix_tasks import PrefixTasks
from courtside.recipe.stage_trees import PREFIX, replace_value
from courtside.recipe.teacher import ModelTeacherConfig
from courtside.report.folder.pipeline_folder import STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    stages: Mapping[str, CostPlan]
    """By the stage's name, in their order."""
    device: Device
    num_gpus: int
    """That train."""
    price_per_hour: float | None

    @property
    def seconds(self) -> float:
        """Of all stages, without loading models and exports between stages."""
        return sum(stage.estimate.seconds for stage in self.stages.values())

    @property
    def flops(self) -> PhaseFlops:
        total = PhaseFlops()
        for stage in self.stages.values():
            total = add_flops(total, stage.estimate.flops)
        return total

    @property
    def peak(self) -> tuple[str, PhaseMemory]:
        """The stage that holds the most, and its largest phase."""
        name = max(self.stages, key=lambda name: self.stages[name].estimate.peak.total)
        return name, self.stages[name].estimate.peak

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages.values())

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    @property
    def num_all_gpus(self) -> int:
        """The most that a stage has, those of its servers included."""
        return max(stage.num_all_gpus for stage in self.stages.values())

    @property
    def is_on_paper(self) -> bool:
        return any(stage.is_on_paper for stage in self.stages.values())

    @property
    def gpu_hours(self) -> float:
        """Of the GPUs that each stage has, as long as it runs."""
        return sum(stage.gpu_hours for stage in self.stages.values())

    @property
    def cost(self) -> float | None:
        """In the currency of the price. None: no price was given."""
        return None if self.price_per_hour is None else self.gpu_hours * self.price_per_hour


def plan_pipeline(
    pipeline: Pipeline,
    options: PlanOptions,
    *,
    shape: str | None = None,
    teacher_shape: str | None = None,
    run: Path | None = None,
) -> PipelinePlan:
    """`shape`: of stages whose student is not an earlier one's; `teacher_shape`: the same of
    teachers. `run`: the folder of an earlier run of this pipeline, as far as it came."""
    refuse_unused_rates(options.assume, [stage.recipe for stage in pipeline.stages])
    _refuse_unused_gpus(pipeline, options)
    if teacher_shape is not None and not any(
        _has_outside_teacher(stage, options) for stage in pipeline.stages
    ):
        raise PlanError(
            f"--teacher-shape {teacher_shape}: no stage has a teacher that is another model. "
            "Remove it"
        )
    shapes: dict[str, ModelShape] = {}
    plans: dict[str, CostPlan] = {}
    for stage in pipeline.stages:
        shapes[stage.name] = _find_student(stage, shapes, shape)
        stage_options = _choose_gpus(stage, options)
        servers = find_teacher_servers(
            stage.recipe, stage_options.teacher_gpus, teacher_shape, options.device
        )
        plans[stage.name] = plan_recipe(
            stage.recipe,
            shapes[stage.name],
            _find_teachers(stage, shapes, None if servers else teacher_shape),
            replace(stage_options, lengths=_inherit_lengths(stage, options.lengths, plans)),
            teacher_servers=servers,
            measured=None if run is None else _read_stage(stage, run, options.device),
            loadable=_make_loadable(pipeline, stage),
        )
    return PipelinePlan(
        stages=plans,
        device=options.device,
        num_gpus=options.num_gpus,
        price_per_hour=options.price_per_hour,
    )


def _choose_gpus(stage: Stage, options: PlanOptions) -> PlanOptions:
    """GPUs of servers are for the stages that have such servers."""
    recipe = stage.recipe
    return replace(
        options,
        rollout_gpus=None if recipe.rollout.server is None else options.rollout_gpus,
        teacher_gpus=options.teacher_gpus if recipe.server_teachers else None,
    )


def _refuse_unused_gpus(pipeline: Pipeline, options: PlanOptions) -> None:
    recipes = [stage.recipe for stage in pipeline.stages]
    if options.rollout_gpus is not None and all(r.rollout.server is None for r in recipes):
        raise PlanError(
            f"--rollout-gpus {options.rollout_gpus}: no stage has a rollout.server. Leave it out"
        )
    if options.teacher_gpus is not None and not any(r.server_teachers for r in recipes):
        raise PlanError(
            f"--teacher-gpus {options.teacher_gpus}: no stage has a teacher of kind 'server'. "
            "Leave it out"
        )


def _find_student(stage: Stage, shapes: Mapping[str, ModelShape], preset: str | None) -> ModelShape:
    config = stage.recipe.student
    if config.model.startswith(PREFIX):
        shape = shapes[config.model.removeprefix(PREFIX)]
    elif preset is not None:
        shape = find_preset(preset, "--shape")
    else:
        shape = read_shape(
            config.model, option="--shape", trust_remote_code=config.trust_remote_code
        )
    return prune_shape(shape, config.keep_layers)


def _find_teachers(
    stage: Stage, shapes: Mapping[str, ModelShape], preset: str | None
) -> dict[str, ModelShape]:
    teachers = {}
    for teacher in stage.recipe.model_teachers:
        if not isinstance(teacher, ModelTeacherConfig):
            continue
        if teacher.model.startswith(PREFIX):
            teachers[teacher.model] = shapes[teacher.model.removeprefix(PREFIX)]
        elif preset is not None:
            teachers[teacher.model] = find_preset(preset, "--teacher-shape")
        else:
            teachers[teacher.model] = read_shape(
                teacher.model,
                option="--teacher-shape",
                trust_remote_code=teacher.trust_remote_code,
            )
    return teachers


def _has_outside_teacher(stage: Stage, options: PlanOptions) -> bool:
    if options.teacher_gpus is not None and stage.recipe.server_teachers:
        return True
    return any(
        isinstance(teacher, ModelTeacherConfig) and not teacher.model.startswith(PREFIX)
        for teacher in stage.recipe.model_teachers
    )


def _inherit_lengths(
    stage: Stage, lengths: KnownLengths, plans: Mapping[str, CostPlan]
) -> KnownLengths:
    """Tasks that are made of an earlier stage's run have its lengths."""
    source = next((r.stage for r in stage.references if r.kind == "run"), None)
    if source is None:
        return lengths
    earlier, tasks = plans[source].lengths, stage.recipe.tasks
    prompt, new = earlier.prompt + earlier.observed, lengths.new_tokens
    if isinstance(tasks, PrefixTasks):
        prompt += earlier.new * sum(tasks.depths) / 2
    elif new is None:
        new = earlier.new
    return replace(
        lengths,
        prompt_tokens=prompt if lengths.prompt_tokens is None else lengths.prompt_tokens,
        new_tokens=new,
        source=f"of stage {source}",
    )


def _make_loadable(pipeline: Pipeline, stage: Stage) -> Recipe:
    """The recipe with the models that stages began with: their tokenizers and chat templates."""
    tree: Any = stage.recipe.model_dump(mode="json", exclude_unset=True)
    for reference in stage.references:
        if reference.kind == "model":
            source = pipeline.root_of(pipeline.stage(reference.stage))
            replace_value(tree, reference.path, source.recipe.student.model)
        elif reference.kind == "adapter":
            *sections, key = reference.path
            node = tree
            for section in sections:
                node = node[section]
            del node[key]
    return parse_recipe(tree, name=f"stage {stage.name}")


def _read_stage(stage: Stage, run: Path, device: Device) -> MeasuredRun | None:
    if not (run / STAGES).is_dir():
        raise PlanError(f"--from-run {run}: is not a folder of a pipeline; it has no {STAGES}/")
    folder = run / STAGES / stage.folder_name
    return read_run(folder, device) if folder.is_dir() else None
