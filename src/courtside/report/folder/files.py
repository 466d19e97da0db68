"""Atomic file writes and JSON Lines: after a full disk or a kill, a file has its old content or
the new one. JSON never contains NaN or Infinity.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from courtside.errors import RunError, UserError
from courtside.files import read_regular_file

TEMPORARY = ".tmp"
"""Suffix of a file before it is complete; one left by a kill is ignored."""

FIXES = {
    errno.ENOSPC: "The disk is full: free some space",
    errno.EDQUOT: "The disk quota is used up: free some space",
    errno.EROFS: "The file system is read-only: make it writable",
    errno.EACCES: "The permission is missing: make the folder writable",
    errno.EPERM: "The permission is missing: make the folder writable",
    errno.ENOENT: "The run folder is gone: put it back",
}

Row = dict[str, Any]


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a RunError that names the cause and the fix."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = FIXES.get(error.errno or 0, "Repair the cause")
        raise RunError(
            f"{path}: could not be written ({reason}). What the run had recorded before is intact. "
            f"{fix}, then start the same command again: it goes on from the last checkpoint."
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, never half of it."""
    temporary = path.with_name(path.name + TEMPORARY)
    with explain_write_errors(path):
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_page(path: Path, page: bytes) -> None:
    """Of a page that a user asked for, outside of any run. A UserError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, page)
    except (OSError, RunError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = getattr(cause, "strerror", None) or str(cause)
        raise UserError(f"{path}: cannot be written ({reason}). Name another file") from None


def replace_non_finite(value: Any) -> Any:
    """The same tree with None for NaN and the infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [replace_non_finite(item) for item in value]
    return value


def encode_json(value: Any, *, indent: int | None = None) -> bytes:
    return (json.dumps(replace_non_finite(value), allow_nan=False, indent=indent) + "\n").encode()


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    append_bytes(path, encode_json(row))


def append_bytes(path: Path, content: bytes) -> None:
    """Append all of the content, or leave the file as it was."""
    with explain_write_errors(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            num_written = 0
            while num_written < len(content):
                num_written += file.write(content[num_written:]) or 0
        except OSError:
            # Later lines (an alarm, a last evaluation) must not be glued to half of this one. The
            # first error is the one to report.
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def read_lines(path: Path, required: str | None = None, *, numbers_only: bool = False) -> list[Row]:
    """All rows; none if there is no file. A last line that was cut off does not count.

    `required`: a key with a whole number, which every row must have. `numbers_only`: all values are
    numbers or null, and the required one increases: a row twice would be counted twice.
    """
    if not path.exists():
        return []
    rows: list[Row] = []
    try:
        lines = read_regular_file(path).split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON, or cut inside a character
            if number == len(lines):
                break
            raise _changed(path, number, f"not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise _changed(path, number, "not a JSON object")
        if required is not None and not _is_count(row.get(required)):
            raise _changed(path, number, f"no `{required}` with a whole number")
        if numbers_only and (key := _find_non_number(row)) is not None:
            raise _changed(path, number, f"`{key}` is no number")
        if numbers_only and required is not None and rows and row[required] <= rows[-1][required]:
            order = f"{row[required]} stands after {rows[-1][required]}"
            raise _changed(path, number, f"`{required}` = {order}")
        rows.append(row)
    return rows


def _is_count(value: Any) -> bool:
    """As steps are; larger ones would be an axis that nothing can draw."""
    return type(value) is int and 0 <= value < 10**9


def _find_non_number(row: Row) -> str | None:
    """The first key whose value is neither a finite number nor null."""
    return next((k for k, v in row.items() if v is not None and not is_finite_number(v)), None)


def is_finite_number(value: Any) -> bool:
    """Of a value from JSON, which may be NaN, or a whole number that no float holds."""
    return type(value) in (int, float) and abs(value) < 1e300


def _changed(path: Path, number: int, reason: str) -> UserError:
    return UserError(
        f"{path}, line {number}: {reason}. The file was changed by something else; remove that "
        "line, or restore the file from a copy"
    )


def filter_lines(path: Path, keep: Callable[[Row], bool], required: str | None = None) -> None:
    """Rewrite the file with the rows to keep; also drops a last line that was cut off."""
    if not path.exists():
        return
    content = b"".join(encode_json(row) for row in read_lines(path, required) if keep(row))
    if content != path.read_bytes():
        replace_file(path, content)
