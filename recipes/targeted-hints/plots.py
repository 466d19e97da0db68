"""Pictures of results.json: errors by length, errors along training, what else moved.

python recipes/targeted-hints/plots.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from courtside.report.svg import ticks

ARMS = {
    "hint": ("hint on that turn", "#1f5fbf", ""),
    "hint_all_turns": ("hint on all turns", "#6fa8e8", ""),
    "reward_hint": ("reward and hint", "#7a3fb0", ""),
    "corrections": ("imitate the right call", "#1d8a4b", ""),
    "reward": ("reward of the episode", "#d9541e", ""),
    "reward_penalty": ("reward and turn penalty", "#e79a2b", ""),
    "reward_all": ("one bit for the episode", "#a3341a", "5 3"),
    "wrong_turn": ("hint on a wrong turn", "#555555", "5 3"),
    "random_hint": ("hint of another episode", "#999999", "5 3"),
    "noisy_10": ("hint, 10% false alarms", "#3f83c9", "2 2"),
    "noisy_30": ("hint, 30% false alarms", "#8fb7df", "2 2"),
}
"""In the order of the legend: words, colour, dashes. What belongs together is alike."""

WIDTH, HEIGHT, GAP = 300, 230, 58
LEFT, TOP, ROW = 52, 34, 17
FLOOR = 1e-3
"""Where a logarithmic axis of shares ends: 1 turn of 1,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    lines: Mapping[str, Sequence[Spot]]
    """By arm."""
    x_ticks: Mapping[float, str]
    x_label: str
    level: tuple[str, float] | None = None
    """A dashed line and its name."""


def spot(x: float, row: Mapping[str, float]) -> Spot:
    return Spot(x=x, mean=row["mean"], low=row["low"], high=row["high"])


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────


def by_length(results: Mapping[str, Any]) -> str:
    """(a) Errors after training against the number of turns, seen and held-out names."""
    variants = results["variants"]
    panels = []
    for title, measure in (
        ("names seen in training", "errors"),
        ("held-out names", "held_out/errors"),
    ):
        lines: dict[str, list[Spot]] = {}
        before: list[float] = []
        for place, section in enumerate(variants.values()):
            for arm, row in section["arms"].items():
                if f"{measure}_after" in row:
                    lines.setdefault(arm, []).append(spot(place, row[f"{measure}_after"]))
                    before.append(row[f"{measure}_before"]["mean"])
        if not lines:
            continue
        panels.append(
            Panel(
                title=title,
                lines={a: s for a, s in lines.items() if len(s) > 1 or len(variants) == 1},
                x_ticks={i: name.lstrip("N") for i, name in enumerate(variants)},
                x_label="turns in an episode",
                level=("before", sum(before) / len(before)),
            )
        )
    return figure("Turns with an error, after training", panels, log=True)


def along_training(results: Mapping[str, Any]) -> str:
    """(b) Errors in the episodes that each step was trained on."""
    panels = []
    for name, section in results["variants"].items():
        lines = {
            arm: [spot(point["step"], point) for point in row["training_errors"]]
            for arm, row in section["arms"].items()
            if "training_errors" in row
        }
        steps = sorted({s.x for spots in lines.values() for s in spots})
        title = f"{name.lstrip('N')} turns"
        x_ticks = {step: f"{step:g}" for step in steps}
        panels.append(Panel(title=title, lines=lines, x_ticks=x_ticks, x_label="steps"))
    return figure("Turns with an error, in the episodes of each training step", panels, log=True)


