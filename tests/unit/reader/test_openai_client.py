"""The HTTP side, against a real server on this machine."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from scripted_trajectories import play
from support.chat_server import ChatServer, Response, completion, serving_chat

from courtside.chat.openai_client import OpenAIClient
from courtside.chat.reply_failures import quote_reply
from courtside.errors import RecipeError, RunError
from courtside.reader.loading import make_reader
from courtside.recipe.reader import EndpointConfig, ModelReaderConfig
from courtside.types import Message

KEY = "sk-not-a-real-key"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setenv("READER_KEY", f" {KEY}\n")
    with serving_chat(monkeypatch) as server:
        yield server


def asking(server: ChatServer, *, first_wait: float = 0.01, **fields: Any) -> OpenAIClient:
    endpoint = EndpointConfig(base_url=server.url, model="judge", **fields)
    return OpenAIClient(
        endpoint,
        field="reader.endpoint",
        max_new_tokens=99,
        temperature=0.0,
        shorten="lower reader.window_chars",
        first_wait=first_wait,
    )


def prompt(text: str) -> tuple[Message, ...]:
    return (Message(role="system", content="Read."), Message(role="user", content=text))


def test_what_is_sent_and_what_comes_back(server: ChatServer) -> None:
    ask = asking(
        server, api_key_env="READER_KEY", extra_body={"seed": 4, "extra": {"thinking": False}}
    )
    server.answer = lambda n, body: completion(body["messages"][1]["content"].upper())
    replies = ask([prompt("a"), prompt("ü\u2028<|x|>"), prompt("c")])
    assert [reply.text for reply in replies] == ["A", "Ü\u2028<|X|>", "C"], "in order"
    assert (replies[0].input_tokens, replies[0].output_tokens) == (11, 5)
    assert set(server.paths) == {"/v1/chat/completions"}
    body = next(item for item in server.bodies if item["messages"][1]["content"] == "a")
    assert body == {
        "model": "judge", "temperature": 0.0, "max_tokens": 99, "seed": 4,
        "extra": {"thinking": False},
        "messages": [{"role": "system", "content": "Read."}, {"role": "user", "content": "a"}],
    }  # fmt: skip
    assert all(item["Authorization"] == f"Bearer {KEY}" for item in server.headers)
    assert ask([]) == []


def test_no_key_is_sent_where_none_is_named(server: ChatServer) -> None:
    asking(server, extra_body={"max_completion_tokens": 5})([prompt("a")])
    assert "Authorization" not in server.headers[0]
    assert "max_tokens" not in server.bodies[0] and server.bodies[0]["max_completion_tokens"] == 5


def test_each_try_has_an_id_that_messages_and_logs_name(
    server: ChatServer, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_number: int, body: dict[str, Any]) -> Response:
        text = body["messages"][1]["content"]
        return {"busy": (503, {}, b"busy"), "bad": (400, {}, b"bad")}.get(text, completion("A"))

    server.answer = answer
    ask = asking(server, max_retries=1)
    with caplog.at_level(logging.INFO, "courtside.servers"):
        replies, errors = ask.try_each([prompt(t) for t in ("a", "busy", "bad")], max_failures=9)
    texts = [body["messages"][1]["content"] for body in server.bodies]
    sent = [headers["X-Request-Id"] for headers in server.headers]
    assert len(set(sent)) == 4
    assert all(re.fullmatch(r"courtside-[0-9a-f]{8}-\d", id) for id in sent)
    assert asking(server)([prompt("a")])[0].request_id not in sent, "clients share no id"
    by_text: dict[str, list[str]] = {}
    for text, id in zip(texts, sent, strict=True):
        by_text.setdefault(text, []).append(id)
    assert replies[0] is not None and [replies[0].request_id] == by_text["a"]
    named_ids = {*re.findall(r"courtside-\S+-\d+", " ".join(map(str, errors)))}
    assert named_ids == {by_text["busy"][1], by_text["bad"][0]}, "the last try, and the refused one"
    logged = [record for record in caplog.records if getattr(record, "event", "")]
    assert {record.request_id for record in logged} == {*by_text["busy"], *by_text["bad"]}
    assert all(
        (r.event, r.server, r.url) == ("request_failed", "reader.endpoint", server.url)
        and r.request_id in r.getMessage()
        for r in logged
    )


def test_a_reply_that_is_no_use_is_quoted_with_its_request(server: ChatServer) -> None:
    server.answer = lambda n, body: completion("Well,\nno")
    reply = asking(server)([prompt("a")])[0]
    name = server.headers[0]["X-Request-Id"]
    assert quote_reply(reply) == f"the reply to {name} is not as asked for: 'Well, no'"


@pytest.mark.parametrize("status", [429, 500, 502, 503, 408])
def test_a_busy_server_is_asked_again(server: ChatServer, status: int) -> None:
    server.answer = lambda n, body: (status, {}, b"busy") if n < 2 else completion("done")
    assert asking(server)([prompt("a")])[0].text == "done"
    assert len(server.bodies) == 3


def test_waits_grow_and_the_server_may_say_how_long(server: ChatServer) -> None:
    times: list[float] = []

    def answer(number: int, _body: dict[str, Any]) -> Response:
        times.append(time.perf_counter())
        headers = {"Retry-After": "0"} if number == 3 else {"Retry-After": "Wed, 21 Oct 2026"}
        return (429, headers, b"") if number < 4 else completion("done")

    server.answer = answer
    asking(server, first_wait=0.05)([prompt("a")])
    waits = [b - a for a, b in pairwise(times)]
    assert waits[0] >= 0.05 and waits[1] >= 0.1 and waits[2] >= 0.2 and waits[3] < 0.4


def test_a_server_that_stays_broken(server: ChatServer) -> None:
    server.answer = lambda n, body: (500, {}, f"boom {KEY}".encode())
    with pytest.raises(RunError) as caught:
        asking(server, max_retries=2, api_key_env="READER_KEY")([prompt("a")])
    excerpt = str(caught.value)
    assert "no answer after 3 tries, the last: status 500: boom *** (courtside-" in excerpt
    assert KEY not in excerpt
    assert f"reader.endpoint.base_url = '{server.url}'" in excerpt and "last checkpoint" in excerpt
    assert len(server.bodies) == 3


def test_one_failure_ends_the_others(server: ChatServer) -> None:
    def answer(_number: int, body: dict[str, Any]) -> Response:
        is_bad = body["messages"][1]["content"] == "bad"
        return (400, {}, b"too long") if is_bad else (503, {}, b"busy")

    server.answer = answer
    start = time.perf_counter()
    refused = r"refused the request courtside-\S+ \(status 400\): too long.*window"
    with pytest.raises(RunError, match=refused):
        asking(server, first_wait=30.0)([prompt("a"), prompt("bad"), prompt("c")])
    assert time.perf_counter() - start < 5


def test_a_timeout_is_a_try(server: ChatServer) -> None:
    def answer(number: int, _body: dict[str, Any]) -> Response:
        if number == 0:
            time.sleep(0.5)
        return completion("done")

    server.answer = answer
    assert asking(server, timeout=0.15)([prompt("a")])[0].text == "done"
    server.answer = lambda n, body: (time.sleep(0.4), completion("late"))[1]
    with pytest.raises(RunError, match=r"after 2 tries, the last: ReadTimeout"):
        asking(server, timeout=0.1, max_retries=1)([prompt("a")])


def test_nobody_there(server: ChatServer) -> None:
    ask = asking(server, max_retries=1)
    server.close()
    with pytest.raises(
        RunError, match=r"tries, the last: ConnectError.*Check that the server runs"
    ):
        ask([prompt("a")])


@pytest.mark.parametrize(
    ("status", "fix"),
    [(401, "api_key_env"), (403, "api_key_env"), (404, "ends in the version"), (301, "Check"),
     (422, "reader.window_chars")],
)  # fmt: skip
def test_a_refusal_is_not_retried(server: ChatServer, status: int, fix: str) -> None:
    server.answer = lambda n, body: (status, {"Location": "/elsewhere"}, f"key {KEY}".encode())
    with pytest.raises(RunError, match=fix) as caught:
        asking(server, api_key_env="READER_KEY")([prompt("a")])
    assert KEY not in str(caught.value) and len(server.bodies) == 1


@pytest.mark.parametrize(
    "content",
    [b"<html>hello</html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": "x"}]}',
     b"\xff", b"null", b"[" * 100_000],
)  # fmt: skip
def test_something_that_is_no_chat_completion(server: ChatServer, content: bytes) -> None:
    server.answer = lambda n, body: (200, {}, content)
    with pytest.raises(RunError, match=r"is no chat completion.*http://localhost:8000/v1"):
        asking(server)([prompt("a")])


@pytest.mark.parametrize("text", [None, 5, ""])
def test_an_empty_reply_is_a_reply(server: ChatServer, text: Any) -> None:
    server.answer = lambda n, body: completion(text, usage=None)
    assert [(r.text, r.input_tokens) for r in asking(server)([prompt("a")])] == [("", 0)]


def test_no_more_requests_at_once_than_asked_for(server: ChatServer) -> None:
    server.answer = lambda n, body: (time.sleep(0.02), completion("x"))[1]
    asking(server, max_concurrency=3)([prompt(str(n)) for n in range(12)])
    assert server.most_under_way == 3 and len(server.bodies) == 12


@pytest.mark.parametrize("value", [None, " ", "two\nlines", "schlüssel"])
def test_a_key_that_is_not_there(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("READER_KEY")
    if value is not None:
        monkeypatch.setenv("READER_KEY", value)
    with pytest.raises(RecipeError, match=r"api_key_env = 'READER_KEY'.*[Ss]et it"):
        asking(server, api_key_env="READER_KEY")


def test_the_whole_reader_over_http(server: ChatServer) -> None:
    replies = ['```json\n[{"turn": 1, "hint": "Look it up."}]\n```', "no idea"]
    server.answer = lambda n, body: completion(replies["second" in body["messages"][1]["content"]])
    config = ModelReaderConfig(
        kind="model", endpoint=EndpointConfig(base_url=server.url, model="judge")
    )
    trajectories = [play("guess", id="x"), play("second", id="y")]
    reading = make_reader(config, seed=0)(trajectories)
    assert [(h.trajectory, h.turn, h.text) for h in reading.hints] == [("x", 1, "Look it up.")]
    assert reading.counts == {
        "accepted": 1, "model/invalid_json": 1, "model/proposed": 1, "model/windows": 2,
        "model/input_tokens": 22, "model/output_tokens": 10,
    }  # fmt: skip


def test_the_key_is_in_no_record(server: ChatServer) -> None:
    ask = asking(server, api_key_env="READER_KEY")
    assert KEY not in repr(ask.endpoint) and KEY not in ask.endpoint.model_dump_json()
