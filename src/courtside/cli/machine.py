"""What the command line settles with the machine before anything heavy is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO


class LossyStream:
    """A text stream that drops what nobody can read any more.

    A closed pipe (`| head`) or terminal must not end a run, and neither must a character that the
    locale's encoding does not have.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # Typer would write to it directly where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self._stream, name)


def tolerate_closed_output() -> None:
    """Make standard output and error lossy, and open those that the process came without."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise a file of the run would get this number, and whatever is printed.
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        setattr(sys, name, LossyStream(stream))


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's idle threads sleep sooner; without effect once torch is loaded.

    A thread that spins keeps a core from the one that it waits for, as soon as other processes
    need the cores, too. docs/troubleshooting.md has the measurements behind the number.
    """
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        environment["GOMP_SPINCOUNT"] = "10000"
