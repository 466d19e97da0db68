"""Pictures of results.json: errors that each way leaves against what a run of it costs.

python recipes/ways-agent/plots.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from courtside.experiment.cost_picture import draw_cost
from courtside.experiment.pictures import run_plots

PICTURES = {
    "cost-seen.svg": ("error_rate_after", "seen names", 0.24),
    "cost-held-out.svg": ("held_out/error_rate_after", "held-out names", 0.8),
}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    paths = []
    for name, (measure, names, high) in PICTURES.items():
        picture = draw_cost(
            results,
            measure,
            title=f"Turns with an error, {names}, after 300,000 tokens of the student",
            note="PFLOP of a run, teacher included; means over five seeds with 95% intervals",
            high=high,
        )
        paths.append(folder / name)
        paths[-1].write_text(picture, encoding="utf-8")
    return paths


if __name__ == "__main__":
    run_plots(__file__, __doc__, draw)
