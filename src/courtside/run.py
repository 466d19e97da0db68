"""A run in its folder: progress, costs, checkpoints, evaluations and interrupts.

The loop asks it for the next step and reports the outcome; it never changes what is trained.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from courtside.drafts.base import DraftOutcome
from courtside.errors import (
    DraftFailuresError,
    EnvironmentFaultsError,
    Interrupted,
    NotFiniteError,
    RunError,
    ServerError,
    UserError,
)
from courtside.evaluate.comparisons import compare_evaluations
from courtside.evaluate.evaluator import GradedAnswers
from courtside.interrupts import StopSignal, handle_signals, signal_name
from courtside.rank_messages import End, Evaluate, RankStep, Save, Step, add_rank_steps
from courtside.report.alarms import (
    MIN_FIRST_SHIFT,
    NUM_COMPARED,
    RunAlarms,
    check_empty_update,
    check_missing_metrics,
)
from courtside.report.budget import BudgetMeter
from courtside.report.console import RunConsole
from courtside.report.costs import CostMeter, ModelSizes, check_slowdown
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import write_trajectories
from courtside.report.metrics import compute_costs
from courtside.report.page.page import write_report
from courtside.report.trackers import open_trackers
from courtside.run_evaluation import RunEvaluation, describe_evaluation
from courtside.run_state import CheckpointSchedule, restore_from, save_checkpoint
from courtside.runtime import Runtime
from courtside.teacher.judging import judge_hints
from courtside.training import checkpoints
from courtside.types import Scored, Split, Update

INTERRUPTIBLE_PHASES = ("rollout", "drafts", "reader", "teacher", "evaluate")
"""In these the student's weights are those of the last whole step."""


