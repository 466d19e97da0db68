"""The account of a chaos run: right for a run in order, and it notices what must not happen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.rank_runs import outcomes, run_ranks
from support.small_runs import small_tree

from courtside.api import train
from courtside.errors import RunError
from courtside.recipe.load import parse_recipe
from courtside.report.folder.folder import RunFolder
from courtside.report.folder.parquet import write_trajectories
from courtside.training import checkpoints
from courtside.training.student import Student
from courtside.types import Scored

STEPS = 6


@pytest.fixture
def make_account(
    tiny_folder: Path, tiny_teacher_folder: Path, tmp_path: Path,
    import_benchmark: Callable[[str], ModuleType],
) -> Callable[..., Any]:  # fmt: skip
    """Of a run, after `change` had its folder; `kill`: of two ranks, one of which is killed in the
    rollout of a step, and that the same command ends."""

    def account(
        change: Callable[[RunFolder], object] = lambda run: None, kill: list[int] | None = None
    ) -> Any:
        tree = small_tree(
            tiny_folder, tiny_teacher_folder,
            student={"model": str(tiny_folder), "lora": {"rank": 4}, "dtype": "float32"},
            train={"steps": STEPS, "prompts_per_step": 2, "learning_rate": 1e-2},
            evaluate={"num_tasks": 1, "before": False, "teacher": False},
            run={"checkpoint_every": 2, "keep_checkpoints": 99},
        )  # fmt: skip
        tree["teacher"]["dtype"] = "float32"
        folder = tmp_path / "run"
        resumes = [0]
        if kill is None:
            train(parse_recipe(tree), folder, quiet=True)
        else:
            job = {"recipe": tree, "folder": str(folder)}
            with pytest.raises(RunError, match=f"rank {kill[0]} was ended by SIGKILL"):
                run_ranks(tmp_path, [job | {"kill": kill}], 2)
            path = checkpoints.latest(folder / "checkpoints")
            assert path is not None and len(outcomes(folder)) == 1
            resumes.append(checkpoints.num_steps_of(path))
            assert run_ranks(tmp_path, [job], 2) == 0
        change(RunFolder.read(folder))
        tree["rollout"] = tree["rollout"] | {"server": {"max_staleness": 0}}
        return import_benchmark("chaos_account").account_for_run(
            folder, tree, resumes=resumes, teacher=tiny_teacher_folder
        )

    return account


def rewrite(run: RunFolder, step: int, change: Callable[[list[Any]], list[Any]]) -> None:
    stored = run.trajectories(step)
    logps = {s.trajectory.id: s.student_logp for s in stored}
    scored = [Scored(trajectory=t, target=None) for t in change([s.trajectory for s in stored])]
    write_trajectories(run.stored_file(step), scored, logps)


def test_a_run_in_order_has_no_problem(make_account: Any) -> None:
    account = make_account()
    assert account.problems == []
    assert account.num_steps == STEPS and account.num_trajectories == 4 * STEPS
    assert account.num_intervals == 3 and max(account.drifts) < 1e-5
    assert account.num_by_age == {0: 4 * STEPS}
    for values in account.differences.values():
        assert len(values) == 4 * STEPS and max(values) < 1e-4


def test_two_ranks_one_of_which_is_killed_have_no_problem(make_account: Any) -> None:
    """A task is sampled by one of them; killed in the last step, it goes on from the one before."""
    account = make_account(kill=[1, STEPS - 1])
    assert account.problems == []
    assert account.num_steps == STEPS and account.num_trajectories == 4 * STEPS
    assert account.num_intervals == 3 and max(account.drifts) < 1e-3
    assert all(len(values) == 4 * STEPS for values in account.differences.values())


def test_the_ranks_of_a_run_are_the_children_of_its_launcher(
    tmp_path: Path, import_benchmark: Callable[[str], ModuleType]
) -> None:
    faults = import_benchmark("chaos_faults")
    run = faults.TrainingProcess(
        ["sh", "-c", "sleep 60 & sleep 60 & wait"], dict(os.environ), tmp_path / "log"
    )
    run.start()
    try:
        wait_until(lambda: len(run.find_ranks()) == 2)
        ranks = run.find_ranks()
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: not is_running(ranks[1]))
        assert run.poll() is None and is_running(ranks[0])
    finally:
        run.signal(signal.SIGKILL)
    assert run.wait(10) == -signal.SIGKILL
    wait_until(lambda: not is_running(ranks[0]))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_batch_that_is_trained_twice_is_noticed(
    make_account: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Student.step
    calls = []

    def step_twice(self: Student, step: int, scored: Any) -> Any:
        calls.append(step)
        if step == 2 and calls.count(2) == 1:
            real(self, step, scored)
        return real(self, step, scored)

    monkeypatch.setattr(Student, "step", step_twice)
    account = make_account()
    assert any("training again leads elsewhere" in problem for problem in account.problems)
    assert max(account.drifts) > 0.1


def drop(run: RunFolder) -> None:
    rewrite(run, 3, lambda all: all[:-1])


def lose_rank(run: RunFolder) -> None:
    """The second of two ranks has every other task."""
    rewrite(run, 3, lambda all: [t for t in all if "-000-" in t.id])


def repeat(run: RunFolder) -> None:
    rewrite(run, 3, lambda all: [*all[:-1], all[0]])


def claim_older(run: RunFolder) -> None:
    rewrite(run, 3, lambda all: [replace(all[0], policy_version=2), *all[1:]])


def exchange_tasks(run: RunFolder) -> None:
    rewrite(run, 3, lambda all: [replace(all[0], task=all[-1].task), *all[1:]])


def remove_step(run: RunFolder) -> None:
    run.stored_file(3).unlink()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop, "step 3: 3 ids, 3 apart"),
        (lose_rank, "step 3: 2 ids, 2 apart"),
        (repeat, "step 3: 4 ids, 3 apart"),
        (claim_older, "000003-000-0: sampled by version 2, and 3 is right"),
        (exchange_tasks, "000003-000-0: the task "),
        (remove_step, "trajectories of other steps than the metrics'"),
    ],
)
def test_what_is_missing_or_false_is_noticed(
    change: Any, problem: str, make_account: Any, monkeypatch: pytest.MonkeyPatch,
    import_benchmark: Callable[[str], ModuleType],
) -> None:  # fmt: skip
    monkeypatch.setattr(import_benchmark("chaos_account"), "train_again", lambda *args: None)
    account = make_account(change)
    assert any(p.startswith(problem) for p in account.problems), account.problems
