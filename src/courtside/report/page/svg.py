"""Line charts and interval plots as inline SVG. The page's style sheet sets the colors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from courtside.report.summary import format_number

WIDTH, HEIGHT = 480, 210
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 56, 12, 10, 34
MAX_POINTS = 600
"""Above this many, each bucket is drawn as its minimum and maximum, so no spike is lost."""
SMOOTH_FROM = 60
"""From this many points on, a moving average is drawn over the faint raw line."""
MAX_BARS = 20
"""Above this many, error bars are drawn as a band."""
NUM_COLORS = 6

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    points: tuple[Point, ...]
    """x and y, x ascending; None leaves a gap in the line."""
    bars: tuple[tuple[float, float], ...] | None = None
    """Low and high end of the error bar of each point."""
    flat: bool = False
    """A dashed line over the whole width, at the value of the only point."""

    @property
    def values(self) -> list[float]:
        return [y for _, y in self.points if y is not None]


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    as_percent: bool = False,
    marks: Sequence[float] = (),
    format_x: Callable[[float], str] | None = None,
) -> str:
    """A figure with axes and legend; `as_percent` formats 0…1 as per cent.

    `marks`: values of x with a vertical line behind the curves. `format_x`: labels of the x axis;
    unset: whole numbers, such as steps.
    """
    xs = [x for line in series if not line.flat for x, _ in line.points] or [0.0]
    ends = [end for line in series for bar in line.bars or () for end in bar if math.isfinite(end)]
    low_y, high_y = y_range([y for line in series for y in line.values] + ends, as_percent)
    area = PlotArea(x=x_range(xs), y=(low_y, high_y))
    parts = [*_axes(area, x_label, y_label, as_percent, format_x), *_draw_marks(marks, area)]
    for index, line in enumerate(series):
        parts.append(f'<g class="c{index % NUM_COLORS}">{"".join(_draw_series(line, area))}</g>')
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{_legend(series, as_percent)}</figcaption>"
        f"{svg}</figure>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotArea:
    """Maps values to coordinates of the SVG."""

    x: tuple[float, float]
    y: tuple[float, float]

    def to_x(self, value: float) -> float:
        low, high = self.x
        return MARGIN_LEFT + (value - low) / (high - low) * (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)

    def to_y(self, value: float) -> float:
        low, high = self.y
        return (
            HEIGHT
            - MARGIN_BOTTOM
            - (value - low) / (high - low) * (HEIGHT - MARGIN_TOP - MARGIN_BOTTOM)
        )


def x_range(xs: Sequence[float]) -> tuple[float, float]:
    low, high = min(xs), max(xs)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def y_range(values: Sequence[float], as_percent: bool) -> tuple[float, float]:
    """The values with a margin; starts at zero where zero is near."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if low >= 0 and low <= 0.5 * high:
        low = 0.0
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    top = high + margin
    bottom = low if low == 0 else low - margin
    return (
        (max(bottom, 0.0), min(top, 1.0)) if as_percent and 0 <= low <= high <= 1 else (bottom, top)
    )


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


def _axes(
    area: PlotArea,
    x_label: str,
    y_label: str,
    as_percent: bool,
    format_x: Callable[[float], str] | None,
) -> Iterable[str]:
    base = HEIGHT - MARGIN_BOTTOM
    for value in ticks(*area.y, 5):
        y = area.to_y(value)
        yield f'<path class="grid" d="M{MARGIN_LEFT} {y:.1f}H{WIDTH - MARGIN_RIGHT}"/>'
        text = format_tick(value, as_percent)
        yield f'<text x="{MARGIN_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    for value in step_ticks(*area.x) if format_x is None else ticks(*area.x, 6):
        x = area.to_x(value)
        label = f"{value:.0f}" if format_x is None else format_x(value)
        yield f'<path class="axis" d="M{x:.1f} {base}v4"/>'
        yield f'<text x="{x:.1f}" y="{base + 15}" text-anchor="middle">{label}</text>'
    yield f'<path class="axis" d="M{MARGIN_LEFT} {base}H{WIDTH - MARGIN_RIGHT}"/>'
    yield (
        f'<text class="label" x="{WIDTH - MARGIN_RIGHT}" y="{HEIGHT - 4}" text-anchor="end">'
        f"{escape(x_label)}</text>"
    )
    yield (
        f'<text class="label" transform="rotate(-90)" x="{-MARGIN_TOP}" y="9" text-anchor="end">'
        f"{escape(y_label)}</text>"
    )


def _draw_marks(marks: Sequence[float], area: PlotArea) -> Iterable[str]:
    inside = [x for x in marks if area.x[0] <= x <= area.x[1]]
    if inside:
        lines = "".join(
            f"M{area.to_x(x):.1f} {MARGIN_TOP}V{HEIGHT - MARGIN_BOTTOM}" for x in inside
        )
        yield f'<path class="mark" d="{lines}"/>'


