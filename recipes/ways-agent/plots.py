"""Pictures of results.json: errors that each way leaves against what a run of it costs.

python recipes/ways-agent/plots.py
"""

from __future__ import annotations

from functools import partial

from courtside.experiment.cost_picture import draw_cost
from courtside.experiment.pictures import run_plots

MEASURES = {
    "cost-seen.svg": ("error_rate_after", "seen names", 0.24),
    "cost-held-out.svg": ("held_out/error_rate_after", "held-out names", 0.8),
}
PICTURES = {
    file: partial(
        draw_cost,
        measure=measure,
        title=f"Turns with an error, {names}, after 300,000 tokens of the student",
        note="PFLOP of a run, teacher included; means over five seeds with 95% intervals",
        high=high,
    )
    for file, (measure, names, high) in MEASURES.items()
}

if __name__ == "__main__":
    run_plots(__file__, __doc__, PICTURES)
