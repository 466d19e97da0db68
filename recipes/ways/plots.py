"""A picture of results.json: what each way ends at against what a run of it costs.

python recipes/ways/plots.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from courtside.experiment.cost_picture import draw_cost
from courtside.experiment.pictures import run_plots


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    path = folder / "cost.svg"
    picture = draw_cost(
        results,
        "after",
        title="Additions solved after 600,000 tokens of the student",
        note="PFLOP of a run, teacher included; means over five seeds with 95% intervals",
        high=1.0,
    )
    path.write_text(picture, encoding="utf-8")
    return [path]


if __name__ == "__main__":
    run_plots(__file__, __doc__, draw)
