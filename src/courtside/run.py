"""A run in its folder: progress, costs, checkpoints, evaluations and interrupts.

The loop asks it for the next step and reports the outcome; it never changes what is trained.
"""

from __future__ import annotations

import signal
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import torch

from courtside.errors import (
    EnvironmentFaultsError,
    Interrupted,
    NotFiniteError,
    RunError,
    UserError,
)
from courtside.evaluate.collateral import collateral_kl, collateral_kl_on_prompts
from courtside.evaluate.comparisons import compare_evaluations
from courtside.evaluate.episodes import logp_drop
from courtside.evaluate.evaluator import GradedAnswers
from courtside.interrupts import StopSignal, handle_signals, signal_name
from courtside.recipe import Recipe
from courtside.report.console import RunConsole
from courtside.report.costs import CostMeter, forward_flops, training_flops
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import write_trajectories
from courtside.report.metrics import (
    check_harmful_hints,
    check_missing_metrics,
    check_nothing_trained,
    check_slowdown,
)
from courtside.report.page.page import write_report
from courtside.report.trackers import open_trackers
from courtside.runtime import Runtime
from courtside.teacher.judging import judge_hints
from courtside.training import checkpoints
from courtside.types import Evaluation, Scored, Split, Trajectory, Update

HARMFUL_HINTS = "harmful_hints"
"""Kind of alarm."""
STEPS_BETWEEN_ALARMS = 10
"""Of one kind."""
INTERRUPTIBLE_PHASES = ("rollout", "reader", "teacher", "evaluate")
"""In these the student's weights are those of the last whole step."""


