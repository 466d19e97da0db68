"""The step benchmark on a GPU: ratios of its records, whether the work was the same, and the side
that runs episodes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from courtside.environments.loading import load_environment
from courtside.recipe.rollout import LimitsConfig
from courtside.recipe.tasks import EnvironmentTasks
from courtside.report.folder.folder import RunFolder


@pytest.fixture
def driver(import_benchmark: Callable[[str], ModuleType]) -> Any:
    return import_benchmark("opd_step_gpu")


def record(driver: Any, side: str, *, phases: dict[str, float], peak: int, **more: Any) -> Any:
    tokens = driver.TINY.tokens_per_step
    step = {"seconds": sum(phases.values()), "phases": phases, "loss": 2.0,
            "num_trained_tokens": tokens, "num_sampled_tokens": None, "num_hints": None,
            "gpu_peaks": {"update": peak}}  # fmt: skip
    if side == "hints":
        hints = 2 * driver.TINY.prompts * driver.TINY.samples
        step |= {"num_trained_tokens": tokens // 2, "num_sampled_tokens": tokens,
                 "num_hints": hints}  # fmt: skip
    check = {"loss": 1.0, "gradient_norm": 3.0, "gradient_norms": {"head": 2.0}}
    return {"config": "0.6b", "side": side, "num_warmup": 1, "steps": [step, step],
            "prompts_hash": "a", "num_prompt_tokens": 4, "num_trainable": 9,
            "check": None if side == "hints" else check, **more}  # fmt: skip


def records(driver: Any) -> dict[str, Any]:
    sides = {
        "courtside": ({"rollout": 4.0, "teacher": 1.0, "update": 2.0, "record": 1.0}, 60),
        "courtside_lean": ({"rollout": 5.0, "teacher": 2.0, "update": 8.0, "record": 1.0}, 20),
        "hints": (
            {"rollout": 5.0, "reader": 0.5, "teacher": 0.5, "update": 3.0, "record": 1.0},
            50,
        ),
        "trl": ({"rollout": 40.0, "teacher": 4.0, "update": 6.0}, 40),
    }
    return {
        side: record(driver, side, phases=phases, peak=peak)
        for side, (phases, peak) in sides.items()
    }  # fmt: skip


def test_ratios_compare_whole_steps_with_trl(
    driver: Any,
) -> None:
    rows = [driver.summary(r) for r in records(driver).values()]
    ratios = driver.ratios(rows)["0.6b"]
    assert ratios["courtside"] == {
        "share_of_peak": 1.5,
        "times_faster": 50 / 8,
        "times_faster_by_phase": {"rollout": 10.0, "teacher": 4.0, "update": 3.0},
    }
    assert ratios["courtside_lean"]["times_faster"] == 50 / 16
    assert ratios["courtside_lean"]["share_of_peak"] == 0.5
    assert ratios["hints"] == {
        "share_of_peak": 1.25,
        "times_faster": 50 / 10,
        "times_faster_by_phase": {"rollout": 8.0, "teacher": 8.0, "update": 2.0},
    }
    text = driver.table(rows)
    assert (
        "| 0.6b | courtside_lean | 3.12 | rollout 8.00, teacher 2.00, update 0.75 | 0.50 |" in text
    )
    assert "| 0.6b | hints | 5.00 | rollout 8.00, teacher 8.00, update 2.00 | 1.25 |" in text
    assert "half of the sampled tokens; the student is its own teacher" in text
    without = [row for row in rows if row["side"] != "hints"]
    assert "own teacher" not in driver.table(without)


def test_without_trl_there_are_no_ratios(driver: Any) -> None:
    ours = [r for side, r in records(driver).items() if side != "trl"]
    rows = [driver.summary(r) for r in ours]
    assert driver.ratios(rows) == {}
    assert driver.same_work_problems(ours, driver.TINY) == []


def test_a_single_rank_is_measured_against_a_plain_process(driver: Any) -> None:
    by_side = records(driver)
    sharded = {**by_side["courtside_lean"], "side": driver.SHARDED}
    rows = [driver.summary(r) for r in (by_side["courtside"], sharded)]
    ratios = driver.ratios(rows)["0.6b"]
    assert list(ratios) == ["courtside_sharded/courtside"]
    assert ratios["courtside_sharded/courtside"]["times_faster"] == 8 / 16
    assert driver.same_work_problems([by_side["courtside"], sharded], driver.TINY) == []
    assert driver.single_rank()["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("count", "message"),
    [
        ("num_sampled_tokens", "479 sampled tokens in a step, not 480"),
        ("num_trained_tokens", "239 trained tokens in a step, not 240"),
        ("num_hints", "15 hints in a step, not 16"),
    ],
)
def test_the_step_of_hints_samples_as_much_and_trains_half(
    driver: Any, count: str, message: str
) -> None:
    by_side = records(driver)
    by_side["hints"]["steps"][1] = {**by_side["hints"]["steps"][1]}
    by_side["hints"]["steps"][1][count] -= 1
    problems = driver.same_work_problems(list(by_side.values()), driver.TINY)
    assert problems == [f"0.6b, hints: {message}"]


@pytest.mark.parametrize("side", ["courtside", "trl"])
def test_the_others_train_on_all_they_sample(driver: Any, side: str) -> None:
    by_side = records(driver)
    by_side[side]["steps"][1] = {**by_side[side]["steps"][1], "num_trained_tokens": 240}
    problems = driver.same_work_problems(list(by_side.values()), driver.TINY)
    assert problems == [f"0.6b, {side}: 240 trained tokens in a step, not 480"]


def test_hints_begin_with_the_prompts_of_the_others(driver: Any) -> None:
    by_side = records(driver)
    by_side["hints"] |= {"prompts_hash": "b", "num_trainable": 8}
    problems = driver.same_work_problems(list(by_side.values()), driver.TINY)
    assert len(problems) == 2
    assert "prompts_hash differs" in problems[0]
    assert "num_trainable differs" in problems[1]


@pytest.mark.parametrize("side", ["courtside", "courtside_lean"])
@pytest.mark.parametrize(
    ("change", "message"),
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
    driver: Any, side: str, change: dict[str, Any], message: str
) -> None:
    by_side = records(driver)
    assert driver.same_work_problems(list(by_side.values()), driver.TINY) == []
    by_side[side] |= change
    problems = driver.same_work_problems(list(by_side.values()), driver.TINY)
    assert len(problems) == 1
    assert message in problems[0]


def test_lean_settings_go_to_the_lean_side_only(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overrides(*more: str) -> dict[str, list[str]]:
        monkeypatch.setattr("sys.argv", ["opd_step_gpu.py", "--out", "x.json", *more])
        args = driver.parse()
        commands = {
            side: driver.side_command(args, Path("job"), side, Path("out"))
            for side in ("courtside", "courtside_lean", "hints", "hints_lean")
        }
        assert all(c[c.index("--side") + 1] == side for side, c in commands.items())
        return {s: c[c.index("--set") + 1 :] if "--set" in c else [] for s, c in commands.items()}

    lean = list(driver.LEAN)
    half = {
        "courtside_lean": f"rollout.kv_cache_tokens={128 * (128 + 512)}",
        "hints_lean": f"rollout.kv_cache_tokens={128 * 706}",
    }
    usual = {"courtside": [], "hints": []} | {side: [rows, *lean] for side, rows in half.items()}
    assert overrides() == usual
    assert overrides("--set-lean", "a.b=1") == usual | {
        side: [rows, "a.b=1"] for side, rows in half.items()
    }
    assert overrides("--set", "a.b=1") == usual | {"courtside": ["a.b=1"]}
    assert overrides("--set-hints", "a.b=1") == usual | {
        "hints": ["a.b=1"], "hints_lean": [*usual["hints_lean"], "a.b=1"],
    }  # fmt: skip


# ── the side that runs episodes ───────────────────────────────────────────────────────────────────


def test_episodes_do_not_depend_on_the_replies(driver: Any, tmp_path: Path) -> None:
    job = driver.TINY
    driver.write_folder(tmp_path, job, "tiny")
    config = EnvironmentTasks(
        kind="environment",
        path="fixed_episodes:FixedEpisodes",
        settings={"path": str(tmp_path / "episodes.jsonl")},
    )
    environment = replace(load_environment(config, LimitsConfig()), seconds=None)
    assert environment.size == job.prompts
    for number in range(environment.size):
        task = environment.task(number)
        for reply in ("", "w7 w8"):
            episode = environment.start(task)
            answers = [episode.step(reply) for _ in range(4)]
            assert [answer.done for answer in answers] == [False, False, False, True]
            assert [len(answer.messages) for answer in answers] == [1, 1, 1, 0]
            faulted = [i for i, answer in enumerate(answers) if answer.events]
            assert tuple(faulted) == list(combinations(range(4), 2))[number]


def test_every_turn_is_sampled_and_the_hinted_ones_are_trained(
    driver: Any, import_benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    side = import_benchmark("courtside_gpu_side")
    job, work = driver.TINY, tmp_path / "work"
    work.mkdir()
    driver.write_folder(tmp_path, job, "tiny")
    args = Namespace(job=tmp_path, side="hints", steps=1, set=[], profile="", out=work)
    result = side.measure(args, work)
    assert result.num_prompt_tokens == job.rows * job.prompt_tokens
    for step in result.steps:
        assert {"rollout", "reader", "teacher", "update"} <= step.phases.keys()
        assert step.num_sampled_tokens == job.tokens_per_step == 480
        assert (step.num_trained_tokens, step.num_hints) == (240, 16)
        assert step.loss > 0
    # The stored trajectories, not the counts that the side reports.
    advice = {row["prompt"]: row["advice"] for row in side.read_lines(tmp_path / "episodes.jsonl")}
    stored = list(RunFolder.read(work / "run").trajectories(1))
    assert len(stored) == job.rows
    for record in stored:
        turns = record.trajectory.turns
        assert [t.role for t in turns] == ["prompt", *["assistant", "environment"] * 3, "assistant"]
        assert len(turns[0].token_ids) == job.prompt_tokens
        assert all(len(turn.token_ids) == 15 for turn in turns[1::2])
        for before, turn in zip(turns[1:-1:2], turns[2::2], strict=True):
            ended = before.token_ids[-1] == 1  # by chance the end token: then nothing closes it
            assert len(turn.token_ids) == job.tool_tokens + 6 - ended
        hints = [hint_outcomes.hint for hint_outcomes in record.hints]
        assert [hint.turn for hint in hints] == [i for i, turn in enumerate(turns) if turn.events]
        hinted = {hint.turn for hint in hints}
        indices = [i for i, turn in enumerate(record.trajectory.turn_of) if turn in hinted]
        assert record.teacher_token_indices == tuple(indices)
        assert {hint.text for hint in hints} == {advice[record.trajectory.task.messages[0].content]}
