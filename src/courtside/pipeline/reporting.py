"""The report of a pipeline, from the folders of its stages."""

from __future__ import annotations

from pathlib import Path

from courtside.errors import UserError
from courtside.evaluate.comparisons import compare_scores
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.locking import RECIPE
from courtside.report.folder.pipeline_folder import PipelineFolder
from courtside.report.page.pipeline import ScoreRow, StageSummary, write_pipeline_page
from courtside.report.summary import summarize_recipe
from courtside.types import Evaluation

Group = tuple[str, str, str, frozenset[str]]
"""Root stage, policy, split and tasks: scores of one group compare."""


def write_pipeline_report(folder: PipelineFolder) -> Path:
    """What cannot be read is named on the page."""
    problems: list[str] = []
    stages, groups = [], dict[Group, list[tuple[str, Evaluation]]]()
    for name in folder.stage_names:
        try:
            stages.append(summarize_stage(folder, name))
            record = folder.read_record(name)
            if record is None:
                continue
            for evaluation in RunFolder.read(folder.stage_path(name)).evaluations():
                if evaluation.split == "test" and evaluation.policy != "teacher":
                    ids = frozenset(evaluation.scores)
                    key = (record.root or name, evaluation.policy, evaluation.split, ids)
                    groups.setdefault(key, []).append((name, evaluation))
        except UserError as error:
            problems.append(str(error))
    num_roots = len({root for root, *_ in groups})
    scores = [_make_row(key, members, num_roots > 1) for key, members in groups.items()]
    return write_pipeline_page(folder, stages, scores, problems)


def summarize_stage(folder: PipelineFolder, name: str) -> StageSummary:
    path, record = folder.stage_path(name), folder.read_record(name)
    if record is None or not (path / RECIPE).is_file():
        return StageSummary(
            name=name, summary="", num_steps=0, total_steps=0, costs={}, gate=None,
            has_report=False,
        )  # fmt: skip
    run = RunFolder.read(path)
    recipe, metrics = run.recipe(), run.metrics()
    return StageSummary(
        name=name,
        summary=summarize_recipe(recipe),
        num_steps=metrics[-1]["step"] + 1 if metrics else 0,
        total_steps=recipe.train.steps,
        costs=run.read_costs(),
        gate=record.gate,
        has_report=(path / "report.html").is_file(),
    )


def _make_row(key: Group, members: list[tuple[str, Evaluation]], names_root: bool) -> ScoreRow:
    root, policy, split, ids = key
    label = policy.partition(":")[2] or "tasks of the stage"
    first, last = members[0][1], members[-1][1]
    return ScoreRow(
        label=f"{label} (student of {root})" if names_root else label,
        num_tasks=len(ids),
        split=split,
        before=first if first.step == 0 else None,
        after={name: evaluation for name, evaluation in members if evaluation.step > 0},
        difference=None if first is last else compare_scores(first.scores, last.scores),
    )
