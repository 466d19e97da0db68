"""Weights on the way to servers: one new folder for each version, complete when it appears."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from courtside.engines.served.requests import GO_ON
from courtside.errors import ServerError

Saved = TypeVar("Saved")

LOCK = ".lock"
"""In each folder, locked as long as the process that wrote it lives."""
PREFIXES = ("courtside-", ".courtside-")
"""Of whole folders, and of those that are being written."""
MIN_AGE = 1.0
"""Seconds: a folder is there a moment before its lock is."""


class SharedFolder:
    """A folder on a disk that the servers have under the same path. What is left in it by this
    process goes when it ends, and what was left by one that was killed goes now."""

    def __init__(self, path: Path, *, field: str):
        """`field`: of the recipe, for messages."""
        self.path, self.field = path, field
        self._locks: dict[Path, int] = {}
        """File descriptors, by folder."""
        self._adopted: dict[str, Path] = {}
        """Folders of another rank, which removes them."""
        _remove_abandoned(path)
        weakref.finalize(self, _remove, self._locks)

    def write(self, name: str, save: Callable[[Path], Saved]) -> Saved:
        """What `save` returns, once its files are in the folder of this name."""
        work, folder = self.path / f".{name}", self.path / name
        try:
            work.mkdir(parents=True)
            lock = _lock(work)
            self._locks[work] = lock
            result = save(work)
            work.rename(folder)  # a server never sees half of a folder
            self._locks[folder] = self._locks.pop(work)
        except (OSError, SafetensorError) as error:
            self._remove(work)
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            raise ServerError(
                f"{self.field}.sync_folder = {str(self.path)!r}: the weights cannot be written "
                f"({reason}). Name a folder with space that you may write to. {GO_ON}"
            ) from error
        return result

    def locate(self, name: str) -> Path:
        folder = self._adopted.get(name, self.path / name)
        return folder.absolute()  # a link may lead elsewhere on the servers

    def adopt(self, name: str, folder: Path) -> None:
        self._adopted[name] = folder

    def remove(self, name: str) -> None:
        if self._adopted.pop(name, None) is None:
            self._remove(self.path / name)

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if folder in self._locks:
            os.close(self._locks.pop(folder))


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    with suppress(OSError):  # a disk without locks: nobody can tell that a folder is abandoned
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(path: Path) -> None:
    with suppress(OSError):  # none was ever written, or it may not be read
        for folder in path.iterdir():
            if folder.name.startswith(PREFIXES) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether the process that wrote it has ended."""
    try:
        if time.time() - folder.stat().st_mtime < MIN_AGE:
            return False
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:  # without a lock it is no folder of ours
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(locks: dict[Path, int]) -> None:
    for folder in locks:
        shutil.rmtree(folder, ignore_errors=True)
