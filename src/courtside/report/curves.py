"""Metrics and evaluations over steps, as panels of curves. Draws whatever keys the rows have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from courtside.report.svg import Point, Series, line_chart
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
    Panel("Reward in training", "share", re.compile(r"reward/(mean|passed)"), share=True),
    Panel("Entropy", "nats per token", re.compile(r"entropy.*")),
    Panel("Answer length", "tokens", re.compile(r"length/(mean|max)")),
    Panel("Answers cut off", "share", re.compile(r"length/truncated"), share=True),
    Panel("Gradient norm", "norm", re.compile(r"grad_norm(/.*)?")),
    Panel("Speed", "tokens per second", re.compile(r"tokens_per_second")),
    Panel("Time", "seconds per step", re.compile(r"seconds/.*")),
)
"""The curves worth their place on the page, in order. All other keys come after, folded away."""

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
            series, title=panel.title, x_label="optimiser step", y_label=panel.unit,
            share=panel.share,
        )  # fmt: skip


def _series(key: str, rows: Rows) -> Series:
    prefix, _, name = key.partition("/")
    points: tuple[Point, ...] = tuple((row["step"], row.get(key)) for row in rows)
    shown = name or {"loss": "total", "tokens_per_second": "all phases"}.get(prefix, prefix)
    return Series(name=shown.replace("_", " "), points=_without_absences(points, key, rows))


def _without_absences(points: tuple[Point, ...], key: str, rows: Rows) -> tuple[Point, ...]:
    """A step without the key (not measured then) is no gap; a null (not finite) is one."""
    return tuple(point for point, row in zip(points, rows, strict=True) if key in row)


def evaluation_figure(evaluations: Sequence[Evaluation]) -> str | None:
    """Held-out scores over steps with 95% intervals; teachers are dashed lines."""
    students = [one for one in evaluations if one.who == "student" and one.rate == one.rate]
    if not students:
        return None
    splits = dict.fromkeys(one.split for one in students)
    series = []
    for split in splits:
        mine = sorted((one for one in students if one.split == split), key=lambda one: one.step)
        series.append(
            Series(
                name=f"student, {split}",
                points=tuple((one.step, one.rate) for one in mine),
                bars=tuple((one.low, one.high) for one in mine),
            )
        )
    for one in evaluations:
        if one.who != "student" and one.rate == one.rate:
            name = f"{one.who}, {one.split}"
            series.append(Series(name=name, points=((one.step, one.rate),), flat=True))
    return line_chart(
        series,
        title="Held-out score, 95% intervals",
        x_label="optimiser step",
        y_label="mean score",
        share=True,
    )
