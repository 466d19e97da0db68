"""Which batch the viewer opens on, unreadable files, and held-out answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from unit.report.made_up import make_evaluation, make_trajectory
from unit.report.played import make_episode, make_episode_evaluation, make_hinted_batch
from unit.viewer.viewed_runs import delete, get, opened, put_hint, start_run, store

from courtside.report.folder.folder import RunFolder
from courtside.types import Scored

CLEAN = [Scored(trajectory=make_episode(f"9-{i}", wrong=()), target=None) for i in range(3)]


def run_of(path: Path, *batches: list[Scored] | None) -> RunFolder:
    with start_run(path) as folder:
        for step, batch in enumerate(batches):
            store(folder, step, batch)
    return RunFolder.read(path)


def start_of(folder: RunFolder) -> str | None:
    start: str | None = get(opened(folder), "/api/run")["start"]
    return start


def test_it_opens_on_the_newest_step_with_something_wrong(tmp_path: Path) -> None:
    assert start_of(run_of(tmp_path / "a", None, None, CLEAN, CLEAN)) == "1"
    assert start_of(run_of(tmp_path / "b", CLEAN, CLEAN)) == "1"
    assert start_of(run_of(tmp_path / "c")) is None


def test_a_failed_answer_without_events_is_wrong_too(tmp_path: Path) -> None:
    failed = [Scored(trajectory=make_trajectory("0-0", 1, passed=False), target=None)]
    passed = [Scored(trajectory=make_trajectory("1-0", 1), target=None)]
    assert start_of(run_of(tmp_path / "run", failed, passed)) == "0"


@pytest.mark.parametrize("content", [b"", b"PAR1", b"nothing"])
def test_it_opens_on_the_newest_step_that_can_be_read(tmp_path: Path, content: bytes) -> None:
    folder = run_of(tmp_path / "run", None, None, None)
    folder.stored_file(2).write_bytes(content)
    run = get(opened(folder), "/api/run")
    assert run["start"] == "1"
    assert "cannot be read as Parquet" in run["batches"][2]["problem"]
    for step in (0, 1):
        folder.stored_file(step).write_bytes(content)
    assert start_of(folder) is None


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


ODD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (os.mkfifo, "it is a pipe, not a regular file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "a link to itself": (make_loop, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize(("make", "message"), ODD_FILES.values(), ids=ODD_FILES)
def test_what_is_no_file_is_told_and_the_other_steps_are_there(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    folder = run_of(tmp_path / "run", None, None)
    path = folder.stored_file(1)
    path.unlink()
    make(path)
    client = opened(folder)
    run = get(client, "/api/run")
    assert run["start"] == "0" and message in run["batches"][1]["problem"]
    answer = client.get("/api/batches/1")
    assert answer.status_code == 404 and message in answer.json()["detail"]


# ── held-out answers ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def evaluated(tmp_path: Path) -> RunFolder:
    with start_run(tmp_path / "run") as folder:
        episodes = [make_episode(f"student-0-{i}", wrong=(1,) if i else ()) for i in range(4)]
        folder.record_evaluation(make_episode_evaluation(0, 0.3), episodes)
        suite = make_episode_evaluation(0, 0.5, policy="student:a_b")
        folder.record_evaluation(suite, episodes[:2])
        folder.record_evaluation(replace(make_evaluation(0), split="validation"))  # not stored
        store(folder, 0)
    return RunFolder.read(folder.path)


KEY = "step-000000-student-test.parquet"
ODD = "step-000000-student.a_b-test.parquet"


def test_held_out_answers_are_listed_after_the_steps(evaluated: RunFolder) -> None:
    run = get(opened(evaluated), "/api/run")
    assert [(b["key"], b["held_out"]) for b in run["batches"]] == [
        ("0", False),
        (KEY, True),
        ("step-000000-student.a_b-test.parquet", True),
    ]
    held_out = run["batches"][1]
    assert held_out["title"] == "test after 0 steps"
    assert (held_out["trajectories"], held_out["errors"]) == (4, 3)
    assert run["start"] == "0"  # not an evaluation, though it has errors


def test_held_out_answers_can_be_read_and_searched(evaluated: RunFolder) -> None:
    client = opened(evaluated)
    rows = get(client, f"/api/batches/{KEY}")["trajectories"]
    assert [row["errors"] for row in rows] == [0, 1, 1, 1]
    episode = get(client, f"/api/batches/{KEY}/trajectories/student-0-1")
    assert episode["held_out"] and episode["batch"] == "test after 0 steps"
    assert episode["turns"][3]["events"][0]["kind"] == "tool_not_found"
    ids = get(client, f"/api/batches/{KEY}/search?query=calculator not found")["ids"]
    assert ids == ["student-0-1", "student-0-2", "student-0-3"]
    assert len(get(client, f"/api/batches/{ODD}")["trajectories"]) == 2


def test_no_hints_for_what_is_evaluated(evaluated: RunFolder) -> None:
    client = opened(evaluated)
    path = f"/api/batches/{KEY}/trajectories/student-0-1/hints/1"
    for answer in (put_hint(client, path, "x"), delete(client, path)):
        assert answer.status_code == 422
        assert "a hint would train on what is evaluated" in answer.json()["detail"]
    assert not (evaluated.path / "hints.jsonl").exists()


@pytest.mark.parametrize(
    "key", ["step-000009-student-test.parquet", "x", "-1", "..%2F..%2Frecipe.toml", "0x1", "²"]
)
def test_batches_that_are_not_there(evaluated: RunFolder, key: str) -> None:
    client: TestClient = opened(evaluated)
    assert client.get(f"/api/batches/{key}").status_code == 404


def test_a_step_that_is_computed_again(tmp_path: Path) -> None:
    with start_run(tmp_path / "run") as folder:
        store(folder, 0)
        folder.record_evaluation(make_episode_evaluation(1, 0.3), [make_episode("student-0")])
        client = opened(RunFolder.read(folder.path))
        assert len(get(client, "/api/run")["batches"]) == 2
        folder.rewind(0)
        assert get(client, "/api/run")["batches"] == []
        store(folder, 0, make_hinted_batch(0)[:2])
        assert len(get(client, "/api/batches/0")["trajectories"]) == 2
