"""Weights on the way to servers: one new folder for each version, complete when it appears."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from courtside.engines.served.pool import GO_ON
from courtside.errors import RunError

Saved = TypeVar("Saved")


class SharedFolder:
    """A folder on a disk that the servers have under the same path. What is left in it by this
    process goes when it ends."""

    def __init__(self, path: Path, *, field: str):
        """`field`: of the recipe, for messages."""
        self.path, self.field = path, field
        self._folders: dict[str, Path] = {}
        self._adopted: dict[str, Path] = {}
        """Those of another rank, which removes them."""
        weakref.finalize(self, _remove, self._folders)

    def write(self, name: str, save: Callable[[Path], Saved]) -> Saved:
        """What `save` returns, once its files are in the folder of this name."""
        work, folder = self.path / f".{name}", self.path / name
        self._folders[name] = folder
        try:
            work.mkdir(parents=True)
            result = save(work)
            work.rename(folder)  # a server never sees half of a folder
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)
            raise RunError(
                f"{self.field}.sync_folder = {str(self.path)!r}: the weights cannot be written "
                f"({error.strerror}). Name a folder with space that you may write to. {GO_ON}"
            ) from error
        return result

    def locate(self, name: str) -> Path:
        folder = self._adopted.get(name) or self._folders[name]
        return folder.absolute()  # a link may lead elsewhere on the servers

    def adopt(self, name: str, folder: Path) -> None:
        self._adopted[name] = folder

    def remove(self, name: str) -> None:
        if self._adopted.pop(name, None) is None:
            shutil.rmtree(self._folders.pop(name), ignore_errors=True)


def _remove(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
