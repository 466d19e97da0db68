"""What the command line settles with the machine before anything heavy is imported."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TextIO

CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a pipe or terminal whose reader has gone: nobody misses the output."""


NUM_LOOKS, LOOK_SECONDS = 5, 0.01
NO_OUTPUT = (
    "standard output is closed, and a command says there what it does and what came out. Send it "
    "to a file, or to /dev/null"
)


class LossyStream:
    """A text stream that drops what nobody can read any more.

    A closed pipe (`| head`) or terminal must not end a run, and neither must a character that the
    locale's encoding does not have. A full disk does not end a run either, but is told at its end.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: str | None = None
        """Why output that somebody wants was lost, e.g. "No space left on device"."""
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._remember(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._remember(error)

    def close(self) -> None:
        """Code of a run that closes standard output does not end the run's own lines."""
        self.flush()

    def _remember(self, error: OSError) -> None:
        if error.errno not in CLOSED:
            self.failure = error.strerror or str(error)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # Typer would write to it directly where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self._stream, name)


def tolerate_closed_output() -> bool:
    """Make standard output and error lossy, and open those that the process came without. Whether
    there is a standard output."""
    has_output = sys.stdout is not None
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # Otherwise a file of the run would get this number, and whatever is printed.
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        setattr(sys, name, LossyStream(stream))
    return has_output


def describe_lost_output() -> str | None:
    """Why what was printed is not complete; None: it is, or its reader has gone (`| head`)."""
    sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)
    if failure is None:
        return None
    return (
        f"standard output could not be written ({failure}), so what was printed is not complete. "
        "Make room, or send it elsewhere. The files of a run are complete"
    )


def limit_spinning(
    environment: MutableMapping[str, str] = os.environ, load: Path = Path("/proc/loadavg")
) -> None:
    """Let OpenMP's idle threads sleep at once where other processes compute, and sooner elsewhere;
    without effect once torch is loaded.

    A thread that spins keeps a core from the one that it waits for, as soon as other processes
    need the cores, too. docs/troubleshooting.md has the measurements behind the number.
    """
    if environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return
    if is_shared(load):
        environment["OMP_WAIT_POLICY"] = "passive"
    else:
        environment["GOMP_SPINCOUNT"] = "10000"


def is_shared(load: Path) -> bool:
    """Whether another process runs whenever one looks; False if unknown. `load`: Linux's
    `/proc/loadavg`, whose fourth field has the number of threads that run, this one included."""
    try:
        for look in range(NUM_LOOKS):
            time.sleep(LOOK_SECONDS if look else 0)
            if int(load.read_text().split()[3].partition("/")[0]) < 2:
                return False
    except (OSError, ValueError, IndexError):
        return False
    return True
