"""The launcher of `--nproc`, with small programs in place of ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from courtside.cli import launch as launching
from courtside.cli.launch import launch
from courtside.errors import RunError
from courtside.ranks import was_launched


def run(program: str, num_ranks: int = 2) -> int:
    return launch([sys.executable, "-S", "-c", program], num_ranks)


def test_every_rank_gets_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR'"
    line = f"' '.join(os.environ[n] for n in ({names})) + '\\n'"
    program = f"import os; os.write(1, ({line}).encode())"  # in one piece
    assert run(program, 3) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{r} {r} 3 127.0.0.1" for r in range(3)]


def test_the_exit_code_is_that_of_the_rank_that_failed() -> None:
    assert run("import os, sys; sys.exit(7 * int(os.environ['RANK']))") == 7


def test_others_are_ended_after_a_rank_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.2)
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # as if it waited in native code
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 was ended by SIGKILL \(out of memory\?\)"):
        run(program)
    assert time.monotonic() - start < 20


def test_sigterm_reaches_every_rank_and_handlers_are_restored() -> None:
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "time.sleep(60)"
    )
    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert run(program) == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_is_a_rank_only_with_all_variables_of_a_launcher() -> None:
    """Some clusters set RANK and WORLD_SIZE for every job."""
    assert not was_launched({"RANK": "0", "WORLD_SIZE": "1"})
    assert was_launched({
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1",
    })  # fmt: skip
