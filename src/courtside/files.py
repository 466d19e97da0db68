"""Files that users write: recipes, tasks, hints."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

BOM = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors put first."""


def read_regular_file(path: Path) -> bytes:
    """An OSError for what is no regular file: a pipe would block until somebody writes to it, and
    give nothing when a resumed run reads it again."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
    return path.read_bytes()


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
