"""Writing files so that a full disk or a kill at any moment leaves the old content or the new.

Nothing here knows what the files mean.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from courtside.errors import RunError

TEMPORARY = ".tmp"
"""Suffix of a file that is being written; one left behind by a kill means nothing."""

FIXES = {
    errno.ENOSPC: "The disk is full: free some space",
    errno.EDQUOT: "The disk quota is used up: free some space",
    errno.EROFS: "The file system is read-only: make it writable",
    errno.EACCES: "The permission is missing: make the folder writable",
    errno.EPERM: "The permission is missing: make the folder writable",
    errno.ENOENT: "The run folder is gone: put it back",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says about `path` into a message for people."""
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
    with writing(path):
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_bytes(path: Path, content: bytes) -> None:
    """Add to the end of a file, or leave it as it was."""
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            written = 0
            while written < len(content):
                written += file.write(content[written:]) or 0
        except OSError:
            # Later lines (an alarm, a last evaluation) must not be glued to half of this one. The
            # first error is the one to tell.
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise
