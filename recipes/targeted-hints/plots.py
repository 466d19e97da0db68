"""Pictures of results.json: errors after training by arm, errors along training, what else moved.

python recipes/targeted-hints/plots.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from courtside.experiment.marks import draw_dot, draw_rule, draw_text, linear_scale, render_svg
from courtside.experiment.pictures import run_plots
from courtside.report.page.svg import ticks

ARMS = {
    "hint": ("hint on that turn", "#1f5fbf", ""),
    "hint_all_turns": ("hint on all turns", "#6fa8e8", ""),
    "reward_hint": ("reward and hint", "#7a3fb0", ""),
    "corrections": ("imitate the right call", "#1d8a4b", ""),
    "reward": ("reward: share solved", "#d9541e", ""),
    "reward_penalty": ("reward and turn penalty", "#e79a2b", ""),
    "reward_all": ("reward: one bit", "#a3341a", "5 3"),
    "wrong_turn": ("hint on a wrong turn", "#555555", "5 3"),
    "random_hint": ("hint of another episode", "#999999", "5 3"),
    "noisy_10": ("hint, 10% false alarms", "#3f83c9", "2 2"),
    "noisy_30": ("hint, 30% false alarms", "#8fb7df", "2 2"),
}
"""In the order of rows and legends: words, colour, dashes. What belongs together is alike."""
ALONG = ("hint", "corrections", "reward", "reward_penalty", "reward_all", "wrong_turn")
"""The lines of a picture that would be a tangle with all of them."""

NAMES, WIDTH, GAP, TOP, ROW, HEIGHT = 170, 300, 40, 34, 17, 220


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A scale, and what of an arm is shown on it: (mean with its interval, a value for each seed,
    filled)."""

    title: str
    low: float
    high: float
    points_of: Callable[
        [Mapping[str, Any]], Sequence[tuple[Mapping[str, float], list[float], bool]]
    ]
    percent: bool = True
    level: Callable[[Mapping[str, Any]], float] | None = None
    """A dashed line in each length's rows."""


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────


