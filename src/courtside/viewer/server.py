"""Binds an address, serves the viewer on it, and opens a browser."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from courtside.errors import UserError
from courtside.report.folder.folder import RunFolder
from courtside.viewer.app import viewer_app

PORT = 8765
NUM_PORTS = 20
"""How many are tried, from `PORT` on, if none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A server that is bound to its address and not running yet."""

    server: uvicorn.Server
    sockets: tuple[socket.socket, ...]
    url: str

    def run(self) -> None:
        """Until Ctrl-C, SIGTERM or SIGHUP."""
        self._end_on_hangup()
        try:
            self.server.run(sockets=list(self.sockets))
        except KeyboardInterrupt:
            pass
        finally:
            for bound in self.sockets:
                bound.close()

    def _end_on_hangup(self) -> None:
        """As on the other two, which the server handles itself; `nohup` still ignores it."""
        number = getattr(signal, "SIGHUP", None)
        is_main = threading.current_thread() is threading.main_thread()
        if number is not None and is_main and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, self.server.handle_exit)


def listen(folder: RunFolder, hints: Path, *, host: str, port: int | None) -> Listening:
    """Bind to the port; None: the first free one from `PORT` on."""
    _check_hints_path(hints)
    app = viewer_app(folder, hints, host=host, token=secrets.token_urlsafe(24))
    bound = _bind_port(host, port)
    number = bound.getsockname()[1]
    config = uvicorn.Config(
        app, log_level="error", access_log=False, timeout_graceful_shutdown=1, server_header=False
    )
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url_host = f"[{name}]" if ":" in name else name
    return Listening(
        server=uvicorn.Server(config), sockets=(bound,), url=f"http://{url_host}:{number}/"
    )


def open_browser(url: str) -> None:
    """In the background; does nothing on a machine without a display."""
    variables = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if sys.platform == "linux" and not any(os.environ.get(name) for name in variables):
        return  # only text browsers, which would take over the terminal
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _bind_port(host: str, port: int | None) -> socket.socket:
    ports = range(PORT, PORT + NUM_PORTS) if port is None else [port]
    for number in ports:
        try:
            return _bind(host, number)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"--host {host} --port {number}: cannot be listened on ({error.strerror}). "
                    "Give an address of this machine, and a port above 1023"
                ) from None
    if port is None:
        raise UserError(f"ports {PORT} to {PORT + NUM_PORTS - 1} are all taken. Give a --port")
    raise UserError(f"--port {port}: another program uses it. Give another, or leave --port out")


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


def _check_hints_path(hints: Path) -> None:
    if hints.is_symlink():
        raise UserError(
            f"--hints {hints}: is a symbolic link, and hints would be written to another place "
            f"than it says. Give the file itself: {hints.resolve()}"
        )
    if hints.is_dir():
        raise UserError(f"--hints {hints}: is a folder. Give a file")
    if not hints.parent.is_dir():
        raise UserError(f"--hints {hints}: its folder does not exist. Create {hints.parent} first")
