"""Graders: built-in ones, of which none raises on any response. Others are `module:function`
(`tasks.user_graders`).

What can be wrong with a task (an unknown grader, a missing answer, a pattern that does not
compile) is a `TaskError`; `require_gradable` finds it before anything is sampled.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from courtside.errors import TaskError
from courtside.recipe.prefix_tasks import PrefixTasks
from courtside.recipe.tasks import USER_GRADER_SECONDS, GradedTasks, TasksConfig
from courtside.tasks.checks import CHECKS, find_violation
from courtside.tasks.maze import find_mistake
from courtside.tasks.student_prefixes import grade_whole_answers
from courtside.tasks.user_graders import load_grader, run_grader, run_user_code
from courtside.types import Grade, Task


@dataclass(frozen=True, slots=True)
class Grader:
    grade: Callable[[Task, str], str | None]
    """(task, response) → what is wrong, or None when the response passes."""
    needs_answer: bool = True
    required: Mapping[str, type] = field(default_factory=dict)
    optional: Mapping[str, type] = field(default_factory=dict)
    """Arguments and their types."""


def grade(task: Task, response: str, *, seconds: float = USER_GRADER_SECONDS) -> Grade | None:
    """None when the task names no grader. `seconds`: the time limit of a grader of user code, and
    of a pattern of `regex`."""
    if task.grader is None:
        return None
    if ":" in task.grader:
        return run_grader(task.grader, task, response, seconds=seconds)
    require_gradable(task)
    if task.grader == "regex":  # a pattern is a program of the user, and may backtrack for years
        call = partial(_grade_builtin, task, response)
        return run_user_code(task.grader, call, task, seconds=seconds)
    return _grade_builtin(task, response)


def _grade_builtin(task: Task, response: str) -> Grade:
    problem = GRADERS[task.grader or ""].grade(task, response)
    if problem is None:
        return Grade(score=1.0, passed=True, feedback="")
    return Grade(score=0.0, passed=False, feedback=problem)


def make_grader(config: TasksConfig) -> Callable[[Task, str], Grade | None]:
    """`grade` with the time limit of a [tasks] section; of whole answers where tasks begin them."""
    if isinstance(config, GradedTasks):
        return partial(grade, seconds=config.grader_seconds)
    return grade_whole_answers(grade) if isinstance(config, PrefixTasks) else grade


def require_gradable(task: Task) -> None:
    """Raise `TaskError` unless the task's grader exists and has what it needs."""
    if task.grader is None:
        return
    if ":" in task.grader:
        load_grader(task.grader)
        return
    if task.grader not in GRADERS:
        raise TaskError(
            f"task {task.id}: grader = {task.grader!r} is not known; use one of {sorted(GRADERS)}, "
            "or your own as 'module:function'"
        )
    grader = GRADERS[task.grader]
    where = f"task {task.id}, grader {task.grader!r}"
    if grader.needs_answer and not (task.answer or "").strip():
        raise TaskError(f"{where}: compares with `answer`, which the task lacks; add one")
    if task.grader == "number" and _last_number(task.answer or "") is None:
        raise TaskError(
            f"{where}: answer = {task.answer!r} holds no number; use grader 'exact' or 'contains'"
        )
    required = dict(grader.required)
    if task.grader == "instruction":
        check = task.grader_args.get("check")
        if check not in sorted(CHECKS):
            raise TaskError(
                f"{where}: grader_args.check = {check!r} is not known; use one of {sorted(CHECKS)}"
            )
        required |= CHECKS[check].parameters
    _require_arguments(where, task.grader_args, required, grader.optional)
    if task.grader == "regex":
        try:
            re.compile(task.grader_args["pattern"])
        except re.error as error:
            raise TaskError(f"{where}: pattern does not compile: {error}; correct it") from None


def _require_arguments(
    where: str, args: Mapping[str, Any], required: Mapping[str, type], optional: Mapping[str, type]
) -> None:
    types = {**required, **optional}
    if unknown := sorted(args.keys() - types.keys()):
        raise TaskError(f"{where}: unknown grader_args {unknown}; it takes {sorted(types)}")
    if missing := sorted(required.keys() - args.keys()):
        raise TaskError(f"{where}: needs grader_args {missing}; add them")
    for name, value in args.items():
        if type(value) is not types[name]:
            kinds = {bool: "true or false", int: "a whole number", str: "a text"}
            raise TaskError(f"{where}: grader_args.{name} = {value!r} must be {kinds[types[name]]}")
        if value == "" or (isinstance(value, int) and not isinstance(value, bool) and value < 1):
            raise TaskError(f"{where}: grader_args.{name} = {value!r} can never hold; change it")


