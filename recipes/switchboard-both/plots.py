"""Pictures of results.json: errors on both sides of the habits by arm, by fault, along training.

python recipes/switchboard-both/plots.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from courtside.experiment.marks import draw_dot, draw_rule, draw_text, linear_scale, render_svg
from courtside.experiment.pictures import run_plots

ARMS = {
    "hint": ("hint", "#1f5fbf"),
    "penalty": ("penalty", "#d9541e"),
    "all_rules": ("all rules, every turn", "#1d8a4b"),
    "careful": ("“Careful here.”", "#7a3fb0"),
    "wrong_kind": ("another fault's hint", "#b58900"),
    "random_turn": ("hint on a random turn", "#777777"),
}
FAULTS = ("date", "desk", "confirm", "talk")
SIDES = {"wrong": True, "right": False}
"""Filled where the habit is wrong, hollow where it is right."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
X_ORIGIN, TOP = 64, 46


def both_sides(results: Mapping[str, Any]) -> str:
    """(a) Error where the habit is wrong against error where it is right, every seed."""
    size = 420
    across = linear_scale(0, 1, X_ORIGIN, X_ORIGIN + size)
    up = linear_scale(0, 1, TOP + size, TOP)
    parts = [
        f'<rect x="{across(0):.1f}" y="{up(0.25):.1f}" width="{across(0.25) - across(0):.1f}" '
        f'height="{up(0) - up(0.25):.1f}" fill="#e6f3e6"/>'
    ]
    for share in SHARES:
        parts.append(draw_rule(across(share), up(0), across(share), up(1)))
        parts.append(draw_rule(across(0), up(share), across(1), up(share)))
        parts.append(draw_text(across(share), up(0) + 18, f"{share:.0%}", "middle"))
        parts.append(draw_text(across(0) - 8, up(share) + 4, f"{share:.0%}", "end"))
    parts.append(draw_rule(across(0), up(1), across(1), up(0), "#999999", "4 4"))
    parts.append(draw_text(across(0.03), up(0.03), "right on both", "start"))
    parts.append(draw_text(across(0.9), up(0.03), "turned over", "end"))
    parts.append(
        draw_text(X_ORIGIN, TOP - 24, "error where the habit is wrong", "start", bold=True)
    )
    bottom = up(0) + 38
    parts.append(draw_text(across(1), bottom, "error where the habit is right", "end", bold=True))
    for name in reversed(ARMS):
        arm, (_, colour) = results["arms"][name], ARMS[name]
        wrong, right = (arm[f"decisions/habit_{side}_after"] for side in SIDES)
        x, y = across(right["mean"]), up(wrong["mean"])
        for seed_wrong, seed_right in zip(wrong["values"], right["values"], strict=True):
            spot = across(seed_right), up(seed_wrong)
            parts.append(draw_rule(x, y, *spot, colour + "55"))
            parts.append(draw_dot(*spot, colour, size=2.2))
        parts.append(draw_dot(x, y, colour, size=6.5))
    start = results["arms"]["hint"]
    wrong, right = (start[f"decisions/habit_{side}_before"]["mean"] for side in SIDES)
    parts.append(draw_dot(across(right), up(wrong), "#000000", size=6.5))
    parts.append(draw_text(across(right) + 12, up(wrong) + 4, "start", "start", bold=True))
    for index, (label, colour) in enumerate(ARMS.values()):
        y = TOP + 10 + 22 * index
        parts.append(draw_dot(X_ORIGIN + size + 30, y - 4, colour, size=6.5))
        parts.append(draw_text(X_ORIGIN + size + 44, y, label, "start"))
    for index, line in enumerate(
        ("large: mean; small: each seed", "dashed: a student that", "cannot tell the sides apart")
    ):
        parts.append(draw_text(X_ORIGIN + size + 22, TOP + 166 + 17 * index, line, "start"))
    return render_svg(
        X_ORIGIN + size + 225, bottom + 12, "Errors on both sides of the habits", parts
    )


