"""Pipelines: a TOML file with `[[stages]]`, each a recipe that may start from an earlier stage.

A value `stage:NAME` stands for what an earlier stage made: a model, an adapter or a run. The
recipes of all stages are validated with these names in them, before anything runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from courtside.errors import RecipeError
from courtside.recipe.base import Section
from courtside.recipe.builtin import find_recipe
from courtside.recipe.load import (
    RECIPE_PATH,
    apply_override,
    parse_recipe,
    read_tree,
    require_overrides,
    require_path,
)
from courtside.recipe.pipeline_sections import (
    SECTION_NAMES,
    GateConfig,
    LoopConfig,
    PipelineConfig,
    StageConfig,
    split_stage,
)
from courtside.recipe.recipe import Recipe
from courtside.recipe.stage_trees import (
    ITERATION,
    PREFIX,
    PREVIOUS,
    find_references,
    merge_stage,
    replace_value,
    substitute_iteration,
)

MAX_STAGES = 999
"""After repetition; their folders are numbered."""


# ── the stages, in order ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A value of a stage's recipe that an earlier stage provides."""

    path: tuple[str, ...]
    """Its keys: ("student", "model")."""
    stage: str
    """Name of the stage."""
    kind: Literal["model", "adapter", "run"]

    @property
    def field(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    number: int
    """From 1."""
    name: str
    recipe: Recipe
    """With `stage:NAME` where a reference is."""
    references: tuple[Reference, ...]
    gate: GateConfig | None

    @property
    def folder_name(self) -> str:
        return f"{self.number:02d}-{self.name}"

    @property
    def parent(self) -> str | None:
        """The stage that made this one's student; None: it starts from a model of its own."""
        sources = {r.field: r.stage for r in self.references}
        return sources.get("student.model") or sources.get("student.adapter")

    def resolve(self, values: Mapping[tuple[str, ...], str]) -> Recipe:
        """The recipe with values in place of references."""
        tree: Any = self.recipe.model_dump(mode="json", exclude_unset=True)
        for path, value in values.items():
            replace_value(tree, path, value)
        return parse_recipe(tree, name=f"stage {self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def root_of(self, stage: Stage) -> Stage:
        """The stage in which this one's student began."""
        while stage.parent is not None:
            stage = self.stage(stage.parent)
        return stage

    def ancestors(self, stage: Stage) -> list[Stage]:
        """The stages that trained this one's student before it, the last one first."""
        stages = []
        while stage.parent is not None:
            stage = self.stage(stage.parent)
            stages.append(stage)
        return stages


def is_pipeline(path: Path) -> bool:
    """Whether a TOML file has stages."""
    return "stages" in read_tree(path)


def load_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read a pipeline and validate the recipes of all its stages.

    Overrides change the file: `stages.NAME.train.steps=10`, or `base.train.steps=10`.
    """
    file = find_recipe(str(require_path(path, "load_pipeline: path", RECIPE_PATH)))
    require_overrides(overrides)
    tree = read_tree(file)
    for override in overrides:
        apply_override(tree, _address_by_index(tree, override))
    return parse_pipeline(tree, name=str(file), folder=file.parent)


def parse_pipeline(
    tree: Mapping[str, Any], *, name: str = "pipeline", folder: Path = Path()
) -> Pipeline:
    """`folder`: that of the recipes which it names."""
    _refuse_changes(tree.get("stages"), name, "stages")
    config = _validate(PipelineConfig, tree, name, "")
    planned = list(_expand(config, name))
    if len(planned) > MAX_STAGES:
        raise RecipeError(f"{name}: {len(planned)} stages; use at most {MAX_STAGES}")
    base = _load_base(config.base, folder)
    stages: list[Stage] = []
    labels: list[tuple[str, str]] = []
    for number, (stage_config, label) in enumerate(planned, start=1):
        where = f"{name}: stage {stage_config.name!r}"
        if stage_config.name in {stage.name for stage in stages}:
            raise RecipeError(f"{where}: the name is there twice; give each stage its own")
        inherited = base
        if stage_config.recipe is not None:
            inherited = _read_recipe(stage_config.recipe, folder)
        merged = merge_stage(
            inherited, stage_config.changes, stage_config.remove, where=where,
            is_first=not stages,
        )  # fmt: skip
        references = tuple(_resolve_references(merged, labels, where))
        for reference in references:
            replace_value(merged, reference.path, PREFIX + reference.stage)
        stages.append(
            Stage(
                number=number,
                name=stage_config.name,
                recipe=parse_recipe(merged, name=where),
                references=references,
                gate=stage_config.gate,
            )
        )
        labels.append((stage_config.name, label))
    pipeline = Pipeline(stages=tuple(stages))
    for stage in stages:
        _check_stage(pipeline, stage, name)
    return pipeline


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def _load_base(base: str | Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    if base is None:
        return {}
    return _read_recipe(base, folder) if isinstance(base, str) else json.loads(json.dumps(base))


def _read_recipe(recipe: str, folder: Path) -> dict[str, Any]:
    local = folder / recipe
    return read_tree(local if local.is_file() else find_recipe(recipe))


def _expand(config: PipelineConfig, name: str) -> Iterator[tuple[StageConfig, str]]:
    """The stages one by one, each with the name that it has in the file."""
    for index, tree in enumerate(config.stages):
        where = f"stages[{index}]"
        if "repeat" not in tree:
            stage = _validate(StageConfig, split_stage(tree), name, where)
            if ITERATION in json.dumps(tree):
                raise RecipeError(
                    f"{name}:\n  {where}: {ITERATION} is the number of a repetition, and this "
                    "stage is in none. Put it into [[stages]] with `repeat`"
                )
            yield stage, stage.name
            continue
        loop = _validate(LoopConfig, tree, name, where)
        for iteration in range(1, loop.repeat + 1):
            for stage in loop.stages:
                plain = stage.model_dump(mode="json", exclude_unset=True)
                if ITERATION not in stage.name:
                    plain["name"] += f"-{ITERATION}"
                filled = substitute_iteration(plain, iteration)
                yield _validate(StageConfig, filled, name, where), stage.name


def _validate(section: Any, tree: Any, name: str, where: str) -> Any:
    try:
        return section.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            keys = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in problem["loc"])
            text = problem["msg"].removeprefix("Value error, ")
            text = text.replace("Input should be", "must be", 1)
            if problem["type"] == "missing":
                text = "is required"
            elif problem["type"] == "extra_forbidden":
                text = f"unknown key; {_list_keys(section)}"
            elif problem["type"] == "string_pattern_mismatch":
                text = "use letters, digits, - and _ (it names a folder)"
            lines.append(f"  {(where + keys).lstrip('.')}: {text}")
        raise RecipeError(f"{name}:\n" + "\n".join(lines)) from None


def _refuse_changes(stages: Any, name: str, where: str) -> None:
    """Stages have their recipe's sections under `changes` once they are read, and not in a file."""
    for index, stage in enumerate(stages if isinstance(stages, list | tuple) else ()):
        if isinstance(stage, Mapping):
            if "changes" in stage:
                keys = _list_keys(StageConfig)
                raise RecipeError(f"{name}:\n  {where}[{index}].changes: unknown key; {keys}")
            _refuse_changes(stage.get("stages"), name, f"{where}[{index}].stages")


def _list_keys(section: type[Section]) -> str:
    keys = [key for key in section.model_fields if key != "changes"]
    if section is PipelineConfig:
        return f"a pipeline has {', '.join(keys)}; recipe sections go into [base] or a stage"
    if section is LoopConfig:
        return f"a repetition has {', '.join(keys)}"
    return f"a stage has {', '.join(keys)} and the recipe's sections {', '.join(SECTION_NAMES)}"


def _address_by_index(tree: Mapping[str, Any], override: str) -> str:
    """`stages.NAME.…` as `stages.0.…`."""
    match = re.match(r"\s*stages\.([^.=]+)", override)
    stages = tree.get("stages")
    if match is None or not isinstance(stages, list):
        return override
    names = [stage.get("name") if isinstance(stage, dict) else None for stage in stages]
    if match[1] not in names:
        return override
    return f"stages.{names.index(match[1])}{override[match.end() :]}"


# ── references and gates ─────────────────────────────────────────────────────────────────────────

PLACES: Mapping[tuple[str, ...], Literal["model", "adapter", "run"]] = {
    ("student", "model"): "model",
    ("student", "adapter"): "adapter",
    ("student", "average_with", "model"): "model",
    ("teacher", "model"): "model",
    ("teacher", "adapter"): "adapter",
    ("teacher", "routes", "*", "model"): "model",
    ("teacher", "routes", "*", "adapter"): "adapter",
    ("tasks", "path"): "run",
}
"""Where a stage may be named, and what of it is used there."""
RUN_TASKS = ("trajectories", "prefixes")
"""Kinds of tasks that are made of another run."""


def _resolve_references(
    tree: Mapping[str, Any], labels: Sequence[tuple[str, str]], where: str
) -> Iterator[Reference]:
    for path, target in find_references(tree):
        field = ".".join(path)
        pattern = ("teacher", "routes", "*", path[-1]) if path[1:2] == ("routes",) else path
        kind = PLACES.get(pattern)
        if kind is None or (kind == "run" and tree["tasks"].get("kind") not in RUN_TASKS):
            raise RecipeError(
                f"{where}: {field} = {PREFIX + target!r}: a stage can be named in student.model, "
                "student.adapter, student.average_with.model, teacher.model, teacher.adapter, "
                "those of a route, and as tasks.path of kind = 'trajectories' or 'prefixes'"
            )
        name = labels[-1][0] if target == PREVIOUS and labels else None
        # A stage of a repetition is meant by the name in the file, too: the last one before.
        for stage_name, label in labels:
            name = stage_name if target in (stage_name, label) else name
        if name is None:
            earlier = ", ".join(stage_name for stage_name, _ in labels) or "none"
            raise RecipeError(
                f"{where}: {field} = {PREFIX + target!r}: no such stage before this one; there are "
                f"{earlier}. Name one of those, or move the stage"
            )
        yield Reference(path=path, stage=name, kind=kind)


def _check_stage(pipeline: Pipeline, stage: Stage, name: str) -> None:
    where = f"{name}: stage {stage.name!r}"
    for reference in stage.references:
        source = pipeline.stage(reference.stage)
        if reference.kind != "adapter":
            continue
        if source.recipe.student.lora is None:
            raise RecipeError(
                f"{where}: {reference.field} = {PREFIX + source.name!r}: that stage trains all "
                "weights and has no adapter. Give it [student.lora], or name it in "
                f"{reference.path[0]}.model"
            )
        start = source.recipe.student
        if start.lora is not None and start.lora.in_4_bits:
            raise RecipeError(
                f"{where}: {reference.field} = {PREFIX + source.name!r}: the adapter belongs to "
                "the base in 4 bits (student.lora.base_dtype = 'nf4'), and would lie on the base "
                f"as its files have it. Name it in {reference.path[0]}.model, which has both merged"
            )
        if start.keep_layers is not None or start.average_with is not None:
            made_by = "keep_layers" if start.keep_layers is not None else "average_with"
            raise RecipeError(
                f"{where}: {reference.field} = {PREFIX + source.name!r}: the adapter belongs to "
                f"the model that student.{made_by} made, which only that stage has. Name it in "
                f"{reference.path[0]}.model"
            )
    if stage.gate is not None:
        _check_gate(pipeline, stage, stage.gate, where)


def _check_gate(pipeline: Pipeline, stage: Stage, gate: GateConfig, where: str) -> None:
    root = pipeline.root_of(stage)
    for other in (stage, root):
        suites = other.recipe.evaluate.suites
        if gate.suite not in suites:
            raise RecipeError(
                f"{where}: gate.suite = {gate.suite!r}: stage {other.name!r} has no such suite in "
                f"evaluate.suites (it has {', '.join(suites) or 'none'}), and the gate compares "
                f"the end of {stage.name!r} with the start of {root.name!r}. Define it in both, "
                "best in [base.evaluate.suites]"
            )
    if root.recipe.evaluate.before is False:
        raise RecipeError(
            f"{where}: gate: stage {root.name!r} has evaluate.before = false, so there is nothing "
            "to compare with. Set it to true"
        )
    start, end = (_evaluation_fields(s.recipe, gate.suite) for s in (root, stage))
    for field, value in start.items():
        if value != end[field]:
            raise RecipeError(
                f"{where}: gate.suite = {gate.suite!r}: {field} differs between stages "
                f"{root.name!r} and {stage.name!r} ({value} and {end[field]}), so their scores "
                "do not compare. Set it in [base.evaluate], and a suite's `kind` with all of its "
                "fields"
            )


def _evaluation_fields(recipe: Recipe, suite: str) -> dict[str, Any]:
    """What decides the score of a student on a suite, by field."""
    evaluate = recipe.evaluate
    return {
        "evaluate.num_tasks": evaluate.num_tasks,
        "evaluate.samples_per_task": evaluate.samples_per_task,
        "evaluate.temperature": evaluate.temperature,
        "evaluate.max_new_tokens": evaluate.max_new_tokens or recipe.rollout.max_new_tokens,
        f"evaluate.suites.{suite}": recipe.suite_tasks(suite),
        "rollout.stop": recipe.rollout.stop,
    }
