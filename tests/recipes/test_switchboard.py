"""The switchboard's arms differ where they should, and its gate measures with and without."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "recipes/switchboard/experiment.toml"
sys.path.insert(0, str(ROOT / "recipes"))

import gate  # noqa: E402

from courtside.assemble import assemble  # noqa: E402
from courtside.assemble.inputs import load_inputs  # noqa: E402
from courtside.environments.switchboard.environment import Switchboard  # noqa: E402
from courtside.environments.switchboard.episode import habitual_reply, right_reply  # noqa: E402
from courtside.experiment.plan import Plan, read_plan  # noqa: E402
from courtside.experiment.schedule import make_job  # noqa: E402
from courtside.recipe import Recipe  # noqa: E402
from courtside.recipe.load import load_recipe  # noqa: E402
from courtside.recipe.tasks import SwitchboardTasks  # noqa: E402
from courtside.teacher.hint_scoring import HintScorer  # noqa: E402
from courtside.types import Event, Sample, Trajectory, Turn  # noqa: E402

CONTRASTS = ("random_turn", "wrong_kind", "penalty", "careful", "all_rules")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return read_plan(EXPERIMENT, tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def recipes(plan: Plan) -> dict[str, Recipe]:
    """By arm, as a run of the experiment would have it."""
    return {
        name: load_recipe(job.recipe, [*job.overrides, "student.adapter=null"])
        for name, arm in plan.arms.items()
        for job in [make_job(plan, arm, "hard", 3e-5, 5)]
    }


def test_every_arm_of_the_experiment_has_the_same_tasks_tests_and_seeds(
    plan: Plan, recipes: dict[str, Recipe]
) -> None:
    assert plan.first == ("hint", *CONTRASTS)
    first = recipes["hint"]
    first_tasks = Switchboard(_board_tasks(first))
    for name, recipe in recipes.items():
        assert plan.arms[name].seeds == tuple(range(8))
        board = Switchboard(_board_tasks(recipe))
        assert [board.task(n) for n in range(20)] == [first_tasks.task(n) for n in range(20)]
        assert recipe.evaluate == first.evaluate and recipe.seed == 5, name
        sizes = (recipe.train.steps, recipe.train.prompts_per_step)
        assert sizes == (first.train.steps, first.train.prompts_per_step)
        assert replace_corrections(recipe) == first.rollout
    assert first.evaluate.collateral and first.evaluate.num_tasks % 16 == 0


def replace_corrections(recipe: Recipe) -> Any:
    return recipe.rollout.model_copy(update={"corrections": False})


def _board_tasks(recipe: Recipe) -> SwitchboardTasks:
    assert isinstance(recipe.tasks, SwitchboardTasks)
    return recipe.tasks


def test_arms_that_only_move_or_reword_take_the_rate_of_the_hint(plan: Plan) -> None:
    variations = {"random_turn", "wrong_kind", "careful", "hint_rule", "mirror_turn", "bit_hint"}
    assert {name for name, arm in plan.arms.items() if arm.rate_of == "hint"} == {
        "hint",
        *variations,
    }


def test_the_penalty_is_on_the_turns_that_hints_are_for(recipes: dict[str, Recipe]) -> None:
    (loss,) = recipes["penalty"].losses
    rules: Any = recipes["hint"].reader
    assert loss.kind == "policy_gradient" and loss.turn_penalty == 1.0
    assert loss.penalized_events == tuple(rule.event for rule in rules.rules)


def test_reworded_hints_are_those_of_the_design(recipes: dict[str, Recipe]) -> None:
    texts = {name: [rule.hint for rule in getattr(recipes[name].reader, "rules", ())]
             for name in recipes}  # fmt: skip
    assert texts["careful"] == ["Careful here."] * 4
    assert texts["random_turn"] == texts["wrong_kind"] == texts["hint"]
    rules = " ".join(str(text) for text in texts["hint_rule"])
    (teacher,) = recipes["all_rules"].model_teachers
    assert getattr(teacher.context, "text", "").strip() == rules
    assert {name: recipe.reader and recipe.reader.control for name, recipe in recipes.items()
            if recipe.reader and recipe.reader.control != "none"} == {
        "random_turn": "random_turn", "wrong_kind": "other_kind", "mirror_turn": "mirror_turn",
    }  # fmt: skip


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────


def small_hint_recipe(folder: Path) -> Recipe:
    return load_recipe(
        EXPERIMENT.with_name("hint.toml"),
        [
            f"student.model={folder}", "student.adapter=null", "tasks.turns=8",
            "evaluate.num_tasks=16", "evaluate.suites={}", "rollout.max_new_tokens=4",
            "evaluate.collateral=false",
        ],
    )  # fmt: skip


class Heeding:
    """An engine that does as the hint says, and follows the habit without one."""

    def __init__(self, board: Switchboard, trajectories: list[Trajectory], texts: Any):
        self.board, self.texts = board, texts
        self.by_prefix = {
            t.token_ids[: sum(len(turn.token_ids) for turn in t.turns[:i])]: (t, i)
            for t in trajectories
            for i, turn in enumerate(t.turns)
            if turn.role == "assistant"
        }
        self.num_calls = 0

    def sample(self, requests: Any, _sampling: Any) -> list[Sample]:
        self.num_calls += len(requests)
        replies = []
        for request in requests:
            trajectory, turn = self.by_prefix.get(request.prompt_ids, (None, 0))
            if trajectory is None:  # with a hint: the prompt that it was spliced into
                shared = (ids for ids in self.by_prefix if request.prompt_ids[:40] == ids[:40])
                lengths = {ids: _common(ids, request.prompt_ids) for ids in shared}
                trajectory, turn = self.by_prefix[max(lengths, key=lambda ids: lengths[ids])]
                replies.append(right_reply(self._request(trajectory, turn)))
            else:
                replies.append(habitual_reply(self._request(trajectory, turn)))
        return [Sample(token_ids=(1,), logp=(0.0,), stop="eos", text=text) for text in replies]

    def _request(self, trajectory: Trajectory, turn: int) -> Any:
        number = sum(t.role == "assistant" for t in trajectory.turns[:turn])
        return self.board.plan(trajectory.task).requests[number]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def test_the_gate_asks_at_every_turn_where_a_habit_is_wrong(roomy_folder: Path) -> None:
    recipe = small_hint_recipe(roomy_folder)
    parts = assemble(recipe)
    answers = parts.evaluator.evaluate("validation", step=0)
    template = load_inputs(recipe).incremental
    scorer = HintScorer(parts.engine, template, recipe.hints)
    board = Switchboard(_board_tasks(recipe))
    measured = gate.measure_gate(parts, scorer, list(answers.trajectories), 2)
    # Random words never pass, with or without; 16 episodes have 12 such turns of each kind.
    rates = {"with": 0.0, "without": 0.0, "turns": 12}
    assert measured == dict.fromkeys(("confirm", "date", "desk", "talk"), rates)
    heeding: Any = Heeding(board, list(answers.trajectories), None)
    measured = gate.measure_gate(replace(parts, engine=heeding), scorer, answers.trajectories, 2)
    rates = {"with": 1.0, "without": 0.0, "turns": 12}
    assert measured == dict.fromkeys(("confirm", "date", "desk", "talk"), rates)
    assert heeding.num_calls == 4 * 12 * 2 * 2


def test_marked_turns_have_the_event_of_the_habit_whatever_was_said() -> None:
    board = Switchboard(SwitchboardTasks(kind="switchboard", turns=8))
    task = board.task(2)
    requests = board.plan(task).requests
    turns = [Turn(role="prompt", text="", token_ids=(1,), completion_mask=(False,))]
    for request in requests:
        turns.append(
            Turn(role="assistant", text=right_reply(request), token_ids=(2,),
                 completion_mask=(True,), events=(Event(kind="no_call"),),
                 decision=request.decision)
        )  # fmt: skip
    trajectory = Trajectory(
        id="t", task=task, turns=tuple(turns), source="student", policy_version=0,
        temperature=1.0, stop="done",
    )  # fmt: skip
    marked = gate.as_if_mistaken(board, trajectory)
    for request, turn in zip(requests, marked.turns[1:], strict=True):
        assert [e.kind for e in turn.events] == ([request.fault] if request.habit_is_wrong else [])
        if turn.events:
            assert turn.events[0].detail("correct") == right_reply(request)


def test_the_command_writes_its_numbers(
    roomy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "deep" / "gate.json"
    overrides = [
        f"student.model={roomy_folder}", "student.adapter=null", "tasks.turns=8",
        "evaluate.suites={}", "rollout.max_new_tokens=4",
    ]  # fmt: skip
    recipe = str(EXPERIMENT.with_name("hint.toml"))
    arguments = ["gate.py", recipe, "--to", str(result), "--episodes", "2", "--replies", "1",
                 "--with", *overrides]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    gate.main()
    result_tree = json.loads(result.read_text())
    assert result_tree["hints"]["desk"] == "Use desk {desk} here."
    assert (result_tree["episodes"], result_tree["overrides"]) == (2, overrides)
    assert result_tree["gate"] and set(result_tree["evaluation"]) >= {
        "error_rate",
        "decisions/filler",
    }
