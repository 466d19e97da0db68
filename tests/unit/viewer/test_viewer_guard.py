"""Who may talk to the viewer."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from unit.report.played import hinted, make_episode
from unit.viewer.viewed_runs import (
    FIRST,
    SEND,
    TOKEN,
    get,
    opened,
    put_hint,
    start_run,
    store,
)

from courtside.errors import UserError
from courtside.report.folder.folder import RunFolder
from courtside.types import Message
from courtside.viewer.app import FILES, viewer_app
from courtside.viewer.guard import HEADERS, Guard, is_own_host
from courtside.viewer.server import listen


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
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and "http" not in policy


@pytest.mark.parametrize("host", ["evil.example", "evil.example:1", "127.0.0.1.evil.example", ""])
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
        ({**SEND, "origin": "http://127.0.0.1:8765"}, 200),
        ({**SEND, "origin": "https://127.0.0.1:8765"}, 200),  # a proxy in front
        ({**SEND, "host": "localhost:9000", "origin": "http://localhost:9000"}, 200),  # a tunnel
        ({**SEND, "origin": "https://evil.example"}, 403),
        ({**SEND, "origin": "http://127.0.0.1:9999"}, 403),  # another server of this machine
        ({**SEND, "origin": "http://localhost:8765"}, 403),
        ({**SEND, "origin": "null"}, 403),
        ({**SEND, "origin": ""}, 403),
        ({**SEND, "origin": "http://["}, 403),
        ({**SEND, "content-length": "1e3"}, 400),
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


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "POST", "PATCH"])
def test_other_methods_are_not_answered(client: TestClient, method: str) -> None:
    answer = client.request(method, "/api/run", headers=SEND)
    assert answer.status_code == 405
    assert answer.json()["detail"].endswith("Use GET, HEAD, PUT or DELETE")


def test_head_is_get_without_the_content(client: TestClient) -> None:
    for path in ("/", "/api/run", "/static/page.js"):
        assert client.head(path).status_code == 200


def delete_as(client: TestClient, headers: dict[str, Any]) -> Any:
    return client.request("DELETE", f"{FIRST}/hints/1", content=b"{}", headers=headers)


@pytest.mark.parametrize(
    ("name", "host", "ours"),
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
def test_names_of_this_machine(name: str, host: str, ours: bool) -> None:
    assert is_own_host(name, host) == ours


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────


def send_body(guard: Guard, chunks: int, size: int, headers: dict[str, str]) -> tuple[int, int]:
    """Status of the answer, and how many chunks of the body were read."""
    num_chunks, statuses = 0, []

    async def receive() -> Any:
        nonlocal num_chunks
        num_chunks += 1
        return {"type": "http.request", "body": b"x" * size, "more_body": num_chunks < chunks}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    sent = {"host": "127.0.0.1:8765", "content-type": "application/json", **SEND, **headers}
    scope = {
        "type": "http",
        "method": "PUT",
        "path": f"{FIRST}/hints/1",
        "raw_path": f"{FIRST}/hints/1".encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }
    asyncio.run(guard(scope, receive, send))
    return statuses[0], num_chunks


@pytest.fixture
def guard(folder: RunFolder) -> Guard:
    return viewer_app(folder, folder.path / "hints.jsonl", host="127.0.0.1", token=TOKEN)


def test_a_long_body_is_refused_before_it_is_read(guard: Guard) -> None:
    assert send_body(guard, 50, 2**20, {"content-length": str(50 * 2**20)}) == (413, 0)


def test_a_body_of_unknown_length_is_read_up_to_the_limit(guard: Guard) -> None:
    status, num_chunks = send_body(guard, 10_000, 2**14, {"transfer-encoding": "chunked"})
    assert status == 413 and num_chunks * 2**14 <= guard.max_body + 2**14


@pytest.mark.parametrize("headers", [{"x-courtside-token": "other"}, {"origin": "http://evil"}])
def test_a_body_of_somebody_else_is_not_read(guard: Guard, headers: dict[str, str]) -> None:
    assert send_body(guard, 3, 100, headers) == (403, 0)


@pytest.mark.parametrize(
    "length", [b"Content-Length: 52428800", b"Transfer-Encoding: chunked"], ids=["known", "chunked"]
)
def test_fifty_megabytes_are_refused_on_the_wire(folder: RunFolder, length: bytes) -> None:
    listening = listen(folder, folder.path / "hints.jsonl", host="127.0.0.1", port=0)
    guard = listening.server.config.app
    assert isinstance(guard, Guard)
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        with socket.create_connection(listening.sockets[0].getsockname(), timeout=10) as client:
            path = f"{FIRST}/hints/1".encode()
            head = b"PUT " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n" + length + b"\r\n"
            head += b"X-Courtside-Token: " + guard.token.encode()
            client.sendall(head + b"\r\nContent-Type: application/json\r\n\r\n")
            if b"chunked" in length:
                piece = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
                client.sendall(piece * (guard.max_body // 0x4000 + 2))
            answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer
    finally:
        listening.server.should_exit = True
        thread.join()


def test_the_longest_hint_fits(client: TestClient) -> None:
    # A character outside the basic plane takes 12 bytes in JSON escapes.
    text = json.dumps({"text": "\U0001f642" * 1000})
    headers = {**SEND, "content-type": "application/json"}
    answer = client.put(f"{FIRST}/hints/1", content=text, headers=headers)
    assert answer.status_code == 200


# ── marks that reorder or hide text ──────────────────────────────────────────────────────────────


def test_invisible_marks_are_rendered_as_code_points(tmp_path: Path) -> None:
    text = "safe \u202eevil\u202c \u2066x\u2069 \u200bzero \x1b[31m 🙂\u200d🙂 \tשלום"
    episode = hinted(make_episode("0-0"))
    turns = list(episode.trajectory.turns)
    turns[1] = replace(turns[1], text=text)
    turns[2] = replace(turns[2], messages=(Message(role="tool", content=text),))
    with start_run(tmp_path / "run") as folder:
        trajectory = replace(episode.trajectory, turns=tuple(turns))
        store(folder, 0, [replace(episode, trajectory=trajectory)])
    answer = get(opened(folder), FIRST)["turns"]
    expected = (
        "safe [U+202E]evil[U+202C] [U+2066]x[U+2069] [U+200B]zero [U+001B][31m 🙂\u200d🙂 \tשלום"
    )
    assert answer[1]["text"] == answer[2]["messages"][0]["content"] == expected


def test_a_link_in_the_place_of_the_hints_file(client: TestClient, folder: RunFolder) -> None:
    elsewhere = folder.path.parent / "elsewhere.jsonl"
    (folder.path / "hints.jsonl").symlink_to(elsewhere)
    answer = put_hint(client, f"{FIRST}/hints/1", "x")
    assert answer.status_code == 409 and "became a symbolic link" in answer.json()["detail"]
    assert not elsewhere.exists()
    with pytest.raises(UserError, match=r"hints.jsonl: is a symbolic link.* Give the file itself"):
        listen(folder, folder.path / "hints.jsonl", host="127.0.0.1", port=0)
