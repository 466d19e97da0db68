"""The rewards of a recipe as functions of trajectories; user code among them may raise or hang."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from courtside.environments.guard import TimedOut
from courtside.errors import RecipeError, RunError, TaskError
from courtside.plugins import is_finite_number, load_plugin
from courtside.recipe.rewards import CustomReward, FormatReward, LengthReward, Reward
from courtside.tasks.user_graders import (
    MAX_CONSECUTIVE_TIMEOUTS,
    adapt_trl_reward,
    run_interruptibly,
)
from courtside.types import Trajectory

RewardFunction = Callable[[Trajectory], float | None]
"""None: there is no reward, because user code raised or took too long."""


def load_rewards(rewards: Sequence[Reward], names: Sequence[str]) -> Mapping[str, RewardFunction]:
    """By name; user code is imported and its signature checked. What is a reward of single tokens,
    which the update computes, is left out."""
    return {
        name: _load_reward(reward, name, f"rewards[{index}]")
        for index, (reward, name) in enumerate(zip(rewards, names, strict=True))
        if reward.kind != "reference_kl"
    }


def _load_reward(reward: Reward, name: str, field: str) -> RewardFunction:
    if isinstance(reward, FormatReward):
        pattern = re.compile(reward.pattern)
        match = pattern.search if reward.anywhere else pattern.fullmatch
        return GuardedReward(
            lambda trajectory: float(match(trajectory.response) is not None),
            label=f"{field}.pattern ({name})",
            seconds=reward.seconds,
        )
    if isinstance(reward, LengthReward):
        return partial(penalize_length, free=reward.free_tokens, limit=reward.max_tokens)
    if isinstance(reward, CustomReward):
        return GuardedReward(
            _load_function(reward, field),
            label=f"{field}.path = {reward.path!r}",
            seconds=reward.seconds,
        )
    return score_grade


def score_grade(trajectory: Trajectory) -> float:
    if trajectory.grade is None:
        raise TaskError(
            f"task {trajectory.task.id} has no grader, so it gives no reward of kind = 'grade'. "
            "Name a grader on the tasks, or remove that reward"
        )
    return trajectory.grade.score


def penalize_length(trajectory: Trajectory, *, free: int, limit: int) -> float:
    """0 up to `free` completion tokens, −1 from `limit` on, linear in between."""
    excess = (trajectory.num_completion_tokens - free) / (limit - free)
    return -min(max(excess, 0.0), 1.0)


# ── user code ────────────────────────────────────────────────────────────────────────────────────


def _load_function(reward: CustomReward, field: str) -> Callable[[Trajectory], Any]:
    where = f"{field}.path = {reward.path!r}"
    function = load_plugin(reward.path, "function", field=f"{field}.path", error=RecipeError)
    bound = partial(function, **reward.settings)
    try:
        signature = inspect.signature(bound)
        if "completions" in signature.parameters:
            adapted = adapt_trl_reward(bound, signature)
            return lambda trajectory: adapted(trajectory.response, trajectory.task)
        signature.bind("trajectory")
    except (TypeError, ValueError) as problem:
        raise RecipeError(
            f"{where} is called as reward(trajectory, **settings) with settings = "
            f"{dict(reward.settings)}: {problem}. Give it these parameters. (A reward function of "
            "TRL has the parameter `completions`)"
        ) from None
    return bound


class GuardedReward:
    """A function that may raise, hang or return anything. One bad answer does not end a run."""

    def __init__(self, function: Callable[[Trajectory], Any], *, label: str, seconds: float):
        self.function, self.label, self.seconds = function, label, seconds
        self.num_timeouts = 0
        """In a row."""
        self.was_reported = False

    def __call__(self, trajectory: Trajectory) -> float | None:
        task = trajectory.task.id
        try:
            value = run_interruptibly(lambda: self.function(trajectory), self.seconds)
        except TimedOut:
            self.num_timeouts += 1
            problem = f"{self.label} did not return within {self.seconds:g} seconds"
            if self.num_timeouts >= MAX_CONSECUTIVE_TIMEOUTS:
                raise RunError(
                    f"{problem} on {self.num_timeouts} trajectories in a row, the last of task "
                    f"{task}. Make it faster, or raise `seconds`"
                ) from None
            self._report_once(f"{problem} on task {task}", "")
            return None
        except KeyboardInterrupt:
            raise
        except BaseException:  # user code: one bad answer must not end a run
            self._report_once(f"{self.label} raised on task {task}", traceback.format_exc())
            return None
        self.num_timeouts = 0
        if not is_finite_number(value):
            raise RunError(
                f"{self.label} returned {value!r} on task {task}; return a finite number"
            )
        return float(value)

    def _report_once(self, problem: str, trace: str) -> None:
        if not self.was_reported:
            self.was_reported = True
            warnings.warn(
                f"{problem}. Such trajectories have no reward, are not compared with the others of "
                f"their prompt, and are counted (reward/NAME/errors):\n{trace}",
                stacklevel=3,
            )
