"""Runs of several ranks on loopback (gloo), and how they are compared with those of one process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from courtside.cli.launch import launch
from courtside.report.folder.folder import RunFolder
from courtside.training.checkpoints import latest, load

SCRIPT = Path(__file__).with_name("rank_script.py")
GRADIENT, WEIGHT = 1e-6, 1e-5
"""Tolerances: of the optimizer's moments, and of weights after steps of 1e-3."""


def run_ranks(folder: Path, jobs: list[dict[str, Any]], num_ranks: int) -> int:
    file = folder / f"jobs-{num_ranks}.json"
    file.write_text(json.dumps(jobs))
    return launch([sys.executable, str(SCRIPT), str(file)], num_ranks)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on the machine."""
    timed = re.compile(r"seconds|tokens_per")
    return [
        {k: v for k, v in row.items() if not timed.search(k)}
        for row in RunFolder.read(folder).metrics()
    ]


def compare_runs(first: Path, second: Path) -> None:
    for a, b in zip(rows(first), rows(second), strict=True):
        if "hints/trained" in a:  # one process scores hints in the update's own pass
            a, b = ({k: v for k, v in row.items() if "cost" not in k} for row in (a, b))
        # A gap that is zero but for rounding has either sign.
        counts = {key for key in a if key.endswith("/negative")}
        for key in counts & b.keys():
            assert a[key] == pytest.approx(b[key], abs=0.05)
        a, b = ({k: v for k, v in row.items() if k not in counts} for row in (a, b))
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    folders = [latest(folder / "checkpoints") for folder in (first, second)]
    assert None not in folders and folders[0].name == folders[1].name
    checkpoint, other = (load(folder).tensors for folder in folders)
    assert checkpoint.keys() == other.keys()
    for group, tensors in checkpoint.items():
        assert tensors.keys() == other[group].keys()
        tolerance = GRADIENT if group == "optimizer" else WEIGHT
        for name, tensor in tensors.items():
            assert tensor.shape == other[group][name].shape
            assert (tensor - other[group][name]).abs().max() <= tolerance, (group, name)


def outcomes(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.parent.glob(f"{folder.name}.rank*.json"))
    return [json.loads(file.read_text()) for file in files]
