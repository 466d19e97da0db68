"""Parses plain records (a JSON line, a row of a data set) into tasks. Errors name the record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from courtside.environments.validation import MAX_ID_CHARS
from courtside.errors import TaskError
from courtside.files import JsonLineError, parse_json_lines, read_regular_file
from courtside.hashing import split_of, task_id
from courtside.tasks import layouts
from courtside.tasks.graders import require_gradable
from courtside.types import Split, Task

KEYS = (
    "id", *layouts.KEYS, "answer", "privileged", "tags", "grader", "grader_args", "split",
    "metadata", "score_chosen", "score_rejected",
)  # fmt: skip
"""`metadata` is for people, and the scores of TRL's pairs are those of a judge: not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    where: str
    """File and line, or data set and row."""
    fields: Mapping[str, Any]


def read_jsonl_tasks(
    path: Path, grader: str | None = None, notes: list[str] | None = None
) -> tuple[Task, ...]:
    """`grader`: of tasks that name none. `notes` gets what a user should know."""
    tasks = parse_tasks("jsonl", with_default_grader(read_json_lines(path), grader), notes)
    if not tasks:
        raise TaskError(
            f"{path}: the file is empty. Write one JSON object a line, such as "
            '{"prompt": "What is 2 + 2?", "answer": "4"}'
        )
    return tasks


def read_json_lines(path: Path) -> Iterator[Record]:
    """The objects of a file, each with its place."""
    try:
        data = read_regular_file(path)
    except FileNotFoundError:
        raise TaskError(f"tasks.path = {str(path)!r}: no such file; correct the path") from None
    except OSError as error:
        raise TaskError(
            f"tasks.path = {str(path)!r}: cannot be read ({error.strerror}); it must be a file of "
            "JSON lines"
        ) from None
    try:
        for number, fields in parse_json_lines(data):
            yield Record(where=f"{path}, line {number}", fields=fields)
    except JsonLineError as error:
        raise TaskError(f"{path}, {error}") from None


def with_default_grader(records: Iterable[Record], grader: str | None) -> Iterable[Record]:
    """Records with `grader` set where they have none; an explicit null stays ungraded."""
    if grader is None:
        return records
    return (replace(record, fields={"grader": grader, **record.fields}) for record in records)


def parse_tasks(
    kind: str, records: Iterable[Record], notes: list[str] | None = None
) -> tuple[Task, ...]:
    """The tasks in their order; identical ones once, which is added to `notes`.

    The split follows from the prompt alone, so two records with the same prompt are always in the
    same split: an explicit one decides for all of them, and two different ones are an error.
    """
    tasks: dict[str, Task] = {}
    location_of: dict[str, str] = {}
    repeated: list[str] = []
    explicit: dict[str, tuple[Split, str]] = {}
    prompts: dict[str, str] = {}
    for record in records:
        task, split = _task(kind, record)
        prompt = _prompt_key(task)
        if split is not None:
            chosen, where = explicit.setdefault(prompt, (split, record.where))
            if chosen != split:
                raise TaskError(
                    f"{record.where}: split = {split!r}, but the same prompt has split = "
                    f"{chosen!r} at {where}. Give both the same split, or remove one"
                )
        if tasks.setdefault(task.id, task) != task:
            raise TaskError(
                f"{record.where}: id = {task.id!r} is also at {location_of[task.id]}, on another "
                "task. Give each its own, or leave `id` out"
            )
        if task.id in location_of:
            repeated.append(f"{record.where} is the task of {location_of[task.id]}")
        location_of.setdefault(task.id, record.where)
        prompts[task.id] = prompt
    if repeated and notes is not None:
        more = f", and {len(repeated) - 1} more such" if len(repeated) > 1 else ""
        notes.append(f"{repeated[0]}{more}; each task is used once")
    return tuple(
        replace(task, split=explicit[prompts[key]][0]) if prompts[key] in explicit else task
        for key, task in tasks.items()
    )


