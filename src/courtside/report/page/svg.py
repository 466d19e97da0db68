"""Line charts and interval plots as inline SVG. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from courtside.report.summary import compact

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 34
MAX_POINTS = 600
"""Beyond this many, each stretch is drawn by its lowest and highest value, so no spike is lost."""
SMOOTH_FROM = 60
"""From this many points on, a moving average is drawn over the faint raw line."""
MAX_BARS = 20
"""Beyond this many error bars, their ends are drawn as a band."""
NUM_COLOURS = 6

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    points: tuple[Point, ...]
    """x and y, x rising; None leaves a gap in the line."""
    bars: tuple[tuple[float, float], ...] | None = None
    """Low and high end of the error bar of each point."""
    flat: bool = False
    """A dashed line over the whole width, at the value of the only point."""

    @property
    def values(self) -> list[float]:
        return [y for _, y in self.points if y is not None]


def line_chart(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, share: bool = False
) -> str:
    """A figure with axes and legend; `share` shows 0…1 as per cent."""
    xs = [x for one in series if not one.flat for x, _ in one.points] or [0.0]
    ends = [end for one in series for bar in one.bars or () for end in bar if math.isfinite(end)]
    low_y, high_y = y_range([y for one in series for y in one.values] + ends, share)
    frame = Frame(x=x_range(xs), y=(low_y, high_y))
    drawing = [*_axes(frame, x_label, y_label, share)]
    for index, one in enumerate(series):
        drawing.append(f'<g class="c{index % NUM_COLOURS}">{"".join(_draw(one, frame))}</g>')
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawing)}</svg>"
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{_legend(series, share)}</figcaption>"
        f"{svg}</figure>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """From values to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place_x(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def place_y(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def x_range(xs: Sequence[float]) -> tuple[float, float]:
    low, high = min(xs), max(xs)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def y_range(values: Sequence[float], share: bool) -> tuple[float, float]:
    """Room around the values; from zero where zero is near."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if low >= 0 and low <= 0.5 * high:
        low = 0.0
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    top = high + room
    bottom = low if low == 0 else low - room
    return (max(bottom, 0.0), min(top, 1.0)) if share and 0 <= low <= high <= 1 else (bottom, top)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between low and high, at most `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)][: most + 1]


def step_ticks(low: float, high: float) -> list[float]:
    """Whole numbers only: there is no step 2.5."""
    return [tick for tick in ticks(low, high, 6) if tick == round(tick)]


def _axes(frame: Frame, x_label: str, y_label: str, share: bool) -> Iterable[str]:
    base = HEIGHT - BOTTOM
    for value in ticks(*frame.y, 5):
        y = frame.place_y(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        text = shown(value, share)
        yield f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    for value in step_ticks(*frame.x):
        x = frame.place_x(value)
        yield f'<path class="axis" d="M{x:.1f} {base}v4"/>'
        yield f'<text x="{x:.1f}" y="{base + 15}" text-anchor="middle">{value:.0f}</text>'
    yield f'<path class="axis" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>'
    yield (
        f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">'
        f"{escape(x_label)}</text>"
    )
    yield (
        f'<text class="label" transform="rotate(-90)" x="{-TOP}" y="9" text-anchor="end">'
        f"{escape(y_label)}</text>"
    )


def _draw(series: Series, frame: Frame) -> Iterable[str]:
    if series.flat:
        at = frame.place_y(series.values[0])
        yield f'<path class="line flat" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        return
    smooth = series.bars is None and len(series.values) >= SMOOTH_FROM
    raw = _path(thin_out(series.points), frame)
    yield f'<path class="line{" raw" if smooth else ""}" d="{raw}"/>'
    if smooth:
        yield f'<path class="line" d="{_path(thin_out(moving_average(series.points)), frame)}"/>'
    if series.bars is not None:
        yield _error_bars(series.points, series.bars, frame)
    if len(series.values) < SMOOTH_FROM:
        radius = 3 if len(series.points) <= 12 else 1.8
        for x, y in series.points:
            if y is not None:
                yield (
                    f'<circle cx="{frame.place_x(x):.1f}" cy="{frame.place_y(y):.1f}" r="{radius}">'
                    f"<title>{escape(series.name)} at {x:g}: {compact(y)}</title></circle>"
                )


def _error_bars(points: Sequence[Point], bars: Sequence[tuple[float, float]], frame: Frame) -> str:
    ends = [
        (frame.place_x(x), frame.place_y(low), frame.place_y(high))
        for (x, _), (low, high) in zip(points, bars, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    if len(ends) <= MAX_BARS:
        whiskers = (
            f"M{x:.1f} {high:.1f}V{low:.1f}M{x - 4:.1f} {high:.1f}h8M{x - 4:.1f} {low:.1f}h8"
            for x, low, high in ends
        )
        return f'<path class="bar" d="{"".join(whiskers)}"/>'
    outline = [f"{x:.1f} {high:.1f}" for x, _, high in ends]
    outline += [f"{x:.1f} {low:.1f}" for x, low, _ in reversed(ends)]
    return f'<path class="band" d="M{"L".join(outline)}Z"/>'


def _path(points: Sequence[Point], frame: Frame) -> str:
    commands, pen_down = [], False
    for x, y in points:
        if y is not None:
            command = "L" if pen_down else "M"
            commands.append(f"{command}{frame.place_x(x):.1f} {frame.place_y(y):.1f}")
        pen_down = y is not None
    return "".join(commands)


def thin_out(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MAX_POINTS:
        return list(points)
    stretch = math.ceil(len(points) / (MAX_POINTS / 2))
    thinned: list[Point] = []
    for start in range(0, len(points), stretch):
        known = [(y, x) for x, y in points[start : start + stretch] if y is not None]
        extremes = sorted({min(known), max(known)}, key=lambda at: at[1]) if known else []
        thinned += [(x, y) for y, x in extremes] or [(points[start][0], None)]
    return thinned


def moving_average(points: Sequence[Point]) -> list[Point]:
    """Centred, over a thirtieth of the run on each side; gaps are skipped over."""
    known = [(x, y) for x, y in points if y is not None]
    sums = [0.0]
    for _, y in known:
        sums.append(sums[-1] + y)
    half = max(len(known) // 30, 1)
    averaged: list[Point] = []
    for i, (x, _) in enumerate(known):
        start, end = max(i - half, 0), min(i + half + 1, len(known))
        averaged.append((x, (sums[end] - sums[start]) / (end - start)))
    return averaged


def _legend(series: Sequence[Series], share: bool) -> str:
    return "".join(
        f'<span class="key c{index % NUM_COLOURS}{" flat" if one.flat else ""}">'
        f"{escape(one.name)} <em>{shown(one.values[-1], share) if one.values else '–'}</em></span>"
        for index, one in enumerate(series)
    )


def shown(value: float, share: bool) -> str:
    return f"{100 * value:.3g}%" if share else compact(value)


# ── intervals ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    name: str
    value: float
    low: float
    high: float
    colour: int | None = None
    """None: its place among the others."""


def interval_plot(intervals: Sequence[Interval], *, title: str) -> str:
    """Shares with their intervals, one under the other, on an axis from 0 to 100%."""
    # A letter takes up to 11 units: on narrow screens, where letters are larger.
    longest = max(len(one.name) for one in intervals)
    row, left, right = 30, max(128, min(30 + 11 * longest, 480)), 16
    width, height = 960, 30 * len(intervals) + 26
    base = row * len(intervals)

    def place(share: float) -> float:
        return left + share * (width - left - right)

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path class="grid" d="M{place(share):.1f} 0V{base}"/>')
        parts.append(
            f'<text x="{place(share):.1f}" y="{base + 16}" text-anchor="middle">'
            f"{100 * share:.0f}%</text>"
        )
    for index, one in enumerate(intervals):
        y = row * index + row / 2
        colour = index if one.colour is None else one.colour
        parts.append(
            f'<g class="c{colour % NUM_COLOURS}">'
            f'<text class="name" x="{left - 14}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(one.name)}</text>"
            f'<path class="span" d="M{place(one.low):.1f} {y}H{place(one.high):.1f}"/>'
            f'<circle cx="{place(one.value):.1f}" cy="{y}" r="5.5"/></g>'
        )
    return (
        f'<svg class="intervals" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