class Run:
    def __init__(self, parts: Runtime, folder: RunFolder, console: RunConsole):
        self.parts, self.folder, self.console = parts, folder, console
        self.recipe = parts.recipe
        self.meter = CostMeter()
        self.num_steps = 0
        """Optimizer steps done."""
        console.watch(parts.progress)
        self.interrupted_by: int | None = None
        """The number of a signal that asked the run to stop."""
        self._rates: list[float] = []
        """Tokens per second of this process's steps."""
        self._resume()
        self.trackers = open_trackers(
            self.recipe.run.trackers,
            folder.path,
            project=self.recipe.run.project,
            run_name=folder.path.name,
            first_step=self.num_steps,
        )

    # ── what the loop calls ───────────────────────────────────────────────────────────────────────

    @contextmanager
    def handle_exit(self) -> Iterator[None]:
        """Around the loop: explains memory errors, saves on user errors, closes trackers.

        `remaining_steps` could not: an error in the body of a `for` never reaches its generator.
        """
        try:
            with handle_signals(self._handle_signal):
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
        except (UserError, EnvironmentFaultsError):
            # The user must fix something (a task without its field); the steps done are saved.
            if self.num_steps:
                self._save()
            raise
        finally:
            for tracker in self.trackers:
                tracker.close()
            self.console.finish()

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do. Evaluates before the first; `record` does after each."""
        total = self.recipe.train.steps
        if self.num_steps < total:
            self.console.start(self.recipe, total, self.num_steps)
            for note in self.parts.notes:
                self.console.print_line(note)
        else:
            self.console.print_line(
                f"{self.folder.path}: all {total} steps are done; nothing to train"
            )
        if missing := check_missing_metrics(self.folder.metrics(), self.num_steps):
            self.console.print_line(missing)
        self._evaluate_if_due()
        while self.num_steps < total:
            self._stop_if_interrupted()
            yield self.num_steps

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        progress = self.parts.progress
        with self.meter.phase(name):
            progress.phase = None
            self.console.phase(name)
            yield
        progress.phase = None
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
            write_trajectories(file, scored, {})
            raise NotFiniteError(
                f"{error}. Its batch is in {file}. The last checkpoint is from step "
                f"{self._last_saved()}. Look for a log-probability of -inf there; a lower "
                "train.learning_rate or a `clip` on the loss often helps"
            ) from error

    def record(
        self, step: int, scored: Sequence[Scored], update: Update, counts: Mapping[str, int]
    ) -> None:
        if update.teacher_logp:  # the update scored hints
            scored = judge_hints(scored, update)
        if not any(update.num_tokens.values()):
            check_empty_update(self.recipe, scored, update)
        self.num_steps = step + 1
        self._add_step_costs(scored, update, counts)
        last = self.num_steps == self.recipe.train.steps
        row = self.folder.record(
            step,
            scored,
            update,
            seconds=self.meter.lap(),
            store_trajectories=step % self.recipe.run.trajectories_every == 0 or last,
            reader_counts=counts if self.recipe.reader is not None else None,
        )
        self.folder.write_costs(self.meter.totals())
        for tracker in self.trackers:
            tracker.log(row, step)
        self.console.step(row)
        self._check_hints(step, scored)
        self._note_slowdown(row)
        if last:
            self._record_alarms()
        if self.num_steps % self.recipe.run.checkpoint_every == 0 or last:
            self._save()  # before the evaluation, which may take long
        self._evaluate_if_due()

    def _check_hints(self, step: int, scored: Sequence[Scored]) -> None:
        """Alarm where most hints do harm, and again after some steps where they still do."""
        alarm = check_harmful_hints([outcome for s in scored for outcome in s.hints])
        if alarm is None:
            return
        steps = [row["step"] for row in self.folder.alarms() if row.get("kind") == HARMFUL_HINTS]
        if not steps or step - max(steps) >= STEPS_BETWEEN_ALARMS:
            self.folder.record_alarm({"step": step, "kind": HARMFUL_HINTS, "message": alarm})
            self.console.print_line(f"step {step + 1}: {alarm}")

    def _note_slowdown(self, row: Mapping[str, Any]) -> None:
        self._rates.append(row.get("tokens_per_second") or 0.0)
        note = check_slowdown(self._rates, torch.get_num_threads())
        if note is not None and self.parts.student.weights.device.type == "cpu":
            self.console.print_line(note)

    def _record_alarms(self) -> None:
        rows = self.folder.metrics()
        alarms = (check_nothing_trained(rows), check_missing_metrics(rows, self.num_steps))
        for alarm in filter(None, alarms):
            self.folder.record_alarm({"step": self.num_steps - 1, "message": alarm})
            self.console.print_line(alarm)

    def write_report(self) -> Path:
        differences = compare_evaluations(self.folder)
        return write_report(self.folder, differences=differences, decode=self.parts.renderer.pieces)

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def _save(self) -> None:
        if self._last_saved() == self.num_steps:
            return
        with self.phase("checkpoint"):
            student = self.parts.student
            optimizer = checkpoints.optimizer_tensors(student.optimizer, student.weights.trained)
            checkpoints.save(
                self.folder.checkpoints,
                self.num_steps,
                {**model_tensors(self.parts), "optimizer": optimizer},
                keep=self.recipe.run.keep_checkpoints,
            )

    def _resume(self) -> None:
        path = checkpoints.latest(self.folder.checkpoints)
        if path is not None:
            saved = checkpoints.load(path)
            restore(self.parts, saved)
            self.num_steps = saved.num_steps
        checkpoints.tidy(self.folder.checkpoints, keep=self.recipe.run.keep_checkpoints)
        self.folder.rewind(self.num_steps)
        self.meter.restore(self.folder.read_costs())  # also of steps that are now done again

    def _last_saved(self) -> int:
        path = checkpoints.latest(self.folder.checkpoints)
        return checkpoints.num_steps_of(path) if path else 0

    # ── evaluations and costs ─────────────────────────────────────────────────────────────────────

    def _evaluate_if_due(self) -> None:
        skipped: set[Split] = set()
        for policies, split in self._due_evaluations():
            done = {(e.step, e.policy, e.split) for e in self.folder.evaluations()}
            policies = [p for p in policies if (self.num_steps, p, split) not in done]
            if not policies:
                continue
            reason = self.parts.evaluator.reason_not_to(split)
            if reason is not None:
                if self.num_steps == 0 and split not in skipped:
                    self.console.print_line(f"not evaluated on {split} tasks: {reason}")
                skipped.add(split)
                continue
            self._stop_if_interrupted()
            try:
                with self.phase("evaluate"):
                    results = self._evaluate(policies, split)
            except Exception as error:  # whatever fails after training must not cost the report
                if not self._is_trained:
                    raise
                self._report_unmeasured(f"{', '.join(policies)} on {split} tasks", error)
                continue
            for answers in results:
                self._record_evaluation(answers)

    def _record_evaluation(self, answers: GradedAnswers) -> None:
        evaluation, trajectories = answers
        policy, split = evaluation.policy, evaluation.split
        self._add_evaluation_costs(evaluation)
        self.folder.record_evaluation(evaluation, trajectories)
        if faults := evaluation.metrics.get("environment_faults", 0):
            message = (
                f"{policy} on {split} tasks: {faults:g} episodes were ended by bugs in the "
                "environment and are not in the score"
            )
            self.folder.record_alarm({"step": self.num_steps, "message": message})
        self.folder.write_costs(self.meter.totals())
        for tracker in self.trackers:
            tracker.log({f"evaluate/{split}/{policy}": evaluation.mean_score}, self.num_steps)
        self.console.print_line(
            f"{policy} on {len(evaluation.scores)} {split} tasks after {self.num_steps} steps: "
            f"{evaluation.mean_score:.1%} (95% interval {evaluation.ci_low:.1%} to "
            f"{evaluation.ci_high:.1%}){_describe_errors(evaluation)}"
        )

    def _evaluate(self, policies: Sequence[str], split: Split) -> list[GradedAnswers]:
        evaluator, step = self.parts.evaluator, self.num_steps
        if policies == ["teacher"]:
            return [evaluator.evaluate(split, step=step, policy="teacher")]
        results = evaluator.evaluate_suites(split, policies, step=step)
        is_drop_measured = self.recipe.tasks.is_environment and step > 0 and split == "test"
        if is_drop_measured and "student" in results:
            results["student"] = self._measure_drop(results["student"])
        return list(results.values())

    def _measure_drop(self, answers: GradedAnswers) -> GradedAnswers:
        evaluation = answers.evaluation
        try:
            untrained = self.folder.evaluation_trajectories(replace(evaluation, step=0))
            metrics = logp_drop(untrained, self.parts.engine)
            if self.recipe.evaluate.collateral and self._is_trained:
                metrics |= self._measure_collateral(untrained)
        except (UserError, RunError) as error:
            self._report_unmeasured("logp_drop", error)
            return answers
        return answers._replace(
            evaluation=replace(evaluation, metrics={**evaluation.metrics, **metrics})
        )

    def _measure_collateral(self, untrained_turns: Sequence[Trajectory]) -> dict[str, float]:
        before, after = self.parts.load_untrained(), self.parts.local_engine
        return {
            **collateral_kl(untrained_turns, before, after),
            **collateral_kl_on_prompts(before, after, self.parts.renderer, seed=self.recipe.seed),
        }

    @property
    def _is_trained(self) -> bool:
        return self.num_steps == self.recipe.train.steps

    def _report_unmeasured(self, what: str, error: Exception) -> None:
        """On the console and in the report; the evaluation is tried again by the next command."""
        reason = str(error)
        if not isinstance(error, UserError | RunError):
            reason = f"{type(error).__name__}: {error}"
            warnings.warn("".join(traceback.format_exception(error)), stacklevel=2)
        message = f"not measured after training: {what} ({reason})"
        self.folder.record_alarm({"step": self.num_steps, "message": message})
        self.console.print_line(message)

    def _due_evaluations(self) -> Iterator[tuple[list[str], Split]]:
        """Test tasks before and after training, validation tasks in between. Policies that come
        together are evaluated together."""
        config = self.recipe.evaluate
        if self.num_steps in (0, self.recipe.train.steps):
            yield ["student", *(f"student:{suite}" for suite in config.suites)], "test"
        gate = config.teacher and self.recipe.teacher is not None
        if self.num_steps == 0 and gate and self.parts.evaluator.teacher_can_answer():
            yield ["teacher"], "test"
        if config.every and self.num_steps % config.every == 0:
            yield ["student"], "validation"

    def _add_step_costs(
        self, scored: Sequence[Scored], update: Update, counts: Mapping[str, int]
    ) -> None:
        trained = sum(p.numel() for p in self.parts.student.weights.trained.values())
        size = self.parts.engine.num_parameters
        for s in scored:
            length = len(s.trajectory.token_ids)
            teacher_size = self.parts.teacher_sizes[s.target.teacher] if s.target else size
            if s.trajectory.source != "dataset" and not self.recipe.tasks.is_recorded:
                writer_size = size if s.trajectory.source == "student" else teacher_size
                self.meter.add("rollout", input_tokens=length - s.trajectory.num_completion_tokens,
                               output_tokens=s.trajectory.num_completion_tokens,
                               flops=forward_flops(writer_size, length))  # fmt: skip
            if s.target is not None or any(hint.shift is not None for hint in s.hints):
                # The update's own pass is the trunk of deferred hints.
                trunk = 0 if s.deferred else length
                total = trunk + (s.target.num_context_tokens if s.target else 0)
                self.meter.add(
                    "teacher", input_tokens=total, flops=forward_flops(teacher_size, total)
                )
            if s.reference is not None:
                self.meter.add("teacher", input_tokens=length, flops=forward_flops(size, length))
            num = _num_forward_tokens(s.trajectory, update.student_logp.get(s.trajectory.id))
            if num:
                flops = training_flops(size, num, trained)
                self.meter.add("update", input_tokens=num, flops=flops)
        reader_tokens = {
            name: counts.get(f"model/{name}", 0) for name in ("input_tokens", "output_tokens")
        }
        if any(reader_tokens.values()):
            is_student = self.parts.reader_is_student
            flops = forward_flops(size, sum(reader_tokens.values())) if is_student else 0.0
            self.meter.add("reader", **reader_tokens, flops=flops)

    def _add_evaluation_costs(self, evaluation: Evaluation) -> None:
        num_tokens = round(
            evaluation.metrics["length"] * len(evaluation.scores) * evaluation.metrics["samples"]
        )
        size = self.parts.engine.num_parameters
        if evaluation.policy == "teacher":  # several teachers share the tasks: about equally
            sizes = self.parts.teacher_sizes.values()
            size = round(sum(sizes) / len(sizes))
        self.meter.add("evaluate", output_tokens=num_tokens, flops=forward_flops(size, num_tokens))

    # ── interrupts ────────────────────────────────────────────────────────────────────────────────

    def _handle_signal(self, number: int) -> None:
        """Stop at once where no weight is being changed; Ctrl-C lets a step's samples be used."""
        self.interrupted_by = number
        phase = self.meter.current_phase
        if phase == "evaluate" or (number != signal.SIGINT and phase in INTERRUPTIBLE_PHASES):
            raise StopSignal(number)
        if number == signal.SIGINT:
            self.console.print_line("stopping after this step; press Ctrl-C again to stop at once")

    def _stop_if_interrupted(self) -> None:
        if self.interrupted_by is not None:
            self._save_and_stop(self.interrupted_by)

    def _save_and_stop(self, number: int) -> NoReturn:
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


