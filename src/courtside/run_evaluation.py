"""The evaluations of a run: which of those that are due can be made, and what they measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from courtside.errors import UserError
from courtside.evaluate.collateral import measure_collateral
from courtside.evaluate.episodes import logp_drop
from courtside.evaluate.evaluator import Evaluator, GradedAnswers
from courtside.report.alarms import RunAlarms
from courtside.report.console import RunConsole
from courtside.report.folder.folder import RunFolder
from courtside.runtime import Runtime
from courtside.types import Evaluation, Split, Trajectory


class RunEvaluation:
    def __init__(
        self, parts: Runtime, folder: RunFolder, console: RunConsole, alarms: RunAlarms
    ) -> None:
        self.parts, self.folder, self.console, self.alarms = parts, folder, console, alarms
        self.recipe = parts.recipe
        self._skipped: set[tuple[Split, str]] = set()

    def select(self, policies: Sequence[str], split: Split, *, step: int) -> list[str]:
        """Those of the policies that can be evaluated and have not been after `step` steps."""
        if "teacher" in policies and not self.parts.evaluator.teacher_can_answer():
            return []
        done = {(e.step, e.policy, e.split) for e in self.folder.evaluations()}
        remaining = []
        for policy in policies:
            if (step, policy, split) in done:
                continue
            reason = self.parts.evaluator.reason_not_to(split, policy)
            if reason is None:
                remaining.append(policy)
            elif (split, suite := policy.partition(":")[2]) not in self._skipped:
                what = f"{split} tasks of suite {suite}" if suite else f"{split} tasks"
                if step == 0:
                    self.console.print_line(f"not evaluated on {what}: {reason}")
                self._skipped.add((split, suite))
        return remaining

    def measure(self, policies: Sequence[str], split: Split, *, step: int) -> list[GradedAnswers]:
        results = measure_policies(self.parts.evaluator, policies, split, step=step)
        if step > 0 and split == "test" and "student" in results:
            answers = results["student"]
            metrics = {**answers.evaluation.metrics, **self._measure_changes(answers.evaluation)}
            results["student"] = answers._replace(
                evaluation=replace(answers.evaluation, metrics=metrics)
            )
        return list(results.values())

    def _measure_changes(self, evaluation: Evaluation) -> dict[str, float]:
        """What training did to the answers that the student gave before it; `evaluation` is that of
        test tasks after the last step. Whatever cannot be measured must not cost the evaluation."""
        measures: dict[str, Callable[[Sequence[Trajectory]], dict[str, float]]] = {}
        if self.recipe.tasks.is_environment:
            measures["logp_drop"] = partial(
                logp_drop,
                engine=self.parts.engine,
                load_untrained=self.parts.load_untrained,
            )
        if self.recipe.evaluate.collateral:
            measures["collateral"] = partial(
                measure_collateral,
                load_untrained=self.parts.load_untrained,
                trained=self.parts.local_engine,
                template=self.parts.renderer,
                seed=self.recipe.seed,
            )
        metrics: dict[str, float] = {}
        for name, measure in measures.items():
            try:
                before = self.folder.evaluation_trajectories(replace(evaluation, step=0))
                metrics |= measure(before)
            except (UserError, RuntimeError) as error:  # as too little memory is
                self.alarms.report_unmeasured(name, error, step=evaluation.step)
        return metrics


def measure_policies(
    evaluator: Evaluator, policies: Sequence[str], split: Split, *, step: int
) -> dict[str, GradedAnswers]:
    """What all ranks do together; the leader records it."""
    if list(policies) == ["teacher"]:
        return {"teacher": evaluator.evaluate(split, step=step, policy="teacher")}
    return evaluator.evaluate_suites(split, policies, step=step)


def describe_evaluation(evaluation: Evaluation) -> str:
    """For the console: the score, and of episodes the share of turns with an error."""
    metrics = evaluation.metrics
    text = (
        f"{evaluation.policy} on {len(evaluation.scores)} {evaluation.split} tasks after "
        f"{evaluation.step} steps: {evaluation.mean_score:.1%} (95% interval "
        f"{evaluation.ci_low:.1%} to {evaluation.ci_high:.1%})"
    )
    if "error_rate" not in metrics:
        return text
    if faults := metrics.get("environment_faults", 0):
        text += f"; {faults:g} episodes left out (bugs in the environment)"
    low, high = metrics["error_rate/low"], metrics["error_rate/high"]
    return f"{text}; errors in {metrics['error_rate']:.1%} ({low:.1%} to {high:.1%}) of turns"
