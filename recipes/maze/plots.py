"""A picture of results.json: held-out ways that are solved, along training, by arm and length.

python recipes/maze/plots.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from courtside.experiment.marks import draw_dot, draw_rule, draw_text, linear_scale, render_svg
from courtside.experiment.pictures import run_plots

ARMS = {
    "on_reverse": ("student writes, reverse KL", "#1f5fbf"),
    "on_forward": ("student writes, forward KL", "#5aa0e6"),
    "mixed": ("half and half, reverse KL", "#7a3fb0"),
    "off_forward": ("teacher writes, forward KL", "#d9541e"),
    "off_reverse": ("teacher writes, reverse KL", "#e8955f"),
    "imitation": ("teacher writes, imitated", "#1d8a4b"),
    "noise": ("noisy shortest ways, forward KL", "#b58900"),
}
TITLES = {"medium": "ways of 10 to 14 steps", "long": "ways of 34 to 38 steps"}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
X_ORIGIN, TOP, WIDTH, HEIGHT, GAP = 60, 46, 300, 240, 60


def along_training(results: Mapping[str, Any]) -> str:
    parts: list[str] = []
    up = linear_scale(0, 1, TOP + HEIGHT, TOP)
    for index, (variant, title) in enumerate(TITLES.items()):
        x_start = X_ORIGIN + index * (WIDTH + GAP)
        curves = {name: results["variants"][variant]["arms"][name]["curve"] for name in ARMS}
        last = max(point["step"] for curve in curves.values() for point in curve)
        across = linear_scale(0, last, x_start + 8, x_start + WIDTH - 8)
        parts.append(draw_text(x_start, TOP - 20, title, "start", bold=True))
        for share in SHARES:
            parts.append(draw_rule(x_start, up(share), x_start + WIDTH, up(share)))
            parts.append(draw_text(x_start - 8, up(share) + 4, f"{share:.0%}", "end"))
        for step in range(0, last + 1, 20):
            parts.append(draw_text(across(step), TOP + HEIGHT + 18, str(step), "middle"))
        for name in reversed(ARMS):
            colour = ARMS[name][1]
            spots = [(across(point["step"]), up(point["mean"])) for point in curves[name]]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            parts += [draw_dot(x, y, colour, size=2.4) for x, y in spots]
    note = "optimizer steps; validation ways solved, means over eight seeds"
    parts.append(draw_text(X_ORIGIN, TOP + HEIGHT + 38, note, "start"))
    for index, (label, colour) in enumerate(ARMS.values()):
        x, y = X_ORIGIN + (index % 3) * 220, TOP + HEIGHT + 62 + 18 * (index // 3)
        parts.append(draw_rule(x, y - 4, x + 22, y - 4, colour, "", 2.4))
        parts.append(draw_text(x + 28, y, label, "start"))
    total = X_ORIGIN + 2 * (WIDTH + GAP) - GAP + 20
    return render_svg(total, TOP + HEIGHT + 110, "Ways solved along training", parts)


PICTURES = {"along-training.svg": along_training}

if __name__ == "__main__":
    run_plots(__file__, __doc__, PICTURES)
