"""A picture of results.json: the student's mass on the teacher's top k, over the teacher's.

python recipes/top-k/plots.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from courtside.experiment.marks import draw_dot, draw_rule, draw_text, linear_scale, render_svg
from courtside.experiment.pictures import run_plots

FORMS = {
    "tail": ("tail", "#1f5fbf"),
    "stop_gradient": ("stop-gradient", "#1d8a4b"),
    "renormalized": ("renormalized", "#b58900"),
    "naive": ("naive", "#d9541e"),
}
SIZES = (1, 5, 20, 64)
X_ORIGIN, TOP, WIDTH, HEIGHT = 60, 46, 420, 260
SHIFT = 7
"""Pixels between the forms at one k, so that equal ones are seen."""


def mass_against_k(results: Mapping[str, Any]) -> str:
    up = linear_scale(0, 1.25, TOP + HEIGHT, TOP)
    across = linear_scale(0, len(SIZES) - 1, X_ORIGIN + 40, X_ORIGIN + WIDTH - 40)
    one_over_e = results["one_over_e"]
    parts = [draw_text(X_ORIGIN, TOP - 20, "Where top-k reverse KL ends", "start", bold=True)]
    for ratio in (0, 0.25, 0.5, 0.75, 1.0, 1.25):
        parts.append(draw_rule(X_ORIGIN, up(ratio), X_ORIGIN + WIDTH, up(ratio)))
        parts.append(draw_text(X_ORIGIN - 8, up(ratio) + 4, f"{ratio:g}", "end"))
    for ratio, label in ((1.0, "as the teacher"), (one_over_e, "1/e")):
        parts.append(draw_rule(X_ORIGIN, up(ratio), X_ORIGIN + WIDTH, up(ratio), "#222222", "4 3"))
        parts.append(draw_text(X_ORIGIN + WIDTH + 6, up(ratio) + 4, label, "start"))
    for place, k in enumerate(SIZES):
        parts.append(draw_text(across(place), TOP + HEIGHT + 18, f"k = {k}", "middle"))
        for index, (form, (_, colour)) in enumerate(FORMS.items()):
            end = results["arms"][f"{form} k{k}"]["mass_ratio_after"]
            x = across(place) + SHIFT * (index - 1.5)
            parts.append(draw_rule(x, up(end["low"]), x, up(end["high"]), colour, "", 2))
            parts.append(draw_dot(x, up(end["mean"]), colour, size=4))
    note = "mass of the student on the teacher's k likeliest tokens, divided by the teacher's;"
    parts.append(draw_text(X_ORIGIN, TOP + HEIGHT + 42, note, "start"))
    seeds = f"means over {results['seeds']} seeds with 95% intervals, 49,152 tokens"
    parts.append(draw_text(X_ORIGIN, TOP + HEIGHT + 58, seeds, "start"))
    for index, (label, colour) in enumerate(FORMS.values()):
        x, y = X_ORIGIN + 110 * index, TOP + HEIGHT + 82
        parts.append(draw_dot(x + 5, y - 4, colour, size=4))
        parts.append(draw_text(x + 15, y, label, "start"))
    return render_svg(
        X_ORIGIN + WIDTH + 110, TOP + HEIGHT + 100, "Mass on the support against 1/e", parts
    )


PICTURES = {"mass.svg": mass_against_k}

if __name__ == "__main__":
    run_plots(__file__, __doc__, PICTURES)
