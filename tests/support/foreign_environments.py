"""Environments of other conventions, from the docs' page on environments, and a tool server."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from courtside.recipe import Recipe
from courtside.recipe.load import parse_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples" / "environments"
PAGE = (REPOSITORY / "docs" / "environments.md").read_text(encoding="utf-8")
MODULES = ("trl_store", "text_game", "http_tools", "rhymes")


def copy_examples(folder: Path) -> None:
    """Where a user works: the page's files, and nothing of courtside."""
    for file in EXAMPLES.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    rhymes = re.search(r"^```python\n(# rhymes\.py\n.*?)^```$", PAGE, re.M | re.S)
    assert rhymes is not None
    (folder / "rhymes.py").write_text(rhymes[1])


def forget_examples() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)


def page_recipe(path: str, student: Path | str, **changes: Any) -> Recipe:
    """The recipe of the page for that class, made small; `changes` are those of [tasks]."""
    blocks = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
    [block] = [block for block in blocks if f'path = "{path}"' in block]
    tree = tomllib.loads(block)
    tree["tasks"] |= changes
    rollout = {"samples_per_prompt": 1, "max_new_tokens": 12} | tree.pop("rollout", {})
    return parse_recipe(
        {
            "student": {"model": str(student)},
            "teacher": {"kind": "self", "weights": "live"},
            "losses": [{"kind": "divergence", "on": "hinted_turns"}],
            "train": {"steps": 2, "prompts_per_step": 3, "learning_rate": 1e-3},
            "evaluate": {"num_tasks": 3},
            "rollout": rollout,
        }
        | tree,
        name="docs/environments.md",
    )


class ToolHandler(BaseHTTPRequestHandler):
    """A server of somebody else: `add` and `submit`, a session for each episode."""

    sessions: ClassVar[dict[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = json.dumps(self._answer(self.path.strip("/"), body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def _answer(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        if method == "task":
            return {
                "prompt": f"Add {body['index']} and 7, then submit.",
                "tools": ["add", "submit"],
            }
        if method == "start":
            session = str(len(self.sessions))
            self.sessions[session] = {"right": body["index"] + 7, "score": 0.0}
            return {"session": session}
        session_state = self.sessions[body["session"]]
        if method == "grade":
            return {"score": session_state["score"]}
        match body["tool"]:
            case "add":
                return {"result": str(sum(body["arguments"].values())), "done": False}
            case "submit":
                session_state["score"] = float(body["arguments"]["x"] == session_state["right"])
                return {"result": "Thanks.", "done": True}
        return {"error": "tool_not_found", "message": f"there is no {body['tool']}"}

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def run_tool_server() -> Iterator[ThreadingHTTPServer]:
    class Handler(ToolHandler):
        sessions: ClassVar[dict[str, dict[str, Any]]] = {}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"
