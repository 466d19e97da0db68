"""Rows of a JSONL file as the tasks of a class whose methods are tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from courtside.chat.api_messages import parse_messages
from courtside.errors import TaskError
from courtside.files import JsonLineError, parse_json_lines, read_regular_file
from courtside.types import Split


def read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        data = read_regular_file(path)
    except FileNotFoundError:
        raise TaskError(f"tasks.rows = {str(path)!r}: no such file; correct the path") from None
    except OSError as error:
        raise TaskError(
            f"tasks.rows = {str(path)!r}: cannot be read ({error.strerror}); it must be a file of "
            "JSON lines"
        ) from None
    rows = []
    try:
        for number, row in parse_json_lines(data):
            _check_row(row, f"{path}, line {number}")
            rows.append(row)
    except JsonLineError as error:
        raise TaskError(f"{path}, {error}") from None
    if not rows:
        raise TaskError(f"{path}: holds no rows; it needs at least one")
    return rows


def _check_row(row: dict[str, Any], where: str) -> None:
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            raise TaskError(
                f"{where}: {name!r} holds NaN, an infinity or half of a surrogate pair, which no "
                "stored task can; correct it"
            ) from None
    split = row.get("split")
    if split is not None and split not in get_args(Split):
        raise TaskError(f"{where}: split = {split!r}; use one of {list(get_args(Split))}")
    _check_prompt(row.get("prompt"), where)


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str) and prompt.strip():
        return
    if not isinstance(prompt, list):
        raise TaskError(
            f"{where}: `prompt` must be a text, or a list of messages with role and content"
        )
    if parse_messages(prompt, f"{where}: prompt")[-1].role != "user":
        raise TaskError(f"{where}: the last message of `prompt` must be a user's; leave it out")
