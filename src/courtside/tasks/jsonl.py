"""Tasks from a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from courtside.errors import TaskError
from courtside.tasks.parsing import Record, parse_tasks, with_default_grader
from courtside.types import Task


def read_jsonl_tasks(path: Path, grader: str | None = None) -> tuple[Task, ...]:
    """`grader`: of tasks that name none."""
    tasks = parse_tasks("jsonl", with_default_grader(read_json_lines(path), grader))
    if not tasks:
        raise TaskError(
            f"{path}: the file is empty. Write one JSON object a line, such as "
            '{"prompt": "What is 2 + 2?", "answer": "4"}'
        )
    return tasks


def read_json_lines(path: Path) -> Iterator[Record]:
    """The objects of a file, each with its place."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TaskError(f"tasks.path = {str(path)!r}: no such file; correct the path") from None
    except OSError as error:
        raise TaskError(
            f"tasks.path = {str(path)!r}: cannot be read ({error.strerror}); it must be a file of "
            "JSON lines"
        ) from None
    # Only \n ends a line: other separators are legal inside JSON texts.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise TaskError(f"{where}: not UTF-8: {error.reason}; save the file as UTF-8") from None
        except json.JSONDecodeError as error:
            raise TaskError(
                f"{where}: not valid JSON: {error.msg} at column {error.colno}; correct the line"
            ) from None
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{where}: not valid JSON: {error}; correct the line") from None
        if not isinstance(value, dict):
            raise TaskError(f"{where}: must be a JSON object, {{…}}")
        yield Record(where=where, fields=value)