def _draw_series(series: Series, area: PlotArea) -> Iterable[str]:
    if series.flat:
        at = area.to_y(series.values[0])
        yield f'<path class="line flat" d="M{MARGIN_LEFT} {at:.1f}H{WIDTH - MARGIN_RIGHT}"/>'
        return
    smooth = series.bars is None and len(series.values) >= SMOOTH_FROM
    raw = _path(downsample(series.points), area)
    yield f'<path class="line{" raw" if smooth else ""}" d="{raw}"/>'
    if smooth:
        yield f'<path class="line" d="{_path(downsample(moving_average(series.points)), area)}"/>'
    if series.bars is not None:
        yield _error_bars(series.points, series.bars, area)
    if len(series.values) < SMOOTH_FROM:
        radius = 3 if len(series.points) <= 12 else 1.8
        for x, y in series.points:
            if y is not None:
                yield (
                    f'<circle cx="{area.to_x(x):.1f}" cy="{area.to_y(y):.1f}" r="{radius}">'
                    f"<title>{escape(series.name)} at {x:g}: {format_number(y)}</title></circle>"
                )


def _error_bars(
    points: Sequence[Point], bars: Sequence[tuple[float, float]], area: PlotArea
) -> str:
    ends = [
        (area.to_x(x), area.to_y(low), area.to_y(high))
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


def _path(points: Sequence[Point], area: PlotArea) -> str:
    commands, pen_down = [], False
    for x, y in points:
        if y is not None:
            command = "L" if pen_down else "M"
            commands.append(f"{command}{area.to_x(x):.1f} {area.to_y(y):.1f}")
        pen_down = y is not None
    return "".join(commands)


def downsample(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MAX_POINTS:
        return list(points)
    bucket = math.ceil(len(points) / (MAX_POINTS / 2))
    thinned: list[Point] = []
    for start in range(0, len(points), bucket):
        values = [(y, x) for x, y in points[start : start + bucket] if y is not None]
        extremes = sorted({min(values), max(values)}, key=lambda at: at[1]) if values else []
        thinned += [(x, y) for y, x in extremes] or [(points[start][0], None)]
    return thinned


def moving_average(points: Sequence[Point]) -> list[Point]:
    """Centred, over a thirtieth of the run on each side; gaps are skipped over."""
    values = [(x, y) for x, y in points if y is not None]
    sums = [0.0]
    for _, y in values:
        sums.append(sums[-1] + y)
    half = max(len(values) // 30, 1)
    averaged: list[Point] = []
    for i, (x, _) in enumerate(values):
        start, end = max(i - half, 0), min(i + half + 1, len(values))
        averaged.append((x, (sums[end] - sums[start]) / (end - start)))
    return averaged


def _legend(series: Sequence[Series], as_percent: bool) -> str:
    return "".join(
        f'<span class="key c{index % NUM_COLORS}{" flat" if line.flat else ""}">'
        f"{escape(line.name)} <em>"
        f"{format_tick(line.values[-1], as_percent) if line.values else '–'}</em></span>"
        for index, line in enumerate(series)
    )


def format_tick(value: float, as_percent: bool) -> str:
    return f"{100 * value:.3g}%" if as_percent else format_number(value)


# ── intervals ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    name: str
    value: float
    low: float
    high: float
    color: int | None = None
    """None: its index in the plot."""


def interval_plot(intervals: Sequence[Interval], *, title: str) -> str:
    """Fractions with their intervals, a row each, on an axis from 0 to 100%."""
    # A letter takes up to 11 units: on narrow screens, where letters are larger.
    longest = max(len(interval.name) for interval in intervals)
    row, margin_left, margin_right = 30, max(128, min(30 + 11 * longest, 480)), 16
    width, height = 960, 30 * len(intervals) + 26
    base = row * len(intervals)

    def to_x(value: float) -> float:
        return margin_left + value * (width - margin_left - margin_right)

    parts = []
    for as_percent in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path class="grid" d="M{to_x(as_percent):.1f} 0V{base}"/>')
        parts.append(
            f'<text x="{to_x(as_percent):.1f}" y="{base + 16}" text-anchor="middle">'
            f"{100 * as_percent:.0f}%</text>"
        )
    for index, interval in enumerate(intervals):
        y = row * index + row / 2
        color = index if interval.color is None else interval.color
        parts.append(
            f'<g class="c{color % NUM_COLORS}">'
            f'<text class="name" x="{margin_left - 14}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(interval.name)}</text>"
            f'<path class="span" d="M{to_x(interval.low):.1f} {y}H{to_x(interval.high):.1f}"/>'
            f'<circle cx="{to_x(interval.value):.1f}" cy="{y}" r="5.5"/></g>'
        )
    return (
        f'<svg class="intervals" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