def _task(kind: str, record: Record) -> tuple[Task, Split | None]:
    fields = {name: value for name, value in record.fields.items() if value is not None}
    where = record.where
    if unknown := sorted(record.fields.keys() - set(KEYS)):
        raise TaskError(f"{where}: unknown key {unknown[0]!r}; a task has {', '.join(KEYS)}")
    answer = _answer(where, fields)
    texts = layouts.read_texts(where, fields)
    if texts.rejected is not None and texts.completion is None:
        raise TaskError(f"{where}: `rejected` needs a better `completion` beside it; add one")
    task = Task(
        id="",
        split="train",
        messages=texts.messages,
        answer=answer,
        completion=texts.completion,
        rejected=texts.rejected,
        completion_thoughts=texts.completion_thoughts,
        rejected_thoughts=texts.rejected_thoughts,
        privileged=parse_texts(where, fields, "privileged"),
        tags=parse_tags(where, fields),
        grader=_grader(where, record.fields, answer),
        grader_args=parse_object(where, fields, "grader_args"),
    )
    if task.grader_args and task.grader is None:
        raise TaskError(f"{where}: `grader_args` without a `grader`; name one")
    identity = [_prompt_key(task), task.answer, task.completion, task.rejected,
                dict(task.privileged), task.tags, task.grader, dict(task.grader_args),
                *filter(None, (task.completion_thoughts, task.rejected_thoughts))]  # fmt: skip
    task = replace(
        task,
        id=parse_id(where, fields) or task_id(kind, json.dumps(identity, sort_keys=True)),
        split=split_of(_prompt_key(task)),
    )
    try:
        require_gradable(task)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None
    return task, _split(where, fields)


def _prompt_key(task: Task) -> str:
    messages = [[m.role, m.content, *filter(None, (m.extra, m.tools))] for m in task.messages]
    return json.dumps(messages)


# ── fields ───────────────────────────────────────────────────────────────────────────────────────


def parse_id(where: str, fields: Mapping[str, Any]) -> str | None:
    """None: it follows from the content."""
    id = _text(where, fields, "id")
    if id is not None and not id.strip():
        raise TaskError(f"{where}: `id` is empty; write one, or leave it out")
    if id is not None and (len(id) > MAX_ID_CHARS or not id.isprintable()):
        raise TaskError(
            f"{where}: `id` has more than {MAX_ID_CHARS} characters, or one that cannot be "
            "printed; shorten it, or leave it out"
        )
    return id


def _answer(where: str, fields: Mapping[str, Any]) -> str | None:
    answer = fields.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        if not math.isfinite(answer):
            raise TaskError(f"{where}: answer = {answer}; write a finite number, or a text")
        return str(answer)
    return _text(where, fields, "answer")


def _grader(where: str, fields: Mapping[str, Any], answer: str | None) -> str | None:
    if "grader" in fields or answer is None:  # an explicit null: not to be graded
        return _text(where, fields, "grader")
    if re.fullmatch(r"[^\W\d_]{3,}([\s,.'-]+[^\W\d_]+)*[.!?]?", answer.strip()):
        raise TaskError(
            f"{where}: answer = {answer!r} is no mathematics, but 'math' is the default grader. "
            "Name another one, such as grader 'exact' or 'contains'"
        )
    return "math"


def _split(where: str, fields: Mapping[str, Any]) -> Split | None:
    value = _text(where, fields, "split")
    splits: tuple[Split, ...] = get_args(Split)
    split = next((name for name in splits if name == value), None)
    if value is not None and split is None:
        raise TaskError(f"{where}: split = {value!r} is not known; use one of {list(splits)}")
    return split


def _text(where: str, fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise TaskError(f"{where}: `{name}` must be a text, not {layouts.name_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise TaskError(
            f"{where}: `{name}` holds half of a surrogate pair, which is no character; correct it"
        ) from None
    return value


def parse_object(where: str, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise TaskError(f"{where}: `{name}` must be an object, not {layouts.name_kind(value)}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:  # from Python, or NaN
        raise TaskError(
            f"{where}: `{name}` must hold JSON values, as they are stored with the run; use texts, "
            f"finite numbers, lists and objects ({problem})"
        ) from None
    return value


def parse_texts(where: str, fields: Mapping[str, Any], name: str) -> dict[str, str]:
    values = parse_object(where, fields, name)
    texts = {key: _text(f"{where}: {name}", values, key) for key in values}
    if empty := [key for key, value in texts.items() if value is None]:
        raise TaskError(f"{where}: `{name}.{empty[0]}` is null; write a text, or leave it out")
    return {key: value for key, value in texts.items() if value is not None}


def parse_tags(where: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    tags = fields.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise TaskError(f"{where}: `tags` must be a list of texts")
    return tuple(tags)
