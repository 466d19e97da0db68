"""Whole runs in environments of others: what their bugs cost, and that a trained run ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe

from courtside.api import train
from courtside.errors import EnvironmentFaultsError
from courtside.recipe import Recipe
from courtside.report.console import RunConsole
from courtside.training import checkpoints

WORLD = """
from pathlib import Path
from courtside.types import Event, Grade, Message, Observation, Task

class World:
    size = 60
    def __init__(self, chars=4, faulty="", last=2):
        self.chars, self.faulty, self.last = chars, faulty, last
    def task(self, index):
        split = ("train", "train", "test")[index % 3]
        return Task(id=f"w-{index:02}", split=split, privileged={"secret": str(index)},
                    messages=(Message(role="user", content=f"Go {index}."),),
                    grader_args={"index": index})
    def start(self, task):
        return Episode(self, task)

class Episode:
    def __init__(self, world, task):
        self.world, self.task, self.num = world, task, 0
    def step(self, reply):
        self.num += 1
        faulty, index = self.world.faulty, self.task.grader_args["index"]
        if faulty == "some" and index % 7 == 0:
            raise KeyError(f"no {index}")
        if faulty == "file" and Path("broken").exists():
            raise ConnectionError("the server is gone")
        text = ("word " * self.world.chars)[: self.world.chars]
        return Observation(
            messages=(Message(role="tool", content=text),), done=self.num == self.world.last,
            events=(Event(kind="bad", details={"n": [self.num], "message": "No."}),))
    def grade(self):
        if self.world.faulty == "grade":
            return Grade(score=float("nan"), passed=False)
        return Grade(score=self.task.grader_args["index"] % 2 * 1.0, passed=False)
"""


class Lines(RunConsole):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "worlds.py").write_text(WORLD)
    yield tmp_path
    sys.modules.pop("worlds", None)


def make_recipe(model: Path, *, workers: int = 0, **settings: Any) -> Recipe:
    sections: dict[str, Any] = settings.pop("sections", {})
    tasks = {"kind": "environment", "path": "worlds:World", "workers": workers}
    return small_recipe(
        model,
        **{
            "tasks": tasks | {"settings": settings},
            "reader": {
                "kind": "rules",
                "rules": [{"detect": "event", "event": "bad", "hint": "Not {n}: {message}"}],
            },
            "teacher": {"kind": "self", "weights": "live"},
            "losses": [{"kind": "divergence", "on": "hinted_turns"}],
            "train": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
            "evaluate": {"num_tasks": 4},
        }
        | sections,
    )


LONG = {"limits": {"turns": 2, "observation_chars": 100_000}, "samples_per_prompt": 1,
        "max_new_tokens": 6}  # fmt: skip


def test_a_last_observation_beyond_the_context_costs_nothing(
    folder: Path, tiny_folder: Path
) -> None:
    """The model's context is 512 tokens; the observation that nobody answers has 700."""
    recipe = make_recipe(tiny_folder, chars=300, last=9, sections={"rollout": LONG})
    console = Lines()
    run = train(recipe, folder / "run", console=console)
    [stored, *_] = run.trajectories(1)
    assert len(stored.trajectory.token_ids) > 512 and stored.trajectory.stop == "turns"
    assert (folder / "run" / "report.html").exists() and run.alarms() == []
    last = run.evaluations()[-1]
    assert last.step == 2 and "logp_drop/error_turns" in last.metrics
    assert [row["reader/rules/event"] for row in run.metrics()] == [8, 8]
    train(recipe, folder / "run", console=console)


def test_a_teacher_of_whole_episodes_takes_them_too(
    folder: Path, tiny_folder: Path, tiny_teacher_folder: Path
) -> None:
    sections = {
        "rollout": LONG,
        "reader": None,
        "teacher": {"kind": "model", "model": str(tiny_teacher_folder)},
        "losses": [{"kind": "divergence"}],
    }
    recipe = make_recipe(tiny_folder, chars=300, last=9, sections=sections)
    run = train(recipe, folder / "run")
    assert [row["without_teacher"] for row in run.metrics()] == [0, 0]
    assert run.evaluations()[-1].step == 2


@pytest.mark.filterwarnings("ignore:the environment has a bug")
def test_what_fails_after_training_is_said_in_the_report(folder: Path, tiny_folder: Path) -> None:
    recipe = make_recipe(tiny_folder, faulty="file")

    class Break(Lines):
        def step(self, row: Any) -> None:
            if row["step"] == 1:
                (folder / "broken").touch()

    console = Break()
    run = train(recipe, folder / "run", console=console)
    for attempt in (1, 2):
        assert "ConnectionError: the server is gone" in console.lines[-1], attempt
        assert console.lines[-1].startswith("not measured after training: student on test tasks (")
        [alarm] = run.alarms()
        assert alarm == {"step": 2, "kind": "not_measured", "message": console.lines[-1]}
        page = (folder / "run" / "report.html").read_text()
        assert "not measured after training" in page and "the server is gone" in page
        (folder / "run" / "report.html").unlink()
        console = Break()
        run = train(recipe, folder / "run", console=console)
    (folder / "broken").unlink()
    mended = train(recipe, folder / "run", console=Lines())
    assert mended.alarms() == [] and mended.evaluations()[-1].step == 2


