"""The command of an experiment's `plots.py`: results.json in, pictures next to it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Pictures = Mapping[str, Callable[[Mapping[str, Any]], str]]
"""By file name: results to an SVG."""


def run_plots(script: str, about: str, pictures: Pictures) -> None:
    """`script`: the file whose folder has the results; `about`: its docstring."""
    folder = Path(script).parent
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=folder / "results.json")
    parser.add_argument("--to", type=Path, default=folder, help="folder of the pictures")
    options = parser.parse_args()
    for path in draw_pictures(pictures, json.loads(options.results.read_text()), options.to):
        print(path)


def draw_pictures(pictures: Pictures, results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write them into the folder."""
    for name, draw in pictures.items():
        (folder / name).write_text(draw(results), encoding="utf-8")
    return [folder / name for name in pictures]
