"""What the viewer shows of a run, also of one that goes on."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from unit.report.made_up import make_trajectory
from unit.report.played import hinted, make_episode, make_hinted_batch
from unit.viewer.viewed_runs import (
    FIRST,
    HOSTILE,
    get,
    hostile,
    opened,
    start_run,
    store,
)

from courtside.report.folder.folder import RunFolder
from courtside.types import Event, Scored, VersionSpan


def test_the_run_and_its_steps(client: TestClient, folder: RunFolder) -> None:
    run = get(client, "/api/run")
    assert run["name"] == "first" and "toolbox" in run["summary"]
    counts = {"trajectories": 6, "errors": 5, "failed": 5, "hints": 5, "user_hints": 0}
    assert run["batches"] == [
        {"key": str(step), "title": f"step {step}", "held_out": False, **counts} for step in (0, 1)
    ]
    assert run["start"] == "1"
    hints_file = run["hints_file"]
    assert hints_file["path"] == str(folder.path / "hints.jsonl")
    assert (hints_file["count"], hints_file["problem"], hints_file["max_chars"]) == (0, None, 1000)
    tree = tomllib.loads(hints_file["recipe"])
    assert tree["tasks"] == {"kind": "trajectories", "path": str(folder.path), "select": "hinted"}
    assert tree["reader"] == {"kind": "human", "path": hints_file["path"]}


def test_the_list_of_a_step(client: TestClient, folder: RunFolder) -> None:
    rows = get(client, "/api/batches/1")["trajectories"]
    assert [row["id"] for row in rows] == [f"1-{i}" for i in range(6)]
    stored = {record.trajectory.id: record for record in folder.trajectories(1)}
    for row in rows:
        record = stored[row["id"]]
        assert row["tokens"] == record.trajectory.num_completion_tokens and row["hints"] == len(
            record.hints
        )
        assistant_turns = [turn for turn in record.trajectory.turns if turn.role == "assistant"]
        assert row["turns"] == len(assistant_turns)
        assert row["errors"] == sum(bool(turn.events) for turn in assistant_turns)
    assert rows[0]["prompt"] == "What is the weather in Oslo?"
    assert rows[0]["grade"] == {
        "score": 0.5, "passed": False, "feedback": "2 of 4 requests were solved.", "error": None,
    }  # fmt: skip


def test_a_trajectory_turn_by_turn(client: TestClient, folder: RunFolder) -> None:
    trajectory = get(client, FIRST)
    stored = folder.trajectories(0)[0]
    turns = trajectory["turns"]
    assert [(t["number"], t["role"]) for t in turns] == [
        (number, turn.role) for number, turn in enumerate(stored.trajectory.turns)
    ]
    assert [m["role"] for m in turns[0]["messages"]] == ["system", "user"]
    wrong = turns[1]
    assert wrong["text"] == stored.trajectory.turns[1].text
    assert wrong["events"] == [{"kind": "tool_not_found", "message": "Tool not found: weather"}]
    [hint] = wrong["hints"]
    hint_outcomes = stored.hints[0]
    assert (hint["text"], hint["source"]) == (hint_outcomes.hint.text, "rules:tool_not_found")
    assert hint["shift"] == hint_outcomes.shift and hint["drop_reason"] is None
    assert turns[3]["hints"] == [] and all(turn["user_hint"] is None for turn in turns)


def test_the_gap_is_the_mean_over_what_both_spoke_of(client: TestClient, folder: RunFolder) -> None:
    stored = folder.trajectories(0)[0]
    assert stored.student_logp is not None
    pairs = zip(stored.teacher_logp_by_token, stored.student_logp, stored.trajectory.turn_of,
                strict=True)  # fmt: skip
    gaps = [t - s for t, s, turn in pairs if turn == 1 and t is not None]
    turns = get(client, FIRST)["turns"]
    assert math.isclose(turns[1]["gap"], sum(gaps) / len(gaps), rel_tol=1e-6)
    assert turns[3]["gap"] is None and turns[0]["gap"] is None


def test_versions_are_there_where_they_differ(tmp_path: Path) -> None:
    """In one turn, or between turns; equal ones say nothing."""
    with start_run(tmp_path / "run") as folder:
        batch = make_hinted_batch(0)
        for index, second in ((0, 2), (1, 1)):
            turns = list(batch[index].trajectory.turns)
            for turn in (1, 3):
                size = len(turns[turn].token_ids)
                spans = (VersionSpan(0, size - 1, 1), VersionSpan(size - 1, size, second))
                turns[turn] = replace(turns[turn], policy_versions=spans)
            for other in range(5, len(turns), 2):
                size = len(turns[other].token_ids)
                span = VersionSpan(0, size, 1)
                turns[other] = replace(turns[other], policy_versions=(span,))
            trajectory = replace(batch[index].trajectory, turns=tuple(turns))
            batch[index] = replace(batch[index], trajectory=trajectory)
        store(folder, 0, batch)
    client = opened(RunFolder.read(tmp_path / "run"))
    turns = get(client, FIRST)["turns"]
    end = turns[1]["versions"][0]["end"]
    assert turns[1]["versions"] == [
        {"start": 0, "end": end, "version": 1}, {"start": end, "end": end + 1, "version": 2},
    ]  # fmt: skip
    assert turns[0]["versions"] == [] and len(turns[5]["versions"]) == 1
    same = get(client, FIRST.replace("0-0", "0-1"))["turns"]
    assert [turn["versions"] for turn in same] == [[]] * len(same)


def test_why_a_hint_was_dropped(client: TestClient) -> None:
    turns = get(client, "/api/batches/0/trajectories/0-3")["turns"]
    [hint] = [hint for turn in turns for hint in turn["hints"]]
    assert hint["drop_reason"] == "shift" and "hints.min_shift" in hint["drop_explanation"]


def test_search_covers_every_turn(client: TestClient) -> None:
    def search(query: str) -> list[str]:
        return get(client, f"/api/batches/0/search?query={query}")["ids"]

    assert search("oslo WEATHER") == [f"0-{i}" for i in range(6)]
    assert search("not found: calculator") == ["0-1", "0-3"]
    assert search("zebra") == [] and search("0-4") == ["0-4"]


def test_a_step_without_tokens_hints_or_turns(tmp_path: Path) -> None:
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, [])
        plain = Scored(trajectory=make_trajectory("x", 1), target=None)
        bare = Scored(trajectory=replace(make_trajectory("y", 1), turns=()), target=None)
        store(folder, 3, [plain, bare])
    client = opened(folder)
    assert [step["trajectories"] for step in get(client, "/api/run")["batches"]] == [0, 2]
    assert get(client, "/api/batches/0")["trajectories"] == []
    rows = get(client, "/api/batches/3")["trajectories"]
    assert [(row["tokens"], row["turns"]) for row in rows] == [(6, 1), (0, 0)]
    assert get(client, "/api/batches/3/trajectories/y")["turns"] == []


def test_a_run_without_trajectories(tmp_path: Path) -> None:
    start_run(tmp_path / "run").close()
    assert get(opened(RunFolder.read(tmp_path / "run")), "/api/run")["batches"] == []


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    with start_run(tmp_path / "run") as folder:
        client = opened(RunFolder.read(folder.path))
        assert get(client, "/api/run")["batches"] == []
        store(folder, 0)
        assert [s["key"] for s in get(client, "/api/run")["batches"]] == ["0"]
        assert len(get(client, "/api/batches/0")["trajectories"]) == 6
        get(client, FIRST)
        # A resumed run computes a step again.
        folder.rewind(0)
        assert get(client, "/api/run")["batches"] == []
        assert client.get(FIRST).status_code == 404
        store(folder, 0, make_hinted_batch(0)[1:])
        assert len(get(client, "/api/batches/0")["trajectories"]) == 5
        assert client.get(FIRST).status_code == 404
        assert get(client, "/api/batches/0/trajectories/0-1")["id"] == "0-1"


def test_files_are_read_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("/api/run", "/api/batches/0", "/api/batches/0/search?query=a", FIRST)
    before = [get(client, path) for path in paths]

    def fail(*_: object) -> None:
        raise AssertionError("a file that has not changed is read again")

    monkeypatch.setattr("courtside.report.folder.outlines.read_table", fail)
    assert [get(client, path) for path in paths] == before


def test_a_broken_step_is_told_and_the_others_are_there(
    client: TestClient, folder: RunFolder
) -> None:
    folder.stored_file(1).write_bytes(b"nothing")
    first, second = get(client, "/api/run")["batches"]
    assert first["trajectories"] == 6 and "cannot be read as Parquet" in second["problem"]
    assert client.get("/api/batches/1").status_code == 404


def test_texts_arrive_as_they_are(tmp_path: Path) -> None:
    with start_run(tmp_path / "run") as folder:
        odd = hostile(hinted(make_episode("0-0")))
        turn = odd.trajectory.turns[3]
        half = Event(kind="odd", details={"message": "half \ud83d of a pair"})
        turns = (*odd.trajectory.turns[:3], replace(turn, events=(half,)),
                 *odd.trajectory.turns[4:])  # fmt: skip
        store(folder, 0, [replace(odd, trajectory=replace(odd.trajectory, turns=turns))])
    client = opened(folder)
    answer = client.get(FIRST)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["prompt"] == HOSTILE
    assert body["turns"][3]["events"][0]["message"] == "half \ud83d of a pair"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/batches/9", "no trajectories of step 9; stored are 2 steps, 0 to 1"),
        ("/api/batches/9/search?query=a", "no trajectories of step 9"),
        ("/api/batches/9/trajectories/0-0", "no trajectories of step 9"),
        ("/api/batches/0/trajectories/nope", "step 0 has no trajectory 'nope'"),
        pytest.param(f"/api/batches/{'9' * 5000}", "is neither a stored step", id="5000 digits"),
        pytest.param(f"/api/batches/{'9' * 300}", "is neither a stored step", id="300 digits"),
        ("/api/batches/%D9%A3", "is neither a stored step"),  # a digit of another script
        ("/api/batches/%00", "is neither a stored step"),
        ("/api/batches/%FF", "is neither a stored step"),
        ("/static/app.py", "there is no file app.py"),
        ("/static/..%2Fapp.py", "Not Found"),
        ("/docs", "Not Found"),
    ],
)
def test_what_is_not_there(client: TestClient, path: str, message: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and message in answer.json()["detail"]
