"""Rewards of a recipe: each function, user code that misbehaves, and their weighted sum."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from support.small_runs import small_recipe, small_tree

from courtside.api import train
from courtside.assemble import assemble
from courtside.errors import RecipeError, RunError, TaskError
from courtside.recipe.load import parse_recipe
from courtside.recipe.losses import PolicyGradientLoss
from courtside.recipe.rewards import Reward
from courtside.report.folder.folder import RunFolder
from courtside.report.metrics import reward_metrics
from courtside.rollout.rewarded import RewardedRollout
from courtside.tasks.rewards import RewardFunction, load_rewards
from courtside.training.loss_terms import make_loss_terms
from courtside.types import Grade, Message, Scored, Task, Trajectory, Turn

RL = {"kind": "policy_gradient", "advantage": "reward"}
USER_MODULE = """
def turns(trajectory): return sum(turn.role == "assistant" for turn in trajectory.turns)
def scaled(trajectory, *, factor): return factor * trajectory.num_completion_tokens
def nothing(): return 1.0
def text(trajectory): return "good"
def infinite(trajectory): return float("inf")
def huge(trajectory): return 10**400
def raises_on_long(trajectory):
    if trajectory.num_completion_tokens > 3:
        raise KeyError("too long")
    return 1.0
def sleeps(trajectory):
    import time
    time.sleep(5)
def of_trl(completions, answer, **kwargs):
    return [2.5 * len(c[0]["content"]) for c in completions]
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_module.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_reward_module", None)


def make_trajectory(
    id: str = "a", *, text: str = "x", tokens: int = 3, score: float | None = 0.5, task: str = "t"
) -> Trajectory:
    return Trajectory(
        id=id,
        task=Task(id=task, split="train", messages=(Message(role="user", content="q"),)),
        turns=(
            Turn(role="prompt", text="", token_ids=(1,), completion_mask=(False,)),
            Turn(role="assistant", text=text, token_ids=(2,) * tokens,
                 completion_mask=(True,) * tokens),
        ),
        source="student",
        policy_version=0,
        temperature=1.0,
        stop="eos",
        grade=None if score is None else Grade(score=score, passed=score == 1),
    )  # fmt: skip


def parse(**options: Any) -> Reward:
    return TypeAdapter(Reward).validate_python(options)


def load(**options: Any) -> RewardFunction:
    return load_rewards([parse(**options)], ["r"])["r"]


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def test_the_grade_is_a_reward_and_a_task_without_one_is_an_error() -> None:
    assert load(kind="grade")(make_trajectory(score=0.25)) == 0.25
    with pytest.raises(TaskError, match=r"task t has no grader.*Name a grader"):
        load(kind="grade")(make_trajectory(score=None))


@pytest.mark.parametrize(
    ("text", "whole", "part"),
    [("<a>1</a>", 1.0, 1.0), ("so <a>1</a>", 0.0, 1.0), ("1", 0.0, 0.0), ("<a>1</a>\n", 0.0, 1.0)],
)
def test_a_format_is_of_the_whole_answer_unless_a_part_is_enough(
    text: str, whole: float, part: float
) -> None:
    trajectory = make_trajectory(text=text)
    assert load(kind="format", pattern="<a>.*</a>")(trajectory) == whole
    assert load(kind="format", pattern="<a>.*</a>", anywhere=True)(trajectory) == part


def test_the_penalty_of_length_is_linear_between_its_ends() -> None:
    reward = load(kind="length", free_tokens=4, max_tokens=8)
    values = [reward(make_trajectory(tokens=n)) for n in range(1, 11)]
    assert values == [0.0, 0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]


def test_rewards_of_user_code() -> None:
    trajectory = make_trajectory(text="four", tokens=5)
    assert load(kind="custom", path="my_reward_module:turns")(trajectory) == 1.0
    settings = {"factor": 0.5}
    scaled = load(kind="custom", path="my_reward_module:scaled", settings=settings)
    assert scaled(trajectory) == 2.5
    # A reward function of TRL need not lie in [0, 1] as a grade must.
    assert load(kind="custom", path="my_reward_module:of_trl")(trajectory) == 10.0


