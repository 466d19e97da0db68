"""Files that users write: recipes, tasks, hints."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOM = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors put first."""


def read_regular_file(path: Path) -> bytes:
    """An OSError for what is no regular file."""
    require_regular_file(path)
    return path.read_bytes()


def require_regular_file(path: Path) -> None:
    """An OSError for what is no regular file: a pipe would block until somebody writes to it, and
    give nothing when a resumed run reads it again."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


FOREIGN = (
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ", "compressed by xz"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"version https://git-lfs", "a pointer of Git LFS (`git lfs pull` fetches what it leads to)"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
"""How files begin that data often comes as."""


class DuplicateKeyError(ValueError):
    """A JSON object with one key twice."""


def require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of `json.loads` for what users write."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise DuplicateKeyError(
            f"the key {counts.most_common(1)[0][0]!r} is there twice, and JSON would take the last "
            "one silently; remove one"
        )
    return tree


class JsonLineError(ValueError):
    """The line, what is wrong with it and the fix."""


def parse_json_lines(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with the number of its line, from 1."""
    if kind := next((kind for magic, kind in FOREIGN if data.startswith(magic)), None):
        raise JsonLineError(
            f"line 1: the file is {kind}. Convert it to one JSON object on each line"
        )
    # Only \n ends a line: other separators are legal inside JSON texts.
    for number, line in enumerate(data.removeprefix(BOM).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            value = json.loads(line.decode(), object_pairs_hook=require_unique_keys)
        except UnicodeDecodeError as error:
            raise JsonLineError(
                f"{where}: not UTF-8: {error.reason}; save the file as UTF-8"
            ) from None
        except json.JSONDecodeError as error:
            is_array = number == 1 and line.lstrip().startswith(b"[")
            fix = "a JSON array becomes lines with `jq -c .[]`" if is_array else "correct the line"
            raise JsonLineError(
                f"{where}: not valid JSON: {error.msg} at column {error.colno}; {fix}"
            ) from None
        except DuplicateKeyError as error:
            raise JsonLineError(f"{where}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise JsonLineError(f"{where}: not valid JSON: {error}; correct the line") from None
        if not isinstance(value, dict):
            fix = "; a JSON array becomes lines with `jq -c .[]`" if isinstance(value, list) else ""
            raise JsonLineError(f"{where}: must be a JSON object, {{…}}{fix}")
        yield number, value
