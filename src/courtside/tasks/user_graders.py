"""Graders of user code, named as `module:function`: they may raise, hang or return anything.

A function `grade(response, task)`, or a reward function of TRL, `reward(completions, **columns)`.
"""

from __future__ import annotations

import inspect
import math
import os
import traceback
import warnings
from collections.abc import Callable
from functools import lru_cache
from numbers import Real
from typing import Any, TypeVar

from courtside.environments.guard import TimedOut, begin, return_to_folder
from courtside.errors import RunError, TaskError
from courtside.interrupts import can_interrupt, time_limit
from courtside.plugins import check_import_path, is_finite_number, load_plugin
from courtside.types import Grade, Task

T = TypeVar("T")
MAX_CONSECUTIVE_TIMEOUTS = 5
"""After so many responses in a row without a grade in time, the run stops."""

_reported: set[str] = set()
"""Graders whose failure was reported: the traceback is printed once, later failures are counted."""


@lru_cache
def load_grader(path: str) -> Callable[..., Any]:
    """As a function of response and task that returns a Grade, a bool or a score."""
    try:
        check_import_path(path, "my_graders:grade")
    except ValueError as problem:
        raise TaskError(f"grader: {problem}") from None
    function = load_plugin(path, "function", field="grader", error=TaskError)
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise TaskError(
            f"grader = {path!r} has no signature that Python can tell; wrap it in a function of "
            "your own"
        ) from None
    if "completions" in signature.parameters:
        return adapt_trl_reward(function, signature)
    try:
        signature.bind("response", None)
    except TypeError as problem:
        raise TaskError(
            f"grader = {path!r} is called as grade(response, task): {problem}. Give it these two "
            "parameters; the task has `answer` and `grader_args`. (A reward function of TRL has "
            "the parameter `completions`)"
        ) from None
    return function


def adapt_trl_reward(
    function: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    """A reward function of TRL, called with one conversation at a time."""
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def grade(response: str, task: Task) -> Any:
        prompt = [{"role": m.role, "content": m.content} for m in task.messages]
        columns = {
            **task.privileged, **task.grader_args, "answer": task.answer, "prompts": prompt,
            "completions": [{"role": "assistant", "content": response}],
        }  # fmt: skip
        names = columns if takes_all else columns.keys() & signature.parameters.keys()
        rewards = function(**{name: [columns[name]] for name in names})
        return rewards[0] if isinstance(rewards, list | tuple) and len(rewards) == 1 else rewards

    return grade


_timeouts: dict[str, int] = {}
"""By grader: the responses in a row on which it did not return in time."""


def run_grader(path: str, task: Task, response: str, *, seconds: float) -> Grade:
    """The validated grade of the function at `path`."""
    function = load_grader(path)
    return run_user_code(path, lambda: function(response, task), task, seconds=seconds)


def run_user_code(path: str, call: Callable[[], Any], task: Task, *, seconds: float) -> Grade:
    """The validated grade that `call` returns. One that raises or takes longer than `seconds` gives
    score 0 with `Grade.error` set. `path`: the grader's name."""
    try:
        result = run_interruptibly(call, seconds)
    except TimedOut:
        _timeouts[path] = _timeouts.get(path, 0) + 1
        problem = f"did not return within {seconds:g} seconds (tasks.grader_seconds)"
        if _timeouts[path] >= MAX_CONSECUTIVE_TIMEOUTS:
            raise RunError(
                f"grader {path!r} {problem} on {_timeouts[path]} responses in a row, the last on "
                f"task {task.id}. Give what it waits for a time limit, or raise this one"
            ) from None
        _report_once(path, f"{problem} on task {task.id}", "")
        return Grade(score=0.0, passed=False, error=problem)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code: one bad response must not end a run
        _report_once(path, f"raised on task {task.id}", traceback.format_exc())
        summary = "".join(traceback.format_exception_only(error)).strip()
        return Grade(score=0.0, passed=False, error=summary)
    _timeouts.pop(path, None)
    return _validate_result(result, path, task)


def _report_once(path: str, problem: str, trace: str) -> None:
    if path not in _reported:
        _reported.add(path)
        warnings.warn(
            f"grader {path!r} {problem}. Such responses score 0 and are counted "
            f"(reward/grader_errors). Handle this response in the grader:\n{trace}",
            stacklevel=3,
        )


def run_interruptibly(call: Callable[[], T], seconds: float) -> T:
    """Raises `TimedOut` after `seconds`.

    In the main thread by a signal, which also interrupts a regular expression, and leaves the
    grader in the thread where libraries with time limits of their own (math-verify) work.
    """
    folder = os.getcwd()
    try:
        if not can_interrupt():
            return begin(call, seconds)()
        with time_limit(seconds, TimedOut):
            return call()
    finally:
        return_to_folder(folder)


def _validate_result(result: Any, path: str, task: Task) -> Grade:
    if isinstance(result, Grade):
        grade = result
    elif isinstance(result, Real):  # bool and numpy scalars are real numbers, too
        score = float(result) if is_finite_number(result) else math.nan
        grade = Grade(score=score, passed=score == 1.0, feedback="")
    else:
        raise RunError(
            f"grader {path!r} returned {type(result).__name__} on task {task.id}; return a Grade, "
            "True or False, or a score from 0 to 1"
        )
    if not is_finite_number(grade.score):
        raise RunError(
            f"grader {path!r} returned score {grade.score!r} on task {task.id}; return a finite "
            "number from 0 to 1"
        )
    if not 0 <= grade.score <= 1:
        raise RunError(
            f"grader {path!r} returned score {grade.score!r} on task {task.id}, which is outside "
            "of [0, 1]; scale it"
        )
    if not isinstance(grade.passed, bool) or not isinstance(grade.feedback, str):
        raise RunError(
            f"grader {path!r} returned a Grade on task {task.id} whose `passed` is no bool or "
            "whose `feedback` is no text; correct it"
        )
    return grade
