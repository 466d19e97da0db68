"""What the viewer's server answers, writes and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from unit.report.made_up import make_trajectory
from unit.report.played import hinted, make_episode, make_hinted_batch
from unit.viewer.viewed_runs import HOSTILE, hostile, recorded, start_run, store, write_run

from courtside.report.folder import RunFolder
from courtside.types import Event, Hint, Scored
from courtside.viewer.app import FILES, viewer_app
from courtside.viewer.guard import HEADERS, is_ours

TOKEN = "a-token"
SEND = {"x-courtside-token": TOKEN}
FIRST = "/api/steps/0/trajectories/0-0"


def opened(folder: RunFolder, hints: Path | None = None, host: str = "127.0.0.1") -> TestClient:
    app = viewer_app(folder, hints or folder.path / "hints.jsonl", host=host, token=TOKEN)
    return TestClient(app, base_url=f"http://{host}:8765")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "first")


@pytest.fixture
def client(folder: RunFolder) -> TestClient:
    return opened(folder)


def get(client: TestClient, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def put(client: TestClient, path: str, text: str) -> Any:
    return client.put(path, json={"text": text}, headers=SEND)


def delete(client: TestClient, path: str) -> Any:
    return client.request("DELETE", path, json={}, headers=SEND)


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    text = (folder.path / "hints.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def test_the_run_and_its_steps(client: TestClient, folder: RunFolder) -> None:
    run = get(client, "/api/run")
    assert run["name"] == "first" and "toolbox" in run["summary"]
    assert run["steps"] == [
        {"step": step, "trajectories": 6, "errors": 5, "hints": 5, "mine": 0} for step in (0, 1)
    ]
    own = run["own"]
    assert own["path"] == str(folder.path / "hints.jsonl")
    assert (own["count"], own["problem"], own["max_chars"]) == (0, None, 1000)
    assert own["recipe"] == f'[reader]\nkind = "person"\npath = "{own["path"]}"\n'


def test_the_list_of_a_step(client: TestClient, folder: RunFolder) -> None:
    rows = get(client, "/api/steps/1")["trajectories"]
    assert [row["id"] for row in rows] == [f"1-{i}" for i in range(6)]
    stored = {one.trajectory.id: one for one in folder.trajectories(1)}
    for row in rows:
        one = stored[row["id"]]
        assert row["tokens"] == one.trajectory.num_chosen and row["hints"] == len(one.hints)
        own = [turn for turn in one.trajectory.turns if turn.role == "assistant"]
        assert row["turns"] == len(own)
        assert row["errors"] == sum(bool(turn.events) for turn in own)
    assert rows[0]["asked"] == "What is the weather in Oslo?"
    assert rows[0]["grade"] == {
        "score": 0.5, "passed": False, "feedback": "2 of 4 requests were solved.",
    }  # fmt: skip


def test_a_trajectory_turn_by_turn(client: TestClient, folder: RunFolder) -> None:
    shown = get(client, FIRST)
    stored = folder.trajectories(0)[0]
    turns = shown["turns"]
    assert [(t["number"], t["role"]) for t in turns] == [
        (number, turn.role) for number, turn in enumerate(stored.trajectory.turns)
    ]
    assert [m["role"] for m in turns[0]["messages"]] == ["system", "user"]
    wrong = turns[1]
    assert wrong["text"] == stored.trajectory.turns[1].text
    assert wrong["events"] == [{"kind": "tool_not_found", "message": "Tool not found: weather"}]
    [hint] = wrong["hints"]
    judged = stored.hints[0]
    assert (hint["text"], hint["source"]) == (judged.hint.text, "rules:tool_not_found")
    assert hint["shift"] == judged.shift and hint["dropped"] is None
    assert turns[3]["hints"] == [] and all(turn["mine"] is None for turn in turns)


def test_the_gap_is_the_mean_over_what_both_spoke_of(
    client: TestClient, folder: RunFolder
) -> None:
    stored = folder.trajectories(0)[0]
    assert stored.student_logp is not None
    pairs = zip(stored.teacher_logp_by_token, stored.student_logp, stored.trajectory.turn_of,
                strict=True)  # fmt: skip
    gaps = [t - s for t, s, turn in pairs if turn == 1 and t is not None]
    turns = get(client, FIRST)["turns"]
    assert math.isclose(turns[1]["gap"], sum(gaps) / len(gaps), rel_tol=1e-6)
    assert turns[3]["gap"] is None and turns[0]["gap"] is None


def test_why_a_hint_was_dropped(client: TestClient) -> None:
    turns = get(client, "/api/steps/0/trajectories/0-3")["turns"]
    [hint] = [hint for turn in turns for hint in turn["hints"]]
    assert hint["dropped"] == "shift" and "hints.min_shift" in hint["why"]


def test_words_are_found_in_every_turn(client: TestClient) -> None:
    def found(words: str) -> list[str]:
        return get(client, f"/api/steps/0/search?words={words}")["ids"]

    assert found("oslo WEATHER") == [f"0-{i}" for i in range(6)]
    assert found("not found: calculator") == ["0-1", "0-3"]
    assert found("zebra") == [] and found("0-4") == ["0-4"]


def test_a_step_without_tokens_hints_or_turns(tmp_path: Path) -> None:
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, [])
        plain = Scored(trajectory=make_trajectory("x", 1), target=None)
        bare = Scored(trajectory=replace(make_trajectory("y", 1), turns=()), target=None)
        store(folder, 3, [plain, bare])
    client = opened(folder)
    assert [step["trajectories"] for step in get(client, "/api/run")["steps"]] == [0, 2]
    assert get(client, "/api/steps/0")["trajectories"] == []
    rows = get(client, "/api/steps/3")["trajectories"]
    assert [(row["tokens"], row["turns"]) for row in rows] == [(6, 1), (0, 0)]
    assert get(client, "/api/steps/3/trajectories/y")["turns"] == []


def test_a_run_without_trajectories(tmp_path: Path) -> None:
    start_run(tmp_path / "run").close()
    assert get(opened(RunFolder.read(tmp_path / "run")), "/api/run")["steps"] == []


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    with start_run(tmp_path / "run") as folder:
        client = opened(RunFolder.read(folder.path))
        assert get(client, "/api/run")["steps"] == []
        store(folder, 0)
        assert [s["step"] for s in get(client, "/api/run")["steps"]] == [0]
        assert len(get(client, "/api/steps/0")["trajectories"]) == 6
        get(client, FIRST)
        # A resumed run computes a step again.
        folder.rewind(0)
        assert get(client, "/api/run")["steps"] == []
        assert client.get(FIRST).status_code == 404
        store(folder, 0, make_hinted_batch(0)[1:])
        assert len(get(client, "/api/steps/0")["trajectories"]) == 5
        assert client.get(FIRST).status_code == 404
        assert get(client, "/api/steps/0/trajectories/0-1")["id"] == "0-1"


def test_files_are_read_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("/api/run", "/api/steps/0", "/api/steps/0/search?words=a", FIRST)
    before = [get(client, path) for path in paths]

    def fail(*_: object) -> None:
        raise AssertionError("a file that has not changed is read again")

    for name in ("read_outlines", "read_texts", "StepTable"):
        monkeypatch.setattr(f"courtside.viewer.steps.{name}", fail)
    assert [get(client, path) for path in paths] == before


def test_a_broken_step_is_told_and_the_others_are_there(
    client: TestClient, folder: RunFolder
) -> None:
    folder.stored_file(1).write_bytes(b"nothing")
    first, second = get(client, "/api/run")["steps"]
    assert first["trajectories"] == 6 and "cannot be read as Parquet" in second["problem"]
    assert client.get("/api/steps/1").status_code == 404


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
    shown = answer.json()
    assert shown["asked"] == HOSTILE
    assert shown["turns"][3]["events"][0]["message"] == "half \ud83d of a pair"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/steps/9", "no trajectories of step 9; stored are 2 steps, 0 to 1"),
        ("/api/steps/9/search?words=a", "no trajectories of step 9"),
        ("/api/steps/9/trajectories/0-0", "no trajectories of step 9"),
        ("/api/steps/0/trajectories/nope", "step 0 has no trajectory 'nope'"),
        ("/static/app.py", "there is no app.py here"),
        ("/static/..%2Fapp.py", "Not Found"),
        ("/docs", "Not Found"),
    ],
)
def test_what_is_not_there(client: TestClient, path: str, words: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and words in answer.json()["detail"]


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def test_a_hint_is_written_edited_and_removed(client: TestClient, folder: RunFolder) -> None:
    answer = put(client, f"{FIRST}/hints/1", " Read the\nlist. ").json()
    assert answer["mine"] == {"text": "Read the list.", "reason": ""}
    assert answer["own"]["count"] == 1
    assert lines(folder) == [{"trajectory": "0-0", "turn": 1, "text": "Read the list."}]
    assert get(client, FIRST)["turns"][1]["mine"]["text"] == "Read the list."
    assert get(client, "/api/steps/0")["trajectories"][0]["mine"] == 1
    assert [step["mine"] for step in get(client, "/api/run")["steps"]] == [1, 0]

    put(client, f"{FIRST}/hints/1", "Read it again.")
    assert get(client, FIRST)["turns"][1]["mine"]["text"] == "Read it again."
    before = (folder.path / "hints.jsonl").read_bytes()
    put(client, f"{FIRST}/hints/1", "Read it  again.")
    assert (folder.path / "hints.jsonl").read_bytes() == before

    put(client, f"{FIRST}/hints/3", "Another.")
    assert delete(client, f"{FIRST}/hints/1").json()["own"]["count"] == 1
    assert lines(folder) == [{"trajectory": "0-0", "turn": 3, "text": "Another."}]
    assert delete(client, f"{FIRST}/hints/1").status_code == 200


def test_an_edit_keeps_the_reason(client: TestClient, folder: RunFolder) -> None:
    row = {"trajectory": "0-0", "turn": 1, "text": "a", "reason": "by habit"}
    (folder.path / "hints.jsonl").write_text(json.dumps(row) + "\n")
    assert get(client, FIRST)["turns"][1]["mine"] == {"text": "a", "reason": "by habit"}
    put(client, f"{FIRST}/hints/1", "b")
    assert lines(folder)[-1] == row | {"text": "b"}


def test_another_file_for_the_hints(folder: RunFolder, tmp_path: Path) -> None:
    client = opened(folder, tmp_path / "mine.jsonl")
    assert put(client, f"{FIRST}/hints/1", "a").status_code == 200
    assert not (folder.path / "hints.jsonl").exists() and (tmp_path / "mine.jsonl").exists()


def test_what_others_write_meanwhile_is_shown_and_stays(
    client: TestClient, folder: RunFolder
) -> None:
    put(client, f"{FIRST}/hints/1", "mine")
    version = get(client, "/api/run")["own"]["version"]
    with (folder.path / "hints.jsonl").open("a") as file:
        file.write('{"trajectory": "0-0",  "turn": 3, "text": "theirs"}\n')
        file.write('{"trajectory": "elsewhere", "turn": 1, "text": "of another run"}\n')
    own = get(client, "/api/run")["own"]
    assert own["count"] == 3 and own["version"] != version
    assert get(client, FIRST)["turns"][3]["mine"]["text"] == "theirs"
    delete(client, f"{FIRST}/hints/1")
    assert [line["text"] for line in lines(folder)] == ["theirs", "of another run"]
    assert b'"0-0",  "turn"' in (folder.path / "hints.jsonl").read_bytes()


def test_a_recorded_conversation_is_named_by_its_task(tmp_path: Path) -> None:
    episode = hinted(make_episode("a-7"))
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, [recorded(episode, "000000-000-0")])
        store(folder, 1, [recorded(episode, "000001-004-0")])
    client = opened(folder)
    put(client, "/api/steps/0/trajectories/000000-000-0/hints/1", "Look.")
    assert [line["trajectory"] for line in lines(folder)] == ["task-7"]
    later = get(client, "/api/steps/1/trajectories/000001-004-0")
    assert later["turns"][1]["mine"]["text"] == "Look."
    assert [step["mine"] for step in get(client, "/api/run")["steps"]] == [1, 1]


def test_ids_with_odd_characters(tmp_path: Path) -> None:
    id = "a/b c?#%/hints/1"
    with start_run(tmp_path / "run") as folder:
        store(folder, 0, [recorded(hinted(make_episode("a-7")), id)])
    client = opened(folder)
    path = "/api/steps/0/trajectories/a%2Fb%20c%3F%23%25%2Fhints%2F1"
    assert get(client, path)["id"] == id
    assert put(client, f"{path}/hints/3", "x").status_code == 200


Send = Callable[[TestClient], Any]


@pytest.mark.parametrize(
    ("send", "status", "words"),
    [
        (lambda c: put(c, f"{FIRST}/hints/1", " \n\x00"), 422, "empty. Write a few words"),
        (lambda c: put(c, f"{FIRST}/hints/1", "x" * 1001), 422, "1,001 characters, and the reader"),
        (lambda c: put(c, f"{FIRST}/hints/0", "x"), 422, "the assistant's are 1, 3, 5, 7, 9, 11"),
        (lambda c: put(c, f"{FIRST}/hints/99", "x"), 422, "turn 99 of 0-0 is no assistant's turn"),
        (lambda c: put(c, f"{FIRST}/hints/-1", "x"), 422, "turn -1 of 0-0 is no assistant's turn"),
        (lambda c: put(c, f"{FIRST}/hints/one", "x"), 422, "path.turn: "),
        (lambda c: delete(c, f"{FIRST}/hints/0"), 422, "is no assistant's turn"),
        (lambda c: put(c, "/api/steps/0/trajectories/x/hints/1", "x"), 404, "no trajectory 'x'"),
        (lambda c: put(c, "/api/steps/7/trajectories/0-0/hints/1", "x"), 404, "of step 7"),
        (lambda c: c.put(f"{FIRST}/hints/1", json={"words": "x"}, headers=SEND), 422, "text"),
        (lambda c: c.put(f"{FIRST}/hints/1", json={"text": 5}, headers=SEND), 422, "body.text"),
        (lambda c: c.post(FIRST, json={}, headers=SEND), 405, "Not Allowed"),
    ],
)
def test_what_is_refused(
    client: TestClient, folder: RunFolder, send: Send, status: int, words: str
) -> None:
    answer = send(client)
    assert answer.status_code == status and words in answer.json()["detail"], answer.text
    assert not (folder.path / "hints.jsonl").exists()


def test_the_limit_is_that_of_the_recipes_own_reader(tmp_path: Path) -> None:
    person = {"kind": "person", "path": str(tmp_path / "h.jsonl"), "max_chars": 20, "max_hints": 2}
    several = {"kind": "several", "readers": [{"kind": "rules"}, person]}
    for number, reader in enumerate((person, several)):
        folder = write_run(tmp_path / f"run-{number}", steps=1, reader=reader)
        client = opened(folder)
        own = get(client, "/api/run")["own"]
        assert (own["max_chars"], own["max_hints"]) == (20, 2)
        assert put(client, f"{FIRST}/hints/1", "x" * 21).status_code == 422
        assert put(client, f"{FIRST}/hints/1", "x" * 20 + "\n").status_code == 200


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("nonsense\n", ":2: not valid JSON"),
        ('{"turn": 1}\n', ":2: `trajectory` must be a text"),
        ('{"trajectory": "0-0", "tu', "its last line is not finished"),
    ],
)
def test_a_broken_hints_file(
    client: TestClient, folder: RunFolder, rest: str, words: str
) -> None:
    put(client, f"{FIRST}/hints/1", "mine")
    path = folder.path / "hints.jsonl"
    whole = path.read_text()
    path.write_text(whole + rest)
    own = get(client, "/api/run")["own"]
    assert words in own["problem"] and own["count"] == 1
    assert get(client, FIRST)["turns"][1]["mine"]["text"] == "mine"
    for send in (lambda: put(client, f"{FIRST}/hints/3", "x"),
                 lambda: delete(client, f"{FIRST}/hints/1")):  # fmt: skip
        answer = send()
        assert answer.status_code == 409 and words in answer.json()["detail"]
    assert path.read_text() == whole + rest
    path.write_text(whole)
    assert get(client, "/api/run")["own"]["problem"] is None
    assert put(client, f"{FIRST}/hints/3", "x").status_code == 200


def test_a_file_that_cannot_be_written(folder: RunFolder, tmp_path: Path) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    client = opened(folder, place / "hints.jsonl")
    place.rmdir()
    answer = put(client, f"{FIRST}/hints/1", "x")
    assert answer.status_code == 422 and "could not be written (No such" in answer.json()["detail"]


# ── who may ──────────────────────────────────────────────────────────────────────────────────────


def test_the_page_and_its_parts(client: TestClient) -> None:
    page = client.get("/")
    assert f'content="{TOKEN}"' in page.text and "<script type" in page.text
    for name in FILES:
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200
        assert "innerHTML" not in answer.text and "insertAdjacent" not in answer.text
        assert "eval(" not in answer.text
    for answer in (page, client.get("/static/page.js"), client.get("/api/run"), client.get("/no")):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy and "http" not in policy and policy.startswith("default-src 'none'")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""])
def test_other_names_are_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/api/run", "/static/page.js"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 403 and "--host" in answer.json()["detail"]
        assert TOKEN not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"x-courtside-token": "another"}, 403),
        ({"x-courtside-token": "töken".encode("latin-1")}, 403),
        ({**SEND, "content-type": "text/plain"}, 415),
        ({**SEND, "content-type": "application/x-www-form-urlencoded"}, 415),
        ({**SEND, "host": "evil.example"}, 403),
        ({**SEND, "content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_only_our_page_writes(
    client: TestClient, folder: RunFolder, headers: dict[str, Any], status: int
) -> None:
    kind = {"content-type": "application/json"}
    content = b'{"text": "a"}'
    answer = client.put(f"{FIRST}/hints/1", content=content, headers={**kind, **headers})
    assert answer.status_code == status
    assert (folder.path / "hints.jsonl").exists() == (status == 200)
    if status != 200:
        assert delete_as(client, {**kind, **headers}).status_code == status


def delete_as(client: TestClient, headers: dict[str, Any]) -> Any:
    return client.request("DELETE", f"{FIRST}/hints/1", content=b"{}", headers=headers)


@pytest.mark.parametrize(
    ("named", "host", "ours"),
    [
        ("localhost:9000", "127.0.0.1", True),
        ("[::1]:8765", "127.0.0.1", True),
        ("LOCALHOST", "localhost", True),
        ("192.168.1.5:8765", "127.0.0.1", False),
        ("192.168.1.5:8765", "0.0.0.0", True),
        ("[fe80::1]:8765", "::", True),
        ("evil.example", "0.0.0.0", False),
        ("box.lan:1", "box.lan", True),
        ("localhost", "box.lan", False),
        ("[", "127.0.0.1", False),
    ],
)
def test_names_of_this_machine(named: str, host: str, ours: bool) -> None:
    assert is_ours(named, host) == ours


def test_the_hint_is_a_persons(client: TestClient, folder: RunFolder) -> None:
    from courtside.report.hints_file import parse_hints

    put(client, f"{FIRST}/hints/1", "Größe “prüfen” 🙂")
    hints, skipped = parse_hints((folder.path / "hints.jsonl").read_bytes(), name="f")
    assert hints == (Hint(trajectory="0-0", turn=1, text="Größe “prüfen” 🙂", source="person"),)
    assert not skipped
