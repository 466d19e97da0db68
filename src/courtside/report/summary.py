"""A recipe in one line, and numbers the way people read them."""

from __future__ import annotations

import math

from courtside.config import Loss, ModelTeacher, Recipe, SelfTeacher, teachers_of

UNITS = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def summary(recipe: Recipe) -> str:
    """`smollm2-135m (LoRA 32) · arithmetic · teacher: self, frozen, sees solution · reverse KL`."""
    student = recipe.student.model
    if recipe.student.lora:
        student += f" (LoRA {recipe.student.lora.rank})"
    parts = [student, recipe.tasks.kind]
    if recipe.teacher is not None:
        parts.append("teacher: " + " | ".join(_teacher(one) for one in teachers_of(recipe)))
    parts.append(" + ".join(_loss(loss) for loss in recipe.losses))
    return " · ".join(parts)


def _teacher(teacher: SelfTeacher | ModelTeacher) -> str:
    name = f"self, {teacher.weights}" if teacher.kind == "self" else teacher.model
    match teacher.context:
        case None:
            return name
        case context if context.kind == "field":
            return f"{name}, sees {context.field}"
        case context:
            return f"{name}, sees {context.kind}"


def _loss(loss: Loss) -> str:
    if loss.kind == "divergence":
        name = loss.divergence.replace("_", " ").replace("kl", "KL")
        return f"{name} (top {loss.support.k})" if loss.support.kind == "top_k" else name
    if loss.kind == "policy_gradient":
        return f"policy gradient ({loss.advantage.replace('_', ' ')})"
    return loss.kind.replace("_", " ")


def compact(value: float | None, *, trim: bool = True) -> str:
    """Three significant digits, in as few characters as read well; `trim` drops ending zeros."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e21:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1e4:
        value = float(f"{value:.3g}")
        unit, scale = next(u for u in UNITS if abs(value) >= u[1])
        return f"{value / scale:{'' if trim else '#'}.3g}".rstrip(".") + unit
    return f"{value:.0f}" if size >= 999.5 else f"{value:{'' if trim else '#'}.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """`42s`, `3m 05s`, `2h 10m`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
