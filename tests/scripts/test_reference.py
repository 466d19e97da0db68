"""docs/reference is what `scripts/reference.py` generates."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
