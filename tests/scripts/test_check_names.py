"""`scripts/check_names.py` finds retired words, and leaves the field's words alone."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / "check_names.py"))


RETIRED = """
def _found(own, num_words):
    room_for_logits, kept_ids = own, num_words
    for one in kept_ids:
        self.drawn_BT = one


class Lent: ...
"""

CURRENT = """
def count_above(student_logp_T, vocab_size):
    kv_cache, num_rows = student_logp_T, vocab_size
    for request in kv_cache:
        self.sampled_BT = request


class KVCachePool: ...
"""


def test_retired_words_are_listed(names: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "retired.py"
    file.write_text(RETIRED)
    problems = list(names["check_file"](file))
    identifiers = {line.split(": ")[1] for line in problems}
    assert identifiers == {
        "Lent", "_found", "drawn_BT", "kept_ids", "num_words", "one", "own", "room_for_logits",
    }  # fmt: skip
    assert all(line.startswith(f"{file}:") for line in problems)


def test_the_fields_words_pass(names: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "current.py"
    file.write_text(CURRENT)
    assert list(names["check_file"](file)) == []


def test_the_command_fails_when_a_word_is_retired(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "retired.py"
    file.write_text(RETIRED)
    monkeypatch.setattr("sys.argv", ["check_names.py", str(file)])
    assert names["main"]() == 1
    file.write_text(CURRENT)
    assert names["main"]() == 0