def errors_after(results: Mapping[str, Any]) -> str:
    """(a) Errors on test episodes after training: every arm, every length, every seed."""

    def points_of(measure: str) -> Any:
        return lambda row: [(row[f"{measure}_after"], row[f"{measure}_after"]["values"], True)]

    def before(measure: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda section: _mean(
            row[f"{measure}_before"]["mean"] for row in section["arms"].values()
        )

    return rows_of_arms(
        results,
        [
            Column(
                title="names seen in training",
                low=0.0,
                high=0.25,
                points_of=points_of("error_rate"),
                level=before("error_rate"),
            ),
            Column(
                title="held-out names",
                low=0.0,
                high=0.8,
                points_of=points_of("held_out/error_rate"),
                level=before("held_out/error_rate"),
            ),
        ],
        title="Turns with an error on test episodes, after training",
        note="large: mean and 95% interval over seeds; small: each seed; dashed: before training",
    )


def what_moved(results: Mapping[str, Any]) -> str:
    """(c) Log-prob drop per token on turns without an error before, and on the others."""

    def points_of(row: Mapping[str, Any]) -> Any:
        return [
            (row[f"{name}_after"], row[f"{name}_after"]["values"], filled)
            for name, filled in (("logp_drop/error_turns", False), ("logp_drop/clean_turns", True))
            if f"{name}_after" in row  # if all went well before, there are no others
        ]

    return rows_of_arms(
        results,
        [
            Column(
                title="log-prob drop, nats a token",
                low=-0.1,
                high=0.8,
                points_of=points_of,
                percent=False,
                level=lambda section: 0.0,
            )
        ],
        title="What else moved",
        note="on turns without an error before training (full), on the others (hollow)",
    )


def along_training(results: Mapping[str, Any]) -> str:
    """(b) Errors in the episodes that each step was trained on, means over seeds."""
    parts: list[str] = []
    for index, (name, section) in enumerate(results["variants"].items()):
        x_start = 52 + index * (WIDTH + GAP)
        parts.append(draw_text(x_start, TOP - 12, f"{name.lstrip('N')} turns", "start", bold=True))
        steps = max(len(row["training_errors"]) for row in section["arms"].values())
        across = linear_scale(0, steps - 1, x_start + 10, x_start + WIDTH - 10)
        up = linear_scale(0.0, 0.25, TOP + HEIGHT, TOP)
        for value in ticks(0.0, 0.25, 5):
            parts.append(draw_rule(x_start, up(value), x_start + WIDTH, up(value)))
            parts.append(draw_text(x_start - 6, up(value) + 4, f"{100 * value:g}%", "end"))
        for step in range(0, steps, 2):
            parts.append(draw_text(across(step), TOP + HEIGHT + 16, str(step), "middle"))
        for arm in ALONG:
            if arm in section["arms"]:
                _, colour, dashes = ARMS[arm]
                spots = [
                    (across(point["step"]), up(point["mean"]))
                    for point in section["arms"][arm]["training_errors"]
                ]
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
                parts.append(
                    f'<polyline points="{points}" fill="none" stroke="{colour}" '
                    f'stroke-width="1.8" stroke-dasharray="{dashes}"/>'
                )
                parts += [draw_dot(x, y, colour, size=2) for x, y in spots]
    note = "step (its own episodes, before its update; the same for all arms of a seed)"
    parts.append(draw_text(52, TOP + HEIGHT + 34, note, "start"))
    for index, arm in enumerate(ALONG):
        label, colour, dashes = ARMS[arm]
        x, y = 52 + (index % 3) * 230, TOP + HEIGHT + 56 + ROW * (index // 3)
        parts.append(draw_rule(x, y - 4, x + 22, y - 4, colour, dashes, 2))
        parts.append(draw_text(x + 28, y, label, "start"))
    width = 52 + len(results["variants"]) * (WIDTH + GAP)
    title = "Turns with an error, in the episodes of each training step"
    return render_svg(width, TOP + HEIGHT + 86, title, parts)


# ── how ──────────────────────────────────────────────────────────────────────────────────────────


def rows_of_arms(
    results: Mapping[str, Any], columns: Sequence[Column], *, title: str, note: str
) -> str:
    """A row for each arm under the heading of each length, a scale for each column."""
    parts: list[str] = []
    y = float(TOP)
    top = y
    for name, section in results["variants"].items():
        parts.append(draw_text(NAMES - 10, y + 4, f"{name.lstrip('N')} turns", "end", bold=True))
        present = [arm for arm in ARMS if arm in section["arms"]]
        for index, column in enumerate(columns):
            across = _across(index, column)
            if column.level is not None:
                x = across(column.level(section))
                bottom = y + ROW * len(present) + 10
                parts.append(draw_rule(x, y + 4, x, bottom, "#000000", "2 4", 1.2))
        for arm in present:
            y += ROW
            label, colour, _ = ARMS[arm]
            parts.append(draw_text(NAMES - 10, y + 4, label, "end"))
            for index, column in enumerate(columns):
                for mean, seeds, filled in column.points_of(section["arms"][arm]):
                    parts += _spread(_across(index, column), y, mean, seeds, colour, filled)
        y += ROW * 1.8
    for index, column in enumerate(columns):
        x_start, across = _x_start(index), _across(index, column)
        parts.append(draw_text(x_start, TOP - 16, column.title, "start", bold=True))
        for value in ticks(column.low, column.high, 5):
            x = across(value)
            parts.insert(0, draw_rule(x, top, x, y - 14))
            label = f"{100 * value:g}%" if column.percent else f"{value:g}"
            parts.append(draw_text(x, y, label, "middle"))
    parts.append(draw_text(NAMES, y + 20, note, "start"))
    return render_svg(_x_start(len(columns)), y + 32, title, parts)


def _x_start(index: int) -> float:
    return NAMES + index * (WIDTH + GAP)


def _across(index: int, column: Column) -> Callable[[float], float]:
    return linear_scale(column.low, column.high, _x_start(index), _x_start(index) + WIDTH)


def _spread(
    across: Callable[[float], float], y: float, mean: Mapping[str, float], seeds: Sequence[float],
    colour: str, filled: bool,
) -> Iterator[str]:  # fmt: skip
    yield draw_rule(across(mean["low"]), y, across(mean["high"]), y, colour, "", 1.4)
    for value in seeds:
        yield draw_dot(across(value), y, colour, size=1.6, filled=filled)
    yield draw_dot(across(mean["mean"]), y, colour, filled=filled)


def _mean(values: Iterator[float]) -> float:
    values_of = list(values)
    return sum(values_of) / len(values_of)


PICTURES = {
    "errors-after.svg": errors_after,
    "errors-along-training.svg": along_training,
    "logp-drop.svg": what_moved,
}


if __name__ == "__main__":
    run_plots(__file__, __doc__, PICTURES)
