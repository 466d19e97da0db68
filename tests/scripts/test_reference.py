"""docs/reference is what `scripts/reference.py` generates."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_reference_is_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "reference.py"), "--check"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_links_inside_the_reference_lead_somewhere() -> None:
    text = (REPOSITORY / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)


def test_a_metric_key_without_documentation_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    metric_keys = importlib.import_module("metric_keys")
    assert metric_keys.find_problems() == []
    text = metric_keys.PAGE.read_text(encoding="utf-8")
    page = tmp_path / "metrics.md"
    page.write_text(
        text.replace("| `kl` |", "| `kl_divergence` |").replace("`loss/NAME`", "`x/NAME`")
    )
    monkeypatch.setattr(metric_keys, "PAGE", page)
    assert metric_keys.find_problems() == [
        "docs/metrics.md, Step metrics: kl is missing",
        "docs/metrics.md, Step metrics: loss/* is missing",
        "docs/metrics.md, Step metrics: no code writes kl_divergence",
        "docs/metrics.md, Step metrics: no code writes x/*",
    ]
