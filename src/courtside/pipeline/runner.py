"""Runs the stages one after the other; the same call goes on where an earlier one was stopped.

Of several ranks the leader decides what is left to do, hands checkpoints over and passes gates; the
others train the stages that it names.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from courtside.assemble.sharded import refuse_sharded
from courtside.engines.cpu.threads import choose_threads
from courtside.errors import GateFailedError, RecipeError, UserError
from courtside.pipeline.checks import check_stage_inputs
from courtside.pipeline.gate import decide_gate
from courtside.pipeline.handover import checkpoint_sum, hand_over
from courtside.pipeline.inputs import (
    collect_data_digests,
    collect_stage_digests,
    make_record,
    refuse_changed_stage,
)
from courtside.pipeline.reporting import write_pipeline_report
from courtside.ranks import ALONE, Ranks
from courtside.recipe import Recipe
from courtside.recipe.pipeline import Pipeline, Stage
from courtside.recipe.pipeline_sections import GateConfig
from courtside.report.console import RunConsole
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.pipeline_folder import PipelineFolder, StageRecord
from courtside.train_run import forget_start, train_run


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStage:
    """What the leader tells the other ranks to do."""

    recipe: Recipe
    path: Path


def run_pipeline(
    pipeline: Pipeline, path: Path, console: RunConsole, *, ranks: Ranks = ALONE
) -> RunFolder:
    """Run what is not done yet. Returns the run folder of the last stage, read-only.

    A GateFailedError ends the pipeline at the stage whose gate failed. All ranks call it.
    """
    with ranks.share_failures():
        if ranks.is_leader:
            _run_stages(pipeline, path, console, ranks)
            ranks.exchange(None)  # no stage is left
        else:
            _follow_stages(ranks)
    return RunFolder.read(PipelineFolder.read(path).stage_path(pipeline.stages[-1].folder_name))


def _follow_stages(ranks: Ranks) -> None:
    while (stage := ranks.exchange(None)[0]) is not None:
        train_run(stage.recipe, stage.path, RunConsole(), ranks=ranks)
        gc.collect()  # the next stage loads models of its own


def _run_stages(pipeline: Pipeline, path: Path, console: RunConsole, ranks: Ranks) -> None:
    with PipelineFolder.open(path, [stage.folder_name for stage in pipeline.stages]) as folder:
        # Before all else: an export or a stage in a process of its own would round otherwise than
        # one that an earlier stage has set the threads for.
        if note := choose_threads(folder.threads):
            console.print_line(note)
        folder.record_threads(torch.get_num_threads())
        _check_all(pipeline, folder, console, ranks)
        for stage in pipeline.stages:
            _run_stage(pipeline, stage, folder, console, ranks)


def _check_all(
    pipeline: Pipeline, folder: PipelineFolder, console: RunConsole, ranks: Ranks
) -> None:
    """Edited stages and inputs that cannot work are refused before anything runs."""
    for stage in pipeline.stages:
        if ranks.is_sharded:
            refuse_sharded(stage.recipe, ranks)
            _refuse_other_device(pipeline, stage)
        record = folder.read_record(stage.folder_name)
        if record is not None:
            path = folder.stage_path(stage.folder_name)
            refuse_changed_stage(record, stage, collect_data_digests(stage.recipe), path=path)
        if record is None or not record.is_done:
            for note in check_stage_inputs(pipeline, stage):
                console.print_line(f"{stage.name}: {note}")


def _refuse_other_device(pipeline: Pipeline, stage: Stage) -> None:
    """The ranks of all stages are connected once, for one kind of device."""
    first = pipeline.stages[0]
    devices = (first.recipe.student.device, stage.recipe.student.device)
    if devices[0] != devices[1]:
        raise RecipeError(
            f"stages.{stage.name}.student.device = {devices[1]!r}, and that of stage "
            f"{first.name!r} is {devices[0]!r}: several processes train all stages on one kind of "
            "device. Give them the same, or train with one process"
        )


def _run_stage(
    pipeline: Pipeline, stage: Stage, folder: PipelineFolder, console: RunConsole, ranks: Ranks
) -> None:
    name, path = stage.folder_name, folder.stage_path(stage.folder_name)
    record = folder.read_record(name)
    inputs = collect_data_digests(stage.recipe)
    inputs |= collect_stage_digests(pipeline, stage, folder)
    if record is not None and refuse_changed_stage(record, stage, inputs, path=path):
        forget_start(path)
        record = None
    title = f"stage {stage.number} of {len(pipeline.stages)}: {stage.name}"
    if record is not None and record.is_done:
        _check_checkpoint(record, path)
        console.print_line(f"{title}, done before")
    else:
        record = record or make_record(pipeline, stage, inputs)
        folder.write_record(name, record)
        values = {
            reference.path: str(
                hand_over(
                    folder.stage_path(pipeline.stage(reference.stage).folder_name),
                    reference.kind,
                    console,
                )
            )
            for reference in stage.references
        }
        console.print_line(title)
        recipe = stage.resolve(values)
        ranks.exchange(TrainStage(recipe=recipe, path=path))
        train_run(recipe, path, console, num_threads=folder.threads, ranks=ranks)
        ranks.go_on()
        record = replace(
            record,
            recipe=make_record(pipeline, stage, inputs).recipe,
            is_done=True,
            checkpoint=checkpoint_sum(path),
        )
        folder.write_record(name, record)
        gc.collect()  # the next stage loads models of its own
    if stage.gate is not None:
        _pass_gate(pipeline, stage, stage.gate, record, folder, console)
    elif record.gate is not None:  # it had one when it ran
        folder.write_record(name, replace(record, gate=None))
    write_pipeline_report(folder)


def _check_checkpoint(record: StageRecord, path: Path) -> None:
    current = checkpoint_sum(path)
    if current is not None and current != record.checkpoint:
        raise UserError(
            f"{path}: its last checkpoint is not the one that the pipeline made; it was trained on "
            "by another command. Put the old one back, or delete or rename the folder to train "
            "the stage again"
        )


def _pass_gate(
    pipeline: Pipeline,
    stage: Stage,
    gate: GateConfig,
    record: StageRecord,
    folder: PipelineFolder,
    console: RunConsole,
) -> None:
    path = folder.stage_path(stage.folder_name)
    root = RunFolder.read(folder.stage_path(pipeline.root_of(stage).folder_name))
    decision = decide_gate(gate, root, RunFolder.read(path))
    folder.write_record(stage.folder_name, replace(record, gate=decision))
    console.print_line(f"{stage.name}: {decision}")
    if not decision.passed:
        write_pipeline_report(folder)
        raise GateFailedError(
            f"stage {stage.name!r}: {decision}. It is not promoted, and the pipeline ends here. "
            f"All stages are kept: {folder.path / 'report.html'} compares them, and {path} has the "
            "weights. Raise gate.max_loss to go on with them, or delete or rename that folder and "
            "train the stage with other settings (a lower learning rate, more background text)"
        )
    link = folder.promote(hand_over(path, "model", console))
    console.print_line(f"{stage.name}: promoted as {link}")
