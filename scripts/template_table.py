"""Writes the table of docs/chat-templates.md from what the families' templates do.

A test (`tests/unit/chat/test_families.py`) fails where the page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.template_survey import PAGE, page_with_table

PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
