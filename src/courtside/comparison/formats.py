"""Names of units, and their numbers for people."""

from __future__ import annotations

from courtside.comparison.arms import SharedTasks
from courtside.report.summary import format_duration, format_number

NOT_MEASURED = "not measured"
UNIT_NAMES = {
    "steps": "steps",
    "student_tokens": "student tokens",
    "teacher_tokens": "teacher tokens",
    "flops": "FLOPs",
    "seconds": "time",
    "money": "money",
}
UNIT_TITLES = {**UNIT_NAMES, "seconds": "training time"}


def format_spent(unit: str, value: float | None) -> str:
    """`12.3k`, `3m 05s`, `1.27`."""
    if value is None:
        return NOT_MEASURED
    if unit == "seconds" and 0 < value < 1:
        return f"{value:.2g}s"
    if unit == "seconds":
        return format_duration(value)
    if unit == "money":
        return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
    return format_number(value)


def format_p(p_value: float) -> str:
    """Smaller ones depend on the normal tails of few seeds."""
    return f"{p_value:.2g}" if p_value >= 1e-4 else "<0.0001"


def describe_tasks(tasks: SharedTasks) -> str:
    plural = "s" * (len(tasks.ids) != 1)
    return f"{len(tasks.ids)} held-out task{plural} ({tasks.split})"