class Run:
    def __init__(self, parts: Runtime, folder: RunFolder, console: RunConsole):
        self.parts, self.folder, self.console = parts, folder, console
        self.recipe, self.ranks = parts.recipe, parts.ranks
        self.alarms = RunAlarms(folder, console)
        self.evaluation = RunEvaluation(parts, folder, console, self.alarms)
        self.meter = CostMeter()
        size = parts.engine.num_parameters
        self.sizes = ModelSizes(
            student=size,
            trained=sum(p.numel() for p in parts.student.weights.trained.values()),
            teachers=parts.teacher_sizes,
            reader=size if parts.reader_is_student else 0,
            route_of=self.recipe.route_of,
        )
        self.num_steps = 0
        """Optimizer steps done."""
        console.watch(parts.progress)
        self.interrupted_by: int | None = None
        """The number of a signal that asked the run to stop."""
        self._stopped_by: int | None = None
        self._failed_phase: str | None = None
        """The phase that an error ended; None: none did."""
        self._rates: list[float] = []
        """Tokens per second of this process's steps."""
        self.schedule = CheckpointSchedule(self.recipe.run.checkpoint_every)
        self._resume()
        self.budget: BudgetMeter | None = None
        if self.recipe.train.budget:
            self.budget = BudgetMeter(self.recipe.train, folder.metrics())
        self.trackers = open_trackers(
            self.recipe.run.trackers,
            folder.path,
            project=self.recipe.run.project,
            run_name=folder.path.name,
            first_step=self.num_steps,
        )

    @property
    def budget_end(self) -> str | None:
        """Which budget is spent; None: there is some left, or none is set."""
        return None if self.budget is None else self.budget.end

    @property
    def is_finished(self) -> bool:
        return self.num_steps >= self.recipe.train.steps or self.budget_end is not None

    # ── what the loop calls ───────────────────────────────────────────────────────────────────────

    @contextmanager
    def handle_exit(self) -> Iterator[None]:
        """Around the loop: explains memory errors, saves on user errors, closes trackers.

        `remaining_steps` could not: an error in the body of a `for` never reaches its generator.
        """
        try:
            with handle_signals(self._handle_signal), self.ranks.share_failures():
                yield
        except StopSignal as stop:
            self._save_and_stop(stop.number)
        except torch.OutOfMemoryError as error:
            fix = "rollout.kv_cache_tokens"
            if not self.parts.student.weights.uses_gradient_checkpointing:
                fix += ", or set student.gradient_checkpointing = true"
            if not self.recipe.train.optimizer_offload:
                fix += ", or train.optimizer_offload = true"
            raise RunError(
                f"out of GPU memory at step {self.num_steps}: {str(error).splitlines()[0]}. The "
                f"last checkpoint is from step {self._last_saved()}. Lower "
                "train.micro_batch_tokens or train.logits_chunk_tokens (neither changes the "
                f"update) or {fix}, and go on in the same folder"
            ) from error
        except (UserError, EnvironmentFaultsError, DraftFailuresError, ServerError):
            # The user must fix something (a task without its field); the steps done are saved.
            # After a part of an update the weights are no longer those of `num_steps` steps.
            if self.num_steps and self._failed_phase != "update":
                self._save()
            raise
        finally:
            self.parts.close_rollouts()
            for tracker in self.trackers:
                tracker.close()
            self.console.finish()
            has_failed = sys.exc_info()[0] is not None
            self.ranks.end(End(stopped_by=self._stopped_by, has_failed=has_failed))

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do. Evaluates before the first; `record` does after each."""
        total = self.recipe.train.steps
        if not self.is_finished:
            self.console.start(self.recipe, total, self.num_steps)
            for note in self.parts.notes:
                self.console.print_line(note)
        else:
            done = self.budget_end or f"all {total} steps are done"
            self.console.print_line(f"{self.folder.path}: {done}; nothing to train")
        if missing := check_missing_metrics(self.folder.metrics(), self.num_steps):
            self.console.print_line(missing)
        self._evaluate_if_due()
        while not self.is_finished:
            self._stop_if_interrupted()
            self.ranks.exchange(Step(number=self.num_steps))
            yield self.num_steps

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        progress = self.parts.progress
        with self.meter.phase(name):
            progress.phase = None
            self.console.phase(name)
            try:
                yield
            except BaseException:
                self._failed_phase = self._failed_phase or name
                raise
        progress.phase = None
        self.console.end_phase(name)
        if self.meter.current_phase is not None:
            self.console.phase(self.meter.current_phase)

    @contextmanager
    def save_failed_batch(self, step: int, scored: Sequence[Scored]) -> Iterator[None]:
        """If a loss or gradient is not finite, its batch is stored for inspection."""
        try:
            yield
        except NotFiniteError as error:
            file = self.folder.path / "failed" / f"step-{step:06d}.parquet"
            file.parent.mkdir(exist_ok=True)
            write_trajectories(file, self.parts.student.batch or scored, {})
            raise NotFiniteError(
                f"{error}. Its batch is in {file}. The last checkpoint is from step "
                f"{self._last_saved()}. Look for a log-probability of -inf there; a lower "
                "train.learning_rate or a `clip` on the loss often helps"
            ) from error

    @contextmanager
    def save_if_servers_fail(self, *results: Any) -> Iterator[None]:
        """Around what brings the weights of a step to its servers. Where that fails, the step is
        done all the same: it is recorded and saved, by all ranks, and the run ends."""
        self.ranks.exchange(None)  # it is done on all of them
        try:
            with self.ranks.leave_together():
                yield
        except ServerError as error:
            self._failed_phase = "update"  # also where saving fails, too
            try:
                self._record_step(*results)
                self._save()
            except Exception as second:  # whatever it is, the servers are why the run ends
                error.args = (f"{error}. The step was not saved either: {second}",)
                raise error from second
            raise

    def record(self, *results: Any) -> None:
        self._record_step(*results)
        self._evaluate_if_due()

    def _record_step(
        self,
        step: int,
        scored: Sequence[Scored],
        update: Update,
        reader_counts: Mapping[str, int],
        drafts: DraftOutcome,
    ) -> None:
        scored, reader_counts, drafts = self._gather_step(scored, reader_counts, drafts)
        if update.teacher_logp:  # the update scored hints
            scored = judge_hints(scored, update)
        if not any(update.num_tokens.values()):
            check_empty_update(self.recipe, scored, update)
        self.num_steps = step + 1
        cost = self.meter.add_step(
            scored,
            update,
            reader_counts,
            sizes=self.sizes,
            is_recorded=self.recipe.tasks.is_recorded,
            draft_usage=drafts.usage,
        )
        seconds = self.meter.lap()
        if self.budget is not None:
            self.budget.add(compute_costs(seconds, cost))
        last = self.is_finished
        row = self.folder.record(
            step,
            scored,
            update,
            seconds=seconds,
            cost=cost,
            store_trajectories=step % self.recipe.run.trajectories_every == 0 or last,
            reader_counts=reader_counts if self.recipe.reader is not None else None,
            draft_counts=drafts.counts,
        )
        self._write_costs()
        for tracker in self.trackers:
            tracker.log(row, step)
        self.console.step(row)
        hints = [outcome for s in scored for outcome in s.hints]
        if any(outcome.is_harmful for outcome in hints):
            self.alarms.check_hints(step, hints)
        if step > NUM_COMPARED and row.get("hints/shift", math.inf) < MIN_FIRST_SHIFT:
            self.alarms.check_shifts(step)
        if any(stage.kind == "rewrite" for stage in self.recipe.drafts):
            self.alarms.check_repairs(step)
        if self.recipe.takeover is not None:
            self.alarms.check_takeovers(step)
        self._note_slowdown(row)
        if self.budget_end is not None:
            self.console.print_line(
                f"ends after {self.num_steps} of {self.recipe.train.steps} steps: {self.budget_end}"
            )
        if last:
            self.alarms.check_finished(self.num_steps)
        if last or self.schedule.is_due(self.num_steps):
            self._save()  # before the evaluation, which may take long

    def _gather_step(
        self, scored: Sequence[Scored], reader_counts: Mapping[str, int], drafts: DraftOutcome
    ) -> tuple[Sequence[Scored], Mapping[str, int], DraftOutcome]:
        """What all ranks did in this step; a signal to any of them stops the run."""
        if self.ranks.size == 1:
            return scored, reader_counts, drafts
        outcomes: list[RankStep] = self.ranks.exchange(
            RankStep(
                reader_counts=reader_counts,
                draft_counts=drafts.counts,
                draft_usage=drafts.usage,
                interrupted_by=self.interrupted_by,
            )
        )
        signals = [outcome.interrupted_by for outcome in outcomes]
        self.interrupted_by = next((number for number in signals if number is not None), None)
        return self.parts.student.batch, *add_rank_steps(outcomes)

    def _note_slowdown(self, row: Mapping[str, Any]) -> None:
        self._rates.append(row.get("tokens_per_second") or 0.0)
        if self.parts.student.weights.device.type == "cpu":
            note = check_slowdown(self._rates, torch.get_num_threads())
            if note is not None:
                self.console.print_line(note)

    def write_report(self) -> Path:
        differences = compare_evaluations(self.folder)
        return write_report(self.folder, differences=differences, decode=self.parts.renderer.pieces)

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def _save(self) -> None:
        if self._last_saved() == self.num_steps:
            return
        with self.phase("checkpoint"), self.schedule.time_save():
            folder = self.folder.checkpoints
            self.ranks.exchange(Save(folder=folder, num_steps=self.num_steps))
            with self.ranks.share_failures():
                save_checkpoint(self.parts, folder, self.num_steps)

    def _resume(self) -> None:
        path = checkpoints.latest(self.folder.checkpoints)
        self.ranks.exchange(path)
        if path is not None:
            self.num_steps = restore_from(self.parts, path)
        checkpoints.tidy(self.folder.checkpoints, keep=self.recipe.run.keep_checkpoints)
        self.folder.rewind(self.num_steps)
        self.meter.restore(self.folder.read_costs())  # also of steps that are now done again

    def _last_saved(self) -> int:
        path = checkpoints.latest(self.folder.checkpoints)
        return checkpoints.num_steps_of(path) if path else 0

    # ── evaluations ───────────────────────────────────────────────────────────────────────────────

    def _evaluate_if_due(self) -> None:
        due = self.recipe.due_evaluations(self.num_steps, is_last=self.is_finished)
        for policies, split in due:
            remaining = self.evaluation.select(policies, split, step=self.num_steps)
            if not remaining:
                continue
            self._stop_if_interrupted()
            try:
                with self.phase("evaluate"):
                    results = self._measure(remaining, split)
            except Exception as error:  # whatever fails after training must not cost the report
                if not self.is_finished:
                    raise
                what = f"{', '.join(remaining)} on {split} tasks"
                self.alarms.report_unmeasured(what, error, step=self.num_steps)
                continue
            for answers in results:
                self._record_evaluation(answers)

    def _measure(self, policies: Sequence[str], split: Split) -> list[GradedAnswers]:
        self.ranks.exchange(Evaluate(policies=tuple(policies), split=split, step=self.num_steps))
        with self.ranks.share_failures():
            return self.evaluation.measure(policies, split, step=self.num_steps)

    def _record_evaluation(self, answers: GradedAnswers) -> None:
        evaluation, trajectories = answers
        self.meter.add_evaluation(evaluation, self.sizes)
        self.folder.record_evaluation(evaluation, trajectories)
        self.alarms.check_faults(evaluation)
        self._write_costs()
        policy, split = evaluation.policy, evaluation.split
        for tracker in self.trackers:
            tracker.log({f"evaluate/{split}/{policy}": evaluation.mean_score}, self.num_steps)
        self.console.evaluation(evaluation, describe_evaluation(evaluation))

    def _write_costs(self) -> None:
        totals = self.meter.totals()
        self.folder.write_costs(totals)
        self.console.costs(totals)

    # ── interrupts ────────────────────────────────────────────────────────────────────────────────

    def _handle_signal(self, number: int) -> None:
        """Stop at once where no weight is being changed; Ctrl-C lets a step's samples be used."""
        self.interrupted_by = number
        phase = self.meter.current_phase
        stops_now = number != signal.SIGINT and phase in INTERRUPTIBLE_PHASES
        if (stops_now or phase == "evaluate") and not self.ranks.is_waited_for:
            raise StopSignal(number)
        if number == signal.SIGINT:
            self.console.print_line("stopping after this step; press Ctrl-C again to stop at once")

    def _stop_if_interrupted(self) -> None:
        if self.interrupted_by is not None:
            self._save_and_stop(self.interrupted_by)

    def _save_and_stop(self, number: int) -> NoReturn:
        self._stopped_by = number
        if self.num_steps == 0:
            raise Interrupted(
                f"stopped by {signal_name(number)} before the first step; nothing was trained. "
                "The same command starts again",
                number,
            )
        self._save()
        raise Interrupted(
            f"stopped by {signal_name(number)} after {self.num_steps} of "
            f"{self.recipe.train.steps} steps; everything is saved in {self.folder.path}. The same "
            "command goes on from there",
            number,
        )
