"""JSON Lines that survive a kill in the middle of a write, and never contain NaN or Infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from courtside.errors import UserError
from courtside.report.folder.atomic_files import append_bytes, replace_file

Row = dict[str, Any]


def finite(value: Any) -> Any:
    """The same tree with None for NaN and the infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value


def encode(value: Any, *, indent: int | None = None) -> bytes:
    return (json.dumps(finite(value), allow_nan=False, indent=indent) + "\n").encode()


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    append_bytes(path, encode(row))


def read_lines(path: Path) -> list[Row]:
    """All rows; none if there is no file. A last line that was cut off does not count."""
    if not path.exists():
        return []
    rows: list[Row] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # not JSON, or cut inside a UTF-8 character
            if number == len(lines):
                break
            raise UserError(
                f"{path}, line {number}: not valid JSON ({error}). The file was changed by "
                "something else; remove that line, or restore the file from a copy"
            ) from None
    return rows


def keep_lines(path: Path, wanted: Callable[[Row], bool]) -> None:
    """Rewrite the file with the wanted rows only; also heals a last line that was cut off."""
    if not path.exists():
        return
    content = b"".join(encode(row) for row in read_lines(path) if wanted(row))
    if content != path.read_bytes():
        replace_file(path, content)
