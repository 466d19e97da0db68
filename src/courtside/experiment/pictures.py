"""The command of an experiment's `plots.py`: results.json in, pictures next to it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Draw = Callable[[Mapping[str, Any], Path], list[Path]]
"""Results and a folder to the pictures that were written there."""


def run_plots(script: str, about: str, draw: Draw) -> None:
    """`script`: the file whose folder has the results; `about`: its docstring."""
    folder = Path(script).parent
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=folder / "results.json")
    parser.add_argument("--to", type=Path, default=folder, help="folder of the pictures")
    options = parser.parse_args()
    for path in draw(json.loads(options.results.read_text()), options.to):
        print(path)
