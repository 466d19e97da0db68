"""Metrics and evaluations over steps as line charts; every key of the rows is plotted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from courtside.report.page.svg import Point, Series, line_chart
from courtside.types import Evaluation

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    keys: re.Pattern[str]
    as_percent: bool = False


PANELS = (
    Panel("KL to the teacher", "nats per token", re.compile(r"kl(/.*)?")),
    Panel("Loss", "value", re.compile(r"loss(/.*)?")),
    Panel(
        "Reward in training", "fraction", re.compile(r"reward/(mean|pass_rate)"), as_percent=True
    ),
    Panel("Rewards that add up", "value", re.compile(r"reward/(sum|.+/mean)")),
    Panel(
        "Errors in training",
        "fraction of turns",
        re.compile(r"error_rate|events/.*"),
        as_percent=True,
    ),
    Panel("Hints", "per step", re.compile(r"hints/(trained|harmful|dropped/.*)")),
    Panel("Shift of hints", "nats per turn", re.compile(r"hints/shift")),
    Panel("Turns per episode", "turns", re.compile(r"turns|turn_limit")),
    Panel("Entropy", "nats per token", re.compile(r"entropy.*")),
    Panel("Response length", "tokens", re.compile(r"length/(mean|max)")),
    Panel("Truncated answers", "fraction", re.compile(r"length/truncated"), as_percent=True),
    Panel("Gradient norm", "norm", re.compile(r"grad_norm(/.*)?")),
    Panel("Speed", "tokens per second", re.compile(r"tokens_per_second")),
    Panel("Time", "seconds per step", re.compile(r"seconds/.*")),
    Panel("Cost", "tokens per step", re.compile(r"cost/.*_tokens")),
    Panel("Computation", "FLOPs per step", re.compile(r"cost/flops")),
)
"""Charts shown first, in order; all other keys follow in a collapsed section."""

ZERO_WHERE_MEASURED = {
    "events/": "error_rate",
    "hints/dropped/": "hints/trained",
    "reader/": "hints/trained",
}
"""Key prefixes that are absent when a count is 0, and the key that is present when it was taken."""

MAX_LINES = 6
"""In one chart: more cannot be told apart by color."""


def metric_figures(rows: Rows) -> tuple[list[str], list[str]]:
    """Figures of `PANELS`, and figures of all other keys."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "step"]
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    empty_steps = find_empty_steps(rows)
    main: list[str] = []
    for panel in PANELS:
        panel_keys = [key for key in keys if panel.keys.fullmatch(key)]
        keys = [key for key in keys if key not in panel_keys]
        if sum(key.startswith("loss/") for key in panel_keys) == 1:
            panel_keys.remove("loss")  # with one component, the total is the same curve, scaled
        main += _figures(panel, panel_keys, rows, empty_steps)
    more: list[str] = []
    for group in dict.fromkeys(key.split("/")[0] for key in keys):
        panel = Panel(group.replace("_", " "), "value", re.compile(""))
        of_group = [key for key in keys if key.split("/")[0] == group]
        more += _figures(panel, of_group, rows, empty_steps)
    return main, more


def find_empty_steps(rows: Rows) -> list[int]:
    """Steps that trained no token: their weights are those of the step before."""
    counts = {
        row["step"]: [n for key, n in row.items() if key.startswith("tokens/")] for row in rows
    }
    return [step for step, numbers in counts.items() if numbers and not any(numbers)]


def _figures(panel: Panel, keys: Sequence[str], rows: Rows, marks: Sequence[int]) -> Iterable[str]:
    for start in range(0, len(keys), MAX_LINES):
        series = [_series(key, rows) for key in keys[start : start + MAX_LINES]]
        yield line_chart(
            series, title=panel.title, x_label="optimizer step", y_label=panel.unit,
            as_percent=panel.as_percent, marks=marks,
        )  # fmt: skip


def _series(key: str, rows: Rows) -> Series:
    prefix, _, name = key.partition("/")
    labels = {
        "loss": "total",
        "tokens_per_second": "all phases",
        "error_rate": "any",
        "turns": "mean",
        "turn_limit": "limit",
    }
    label = name or labels.get(prefix, prefix)
    return Series(name=label.replace("_", " ").replace("/", ": "), points=_points(key, rows))


def _points(key: str, rows: Rows) -> tuple[Point, ...]:
    """A null (not finite) leaves a gap in the line; a step without the key does not."""
    key_if_measured = next(
        (measured for start, measured in ZERO_WHERE_MEASURED.items() if key.startswith(start)), key
    )
    return tuple(
        (row["step"], row.get(key, 0.0)) for row in rows if key in row or key_if_measured in row
    )


class Rate(NamedTuple):
    """A rate of an evaluation with its interval."""

    evaluation: Evaluation
    value: float
    low: float
    high: float


def evaluation_figure(evaluations: Sequence[Evaluation]) -> str | None:
    """Held-out scores over steps with 95% intervals; teachers are dashed lines."""
    rates = [Rate(e, e.mean_score, e.ci_low, e.ci_high) for e in evaluations]
    return _evaluation_chart(rates, title="Held-out score, 95% intervals", unit="mean score")


def error_figure(evaluations: Sequence[Evaluation]) -> str | None:
    """The fraction of turns with an error over steps, for environments."""
    ends = ("error_rate/low", "error_rate/high")
    rates = [
        Rate(e, e.metrics["error_rate"], *(e.metrics.get(end, math.nan) for end in ends))
        for e in evaluations
        if "error_rate" in e.metrics
    ]
    title = "Held-out errors, 95% intervals"
    return _evaluation_chart(rates, title=title, unit="fraction of turns")


def _evaluation_chart(rates: Sequence[Rate], *, title: str, unit: str) -> str | None:
    """None: the student was not measured."""
    students: dict[str, list[Rate]] = {}
    reference_series: list[Series] = []
    for rate in sorted(rates, key=lambda rate: rate.evaluation.step):
        name = f"{rate.evaluation.policy}, {rate.evaluation.split}"
        if not math.isfinite(rate.value):
            continue
        if is_student(rate.evaluation.policy):
            students.setdefault(name, []).append(rate)
        else:
            point = (rate.evaluation.step, rate.value)
            reference_series.append(Series(name=name, points=(point,), flat=True))
    if not students:
        return None
    series = [
        Series(
            name=name,
            points=tuple((rate.evaluation.step, rate.value) for rate in line),
            bars=tuple((rate.low, rate.high) for rate in line),
        )
        for name, line in students.items()
    ]
    return line_chart(
        [*series, *reference_series],
        title=title,
        x_label="optimizer step",
        y_label=unit,
        as_percent=True,
    )


def is_student(policy: str) -> bool:
    """`student`, or `student:SUITE` for a further suite."""
    return policy.split(":")[0] == "student"
