"""A picture of what each arm of an experiment ends at against what a run of it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from courtside.experiment.marks import draw_dot, draw_rule, draw_text, linear_scale, render_svg

X_ORIGIN, TOP, WIDTH, HEIGHT = 64, 48, 560, 300
WITH_TEACHER, WITHOUT_TEACHER, START = "#1f5fbf", "#d9541e", "#777777"


class Box(NamedTuple):
    x_min: float
    y_min: float
    x_max: float
    y_max: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.x_min < other.x_max
            and other.x_min < self.x_max
            and self.y_min < other.y_max
            and other.y_min < self.y_max
        )


def draw_cost(
    results: Mapping[str, Any], measure: str, *, title: str, note: str, high: float
) -> str:
    """`measure`: a key of an arm, such as `after` or `error_rate_after`; from 0 to `high`."""
    arms = results["arms"]
    costs = {name: arm["spent"]["flops"]["mean"] / 1e15 for name, arm in arms.items()}
    across = linear_scale(0, 1.25 * max(costs.values()), X_ORIGIN, X_ORIGIN + WIDTH)
    up = linear_scale(0, high, TOP + HEIGHT, TOP)
    parts = [draw_text(X_ORIGIN, TOP - 24, title, "start", bold=True)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = up(share * high)
        parts.append(draw_rule(X_ORIGIN, y, X_ORIGIN + WIDTH, y))
        parts.append(draw_text(X_ORIGIN - 8, y + 4, f"{share * high:.0%}", "end"))
    for tenth in range(int(12.5 * max(costs.values())) + 1):
        parts.append(draw_text(across(tenth / 10), TOP + HEIGHT + 18, f"{tenth / 10:g}", "middle"))
    before = next(iter(arms.values()))[measure.replace("after", "before")]["mean"]
    parts.append(draw_rule(X_ORIGIN, up(before), X_ORIGIN + WIDTH, up(before), START, "4 4"))
    parts.append(draw_text(X_ORIGIN + WIDTH, up(before) - 5, "start", "end"))
    spots = {name: (across(costs[name]), up(arms[name][measure]["mean"])) for name in arms}
    boxes = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in spots.values()]
    for name, (x, y) in spots.items():
        value = arms[name][measure]
        has_teacher = arms[name]["spent"]["teacher_tokens"]["mean"] > 0
        colour = WITH_TEACHER if has_teacher else WITHOUT_TEACHER
        ends = (up(max(0.0, value["low"])), up(min(high, value["high"])))
        parts.append(draw_rule(x, ends[0], x, ends[1], colour, "", 1.4))
        parts.append(draw_dot(x, y, colour, size=4.0))
        parts.append(draw_text(x + 8, place_label(boxes, name, x + 8, y + 4), name, "start"))
    parts.append(draw_text(X_ORIGIN, TOP + HEIGHT + 38, note, "start"))
    for index, (label, colour) in enumerate(
        (("reads or writes with a teacher or reference", WITH_TEACHER),
         ("without one", WITHOUT_TEACHER))
    ):  # fmt: skip
        x, y = X_ORIGIN + 5 + index * 300, TOP + HEIGHT + 58
        parts.append(draw_dot(x, y - 4, colour, size=4.0))
        parts.append(draw_text(x + 10, y, label, "start"))
    return render_svg(X_ORIGIN + WIDTH + 20, TOP + HEIGHT + 76, title, parts)


def place_label(boxes: list[Box], text: str, x: float, y: float) -> float:
    """The baseline next to `y` at which a label covers nothing; its box is added."""
    for offset in sorted(range(-150, 150), key=abs):
        box = Box(x, y + offset - 10, x + 7 * len(text), y + offset + 3)
        if box.y_max <= TOP + HEIGHT + 1 and not any(box.overlaps(other) for other in boxes):
            boxes.append(box)
            return y + offset
    return y
