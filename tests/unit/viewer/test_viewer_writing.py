"""What the viewer writes into a hints file, and what it refuses to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from unit.report.played import hinted, make_episode
from unit.viewer.viewed_runs import (
    FIRST,
    SEND,
    delete,
    get,
    lines,
    opened,
    put_hint,
    recorded,
    start_run,
    store,
    write_run,
)

from courtside.report.folder.folder import RunFolder
from courtside.report.folder.hints_file import parse_hints
from courtside.types import Hint


def test_a_hint_is_written_edited_and_removed(client: TestClient, folder: RunFolder) -> None:
    answer = put_hint(client, f"{FIRST}/hints/1", " Read the\nlist. ").json()
    assert answer["user_hint"] == {"text": "Read the list.", "reason": ""}
    assert answer["hints_file"]["count"] == 1
    assert lines(folder) == [{"trajectory": "0-0", "turn": 1, "text": "Read the list."}]
    assert get(client, FIRST)["turns"][1]["user_hint"]["text"] == "Read the list."
    assert get(client, "/api/batches/0")["trajectories"][0]["user_hints"] == 1
    assert [step["user_hints"] for step in get(client, "/api/run")["batches"]] == [1, 0]

    put_hint(client, f"{FIRST}/hints/1", "Read it again.")
    assert get(client, FIRST)["turns"][1]["user_hint"]["text"] == "Read it again."
    before = (folder.path / "hints.jsonl").read_bytes()
    put_hint(client, f"{FIRST}/hints/1", "Read it  again.")
    assert (folder.path / "hints.jsonl").read_bytes() == before

    put_hint(client, f"{FIRST}/hints/3", "Another.")
    assert delete(client, f"{FIRST}/hints/1").json()["hints_file"]["count"] == 1
    assert lines(folder) == [{"trajectory": "0-0", "turn": 3, "text": "Another."}]
    assert delete(client, f"{FIRST}/hints/1").status_code == 200


def test_an_edit_keeps_the_reason(client: TestClient, folder: RunFolder) -> None:
    row = {"trajectory": "0-0", "turn": 1, "text": "a", "reason": "by habit"}
    (folder.path / "hints.jsonl").write_text(json.dumps(row) + "\n")
    assert get(client, FIRST)["turns"][1]["user_hint"] == {"text": "a", "reason": "by habit"}
    put_hint(client, f"{FIRST}/hints/1", "b")
    assert lines(folder)[-1] == row | {"text": "b"}


def test_another_file_for_the_hints(folder: RunFolder, tmp_path: Path) -> None:
    client = opened(folder, tmp_path / "mine.jsonl")
    assert put_hint(client, f"{FIRST}/hints/1", "a").status_code == 200
    assert not (folder.path / "hints.jsonl").exists() and (tmp_path / "mine.jsonl").exists()


def test_hints_of_other_programs_are_rendered_and_stay(
    client: TestClient, folder: RunFolder
) -> None:
    put_hint(client, f"{FIRST}/hints/1", "mine")
    version = get(client, "/api/run")["hints_file"]["version"]
    with (folder.path / "hints.jsonl").open("a") as file:
        file.write('{"trajectory": "0-0",  "turn": 3, "text": "theirs"}\n')
        file.write('{"trajectory": "elsewhere", "turn": 1, "text": "of another run"}\n')
    hints_file = get(client, "/api/run")["hints_file"]
    assert hints_file["count"] == 3 and hints_file["version"] != version
    assert get(client, FIRST)["turns"][3]["user_hint"]["text"] == "theirs"
    delete(client, f"{FIRST}/hints/1")
    assert [line["text"] for line in lines(folder)] == ["theirs", "of another run"]
    assert b'"0-0",  "turn"' in (folder.path / "hints.jsonl").read_bytes()


def test_a_recorded_conversation_is_named_by_its_task(tmp_path: Path) -> None:
    episode = hinted(make_episode("a-7"))
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, [recorded(episode, "000000-000-0")])
        store(folder, 1, [recorded(episode, "000001-004-0")])
    client = opened(folder)
    put_hint(client, "/api/batches/0/trajectories/000000-000-0/hints/1", "Look.")
    assert [line["trajectory"] for line in lines(folder)] == ["task-7"]
    later = get(client, "/api/batches/1/trajectories/000001-004-0")
    assert later["turns"][1]["user_hint"]["text"] == "Look."
    assert [step["user_hints"] for step in get(client, "/api/run")["batches"]] == [1, 1]


def test_ids_with_odd_characters(tmp_path: Path) -> None:
    id = "a/b c?#%/hints/1"
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, [recorded(hinted(make_episode("a-7")), id)])
    client = opened(folder)
    path = "/api/batches/0/trajectories/a%2Fb%20c%3F%23%25%2Fhints%2F1"
    assert get(client, path)["id"] == id
    assert put_hint(client, f"{path}/hints/3", "x").status_code == 200


Send = Callable[[TestClient], Any]


@pytest.mark.parametrize(
    ("send", "status", "message"),
    [
        (lambda c: put_hint(c, f"{FIRST}/hints/1", " \n\x00"), 422, "empty. Write a few words"),
        (
            lambda c: put_hint(c, f"{FIRST}/hints/1", "x" * 1001),
            422,
            "1,001 characters, and the reader",
        ),
        (
            lambda c: put_hint(c, f"{FIRST}/hints/0", "x"),
            422,
            "the assistant's are 1, 3, 5, 7, 9, 11",
        ),
        (
            lambda c: put_hint(c, f"{FIRST}/hints/99", "x"),
            422,
            "turn 99 of 0-0 is no assistant turn",
        ),
        (
            lambda c: put_hint(c, f"{FIRST}/hints/-1", "x"),
            422,
            "turn -1 of 0-0 is no assistant turn",
        ),
        (lambda c: put_hint(c, f"{FIRST}/hints/one", "x"), 422, "path.turn: "),
        (lambda c: delete(c, f"{FIRST}/hints/0"), 422, "is no assistant turn"),
        (
            lambda c: put_hint(c, "/api/batches/0/trajectories/x/hints/1", "x"),
            404,
            "no trajectory 'x'",
        ),
        (lambda c: put_hint(c, "/api/batches/7/trajectories/0-0/hints/1", "x"), 404, "of step 7"),
        (lambda c: c.put(f"{FIRST}/hints/1", json={"words": "x"}, headers=SEND), 422, "text"),
        (lambda c: c.put(f"{FIRST}/hints/1", json={"text": 5}, headers=SEND), 422, "body.text"),
        (lambda c: c.post(FIRST, json={}, headers=SEND), 405, "is not answered"),
    ],
)
def test_what_is_refused(
    client: TestClient, folder: RunFolder, send: Send, status: int, message: str
) -> None:
    answer = send(client)
    assert answer.status_code == status and message in answer.json()["detail"], answer.text
    assert not (folder.path / "hints.jsonl").exists()


def test_the_limit_is_that_of_the_recipes_own_reader(tmp_path: Path) -> None:
    person = {"kind": "human", "path": str(tmp_path / "h.jsonl"), "max_chars": 20, "max_hints": 2}
    several = {"kind": "combined", "readers": [{"kind": "rules"}, person]}
    for number, reader in enumerate((person, several)):
        folder = write_run(tmp_path / f"run-{number}", steps=1, reader=reader)
        client = opened(folder)
        hints_file = get(client, "/api/run")["hints_file"]
        assert (hints_file["max_chars"], hints_file["max_hints"]) == (20, 2)
        assert put_hint(client, f"{FIRST}/hints/1", "x" * 21).status_code == 422
        assert put_hint(client, f"{FIRST}/hints/1", "x" * 20 + "\n").status_code == 200


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("nonsense\n", ":2: not valid JSON"),
        ('{"turn": 1}\n', ":2: `trajectory` must be a string"),
        ('{"trajectory": "0-0", "tu', "its last line is not finished"),
    ],
)
def test_a_broken_hints_file(
    client: TestClient, folder: RunFolder, suffix: str, message: str
) -> None:
    put_hint(client, f"{FIRST}/hints/1", "mine")
    path = folder.path / "hints.jsonl"
    whole = path.read_text()
    path.write_text(whole + suffix)
    hints_file = get(client, "/api/run")["hints_file"]
    assert message in hints_file["problem"] and hints_file["count"] == 1
    assert get(client, FIRST)["turns"][1]["user_hint"]["text"] == "mine"
    for send in (lambda: put_hint(client, f"{FIRST}/hints/3", "x"),
                 lambda: delete(client, f"{FIRST}/hints/1")):  # fmt: skip
        answer = send()
        assert answer.status_code == 409 and message in answer.json()["detail"]
    assert path.read_text() == whole + suffix
    path.write_text(whole)
    assert get(client, "/api/run")["hints_file"]["problem"] is None
    assert put_hint(client, f"{FIRST}/hints/3", "x").status_code == 200


def test_a_pipe_in_the_place_of_the_hints_file(client: TestClient, folder: RunFolder) -> None:
    os.mkfifo(folder.path / "hints.jsonl")
    assert "it is a pipe" in get(client, "/api/run")["hints_file"]["problem"]
    answer = put_hint(client, f"{FIRST}/hints/1", "x")
    assert answer.status_code == 409 and "it is a pipe" in answer.json()["detail"]


def test_a_file_that_cannot_be_written(folder: RunFolder, tmp_path: Path) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    client = opened(folder, place / "hints.jsonl")
    place.rmdir()
    answer = put_hint(client, f"{FIRST}/hints/1", "x")
    assert answer.status_code == 422 and "could not be written (No such" in answer.json()["detail"]


def test_the_hint_is_a_persons(client: TestClient, folder: RunFolder) -> None:
    put_hint(client, f"{FIRST}/hints/1", "Größe “prüfen” 🙂")
    hints, skipped = parse_hints((folder.path / "hints.jsonl").read_bytes(), name="f")
    assert hints == (Hint(trajectory="0-0", turn=1, text="Größe “prüfen” 🙂", source="human"),)
    assert not skipped
