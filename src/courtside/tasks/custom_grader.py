"""Graders from user code: `grader = "module:function"` on a task, or in [tasks] for all of them.

The function is called as `grade(response, task)` and returns a Grade, a bool or a score.
"""

from __future__ import annotations

import inspect
import math
import traceback
import warnings
from collections.abc import Callable
from functools import lru_cache
from numbers import Real
from typing import Any

from courtside.errors import RunError, TaskError
from courtside.plugins import check_import_path, load_plugin
from courtside.types import Grade, Task

_reported: set[str] = set()
"""Graders whose failure was reported: the traceback is printed once, later failures are counted."""


def is_custom_grader(name: str) -> bool:
    return ":" in name


@lru_cache
def load_grader(path: str) -> Callable[..., Any]:
    try:
        check_import_path(path, "my_graders:grade")
    except ValueError as problem:
        raise TaskError(f"grader: {problem}") from None
    function = load_plugin(path, "function", field="grader", error=TaskError)
    try:
        inspect.signature(function).bind("response", None)
    except TypeError as problem:
        raise TaskError(
            f"grader = {path!r} is called as grade(response, task): {problem}. Give it these two "
            "parameters; the task has `answer` and `grader_args`"
        ) from None
    return function


def run_grader(path: str, task: Task, response: str) -> Grade:
    """The validated grade. A grader that raises gives score 0 with `Grade.error` set."""
    function = load_grader(path)
    try:
        result = function(response, task)
    except Exception as error:  # user code: one bad response must not end a run
        if path not in _reported:
            _reported.add(path)
            warnings.warn(
                f"grader {path!r} raised on task {task.id}. Such responses score 0 and are counted "
                f"(reward/grader_errors). Handle this response in the grader:\n"
                f"{traceback.format_exc()}",
                stacklevel=2,
            )
        summary = "".join(traceback.format_exception_only(error)).strip()
        return Grade(score=0.0, passed=False, feedback="", error=summary)
    return _validate_result(result, path, task)


def _validate_result(result: Any, path: str, task: Task) -> Grade:
    if isinstance(result, Grade):
        grade = result
    elif isinstance(result, Real):  # bool and numpy scalars are real numbers, too
        grade = Grade(score=float(result), passed=float(result) == 1.0, feedback="")
    else:
        raise RunError(
            f"grader {path!r} returned {type(result).__name__} on task {task.id}; return a Grade, "
            "True or False, or a score from 0 to 1"
        )
    if not isinstance(grade.score, Real) or not math.isfinite(grade.score):
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
