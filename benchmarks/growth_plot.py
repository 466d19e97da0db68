"""The picture of `growth.py`: a panel a series, cost relative to the smallest size, both axes
logarithmic. Parallel to the dashed line is linear.

    python benchmarks/growth_plot.py benchmarks/results/growth_cpu.json    # makes it again
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from courtside.report.page.svg import step_ticks

WIDTH, HEIGHT = 208, 168
MARGIN_LEFT, MARGIN_TOP, GAP_X, GAP_Y = 48, 84, 52, 74
COLUMNS = 4
TIME, MEMORY, CUT, GUIDE = "#1f5fbf", "#d9541e", "#7fb2ea", "#888888"

Row = Mapping[str, Any]


def picture(result: Mapping[str, Any]) -> str:
    """All series of a result; a series may share the panel of another."""
    series = result["series"]
    panels = [s for s in series if s["panel_of"] is None]
    names = {s["series"] for s in panels}
    panels += [s for s in series if s["panel_of"] not in (None, *names)]
    parts = [*_heading(result, panels)]
    for index, panel in enumerate(panels):
        short_series = [s for s in series if s["panel_of"] == panel["series"]]
        x = MARGIN_LEFT + index % COLUMNS * (WIDTH + GAP_X)
        y = MARGIN_TOP + index // COLUMNS * (HEIGHT + GAP_Y)
        parts += _panel(panel, short_series, x, y, result["memory_floor_bytes"])
    num_rows = -(-len(panels) // COLUMNS)
    width = MARGIN_LEFT + COLUMNS * (WIDTH + GAP_X) - GAP_X + 20
    height = MARGIN_TOP + num_rows * (HEIGHT + GAP_Y)
    caption = _caption(result)
    parts += [_text(MARGIN_LEFT, height + 16 * i, line) for i, line in enumerate(caption)]
    return _svg(width, height + 16 * len(caption), parts)


def _heading(result: Mapping[str, Any], panels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    hardware = result["hardware"]
    where = hardware.get("gpu") or f"{hardware['cpu']}, {result['settings']['threads']} thread"
    model = {"small": "llama of 10 million weights"}.get(
        result["settings"]["model"], f"shape of {result['settings']['model']}"
    )
    about = f"{model}, {where}, {result['date'][:10]}"
    yield _text(
        MARGIN_LEFT, 20, f"Cost against size, as a multiple of the smallest — {about}", bold=True
    )
    entries = [("time", TIME, ""), ("memory above what was held", MEMORY, "")]
    entries += [("time of the same tokens in short sequences", CUT, "")]
    entries += [("twice the size, twice the cost", GUIDE, "4 3")]
    x = float(MARGIN_LEFT)
    for label, colour, dashes in entries:
        yield _line([(x, 40), (x + 22, 40)], colour, dashes)
        yield _text(x + 28, 44, label)
        x += 54 + 6.7 * len(label)


def _caption(result: Mapping[str, Any]) -> list[str]:
    return [
        "Filled: judged, a doubling may cost at most "
        f"{result['limit']:g} times the time and the memory. Hollow: sequences get longer, and "
        "attention, quadratic in their length by its nature,",
        f"makes a doubling more than {result['counted_limit']:g} times the work by count: shown, "
        "not judged. Below the dashed line: fixed costs are shared by more work.",
        f"Memory is compared from {result['memory_floor_bytes'] / 2**20:.0f} MiB on.",
    ]


def _panel(
    panel: Mapping[str, Any],
    short_series: Sequence[Mapping[str, Any]],
    origin_x: float,
    origin_y: float,
    floor: int,
) -> Iterator[str]:
    rows = panel["rows"]
    first, last = rows[0]["size"], rows[-1]["size"]
    base = rows[0]["seconds"]
    least = max(rows[0]["memory_bytes"], floor)
    times = [(row["size"], row["seconds"] / base) for row in rows]
    memory = [(row["size"], max(row["memory_bytes"], floor) / least) for row in rows]
    cut = [(row["size"], row["seconds"] / base) for s in short_series for row in s["rows"]]
    values = [y for _, y in (*times, *memory, *cut)] + [last / first]
    low, high = min(0.0, math.log2(min(values))), math.log2(max(values)) + 0.2

    def place_x(size: float) -> float:
        return origin_x + 10 + math.log2(size / first) / math.log2(last / first) * (WIDTH - 20)

    def place_y(value: float) -> float:
        return origin_y + HEIGHT - (math.log2(value) - low) / (high - low) * HEIGHT

    def placed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(place_x(x), place_y(y)) for x, y in points]

    yield _text(origin_x, origin_y - 10, panel["series"], bold=True)
    for power in step_ticks(low, high):
        y = place_y(2.0**power)
        yield _line([(origin_x, y), (origin_x + WIDTH, y)], "#dddddd", width=1)
        yield _text(origin_x - 6, y + 4, f"{2**power:g}×", "end")
    for row in rows:
        yield _text(
            place_x(row["size"]), origin_y + HEIGHT + 15, f"{row['size']}", "middle", small=True
        )
    yield _text(origin_x + WIDTH, origin_y + HEIGHT + 30, panel["unit"], "end")
    yield _line(placed([(first, 1.0), (last, last / first)]), GUIDE, "4 3", 1.2)
    if cut:
        yield _line(placed(cut), CUT)
        yield from (_dot(x, y, CUT) for x, y in placed(cut))
    yield _line(placed(memory), MEMORY)
    yield from (_dot(x, y, MEMORY) for x, y in placed(memory))
    yield _line(placed(times), TIME)
    hint_outcomes = [True, *panel["judged"]]
    for (x, y), counts in zip(placed(times), hint_outcomes, strict=True):
        yield _dot(x, y, TIME, filled=counts)
    longest = rows[-1]
    label = f"{_seconds(longest['seconds'])}, {longest['memory_bytes'] / 2**20:,.0f} MiB at the end"
    yield _text(origin_x + 4, origin_y + 14, label, small=True)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    *,
    bold: bool = False,
    small: bool = False,
) -> str:
    style = ' font-weight="600"' if bold else ""
    # A rim of white: lines of the grid run below.
    style += ' font-size="10" stroke="#fff" stroke-width="4" paint-order="stroke"' if small else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _line(
    points: Sequence[tuple[float, float]], colour: str, dashes: str = "", width: float = 1.8
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-dasharray="{dashes}"/>'
    )


def _dot(x: float, y: float, colour: str, *, filled: bool = True) -> str:
    fill = colour if filled else "#ffffff"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{colour}"/>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="Cost against size" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222222">'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> None:
    for name in sys.argv[1:]:
        file = Path(name)
        file.with_suffix(".svg").write_text(picture(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