def by_fault(results: Mapping[str, Any]) -> str:
    """(b) Both errors of every arm, a column for each fault."""
    width, gap, row, names = 150, 48, 34, 160
    bottom = TOP + row * len(ARMS)
    parts: list[str] = []
    for index, fault in enumerate(FAULTS):
        x_start = names + index * (width + gap)
        across = linear_scale(0, 1, x_start, x_start + width)
        parts.append(draw_text(x_start, TOP - 20, fault, "start", bold=True))
        for share in (0.0, 0.5, 1.0):
            parts.append(draw_rule(across(share), TOP - 8, across(share), bottom))
            parts.append(draw_text(across(share), bottom + 16, f"{share:.0%}", "middle"))
        for place, (name, (_, colour)) in enumerate(ARMS.items()):
            for offset, (side, filled) in zip((8, 20), SIDES.items(), strict=True):
                y = TOP + row * place + offset
                errors = results["arms"][name][f"decisions/{fault}/habit_{side}_after"]
                parts.append(draw_rule(across(0), y, across(errors["mean"]), y, colour, "", 1.6))
                for value in errors["values"]:
                    parts.append(draw_dot(across(value), y, colour, size=1.8, filled=filled))
                parts.append(draw_dot(across(errors["mean"]), y, colour, size=4.4, filled=filled))
    for place, (label, _) in enumerate(ARMS.values()):
        parts.append(draw_text(names - 14, TOP + row * place + 18, label, "end"))
        y = TOP + row * place - 3
        parts.insert(0, draw_rule(20, y, names + 4 * (width + gap) - gap, y, "#eeeeee"))
    y = bottom + 40
    parts.append(draw_dot(names, y - 4, "#222222", size=4.4))
    parts.append(draw_text(names + 10, y, "error where the habit is wrong", "start"))
    parts.append(draw_dot(names + 220, y - 4, "#222222", size=4.4, filled=False))
    parts.append(draw_text(names + 230, y, "error where it is right", "start"))
    parts.append(draw_text(names + 390, y, "large: mean; small: each seed", "start"))
    total = names + len(FAULTS) * (width + gap) + 10
    return render_svg(total, y + 14, "Errors after training, by fault and side", parts)


def along_training(results: Mapping[str, Any]) -> str:
    """(c) Both errors in the episodes of each training step, means over seeds."""
    width, height, gap = 300, 220, 60
    parts: list[str] = []
    titles = ("error where the habit is wrong", "error where the habit is right")
    for index, (side, title) in enumerate(zip(SIDES, titles, strict=True)):
        x_start = X_ORIGIN + index * (width + gap)
        series = {
            name: results["arms"][name]["training_decisions"][f"decisions/habit_{side}"]
            for name in ARMS
        }
        last = max(point["step"] for points in series.values() for point in points)
        across = linear_scale(0, last, x_start + 8, x_start + width - 8)
        up = linear_scale(0, 1, TOP + height, TOP)
        parts.append(draw_text(x_start, TOP - 20, title, "start", bold=True))
        for share in SHARES:
            parts.append(draw_rule(x_start, up(share), x_start + width, up(share)))
            parts.append(draw_text(x_start - 8, up(share) + 4, f"{share:.0%}", "end"))
        for step in range(0, last + 1, 5):
            parts.append(draw_text(across(step), TOP + height + 18, str(step), "middle"))
        for name in reversed(ARMS):
            spots = [(across(point["step"]), up(point["mean"])) for point in series[name]]
            parts += _line(spots, ARMS[name][1])
    note = "training step (its own episodes, before its update); means over seeds"
    parts.append(draw_text(X_ORIGIN, TOP + height + 38, note, "start"))
    for index, (label, colour) in enumerate(ARMS.values()):
        x, y = X_ORIGIN + (index % 3) * 220, TOP + height + 62 + 18 * (index // 3)
        parts.append(draw_rule(x, y - 4, x + 22, y - 4, colour, "", 2.4))
        parts.append(draw_text(x + 28, y, label, "start"))
    total = X_ORIGIN + 2 * (width + gap) - gap + 14
    title = "Errors in the episodes of each training step"
    return render_svg(total, TOP + height + 92, title, parts)


def _line(spots: list[tuple[float, float]], colour: str) -> Iterator[str]:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    for x, y in spots:
        yield draw_dot(x, y, colour, size=1.8)


PICTURES = {
    "both-sides.svg": both_sides,
    "by-fault.svg": by_fault,
    "along-training.svg": along_training,
}


if __name__ == "__main__":
    run_plots(__file__, __doc__, PICTURES)
