"""The forgetting gate: how much a stage may lose on a suite before it is no longer handed on."""

from __future__ import annotations

from courtside.errors import RunError
from courtside.evaluate.comparisons import compare_scores
from courtside.recipe.pipeline_sections import GateConfig
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.pipeline_folder import GateDecision
from courtside.types import Evaluation


def decide_gate(gate: GateConfig, start: RunFolder, end: RunFolder) -> GateDecision:
    """Compares the last evaluation of `end` with the first of `start`, task by task.

    The gate passes where even the lower end of the 95% interval is a loss of at most `max_loss`.
    """
    before = _find_evaluation(start, gate.suite, step=0)
    train = end.recipe().train
    # A budget may end a run before its last step.
    num_steps = len(end.metrics()) if train.budget else train.steps
    after = _find_evaluation(end, gate.suite, step=num_steps)
    difference = compare_scores(before.scores, after.scores)
    if difference is None:
        raise RunError(
            f"gate: the evaluations of suite {gate.suite!r} in {start.path} and {end.path} have no "
            "task in common. Delete or rename the later folder to train that stage again"
        )
    return GateDecision(
        suite=gate.suite,
        max_loss=gate.max_loss,
        num_tasks=len(before.scores.keys() & after.scores.keys()),
        mean=difference.mean,
        low=difference.low,
        high=difference.high,
        p_value=difference.p_value,
        passed=difference.low >= -gate.max_loss,
    )


def _find_evaluation(folder: RunFolder, suite: str, *, step: int) -> Evaluation:
    policy = f"student:{suite}"
    for evaluation in folder.evaluations():
        if (evaluation.policy, evaluation.split, evaluation.step) == (policy, "test", step):
            return evaluation
    raise RunError(
        f"gate: {folder.path} has no evaluation of suite {suite!r} after {step} steps; its report "
        "says why. The same command tries again once the cause is repaired"
    )
