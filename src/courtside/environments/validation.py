"""What an environment returns, checked field by field at the border to user code.

Each function gives a plain record of our own types, so that nothing of the user's classes travels
further, or raises with the method, the field and the fix.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from courtside.chat.api_messages import parse_tools
from courtside.errors import TaskError
from courtside.plugins import is_finite_number
from courtside.types import Event, Grade, Message, Observation, Split, Task

DECISION = re.compile(r"\w{1,40}(?:/\w{1,40}){0,3}", re.ASCII)
"""It becomes part of a metric's name."""
OBSERVATION = "Observation(messages=(Message(role='tool', content='…'),), done=False, events=())"
GRADE = "Grade(score=1.0, passed=True, feedback='…')"
MAX_ID_CHARS = 200
MAX_KIND_CHARS = 80
MAX_EVENTS = 1000
ANSWERING_ROLES = ("tool", "user")
PROMPT_ROLES = ("system", "user", "assistant", "tool")


class InvalidValue(ValueError):
    """What is wrong with a value, and the fix, without the method that returned it."""


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def validate_task(task: object, where: str, *, is_episode: bool = True) -> Task:
    """`where` names the call, e.g. "tasks.path = 'a:B': task(3)". `is_episode`: an environment
    grades it."""
    if not isinstance(task, Task):
        raise TaskError(
            f"{where} gave {type(task).__name__}; return a courtside.types.Task with id, split and "
            "messages"
        )
    try:
        return _plain_task(task, is_episode=is_episode)
    except InvalidValue as problem:
        raise TaskError(f"{where}: {problem}") from None


def _plain_task(task: Task, *, is_episode: bool) -> Task:
    if not isinstance(task.id, str) or not task.id:
        raise InvalidValue(f"id = {task.id!r}; give a text, such as courtside.hashing.task_id(…)")
    if len(task.id) > MAX_ID_CHARS or not task.id.isprintable():
        raise InvalidValue(
            f"id = {task.id[:40]!r}… has more than {MAX_ID_CHARS} characters, or one that cannot "
            "be printed; make it a hash of the content, such as courtside.hashing.task_id(…)"
        )
    if task.split not in get_args(Split):
        raise InvalidValue(f"split = {task.split!r}; use one of {list(get_args(Split))}")
    messages = _plain_messages(task.messages, PROMPT_ROLES, "messages")
    if not messages or messages[-1].role not in ANSWERING_ROLES:
        raise InvalidValue(
            "messages: the student cannot answer them; the last one must be a user's"
        )
    if not messages[-1].content.strip():
        raise InvalidValue("messages: the last one has no text; write what is to be answered")
    if task.conversation:
        raise InvalidValue("conversation is of recorded tasks; leave it out")
    if task.grader is not None and is_episode:
        raise InvalidValue(f"grader = {task.grader!r}, but an episode grades itself; leave it out")
    if not isinstance(task.privileged, Mapping):
        raise InvalidValue(f"privileged is {_a(task.privileged)}; give a dict of names and texts")
    privileged = {}
    for name, text in task.privileged.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidValue(
                f"privileged[{name!r}] is {_a(text)}; names and values are texts: use str(…)"
            )
        privileged[name] = plain_text(text, f"privileged[{name!r}]")
    for name in ("answer", "completion", "rejected", "grader"):
        if (value := getattr(task, name)) is not None:
            plain_text(value, name)
    if task.completion is not None and not task.completion.strip():
        raise InvalidValue("completion is empty; write the answer to imitate, or leave it out")
    if not _is_sequence(task.tags) or not all(isinstance(tag, str) for tag in task.tags):
        raise InvalidValue(f"tags = {task.tags!r}; use a tuple of texts")
    plain = {
        "id": plain_text(task.id, "id"),
        "messages": messages,
        "privileged": privileged,
        "tags": tuple(task.tags),
        "grader_args": _plain_json_object(task.grader_args, "grader_args"),
    }
    return Task(**_fields_of(task, Task) | plain)


# ── observations and grades ──────────────────────────────────────────────────────────────────────


def validate_observation(value: object) -> Observation:
    if not isinstance(value, Observation):
        raise InvalidValue(f"returned {_a(value)}; return courtside.types.{OBSERVATION}")
    if not isinstance(value.done, bool):
        raise InvalidValue(f"Observation.done = {value.done!r}; use bool(…)")
    messages = _plain_messages(value.messages, ANSWERING_ROLES, "Observation.messages")
    if not messages and not value.done:
        raise InvalidValue(
            "returned an Observation without messages, which the student cannot answer; add a "
            "message, or set done=True"
        )
    if not _is_sequence(value.events):
        raise InvalidValue(f"Observation.events is {_a(value.events)}; use a tuple of Event")
    if len(value.events) > MAX_EVENTS:
        raise InvalidValue(
            f"Observation.events are {len(value.events):,}; report at most {MAX_EVENTS:,} for one "
            "reply"
        )
    events = tuple(
        _plain_event(event, f"Observation.events[{i}]") for i, event in enumerate(value.events)
    )
    decision = value.decision
    is_name = isinstance(decision, str) and DECISION.fullmatch(decision) is not None
    if decision is not None and not is_name:
        raise InvalidValue(
            f"Observation.decision = {decision!r}; use letters, digits and _, with / between "
            "parts, or None"
        )
    return Observation(messages=messages, done=value.done, events=events, decision=decision)


