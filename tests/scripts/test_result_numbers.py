"""Measured numbers on the pages are those of the JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import result_numbers
from result_numbers import (
    ROOT,
    find_loose,
    format_value,
    pages,
    render_number,
    render_table,
    rewrite,
)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_the_numbers_of_the_json(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == rewrite(text), "run `make docs`"
    assert list(find_loose(text)) == [], "put them between markers, or say why they have no JSON"


def test_a_digit_that_was_changed_is_noticed() -> None:
    text = "ends at <!-- = distil-back; on-policy; after -->95.9% (91.6–100)<!-- /= -->."
    assert rewrite(text) == text
    assert rewrite(text.replace("95.9", "96.9")) == text
    table = render_table("contrasts; pruned; nats")
    assert rewrite(table.replace("better", "worse", 1)) == table


def test_costs_are_listed_with_what_an_arm_ends_at(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"student_tokens": 600_400, "teacher_tokens": 0, "flops": 2.5e15, "steps": 18.4,
             "seconds": 31.4}  # fmt: skip
    arm = {
        "learning_rate": 1e-5,
        "before": {"mean": 0.25},
        "after": {"mean": 0.5, "low": 0.4, "high": 0.6, "seeds": 5},
        "knowledge/after": {"mean": 0.3, "low": 0.2, "high": 0.4, "seeds": 5},
        "spent": {unit: {"mean": value} for unit, value in spent.items()},
    }
    monkeypatch.setattr(result_numbers, "read_results", lambda study: {"arms": {"a": arm}})
    of_suite = render_number("s; a; cells/knowledge/score")
    assert of_suite == "30.0% (20.0–40.0) | 600k / 0k | 2.50 | 31"
    assert render_table("costs; s; score").splitlines()[3:5] == [
        "| start |  | 25.0% |  |  |  |  |",
        "| `a` | 1e-05 | 50.0% (40.0–60.0) | 600k | 0k | 2.50 | 18 |",
    ]
    assert render_number("s; a; cells/score") == "50.0% (40.0–60.0) | 600k / 0k | 2.50 | 31"
    of_variant = {"variants": {"long": {"arms": {"a": arm}}}}
    monkeypatch.setattr(result_numbers, "read_results", lambda study: of_variant)
    assert render_table("costs; s/long").splitlines()[1:4] == [
        "| arm | rate | student tokens | teacher tokens | PFLOP | steps |",
        "|---|---|---|---|---|---|",
        "| `a` | 1e-05 | 600k | 0k | 2.50 | 18 |",
    ]


def test_validations_stand_below_the_step_they_were_made_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def point(step: int, mean: float, seeds: int) -> dict[str, float]:
        return {"step": step, "mean": mean, "low": mean - 0.1, "high": mean + 0.1, "seeds": seeds}

    arms = {
        "a": {"after": {"seeds": 3}, "curve": [point(0, 0.5, 3), point(40, 0.75, 3)]},
        "b": {"after": {"seeds": 1}, "curve": [point(20, 0.625, 1), point(40, 0.25, 1)]},
    }
    results = {"variants": {"long": {"arms": arms}}}
    monkeypatch.setattr(result_numbers, "read_results", lambda study: results)
    assert render_table("curves; s/long").splitlines()[1:-1] == [
        "| arm | seeds | step 0 | step 20 | step 40 |",
        "|---|---|---|---|---|",
        "| `a` | 3 | 50.0% (40.0–60.0) |  | 75.0% (65.0–85.0) |",
        "| `b` | 1 |  | 62.5% | 25.0% |",
    ]
    assert render_number("s/long; a; step 40; mean %") == "75.0%"
    with pytest.raises(KeyError):
        render_number("s/long; a; step 20")


def test_numbers_outside_of_markers_are_refused() -> None:
    assert list(find_loose("It ends at 12.5% of turns, 41 points less (4–78), 0.10 nats.")) == [
        "12.5%", "41 points", "(4–78)", "0.10 nats",
    ]  # fmt: skip
    assert list(find_loose("a\n  <!-- = s; a; x -->3%<!-- /= -->")) == ["  <!-- = s; a; x -->"]
    assert list(find_loose("95% intervals, margin of 3 points")) == []
    assert list(find_loose("```\n3%\n```\n\n<!-- numbers: settings -->\n35% of calls")) == []
    assert list(find_loose("<!-- numbers: settings -->\n35%\n\n36%")) == ["36%"], "one block"


def test_values_and_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {
        "arms": {
            "a": {
                "before": {"values": [0.1, 0.2]},
                "after": {"values": [0.3, 0.5]},
                "runs": [],
                "x": {"mean": 0.05, "low": -0.2, "high": 1.3, "seeds": 3, "values": [0, 0.1, 0.05]},
            }
        },
        "contrasts": [
            {"contrast": "a minus b", "outcome": "x", "mean": -0.0004, "low": -0.1, "high": 0.0996,
             "seeds": 2, "verdict": "not decided"}
        ],
        "exploratory": {
            "a minus b": {"y": {"mean": 0.5, "low": 0.25, "high": 0.75, "seeds": 2}}
        },
        "sweep": [{"arm": "a", "learning_rate": 1e-4, "validation": [12, 100, 0.5, None, 0.25]}],
    }  # fmt: skip
    monkeypatch.setattr(result_numbers, "read_results", lambda study: results)
    assert render_number("s; a; x") == "5.0% (0.0–100)"
    assert render_number("s; a; x; mean %") == "5.0%"
    assert render_number("s; a; x; seed 1") == "10.0%"
    assert render_number("s; a minus b; x") == "0.0 (−10.0 to 10.0)"
    assert render_number("s; a minus b; x; verdict") == "not decided"
    assert render_number("s; a minus b; y; difference nats") == "0.50 (0.25 to 0.75)"
    assert render_number("s; sweep; a 1e-4 errors") == "25.0%"
    # 0.2 and 0.3: mean 0.25, t of one degree of freedom times 0.05.
    assert render_number("s; a; gain") == "25.0 (−38.5 to 88.5)"
    assert format_value({"mean": 27.5208, "low": 23.8, "high": 31.2, "seeds": 7}, "s") == "28 s"
    with pytest.raises(KeyError):
        render_number("s; a; unknown")
    with pytest.raises(ValueError, match="no style"):
        format_value(results["arms"]["a"]["x"], "percent")  # type: ignore[index]


def test_tables_by_side_by_fault_and_of_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arm(seeds: list[int], wrong: list[float], right: list[float]) -> dict[str, object]:
        def measured(values: list[float]) -> dict[str, object]:
            mean = sum(values) / len(values)
            return {"mean": mean, "low": mean, "high": mean, "seeds": len(values), "values": values}

        sides = {"habit_wrong": wrong, "habit_right": right, "filler": [0.0] * len(seeds)}
        faults = ("", "date/", "desk/", "confirm/", "talk/")
        cells: dict[str, object] = {
            f"decisions/{fault}{side}_{when}": measured(values)
            for fault in faults
            for side, values in sides.items()
            for when in ("before", "after")
        }
        return cells | {"runs": [{"seed": seed} for seed in seeds]}

    arms = {
        "a": arm([1, 2, 3], [0.2, 0.4, 0.9], [0.0, 0.0, 0.1]),
        "b": arm([2, 1], [0.5, 0.5], [0.5, 0.3]),
    }
    monkeypatch.setattr(result_numbers, "read_results", lambda study: {"arms": arms})
    # By seed: 0.1 − 0.4 and 0.2 − 0.5, whatever the order of the runs; seed 3 has no pair.
    assert render_number("s; a minus b; both_sides") == "−30.0 (−30.0 to −30.0)"
    assert render_number("s; b; both_sides; mean %") == "45.0%"
    header, _, start, first, _ = render_table("sides; s").splitlines()[1:-1]
    assert header == "| arm | seeds | habit wrong | habit right | mean of both | filler |"
    assert start == "| start |  | 50.0% | 3.3% | 26.7% | 0.0% |", "of the arm with the most seeds"
    assert first.startswith("| `a` | 3 | 50.0% (50.0–50.0) | 3.3%")
    assert "| `b` |" + " 50.0% / 40.0% |" * 4 in render_table("faults; s")

    folder = tmp_path / "recipes/s"
    folder.mkdir(parents=True)
    for name, share in (("rule", 0.25), ("action", 1.0)):
        cell = {"with": share, "without": 0.01, "turns": 48}
        gate = {"replies": 4, "gate": dict.fromkeys(("date", "desk", "confirm", "talk"), cell)}
        (folder / f"gate-{name}.json").write_text(json.dumps(gate))
    monkeypatch.setattr(result_numbers, "ROOT", tmp_path)
    assert "| `desk` | 48 × 4 | 1.0% | 100.0% | 25.0% |" in render_table("gate; s")
