"""Listening: an address, a server on it, and a browser that opens it."""

from __future__ import annotations

import errno
import os
import secrets
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
"""How many are tried, from `PORT` on, where none was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A server that has its address and does not answer yet."""

    server: uvicorn.Server
    sockets: tuple[socket.socket, ...]
    url: str

    def run(self) -> None:
        """Until Ctrl-C."""
        try:
            self.server.run(sockets=list(self.sockets))
        except KeyboardInterrupt:
            pass
        finally:
            for one in self.sockets:
                one.close()


def listen(folder: RunFolder, hints: Path, *, host: str, port: int | None) -> Listening:
    """On this port; None: the first free one from `PORT` on."""
    _check_place(hints)
    app = viewer_app(folder, hints, host=host, token=secrets.token_urlsafe(24))
    own = _bound(host, port)
    number = own.getsockname()[1]
    config = uvicorn.Config(
        app, log_level="error", access_log=False, timeout_graceful_shutdown=1, server_header=False
    )
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{name}]" if ":" in name else name
    return Listening(server=uvicorn.Server(config), sockets=(own,), url=f"http://{shown}:{number}/")


def open_browser(url: str) -> None:
    """In the background; a machine without a screen has none, which is no error."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if sys.platform == "linux" and not any(os.environ.get(name) for name in screens):
        return  # only browsers that would take the terminal
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _bound(host: str, port: int | None) -> socket.socket:
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
    own = socket.socket(family, kind, protocol)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
        own.listen(128)
    except OSError:
        own.close()
        raise
    return own


def _check_place(hints: Path) -> None:
    if hints.is_dir():
        raise UserError(f"--hints {hints}: is a folder. Give a file")
    if not hints.parent.is_dir():
        raise UserError(f"--hints {hints}: its folder is not there. Create {hints.parent} first")
