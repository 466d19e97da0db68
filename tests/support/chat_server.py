"""A server of chat completions on this machine, which answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Response = tuple[int, dict[str, str], bytes]


def completion(text: Any, **more: Any) -> Response:
    body = {
        "choices": [{"message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 5},
        **more,
    }
    return 200, {}, json.dumps(body).encode()


class ChatServer:
    """Answers request after request with `answer(number, body)`."""

    def __init__(self) -> None:
        self.answer: Callable[[int, dict[str, Any]], Response] = lambda n, body: completion("[]")
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.under_way = self.most_under_way = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer.under_way += 1
                    outer.most_under_way = max(outer.most_under_way, outer.under_way)
                try:
                    status, headers, content = outer.answer(number, body)
                finally:
                    with lock:
                        outer.under_way -= 1
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except BrokenPipeError:
                    pass  # the client gave up waiting

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def serving_chat(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, dict[str, Any]], Any] | None = None
) -> Iterator[ChatServer]:
    """A server that is reached without a proxy."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    server = ChatServer()
    if answer is not None:
        server.answer = answer
    try:
        yield server
    finally:
        server.close()
