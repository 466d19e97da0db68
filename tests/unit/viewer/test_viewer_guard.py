"""Who may talk to the viewer."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient
from unit.viewer.viewed_runs import (
    FIRST,
    SEND,
    TOKEN,
)

from courtside.report.folder.folder import RunFolder
from courtside.viewer.app import FILES
from courtside.viewer.guard import HEADERS, is_own_host


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
