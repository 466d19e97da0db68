"""Marks of pictures: text, lines and dots of an SVG file that needs no style sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape


def linear_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """What lies outside is drawn at the edge."""
    return lambda value: start + (min(max(value, low), high) - low) / (high - low) * (end - start)


def draw_text(x: float, y: float, label: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(label)}</text>'


def draw_rule(
    x0: float, y0: float, x1: float, y1: float,
    colour: str = "#dddddd", dashes: str = "", width: float = 1,
) -> str:  # fmt: skip
    return (
        f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{colour}" fill="none" '
        f'stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    )


def draw_dot(x: float, y: float, colour: str, *, size: float = 3.4, filled: bool = True) -> str:
    fill = colour if filled else "#ffffff"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{fill}" stroke="{colour}"/>'


def render_svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222222">'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
        f"{''.join(parts)}</svg>\n"
    )
