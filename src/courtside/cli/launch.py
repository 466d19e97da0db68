"""`courtside train --nproc N`: one process for each rank on this machine.

What torchrun does, and a word on the rank that ended the others. Ranks find each other over
loopback. A rank that fails has the time of `GRACE_SECONDS` to end the others in good order.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from courtside.engines.cpu.threads import usable_cores
from courtside.errors import RunError

GRACE_SECONDS = 30.0
"""Between the end of one rank and SIGTERM for the others, and from there to SIGKILL."""
POLL_SECONDS = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def launch(command: Sequence[str], num_processes: int) -> int:
    """Run the command as `num_processes` ranks; returns the exit code."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    # Otherwise every rank would start as many threads as there are cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_processes)))
    size = str(num_processes)
    ranks = [
        subprocess.Popen(
            command,
            env=environment
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        )
        for rank in range(num_processes)
    ]
    try:
        with _forward_signals(ranks):
            return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended; the exit code of the first that failed, 0 if none did."""
    failed: tuple[int, int] | None = None
    failed_at = 0.0
    is_terminated = False
    while any(process.poll() is None for process in ranks):
        if failed is None:
            failed = _find_failed(ranks)
            failed_at = time.monotonic()
        waited = time.monotonic() - failed_at
        if failed is not None and waited > GRACE_SECONDS and not is_terminated:
            is_terminated = True
            for process in ranks:
                process.terminate()
        if failed is not None and waited > 2 * GRACE_SECONDS:
            break  # the caller kills what is left
        time.sleep(POLL_SECONDS)
    failed = failed or _find_failed(ranks)
    if failed is None:
        return 0
    rank, code = failed
    if code < 0:
        raise RunError(
            f"rank {rank} was ended by {signal.Signals(-code).name}"
            f"{' (out of memory?)' if code == -signal.SIGKILL else ''}, and the other ranks with "
            "it. The same command goes on from the last checkpoint"
        )
    return code


def _find_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """Rank and exit code of one that failed; one that was killed explains the others."""
    codes = [(rank, code) for rank, process in enumerate(ranks) if (code := process.poll())]
    return min(codes, key=lambda pair: (pair[1] > 0, pair[0])) if codes else None


@contextmanager
def _forward_signals(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """SIGTERM and SIGHUP go to all ranks. A terminal sends Ctrl-C to them itself."""

    def forward(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
