"""A training process, two vLLM servers and a network between them, all of which fail in turn.

benchmarks/chaos.py does the same for half an hour by a schedule that is drawn.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.vllm_server import PYTHON

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import chaos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make test` sets it up"),
]
STEP_SECONDS = 180


def wait_for_steps(run: Any, more: int) -> None:
    num_steps = run.count_steps() + more
    end = time.monotonic() + STEP_SECONDS
    while run.count_steps() < num_steps:
        assert time.monotonic() < end, run.run.read_log()[-3000:]
        run.watch_run()
        time.sleep(0.1)


def test_each_trajectory_is_trained_once_whatever_fails(tmp_path: Path) -> None:
    # Ahead of the update a check of the weights meets samples, which a vLLM with adapters does not
    # survive on a CPU: docs/serving.md.
    chaotic = chaos.set_up(tmp_path, PYTHON, seed=0, staleness=0, serves_teacher=False)
    with chaotic as run:
        (first, second), (to_first, _) = run.servers, run.proxies
        run.start_run()
        wait_for_steps(run, 2)
        first.kill()
        first.start()  # with the weights of its start; the other one samples meanwhile
        wait_for_steps(run, 2)
        first.wait_until_ready(STEP_SECONDS)  # a run does not begin without one of its servers
        run.signal_run(signal.SIGKILL)
        run.run.wait(30)
        run.watch_run()
        wait_for_steps(run, 2)
        second.signal(signal.SIGSTOP)
        wait_for_steps(run, 2)
        second.signal(signal.SIGCONT)
        to_first.set_mode("cut")
        wait_for_steps(run, 2)
        to_first.set_mode("pass")
        run.stop_run()
        assert run.list_folders() == [], "and of the process that was killed"
        account = run.account()
    assert run.problems == [] and account.problems == []
    assert run.resumes[0] == 0 < run.resumes[1] and len(run.resumes) == 2
    assert [end["code"] for end in run.ends] == [-signal.SIGKILL, 143]
    assert account.num_steps >= 8 and account.num_trajectories == 12 * account.num_steps
    assert account.num_intervals >= 2 and set(account.num_by_age) == {0}