def check_empty_update(recipe: Recipe, scored: Sequence[Scored], update: Update) -> None:
    """An empty batch is not a zero loss: raise unless the student made no mistake to correct."""
    if recipe.reader is not None:
        hints = [hint for s in scored for hint in s.hints]
        # A threshold that drops every hint of the first step is a mistake in the recipe; later the
        # student may no longer need any of them. Harmful hints have an alarm of their own.
        if not hints or any(hint.drop_reason == "harmful" for hint in hints):
            return
        if update.step > 0 and all(hint.drop_reason is not None for hint in hints):
            return
    elif scored and recipe.rollout.corrections and all(x.on == "dataset" for x in recipe.losses):
        num_wrong = sum(bool(turn.events) for s in scored for turn in s.trajectory.turns)
        if not num_wrong:
            return
        raise RunError(
            f"step {update.step}: {num_wrong} turns went wrong, and the environment says of none "
            "what would have been right, so rollout.corrections has nothing to imitate. Put it "
            "into the events' details as `correct`, or remove rollout.corrections"
        )
    raise RunError(
        f"step {update.step}: no trajectory has anything to train on (of {len(scored)}, "
        f"{sum(not s.has_target for s in scored)} have no teacher). An empty batch is not a zero "
        "loss. Look at the tasks, the teacher's context and each loss's `on`"
    )


