"""A Hugging Face hub in a thread: it takes tokens, new repositories and commits of small files."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_right"


class Hub:
    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, dict[str, Any]] = {}
        """By name: `private`, and `files` by path."""
        self.refuse_commits = False

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path == "/api/whoami-v2":
            return 200, {"name": "ada", "type": "user"}
        if path == "/api/repos/create":
            tree = json.loads(body)
            name = f"{tree.get('organization') or 'ada'}/{tree['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this repo", "url": f"{self.url}/{name}"}
            is_private = bool(tree.get("private")) or tree.get("visibility") == "private"
            self.repositories[name] = {"private": is_private, "files": {}}
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return 200, {"files": files}
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            if self.refuse_commits:
                return 403, {"error": "You have no write access"}
            for line in body.splitlines():
                tree = json.loads(line)
                if tree["key"] == "file":
                    content = base64.b64decode(tree["value"]["content"])
                    self.repositories[match[1]]["files"][tree["value"]["path"]] = content
            address = f"{self.url}/{match[1]}"
            return 200, {"commitUrl": f"{address}/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"{method} {path}"}


@contextmanager
def run_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("authorization") == f"Bearer {TOKEN}":
                status, tree = hub.answer(self.command, self.path, body)
            else:
                status, tree = 401, {"error": "Invalid user token."}
            content = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_HEAD = reply

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