def what_moved(results: Mapping[str, Any]) -> str:
    """(c) KL(before ‖ after) per token on turns that were right before; hollow: on the others."""
    variants = results["variants"]
    present = [a for a in ARMS if any(a in s["arms"] for s in variants.values())]
    height = TOP + ROW * len(present) + 40
    parts: list[str] = []
    names_width = 170
    top = max(
        (
            row[key]["high"]
            for section in variants.values()
            for row in section["arms"].values()
            for key in ("drift_after", "drift/wrong_after")
            if key in row
        ),
        default=1.0,
    )
    low, high = 1e-4, max(top, 1e-3)
    place = _log_scale(low, high, 0, WIDTH)
    for index, (name, section) in enumerate(variants.items()):
        left = names_width + index * (WIDTH + GAP // 2)
        parts.append(_text(left, TOP - 12, f"{name.lstrip('N')} turns", "start", bold=True))
        for power in range(round(math.log10(low)), math.ceil(math.log10(high)) + 1):
            if 10.0**power <= high * 1.01:
                x = left + place(10.0**power)
                parts.append(_rule(x, TOP - 4, x, TOP + ROW * len(present)))
                parts.append(_text(x, TOP + ROW * len(present) + 14, f"{10.0**power:g}", "middle"))
        for row_index, arm in enumerate(present):
            y = TOP + ROW * row_index + ROW / 2
            words, colour, _ = ARMS[arm]
            if index == 0:
                parts.append(_text(names_width - 10, y + 4, words, "end"))
            found = section["arms"].get(arm, {})
            for key, filled in (("drift/wrong_after", False), ("drift_after", True)):
                if key in found:
                    one = spot(0, found[key])
                    ends = (left + place(one.low), left + place(one.high))
                    parts.append(_bar(ends, (y, y), colour))
                    parts.append(_dot(left + place(one.mean), y, colour, filled=filled))
    width = names_width + len(variants) * (WIDTH + GAP // 2)
    note = (
        "KL(before ‖ after), nats a token; full: turns that were right before, hollow: the others"
    )
    parts.append(_text(names_width, height - 8, note, "start"))
    return _svg(width, height, "What else moved", parts)


# ── how ──────────────────────────────────────────────────────────────────────────────────────────


def figure(title: str, panels: Sequence[Panel], *, log: bool) -> str:
    """Panels side by side on one scale, a legend below."""
    spots = [s for p in panels for line in p.lines.values() for s in line]
    levels = [p.level[1] for p in panels if p.level is not None]
    high = max([s.high for s in spots] + levels, default=1.0) * 1.08
    present = [a for a in ARMS if any(a in p.lines for p in panels)]
    rows = math.ceil(len(present) / 3)
    height = TOP + HEIGHT + 44 + ROW * rows + 6
    parts: list[str] = []
    for index, panel in enumerate(panels):
        parts += _drawn(panel, LEFT + index * (WIDTH + GAP), high, present, log=log)
    width = LEFT + len(panels) * (WIDTH + GAP) - GAP + 16
    for index, arm in enumerate(present):
        words, colour, dashes = ARMS[arm]
        x, y = LEFT + (index % 3) * 210, TOP + HEIGHT + 50 + ROW * (index // 3)
        parts.append(_rule(x, y - 4, x + 22, y - 4, colour, dashes, 2))
        parts.append(_text(x + 28, y, words, "start"))
    return _svg(max(width, LEFT + 630), height, title, parts)


def _drawn(
    panel: Panel, left: float, high: float, present: Sequence[str], *, log: bool
) -> Iterator[str]:
    place_y = (
        _log_scale(FLOOR, high, TOP + HEIGHT, TOP)
        if log
        else lambda value: TOP + HEIGHT - max(value, 0) / high * HEIGHT
    )
    first, last = min(panel.x_ticks, default=0.0), max(panel.x_ticks, default=1.0)

    def place_x(x: float) -> float:
        return left + 22 + (x - first) / ((last - first) or 1.0) * (WIDTH - 44)

    yield _text(left, TOP - 12, panel.title, "start", bold=True)
    marks = [m for m in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0) if m <= high]
    for value in marks if log else ticks(0, high, 5):
        y = place_y(value)
        yield _rule(left, y, left + WIDTH, y)
        yield _text(left - 6, y + 4, f"{100 * value:g}%", "end")
    for x, words in panel.x_ticks.items():
        yield _text(place_x(x), TOP + HEIGHT + 16, words, "middle")
    yield _text(left + WIDTH, TOP + HEIGHT + 30, panel.x_label, "end")
    if panel.level is not None:
        name, value = panel.level
        y = place_y(value)
        yield _rule(left, y, left + WIDTH, y, "#000000", "2 4", 1.2)
        yield _text(left + 2, y - 5, name, "start")
    for index, arm in enumerate(present):
        # Bars side by side: intervals of arms that are equal would hide each other.
        aside = (index - (len(present) - 1) / 2) * 3.2
        _, colour, dashes = ARMS[arm]
        line = [(place_x(s.x) + aside, s) for s in panel.lines.get(arm, ())]
        points = " ".join(f"{x:.1f},{place_y(s.mean):.1f}" for x, s in line)
        yield (
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8" '
            f'stroke-dasharray="{dashes}"/>'
        )
        for x, s in line:
            yield _bar((x, x), (place_y(s.low), place_y(s.high)), colour)
            yield _dot(x, place_y(s.mean), colour)


def _log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """What is below `low` is drawn there."""
    span = math.log(high / low)
    return lambda value: start + math.log(min(max(value, low), high) / low) / span * (end - start)


def _text(x: float, y: float, words: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def _rule(
    x0: float, y0: float, x1: float, y1: float,
    colour: str = "#dddddd", dashes: str = "", width: float = 1,
) -> str:  # fmt: skip
    return (
        f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{colour}" fill="none" '
        f'stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )


def _bar(xs: tuple[float, float], ys: tuple[float, float], colour: str) -> str:
    return (
        f'<path d="M{xs[0]:.1f} {ys[0]:.1f}L{xs[1]:.1f} {ys[1]:.1f}" stroke="{colour}" '
        'stroke-width="1.4" opacity="0.75"/>'
    )


def _dot(x: float, y: float, colour: str, *, filled: bool = True) -> str:
    fill = colour if filled else "#ffffff"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{colour}"/>'


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222222">'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
        f"{''.join(parts)}</svg>\n"
    )


PICTURES = {
    "errors-by-length.svg": by_length,
    "errors-along-training.svg": along_training,
    "drift.svg": what_moved,
}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    return [
        path
        for name, picture in PICTURES.items()
        if (path := folder / name).write_text(picture(results))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent
    parser.add_argument("results", type=Path, nargs="?", default=here / "results.json")
    parser.add_argument("--to", type=Path, default=here)
    options = parser.parse_args()
    for path in draw(json.loads(options.results.read_text()), options.to):
        print(path)


if __name__ == "__main__":
    main()
