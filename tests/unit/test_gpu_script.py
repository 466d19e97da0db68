"""benchmarks/gpu.sh, with an interpreter in place of Python that notes what it was asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
ALL = ["tests", "head_gpu", "opd_step_gpu", "sampling", "hint_scoring", "long_episode", "growth",
       "prefix_sharing", "compiled"]  # fmt: skip
INTERPRETER = """#!/usr/bin/env bash
[[ $1 == -c ]] && exit "${NO_TRL:-0}"
echo "ran $*"
[[ $* != *"/${BROKEN:-none}.py"* ]] || exit 3
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    python = tmp_path / "python"
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    return {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")}


def gpu_sh(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False
    )


def outcomes(output: str) -> dict[str, str]:
    """Of the last table."""
    lines = output[output.rindex("|---|---|---|") :].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: outcome for name, _, outcome in cells}


def test_goes_on_after_a_failure_and_says_so(environment: dict[str, str]) -> None:
    found = gpu_sh(environment | {"BROKEN": "sampling", "NO_TRL": "1"})
    assert found.returncode == 1
    expected = dict.fromkeys(ALL, "done")
    expected |= {
        "sampling": "FAILED with 3", "opd_step_gpu": "left out: TRL cannot be imported",
    }  # fmt: skip
    assert outcomes(found.stdout) == expected
    assert "ran benchmarks/opd_step_gpu.py" not in found.stdout


def test_every_benchmark_exists_and_writes_to_out(environment: dict[str, str]) -> None:
    found = gpu_sh(environment)
    assert found.returncode == 0
    for name in ALL[1:]:
        assert (SCRIPT.parent / f"{name}.py").is_file()
        (ran,) = [
            line for line in found.stdout.splitlines() if line.startswith(f"ran benchmarks/{name}.")
        ]
        assert f"--out {environment['OUT']}/{name}.json" in ran


def test_only_some_and_arguments_for_one(environment: dict[str, str]) -> None:
    found = gpu_sh(environment, "--only", "growth", "tests")
    assert list(outcomes(found.stdout)) == ["growth", "tests"]
    found = gpu_sh(environment, "--only", "growth", "--", "--series", "hints")
    assert "growth.json --series hints\n" in found.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only"], "one or more of tests"),
        (["--only", "nothing"], "--only nothing: there are tests"),
        (["--only", "growth", "tests", "--", "--x"], "are for one benchmark"),
        (["--shapes", "x"], "--shapes: not known here"),
    ],
)
def test_unknown_words_are_refused(
    environment: dict[str, str], words: list[str], said: str
) -> None:
    found = gpu_sh(environment, *words)
    assert found.returncode == 2
    assert said in found.stderr
    assert found.stdout == ""
