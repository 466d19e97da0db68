"""benchmarks/gpu.sh, with an interpreter in place of Python that prints its arguments."""

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


def run_script(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def parse_outcomes(output: str) -> dict[str, str]:
    """Name and outcome of each row of the last table."""
    lines = output[output.rindex("|---|---|---|") :].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: outcome for name, _, outcome in cells}


def test_goes_on_after_a_failure_and_says_so(environment: dict[str, str]) -> None:
    result = run_script(environment | {"BROKEN": "sampling", "NO_TRL": "1"})
    assert result.returncode == 1
    expected = dict.fromkeys(ALL, "done")
    expected |= {
        "sampling": "FAILED with 3", "opd_step_gpu": "left out: TRL cannot be imported",
    }  # fmt: skip
    assert parse_outcomes(result.stdout) == expected
    assert "ran benchmarks/opd_step_gpu.py" not in result.stdout


def test_every_benchmark_exists_and_writes_to_out(environment: dict[str, str]) -> None:
    result = run_script(environment)
    assert result.returncode == 0
    for name in ALL[1:]:
        assert (SCRIPT.parent / f"{name}.py").is_file()
        (command,) = [
            line
            for line in result.stdout.splitlines()
            if line.startswith(f"ran benchmarks/{name}.")
        ]
        assert f"--out {environment['OUT']}/{name}.json" in command


def test_only_some_and_arguments_for_one(environment: dict[str, str]) -> None:
    result = run_script(environment, "--only", "growth", "tests")
    assert list(parse_outcomes(result.stdout)) == ["growth", "tests"]
    result = run_script(environment, "--only", "growth", "--", "--series", "hints")
    assert "growth.json --series hints\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only"], "one or more of tests"),
        (["--only", "nothing"], "--only nothing: there are tests"),
        (["--only", "growth", "tests", "--", "--x"], "are for one benchmark"),
        (["--shapes", "x"], "--shapes: not known here"),
    ],
)
def test_unknown_arguments_are_refused(
    environment: dict[str, str], arguments: list[str], message: str
) -> None:
    result = run_script(environment, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""
