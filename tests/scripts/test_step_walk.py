"""`scripts/step_walk.py` counts what it says: pairs of files by stage work, once each."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "step_walk.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_a_pair_of_files_is_one_hop(script: dict[str, Any]) -> None:
    call = script["Call"]
    calls = Counter([
        call("loop.py", "train_step", "rollout/single_turn.py", "Rollout.__call__"),
        call("rollout/single_turn.py", "Rollout.__call__", "engines/local.py", "Engine.sample"),
        call("rollout/single_turn.py", "Rollout.other", "engines/local.py", "Engine.session"),
        call("engines/local.py", "Engine.sample", "rollout/single_turn.py", "grade_sample"),
        call("engines/local.py", "Engine.sample", "engines/local.py", "Engine._decode"),
    ])  # fmt: skip
    walk = script["summarize"](calls, set())
    assert walk.hops == (
        ("loop.py", "rollout/single_turn.py"),
        ("rollout/single_turn.py", "engines/local.py"),
        ("engines/local.py", "rollout/single_turn.py"),
    )
    assert (walk.num_calls, walk.num_files, walk.num_mutual) == (4, 3, 1)


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("types.py", "make_turn"),
        ("recipe/recipe.py", "Recipe.check"),
        ("engines/local.py", "LocalEngine.__init__"),
        ("engines/local.py", "make.<locals>.<lambda>"),
        ("engines/kernels/layers.py", "RmsNorm.backward"),
        ("training/weights.py", "StudentWeights.trained"),
    ],
)
def test_what_is_no_stage_work(script: dict[str, Any], file: str, function: str) -> None:
    call = script["Call"]("loop.py", "train_step", file, function)
    assert not script["does_stage_work"](call, {"StudentWeights.trained"})


def test_calls_through_other_code_belong_to_the_package_below(
    script: dict[str, Any], tmp_path: Path
) -> None:
    """As transformers calls our attention: the caller is the last file of ours on the stack."""
    (tmp_path / "first.py").write_text("def run(through, work):\n    through(work)\n")
    (tmp_path / "second.py").write_text("def work():\n    pass\n")
    first, second = (runpy.run_path(str(tmp_path / f"{name}.py")) for name in ("first", "second"))
    calls: Counter[Any] = Counter()

    def start() -> None:
        first["run"](lambda work: work(), second["work"])

    with script["trace_calls"](tmp_path, calls, enabled=True):
        start()
    assert script["Call"]("first.py", "run", "second.py", "work") in calls
