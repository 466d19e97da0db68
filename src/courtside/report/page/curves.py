"""Metrics and evaluations over steps, as panels of curves. Draws whatever keys the rows have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from courtside.report.page.svg import Point, Series, line_chart
from courtside.types import Evaluation

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    keys: re.Pattern[str]
    share: bool = False


PANELS = (
    Panel("KL to the teacher", "nats per token", re.compile(r"kl(/.*)?")),
    Panel("Loss", "value", re.compile(r"loss(/.*)?")),
    Panel("Reward in training", "share", re.compile(r"reward/(mean|pass_rate)"), share=True),
    Panel("Errors in training", "share of turns", re.compile(r"error_rate|events/.*"), share=True),
    Panel("Hints", "per step", re.compile(r"hints/(trained|dropped/.*)")),
    Panel("Shift of hints that train", "nats per turn", re.compile(r"hints/shift")),
    Panel("Turns of an episode", "turns", re.compile(r"turns")),
    Panel("Entropy", "nats per token", re.compile(r"entropy.*")),
    Panel("Answer length", "tokens", re.compile(r"length/(mean|max)")),
    Panel("Answers cut off", "share", re.compile(r"length/truncated"), share=True),
    Panel("Gradient norm", "norm", re.compile(r"grad_norm(/.*)?")),
    Panel("Speed", "tokens per second", re.compile(r"tokens_per_second")),
    Panel("Time", "seconds per step", re.compile(r"seconds/.*")),
)
"""The curves worth their place on the page, in order. All other keys come after, folded away."""

ZERO_BESIDE = {
    "events/": "error_rate",
    "hints/dropped/": "hints/trained",
    "reader/": "hints/trained",
}
"""Columns that name only what occurred, and the one that says that it was looked for."""

MAX_LINES = 6
"""In one panel: more cannot be told apart by colour."""


def metric_figures(rows: Rows) -> tuple[list[str], list[str]]:
    """The panels above, those that have numbers, and figures for the rest of the keys."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "step"]
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    main: list[str] = []
    for panel in PANELS:
        found = [key for key in keys if panel.keys.fullmatch(key)]
        keys = [key for key in keys if key not in found]
        if sum(key.startswith("loss/") for key in found) == 1:
            found.remove("loss")  # one component: the total is the same curve again, scaled
        main += _figures(panel, found, rows)
    rest: list[str] = []
    for group in dict.fromkeys(key.split("/")[0] for key in keys):
        panel = Panel(group.replace("_", " "), "value", re.compile(""))
        rest += _figures(panel, [key for key in keys if key.split("/")[0] == group], rows)
    return main, rest


def _figures(panel: Panel, keys: Sequence[str], rows: Rows) -> Iterable[str]:
    for start in range(0, len(keys), MAX_LINES):
        series = [_series(key, rows) for key in keys[start : start + MAX_LINES]]
        yield line_chart(
            series, title=panel.title, x_label="optimizer step", y_label=panel.unit,
            share=panel.share,
        )  # fmt: skip


def _series(key: str, rows: Rows) -> Series:
    prefix, _, name = key.partition("/")
    alone = {
        "loss": "total",
        "tokens_per_second": "all phases",
        "error_rate": "any",
        "turns": "mean",
    }
    shown = name or alone.get(prefix, prefix)
    return Series(name=shown.replace("_", " ").replace("/", ": "), points=_points(key, rows))


def _points(key: str, rows: Rows) -> tuple[Point, ...]:
    """A step without the key (not measured then) is no gap; a null (not finite) is one."""
    counted = next((beside for start, beside in ZERO_BESIDE.items() if key.startswith(start)), key)
    return tuple((row["step"], row.get(key, 0.0)) for row in rows if key in row or counted in row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One number of an evaluation, with the ends of its interval."""

    of: Evaluation
    value: float
    low: float
    high: float


def evaluation_figure(evaluations: Sequence[Evaluation]) -> str | None:
    """Held-out scores over steps with 95% intervals; teachers are dashed lines."""
    rates = [
        Rate(of=one, value=one.mean_score, low=one.ci_low, high=one.ci_high) for one in evaluations
    ]
    return _held_out(rates, title="Held-out score, 95% intervals", unit="mean score")


def error_figure(evaluations: Sequence[Evaluation]) -> str | None:
    """The same of the turns with an error, for environments."""
    rates = [
        Rate(
            of=one,
            value=one.metrics["error_rate"],
            low=one.metrics.get("error_rate/low", math.nan),
            high=one.metrics.get("error_rate/high", math.nan),
        )
        for one in evaluations
        if "error_rate" in one.metrics
    ]
    return _held_out(rates, title="Held-out errors, 95% intervals", unit="share of turns")


def _held_out(rates: Sequence[Rate], *, title: str, unit: str) -> str | None:
    """None: the student has no rate."""
    known = [rate for rate in rates if math.isfinite(rate.value)]
    lines: dict[tuple[str, str], list[Rate]] = {}
    for rate in sorted(known, key=lambda rate: rate.of.step):
        if is_student(rate.of.policy):
            lines.setdefault((rate.of.policy, rate.of.split), []).append(rate)
    if not lines:
        return None
    series = [
        Series(
            name=f"{policy}, {split}",
            points=tuple((rate.of.step, rate.value) for rate in line),
            bars=tuple((rate.low, rate.high) for rate in line),
        )
        for (policy, split), line in lines.items()
    ]
    series += [
        Series(
            name=f"{rate.of.policy}, {rate.of.split}",
            points=((rate.of.step, rate.value),),
            flat=True,
        )
        for rate in known
        if not is_student(rate.of.policy)
    ]
    return line_chart(series, title=title, x_label="optimizer step", y_label=unit, share=True)


def is_student(policy: str) -> bool:
    """`student`, or `student:SUITE` for further tasks."""
    return policy.split(":")[0] == "student"
