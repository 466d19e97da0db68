"""The step benchmark on a GPU: ratios of its records, and whether the work was the same."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("opd_step_gpu")


def record(driver: Any, side: str, *, phases: dict[str, float], peak: int, **more: Any) -> Any:
    tokens = 7 if side == "hints" else driver.TINY.tokens_per_step
    step = {"seconds": sum(phases.values()), "phases": phases, "loss": 2.0,
            "num_trained_tokens": tokens, "gpu_peaks": {"update": peak}}  # fmt: skip
    check = {"loss": 1.0, "gradient_norm": 3.0, "gradient_norms": {"head": 2.0}}
    return {"config": "0.6b", "side": side, "num_warmup": 1, "steps": [step, step],
            "prompts_hash": "a", "num_prompt_tokens": 4, "num_trainable": 9,
            "check": None if side == "hints" else check, **more}  # fmt: skip


def records(driver: Any) -> dict[str, Any]:
    sides = {
        "courtside": ({"rollout": 4.0, "teacher": 1.0, "update": 2.0, "record": 1.0}, 60),
        "courtside_lean": ({"rollout": 5.0, "teacher": 2.0, "update": 8.0, "record": 1.0}, 20),
        "hints": ({"teacher": 1.0, "update": 3.0, "record": 1.0}, 50),
        "trl": ({"rollout": 40.0, "teacher": 4.0, "update": 6.0}, 40),
    }
    return {
        side: record(driver, side, phases=phases, peak=peak)
        for side, (phases, peak) in sides.items()
    }


def test_both_sides_of_ours_and_hints_stand_against_one_trl(benchmark_driver: Any) -> None:
    rows = [benchmark_driver.summary(r) for r in records(benchmark_driver).values()]
    found = benchmark_driver.ratios(rows)["0.6b"]
    assert found["courtside"] == {
        "share_of_peak": 1.5,
        "times_faster": 50 / 8,
        "times_faster_by_phase": {"rollout": 10.0, "teacher": 4.0, "update": 3.0},
    }
    assert found["courtside_lean"]["times_faster"] == 50 / 16
    assert found["courtside_lean"]["share_of_peak"] == 0.5
    assert found["hints"] == {"share_of_peak": 1.25, "trl_teacher_update_over_step": 2.0}
    text = benchmark_driver.table(rows)
    assert (
        "| 0.6b | courtside_lean | 3.12 | rollout 8.00, teacher 2.00, update 0.75 | 0.50 |" in text
    )
    assert "take 2.00 times our whole step of targeted hints" in text


def test_without_trl_there_are_no_ratios(benchmark_driver: Any) -> None:
    ours = [r for side, r in records(benchmark_driver).items() if side != "trl"]
    rows = [benchmark_driver.summary(r) for r in ours]
    assert benchmark_driver.ratios(rows) == {}
    assert benchmark_driver.same_work_problems(ours, benchmark_driver.TINY) == []


@pytest.mark.parametrize("side", ["courtside", "courtside_lean"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts_hash": "b"}, "prompts_hash differs"),
        ({"num_trainable": 8}, "num_trainable differs"),
        (
            {"check": {"loss": 1.0, "gradient_norm": 3.1, "gradient_norms": {"head": 2.0}}},
            "on the same batch gradient is 3.1",
        ),
    ],
)
def test_each_of_our_sides_must_do_the_same_work(
    benchmark_driver: Any, side: str, change: dict[str, Any], said: str
) -> None:
    found = records(benchmark_driver)
    assert benchmark_driver.same_work_problems(list(found.values()), benchmark_driver.TINY) == []
    found[side] |= change
    problems = benchmark_driver.same_work_problems(list(found.values()), benchmark_driver.TINY)
    assert len(problems) == 1
    assert said in problems[0]


def test_lean_settings_go_to_the_lean_side_only(
    benchmark_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overrides(*more: str) -> dict[str, list[str]]:
        monkeypatch.setattr("sys.argv", ["opd_step_gpu.py", "--out", "x.json", *more])
        args = benchmark_driver.parse()
        commands = {
            side: benchmark_driver.side_command(args, Path("job"), side, Path("out"))
            for side in ("courtside", "courtside_lean", "hints")
        }
        assert all(c[c.index("--side") + 1] == side for side, c in commands.items())
        return {s: c[c.index("--set") + 1 :] if "--set" in c else [] for s, c in commands.items()}

    lean = list(benchmark_driver.LEAN)
    assert overrides() == {"courtside": [], "courtside_lean": lean, "hints": []}
    assert overrides("--set-lean", "a.b=1")["courtside_lean"] == ["a.b=1"]
    assert overrides("--set", "a.b=1") == {
        "courtside": ["a.b=1"], "courtside_lean": lean, "hints": [],
    }  # fmt: skip