def _describe_errors(evaluation: Evaluation) -> str:
    """Of episodes: the share of turns with an error."""
    metrics = evaluation.metrics
    if "error_rate" not in metrics:
        return ""
    low, high = metrics["error_rate/low"], metrics["error_rate/high"]
    faults = metrics.get("environment_faults", 0)
    left_out = f"; {faults:g} episodes left out (bugs in the environment)" if faults else ""
    return f"{left_out}; errors in {metrics['error_rate']:.1%} ({low:.1%} to {high:.1%}) of turns"


def _num_forward_tokens(trajectory: Trajectory, logps: tuple[float, ...] | None) -> int:
    """Length of the prefix in the update's forward pass: up to the last trained token."""
    trained = [i for i, logp in enumerate(logps or ()) if logp == logp]
    if not trained:
        return 0
    positions = [i for i, is_completion in enumerate(trajectory.completion_mask) if is_completion]
    return positions[trained[-1]]


# ── state of a checkpoint ────────────────────────────────────────────────────────────────────────


def model_tensors(parts: Runtime) -> dict[str, dict[str, Any]]:
    """Trained weights and moving averages, by the name of their file in a checkpoint."""
    weights = {name: p.data for name, p in parts.student.weights.trained.items()}
    averages = {f"average-{_file_name(n)}": a.shadow for n, a in sorted(parts.averages.items())}
    return {"weights": weights, **averages}


def restore(parts: Runtime, saved: checkpoints.Checkpoint) -> None:
    """Copy a checkpoint's weights, optimizer state and moving averages into the parts."""
    for name, tensors in model_tensors(parts).items():
        copy_tensors(tensors, saved.tensors[name])
    student = parts.student
    trained = student.weights.trained
    checkpoints.restore_optimizer(student.optimizer, trained, saved.tensors["optimizer"])
    parts.engine.load_weights(saved.num_steps)


def copy_tensors(tensors: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    assert tensors.keys() == saved.keys(), "the recipe decides the names, and it is the same"
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def _file_name(label: str) -> str:
    """Different labels stay different, whatever a user calls a route."""
    return quote(label, safe="")
