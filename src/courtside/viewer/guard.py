"""Access control: requests must name the server's own address, and writes need the page's token.

A foreign web page can make a browser send requests to this server. By DNS rebinding it could even
read the responses, so the Host header is checked. It cannot read the token, so it cannot write.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from courtside.report.folder.files import encode_json

TOKEN = "x-courtside-token"
"""The header with the page's token."""

READ_METHODS = frozenset({"GET", "HEAD"})
WRITE_METHODS = frozenset({"PUT", "DELETE"})
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    def __init__(self, app: ASGIApp, *, host: str, token: str, max_body: int) -> None:
        self.app = app
        self.host = host
        self.token = token
        self.max_body = max_body
        """Bytes of a request's body; a longer one is refused before it is read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._check(scope["method"], headers) or self._check_length(headers)
        messages: list[Message] = []
        if refusal is None and scope["method"] not in READ_METHODS:
            messages = await _receive_body(receive, self.max_body)
            refusal = None if messages else self._too_long()
        if refusal is not None:
            await _send_error(*refusal, with_headers)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, replay, with_headers)

    def _check(self, method: str, headers: Headers) -> tuple[int, str] | None:
        requested = headers.get("host", "")
        if not is_own_host(requested, self.host):
            return 403, (
                f"this viewer was started for {self.host}, not for {requested or 'no host'}. Open "
                "the address that `courtside view` printed, or start it with --host"
            )
        if method in READ_METHODS:
            return None
        if method not in WRITE_METHODS:
            return 405, f"{method} is not answered here. Use GET, HEAD, PUT or DELETE"
        if not hmac.compare_digest(headers.get(TOKEN, "").encode(), self.token.encode()):
            return 403, (
                "the page is from an earlier start of the viewer. Reload it; unsaved text stays as "
                "a draft"
            )
        # The token alone would do; a page of another origin has no business here even with it.
        origin = headers.get("origin")
        if origin is not None and _find_address(origin) != requested:
            return 403, f"the request comes from a page of {origin}, not from the viewer's own"
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        return None if kind == "application/json" else (415, "send application/json")

    def _check_length(self, headers: Headers) -> tuple[int, str] | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return 400, f"content-length: {length} is not a number of bytes"
        return self._too_long() if int(length) > self.max_body else None

    def _too_long(self) -> tuple[int, str]:
        return 413, f"the request has more than {self.max_body:,} bytes. A hint is a few sentences"


def is_own_host(requested: str, host: str) -> bool:
    """Whether a Host header names the address of the server.

    The port is ignored: tunnels change it, and a foreign page cannot choose the name.

    >>> is_own_host("localhost:9000", "127.0.0.1"), is_own_host("evil.example:8765", "127.0.0.1")
    (True, False)
    """
    try:
        name = urlsplit(f"//{requested}").hostname
    except ValueError:
        return False
    return name is not None and name in _allowed_names(host, name)


def _allowed_names(host: str, name: str) -> Iterable[str]:
    local = ("localhost", "127.0.0.1", "::1")
    if host in ("0.0.0.0", "::"):
        # All addresses of the machine. An IP address cannot be rebound by DNS.
        hostname = socket.gethostname().lower()
        ip = [name] if _is_ip_address(name) else []
        return (*local, hostname, hostname.split(".")[0], *ip)
    return local if host in local else (host.lower(),)


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _find_address(origin: str) -> str | None:
    """Host and port of an Origin header; None: it is none."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


async def _receive_body(receive: Receive, limit: int) -> list[Message]:
    """The messages of a body, which may come in chunks of unknown number; empty: too long."""
    messages, size = [], 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if size > limit:
            return []
        if not message.get("more_body", False):
            return messages


async def _send_error(status: int, detail: str, send: Send) -> None:
    # Closed: the rest of a body that was not read would be taken for the next request.
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": encode_json({"detail": detail})})
