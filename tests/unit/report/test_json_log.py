"""Events as JSON lines: one object a line, with step, phase and rank."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe

from courtside.api import train
from courtside.errors import RunError, UserError
from courtside.recipe.run import RunConfig
from courtside.report.console import PlainConsole
from courtside.report.json_log import JsonLinesHandler, log_events
from courtside.report.observers import open_observers

JSON = {"log_format": "json"}
TRAIN = {"steps": 2, "prompts_per_step": 2}


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_writes_events_in_place_of_its_console(
    tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(tiny_folder, tiny_folder, train=TRAIN, run=JSON)
    folder = train(recipe, tmp_path / "run")
    out, err = capfd.readouterr()
    events = read(err)
    assert out == ""
    assert all({"time", "level", "event", "message", "run", "rank"} <= e.keys() for e in events)
    assert {e["rank"] for e in events} == {0} and {e["run"] for e in events} == {str(folder.path)}
    steps = [e for e in events if e["event"] == "step"]
    assert [e["metrics"] for e in steps] == folder.metrics()
    updates = [e for e in events if e["event"] == "phase_started" and e["phase"] == "update"]
    assert [e["step"] for e in updates] == [0, 1]
    scores = {(e["policy"], e["split"], e["score"]) for e in events if e["event"] == "evaluation"}
    assert scores == {(e.policy, e.split, e.mean_score) for e in folder.evaluations()}
    assert [e["event"] for e in events][-1] == "run_ended"


def test_a_file_gets_events_in_addition_to_the_console(tiny_folder: Path, tmp_path: Path) -> None:
    stream, log = io.StringIO(), tmp_path / "log.jsonl"
    recipe = small_recipe(tiny_folder, tiny_folder, train=TRAIN, run={"log_file": str(log)})
    train(recipe, tmp_path / "run", console=PlainConsole(stream))
    assert "step 2/2" in stream.getvalue()
    first = read(log.read_text())
    assert [e["step"] for e in first if e["event"] == "step"] == [0, 1]
    train(recipe, tmp_path / "run", console=PlainConsole(stream))
    assert read(log.read_text())[: len(first)] == first, "a second start appends"


def test_warnings_and_failures_are_events(capfd: pytest.CaptureFixture[str]) -> None:
    config, handlers = RunConfig(log_format="json"), list(logging.getLogger().handlers)
    level = logging.getLogger("courtside").level
    with (
        pytest.raises(RunError),
        open_observers(config, PlainConsole(sys.stderr), Path("r"), rank=3),
    ):
        warnings.warn("look out", stacklevel=1)
        logging.getLogger("lib").warning("%s things", 2)
        logging.getLogger("lib").info("chatter")
        raise RunError("out of paper")
    with pytest.raises(ZeroDivisionError), log_events(config, Path("r"), 0):
        raise ZeroDivisionError("by zero")
    events = read(capfd.readouterr().err)
    by_event = {e["event"]: e for e in events}
    assert "look out" in by_event["py.warnings"]["message"]
    assert (by_event["lib"]["message"], by_event["lib"]["level"]) == ("2 things", "warning")
    failed, bug = [e for e in events if e["event"] == "run_failed"]
    assert (failed["message"], failed["rank"], failed["level"]) == ("out of paper", 3, "error")
    assert "traceback" not in failed and "ZeroDivisionError" in bug["traceback"]
    assert "chatter" not in str(events)
    assert (
        logging.getLogger().handlers == handlers and logging.getLogger("courtside").level == level
    )


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    config = RunConfig(log_file=tmp_path / "log")
    for rank in (0, 1):
        with log_events(config, tmp_path, rank) as console:
            console.print_line(f"hello from {rank}")
    for name, rank in (("log", 0), ("log.rank-1", 1)):
        first = read((tmp_path / name).read_text())[0]
        assert (first["message"], first["rank"]) == (f"hello from {rank}", rank)


def test_values_that_json_does_not_have_become_null_or_text() -> None:
    stream = io.StringIO()
    record = logging.makeLogRecord({"msg": "%d", "args": ("x",), "name": "n"})
    handler = JsonLinesHandler(stream, {})
    handler.handle(record)  # arguments that do not fit: dropped
    handler.handle(logging.makeLogRecord({"msg": "m", "value": float("nan"), "path": Path("a")}))
    (event,) = read(stream.getvalue())
    assert event["value"] is None and event["path"] == "a"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_ends_no_run() -> None:
    JsonLinesHandler(FullDisk(), {}).handle(logging.makeLogRecord({"msg": "m"}))
    closed = io.StringIO()
    closed.close()
    JsonLinesHandler(closed, {}).handle(logging.makeLogRecord({"msg": "m"}))


def test_a_file_that_cannot_be_opened_is_an_error_before_the_run(
    tiny_folder: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(
        tiny_folder, tiny_folder, run={"log_file": str(tmp_path / "none" / "log")}
    )
    with pytest.raises(UserError, match=r"run.log_file = .*No such file.*Give a file in a folder"):
        train(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_ranks_write_lines_that_do_not_mix(tiny_folder: Path, tmp_path: Path) -> None:
    from courtside.report.folder import toml
    from courtside.report.folder.locking import dump_recipe

    file = tmp_path / "recipe.toml"
    recipe = small_recipe(tiny_folder, tiny_folder, train=TRAIN, run=JSON)
    file.write_text(toml.dumps(dump_recipe(recipe)))
    command = [sys.executable, "-m", "courtside", "train", str(file), "--run",
               str(tmp_path / "run"), "--nproc", "2"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert {e["rank"] for e in events} == {0, 1}
    assert [e["step"] for e in events if e["event"] == "step"] == [0, 1]
    assert [e["rank"] for e in events if e["event"] == "run_ended"].count(1) == 1
    assert "Report:" in done.stdout
