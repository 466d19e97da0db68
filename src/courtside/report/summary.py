"""A recipe in one line, and formatting of numbers."""

from __future__ import annotations

import math

from courtside.recipe import Recipe
from courtside.recipe.losses import Loss
from courtside.recipe.reader import ReaderConfig
from courtside.recipe.teacher import CustomTeacherConfig, ScoringTeacherConfig

UNITS = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def summarize_recipe(recipe: Recipe) -> str:
    """`smollm2-135m (LoRA 32) · arithmetic · teacher: self, frozen, sees solution · reverse KL`."""
    student = recipe.student.model
    if recipe.student.adapter is not None:
        student += f" from {recipe.student.adapter}"
    if recipe.student.average_with is not None:
        average = recipe.student.average_with
        student += f" + {average.weight:g} of {average.model}"
    if recipe.student.lora:
        student += f" (LoRA {recipe.student.lora.rank})"
    parts = [student, recipe.tasks.kind]
    if isinstance(recipe.teacher, CustomTeacherConfig):
        parts.append(f"teacher: {recipe.teacher.path}")
    elif recipe.teacher is not None:
        parts.append("teacher: " + " | ".join(_summarize_teacher(t) for t in recipe.model_teachers))
    if recipe.takeover is not None and (endpoint := recipe.takeover.endpoint) is not None:
        parts.append(f"taken over by {endpoint.model} (endpoint)")
    if recipe.reader is not None:
        parts.append(f"hints: {_summarize_reader(recipe.reader)}")
    parts.append(" + ".join(_summarize_loss(loss) for loss in recipe.losses))
    return " · ".join(parts)


def _summarize_reader(reader: ReaderConfig) -> str:
    kinds = [r.kind for r in reader.readers] if reader.kind == "combined" else [reader.kind]
    control = f", control {reader.control.replace('_', ' ')}" if reader.control != "none" else ""
    return " + ".join(kinds) + control


def _summarize_teacher(teacher: ScoringTeacherConfig) -> str:
    name = f"self, {teacher.weights}" if teacher.kind == "self" else teacher.model
    if teacher.kind == "server":
        name += " (served)"
    match teacher.context:
        case None:
            return name
        case context if context.kind == "field":
            return f"{name}, sees {context.field}"
        case context:
            return f"{name}, sees {context.kind}"


def _summarize_loss(loss: Loss) -> str:
    if loss.kind == "divergence":
        name = loss.divergence.replace("_", " ").replace("kl", "KL")
        return f"{name} (top {loss.support.k})" if loss.support.kind == "top_k" else name
    if loss.kind == "policy_gradient":
        return f"policy gradient ({loss.advantage.replace('_', ' ')})"
    return loss.kind.replace("_", " ")


def format_number(value: float | None, *, trim: bool = True) -> str:
    """Three significant digits with a unit prefix; `trim` drops trailing zeros."""
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


def format_duration(seconds: float) -> str:
    """`42s`, `3m 05s`, `2h 10m`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_percent(share: float) -> str:
    """`12.3%`; a dash for NaN."""
    return f"{100 * share:.1f}%" if share == share else "–"


def format_points(share: float) -> str:
    """A difference of fractions, in percentage points: `+1.2`."""
    return _use_minus_sign(f"{100 * share:+.1f}")


def format_signed(value: float) -> str:
    """`−0.50`."""
    return _use_minus_sign(f"{value:+.2f}")


def _use_minus_sign(text: str) -> str:
    return text.replace("-", "−")


def shorten(text: str, limit: int) -> str:
    """On one line, at most `limit` characters.

    >>> shorten("one\\n two three", 9)
    'one two …'
    """
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
