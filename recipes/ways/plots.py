"""A picture of results.json: what each way ends at against what a run of it costs.

python recipes/ways/plots.py
"""

from __future__ import annotations

from functools import partial

from courtside.experiment.cost_picture import draw_cost
from courtside.experiment.pictures import run_plots

PICTURES = {
    "cost.svg": partial(
        draw_cost,
        measure="after",
        title="Additions solved after 600,000 tokens of the student",
        note="PFLOP of a run, teacher included; means over five seeds with 95% intervals",
        high=1.0,
    )
}

if __name__ == "__main__":
    run_plots(__file__, __doc__, PICTURES)