def validate_grade(value: object) -> Grade:
    if not isinstance(value, Grade):
        raise InvalidValue(f"returned {_a(value)}; return courtside.types.{GRADE}")
    score = value.score
    if isinstance(score, bool) or not is_finite_number(score):
        raise InvalidValue(f"Grade.score = {score!r}; use a finite number from 0 to 1")
    if not 0 <= score <= 1:
        raise InvalidValue(f"Grade.score = {score!r}, which is outside of [0, 1]; scale it")
    if not isinstance(value.passed, bool):
        raise InvalidValue(f"Grade.passed = {value.passed!r}; use True or False")
    if not isinstance(value.feedback, str):
        raise InvalidValue(f"Grade.feedback = {value.feedback!r}; use a text, or ''")
    feedback = plain_text(value.feedback, "Grade.feedback")
    return Grade(score=float(score), passed=value.passed, feedback=feedback)


def validate_episode(value: object) -> Any:
    for method, call in (("step", "step(reply)"), ("grade", "grade()")):
        if not callable(getattr(value, method, None)):
            raise InvalidValue(
                f"returned {_a(value)} without a method {call}; return an object with step(reply) "
                "and grade()"
            )
    return value


def validate_demonstration(value: object) -> tuple[Message, ...]:
    return _plain_messages(value, PROMPT_ROLES, "the messages")


def validate_replies(value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidValue(f"returned {_a(value)}; return a list of texts")
    return tuple(plain_text(text, f"reply {index}") for index, text in enumerate(value))


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def _plain_messages(messages: Any, roles: Sequence[str], name: str) -> tuple[Message, ...]:
    if not _is_sequence(messages):
        raise InvalidValue(f"{name} is {_a(messages)}; use a tuple of courtside.types.Message")
    plain = []
    for index, message in enumerate(messages):
        where = f"{name}[{index}]"
        if not isinstance(message, Message):
            raise InvalidValue(f"{where} is {_a(message)}; use Message(role='user', content='…')")
        if message.role not in roles:
            raise InvalidValue(f"{where}.role = {message.role!r}; use one of {list(roles)}")
        plain.append(
            Message(
                role=message.role,
                content=plain_text(message.content, f"{where}.content"),
                extra=_plain_json_text(message.extra, dict, f"{where}.extra"),
                tools=_plain_json_text(message.tools, list, f"{where}.tools"),
            )
        )
    return tuple(plain)


def _plain_json_text(text: object, kind: type[dict[str, Any] | list[Any]], where: str) -> str:
    """Of `extra`, an object, and of `tools`, a list of schemas; empty: none."""
    plain = plain_text(text, where)
    if not plain:
        return ""
    name = "an object" if kind is dict else "a list of tool schemas"
    try:
        value: Any = json.loads(plain)
    except (ValueError, RecursionError):
        value = None
    is_right = isinstance(value, kind)
    if not is_right:
        raise InvalidValue(f"{where} = {plain[:60]!r}; use json.dumps of {name}, or ''")
    if isinstance(value, dict) and (reserved := sorted({"role", "content"} & value.keys())):
        raise InvalidValue(f"{where} has the key {reserved[0]!r}, which is a field of the Message")
    try:
        return parse_tools(value, where) if kind is list else plain
    except TaskError as problem:
        raise InvalidValue(str(problem)) from None


def _plain_event(event: object, where: str) -> Event:
    if not isinstance(event, Event):
        raise InvalidValue(f"{where} is {_a(event)}; use Event(kind='…', details={{…}})")
    if not isinstance(event.kind, str) or not event.kind:
        raise InvalidValue(f"{where}.kind = {event.kind!r}; use a text such as 'tool_error'")
    if len(event.kind) > MAX_KIND_CHARS or not event.kind.isprintable():
        raise InvalidValue(
            f"{where}.kind = {event.kind[:40]!r}… becomes part of a metric's name; use at most "
            f"{MAX_KIND_CHARS} printable characters, and details for the rest"
        )
    details = _plain_json_object(event.details, f"{where}.details")
    return Event(kind=plain_text(event.kind, f"{where}.kind"), details=details)


def _plain_json_object(value: object, where: str) -> dict[str, Any]:
    """As it is after it was stored: tuples are lists."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidValue(f"{where} is {_a(value)}; use a dict whose keys are texts")
    for key, item in value.items():
        try:
            json.dumps(item, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise InvalidValue(_describe_surrogate(f"{where}[{key!r}]")) from None
        except (TypeError, ValueError, RecursionError) as problem:
            raise InvalidValue(
                f"{where}[{key!r}] is no JSON value ({problem}); use texts, finite numbers, "
                "booleans, None, and lists and dicts of these"
            ) from None
    plain: dict[str, Any] = json.loads(json.dumps(dict(value)))
    return plain


def plain_text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise InvalidValue(f"{where} is {_a(text)}; use a text: str(…)")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValue(_describe_surrogate(where)) from None
    return str.__str__(text)  # also of a subclass, such as numpy.str_


def _describe_surrogate(where: str) -> str:
    return (
        f"{where} has half of a surrogate pair, which no file can hold; decode with "
        "errors='replace'"
    )


def _fields_of(record: Any, record_type: Any) -> dict[str, Any]:
    """Of our own type, also where the record is of a subclass."""
    return {field.name: getattr(record, field.name) for field in fields(record_type)}


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _a(value: object) -> str:
    """
    >>> _a("x"), _a(None), _a(3)
    ('a str', 'None', 'an int')
    """
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that it was never awaited
        return "a coroutine (an async method is not awaited; use asyncio.run inside a plain one)"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
