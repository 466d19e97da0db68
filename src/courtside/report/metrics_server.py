"""HTTP endpoint of a run that trains: /metrics, /health and /live, read-only, in threads.

Whatever goes wrong while a request is answered stays in its thread: the run does not notice.
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from courtside.errors import UserError
from courtside.report.exposition import CONTENT_TYPE, format_metrics
from courtside.report.run_metrics import describe_metrics
from courtside.report.run_monitor import RunMonitor

REQUEST_SECONDS = 10
"""For a client to send its request."""


class MetricsServer:
    """Listens from the moment it is made; `with` closes it."""

    def __init__(self, monitor: RunMonitor, *, host: str, port: int) -> None:
        try:
            self._http = _QuietServer(host, port, _make_handler(monitor))
        except OSError as error:
            raise UserError(
                f"run.metrics_port = {port}: cannot listen on {host!r} ({error.strerror or error})."
                " Give another port, or 0 for any free one, and an address of this machine in "
                "run.metrics_host; or remove run.metrics_port"
            ) from None
        self.port: int = self._http.server_address[1]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.port}"
        threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        # As HTTPServer does, without asking a name server for the machine's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or a bug in here, prints nothing into the run's output."""


def _make_handler(monitor: RunMonitor) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version, sys_version = "courtside", ""

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._send(200, format_metrics(describe_metrics(monitor)), CONTENT_TYPE)
                case "/health":
                    health = monitor.health()
                    self._send_json(503 if health.status == "stalled" else 200, asdict(health))
                case "/live":
                    self._send_json(200, {"status": "alive"})
                case _:
                    self._send_json(404, {"error": "use /metrics, /health or /live"})

        def _send_json(self, status: int, tree: dict[str, Any]) -> None:
            self._send(status, json.dumps(tree) + "\n", "application/json")

        def _send(self, status: int, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