# ── built-in graders ─────────────────────────────────────────────────────────────────────────────

# A minus is a sign only where no operand stands before it: "5-3" holds 5 and 3.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def _number(task: Task, response: str) -> str | None:
    # The last number after the last "Answer:"; without that, the last one of the text.
    _, marker, answered = response.rpartition("Answer:")
    value = _last_number(answered) if marker else None
    value = _last_number(response) if value is None else value
    if value is None:
        return f"The answer must be {task.answer}, but the response contains no number."
    if value != _last_number(_answer(task)):
        actual = _shortened(f"{value:f}")
        return f"The answer must be {task.answer}, but the response says {actual}."
    return None


def _math(task: Task, response: str) -> str | None:
    answer = _answer(task)
    reference = _read_reference(answer)
    if not reference:
        return (
            f"The reference answer {answer!r} cannot be read as mathematics, so no answer can be "
            "compared with it."
        )
    value = _read_math(response)
    if not value:
        return f"The answer must be {answer}, but no mathematical answer can be read from the text."
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        same = verify(list(reference), list(value), timeout_seconds=_seconds())
    except TimeoutException:
        same = False
    if same:
        return None
    # Only text that was parsed as text: printing a huge expression could take forever.
    actual = _shortened(value[-1]) if isinstance(value[-1], str) else "something else"
    return f"The answer must be {answer}, but the response says {actual}."


def _exact(task: Task, response: str) -> str | None:
    if _cased(task, response.strip()) == _cased(task, _answer(task).strip()):
        return None
    actual = repr(_shortened(response.strip()))
    return f"The answer must be exactly {_answer(task).strip()!r}, but the response is {actual}."


def _contains(task: Task, response: str) -> str | None:
    if _cased(task, _answer(task).strip()) in _cased(task, response):
        return None
    return f"The answer must contain {_answer(task).strip()!r}, but it does not."


def _regex(task: Task, response: str) -> str | None:
    pattern = task.grader_args["pattern"]
    if re.search(pattern, response):
        return None
    return f"The answer must match the pattern {pattern!r}, but it does not."


def _instruction(task: Task, response: str) -> str | None:
    parameters = {name: value for name, value in task.grader_args.items() if name != "check"}
    return find_violation(task.grader_args["check"], response, parameters)


def _answer(task: Task) -> str:
    assert task.answer is not None
    return task.answer


def _cased(task: Task, text: str) -> str:
    return text.casefold() if task.grader_args.get("ignore_case", False) else text


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


MATH_SECONDS = 5
"""To read an expression, and again to compare two."""


@lru_cache(maxsize=4096)
def _read_reference(answer: str) -> tuple[Any, ...]:
    # Bare LaTeX such as x^2+1 is only read between dollar signs.
    return _read_math(answer) or _read_math(f"${answer}$")


def _read_math(text: str) -> tuple[Any, ...]:
    """What math-verify reads from a text; empty when it can read nothing in time."""
    try:
        from math_verify import parse
        from math_verify.errors import TimeoutException
    except ImportError:
        raise TaskError(
            "grader 'math' needs the package math-verify; run: pip install -e ."
        ) from None
    try:
        return tuple(parse(text, parsing_timeout=_seconds()))
    except TimeoutException:
        return ()


def _seconds() -> int | None:
    """math-verify's time limit works through signals, which only the main thread may use."""
    return MATH_SECONDS if threading.current_thread() is threading.main_thread() else None


IGNORE_CASE = {"ignore_case": bool}
MAZE_ARGUMENTS = {"map_seed": int, "start": str, "is_continued": bool, "max_moves": int}

GRADERS: Mapping[str, Grader] = {
    "number": Grader(_number),
    "math": Grader(_math),
    "exact": Grader(_exact, optional=IGNORE_CASE),
    "contains": Grader(_contains, optional=IGNORE_CASE),
    "regex": Grader(_regex, needs_answer=False, required={"pattern": str}),
    "maze": Grader(find_mistake, required=MAZE_ARGUMENTS),
    "instruction": Grader(_instruction, needs_answer=False, required={"check": str}),
}
