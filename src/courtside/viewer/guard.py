"""Who may talk to the server: the page it has given out, under the address it was started for.

A web page from elsewhere can make a browser send requests here. Under a name of its own that leads
to this machine (DNS rebinding) it could even read the answers: so the name is checked. To write,
it would need the token, which stands in our page and which it cannot read.
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
"""The header in which the page sends back its token."""

READING = frozenset({"GET", "HEAD"})
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
    def __init__(self, app: ASGIApp, *, host: str, token: str) -> None:
        self.app = app
        self.host = host
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(scope["method"], Headers(scope=scope))
        if refused is None:
            await self.app(scope, receive, with_headers)
        else:
            await _answer(*refused, with_headers)

    def _refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        named = headers.get("host", "")
        if not is_ours(named, self.host):
            return 403, (
                f"this viewer was started for {self.host}, not for {named or 'no host'}. Open the "
                "address that `courtside view` printed, or start it with --host"
            )
        if method in READING:
            return None
        if not hmac.compare_digest(headers.get(TOKEN, "").encode(), self.token.encode()):
            return 403, (
                "the page is of an earlier start of the viewer. Load it again; what you are "
                "writing stays as a draft"
            )
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        return None if kind == "application/json" else (415, "send application/json")


def is_ours(named: str, host: str) -> bool:
    """Whether a Host header names the address that the server was started for.

    Any port will do: a tunnel has its own, and a foreign page cannot choose the name.

    >>> is_ours("localhost:9000", "127.0.0.1"), is_ours("evil.example:8765", "127.0.0.1")
    (True, False)
    """
    try:
        name = urlsplit(f"//{named}").hostname
    except ValueError:
        return False
    return name is not None and name in _names(host, name)


def _names(host: str, name: str) -> Iterable[str]:
    local = ("localhost", "127.0.0.1", "::1")
    if host in ("0.0.0.0", "::"):
        # All addresses of the machine. A number is never a name that leads elsewhere.
        own = socket.gethostname().lower()
        return (*local, own, own.split(".")[0], *([name] if _is_number(name) else []))
    return local if host in local else (host.lower(),)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _answer(status: int, detail: str, send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": encode_json({"detail": detail})})
