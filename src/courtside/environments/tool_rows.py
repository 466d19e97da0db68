"""Rows of a JSONL file as the tasks of a class whose methods are tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from courtside.errors import TaskError


def read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"tasks.rows = {str(path)!r}: cannot be read ({error})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TaskError(f"{where}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise TaskError(f"{where}: must be a JSON object with `prompt`")
        _check_prompt(row.get("prompt"), where)
        rows.append(row)
    if not rows:
        raise TaskError(f"{path}: holds no rows; it needs at least one")
    return rows


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str) and prompt.strip():
        return
    is_list = isinstance(prompt, list) and bool(prompt)
    if not is_list or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in prompt
    ):
        raise TaskError(
            f"{where}: `prompt` must be a text, or a list of messages with role and content"
        )
    if any(m["role"] == "system" for m in prompt):
        raise TaskError(
            f"{where}: `prompt` has a system message, and the list of tools is that; move the text "
            "into the user's message"
        )
