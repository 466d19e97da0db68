"""A picture of results.json: what each way knows of the documents against what it has kept.

python recipes/forgetting/plots.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from courtside.experiment.marks import draw_dot, draw_rule, draw_text, linear_scale, render_svg
from courtside.experiment.pictures import run_plots


class Way(NamedTuple):
    variant: str
    label: str
    colour: str


WAYS = {
    "learn": Way("learn", "learn: plain", "#555555"),
    "kl": Way("learn", "learn: KL to the start, on the documents", "#b58900"),
    "lora": Way("learn", "learn: LoRA of rank 16", "#7a3fb0"),
    "replay": Way("learn", "learn: a quarter of other text", "#1d8a4b"),
    "score": Way("recover", "repair: the start scores every token", "#1f5fbf"),
    "imitate": Way("recover", "repair: the start's answers are imitated", "#d9541e"),
}
PLACES = {  # of a label beside its dot, where it would lie on a line
    "learn_2e-5": (-10, 8),
    "learn_5e-5": (-9, 14),
    "learn_1.5e-4": (-9, 32),
    "learn_5e-4": (-9, 14),
    "replay_5e-5": (4, -8),
    "replay_1.5e-4": (-9, 14),
    "replay_5e-4": (9, 4),
    "score_1e-5": (9, 4),
    "score_3e-5": (-9, 16),
    "score_1e-4": (9, -2),
    "imitate_3e-5": (9, -4),
    "imitate_1e-4": (9, -2),
    "lora_3e-4": (10, -4),
}
START, AVERAGE = "#222222", "#0b8a8a"
X_ORIGIN, TOP, WIDTH, HEIGHT = 64, 48, 560, 400
HIGHEST = 0.8
WHOLE = 8  # seeds


def knowledge_against_retention(results: Mapping[str, Any]) -> str:
    across = linear_scale(-0.07, 0.65, X_ORIGIN, X_ORIGIN + WIDTH)
    up = linear_scale(0, HIGHEST, TOP + HEIGHT, TOP)
    title = "Knowledge of 100 documents against what was known before"
    parts = [draw_text(X_ORIGIN, TOP - 24, title, "start", bold=True)]
    for tenth in range(0, 9, 2):
        y = up(tenth / 10)
        parts.append(draw_rule(X_ORIGIN, y, X_ORIGIN + WIDTH, y))
        parts.append(draw_text(X_ORIGIN - 8, y + 4, f"{tenth / 10:.0%}", "end"))
    for tenth in range(7):
        label = f"{tenth / 10:.0%}"
        parts.append(draw_text(across(tenth / 10), TOP + HEIGHT + 18, label, "middle"))
    arms = {variant: results["variants"][variant]["arms"] for variant in ("learn", "recover")}
    before, learned, average = (
        (across(arm["knowledge/after"]["mean"]), up(arm["retention/after"]["mean"]))
        for arm in (
            {name: arms["learn"]["learn_2e-5"][name.replace("after", "before")]
             for name in ("knowledge/after", "retention/after")},
            arms["recover"]["hold"],
            arms["recover"]["average"],
        )
    )  # fmt: skip
    parts.append(draw_rule(*before, *learned, START, "2 5"))
    for name, way in WAYS.items():
        begins = before if way.variant == "learn" else learned
        parts += draw_way(name, way, arms[way.variant], begins, across, up)
    for (x, y), label, colour, (right, down) in (
        (before, "start", START, (10, -7)),
        (learned, "learner", START, (-10, 19)),
        (average, "", AVERAGE, (10, 0)),
    ):
        parts.append(draw_dot(x, y, colour, size=6.0))
        anchor = "start" if right > 0 else "end"
        parts.append(draw_text(x + right, y + down, label, anchor, bold=True))
    note = "across: 40 questions on the documents; up: 72 everyday questions; means over seeds"
    parts.append(draw_text(X_ORIGIN, TOP + HEIGHT + 40, note, "start"))
    note = "full dots: 8 seeds, with 95% intervals over seeds; hollow: 2 or 3; at each dot its rate"
    parts.append(draw_text(X_ORIGIN, TOP + HEIGHT + 56, note, "start"))
    for index, way in enumerate(WAYS.values()):
        x, y = X_ORIGIN + (index % 2) * 290, TOP + HEIGHT + 82 + 18 * (index // 2)
        parts.append(draw_rule(x, y - 4, x + 22, y - 4, way.colour, "", 2.4))
        parts.append(draw_text(x + 28, y, way.label, "start"))
    x, y = X_ORIGIN, TOP + HEIGHT + 136
    parts.append(draw_dot(x + 11, y - 4, AVERAGE, size=6.0))
    label = "average of the weights of start and learner, and the line between the two"
    parts.append(draw_text(x + 28, y, label, "start"))
    return render_svg(X_ORIGIN + WIDTH + 24, TOP + HEIGHT + 152, title, parts)


def draw_way(
    name: str, way: Way, arms: Mapping[str, Any], begins: tuple[float, float],
    across: Any, up: Any,
) -> list[str]:  # fmt: skip
    """From where it begins over its rates, the lowest first."""
    rates = sorted(
        (arm["learning_rate"], label.partition("_")[2], arm)
        for label, arm in arms.items()
        if label.startswith(f"{name}_")
    )
    spots = [
        (across(arm["knowledge/after"]["mean"]), up(arm["retention/after"]["mean"]))
        for _, _, arm in rates
    ]
    parts = [draw_rule(*begins, *spots[0], way.colour, "3 4", 1.2)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="{way.colour}" stroke-width="1.8"/>'
    )
    for (x, y), (_, label, arm) in zip(spots, rates, strict=True):
        knows, keeps = arm["knowledge/after"], arm["retention/after"]
        whole = knows["seeds"] == WHOLE
        if whole:
            ends = [across(knows[end]) for end in ("low", "high")]
            parts.append(draw_rule(ends[0], y, ends[1], y, way.colour, "", 1.2))
            ends = [up(keeps[end]) for end in ("low", "high")]
            parts.append(draw_rule(x, ends[0], x, ends[1], way.colour, "", 1.2))
        parts.append(draw_dot(x, y, way.colour, size=4.2, filled=whole))
        right, down = PLACES.get(f"{name}_{label}", (9, 14))
        parts.append(draw_text(x + right, y + down, label, "start" if right > 0 else "end"))
    return parts


PICTURES = {"knowledge-retention.svg": knowledge_against_retention}

if __name__ == "__main__":
    run_plots(__file__, __doc__, PICTURES)