# ── user code that misbehaves ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "settings", "problem"),
    [
        ("my_reward_module:nothing", {}, "called as reward"),
        ("my_reward_module:scaled", {"number": 1}, "called as reward"),
        ("my_reward_module:absent", {}, "has no function 'absent'"),
        ("no_such_module:reward", {}, "there is no module"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_the_run(
    path: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RecipeError, match=rf"rewards\[0\]\.path.*{problem}"):
        load(kind="custom", path=path, settings=settings)


@pytest.mark.parametrize("name", ["text", "infinite", "huge"])
def test_anything_but_a_finite_number_stops_the_run(name: str) -> None:
    with pytest.raises(RunError, match=rf"my_reward_module:{name}.*return a finite number"):
        load(kind="custom", path=f"my_reward_module:{name}")(make_trajectory())


def test_a_reward_that_raises_is_reported_once_and_is_no_reward() -> None:
    reward = load(kind="custom", path="my_reward_module:raises_on_long")
    with pytest.warns(UserWarning, match=r"raised on task t.*not compared(.|\n)*KeyError"):
        assert reward(make_trajectory(tokens=4)) is None
    assert reward(make_trajectory(tokens=4)) is None
    assert reward(make_trajectory(tokens=2)) == 1.0


def test_a_reward_that_hangs_stops_the_run_after_some() -> None:
    reward = load(kind="custom", path="my_reward_module:sleeps", seconds=0.02)
    with pytest.warns(UserWarning, match=r"did not return within 0\.02 seconds"):
        assert reward(make_trajectory()) is None
    assert [reward(make_trajectory()) for _ in range(3)] == [None] * 3
    with pytest.raises(RunError, match=r"5 trajectories in a row.*raise `seconds`"):
        reward(make_trajectory())


def test_a_pattern_that_backtracks_forever_is_interrupted() -> None:
    reward = load(kind="format", pattern="(a+)+b", seconds=0.05)
    with pytest.warns(UserWarning, match=r"rewards\[0\]\.pattern.*did not return"):
        assert reward(make_trajectory(text="a" * 60)) is None


# ── the sum ──────────────────────────────────────────────────────────────────────────────────────

REWARDS = [
    {"kind": "grade", "weight": 2.0},
    {"kind": "format", "pattern": "yes|no", "weight": 0.5, "name": "short"},
    {"kind": "length", "free_tokens": 2, "max_tokens": 6, "weight": 0.25},
    {"kind": "custom", "path": "my_reward_module:raises_on_long", "weight": -1.0},
]


def test_the_weighted_sum_is_compared_within_a_prompt() -> None:
    """Against a table by hand; the trajectory without one of its rewards is not compared."""
    rewards = [parse(**options) for options in REWARDS]
    names = ["grade", "short", "length", "custom"]
    batch = [
        make_trajectory("a", text="yes", tokens=2, score=1.0),
        make_trajectory("b", text="maybe", tokens=3, score=0.5),
        make_trajectory("c", text="no", tokens=5, score=1.0),
        make_trajectory("d", text="no", tokens=1, score=0.0, task="other"),
    ]
    rollout = RewardedRollout(
        rollout=lambda tasks, step: batch, rewards=load_rewards(rewards, names)
    )
    with pytest.warns(UserWarning, match="raises_on_long"):
        rewarded = rollout([], 0)
    assert [t.rewards for t in rewarded] == [
        {"grade": 1.0, "short": 1.0, "length": 0.0, "custom": 1.0},
        {"grade": 0.5, "short": 0.0, "length": -0.25, "custom": 1.0},
        {"grade": 1.0, "short": 1.0, "length": -0.75, "custom": None},
        {"grade": 0.0, "short": 1.0, "length": 0.0, "custom": 1.0},
    ]
    loss = PolicyGradientLoss(**RL)
    scored = [Scored(trajectory=t, target=None) for t in rewarded]
    (term,) = make_loss_terms(
        [loss], ["rl"], scored, rewards=dict(zip(names, rewards, strict=True))
    )
    total = {"a": 2.0 + 0.5 - 1.0, "b": 1.0 - 0.0625 - 1.0}
    mean = sum(total.values()) / 2
    assert term.advantage["a"] == pytest.approx((total["a"] - mean,) * 2)
    assert term.advantage["b"] == pytest.approx((total["b"] - mean,) * 3)
    assert term.advantage["c"] == (0.0,) * 5 and term.advantage["d"] == (0.0,)
    assert term.rewards is not None
    assert term.rewards.mean == pytest.approx((sum(total.values()) - 0.5) / 3)
    row = reward_metrics(rewarded)
    assert row["reward/grade/mean"] == pytest.approx(2.5 / 4)
    assert row["reward/short/varied"] == row["reward/length/varied"] == 0.5
    assert row["reward/custom/errors"] == 1 and row["reward/custom/varied"] == 0.0


def test_only_the_students_whole_trajectories_are_rewarded() -> None:
    given_text = replace(make_trajectory("a"), source="dataset")
    ended = replace(make_trajectory("b"), fault="it raised", grade=None)
    rollout = RewardedRollout(
        rollout=lambda tasks, step: [given_text, ended],
        rewards=load_rewards([parse(kind="grade")], ["grade"]),
    )
    assert rollout([], 0) == [given_text, ended]


def test_what_was_sampled_without_a_reward_is_refused_with_the_fix() -> None:
    scored = [Scored(trajectory=make_trajectory(id), target=None) for id in "ab"]
    with pytest.raises(TaskError, match=r"trajectory a has no reward 'short'.*on = 'student'"):
        make_loss_terms(
            [PolicyGradientLoss(**RL)], ["rl"], scored, rewards={"short": parse(**REWARDS[1])}
        )


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_grade_alone_as_a_reward_changes_no_bit(tiny_folder: Path, tmp_path: Path) -> None:
    weights = []
    for rewards in ((), ({"kind": "grade"},)):
        recipe = small_recipe(
            tiny_folder, losses=[RL], rewards=list(rewards), tasks={"kind": "arithmetic"},
            rollout={"samples_per_prompt": 4, "max_new_tokens": 4},
        )  # fmt: skip
        parts = assemble(recipe)
        trajectories = parts.rollout(parts.tasks.batch(0, 3), 0)
        # Other scores than an untrained model gets.
        scores = [index % 4 / 3 for index in range(len(trajectories))]
        trajectories = [
            replace(t, grade=Grade(score=score, passed=False),
                    rewards={"grade": score} if rewards else {})
            for t, score in zip(trajectories, scores, strict=True)
        ]  # fmt: skip
        parts.student.step(0, parts.teacher(trajectories))
        weights.append({n: p.detach().clone() for n, p in parts.student.weights.trained.items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_logs_and_stores_its_rewards(tiny_folder: Path, tmp_path: Path) -> None:
    rewards = [
        {"kind": "length", "free_tokens": 2, "max_tokens": 6},
        {"kind": "custom", "path": "my_reward_module:scaled", "settings": {"factor": 2.0},
         "name": "twice", "weight": 0.1},
    ]  # fmt: skip
    recipe = small_recipe(
        tiny_folder, losses=[RL], rewards=rewards, train={"steps": 1, "prompts_per_step": 2}
    )
    train(recipe, tmp_path / "run")
    folder = RunFolder.read(tmp_path / "run")
    (row,) = folder.metrics()
    stored = [s.trajectory for s in folder.trajectories(0)]
    assert len(stored) == 4
    for trajectory in stored:
        tokens = trajectory.num_completion_tokens
        assert trajectory.rewards == {
            "length": -min(max((tokens - 2) / 4, 0.0), 1.0), "twice": 2.0 * tokens
        }  # fmt: skip
    means = {n: sum(t.rewards[n] or 0.0 for t in stored) / 4 for n in ("length", "twice")}
    assert row["reward/length/mean"] == pytest.approx(means["length"])
    assert row["reward/sum"] == pytest.approx(means["length"] + 0.1 * means["twice"])
    assert row["reward/twice/errors"] == 0
    frame = folder.trajectories_frame(0)
    assert frame["reward/twice"].tolist() == [t.rewards["twice"] for t in stored]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"losses": [{"kind": "divergence"}], "rewards": [{"kind": "grade"}]},
         "rewards: no loss uses them"),
        ({"rewards": [{"kind": "grade"}, {"kind": "grade"}]}, "give each its own `name`"),
        ({"rewards": [{"kind": "grade", "weight": 0}]}, "remove the reward"),
        ({"rewards": [{"kind": "format", "pattern": "("}]}, "is no regular expression"),
        ({"rewards": [{"kind": "length", "free_tokens": 6, "max_tokens": 6}]},
         "set free_tokens below max_tokens"),
        ({"rewards": [{"kind": "length", "free_tokens": 6, "max_tokens": 9}]},
         "the penalty is always 0. Set free_tokens lower"),
        ({"rewards": [{"kind": "custom", "path": "rewards.py"}]}, "names a file"),
        ({"rewards": [{"kind": "grades"}]}, "grade"),
        ({"rewards": [{"kind": "reference_kl"}]}, "reference_kl alone rewards nothing"),
        ({"rewards": [{"kind": "grade"}, {"kind": "reference_kl", "weight": -1}]},
         "must be greater than 0"),
    ],
)  # fmt: skip
def test_rewards_that_cannot_work_are_refused(changes: dict[str, Any], problem: str) -> None:
    tree = small_tree(Path("m"), losses=[RL]) | changes
    if changes.get("losses"):
        tree["teacher"] = {"kind": "model", "model": "m"}
    with pytest.raises(RecipeError) as error:
        parse_recipe(tree)
    assert problem in str(error.value)
