"""Models of many kinds are right or refused, as in docs/models.md: a dozen of its rows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.kind_checks import check_kind
from support.model_kinds import all_kinds

ROOT = Path(__file__).resolve().parents[2]
KINDS = {kind.name: kind for kind in all_kinds()}
RIGHT = {
    "bart": ("padded", "separate rows"),  # positions that no caller can give
    "cohere": ("packed, prefixes shared", "KV cache"),
    "deepseek_v3": ("packed, prefixes shared", "KV cache"),
    "falcon": ("padded", "left padded"),  # an attention that cannot be replaced
    "gpt_neo": ("padded", "left padded"),
    "llama (eager attention)": ("padded", "KV cache"),
    "llama4_text": ("padded", "separate rows"),  # scaled by the slot in its cache
    "olmoe": ("packed, prefixes shared", "KV cache"),
    "openai-gpt": ("padded", "uncached"),  # no cache at all
}
REFUSED = {
    "bert": "does more between hidden states and logits",
    "bert-generation (bidirectional)": "is no causal language model",
    "xlnet": "is no causal language model",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    result = check_kind(KINDS[name], with_lora=name in ("cohere", "falcon"))
    assert result.status == "right", result
    assert (result.paths["passes"], result.paths["sampling"]) == RIGHT[name]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    result = check_kind(KINDS[name])
    assert result.status == "refused" and REFUSED[name] in result.problems["engine"]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("models_script", ROOT / "scripts" / "models.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_has_the_table_of_the_json() -> None:
    script = load_script()
    results = json.loads(script.RESULTS.read_text("utf-8"))
    page = script.PAGE.read_text("utf-8")
    assert script.render_page(page, results) == page
    assert "| passes; sampling; hints |" in page
    assert "| `llama` | right | packed, prefixes shared; KV cache; tree |" in page
    assert {row["name"] for row in results["kinds"]} >= {*RIGHT, *REFUSED}
    assert not [row["name"] for row in results["kinds"] if row["status"] in script.BAD]


def test_a_row_that_is_wrong_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script()
    monkeypatch.setattr("sys.argv", ["models.py", "--only", "x"])
    rows = [{"name": "x", "status": "right"}, {"name": "y", "status": "refused"}]
    monkeypatch.setattr(script, "run_kinds", lambda only: rows)
    assert script.main() == 0
    for status in script.BAD:
        monkeypatch.setattr(
            script, "run_kinds", lambda only, s=status: [{"name": "x", "status": s}]
        )
        assert script.main() == 1