def test_episodes_before_training_that_are_gone_cost_one_number(
    folder: Path, tiny_folder: Path
) -> None:
    class Delete(Lines):
        def step(self, row: Any) -> None:
            for file in (folder / "run" / "evaluations").glob("*.parquet"):
                file.unlink()

    console = Delete()
    run = train(make_recipe(tiny_folder), folder / "run", console=console)
    assert run.evaluations()[-1].step == 2
    assert any("not measured after training: logp_drop (" in line for line in console.lines)


def test_bugs_are_counted_apart_from_the_students_errors(folder: Path, tiny_folder: Path) -> None:
    limits = {"limits": {"max_fault_fraction": 0.6}, "max_new_tokens": 6, "samples_per_prompt": 2}
    recipe = make_recipe(
        tiny_folder,
        faulty="some",
        sections={
            "rollout": limits,
            "losses": [
                {"kind": "divergence", "on": "hinted_turns"},
                {"kind": "policy_gradient", "advantage": "reward", "name": "reward"},
            ],
            "train": {"steps": 2, "prompts_per_step": 20, "learning_rate": 1e-3},
            "evaluate": {"num_tasks": 20},
        },
    )
    with pytest.warns(UserWarning, match="the environment has a bug") as caught:
        run = train(recipe, folder / "run", console=Lines())
    [warning] = [w for w in caught if "has a bug" in str(w.message)]
    assert "step(reply) raised KeyError: 'no " in str(warning.message)
    assert "Traceback" in str(warning.message) and "worlds.py" in str(warning.message)
    for row in run.metrics():
        stored = [s.trajectory for s in run.trajectories(row["step"])]
        faulty = [t for t in stored if t.fault is not None]
        assert row["environment_faults"] == len(faulty) > 0
        assert all(t.stop == "fault" and t.grade is None for t in faulty)
        assert row["error_rate"] == 1.0 and row["turns"] == 2.0  # of the others: all are bad
        assert set(row) & {"events/environment_error", "events/hung"} == set()
        rewards = [t.grade.score for t in stored if t.grade is not None]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    evaluation = run.evaluations()[-1]
    faults = evaluation.metrics["environment_faults"]
    assert evaluation.metrics["error_rate"] == 1.0
    assert f"{faults:g} episodes were ended by bugs" in run.alarms()[-1]["message"]
    assert "are not in the score" in (folder / "run" / "report.html").read_text()
    assert faults > 0 and len(evaluation.scores) == evaluation.metrics["num_tasks"] - faults


@pytest.mark.filterwarnings("ignore:the environment has a bug")
def test_too_many_bugs_stop_the_run_and_the_steps_are_saved(
    folder: Path, tiny_folder: Path
) -> None:
    class Break(Lines):
        def step(self, row: Any) -> None:
            (folder / "broken").touch()

    with pytest.raises(EnvironmentFaultsError, match=r"max_fault_fraction = 0\.2") as caught:
        train(make_recipe(tiny_folder, faulty="file"), folder / "run", console=Break())
    assert "ConnectionError: the server is gone (worlds.py, line " in str(caught.value)
    latest = checkpoints.latest(folder / "run" / "checkpoints")
    assert latest is not None and checkpoints.num_steps_of(latest) == 1
    (folder / "broken").unlink()
    assert len(train(make_recipe(tiny_folder, faulty="file"), folder / "run").metrics()) == 2


@pytest.mark.filterwarnings("ignore:the environment has a bug")
def test_a_grade_that_is_none_stops_before_the_first_step(folder: Path, tiny_folder: Path) -> None:
    with pytest.raises(EnvironmentFaultsError, match=r"grade\(\): Grade.score = nan; use a finite"):
        train(make_recipe(tiny_folder, faulty="grade"), folder / "run")


def test_workers_change_nothing_in_a_run(folder: Path, tiny_folder: Path) -> None:
    """Nor does another number of them when a run goes on."""
    inside = train(make_recipe(tiny_folder), folder / "inside")
    outside = train(make_recipe(tiny_folder, workers=2), folder / "outside")
    for step in (0, 1):
        assert [s.trajectory for s in inside.trajectories(step)] == [
            s.trajectory for s in outside.trajectories(step)
        ]
    losses = [[row["loss"] for row in run.metrics()] for run in (inside, outside)]
    assert losses[0] == losses[1]
    assert [e.scores for e in inside.evaluations()] == [e.scores for e in outside.evaluations()]
    train(make_recipe(tiny_folder, workers=1), folder / "outside")
