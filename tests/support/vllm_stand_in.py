"""An HTTP server that misbehaves as a test says, where a vLLM server would answer.

What it says about tokens is made up: only faults are tested with it. Whether answers are understood
is tested with a real server (tests/vllm).
"""

from __future__ import annotations

import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Response = tuple[int, dict[str, str], bytes] | None
"""Status, headers and body; None: the connection is closed without an answer."""
GENERATE = "/inference/v1/generate"


def respond(tree: Any, status: int = 200, **headers: str) -> Response:
    return status, headers, json.dumps(tree).encode()


def generated(
    ids: list[int], logps: list[float], finish_reason: str = "length", label: str = "default"
) -> Response:
    content = [
        {"token_id": id, "logprob": logp, "rank": 1, "top_logprobs": [{"logprob": logp}]}
        for id, logp in zip(ids, logps, strict=False)
    ]
    choice = {
        "token_ids": ids,
        "finish_reason": finish_reason,
        "logprobs": {"content": content},
        "weight_versions": [{"version": label, "start": 0, "end": len(ids)}],
    }
    return respond({"choices": [choice]})


def prompt_logps(rows: list[Any]) -> Response:
    return respond({"choices": [{"token_ids": [0], "finish_reason": "length"}],
                    "prompt_logprobs": rows})  # fmt: skip


def uniform_rows(ids: list[int], logp: float = -1.0) -> list[Any]:
    return [None, *({str(id): {"logprob": logp, "rank": 9}} for id in ids[1:])]


class VllmStandIn:
    """Serves a model `tiny` with adapters, or with weights that are replaced, and lets
    `fault(number, path, body)` answer first."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, tokenizer: Any = None) -> None:
        """`tokenizer`: of the model that a run compares with; None: `/tokenize` is not there."""
        self.tokenizer = tokenizer
        self.fault: Callable[[int, str, Any], Response | str] = lambda n, path, body: "none"
        """Its answer; `none`: as a server in good order."""
        self.version_logp: Callable[[str], float] = lambda model: -1.0
        """Log-prob of every prompt token, by the model's name."""
        self.folder_logp: Callable[[str], float] = lambda folder: -1.0
        """The same of weights that were read from a folder; empty: those of the start."""
        self.adapters: dict[str, str] = {}
        self.restart()
        self.headers: list[dict[str, str]] = []
        self.bodies: list[tuple[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._respond(None)

            def do_POST(self) -> None:
                self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _respond(self, body: Any) -> None:
                with outer._lock:
                    number = outer.counts[self.path]
                    outer.counts[self.path] += 1
                    outer.headers.append(dict(self.headers))
                    outer.bodies.append((self.path, body))
                    outer.under_way += 1
                    outer.most_under_way = max(outer.most_under_way, outer.under_way)
                try:
                    response: Any = outer.fault(number, self.path, body)
                    if response == "none":
                        response = outer.answer(self.path, body)
                finally:
                    with outer._lock:
                        outer.under_way -= 1
                if response is None:
                    self.close_connection = True
                    return
                status, headers, content = response
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name.replace("_", "-"), value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client gave up waiting

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        if tls is not None:
            self.http.socket = tls.wrap_socket(self.http.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def restart(self) -> None:
        """As a server that was killed and started again."""
        self.adapters.clear()
        self.folder, self.label = "", "default"
        self.is_paused = False

    def answer_control(self, path: str, body: Any) -> Response:
        """Routes for weights; None: another one."""
        route, _, _ = path.partition("?")
        if route == "/weight_info":
            return respond({"weight_version": self.label})
        if route in ("/pause", "/resume"):
            self.is_paused = route == "/pause"
            return respond({"status": "done"})
        if route == "/collective_rpc":
            assert body["method"] == "reload_weights" and self.is_paused
            self.folder = body["kwargs"]["weights_path"]
            return respond({"results": [None]})
        if route == "/reset_prefix_cache":
            return respond({"success": True})
        if route == "/update_weight_version":
            self.label = body["new_version"]
            return respond({"success": True})
        if route == "/weight_checker":
            return respond({"checksums": {"w": str(self.folder_logp(self.folder))}})
        return None

    def answer(self, path: str, body: Any) -> Response:
        if (control := self.answer_control(path, body)) is not None:
            return control
        model = (body or {}).get("model", "tiny")
        if model != "tiny" and model not in self.adapters:
            return respond({"error": {"message": f"The model `{model}` does not exist."}}, 404)
        if path == "/v1/models":
            return respond({"data": [{"id": "tiny", "max_model_len": 512, "parent": None}]})
        if path == "/version":
            return respond({"version": "0.32.0"})
        if path == "/tokenize" and self.tokenizer is not None:
            if "messages" in body:
                return respond({"error": {"message": "no chat template"}}, 400)
            return respond({"tokens": self.tokenizer.encode(body["prompt"])})
        if path == "/detokenize" and self.tokenizer is not None:
            return respond({"prompt": self.tokenizer.decode(body["tokens"])})
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return respond({"error": {"message": "has already been loaded"}}, 400)
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, {}, b"Success"
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, {}, b"Success"
        assert path == GENERATE, path
        fields = body["sampling_params"]
        if "prompt_logprobs" in fields:
            if fields["prompt_logprobs"] > 20:
                return respond({"error": {"message": "greater than max allowed: 20"}}, 400)
            logp = self.version_logp(model) if self.adapters else self.folder_logp(self.folder)
            return prompt_logps(uniform_rows(body["token_ids"], logp))
        n = fields["max_tokens"]
        return generated([5] * n, [-1.0 / fields["temperature"]] * n, label=self.label)

    def num_samples(self) -> int:
        return sum(path == GENERATE for path, _ in self.bodies)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
